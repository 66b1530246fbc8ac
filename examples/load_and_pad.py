"""Pack samples into rows, load a row, and make the tables that a loss needs.

Prints:

row 0: 7 tokens for 9, 4 targets
candidate_ids (4, 4): [4, 8, -1, -1]
in buckets: [(1, 1), (2, 2), (1, 4)]
widest head: 2
"""

import tempfile
from pathlib import Path

import pyarrow as pa

import ragged_format as rf
from ragged_format.packing import PackReport, pack_row
from ragged_format.torch import RaggedLoader

SCHEMA = rf.sample_schema(
    vocab_size=100,
    columns=[
        "candidate_counts", "candidate_ids", "topk_counts", "topk_ids", "topk_log_probs",
    ],
)  # fmt: skip


def main(folder: Path) -> None:
    samples = pa.RecordBatch.from_pylist([
        {
            "sample_id": "a", "input_ids": [1, 2, 8, 9, 3], "completion_mask": [0, 0, 1, 1, 0],
            "candidate_counts": [2, 1], "candidate_ids": [4, 8, 9],
            "topk_counts": [2, 1], "topk_ids": [8, 4, 9], "topk_log_probs": [-0.25, -1.75, 0.0],
        },
        {
            "sample_id": "b", "input_ids": [1, 2, 5, 6], "completion_mask": [0, 0, 1, 1],
            "candidate_counts": [4, 2], "candidate_ids": [4, 5, 8, 11, 6, 7],
            "topk_counts": [2, 2], "topk_ids": [4, 5, 7, 6],
            "topk_log_probs": [-0.75, -1.25, -0.5, -1.0],
        },
    ], schema=SCHEMA)  # fmt: skip
    report = PackReport()
    row = pack_row(samples, packing="tree", report=report)
    with rf.Writer(folder / "packed", row.schema) as writer:
        writer.write(row)

    loader = RaggedLoader(folder / "packed", batch_size=1, shuffle=True, seed=0)
    for number, batch in enumerate(loader):
        print(
            f"row {number}: {report.unique_tokens} tokens for {report.tokens},"
            f" {report.targets} targets"
        )
        table = batch.padded("candidate_ids")
        print(f"candidate_ids {tuple(table.shape)}:", table[0].tolist())
        buckets = batch.buckets("candidate_ids")
        print("in buckets:", [tuple(table.shape) for _, table in buckets])
        print("widest head:", batch.width("topk"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
