"""Threads that make requests of bodies, and validate the small ones among them together.

Validation works on whole columns: what it costs is for a small request mostly the number of its
steps, not their size. When requests wait, a thread takes several and validates them as one.
If anything is wrong with any of them, each is validated by itself, and has its own error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ragged_format.errors import RaggedError
from ragged_server.decode import Body, Decoded, decode, decode_together
from ragged_server.logs import log
from ragged_server.prepare import Incoming, prepare, prepare_together

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ragged_server.context import AnyStore
    from ragged_server.limits import Reservation
    from ragged_server.records import Appended, AppendRequest
    from ragged_server.settings import ServerSettings

__all__ = ["Decoders", "Job"]

# Bodies that are validated together: so many at most, each and all together at most so large.
TOGETHER = 16
SMALL_BYTES = 256 << 10
TOGETHER_BYTES = 1 << 20


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
        See :class:`ragged_server.records.AppendRequest`.
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
        self._waiting: deque[Job] = deque()
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
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Let the threads end; what waits is dropped."""
        with self._changed:
            self._is_open = False
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._is_open and not self._waiting:
                    self._changed.wait()
                if not self._is_open:
                    return
                jobs = self._take()
            refused = self._work(jobs)
            # Bodies must not stay until the next job, nor longer than their reservation.
            del jobs
            while refused:
                refused.pop()()

    def _take(self) -> list[Job]:
        jobs = [self._waiting.popleft()]
        size = len(jobs[0].body.data)
        if not _is_small(jobs[0]):
            return jobs
        # All that waits, though other threads may be idle: they would take turns with this one.
        while self._waiting and len(jobs) < TOGETHER and _is_small(self._waiting[0]):
            size += len(self._waiting[0].body.data)
            if size > TOGETHER_BYTES:
                break
            jobs.append(self._waiting.popleft())
        return jobs

    def _work(self, jobs: Sequence[Job]) -> list[Callable[[], None]]:
        """Hand requests over to the store; return what tells of those that are refused."""
        refused: list[Callable[[], None]] = []
        accepted: list[tuple[_Finish, AppendRequest]] = []
        for job, (found, report) in zip(jobs, self._requests(jobs), strict=True):
            if isinstance(found, BaseException):
                refused.append(partial(job.on_stored, None, found, None))
            else:
                accepted.append((_Finish(job, report), found))
        if accepted:
            # All at once: one commit takes them.
            pending = jobs[0].store.append_all([request for _, request in accepted])
            for (finish, _), future in zip(accepted, pending, strict=True):
                future.add_done_callback(finish)
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


class _Finish:
    """Passes on what became of an append."""

    def __init__(self, job: Job, report: dict[str, Any] | None) -> None:
        self._on_stored = job.on_stored
        self._report = report

    def __call__(self, pending: Future[Appended]) -> None:
        error = pending.exception()
        appended = None if error is not None else pending.result()
        self._on_stored(appended, error, self._report)


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
