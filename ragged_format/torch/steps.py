"""Which positions of an epoch's order each rank takes at each step.

At a step, all ranks together take the next positions of the order, in rank order: so the batches of
a step, concatenated over ranks, are the order itself, whatever the number of ranks. By count a
batch is ``batch_size`` positions; by budget it is as many as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ragged_format.errors import LimitExceededError

__all__ = ["BudgetDealer", "Dealer", "Deals", "Sizes", "Step", "Tail"]

Tail: TypeAlias = Literal["keep", "drop", "pad", "empty"]
Int64 = npt.NDArray[np.int64]
# Returns how many tokens the records at positions [start, stop) have; beyond the end of the order
# it begins again.
Sizes: TypeAlias = Callable[[int, int], Int64]

# Positions whose sizes are asked for together.
_CHUNK = 512


class Step(NamedTuple):
    """One step of one rank.

    Attributes
    ----------
    start, stop : int
        Its positions in the order; from the size of the dataset on they repeat from 0. None at all
        where the rank gets an empty row.
    end : int
        Position up to which all ranks have taken the order after the step.
    is_last : bool
        This rank has no step after it.
    begin, until : int
        The positions of all ranks together, repeated ones included.
    """

    start: int
    stop: int
    end: int
    is_last: bool
    begin: int
    until: int


class Deals(Protocol):
    """What deals an order out; :class:`Dealer` and :class:`BudgetDealer` do."""

    @property
    def num_rows(self) -> int:
        """Size of the order."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks among which it is dealt."""
        ...

    def count(self, position: int, sizes: Sizes) -> int:
        """Return the number of steps of this rank from `position` on."""
        ...

    def steps(self, position: int, sizes: Sizes) -> Iterator[Step]:
        """Yield the steps of this rank from `position` on."""
        ...


@dataclass(frozen=True, slots=True)
class Dealer:
    """Deals the positions of an epoch to one rank, by count.

    Attributes
    ----------
    num_rows, batch_size, rank, world_size : int
    tail : {"keep", "drop", "pad", "empty"}
        What happens to the last positions that do not fill a step. ``keep``: they are split evenly
        and some ranks may have one step fewer. ``drop``: nobody takes them. ``pad``: the step is
        filled up with positions from the beginning of the order. ``empty``: they are split evenly,
        and ranks for which none is left get an empty row.
    """

    num_rows: int
    batch_size: int
    rank: int
    world_size: int
    tail: Tail

    def count(self, position: int = 0, sizes: Sizes | None = None) -> int:  # noqa: ARG002
        """Return the number of steps that this rank has from `position` on."""
        full, rest = divmod(self.num_rows - position, self.batch_size * self.world_size)
        if not rest or self.tail == "drop":
            return full
        return full + (self.tail != "keep" or rest > self.rank)

    def steps(self, position: int = 0, sizes: Sizes | None = None) -> Iterator[Step]:  # noqa: ARG002
        """Yield the steps of this rank from `position` on."""
        stride = self.batch_size * self.world_size
        number = self.count(position)
        full = (self.num_rows - position) // stride
        for step in range(number):
            begin = position + step * stride
            end = min(begin + stride, self.num_rows)
            until = begin + stride if self.tail == "pad" else end
            if step < full or self.tail == "pad":
                start = begin + self.rank * self.batch_size
                stop = start + self.batch_size
            else:
                share, extra = divmod(self.num_rows - begin, self.world_size)
                start = begin + self.rank * share + min(self.rank, extra)
                stop = start + share + (self.rank < extra)
            yield Step(start, stop, end, step == number - 1, begin, until)


@dataclass(frozen=True, slots=True)
class BudgetDealer:
    """Deals the positions of an epoch to one rank, by a budget of tokens.

    A batch takes the next positions as long as their tokens fit. Every rank computes the batches of
    all ranks, so that they agree without talking.

    Attributes
    ----------
    num_rows, rank, world_size : int
    budget : int
        Most tokens of a batch.
    batch_size : int, optional
        Most records of a batch.
    tail : {"keep", "drop", "pad", "empty"}
        What happens to a last step with fewer batches than ranks. ``keep``: the other ranks have
        one step fewer. ``drop``: nobody takes it. ``pad``: they get batches from the beginning of
        the order. ``empty``: they get an empty row.
    """

    num_rows: int
    budget: int
    rank: int
    world_size: int
    tail: Tail
    batch_size: int | None = None

    def count(self, position: int, sizes: Sizes) -> int:
        """Return the number of steps of this rank; reads the sizes of all that remains."""
        return sum(1 for _ in self.steps(position, sizes))

    def steps(self, position: int, sizes: Sizes) -> Iterator[Step]:
        """Yield the steps of this rank from `position` on.

        Raises
        ------
        LimitExceededError
            A record alone is larger than the budget (``RF-L001``).
        """
        waiting: Step | None = None
        for step in self._all(position, sizes):
            if waiting is not None:
                yield waiting
            waiting = step
        if waiting is not None:
            yield waiting._replace(is_last=True)

    def _all(self, position: int, sizes: Sizes) -> Iterator[Step]:
        if position >= self.num_rows:
            return
        cuts = self._cuts(position, sizes)
        while batches := list(islice(cuts, self.world_size)):
            begin, until = batches[0][0], batches[-1][1]
            # Batches that begin beyond the end exist to fill up a step, not to begin one.
            if begin >= self.num_rows:
                return
            missing = self.world_size - len(batches)
            if missing and self.tail == "drop":
                return
            if missing and self.tail == "empty":
                batches += [(until, until)] * missing
            if self.rank < len(batches):
                start, stop = batches[self.rank]
                yield Step(start, stop, min(until, self.num_rows), False, begin, until)  # noqa: FBT003

    def _cuts(self, position: int, sizes: Sizes) -> Iterator[tuple[int, int]]:
        """Yield the positions of one batch after the other."""
        last = self.num_rows
        start, total, rows = position, 0, 0
        at = position
        while True:
            if at == last:
                if at > start:
                    yield start, at  # a batch holds no record twice
                    start, total, rows = at, 0, 0
                # As far beyond the end as filling up one step can need.
                if self.tail != "pad" or last > self.num_rows * self.world_size:
                    return
                last += self.num_rows
            stop = min(at + _CHUNK, last)
            for size in sizes(at, stop).tolist():
                if size > self.budget:
                    raise LimitExceededError(
                        f"a record (position {at % self.num_rows} of the order) is larger than "
                        "the token budget", expected=f"<= {self.budget}", got=size,
                        remedy="raise token_budget, or filter the dataset",
                    )  # fmt: skip
                if total + size > self.budget or rows == self.batch_size:
                    yield start, at
                    start, total, rows = at, 0, 0
                total += size
                rows += 1
                at += 1
