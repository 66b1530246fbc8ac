"""Which positions of an epoch's order each rank takes at each step.

At a step, all ranks together take the next ``batch_size * world_size`` positions, in rank order: so
the batches of a step, concatenated over ranks, are the order itself, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Dealer", "Step", "Tail"]

Tail: TypeAlias = Literal["keep", "drop", "pad"]


class Step(NamedTuple):
    """One step of one rank.

    Attributes
    ----------
    start, stop : int
        Its positions in the order; from the size of the dataset on they repeat from 0.
    end : int
        Position up to which all ranks have taken the order after the step.
    is_last : bool
        This rank has no step after it.
    """

    start: int
    stop: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Dealer:
    """Deals the positions of an epoch to one rank.

    Attributes
    ----------
    num_rows, batch_size, rank, world_size : int
    tail : {"keep", "drop", "pad"}
        What happens to the last positions that do not fill a step. ``keep``: they are split evenly
        and some ranks may have one step fewer. ``drop``: nobody takes them. ``pad``: the step is
        filled up with positions from the beginning of the order.
    """

    num_rows: int
    batch_size: int
    rank: int
    world_size: int
    tail: Tail

    def count(self, position: int = 0) -> int:
        """Return the number of steps that this rank has from `position` on."""
        full, rest = divmod(self.num_rows - position, self.batch_size * self.world_size)
        if not rest or self.tail == "drop":
            return full
        if self.tail == "pad":
            return full + 1
        return full + (rest > self.rank)

    def steps(self, position: int = 0) -> Iterator[Step]:
        """Yield the steps of this rank from `position` on."""
        stride = self.batch_size * self.world_size
        number = self.count(position)
        full = (self.num_rows - position) // stride
        for step in range(number):
            begin = position + step * stride
            is_last = step == number - 1
            if step < full or self.tail == "pad":
                start = begin + self.rank * self.batch_size
                stop = start + self.batch_size
            else:
                share, extra = divmod(self.num_rows - begin, self.world_size)
                start = begin + self.rank * share + min(self.rank, extra)
                stop = start + share + (self.rank < extra)
            yield Step(start, stop, min(begin + stride, self.num_rows), is_last)
