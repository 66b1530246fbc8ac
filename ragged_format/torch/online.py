"""Packed rows from a log of samples that is still being written, for asynchronous RL."""

from __future__ import annotations

import inspect
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from ragged_format.arguments import (
    check_callable,
    check_choice,
    check_integer,
    check_mapping,
    check_number,
    check_text,
)
from ragged_format.errors import LimitExceededError, StateMismatchError
from ragged_format.packing import pack_row, plan_rows
from ragged_format.parse import parse_schema
from ragged_format.ragged import concat, take
from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.empty import empty_row
from ragged_format.torch.pending import OnlineMetrics, OnTimeout, Pending, Sample, count_lengths
from ragged_format.torch.prefetch import Prefetcher
from ragged_format.torch.tail import Tail, tail_of

if TYPE_CHECKING:
    import numpy as np

__all__ = ["OnlineLoader"]

_KIND = "ragged_format.torch.OnlineLoader"
_VERSION = 1
# Rows' worth of samples that may wait for the rest of their groups.
_MOST_WAITING = 64
# Share of the budget from which a row is not planned again with what comes later.
_FULL = 0.9


class _Step(NamedTuple):
    rows: list[RaggedBatch]
    state: dict[str, Any]
    metrics: OnlineMetrics


class OnlineLoader:
    """Tails a log of samples, plans and packs them, and yields the rows of step after step.

    Run it in one process; the others get their rows from it::

        rows = OnlineLoader(tail, 32768, rows=data_parallel_size) if rank == 0 else None
        for batch in scatter_stream(rows):
            ...

    Samples of a group wait for each other. What is ready is planned together as soon as it fills
    `window` steps, or when nothing more comes; where the last step of a plan has a row with gaps,
    it is held back to be planned again with what comes later.

    Every row carries, in ``row.state``, the state after its step: the log's cursor, which never
    passes a sample that is not yet delivered or left out, and the ids behind it that are. A loader
    that continues there delivers every other sample exactly once, with any options.

    Guarantees: nothing is left out uncounted (`metrics`). One iteration at a time. Not thread-safe.

    Parameters
    ----------
    source : Tail, path or URL
        A log, or what ``rf.open_source`` opens: a server (``http://host:8080``) is followed for
        ever, any other source ends.
    token_budget : int
        Most tokens of a row, shared prefixes counted once.
    rows : int
        Rows of a step, one for each data-parallel rank. A step that lacks rows gets empty ones.
    packing, fork, within_group, null_advantage
        As for ``pack_row``.
    group_size : int, optional
        Samples with one ``group_id`` that wait for each other. Default: nothing waits.
    group_timeout_s : float
        How long a group may stay incomplete.
    on_timeout : {"release", "drop"}
        What then happens to its samples; also at the end of the log, and where more samples wait
        than 64 rows hold.
    max_staleness : int, optional
        Samples whose ``policy_version`` is more than so many versions behind are left out when
        rows are planned. Needs `current_version`.
    current_version : callable, optional
        Returns the trainer's policy version; called in the loader's thread.
    on_oversize : {"error", "drop"}
        What happens to a sample longer than a row.
    window : int
        Steps' worth of samples that are planned together.
    max_wait_s : float
        How long to wait for a full window while some samples are ready.
    prefetch : int
        Steps made ahead in a thread; 0 makes them in the calling thread.
    clock : callable
        Seconds, for tests.

    Raises
    ------
    LimitExceededError
        A number is out of its range, or a choice is unknown (``RF-L001``); while iterating, a
        sample is longer than a row.
    """

    def __init__(
        self,
        source: Tail | str | os.PathLike[str],
        token_budget: int,
        *,
        rows: int = 1,
        packing: Literal["tree", "sequence"] = "tree",
        fork: Literal["token", "transition"] = "token",
        within_group: bool = False,
        null_advantage: Literal["error", "keep"] = "error",
        group_size: int | None = None,
        group_timeout_s: float = 300.0,
        on_timeout: OnTimeout = "release",
        max_staleness: int | None = None,
        current_version: Callable[[], int] | None = None,
        on_oversize: Literal["error", "drop"] = "error",
        window: int = 2,
        max_wait_s: float = 5.0,
        prefetch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_integer("token_budget", token_budget, 1)
        check_integer("rows", rows, 1)
        check_integer("window", window, 1)
        check_integer("prefetch", prefetch, 0)
        if group_size is not None:
            check_integer("group_size", group_size, 1)
        check_choice("packing", packing, ("tree", "sequence"))
        check_choice("fork", fork, ("token", "transition"))
        check_choice("null_advantage", null_advantage, ("error", "keep"))
        check_choice("on_timeout", on_timeout, ("release", "drop"))
        check_choice("on_oversize", on_oversize, ("error", "drop"))
        check_number("group_timeout_s", group_timeout_s, 0)
        check_number("max_wait_s", max_wait_s, 0)
        check_callable("clock", clock)
        if max_staleness is not None:
            check_integer("max_staleness", max_staleness, 0)
        if current_version is not None:
            check_callable("current_version", current_version)
        if (max_staleness is None) != (current_version is None):
            raise LimitExceededError(
                "a limit of staleness needs the current version", got="one of them",
                expected="both max_staleness and current_version, or neither",
                remedy="pass the other one too",
            )  # fmt: skip
        tail = tail_of(source)
        check_text("the identity of the source", tail.identity)
        self._options = _Options(
            tail, token_budget, rows,
            packing, fork, within_group, null_advantage, group_size, group_timeout_s, on_timeout,
            max_staleness, current_version, on_oversize, window, max_wait_s, clock,
        )  # fmt: skip
        self._prefetch = prefetch
        self._state = self._options.state(None, [], [], 0)
        self._running: weakref.ref[_Steps] | None = None
        self.metrics = OnlineMetrics()

    def __iter__(self) -> Iterator[list[RaggedBatch]]:
        """Continue after the last step that was delivered; ends an iteration before."""
        if (running := self._under_way()) is not None:
            running.supersede()
        steps = _Steps(self, self._options, self._state, deepcopy(self.metrics), self._prefetch)
        self._running = weakref.ref(steps)
        return steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step that the consumer got, as JSON values."""
        return deepcopy(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved state with the next ``iter()``.

        Raises
        ------
        StateMismatchError
            The state is not one of an on-line loader, or belongs to another log; or an iteration
            is under way.
        """
        ours = {"kind": _KIND, "version": _VERSION, "log": self._options.tail.identity}
        check_mapping("state", state)
        theirs = {name: state.get(name) for name in ours}
        if theirs != ours:
            raise StateMismatchError(
                "the state belongs to another log or kind of loader",
                expected=f"{ours} (this loader)", got=f"{theirs} (the state)",
                remedy="pass what state_dict() returned for the same log",
            )  # fmt: skip
        steps = state.get("steps")
        sound = isinstance(state.get("cursor", 0), str | None) and type(steps) is int and steps >= 0
        if not sound or not _are_texts(state.get("settled")):
            raise StateMismatchError(
                "the state is malformed", expected="cursor: text, settled: ids, steps: int >= 0",
                got=dict(state), remedy="pass what state_dict() returned",
            )  # fmt: skip
        if self._under_way() is not None:
            raise StateMismatchError(
                "a state cannot be loaded while an iteration is under way",
                expected="no iteration, or one that was closed", got="a running one",
                remedy="call close() first",
            )  # fmt: skip
        self._state = deepcopy(dict(state))

    def close(self) -> None:
        """End the iteration that runs and its thread."""
        if (running := self._under_way()) is not None:
            running.close()

    def _under_way(self) -> _Steps | None:
        running = None if self._running is None else self._running()
        return running if running is not None and running.is_running else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


class _Steps(Iterator[list[RaggedBatch]]):
    """One iteration; dropping it ends its thread."""

    def __init__(
        self,
        loader: OnlineLoader,
        options: _Options,
        state: dict[str, Any],
        metrics: OnlineMetrics,
        prefetch: int,
    ) -> None:
        self._loader = loader
        self.is_running = True
        self._superseded = False
        stopped = threading.Event()
        if prefetch:
            prefetcher: Prefetcher[_Step] = Prefetcher(
                lambda: options.steps(state, metrics, stopped), prefetch, "ragged-online"
            )
            self._next = prefetcher.get
            self._end = weakref.finalize(self, _end, stopped, prefetcher.stop)
        else:
            steps = options.steps(state, metrics, stopped)
            self._next = steps.__next__
            self._end = weakref.finalize(self, _end, stopped, lambda: _close(steps))

    def __next__(self) -> list[RaggedBatch]:
        if self._superseded:
            raise StateMismatchError(
                "a later iteration of this loader has begun", expected="one iteration at a time",
                got="an iterator from before", remedy="use one iterator",
            )  # fmt: skip
        if not self.is_running:
            raise StopIteration
        try:
            step = self._next()
        except BaseException:
            self.close()
            raise
        self._loader._state = deepcopy(step.state)  # noqa: SLF001 - rows may be changed by their user
        self._loader.metrics = step.metrics
        if not step.rows:
            self.close()
            raise StopIteration
        return step.rows

    def supersede(self) -> None:
        """End, and make later calls an error."""
        self._superseded = True
        self.close()

    def close(self) -> None:
        """End the thread."""
        if self.is_running:
            self.is_running = False
            self._end()


def _end(stopped: threading.Event, stop: Callable[[], None]) -> None:
    # First, because the thread may be waiting for samples that never come.
    stopped.set()
    stop()


def _close(steps: Generator[_Step, None, None]) -> None:
    # One that runs, in another thread or below a signal handler, ends by itself.
    if inspect.getgeneratorstate(steps) != inspect.GEN_RUNNING:
        steps.close()


@dataclass(frozen=True)
class _Options:
    """What an on-line loader does; makes steps from a state on."""

    tail: Tail
    token_budget: int
    rows: int
    packing: Literal["tree", "sequence"]
    fork: Literal["token", "transition"]
    within_group: bool
    null_advantage: Literal["error", "keep"]
    group_size: int | None
    group_timeout_s: float
    on_timeout: OnTimeout
    max_staleness: int | None
    current_version: Callable[[], int] | None
    on_oversize: Literal["error", "drop"]
    window: int
    max_wait_s: float
    clock: Callable[[], float]

    def state(
        self, cursor: str | None, settled: list[str], pending: list[str], steps: int
    ) -> dict[str, Any]:
        return {
            "kind": _KIND, "version": _VERSION, "log": self.tail.identity, "cursor": cursor,
            "settled": settled, "pending": pending, "steps": steps,
        }  # fmt: skip

    def steps(
        self, state: Mapping[str, Any], metrics: OnlineMetrics, stopped: threading.Event
    ) -> Generator[_Step, None, None]:
        """Yield steps from a state on, and at the end of the log one without rows."""
        pending = Pending(
            state["cursor"], state["settled"], group_size=self.group_size,
            group_timeout_s=self.group_timeout_s, on_timeout=self.on_timeout, clock=self.clock,
            metrics=metrics,
        )  # fmt: skip
        number = state["steps"]
        is_end = False

        def after() -> dict[str, Any]:
            return self.state(pending.cursor(), pending.settled(), pending.unsettled(), number)

        while not is_end and not stopped.is_set():
            is_end = self._gather(pending, stopped)
            for rows in self._pack(pending, metrics, everything=is_end):
                number += 1
                reached = after()
                targets = sum(int(row.lengths_host("target").sum()) for row in rows)
                for row in rows:
                    row.state, row.step_targets = reached, targets
                metrics.steps += 1
                yield _Step(rows, reached, deepcopy(metrics))
        yield _Step([], after(), metrics)

    def _gather(self, pending: Pending, stopped: threading.Event) -> bool:
        """Read until a window is full or nothing more comes; return whether the log has ended."""
        full = self.window * self.rows * self.token_budget
        since = self.clock()
        while not stopped.is_set():
            pending.expire()
            while pending.waiting_tokens > _MOST_WAITING * self.rows * self.token_budget:
                pending.expire_oldest()
            if pending.ready_tokens >= full:
                return False
            waited = self.clock() - since
            if pending.ready and waited >= self.max_wait_s:
                return False
            page = self.tail.read(
                pending.read_to, wait_s=min(1.0, max(0.0, self.max_wait_s - waited))
            )
            pending.add(page)
            if page.is_end:
                pending.expire(everything=True)
                return True
        return False

    def _pack(
        self, pending: Pending, metrics: OnlineMetrics, *, everything: bool
    ) -> Iterator[list[RaggedBatch]]:
        """Plan what is ready and yield its steps; hold the last back unless it is everything."""
        samples = self._fresh(pending, metrics)
        pending.ready = []
        if not samples:
            return
        window = concat([sample.record() for sample in samples])
        plan = plan_rows(
            window, self.token_budget, self.rows, packing=self.packing, fork=self.fork,
            within_group=self.within_group,
        )  # fmt: skip
        self._leave_out(pending, samples, plan.without_target, plan.oversize, metrics)
        count = -(-len(plan.rows) // self.rows)
        last = plan.unique_tokens[(count - 1) * self.rows :]
        is_full = len(last) == self.rows and last.min() >= _FULL * self.token_budget
        delivered = count if everything or count == 1 or is_full else count - 1
        for row in plan.rows[delivered * self.rows :]:
            pending.ready += [samples[number] for number in row.tolist()]
        for step in range(delivered):
            chosen = plan.rows[step * self.rows : (step + 1) * self.rows]
            rows = [
                pack_row(
                    take(window, numbers), self.packing, self.fork,
                    within_group=self.within_group, null_advantage=self.null_advantage,
                )
                for numbers in chosen
            ]  # fmt: skip
            fillers = self.rows - len(rows)
            if fillers:
                rows += [empty_row(parse_schema(rows[0].schema))] * fillers
            batches = [RaggedBatch.from_arrow(row) for row in rows]
            for batch in batches[self.rows - fillers :]:
                batch.is_filler = True
            self._count(metrics, [samples[n] for row in chosen for n in row.tolist()], fillers)
            pending.settle(samples[n] for row in chosen for n in row.tolist())
            yield batches

    def _fresh(self, pending: Pending, metrics: OnlineMetrics) -> list[Sample]:
        """Return what is ready and not too old; settle the rest."""
        if self.current_version is None or self.max_staleness is None:
            return pending.ready
        oldest = self._version() - self.max_staleness
        stale = [s for s in pending.ready if s.version is not None and s.version < oldest]
        metrics.dropped_stale += len(stale)
        count_lengths(metrics.stale_by_length, (sample.tokens for sample in stale))
        pending.settle(stale)
        return [s for s in pending.ready if s.version is None or s.version >= oldest]

    def _version(self) -> int:
        version: Any = None if self.current_version is None else self.current_version()
        try:
            return operator.index(version)
        except TypeError as err:
            raise LimitExceededError(
                "current_version returns a policy version", expected="an integer",
                got=repr(version), remedy="return the number of the trainer's version",
            ) from err  # fmt: skip

    def _leave_out(
        self,
        pending: Pending,
        samples: list[Sample],
        without_target: np.ndarray[Any, np.dtype[np.int64]],
        oversize: np.ndarray[Any, np.dtype[np.int64]],
        metrics: OnlineMetrics,
    ) -> None:
        if len(oversize) and self.on_oversize == "error":
            sample = samples[int(oversize[0])]
            raise LimitExceededError(
                f"sample {sample.sample_id!r} is longer than a row",
                expected=f"<= {self.token_budget} tokens", got=sample.tokens,
                remedy="raise token_budget, or pass on_oversize='drop'",
            )  # fmt: skip
        metrics.without_target += len(without_target)
        metrics.dropped_oversize += len(oversize)
        pending.settle(samples[n] for n in [*without_target.tolist(), *oversize.tolist()])

    def _count(self, metrics: OnlineMetrics, samples: list[Sample], fillers: int) -> None:
        metrics.delivered += len(samples)
        count_lengths(metrics.delivered_by_length, (sample.tokens for sample in samples))
        metrics.rows += self.rows - fillers
        metrics.filler_rows += fillers
        if self.current_version is not None:
            now = self._version()
            behind = [now - s.version for s in samples if s.version is not None]
            metrics.max_staleness = max([metrics.max_staleness, *behind])
            metrics.sum_staleness += sum(behind)
