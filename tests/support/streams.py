"""What tests of streams that are not right share."""

from support.containers import (
    small_batch,
)

import ragged_format as rf

TINY = rf.sample_schema(vocab_size=100, columns=["group_id"])


def tiny_batches():
    return [small_batch((2, 1), seed=i, prefix=f"{i}-", schema=TINY) for i in range(2)]


def read(data):
    return list(rf.read_stream(data))
