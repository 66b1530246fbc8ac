"""Samples between the log and a training row: which are ready, and how far the log is settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import InvariantError, SchemaMismatchError, Where

if TYPE_CHECKING:
    from ragged_format.torch.tail import Page

__all__ = ["OnTimeout", "OnlineMetrics", "Pending", "Sample", "count_lengths"]

OnTimeout = Literal["release", "drop"]
_NEEDED = ("sample_id", "input_ids", "completion_mask")


@dataclass(slots=True)
class OnlineMetrics:
    """What became of every sample; each is counted once, when that is decided.

    Attributes
    ----------
    read : int
        Samples taken from the log, those that a resumed state had settled not counted.
    delivered, steps, rows, filler_rows : int
        Samples in rows; steps; rows with samples, and empty ones.
    duplicates : int
        Samples whose id is that of another one behind the cursor; ignored. Ids that the cursor has
        passed are not remembered: that they are unique is the log's part.
    dropped_stale, dropped_timeout, dropped_oversize, without_target : int
        Samples left out: too old a policy, in a group that stayed incomplete, longer than a row,
        nothing scored.
    groups_timed_out : int
        Groups that were incomplete when their time was up.
    unknown_version : int
        Samples without a policy version, which no staleness limit can drop.
    max_staleness, sum_staleness : int
        Of delivered samples with a version.
    stale_by_length, delivered_by_length : dict of int to int
        How many of the samples that were too old, and of those delivered, have at most so many
        tokens and more than half as many; by powers of two. Long samples take longer to make: where
        their share among the former is larger, the limit of staleness shortens the training data.
    """

    read: int = 0
    delivered: int = 0
    steps: int = 0
    rows: int = 0
    filler_rows: int = 0
    duplicates: int = 0
    dropped_stale: int = 0
    dropped_timeout: int = 0
    dropped_oversize: int = 0
    without_target: int = 0
    groups_timed_out: int = 0
    unknown_version: int = 0
    max_staleness: int = 0
    sum_staleness: int = 0
    stale_by_length: dict[int, int] = field(default_factory=dict)
    delivered_by_length: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the counters as plain JSON values, lengths as text."""
        lengths = {
            name: {str(most): getattr(self, name)[most] for most in sorted(getattr(self, name))}
            for name in ("stale_by_length", "delivered_by_length")
        }
        return asdict(self) | lengths


def count_lengths(counts: dict[int, int], tokens: Iterable[int]) -> None:
    """Count samples of these many tokens under the next power of two."""
    for number in tokens:
        most = 1 << max(0, number - 1).bit_length()
        counts[most] = counts.get(most, 0) + 1


class Sample(NamedTuple):
    """One sample that was read and is not settled."""

    sample_id: str
    version: int | None
    tokens: int
    batch: pa.RecordBatch
    row: int
    page: _Page

    def record(self) -> pa.RecordBatch:
        """Return it as a batch of one, a view."""
        return self.batch.slice(self.row, 1)


@dataclass(slots=True, eq=False)
class _Page:
    """A read of the log: where it began, and what of it is still open."""

    before: str | None
    open: int = 0
    settled: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    since: float
    samples: list[Sample] = field(default_factory=list)


