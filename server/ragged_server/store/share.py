"""Which rank a record belongs to: by hash, so that groups stay whole and order plays no part."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ragged_format.errors import LimitExceededError

__all__ = ["check_share", "in_share", "share_hashes"]


def share_hashes(batch: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """Return xxh3-64 of each record's group_id, or of its sample_id where that is null, (n,).

    Examples
    --------
    >>> batch = pa.record_batch({"sample_id": ["a", "b"], "group_id": ["g", None]})
    >>> [hex(value) for value in share_hashes(batch).tolist()]
    ['0xaa19e6ddf2f9b697', '0x575a0b1c44d8843f']
    """
    names = batch.column("sample_id").to_pylist()
    if "group_id" in batch.schema.names:
        groups = batch.column("group_id").to_pylist()
        names = [
            name if group is None else group for group, name in zip(groups, names, strict=True)
        ]
    hashes = map(xxhash.xxh3_64_intdigest, map(str.encode, names))
    return np.fromiter(hashes, np.uint64, batch.num_rows)


def in_share(hashes: npt.NDArray[np.uint64], rank: int, world_size: int) -> npt.NDArray[np.bool_]:
    """Return which records are of `rank`'s share, (n,) bool: the shares of all ranks are all."""
    mine: npt.NDArray[np.bool_] = hashes % np.uint64(world_size) == np.uint64(rank)
    return mine


def check_share(rank: int, world_size: int) -> None:
    """Raise ``RF-L001`` unless 0 <= rank < world_size."""
    sizes = (rank, world_size)
    if any(type(size) is not int for size in sizes) or not 0 <= rank < world_size:
        raise LimitExceededError(
            "rank is the number of one of world_size readers",
            expected="0 <= rank < world_size", got=f"rank {rank}, world_size {world_size}",
        )  # fmt: skip
