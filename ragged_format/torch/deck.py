"""The records of one epoch by position: where they lie and how large they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragged_format.torch.gather import Runs

if TYPE_CHECKING:
    from ragged_format.torch.order import Order
    from ragged_format.torch.source import Located, Records

__all__ = ["Deck"]

Int64 = npt.NDArray[np.int64]

# Positions whose order is computed together: a few calls of numpy for hundreds of batches.
_WINDOW = 8192
# Windows that are kept: a step can begin in one and end in the next, and look ahead to a third.
_KEPT = 3


class Deck:
    """Looks records up by their position in an order; beyond its end the order begins again.

    Parameters
    ----------
    records : Records
    order : Order
    """

    def __init__(self, records: Records, order: Order) -> None:
        self._records = records
        self._order = order
        self._window = min(_WINDOW, order.window) or _WINDOW
        self._located: dict[int, Located] = {}

    def runs(self, start: int, stop: int) -> Runs:
        """Return the records at positions ``[start, stop)`` as runs to gather."""
        if self._order.is_sequence:
            return self._consecutive(start, stop)
        batches, rows = self._places(start, stop)
        views = list(map(self._records.view, batches))
        return Runs(views, rows, [row + 1 for row in rows])

    def sizes(self, start: int, stop: int, space: int) -> Int64:
        """Return how many elements each record has in one space of the plan, (n,) int64."""
        if self._order.is_sequence:
            views, firsts, lasts = self._consecutive(start, stop)
            parts = [
                np.diff(np.asarray(view.marks[space])[first : last + 1])
                for view, first, last in zip(views, firsts, lasts, strict=True)
            ]
            return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
        batches, rows = self._places(start, stop)
        marks = [self._records.view(batch).marks[space] for batch in batches]
        return np.array(
            [mark[row + 1] - mark[row] for mark, row in zip(marks, rows, strict=True)], np.int64
        )

    def _places(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        batches: list[int] = []
        rows: list[int] = []
        size, window = self._order.size, self._window
        while start < stop:
            position = start % size
            number, offset = divmod(position, window)
            count = min(stop - start, window - offset, size - position)
            located = self._locate(number)
            batches += located.batches[offset : offset + count]
            rows += located.rows[offset : offset + count]
            start += count
        return batches, rows

    def _locate(self, number: int) -> Located:
        located = self._located.get(number)
        if located is None:
            if len(self._located) >= _KEPT:
                self._located.pop(next(iter(self._located)))
            first = number * self._window
            positions = np.arange(first, min(first + self._window, self._order.size))
            located = self._records.locate(self._order.at(positions))
            self._located[number] = located
        return located

    def _consecutive(self, start: int, stop: int) -> Runs:
        size = self._order.size
        joined = Runs([], [], [])
        while start < stop:
            end = min(stop, (start // size + 1) * size)
            runs = self._records.span(start % size, (end - 1) % size + 1)
            joined.views.extend(runs.views)
            joined.firsts.extend(runs.firsts)
            joined.lasts.extend(runs.lasts)
            start = end
        return joined
