"""Files in the page cache to tensors, in order: the loader against memcpy of the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

import ragged_format as rf
from benchmarks import shapes
from benchmarks.harness import Figure, Settings, interleave, median_ratio, rate_text, raw
from ragged_format.lists import flat
from ragged_format.schema import RECORD
from ragged_format.torch import RaggedLoader

__all__ = ["run", "write_dataset"]

# Different samples; the dataset repeats them under new ids until it has its size.
DISTINCT = 512
REPEATS = 12
# Samples per batch. Goals hold for the first, which is as large as a stored record batch: reading
# at full bandwidth. With fewer, the fixed cost of a batch shows, and the copy's buffers fit in a
# cache.
SIZES = (256, 64, 16)
PEERS = {"memcpy": "memcpy", "pieces": "memcpy by column from the files"}
# Buffers that the copy goes round over, as many as the loader's ring has.
RING = 4


def run(settings: Settings) -> list[Figure]:
    """Time epochs of loaders that are opened for it, and later epochs of one loader."""
    distinct, repeats = (64, 2) if settings.quick else (DISTINCT, REPEATS)
    with tempfile.TemporaryDirectory(prefix="ragged-bench-") as folder:
        path = Path(folder) / "data"
        write_dataset(path, distinct, repeats)
        figures = []
        for size in SIZES:
            goals = {"later": 0.9, "verified": 0.6} if size == SIZES[0] else {}
            figures += _compare(path, size, goals, settings)
        return figures


def _compare(path: Path, size: int, goals: dict[str, float], settings: Settings) -> list[Figure]:
    with RaggedLoader(path, size) as loader, RaggedLoader(path, size, prefetch=0) as inline:
        sizes = [batch.nbytes for batch in loader]
        contenders: dict[str, Callable[[], object]] = {
            "later": lambda: epoch(loader),
            "inline": lambda: epoch(inline),
            "first": lambda: first_epoch(path, size, verify=False),
            "verified": lambda: first_epoch(path, size, verify=True),
            "memcpy": memcpy(sizes),
            "pieces": copy_pieces(path, size, max(sizes)),
        }
        samples = interleave(contenders, settings)
    total = sum(sizes)
    names = {
        "later": "verification off",
        "verified": "digests verified, first epoch",
        "first": "verification off, first epoch",
        "inline": "verification off, prefetch=0",
    }
    pairs = [(way, "memcpy") for way in names] + [("later", "pieces")]
    return [
        Figure(
            f"{len(sizes)} batches of {size}, {total / 1e6:.0f} MB: {names[way]}",
            rate_text(total, samples[way]),
            f"{PEERS[peer]} {rate_text(total, samples[peer])}",
            median_ratio(samples[peer], samples[way]),
            goals.get(way) if peer == "memcpy" else None,
            median_ratio(samples[peer], samples[way], "wall"),
            details=raw(ours=samples[way], peer=samples[peer]),
        )
        for way, peer in pairs
    ]


def epoch(loader: RaggedLoader) -> int:
    """Take every batch of one epoch and return the bytes of all."""
    return sum(batch.nbytes for batch in loader)


def first_epoch(path: Path, size: int, *, verify: bool) -> int:
    """Open the dataset and take one epoch: maps the files, allocates the arenas, verifies."""
    with RaggedLoader(path, size, verify=verify) as loader:
        return epoch(loader)


def memcpy(sizes: list[int]) -> Callable[[], None]:
    """Return a call that copies as many bytes, batch by batch, into a ring of buffers.

    The source is memory of the process that was touched before: no page faults, no file.
    """
    source = np.ones(sum(sizes), np.uint8)
    ring = [np.ones(max(sizes), np.uint8) for _ in range(RING)]

    def copy() -> None:
        start = 0
        for number, size in enumerate(sizes):
            np.copyto(ring[number % RING][:size], source[start : start + size])
            start += size

    return copy


def copy_pieces(path: Path, size: int, nbytes: int) -> Callable[[], None]:
    """Return a call that copies every list column of every batch on its own, from mapped files.

    What remains of a loader if finding out what to copy where costs nothing.
    """
    batches = []
    for stored in rf.Dataset(path).batches():
        names = [c.name for c in rf.parse_schema(stored.schema) if c.axis != RECORD]
        for start in range(0, stored.num_rows, size):
            part = stored.slice(start, size)
            columns = [flat(part.column(name)).numpy() for name in names]
            batches.append([column.view(np.uint8) for column in columns])
    ring = [np.ones(nbytes, np.uint8) for _ in range(RING)]

    def copy() -> None:
        for number, pieces in enumerate(batches):
            memory, start = ring[number % RING], 0
            for piece in pieces:
                memory[start : start + len(piece)] = piece
                start += len(piece)

    return copy


def write_dataset(path: Path, distinct: int, repeats: int) -> None:
    """Write `distinct` samples `repeats` times, each time under new sample ids."""
    batch = shapes.to_arrow(shapes.many(distinct))
    index = batch.schema.get_field_index("sample_id")
    with rf.Writer(path, batch.schema) as writer:
        for repeat in range(repeats):
            ids = [f"{repeat * distinct + i:08d}/0" for i in range(distinct)]
            writer.write(batch.set_column(index, batch.schema.field(index), pa.array(ids)))