class Pending:
    """Takes pages of the log, hands out ready samples, and knows the cursor.

    The cursor stands before the oldest page of which a sample is not settled, that is, neither
    delivered nor left out; ids that are settled behind it are remembered. So a state never skips a
    sample, and none comes twice.

    Parameters
    ----------
    cursor : str, optional
    settled : iterable of str
        Ids behind the cursor that are settled.
    group_size : int, optional
        Samples of a group; it is ready when they are there. ``None``: every sample is.
    group_timeout_s : float
    on_timeout : {"release", "drop"}
    clock : callable
    metrics : OnlineMetrics
    """

    def __init__(
        self,
        cursor: str | None,
        settled: Iterable[str],
        *,
        group_size: int | None,
        group_timeout_s: float,
        on_timeout: OnTimeout,
        clock: Callable[[], float],
        metrics: OnlineMetrics,
    ) -> None:
        self.read_to = cursor
        self.ready: list[Sample] = []
        self._resumed = set(settled)
        self._group_size = group_size
        self._timeout_s, self._on_timeout = group_timeout_s, on_timeout
        self._clock = clock
        self._metrics = metrics
        self._pages: deque[_Page] = deque()
        self._groups: dict[str, _Group] = {}
        self._ids: set[str] = set()
        # Of pages that are still open, so that memory stays bounded.
        self._settled: set[str] = set()

    @property
    def ready_tokens(self) -> int:
        """Tokens of the samples that are ready."""
        return sum(sample.tokens for sample in self.ready)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the samples whose groups are incomplete."""
        return sum(s.tokens for group in self._groups.values() for s in group.samples)

    def cursor(self) -> str | None:
        """Return the cursor that passes no sample that is not settled."""
        self._close_pages()
        return self._pages[0].before if self._pages else self.read_to

    def settled(self) -> list[str]:
        """Return the ids behind the cursor that are settled."""
        self._close_pages()
        return [sample_id for page in self._pages for sample_id in page.settled]

    def unsettled(self) -> list[str]:
        """Return the ids of all samples read and not settled."""
        return sorted(self._ids)

    def add(self, page: Page) -> None:
        """Take what the log gave.

        Raises
        ------
        SchemaMismatchError
            It is no page of samples.
        InvariantError
            A sample has no id.
        """
        _check_page(page)
        opened = _Page(self.read_to)
        for batch in page.batches:
            for group, sample in _samples(batch, opened):
                self._take(group, sample)
        self.read_to = page.cursor
        if opened.open or opened.settled:
            self._pages.append(opened)

    def expire(self, *, everything: bool = False) -> None:
        """Decide about groups whose time is up, or about all."""
        now = self._clock()
        for name, group in list(self._groups.items()):
            if everything or now - group.since >= self._timeout_s:
                self._give_up(name)

    def expire_oldest(self) -> None:
        """Decide about the group that waits longest."""
        if self._groups:
            self._give_up(next(iter(self._groups)))

    def settle(self, samples: Iterable[Sample]) -> None:
        """Note that samples are delivered, or left out."""
        for sample in samples:
            sample.page.open -= 1
            sample.page.settled.append(sample.sample_id)
            self._settled.add(sample.sample_id)
            self._ids.discard(sample.sample_id)

    def _take(self, group: str | None, sample: Sample) -> None:
        if sample.sample_id in self._resumed:
            self._resumed.discard(sample.sample_id)
            sample.page.settled.append(sample.sample_id)
            self._settled.add(sample.sample_id)
            return
        self._metrics.read += 1
        if sample.sample_id in self._ids or sample.sample_id in self._settled:
            self._metrics.duplicates += 1
            return
        self._ids.add(sample.sample_id)
        sample.page.open += 1
        self._metrics.unknown_version += sample.version is None
        if self._group_size is None or group is None:
            self.ready.append(sample)
            return
        waiting = self._groups.setdefault(group, _Group(self._clock()))
        waiting.samples.append(sample)
        if len(waiting.samples) >= self._group_size:
            self.ready += self._groups.pop(group).samples

    def _give_up(self, name: str) -> None:
        samples = self._groups.pop(name).samples
        self._metrics.groups_timed_out += 1
        if self._on_timeout == "release":
            self.ready += samples
        else:
            self._metrics.dropped_timeout += len(samples)
            self.settle(samples)

    def _close_pages(self) -> None:
        while self._pages and not self._pages[0].open:
            self._settled.difference_update(self._pages.popleft().settled)


def _check_page(page: Any) -> None:
    batches: Any = getattr(page, "batches", None)
    sound = isinstance(batches, list | tuple) and isinstance(getattr(page, "cursor", 0), str | None)
    if not sound:
        raise SchemaMismatchError(
            "a log gives pages", expected="Page(batches, cursor: text, is_end)", got=repr(page),
            remedy="return ragged_format.torch.tail.Page from read()",
        )  # fmt: skip
    for number, batch in enumerate(batches):
        where = Where(batch=number)
        if not isinstance(batch, pa.RecordBatch):
            raise SchemaMismatchError(
                "a page has record batches", where=where, expected="RecordBatch",
                got=type(batch).__name__, remedy="convert it with rf.canonical(data, schema)",
            )  # fmt: skip
        missing = [name for name in _NEEDED if name not in batch.schema.names]
        if missing:
            raise SchemaMismatchError(
                "a log holds samples", code="RF-S002", where=where, expected=", ".join(_NEEDED),
                got=", ".join(batch.schema.names), remedy="pack samples, not packed rows",
            )  # fmt: skip
        ids = batch.column("sample_id")
        if ids.null_count:
            raise InvariantError(
                "a value is null", code="RF-I002", expected="an id for every sample", got="null",
                where=Where(batch=number, row=ids.is_null().index(True).as_py(),
                            column="sample_id"),
                remedy="give every sample an id of its own",
            )  # fmt: skip


def _samples(batch: pa.RecordBatch, page: _Page) -> Iterator[tuple[str | None, Sample]]:
    """Yield group and sample for every record."""
    ids: list[str] = batch.column("sample_id").to_pylist()
    groups, versions = (_optional(batch, name) for name in ("group_id", "policy_version"))
    lengths = np.asarray(pc.list_value_length(batch.column("input_ids"))).tolist()
    for row, facts in enumerate(zip(ids, groups, versions, lengths, strict=True)):
        sample_id, group, version, tokens = facts
        yield group, Sample(sample_id, version, tokens, batch, row, page)


def _optional(batch: pa.RecordBatch, name: str) -> list[Any]:
    if name in batch.schema.names:
        return list(batch.column(name).to_pylist())
    return [None] * batch.num_rows
