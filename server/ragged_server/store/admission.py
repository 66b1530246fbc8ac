"""Deciding what of a group of requests is new: before anything is written, in one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ragged_format.canonical import require_same
from ragged_format.errors import RaggedError, Where
from ragged_format.known_schemas import KnownSchema, known_schema
from ragged_server.store.commits import Remembered
from ragged_server.store.errors import ClosedStoreError, ConflictError, QueueFullError
from ragged_server.store.index import IdIndex
from ragged_server.store.ledger import Ledger, require_fingerprint
from ragged_server.store.prepare import subset
from ragged_server.store.records import Appended, AppendRequest, Bytes, StoreSettings, Tell

_log = logging.getLogger("ragged_server.store.store")

__all__ = ["Group", "Waiting", "closed_store", "future_of_answer", "queue_full"]


def future_of_answer() -> tuple[Future[Appended], Tell]:
    """Return a future, and what resolves it when it is told an answer."""
    future: Future[Appended] = Future()
    # Nobody may take back what the writer has in hand.
    future.set_running_or_notify_cancel()

    def tell(appended: Appended | None, error: BaseException | None) -> None:
        if error is not None:
            future.set_exception(error)
        elif appended is not None:
            future.set_result(appended)

    return future, tell


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    Attributes
    ----------
    request : AppendRequest
    tell : callable
        See :meth:`ragged_server.store.store.Store.append_all`.
    nbytes : int
    is_told : bool
    """

    request: AppendRequest
    tell: Tell
    nbytes: int
    is_told: bool = False

    def succeed(self, appended: Appended) -> None:
        """Tell the answer."""
        self._tell(appended, None)

    def fail(self, error: BaseException) -> None:
        """Tell why there is none."""
        self._tell(None, error)

    def _tell(self, appended: Appended | None, error: BaseException | None) -> None:
        self.is_told = True
        try:
            self.tell(appended, error)
        except Exception:  # noqa: BLE001 - it must not stop the writer
            _log.exception("nobody could be told of a request")


def queue_full(settings: StoreSettings, requests: int, nbytes: int) -> QueueFullError:
    """Return the error for a request that comes while so much waits."""
    return QueueFullError(
        "too much waits for the disk",
        expected=f"<= {settings.queue_requests} requests, {settings.queue_bytes} bytes",
        got=f"{requests} requests, {nbytes} bytes", retry_after_s=1.0,
        remedy="send the request again a little later",
    )  # fmt: skip


def closed_store(state: str) -> ClosedStoreError:
    """Return the error for a call while the store is not open."""
    return ClosedStoreError(
        "the store is not open", expected="open", got=state, retry_after_s=5.0,
        remedy="open it first" if state == "new" else "send the request to the server's successor",
    )  # fmt: skip


@dataclass(slots=True)
class _Outcome:
    waiting: Waiting
    first_sequence: int
    stored: int
    duplicates: int
    replayed: bool
    # Whether the answer is true only if the group's commit succeeds.
    depends: bool


