"""The columns and axes of an arena as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from ragged_format.arguments import shown
from ragged_format.errors import SchemaMismatchError, UnknownColumnError, Where
from ragged_format.lists import offsets_of
from ragged_format.schema import RECORD
from ragged_format.torch.pad import round_up
from ragged_format.torch.transfer import to_device

if TYPE_CHECKING:
    from ragged_format.schema import RaggedSchema
    from ragged_format.torch.plan import Kind, Layout, Plan

__all__ = ["ArenaColumns"]


class ArenaColumns:
    """Records in an arena, column by column and axis by axis; tensors are made when asked for.

    Attributes
    ----------
    plan : Plan
        Of what parts the arena consists.
    num_rows : int
        Records.
    arena : (nbytes,) uint8 Tensor
        The allocation that all tensors view.
    """

    __slots__ = ("_cache", "_host", "_layout", "arena", "num_rows", "plan")

    def __init__(
        self, plan: Plan, num_rows: int, layout: Layout, arena: Tensor, host: Tensor | None
    ) -> None:
        self.plan = plan
        self.num_rows = num_rows
        self.arena = arena
        self._layout = layout
        # The first parts of the arena, on the host whatever the device.
        self._host = arena if host is None else host
        self._cache: dict[tuple[str, str], Tensor] = {}

    @property
    def schema(self) -> RaggedSchema:
        """The columns that were loaded."""
        return self.plan.schema

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.arena.device

    @property
    def nbytes(self) -> int:
        """Bytes of the arena, the gaps between columns included."""
        return self._layout.nbytes

    def keys(self) -> list[str]:
        """Return the column names, in schema order."""
        return list(self.plan.schema.columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.schema.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.plan.schema

    def __len__(self) -> int:
        return len(self.plan.schema.columns)

    def __getitem__(self, name: str) -> Tensor:
        """Return a column flat: (t,) or (t, *shape); for text its UTF-8 bytes, (bytes,) uint8."""
        if not isinstance(name, str):
            if isinstance(name, int):  # torch's default collate_fn, for one
                raise UnknownColumnError(
                    "a batch has columns, and no records by number",
                    expected=", ".join(self), got=name,
                    remedy="name a column; for DataLoader pass collate_fn=RaggedBatch.collate",
                )  # fmt: skip
            self.schema[name]  # raises, naming the columns that there are
        return self._tensor("values", name)

    def valid(self, name: str) -> Tensor:
        """Return where a nullable column has a value, (t,) bool; all true for other columns.

        Where it is false, ``batch[name]`` has NaN for floats and the column's fill for integers.
        """
        column = self.schema[name]
        if column.nullable:
            return self._tensor("valid", name)
        size = self._layout.lengths[self.plan.index["values", name]]
        if ("text_offsets", name) in self.plan.index:
            size = self._layout.lengths[self.plan.index["text_offsets", name]] - 1
        return torch.ones(size, dtype=torch.bool, device=self.device)

    def strings(self, name: str) -> list[str | None] | list[bytes | None]:
        """Return a text column decoded, flat; ``None`` for nulls, ``bytes`` for binary columns.

        Raises
        ------
        SchemaMismatchError
            The column is not text.
        """
        column = self.schema[name]
        if ("text_offsets", name) not in self.plan.index:
            raise SchemaMismatchError(
                "the column is not text", where=Where(column=name), expected="string or binary",
                got=column.type, remedy=f"use batch[{name!r}]",
            )  # fmt: skip
        data = self._host_array("values", name).tobytes()
        ends = self._host_array("text_offsets", name).tolist()
        items: list[Any] = [
            data[lo:hi] for lo, hi in pairwise(ends)
        ]  # fmt: skip
        if pa.types.is_string(column.type):
            items = [item.decode() for item in items]
        if column.nullable:
            there = self._host_array("valid", name).tolist()
            items = [item if known else None for item, known in zip(items, there, strict=True)]
        return items

    # Axes

    def offsets(self, axis: str) -> Tensor:
        """Return where each record begins on an axis, (num_rows + 1,) int64 from 0."""
        return self._tensor("offsets", self._axis(axis))

    def lengths(self, axis: str) -> Tensor:
        """Return how many elements of an axis each record has, (num_rows,) int64."""
        return torch.diff(self.offsets(axis))

    def lengths_host(self, axis: str) -> npt.NDArray[np.int64]:
        """Return :meth:`lengths` as an array on the host, whatever the device."""
        return np.diff(self._host_array("offsets", self._axis(axis)))

    def counts(self, axis: str) -> Tensor:
        """Return how many elements of an axis each element of its parent axis has.

        The counts column that opens the axis, or for a root axis :meth:`lengths`.
        """
        opened = self.schema.axes[self._axis(axis)]
        return self.lengths(axis) if opened.counts is None else self[opened.counts]

    def counts_host(self, axis: str) -> npt.NDArray[np.int64]:
        """Return :meth:`counts` as int64 on the host, whatever the device."""
        opened = self.schema.axes[self._axis(axis)]
        if opened.counts is None:
            return self.lengths_host(axis)
        return self._host_array("values", opened.counts).astype(np.int64)

    def rows(self, axis: str) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Return the counts of the rows into which tables divide an axis, on device and host.

        Under a counts column a row is an element of the parent axis (one candidate set is one
        row); on a root axis, and on a mask axis over one, a row is a record.
        """
        opened = self.schema.axes[self._axis(axis)]
        if not opened.mask:
            return self.counts(axis), self.counts_host(axis)
        if self.schema.axes[opened.parent].counts is None:
            return self.lengths(axis), self.lengths_host(axis)
        _, outer = self.rows(opened.parent)
        host = np.diff(offsets_of(self.counts_host(axis))[offsets_of(outer)])
        return to_device(host, self.device), host

    def width(self, axis: str, multiple_of: int | None = None) -> int:
        """Return the width of the unpadded widest row of an axis, rounded up to a multiple."""
        _, host = self.rows(axis)
        return round_up(int(host.max()) if len(host) else 0, multiple_of)

    def _tensor(self, kind: Kind, name: str) -> Tensor:
        key = (kind, name)
        tensor = self._cache.get(key)
        if tensor is None:
            tensor = self._cache[key] = self._part(self.arena, kind, name)
        return tensor

    def _host_array(self, kind: Kind, name: str) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self._part(self._host, kind, name).numpy()
        return array

    def _part(self, arena: Tensor, kind: Kind, name: str) -> Tensor:
        if kind != "offsets" and name not in self.schema:
            self.schema[name]  # raises, naming the columns that there are
        number = self.plan.index[kind, name]
        part = self.plan.parts[number]
        start = self._layout.starts[number]
        size = self._layout.lengths[number]
        flat = arena[start : start + size * part.nbytes].view(part.dtype)
        return flat.view(size, *part.shape) if part.shape else flat

    def _axis(self, axis: str) -> str:
        if axis not in self.plan.axes or axis == RECORD:
            raise SchemaMismatchError(
                "the batch has no such axis below the record", code="RF-S006", got=shown(axis),
                expected=", ".join(name for name in self.plan.axes if name != RECORD),
                remedy="load a column that lies on it",
            )  # fmt: skip
        return axis
