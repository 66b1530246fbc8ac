"""Threads that make requests of bodies, and validate the small ones among them together.

Validation works on whole columns: what it costs is for a small request mostly the number of its
steps, not their size. When requests wait, a thread takes several and validates them as one.
If anything is wrong with any of them, each is validated by itself, and has its own error.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ragged_format.errors import RaggedError
from ragged_server.http.decode import Body, Decoded, decode, decode_together
from ragged_server.logs import log
from ragged_server.store.prepare import Incoming, prepare, prepare_together

if TYPE_CHECKING:
    from ragged_server.http.context import AnyStore
    from ragged_server.http.limits import Reservation
    from ragged_server.settings import ServerSettings
    from ragged_server.store.records import Appended, AppendRequest, Tell

__all__ = ["Decoders", "Job"]

# Bodies that are validated together: so many at most, each and all together at most so large.
TOGETHER = 32
SMALL_BYTES = 256 << 10
TOGETHER_BYTES = 2 << 20


# A request or why there is none, and the report of a conversion.
_Outcome: TypeAlias = "tuple[AppendRequest | BaseException, dict[str, Any] | None]"


@dataclass(frozen=True, slots=True)
class Job:
    """One request on its way from its body to the store.

    Attributes
    ----------
    body : Body
    reservation : Reservation
        Of the memory that it takes.
    store : Store
    account, idempotency_key : str, optional
        See :class:`ragged_server.store.records.AppendRequest`.
    on_stored : callable
        Called once, from any thread, with the store's answer, None or the error, and the report of
        a conversion or None.
    """

    body: Body
    reservation: Reservation
    store: AnyStore
    account: str | None
    idempotency_key: str | None
    on_stored: Callable[[Appended | None, BaseException | None, dict[str, Any] | None], None]


class Decoders:
    """The threads.

    Parameters
    ----------
    settings : ServerSettings
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        # Small and large ones, each with its number. One thread at a time has small ones: several
        # would take turns, since steps of little data keep the interpreter, and make groups small.
        self._small: deque[tuple[int, Job]] = deque()
        self._large: deque[tuple[int, Job]] = deque()
        self._numbers = itertools.count()
        self._has_small = False
        self._changed = threading.Condition()
        self._is_open = True
        self._threads = [
            threading.Thread(target=self._run, name=f"decode_{number}", daemon=True)
            for number in range(settings.decode_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        if _is_small(job):
            self._small.append((next(self._numbers), job))
            if self._has_small:
                return  # the thread that has small ones looks for more before it sleeps
        else:
            self._large.append((next(self._numbers), job))
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Let the threads end; what waits is dropped."""
        with self._changed:
            self._is_open = False
            self._small.clear()
            self._large.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        has_small = False
        while True:
            with self._changed:
                if has_small and not self._small:
                    has_small = self._has_small = False
                while self._is_open and not self._can_take(has_small=has_small):
                    self._changed.wait()
                if not self._is_open:
                    return
                jobs, has_small = self._take(has_small=has_small)
            try:
                refused = self._work(jobs)
                # Bodies must not stay until the next job, nor longer than their reservation.
                del jobs
                while refused:
                    refused.pop()()
            except BaseException:
                self._has_small &= not has_small
                raise

    def _can_take(self, *, has_small: bool) -> bool:
        return bool(self._large or (self._small and (has_small or not self._has_small)))

    def _take(self, *, has_small: bool) -> tuple[list[Job], bool]:
        """Return what has waited longest, and whether it is small; then all small ones with it.

        The thread `has_small` if its last ones were small; it lets go of them for a large one.
        """
        takes_small = bool(self._small) and (has_small or not self._has_small)
        if takes_small and self._large:
            takes_small = self._small[0][0] < self._large[0][0]
        if not takes_small:
            self._has_small &= not has_small
            jobs = [self._large.popleft()[1]]
        else:
            self._has_small = True
            jobs = [self._small.popleft()[1]]
            size = len(jobs[0].body.data)
            while self._small and len(jobs) < TOGETHER:
                size += len(self._small[0][1].body.data)
                if size > TOGETHER_BYTES:
                    break
                jobs.append(self._small.popleft()[1])
        if self._can_take(has_small=False):
            self._changed.notify()
        return jobs, takes_small

    def _work(self, jobs: Sequence[Job]) -> list[Callable[[], None]]:
        """Hand requests over to the store; return what tells of those that are refused."""
        refused: list[Callable[[], None]] = []
        accepted: list[tuple[Tell, AppendRequest]] = []
        for job, (found, report) in zip(jobs, self._requests(jobs), strict=True):
            if isinstance(found, BaseException):
                refused.append(partial(job.on_stored, None, found, None))
            else:
                accepted.append((partial(_tell, job.on_stored, report), found))
        if accepted:
            # All at once: one commit takes them.
            tells, requests = zip(*accepted, strict=True)
            jobs[0].store.append_all(requests, tells)
        return refused

    def _requests(self, jobs: Sequence[Job]) -> Sequence[_Outcome]:
        if len(jobs) > 1:
            # A fault of one must not cost the others their answers, nor the thread.
            try:
                return self._together(jobs)
            except Exception as err:  # noqa: BLE001  each is decoded by itself
                log.error("fault", requests=len(jobs), exc_info=err)
        return [self._alone(job) for job in jobs]

    def _together(self, jobs: Sequence[Job]) -> Sequence[_Outcome]:
        decoded, groups = decode_together(
            [(job.body, job.reservation) for job in jobs], self._settings
        )
        made: dict[int, AppendRequest] = {}
        for group in groups:
            members = [jobs[number] for number in group.members]
            incoming = [
                Incoming(
                    found.batches, found.messages, found.contents, job.account, job.idempotency_key
                )
                for job, found in zip(members, group.found, strict=True)
            ]
            try:
                requests = prepare_together(incoming, group.whole, jobs[0].store.schema)
            except RaggedError:
                continue  # each is told in its own words
            made.update(zip(group.members, requests, strict=True))
        return [
            (made[number], None) if number in made else _prepared(job, found)
            for number, (job, found) in enumerate(zip(jobs, decoded, strict=True))
        ]

    def _alone(self, job: Job) -> _Outcome:
        try:
            found = decode(job.body, self._settings, job.reservation, lambda: job.store.schema)
        except BaseException as err:  # noqa: BLE001  it is raised where the request is awaited
            return err, None
        return _prepared(job, found)


def _tell(
    on_stored: Callable[..., None],
    report: dict[str, Any] | None,
    appended: Appended | None,
    error: BaseException | None,
) -> None:
    on_stored(appended, error, report)


def _is_small(job: Job) -> bool:
    body = job.body
    return body.form == "arrow" and not body.is_compressed and len(body.data) <= SMALL_BYTES


def _prepared(job: Job, found: Decoded | BaseException) -> _Outcome:
    if isinstance(found, BaseException):
        return found, None
    try:
        request = prepare(
            found.schema, found.batches, messages=found.messages, contents=found.contents,
            log_schema=job.store.schema, account=job.account, idempotency_key=job.idempotency_key,
        )  # fmt: skip
    except BaseException as err:  # noqa: BLE001  it is raised where the request is awaited
        return err, None
    return request, found.report
