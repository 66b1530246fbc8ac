"""Write samples to a dataset, read them back in three ways, and see what an error says.

Prints:

2 records
a: [7, 8, 9]
[2, 1]
RF-I013 row 0, column 'candidate_counts', position 0
"""

import tempfile
from pathlib import Path

import pyarrow as pa

import ragged_format as rf

SCHEMA = rf.sample_schema(
    vocab_size=100, columns=["rollout_log_probs", "candidate_counts", "candidate_ids"]
)


def samples() -> pa.RecordBatch:
    """Two completions; each scored token has the set of ids from which it was drawn."""
    records = [
        {
            "sample_id": "a", "input_ids": [7, 8, 9], "completion_mask": [0, 1, 1],
            "rollout_log_probs": [-0.5, 0.0],
            "candidate_counts": [2, 1], "candidate_ids": [4, 8, 9],
        },
        {
            "sample_id": "b", "input_ids": [7, 5], "completion_mask": [0, 1],
            "rollout_log_probs": [-2.0],
            "candidate_counts": [3], "candidate_ids": [4, 5, 8],
        },
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(records, schema=SCHEMA)


def main(folder: Path) -> None:
    with rf.Writer(folder / "samples", SCHEMA) as writer:
        writer.write(samples())

    dataset = rf.Dataset(folder / "samples")
    print(dataset.num_rows, "records")
    first = dataset[0]  # a batch of one record, mapped from the file
    print(f"{first['sample_id'][0]}: {first['input_ids'][0].as_py()}")
    for batch in dataset.batches():
        print(batch["candidate_counts"][0].as_py())

    wrong = samples().to_pylist()
    wrong[0]["candidate_ids"] = [4, 6, 9]  # the sampled token 8 is not in its set
    try:
        rf.validate(pa.RecordBatch.from_pylist(wrong, schema=SCHEMA))
    except rf.InvariantError as error:
        print(error.code, error.where)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
