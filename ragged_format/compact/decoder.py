"""Reading one compact batch: the whole of it, some columns, or some records.

Lengths are read whole, since they say where a record lies in the other columns; of these, only what
belongs to the records asked for is decoded. Only log-probs that a head shares
(:func:`ragged_format.compact.heads.decode_shared`) must be decoded from the first record on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.compact.heads import decode_positions, decode_shared
from ragged_format.compact.planes import Block, Planes
from ragged_format.compact.sets import decode_sets
from ragged_format.errors import CorruptError, RaggedError, Where
from ragged_format.lists import Int64, offsets_of, to_list
from ragged_format.schema import RECORD

if TYPE_CHECKING:
    from ragged_format.schema import Column, RaggedSchema

__all__ = ["HEADER", "RECORDS", "BatchDecoder"]

HEADER, RECORDS = "header", "record"
# What numpy, json and Arrow raise on data that was not written by the encoder.
_FOREIGN = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RecursionError,
    StopIteration, TypeError, ValueError, pa.ArrowException,
)  # fmt: skip
Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[Any]


class BatchDecoder:
    """One encoded batch; keeps its lengths, so that records can be asked for again and again.

    Parameters
    ----------
    stored : callable
        Returns the value of a column that :func:`ragged_format.compact.encoder.encode_batch` made,
        (s,) uint8.
    schema : RaggedSchema
        Declarations of the encoded data.

    Raises
    ------
    CorruptError
        The blocks contradict the header (``RF-C001``).
    """

    def __init__(self, stored: Callable[[str], Bytes], schema: RaggedSchema) -> None:
        self._stored = stored
        self.schema = schema
        self.opening = {axis.counts for axis in schema.axes.values()} - {None}
        self._lengths: dict[str, Int64] = {}
        self._bounds: dict[str, Int64] = {}
        self._counts: dict[str, Values] = {}
        with _typed():
            header = json.loads(self._stored(HEADER).tobytes())
            self.blocks = {name: Block(*block) for name, block in header["blocks"].items()}
            data = pa.py_buffer(self._stored(RECORDS))
            self.records = pa.ipc.open_stream(data).read_next_batch()
            self.num_rows = int(header["rows"])
        if self.records.num_rows != self.num_rows:
            raise CorruptError(
                "records are missing", expected=self.num_rows, got=self.records.num_rows
            )

    def batch(
        self, wanted: RaggedSchema | None = None, rows: tuple[int, int] | None = None
    ) -> pa.RecordBatch:
        """Return the data, bit for bit.

        Parameters
        ----------
        wanted : RaggedSchema, optional
            Columns wanted. Others are not decoded, unless these need them. By default all.
        rows : (int, int), optional
            First record wanted, and the one after the last. By default all.

        Raises
        ------
        CorruptError
            The blocks contradict the header (``RF-C001``).
        """
        wanted = self.schema if wanted is None else wanted
        first, last = rows or (0, self.num_rows)
        with _typed():
            part = _Part(self, first, last)
            arrays = [part.column(column) for column in wanted]
            return pa.RecordBatch.from_arrays(arrays, schema=wanted.to_arrow())

    def needs_all(self, wanted: RaggedSchema) -> bool:
        """Return whether some records of these columns cost as much as all."""
        blocks = (self.blocks.get(f"column:{column.name}") for column in wanted)
        return any(block and str(block.transform).startswith("shared:") for block in blocks)

    @cached_property
    def all(self) -> _Part:
        """All records, each column decoded once."""
        return _Part(self, 0, self.num_rows)

    def bounds(self, axis: str) -> Int64:
        """Return the offsets of an axis per record, from 0."""
        known = self._bounds.get(axis)
        if known is None:
            counts = self.schema.axes[axis].counts
            if counts is None:
                name = f"axis:{axis}"
                block = self.blocks[name]
                _expect_transform(block, None, name)
                if block.size != self.num_rows:
                    raise CorruptError(
                        "an axis has not one length for each record", where=Where(column=name),
                        expected=self.num_rows, got=block.size,
                    )  # fmt: skip
                known = offsets_of(Planes.of(block, self._stored(name)).array())
            else:
                outer = self.bounds(self.schema[counts].axis)
                known = offsets_of(self.lengths(axis))[outer]
            self._bounds[axis] = known
        return known

    def lengths(self, axis: str) -> Int64:
        """Return the counts that open an axis, of all records."""
        known = self._lengths.get(axis)
        if known is None:
            counts = self.schema[str(self.schema.axes[axis].counts)]
            self._lengths[axis] = known = self.counts(counts).astype(np.int64)
        return known

    def counts(self, column: Column) -> Values:
        """Return a counts column of all records."""
        known = self._counts.get(column.name)
        if known is None:
            planes = self.planes(column)
            _expect_transform(self.blocks[f"column:{column.name}"], None, column.name)
            self._counts[column.name] = known = planes.array()
        return known

    def planes(self, column: Column) -> Planes:
        """Return what is stored of a column, whose size is that of its axis."""
        name = f"column:{column.name}"
        block = self.blocks[name]
        # Before memory is allocated: planes of one byte each say nothing about a size.
        size = int(self.bounds(column.axis)[-1]) * math.prod(column.shape)
        if block.size != size and (block.transform is None or block.size > size):
            raise CorruptError(
                "a block has not the size of its axis", where=Where(column=column.name),
                expected=size, got=block.size,
            )  # fmt: skip
        return Planes.of(block, self._stored(name))

    def order(self, name: str) -> Int64:
        """Return the ids of a set column by rank."""
        block = self.blocks[f"order:{name}"]
        ranked = self.blocks[f"column:{name}"].size
        _expect_transform(block, "differences", f"order:{name}")
        if block.size > ranked or np.dtype(block.dtype).kind not in "iu":
            raise CorruptError(
                "ranks are of ids, at most as many as elements", where=Where(column=name),
                expected=f"at most {ranked} integers", got=f"{block.size} of {block.dtype}",
            )  # fmt: skip
        steps = Planes.of(block, self._stored(f"order:{name}")).array()
        # In their own type, in which a difference may have wrapped around.
        return np.cumsum(steps, dtype=steps.dtype).astype(np.int64)


class _Part:
    """Records `first` to `last` of one batch; each array of theirs is decoded once."""

    def __init__(self, batch: BatchDecoder, first: int, last: int) -> None:
        self._batch = batch
        self._schema = batch.schema
        self._first = first
        self._last = last
        self._is_all = first == 0 and last == batch.num_rows
        self._values: dict[str, Values] = {}
        self._offsets: dict[str, Int64] = {}

    def column(self, column: Column) -> pa.Array:
        if f"column:{column.name}" not in self._batch.blocks:
            number = self._last - self._first
            array = self._batch.records.column(column.name).slice(self._first, number)
            return array if column.axis == RECORD else array.cast(column.arrow_type)
        return to_list(self.values(column), self._offsets_of(column.axis), column)

    def values(self, column: Column) -> Values:
        """Return the flat values of a number column."""
        known = self._values.get(column.name)
        if known is None:
            self._values[column.name] = known = self._decoded(column)
        return known

    def _decoded(self, column: Column) -> Values:
        width = math.prod(column.shape)
        first, last = self._span(column.axis)
        if column.name in self._batch.opening:
            counts = self._batch.counts(column)
            # A copy, so that a few records do not keep all counts.
            return counts if self._is_all else counts[first:last].copy()
        planes = self._batch.planes(column)
        transform, _, axis = str(planes.transform or "").partition(":")
        if not transform:
            return planes.part(first * width, last * width).array()
        dtype = column.type.to_pandas_dtype()
        if transform in ("ranks", "positions") and planes.dtype.kind != "u":
            raise CorruptError(
                f"{transform} are unsigned integers", where=Where(column=column.name),
                expected="an unsigned type", got=planes.dtype.str,
            )  # fmt: skip
        if transform == "ranks":
            order = self._batch.order(column.name)
            stored = planes if self._is_all else planes.part(*self._ranks(column.axis))
            return decode_sets(stored, order, self._counts(column.axis), self._sampled, dtype)
        if transform == "positions":
            return decode_positions(
                planes.part(first, last), self._counts(column.axis), self._named(f"{axis}_ids"),
                self._counts(axis), dtype,
            )  # fmt: skip
        if transform == "shared" and self._is_all:
            return decode_shared(
                planes.array(), self._sampled, self._counts(axis), self._named(f"{axis}_ids"),
                self._named(f"{axis}_log_probs"),
            )  # fmt: skip
        if transform == "shared":
            # Only the heads of all records before these say how many values theirs lack.
            return self._batch.all.values(column)[first:last].copy()
        raise CorruptError(
            "a block has a transform that does not exist",
            expected="ranks, positions or shared", got=transform,
        )  # fmt: skip

    def _span(self, axis: str) -> tuple[int, int]:
        bounds = self._batch.bounds(axis)
        return int(bounds[self._first]), int(bounds[self._last])

    def _ranks(self, axis: str) -> tuple[int, int]:
        """Return where the ranks of these records lie: every set lacks one element."""
        targets = self._span(self._schema[str(self._schema.axes[axis].counts)].axis)
        lengths = self._batch.lengths(axis)
        before = (int(np.count_nonzero(lengths[:target])) for target in targets)
        first, last = (end - sets for end, sets in zip(self._span(axis), before, strict=True))
        return first, last

    def _offsets_of(self, axis: str) -> Int64:
        known = self._offsets.get(axis)
        if known is None:
            bounds = self._batch.bounds(axis)
            known = bounds if self._is_all else bounds[self._first : self._last + 1]
            self._offsets[axis] = known = known if self._is_all else known - known[0]
        return known

    def _named(self, name: str) -> Values:
        return self.values(self._schema[name])

    def _counts(self, axis: str) -> Int64:
        first, last = self._span(self._schema[str(self._schema.axes[axis].counts)].axis)
        return self._batch.lengths(axis)[first:last]

    @cached_property
    def _sampled(self) -> Values:
        if self._schema.profile == "packed":
            return self._named("target_ids")
        out: Values = self._named("input_ids")[self._named("completion_mask") != 0]
        return out


def _expect_transform(block: Block, transform: str | None, name: str) -> None:
    if block.transform != transform:
        raise CorruptError(
            "a block has a transform that it cannot have", where=Where(column=name),
            expected=repr(transform), got=repr(block.transform),
        )  # fmt: skip


@contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except RaggedError:
        raise
    except _FOREIGN as err:
        raise CorruptError(
            "a compact batch contradicts its header", where=Where(), expected="whole blocks",
            got=f"{type(err).__name__}: {err}", remedy="restore the file from a copy",
        ) from err  # fmt: skip
