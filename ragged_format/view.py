"""A validated-for-structure view of one batch, on which the rules of full validation work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ragged_format.errors import InvariantError, Where

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.lists import Flat, Int64
    from ragged_format.schema import RaggedSchema

__all__ = ["View", "locate"]


def locate(offsets: Int64, element: int) -> tuple[int, int]:
    """Return (list, position in it) of a flat element."""
    row = int(np.searchsorted(offsets, element, side="right")) - 1
    return row, element - int(offsets[row])


@dataclass(frozen=True, slots=True)
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

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return the flat values of a list column."""
        return self.lists[name].numpy()

    def fail_at(
        self, code: str, what: str, column: str, element: int, *, expected: object, got: object
    ) -> NoReturn:
        """Raise for one flat element of a list column."""
        row, position = locate(self.lists[column].offsets, element)
        raise InvariantError(
            what,
            code=code,
            where=Where(row=row, column=column, position=position),
            expected=expected,
            got=got,
        )

    def forbid(
        self, code: str, what: str, column: str, bad: npt.NDArray[np.bool_], expected: object
    ) -> None:
        """Raise for the first flat element of `column` where `bad`, (t,) bool, is true."""
        if bad.any():
            first = int(np.argmax(bad))
            self.fail_at(
                code, what, column, first, expected=expected, got=self.values(column)[first]
            )
