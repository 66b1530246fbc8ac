"""From steps to batches: what a loader's thread does, or a worker of a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ragged_format.errors import SchemaMismatchError
from ragged_format.torch.arena import allocate_here
from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.deck import Deck
from ragged_format.torch.empty import empty_row
from ragged_format.torch.gather import measure, whole
from ragged_format.torch.state import Identity, Point, dump
from ragged_format.torch.views import open_view

if TYPE_CHECKING:
    import torch

    from ragged_format.torch.arena import Ring
    from ragged_format.torch.order import Order
    from ragged_format.torch.source import Records
    from ragged_format.torch.steps import Deals, Sizes, Step
    from ragged_format.torch.transfer import Transfer

__all__ = ["Made", "Producer"]

# The axes that budgets and losses count; they exist in both profiles.
_TOKEN, _TARGET = "token", "target"


class Made(NamedTuple):
    """A batch that is ready, and the point after it."""

    batch: RaggedBatch
    copied: torch.cuda.Event | None
    after: Point


@dataclass(slots=True)
class Producer:
    """Makes the batches of one rank; used by one thread at a time.

    Attributes
    ----------
    records : Records
    dealer : Deals
    order : callable
        Returns the order of an epoch.
    identity : Identity
    dealt : dict
        How the order is dealt, for states.
    """

    records: Records
    dealer: Deals
    order: Callable[[int], Order]
    identity: Identity
    dealt: dict[str, Any]
    _token: int | None = field(init=False)
    _target: int | None = field(init=False)

    def __post_init__(self) -> None:
        axes = self.records.plan.axes
        self._token = axes.index(_TOKEN) if _TOKEN in axes else None
        self._target = axes.index(_TARGET) if _TARGET in axes else None

    def need_tokens(self) -> None:
        """Raise unless the columns loaded tell how many tokens a record has."""
        if self._token is None:
            raise SchemaMismatchError(
                "a token budget needs a column on the token axis", code="RF-S003",
                expected="one of " + ", ".join(c.name for c in self.records.schema.on(_TOKEN)),
                got=", ".join(c.name for c in self.records.plan.schema),
                remedy="add it to columns=",
            )  # fmt: skip

    def count(self, point: Point) -> int:
        """Return how many batches the epoch has from `point` on."""
        return self.dealer.count(
            point.position, self._sizes(Deck(self.records, self.order(point.epoch)))
        )

    def batches(self, point: Point, ring: Ring, transfer: Transfer) -> Generator[Made, None, None]:
        """Yield the batches of an epoch from `point` on, in slots of a ring."""
        deck = Deck(self.records, self.order(point.epoch))
        delivered = point.batches
        for step in self.dealer.steps(point.position, self._sizes(deck)):
            delivered += 1
            after = _after(point.epoch, step, delivered)
            made = self._make(deck, step, after, ring)
            yield Made(*transfer.start(made), after)

    def share(self, point: Point, worker: int, workers: int) -> Generator[RaggedBatch, None, None]:
        """Yield every `workers`-th batch of an epoch from `point` on, in memory of its own."""
        deck = Deck(self.records, self.order(point.epoch))
        steps = enumerate(self.dealer.steps(point.position, self._sizes(deck)), 1)
        for number, step in islice(steps, worker, None, workers):
            after = _after(point.epoch, step, point.batches + number)
            yield self._make(deck, step, after, None)

    def state(self, point: Point) -> dict[str, object]:
        """Return the state that continues at `point`."""
        return dump(self.identity, point, **self.dealt)

    def _make(self, deck: Deck, step: Step, after: Point, ring: Ring | None) -> RaggedBatch:
        plan = self.records.plan
        is_filler = step.start == step.stop
        runs = (
            whole([open_view(empty_row(plan.schema), plan)])
            if is_filler
            else deck.runs(step.start, step.stop)
        )
        measured = measure(plan, runs)
        targets = None
        if self._target is not None:
            if self.dealer.world_size == 1:
                targets = measured.spans[self._target].total
            else:
                targets = int(deck.sizes(step.begin, step.until, self._target).sum())
        lease = None if ring is None else ring.acquire(measured.layout.nbytes)
        return RaggedBatch.fill(
            plan, measured,
            allocate_here(measured.layout.nbytes) if lease is None else lease.tensor(),
            slot=None if lease is None else lease.slot, state=self.state(after),
            num_repeated=max(0, step.stop - max(step.start, self.dealer.num_rows)),
            is_filler=is_filler, step_targets=targets,
        )  # fmt: skip

    def _sizes(self, deck: Deck) -> Sizes:
        # Only a dealer by budget calls it, and then the axis is there.
        return partial(deck.sizes, space=self._token or 0)


def _after(epoch: int, step: Step, delivered: int) -> Point:
    return Point(epoch + 1) if step.is_last else Point(epoch, step.end, delivered)
