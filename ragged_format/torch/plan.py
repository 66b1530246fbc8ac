"""What a batch in an arena consists of: its parts, in order, and where each one starts.

The parts of a schema are fixed; their lengths differ from batch to batch. Parts that the host must
know whatever the device (offsets, counts, text) come first, so that one copy of the arena's head
keeps them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import pyarrow as pa
import torch

from ragged_format.schema import RECORD, Column, RaggedSchema
from ragged_format.torch.arena import ALIGNMENT

__all__ = ["Kind", "Layout", "Part", "Plan", "plan_of"]

Kind = Literal["offsets", "values", "text_offsets", "valid"]


class Part(NamedTuple):
    """One array of a batch.

    Attributes
    ----------
    kind : str
        ``offsets`` of an axis per record; ``values`` of a column (UTF-8 bytes for text);
        ``text_offsets`` of a text column; ``valid``, 1 where a nullable value is there.
    name : str
        Axis or column name.
    dtype : torch.dtype
    nbytes : int
        Bytes of one element.
    shape : tuple of int
        Shape of one element; ``()`` is a scalar.
    space : int
        Position in `Plan.spaces` of what the elements are; for offsets, of what they point into.
    over : int
        For offsets, the position in `Plan.spaces` of what they divide; else -1.
    """

    kind: Kind
    name: str
    dtype: torch.dtype
    nbytes: int
    shape: tuple[int, ...]
    space: int
    over: int


class Layout(NamedTuple):
    """Where the parts of one batch lie in its arena.

    Attributes
    ----------
    starts : list of int
        First byte of each part, a multiple of 64; one more entry for the end.
    lengths : list of int
        Elements of each part.
    """

    starts: list[int]
    lengths: list[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that the batch uses."""
        return self.starts[-1]


@dataclass(frozen=True, eq=False)
class Plan:
    """The parts of every batch of one schema.

    Attributes
    ----------
    schema : RaggedSchema
        Columns that are loaded, with the counts that their axes need.
    axes : tuple of str
        The axes that have lengths, the record axis first.
    spaces : tuple of str
        What elements can be counted in: these axes, then the bytes of each text column.
    parts : tuple of Part
        The offsets of the axes first.
    num_host : int
        The first parts, which the host keeps when a batch moves to another device.
    index : dict of (kind, name) to int
        Position in `parts`.
    moves : list of (space, nbytes, over)
        Of each part; what gathering needs to know.
    """

    schema: RaggedSchema
    axes: tuple[str, ...]
    spaces: tuple[str, ...]
    parts: tuple[Part, ...]
    num_host: int
    index: dict[tuple[Kind, str], int]
    moves: list[tuple[int, int, int]]

    def layout(self, lengths: list[int]) -> Layout:
        """Return where parts of these lengths lie, end to end at multiples of 64 bytes."""
        starts = [0]
        end = 0
        mask = ALIGNMENT - 1
        for (_, nbytes, _), length in zip(self.moves, lengths, strict=True):
            end = (end + length * nbytes + mask) & ~mask
            starts.append(end)
        return Layout(starts, lengths)


def is_text(column: Column) -> bool:
    """Return whether the values are strings or bytes."""
    return bool(pa.types.is_string(column.type) or pa.types.is_binary(column.type))


@lru_cache(maxsize=32)
def plan_of(schema: RaggedSchema) -> Plan:
    """Return the plan of a schema; equal schemas have the same."""
    # A root axis without columns has no lengths, hence no place.
    held = {column.axis for column in schema} | {column.opens for column in schema}
    axes = [RECORD, *(axis for axis in schema.axes if axis in held)]
    spaces = [*axes, *(f"bytes of {column.name}" for column in schema if is_text(column))]
    host = [_part("offsets", axis, torch.int64, axes.index(axis), over=0) for axis in axes[1:]]
    rest: list[Part] = []
    texts = len(axes)
    for column in schema:
        axis = axes.index(column.axis)
        parts = host if is_text(column) or column.opens is not None else rest
        if is_text(column):
            parts.append(_part("text_offsets", column.name, torch.int64, texts, over=axis))
            parts.append(_part("values", column.name, torch.uint8, texts))
            texts += 1
        else:
            dtype = _DTYPES[str(column.type)]
            parts.append(_part("values", column.name, dtype, axis, shape=column.shape))
        if column.nullable:
            parts.append(_part("valid", column.name, torch.bool, axis))
    every = (*host, *rest)
    index = {(part.kind, part.name): number for number, part in enumerate(every)}
    moves = [(part.space, part.nbytes, part.over) for part in every]
    return Plan(schema, tuple(axes), tuple(spaces), every, len(host), index, moves)


def _part(
    kind: Kind,
    name: str,
    dtype: torch.dtype,
    space: int,
    *,
    shape: tuple[int, ...] = (),
    over: int = -1,
) -> Part:
    return Part(kind, name, dtype, dtype.itemsize * math.prod(shape), shape, space, over)


# Every number type that a column can have.
_DTYPES = {
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64,
    "halffloat": torch.float16, "float": torch.float32, "double": torch.float64,
}  # fmt: skip
