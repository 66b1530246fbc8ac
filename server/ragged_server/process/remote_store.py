"""A store used by other processes: they prepare requests, one process writes.

The process that has the store runs a :class:`StoreServer` on a Unix socket; others use a
:class:`RemoteStore`, which has the store's interface. Decoding, validation and digests, which take
most of the time of a request, then run in as many processes as there are cores; the writer gets
finished messages.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from ragged_format.errors import Where
from ragged_format.known_schemas import known_schema, read_schema_message
from ragged_server.process.remote_protocol import (
    Head,
    error_from_json,
    error_to_json,
    gone,
    page_from_frame,
    page_to_frame,
    receive,
    request_from_frame,
    request_to_frame,
    send,
    status_from_json,
)
from ragged_server.store.admission import future_of_answer
from ragged_server.store.cursors import decode_cursor
from ragged_server.store.errors import StorageFailedError
from ragged_server.store.records import Appended, AppendRequest, Page, Recovery, StoreStatus, Tell
from ragged_server.store.store import Store

__all__ = ["RemoteStore", "StoreServer"]

_log = logging.getLogger("ragged_server.process.remote_store")
# Reads of all workers that run at a time.
READERS = 8


def _tell(tell: Tell, call: Future[tuple[Head, pa.Buffer]]) -> None:
    error = call.exception()
    tell(None if error is not None else Appended(**call.result()[0]), error)


class StoreServer:
    """Lets other processes of this machine and user use an open store.

    Parameters
    ----------
    store : Store
        Open; it stays the caller's to close, after this.
    path : Path
        Of the socket; one that is there already is replaced.

    Raises
    ------
    StorageFailedError
        The socket cannot be made, for instance because its path is longer than about 100 bytes.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self.path = path
        self._store = store
        self._listener = socket.socket(socket.AF_UNIX)
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        # Reads may wait for the disk; appends of the same worker must not wait for them.
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ragged-remote-read")
        try:
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))
            # Whoever can connect can write: nobody but this user.
            path.chmod(0o600)
            self._listener.listen(64)
        except OSError as err:
            self._listener.close()
            raise StorageFailedError(
                "the socket of the store cannot be made", where=Where(file=str(path)),
                expected="a short path in a directory that this process may write", got=str(err),
                remedy="choose another path",
            ) from err  # fmt: skip
        self._unsubscribe = store.subscribe(self._tell)
        self._thread = threading.Thread(target=self._accept, name="ragged-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more calls; those under way are answered."""
        self._unsubscribe()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()
        self._readers.shutdown()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            link = _Link(sock, self._store, self._readers, self._ended)
            with self._lock:
                self._links.add(link)
            link.start()

    def _ended(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _tell(self) -> None:
        with self._lock:
            links = list(self._links)
        for link in links:
            link.tell()


class _Link:
    """One connection: a thread that reads calls, and one that sends answers in any order."""

    def __init__(
        self,
        sock: socket.socket,
        store: Store,
        readers: ThreadPoolExecutor,
        ended: Callable[[_Link], None],
    ) -> None:
        self._sock = sock
        self._store = store
        self._readers = readers
        self._ended = ended
        self._out: queue.SimpleQueue[tuple[Head, Page | None] | None] = queue.SimpleQueue()
        self._told = True
        self._open = 0
        self._idle = threading.Condition()
        self._threads = [
            threading.Thread(target=work, name="ragged-link", daemon=True)
            for work in (self._read, self._send)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def tell(self) -> None:
        """Say that there was a commit, once however many there were."""
        if self._told:
            self._told = False
            self._out.put(({"op": "commit"}, None))

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        try:
            while (frame := receive(self._sock)) is not None:
                self._call(*frame)
        except (OSError, ValueError, KeyError):
            pass  # the other side is gone, or no worker of ours
        finally:
            with self._idle:
                self._idle.wait_for(lambda: self._open == 0)
            self._out.put(None)
            self._ended(self)

    def _call(self, head: Head, body: pa.Buffer) -> None:
        number, op = head["id"], head["op"]
        with self._idle:
            self._open += 1
        try:
            if op == "append":
                pending = self._store.append(request_from_frame(head, body))
                pending.add_done_callback(lambda future: self._appended(number, future))
            elif op == "read":
                self._readers.submit(self._read_page, number, head)
            else:
                self._answer({"id": number, "ok": self._facts()})
        except Exception as err:  # noqa: BLE001 - who asked must hear of any fault
            self._answer({"id": number, "error": error_to_json(err)})

    def _read_page(self, number: int, head: Head) -> None:
        try:
            page = self._store.read(
                head["after"], max_bytes=head["max_bytes"], rank=head["rank"],
                world_size=head["world_size"], min_policy_version=head["min_policy_version"],
            )  # fmt: skip
        except Exception as err:  # noqa: BLE001 - who asked must hear of any fault
            self._answer({"id": number, "error": error_to_json(err)})
        else:
            self._answer({"id": number, "ok": {}}, page)

    def _answer(self, head: Head, page: Page | None = None) -> None:
        self._out.put((head, page))
        with self._idle:
            self._open -= 1
            self._idle.notify_all()

    def _facts(self) -> Head:
        store = self._store
        schema = None if store.schema is None else known_schema(store.schema).message.hex()
        return {"status": store.status().to_dict(), "schema": schema}

    def _appended(self, number: int, future: Future[Appended]) -> None:
        error = future.exception()
        if error is None:
            done = future.result()
            values = {name: getattr(done, name) for name in Appended.__slots__}
            self._answer({"id": number, "ok": values})
        else:
            self._answer({"id": number, "error": error_to_json(error)})

    def _send(self) -> None:
        try:
            while (entry := self._out.get()) is not None:
                head, page = entry
                body: list[Any] = []
                if page is not None:
                    values, body = page_to_frame(page, self._store.schema)
                    head = {**head, "ok": values}
                elif "op" in head:
                    self._told = True
                    head = {**head, **self._facts()}
                send(self._sock, head, body)
        except OSError:
            pass  # the other side is gone
        finally:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()


class RemoteStore:
    """The store of another process, with the interface of :class:`ragged_server.store.store.Store`.

    Errors are those of the store; :class:`ClosedStoreError` where the other process is gone.

    Parameters
    ----------
    path : Path
        Of its socket.
    timeout_s : float
        How long :meth:`open` waits for the other process.
    on_gone : callable, optional
        Called with the reason when the other process is lost, not when this store is closed.
    """

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float = 30.0,
        on_gone: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._on_gone = on_gone
        self._numbers = itertools.count()
        self._pending: dict[int, Future[tuple[Head, pa.Buffer]]] = {}
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._commits = threading.Condition()
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self._schema: pa.Schema | None = None
        self._end = 0
        self._gone: str | None = "it was not opened"
        self._sock: socket.socket | None = None

    def open(self) -> Recovery:
        """Connect, and return how the store was recovered."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(str(self._path))
                break
            except OSError as err:
                sock.close()
                if time.monotonic() > deadline:
                    raise gone(f"no connection in {self._timeout_s:g} s: {err}") from err
                time.sleep(0.05)
        self._sock, self._gone = sock, None
        self._thread = threading.Thread(target=self._read, name="ragged-remote", daemon=True)
        self._thread.start()
        status = self.status()
        self.log_id = bytes.fromhex(status.log_id)
        if status.recovery is None:
            raise gone("a store that was not recovered")
        return status.recovery

    @property
    def schema(self) -> pa.Schema | None:
        """Columns of the log; None until the first request if it has none yet."""
        return self._schema

    def append(self, request: AppendRequest) -> Future[Appended]:
        """Queue a request; see :meth:`Store.append`. All errors are the future's."""
        future, tell = future_of_answer()
        self.append_all([request], [tell])
        return future

    def append_all(self, requests: Sequence[AppendRequest], tells: Sequence[Tell]) -> None:
        """Queue requests, each by itself; see :meth:`Store.append_all`."""
        for request, tell in zip(requests, tells, strict=True):
            head, body = request_to_frame(request)
            self._call(head, body).add_done_callback(partial(_tell, tell))

    def read(
        self,
        after: str | None,
        *,
        max_bytes: int,
        rank: int = 0,
        world_size: int = 1,
        min_policy_version: int | None = None,
    ) -> Page:
        """Return records after a cursor; see :meth:`Store.read`."""
        call = self._call(
            {
                "op": "read", "after": after, "max_bytes": max_bytes, "rank": rank,
                "world_size": world_size, "min_policy_version": min_policy_version,
            }
        )  # fmt: skip
        return page_from_frame(*call.result())

    def wait(self, after: str | None, timeout_s: float) -> bool:
        """Wait until there are records after a cursor; return whether there are."""
        if after is None:
            start = self.status().oldest_sequence
        else:
            start = decode_cursor(after, self.log_id)
        with self._commits:
            self._commits.wait_for(lambda: self._end > start or self._gone, timeout_s)
            return self._end > start

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after commits, from a thread of this store; return what ends that."""

        def entry() -> None:
            callback()

        with self._lock:
            self._callbacks = (*self._callbacks, entry)

        def end() -> None:
            with self._lock:
                self._callbacks = tuple(other for other in self._callbacks if other is not entry)

        return end

    def status(self) -> StoreStatus:
        """Return the store's state."""
        facts, _ = self._call({"op": "status"}).result()
        self._learn(facts)
        return status_from_json(facts["status"])

    def close(self, *, seal_while: Callable[[], bool] | None = None) -> None:  # noqa: ARG002
        """Let go of the connection, when all calls are answered; the store stays open.

        What is in the log is sealed by the process that has the store.
        """
        if self._sock is None:
            return
        with self._lock:
            self._gone = self._gone or "it was closed"
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._thread.join()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, head: Head, body: list[Any] | None = None) -> Future[tuple[Head, pa.Buffer]]:
        call: Future[tuple[Head, pa.Buffer]] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._gone is not None or self._sock is None:
                call.set_exception(gone(self._gone or "no connection"))
                return call
            self._pending[number] = call
        try:
            with self._send_lock:
                send(self._sock, {**head, "id": number}, body or ())
        except OSError as err:
            self._fail(str(err))
        return call

    def _read(self) -> None:
        detail = f"process {os.getpid()} lost the connection"
        try:
            while self._sock is not None and (frame := receive(self._sock)) is not None:
                head, body = frame
                if "op" in head:
                    self._learn(head)
                    self._tell()
                    continue
                with self._lock:
                    call = self._pending.pop(head["id"])
                if "error" in head:
                    call.set_exception(error_from_json(head["error"]))
                else:
                    call.set_result((head["ok"], body))
        except OSError as err:
            detail = str(err)
        finally:
            self._fail(detail)
            if self._sock is not None:
                self._sock.close()

    def _tell(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - it must not end the thread that all calls need
                _log.exception("a subscriber failed")

    def _learn(self, facts: Head) -> None:
        if self._schema is None and facts["schema"] is not None:
            self._schema = read_schema_message(bytes.fromhex(facts["schema"])).schema
        with self._commits:
            self._end = max(self._end, facts["status"]["next_sequence"])
            self._commits.notify_all()

    def _fail(self, detail: str) -> None:
        with self._lock:
            is_news = self._gone is None
            self._gone = self._gone or detail
            calls = list(self._pending.values())
            self._pending.clear()
        for call in calls:
            call.set_exception(gone(detail))
        with self._commits:
            self._commits.notify_all()
        if is_news and self._on_gone is not None:
            self._on_gone(detail)