@dataclass(slots=True)
class Group:
    """The requests of one commit.

    Parameters
    ----------
    known : KnownSchema, optional
        Columns of the log; those of the first request if it has none yet.
    index : IdIndex
    ledger : Ledger
    next_sequence : int
        Of the first record that the group stores.
    now : float
        Seconds since 1970.

    Attributes
    ----------
    requests : list of AppendRequest
        What is to be written: only records that are new.
    added : dict of bytes to bytes
        Their id and record digests, in order.
    keys : list of Remembered
    accounts : dict of str to (int, int)
        Records and bytes.
    duplicates, conflicts : int
        Records, requests.
    """

    known: KnownSchema | None
    index: IdIndex
    ledger: Ledger
    next_sequence: int
    now: float
    requests: list[AppendRequest] = field(default_factory=list)
    added: dict[bytes, bytes] = field(default_factory=dict)
    keys: list[Remembered] = field(default_factory=list)
    accounts: dict[str, tuple[int, int]] = field(default_factory=dict)
    duplicates: int = 0
    conflicts: int = 0
    _outcomes: list[_Outcome] = field(default_factory=list)
    # Requests that are refused, why, and whether the reason may be what the group wants to store.
    _refused: list[tuple[Waiting, RaggedError, bool]] = field(default_factory=list)
    _pending: dict[tuple[str, str], Remembered] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to make durable."""
        return not (self.requests or self.keys)

    def admit(self, waiting: Sequence[Waiting]) -> None:
        """Decide on requests in order."""
        keys = [_keys(entry.request) for entry in waiting]
        raw: list[Bytes] = [entry.request.id_digests for entry in waiting]
        flat = [key for own in keys for key in own]
        stored = self.index.look_up(flat, np.concatenate(raw)) if flat else {}
        for entry, own in zip(waiting, keys, strict=True):
            try:
                self._admit(entry, own, stored)
            except RaggedError as err:
                self.conflicts += isinstance(err, ConflictError)
                self._refused.append((entry, err, not self.is_empty))

    def _admit(self, waiting: Waiting, ids: list[bytes], stored: dict[bytes, bytes]) -> None:
        request = waiting.request
        known = self.known or known_schema(request.schema)
        if request.schema is not known.schema:
            require_same(known.ragged, known_schema(request.schema).ragged)
        account = request.account or ""
        fingerprint = request.fingerprint.hex()
        key = request.idempotency_key
        if key is not None:
            before = self._pending.get((account, key))
            depends = before is not None
            if before is not None:
                require_fingerprint(before, fingerprint)
            else:
                before = self.ledger.answer(account, key, fingerprint, self.now)
            if before is not None:
                self._outcomes.append(
                    _Outcome(waiting, before.first_sequence, before.stored, before.duplicates,
                             replayed=True, depends=depends)
                )  # fmt: skip
                return
        records = request.record_digests.tobytes()
        digests = [records[start : start + 16] for start in range(0, len(records), 16)]
        in_group = not self.added.keys().isdisjoint(ids)
        if in_group or not stored.keys().isdisjoint(ids):
            request = self._without_duplicates(request, ids, digests, stored)
        more = request.nbytes if request.rows else 0
        used = self.accounts.get(account, (0, 0))
        self.ledger.check_quota(request.account, used, request.rows, more, self.now)
        duplicates = len(ids) - request.rows
        outcome = _Outcome(
            waiting, self.next_sequence, request.rows, duplicates, replayed=False,
            depends=bool(request.rows) or in_group or key is not None,
        )  # fmt: skip
        self._outcomes.append(outcome)
        self.known = known
        self.duplicates += duplicates
        if request.rows:
            self.requests.append(request)
            self.added.update(
                zip(ids, digests, strict=True)
                if not duplicates
                else zip(_keys(request), _digests(request), strict=True)
            )
            self.next_sequence += request.rows
            if request.account is not None:
                self.accounts[account] = (used[0] + request.rows, used[1] + more)
        if key is not None:
            entry = Remembered(
                account, key, fingerprint, outcome.first_sequence, request.rows, duplicates
            )
            self._pending[account, key] = entry
            self.keys.append(entry)

    def _without_duplicates(
        self,
        request: AppendRequest,
        ids: list[bytes],
        digests: list[bytes],
        stored: dict[bytes, bytes],
    ) -> AppendRequest:
        keep = np.ones(len(ids), bool)
        for row, (key, digest) in enumerate(zip(ids, digests, strict=True)):
            before = self.added.get(key) or stored.get(key)
            if before is None:
                continue
            if before != digest:
                names = (
                    name for batch in request.batches
                    for name in batch.column("sample_id").to_pylist()
                )  # fmt: skip
                name = next(name for at, name in enumerate(names) if at == row)
                raise ConflictError(
                    f"the sample_id {name!r} is stored with other content",
                    where=Where(row=row, column="sample_id"),
                    expected=f"the record with digest {before.hex()}", got=digest.hex(),
                    remedy="give the new record an id of its own; nothing of the request is stored",
                )  # fmt: skip
            keep[row] = False
        return subset(request, keep)

    def succeed(self, cursor_of: Callable[[int], str], end: int) -> None:
        """Resolve the requests, with all that they depend on durable; `end` is the log's end."""
        for waiting, error, _ in self._refused:
            waiting.fail(error)
        for outcome in self._outcomes:
            at = outcome.first_sequence + outcome.stored
            if not outcome.stored and not outcome.replayed:
                at = end
            answer = Appended(
                outcome.first_sequence, outcome.stored, outcome.duplicates, cursor_of(at),
                outcome.replayed,
            )  # fmt: skip
            outcome.waiting.succeed(answer)

    def fail(self, error: RaggedError, cursor_of: Callable[[int], str], end: int) -> None:
        """Refuse the requests that depend on what was not made durable; resolve the others."""
        for outcome in self._outcomes:
            if outcome.depends:
                outcome.waiting.fail(error)
        self._outcomes = [outcome for outcome in self._outcomes if not outcome.depends]
        self._refused = [
            (waiting, error if depends else own, False) for waiting, own, depends in self._refused
        ]
        self.succeed(cursor_of, end)


def _keys(request: AppendRequest) -> list[bytes]:
    raw = request.id_digests.tobytes()
    return [raw[start : start + 16] for start in range(0, len(raw), 16)]


def _digests(request: AppendRequest) -> list[bytes]:
    raw = request.record_digests.tobytes()
    return [raw[start : start + 16] for start in range(0, len(raw), 16)]
