"""A structurally valid batch as flat arrays, and the rules of full validation that work on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import InvariantError, Where
from ragged_format.forest_index import ForestIndex
from ragged_format.lists import to_numpy

if TYPE_CHECKING:
    from ragged_format.lists import Flat, Int64
    from ragged_format.schema import RaggedSchema

__all__ = ["Rule", "View", "locate"]


def locate(offsets: Int64, element: int) -> tuple[int, int]:
    """Return (list, position in it) of a flat element."""
    row = int(np.searchsorted(offsets, element, side="right")) - 1
    return row, element - int(offsets[row])


@dataclass(frozen=True)
class View:
    """Flat columns and axis offsets of one batch.

    Attributes
    ----------
    batch : pyarrow.RecordBatch
    schema : RaggedSchema
    lists : dict of str to Flat
        Every column below the record axis.
    records : dict of str to (num_rows + 1,) int64
        Offsets of each axis per record.
    parents : dict of str to (p + 1,) int64
        Offsets of each axis per element of its parent axis.
    """

    batch: pa.RecordBatch
    schema: RaggedSchema
    lists: dict[str, Flat]
    records: dict[str, Int64]
    parents: dict[str, Int64]
    _values: dict[str, npt.NDArray[Any]] = field(default_factory=dict, repr=False)

    def elements(self, name: str) -> pa.Array:
        """Return the elements of a column on any axis, over all records."""
        return self.lists[name].values if name in self.lists else self.batch.column(name)

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return the elements of a number column, (t,) or (t, width); 0 stands for a null."""
        values = self._values.get(name)
        if values is None:
            elements = self.elements(name)
            if elements.null_count:
                elements = pc.fill_null(elements, 0)
            values = self._values[name] = to_numpy(elements)
        return values

    def fail_at(
        self,
        code: str,
        what: str,
        column: str,
        element: int,
        *,
        expected: object,
        got: object = None,
    ) -> NoReturn:
        """Raise for one element of a column; `got` is its value unless given."""
        row, position = element, None
        if column in self.lists:
            row, position = locate(self.lists[column].offsets, element)
        raise InvariantError(
            what,
            code=code,
            where=Where(row=row, column=column, position=position),
            expected=expected,
            got=self.elements(column)[element].as_py() if got is None else got,
        )

    def forbid(
        self, code: str, what: str, column: str, bad: npt.NDArray[np.bool_], expected: object
    ) -> None:
        """Raise for the first element of `column` where `bad`, (t,) or (t, width), is true."""
        if bad.any():
            first = int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))
            self.fail_at(code, what, column, first, expected=expected)

    @cached_property
    def forest(self) -> ForestIndex:
        """The nodes of all records; only where every parent is an earlier node (``RF-I032``)."""
        return ForestIndex(
            self.values("node_lengths").astype(np.int64),
            self.values("node_parents").astype(np.int64),
            self.records["node"],
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """The check of one code on values.

    Attributes
    ----------
    code : str
        Code that the check raises, and no other.
    check : callable
        Takes a :class:`View`; raises at the first breach.
    after : tuple of str
        Codes of the rules without which this one has no meaning; they are checked before.
    profile : str, optional
        The one profile that has the rule.
    """

    code: str
    check: Callable[[View], None]
    after: tuple[str, ...] = ()
    profile: str | None = None
