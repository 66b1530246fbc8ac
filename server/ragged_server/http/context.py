"""What the routes of one application share."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ragged_server.http.auth import Keys, load_keys
from ragged_server.http.decoders import Decoders
from ragged_server.http.errors import NotReadyError
from ragged_server.http.limits import Budget
from ragged_server.http.metrics import Metrics
from ragged_server.settings import ServerSettings

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_server.store.records import AppendRequest, Page, StoreStatus, Tell

__all__ = ["AnyStore", "Context", "Mailbox", "Wakeups"]


class AnyStore(Protocol):
    """What the HTTP side uses of a store; :class:`ragged_server.store.store.Store` is one."""

    @property
    def schema(self) -> pa.Schema | None:
        """Schema of the log; ``None`` before the first request."""
        ...

    def append_all(self, requests: Sequence[AppendRequest], tells: Sequence[Tell]) -> None:
        """Store requests, each by itself; each is told of when it is durable, or refused."""
        ...

    def read(
        self,
        after: str | None,
        *,
        max_bytes: int,
        rank: int = 0,
        world_size: int = 1,
        min_policy_version: int | None = None,
    ) -> Page:
        """Return records after a cursor."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after each commit, from another thread; returns what ends that."""
        ...

    def status(self) -> StoreStatus:
        """Return the store's state."""
        ...

    def close(self, *, seal_while: Callable[[], bool] | None = None) -> None:
        """Finish what is queued, seal what is in the log if asked to, and close."""
        ...


class Wakeups:
    """Lets coroutines wait for the next commit, of which another thread tells."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the loop on which coroutines wait."""
        self._loop = loop

    def tell(self) -> None:
        """Wake all that wait; callable from any thread."""
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """Return a future that the next commit resolves; :meth:`leave` takes it back."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        return future

    def leave(self, future: asyncio.Future[None]) -> None:
        """Wait no more."""
        self._waiting.discard(future)
        future.cancel()


class Mailbox:
    """Calls on the event loop that other threads ask for; many of them wake it once."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_told = False

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Have something called; from any thread. Nothing happens when the loop is closed."""
        self._calls.append(call)
        if not self._is_told and not loop.is_closed():
            self._is_told = True
            loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        # First, so that what is put from now on tells again.
        self._is_told = False
        while self._calls:
            self._calls.popleft()()


class Context:
    """State of one application.

    Parameters
    ----------
    settings : ServerSettings
    open_store : callable
        Opens the store; called once, in a thread, after the server answers /healthz.
    """

    def __init__(self, settings: ServerSettings, open_store: Callable[[], AnyStore]) -> None:
        self.settings = settings
        self.keys: Keys = load_keys(settings)
        self.budget = Budget(settings.max_in_flight_bytes)
        self.metrics = Metrics()
        self.wakeups = Wakeups()
        self.answers = Mailbox()
        self.decoders = Decoders(settings)
        # Reads may block on the disk, so that they have threads of their own.
        self.readers = ThreadPoolExecutor(settings.read_threads, thread_name_prefix="read")
        self.started_s = time.time()
        self.is_draining = False
        # Set when the server is to end at once.
        self.is_hurried = False
        self._drained_by_s = float("inf")
        self.failure: BaseException | None = None
        self.opened = asyncio.Event()
        self.ingesting = 0
        self.reading = 0
        self.read_slots = asyncio.Semaphore(settings.max_readers)
        self._open_store = open_store
        self._store: AnyStore | None = None
        self._unsubscribe: Callable[[], None] | None = None

    @property
    def store(self) -> AnyStore:
        """The store; raises :class:`NotReadyError` until it is open."""
        if self._store is None:
            raise NotReadyError(
                "the server is starting: the store is not open yet", expected="a recovered store",
                got="recovery, or its failure", retry_after_s=1.0,
            )  # fmt: skip
        return self._store

    @property
    def is_open(self) -> bool:
        """Whether the store is open."""
        return self._store is not None

    def require_intake(self) -> None:
        """Raise :class:`NotReadyError` if the server takes no new samples."""
        if self.is_draining:
            raise NotReadyError(
                "the server is stopping", expected="a running server", got="one that drains",
                retry_after_s=2.0, headers={"Connection": "close"},
            )  # fmt: skip

    async def open(self) -> None:
        """Open the store in a thread; sets :attr:`failure` if that fails."""
        loop = asyncio.get_running_loop()
        self.wakeups.bind(loop)
        try:
            store = await loop.run_in_executor(self.readers, self._open_store)
        except Exception as err:  # noqa: BLE001  whatever it is, the server says so and stops
            self.failure = err
        else:
            self._store = store
            self._unsubscribe = store.subscribe(self.wakeups.tell)
        finally:
            self.opened.set()

    def drain(self) -> None:
        """Stop taking requests, and let reads that wait answer at once."""
        self.is_draining = True
        if self._drained_by_s == float("inf"):
            settings = self.settings
            allowed = settings.drain_delay_s + settings.drain_timeout_s
            self._drained_by_s = time.monotonic() + allowed
        self.wakeups.tell()

    def _may_seal(self) -> bool:
        return not self.is_hurried and time.monotonic() < self._drained_by_s

    async def close(self) -> None:
        """Close the store after everything that was taken is durable."""
        self.drain()
        await self.opened.wait()
        loop = asyncio.get_running_loop()
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._store is not None:
            seal_while = self._may_seal if self.settings.seal_on_stop else None
            close = partial(self._store.close, seal_while=seal_while)
            await loop.run_in_executor(self.readers, close)
        self.decoders.close()
        self.readers.shutdown(wait=False, cancel_futures=True)

    def why_not_ready(self) -> str | None:
        """Return why the server cannot take samples now, ``None`` if it can."""
        if self.is_draining:
            return "stopping"
        if self.failure is not None:
            return "the store cannot be opened"
        if self._store is None:
            return "recovering"
        failure: str | None = self._store.status().failure
        return failure

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the HTTP side as plain JSON values."""
        return {
            "dataset": self.settings.dataset,
            "started_s": self.started_s,
            "not_ready": self.why_not_ready(),
            "in_flight_bytes": self.budget.used,
            "max_in_flight_bytes": self.budget.total,
            "ingesting": self.ingesting,
            "reading": self.reading,
            "waiting": len(self.wakeups),
        }
