"""Gathering the figures of a source: in parts of fixed size, in this process or in several."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragged_format.compact.files import CompactReader
from ragged_format.dataset import Dataset
from ragged_format.errors import OutOfRangeError, Where
from ragged_format.files import FileReader
from ragged_format.validate import validate_batch
from ragged_pipeline.pool import Pool
from ragged_pipeline.reports.statistics import Options, Statistics

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.snapshot import ShardReader
    from ragged_format.sources import Source

__all__ = ["Advance", "Part", "gather", "gather_part", "part_tasks", "parts_of"]

# About this much is done at once by one worker; depends on no option, so that the parts, and with
# them every figure, are the same for any number of workers.
PART_BYTES = 64 << 20
# A batch is looked at in slices of about this size: what is computed of it is larger than it is.
SLICE_BYTES = 8 << 20
# Starting processes takes longer than reading less than this.
_ALONE_BYTES = 256 << 20
# Parts per worker that are dealt before the figures of all of them are merged.
_AHEAD = 8

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """A run of batches of one file.

    Attributes
    ----------
    shard : int
        Number of the shard, 0 for a single file.
    first, last : int
        Batches ``[first, last)``; `last` is -1 where that is all.
    record : int
        Number of the first record in the whole source.
    rows, bytes : int
        Records and, about, bytes.
    """

    shard: int
    first: int
    last: int
    record: int
    rows: int
    bytes: int


def parts_of(source: Source) -> list[Part] | None:
    """Return the parts of a source in order, or None where it can only be read from the start."""
    if isinstance(source, Dataset):
        out = []
        record = 0
        for number, shard in enumerate(source.shards):
            if shard.bytes <= 2 * PART_BYTES or not isinstance(source.path, Path):
                # A shard of an object store would have to be fetched to be cut.
                out.append(Part(number, 0, -1, record, shard.rows, shard.bytes))
            else:
                bounds = _reader(source, number).bounds.tolist()
                out += _cut(number, record, bounds, shard.bytes)
            record += shard.rows
        return out
    if isinstance(source, FileReader | CompactReader):
        bounds = [0]
        for rows in source.rows_per_batch:
            bounds.append(bounds[-1] + rows)
        return _cut(0, 0, bounds, source.path.stat().st_size)
    return None


def _cut(shard: int, record: int, bounds: list[int], size: int) -> list[Part]:
    """Cut a file into parts of whole batches."""
    batches = len(bounds) - 1
    pieces = max(1, min(batches, size // PART_BYTES))
    edges = [batches * piece // pieces for piece in range(pieces + 1)]
    return [
        Part(shard, a, b, record + bounds[a], bounds[b] - bounds[a], size // pieces)
        for a, b in pairwise(edges)
    ]


def gather_part(source: Any, part: Part, options: Options) -> Statistics:
    """Return the figures of one part."""
    statistics = Statistics(source.ragged_schema, options)
    if isinstance(source, Dataset):
        reader: Any = _reader(source, part.shard)
        count, batch_of = len(reader.bounds) - 1, partial(reader.batch, keep=False)
    else:
        reader, count, batch_of = source, source.num_batches, source.batch
    record = part.record
    for index in range(part.first, count if part.last < 0 else part.last):
        batch = batch_of(index)
        _add(statistics, batch, record, Where(file=str(reader.path), batch=index))
        record += batch.num_rows
    return statistics


def _reader(source: Dataset, shard: int) -> ShardReader:
    """Return a reader of one shard that is closed when it goes: thousands are not held open."""
    return source.snapshot.reopened(verify=False).reader(shard)


def _add(statistics: Statistics, batch: pa.RecordBatch, record: int, where: Where) -> None:
    rows = max(1, batch.num_rows * SLICE_BYTES // max(batch.nbytes, 1))
    for start in range(0, batch.num_rows, rows):
        piece = batch.slice(start, rows)
        # Indices and lengths are used without further checks; values are shown as they are.
        validate_batch(piece, statistics.schema, "structural", where)
        statistics.add(piece, record + start)


def gather(
    source: Source,
    options: Options,
    *,
    workers: int | None = None,
    advance: Advance = lambda _: None,
) -> Statistics:
    """Return the figures of a whole source.

    Parameters
    ----------
    source : Source
    options : Options
    workers : int, optional
        Processes; by default one per core, or this one alone where there is little to read. The
        figures are the same for any number.
    advance : callable
        Called with the number of records done since the last call.

    Raises
    ------
    OutOfRangeError
        `options.row` is no record of the data (``RF-L002``).
    """
    parts = parts_of(source)
    statistics = Statistics(source.ragged_schema, options)
    if parts is None:
        for index, batch in enumerate(source.batches()):
            _add(statistics, batch, statistics.records, Where(batch=index))
            advance(batch.num_rows)
    else:
        for part, found in _in_order(source, parts, options, _workers(workers, parts)):
            statistics.merge(found)
            advance(part.rows)
    if options.row is not None and not 0 <= options.row < statistics.records:
        raise OutOfRangeError(
            "there is no such record", expected=f"0 <= row < {statistics.records}",
            got=options.row,
        )  # fmt: skip
    return statistics


def _workers(asked: int | None, parts: list[Part]) -> int:
    if asked is None:
        small = sum(part.bytes for part in parts) < _ALONE_BYTES
        asked = 1 if small else len(os.sched_getaffinity(0))
    return min(asked, len(parts))


def _in_order(
    source: Any, parts: list[Part], options: Options, workers: int
) -> Iterator[tuple[Part, Statistics]]:
    if workers <= 1:
        yield from ((part, gather_part(source, part, options)) for part in parts)
        return
    yield from _in_processes(source, parts, options, workers)


def _in_processes(
    source: Any, parts: list[Part], options: Options, workers: int
) -> Iterator[tuple[Part, Statistics]]:
    """Yield each part with its figures, in order; a few parts per worker are held at a time."""
    given = base64.b64encode(pickle.dumps((source, options))).decode()
    setup = {"do": "ragged_pipeline.reports.collect:part_tasks", "given": given}
    with Pool(setup, workers=workers) as pool:
        for start in range(0, len(parts), workers * _AHEAD):
            stop = min(start + workers * _AHEAD, len(parts))
            orders = {number: astuple(parts[number]) for number in range(start, stop)}
            early: dict[int, Statistics] = {}
            number = start
            for index, record in pool.run(orders, advance=lambda _: None):
                early[index] = pickle.loads(base64.b64decode(record["figures"]))  # noqa: S301
                while number in early:
                    yield parts[number], early.pop(number)
                    number += 1


def part_tasks(setup: dict[str, Any]) -> Callable[[Any, Callable[[int], None]], dict[str, Any]]:
    """Return what gathers parts in a worker process."""
    source, options = pickle.loads(base64.b64decode(setup["given"]))  # noqa: S301

    def do(order: Any, advance: Callable[[int], None]) -> dict[str, Any]:  # noqa: ARG001
        found = gather_part(source, Part(*order), options)
        return {"figures": base64.b64encode(pickle.dumps(found)).decode()}

    return do
