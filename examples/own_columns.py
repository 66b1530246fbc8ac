"""Declare columns on three axes, one of them an axis of one's own; packing and padding follow.

Prints:

entropies on target: [1.5, 0.25, 1.5, 2.0]
routed_experts on token: torch.Size([4, 2, 2])
judge_scores on judge: [[0.5, 1.0], [0.0, 0.0], [0.5, 0.0], [1.0, 0.0]]
"""

import pyarrow as pa

import ragged_format as rf
from ragged_format.packing import pack_row
from ragged_format.torch import RaggedBatch

SCHEMA = rf.sample_schema(
    vocab_size=100,
    columns=[
        rf.Column("entropies", "target", pa.float32()),
        rf.Column("routed_experts", "token", pa.int16(), shape=(2, 2), fill=-1),
        rf.Column("judge_counts", "target", pa.int32(), opens="judge"),
        rf.Column("judge_scores", "judge", pa.float32()),
    ],
)
EXPERTS = [0, 1, 2, 3]  # 2 layers, 2 experts each, flat


def main() -> None:
    samples = pa.RecordBatch.from_pylist([
        {
            "sample_id": "a", "input_ids": [7, 8, 9], "completion_mask": [0, 1, 1],
            "entropies": [1.5, 0.25], "routed_experts": [EXPERTS] * 3,
            "judge_counts": [2, 0], "judge_scores": [0.5, 1.0],
        },
        {
            "sample_id": "b", "input_ids": [7, 8, 6], "completion_mask": [0, 1, 1],
            "entropies": [1.5, 2.0], "routed_experts": [EXPERTS] * 3,
            "judge_counts": [1, 1], "judge_scores": [0.5, 1.0],
        },
    ], schema=SCHEMA)  # fmt: skip
    rf.validate(samples)
    row = pack_row(samples, packing="tree")  # tokens 7 and 8 are stored once
    batch = RaggedBatch.from_arrow(row)
    print("entropies on target:", batch["entropies"].tolist())
    print("routed_experts on token:", batch["routed_experts"].shape)
    print("judge_scores on judge:", batch.padded("judge_scores").tolist())


if __name__ == "__main__":
    main()
