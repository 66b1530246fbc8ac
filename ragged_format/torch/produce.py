"""The work of the loader's thread: from steps to batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.gather import Runs, measure
from ragged_format.torch.order import EpochOrder
from ragged_format.torch.source import Located, Records
from ragged_format.torch.state import Identity, Point, dump

if TYPE_CHECKING:
    import torch

    from ragged_format.torch.arena import Ring
    from ragged_format.torch.steps import Dealer, Step
    from ragged_format.torch.transfer import Transfer

__all__ = ["Made", "Producer"]

# Positions whose order is computed together: a few calls of numpy for hundreds of batches.
_WINDOW = 8192


class Made(NamedTuple):
    """A batch that is ready, and the point after it."""

    batch: RaggedBatch
    copied: torch.cuda.Event | None
    after: Point


@dataclass(frozen=True, slots=True)
class Producer:
    """Makes the batches of one rank; used by one thread at a time.

    Attributes
    ----------
    records : Records
    ring : Ring
    dealer : Dealer
    identity : Identity
    transfer : Transfer
    """

    records: Records
    ring: Ring
    dealer: Dealer
    identity: Identity
    transfer: Transfer

    def batches(self, point: Point) -> Generator[Made, None, None]:
        """Yield the batches of an epoch from `point` on."""
        identity, dealer = self.identity, self.dealer
        order = EpochOrder(
            identity.num_rows, shuffle=identity.shuffle, fingerprint=identity.fingerprint,
            seed=identity.seed, epoch=point.epoch,
        )  # fmt: skip
        delivered = point.batches
        for step, runs in self._runs(order, dealer.steps(point.position)):
            delivered += 1
            after = (
                Point(point.epoch + 1)
                if step.is_last
                else Point(point.epoch, step.end, delivered)
            )  # fmt: skip
            yield self._make(runs, step, after)

    def state(self, point: Point) -> dict[str, object]:
        """Return the state that continues at `point`."""
        dealer = self.dealer
        return dump(
            self.identity, point,
            batch_size=dealer.batch_size, rank=dealer.rank, world_size=dealer.world_size,
        )  # fmt: skip

    def _make(self, runs: Runs, step: Step, after: Point) -> Made:
        plan = self.records.plan
        measured = measure(plan, runs)
        lease = self.ring.acquire(measured.layout.nbytes)
        batch = RaggedBatch.fill(
            plan, measured, lease.tensor(), slot=lease.slot, state=self.state(after),
            num_repeated=max(0, step.stop - max(step.start, self.dealer.num_rows)),
        )  # fmt: skip
        return Made(*self.transfer.start(batch), after)

    def _runs(self, order: EpochOrder, steps: Iterator[Step]) -> Iterator[tuple[Step, Runs]]:
        if not order.shuffle:
            for step in steps:
                yield step, self._consecutive(step)
            return
        size = max(1, _WINDOW // self.dealer.batch_size)
        while window := list(islice(steps, size)):
            positions = np.concatenate(
                [np.arange(step.start, step.stop, dtype=np.int64) for step in window]
            )
            located = self.records.locate(order.at(positions % order.size))
            first = 0
            for step in window:
                last = first + step.stop - step.start
                part = Located(located.batches[first:last], located.rows[first:last])
                yield step, self.records.singles(part)
                first = last

    def _consecutive(self, step: Step) -> Runs:
        size = self.dealer.num_rows
        joined = Runs([], [], [])
        start = step.start
        while start < step.stop:
            stop = min(step.stop, (start // size + 1) * size)
            runs = self.records.span(start % size, (stop - 1) % size + 1)
            joined.views.extend(runs.views)
            joined.firsts.extend(runs.firsts)
            joined.lasts.extend(runs.lasts)
            start = stop
        return joined
