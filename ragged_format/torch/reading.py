"""The options that loaders share, checked once, and what they open."""

from __future__ import annotations

import inspect
import operator
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch.utils.data import get_worker_info

from ragged_format.arguments import check_choice, check_integer, check_size, shown
from ragged_format.errors import LimitExceededError, RaggedWarning
from ragged_format.snapshot import Snapshot
from ragged_format.torch.mixing import Mixture, MixtureOrder, mixed_fingerprint, quotas
from ragged_format.torch.order import BlockOrder, EpochOrder
from ragged_format.torch.produce import Producer
from ragged_format.torch.source import Opened, Records, SourceLike, join, open_random_access
from ragged_format.torch.state import Identity
from ragged_format.torch.steps import BudgetDealer, Dealer, Deals, Tail

if TYPE_CHECKING:
    from ragged_format.torch.order import Order

__all__ = ["Reading", "Shuffle"]

Shuffle: TypeAlias = bool | Literal["global", "block"]

# How many times larger compact batches are when they are decoded, at least, about.
_EXPANSION = 3
# Positions of a step, and of a window of blocks, are int64.
_MOST = 1 << 31
_INTEGERS = (
    "batch_size", "token_budget", "block_size", "window", "seed", "rank", "world_size", "replicas",
    "max_decoded_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """What to read, in which order and how it is dealt; see :class:`RaggedLoader` for each.

    Raises
    ------
    LimitExceededError
        A number is out of its range, or a choice is unknown (``RF-L001``).
    """

    source: SourceLike | Mixture
    batch_size: int | None
    columns: tuple[str, ...] | None
    token_budget: int | None
    shuffle: Shuffle
    block_size: int
    window: int
    seed: int
    rank: int
    world_size: int
    replicas: int
    tail: Tail
    verify: bool
    max_decoded_bytes: int

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_integer("batch_size", self.batch_size, 1, _MOST)
        if self.token_budget is not None:
            check_size("token_budget", self.token_budget)
        check_integer("block_size", self.block_size, 1, _MOST)
        check_integer("window", self.window, 1, _MOST)
        check_integer("world_size", self.world_size, 1, _MOST)
        check_integer("rank", self.rank, 0, self.world_size)
        check_integer("replicas", self.replicas, 1, _MOST)
        if self.world_size % self.replicas:
            raise LimitExceededError(
                "replicas divides world_size", expected=f"a divisor of {self.world_size}",
                got=self.replicas, remedy="pass the size of the groups that share their rows",
            )  # fmt: skip
        # Any integer: it is hashed.
        check_integer("seed", self.seed, -sys.maxsize)
        check_integer("max_decoded_bytes", self.max_decoded_bytes, 0)
        check_choice("tail", self.tail, ("keep", "drop", "pad", "empty"))
        if self.shuffle not in (True, False, "global", "block"):
            raise LimitExceededError(
                "unknown way to shuffle", expected="True, False, 'global' or 'block'",
                got=shown(self.shuffle), remedy="pass one of these",
            )  # fmt: skip
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None:
                # States are JSON, which numpy's integers are not.
                object.__setattr__(self, name, operator.index(value))

    def open(self) -> Producer:
        """Open the source and return what makes its batches."""
        opened, num_rows, order = self._opened()
        producer = Producer(
            Records(opened, self.columns, max_decoded_bytes=self.max_decoded_bytes),
            self._dealer(num_rows),
            order,
            Identity(opened.fingerprint, num_rows, self._shuffle_name(), self.seed, self.tail),
            {
                "batch_size": self._batch_size(), "rank": self.rank,
                "world_size": self.world_size, "replicas": self.replicas,
                "token_budget": self.token_budget,
            },
        )  # fmt: skip
        if self.token_budget is not None:
            producer.need_tokens()
        return producer

    def _opened(self) -> tuple[Opened, int, Callable[[int], Order]]:
        if not isinstance(self.source, Mixture):
            in_order = not self.shuffle
            opened = open_random_access(self.source, verify=self.verify, in_order=in_order)
            self._warn([opened])
            num_rows = int(opened.shards.bounds[-1])
            return opened, num_rows, partial(self._order, num_rows, opened.fingerprint)
        parts = [open_random_access(part, verify=self.verify) for part in self.source.sources]
        self._warn(parts)
        sizes = [int(part.shards.bounds[-1]) for part in parts]
        weights = sizes if self.source.weights is None else self.source.weights
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            if weight and not size:
                raise LimitExceededError(
                    f"dataset {number} of the mixture has no records", expected=">= 1", got=0,
                    remedy="leave it out",
                )  # fmt: skip
        num_rows = sum(sizes) if self.source.num_rows is None else self.source.num_rows
        counts = quotas(weights)
        fingerprints = [part.fingerprint for part in parts]
        opened = join(parts, mixed_fingerprint(fingerprints, counts))

        window = self.block_size * self.window if self.shuffle == "block" else 0

        def orders(number: int, epoch: int) -> Order:
            return self._order(sizes[number], f"{number}|{fingerprints[number]}", epoch)

        def order(epoch: int) -> Order:
            return MixtureOrder(
                sizes, counts, size=num_rows, epoch=epoch, window=window, orders=orders
            )

        return opened, num_rows, order

    def _warn(self, parts: list[Opened]) -> None:
        """Warn of a global shuffle that decodes a batch for almost every record."""
        if self.shuffle in (False, "block") or get_worker_info() is not None:
            return
        nbytes = sum(map(_compact_bytes, parts)) * _EXPANSION
        if nbytes > self.max_decoded_bytes:
            warnings.warn(
                "a global shuffle of compact data decodes a whole record batch for almost every "
                f"record: about {nbytes:,} bytes when decoded, of which max_decoded_bytes keeps "
                f"{self.max_decoded_bytes:,}. Shuffle with shuffle='block', or write the data "
                "uncompressed first: ragged expand IN OUT",
                RaggedWarning,
                stacklevel=_levels_inside(),
            )

    def _order(self, size: int, fingerprint: str, epoch: int) -> Order:
        if self.shuffle == "block":
            return BlockOrder(
                size, block_size=self.block_size, blocks=self.window, fingerprint=fingerprint,
                seed=self.seed, epoch=epoch,
            )  # fmt: skip
        return EpochOrder(
            size, shuffle=bool(self.shuffle), fingerprint=fingerprint, seed=self.seed, epoch=epoch
        )

    def _shuffle_name(self) -> bool | str:
        if self.shuffle == "block":
            return f"block({self.block_size}, {self.window})"
        return bool(self.shuffle)

    def _batch_size(self) -> int | None:
        if self.batch_size is None and self.token_budget is None:
            return 1
        return self.batch_size

    def _dealer(self, num_rows: int) -> Deals:
        group, groups = self.rank // self.replicas, self.world_size // self.replicas
        size = self._batch_size()
        if self.token_budget is None:
            return Dealer(num_rows, size or 1, group, groups, self.tail)
        return BudgetDealer(num_rows, self.token_budget, group, groups, self.tail, size)


def _levels_inside() -> int:
    """Return the level, for a warning, of the code outside of this package that made the loader."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ragged_format."):
        level, frame = level + 1, frame.f_back
    return level


def _compact_bytes(opened: Opened) -> int:
    """Return the bytes of the compact shards of a source, as they are stored."""
    shards = opened.shards
    if isinstance(shards, Snapshot):
        listed = shards.manifest.shards
        return sum(shard.bytes for shard in listed if shard.encoding == "compact")
    if len(shards.bounds) != 2:
        return 0
    only = shards.reader(0)
    return Path(only.path).stat().st_size if only.decodes and only.path is not None else 0
