"""How the clients talk: one interface, over blocking calls and threads or over asyncio.

Everything above it is written once, as coroutines. The blocking form never suspends, so that
:func:`run_now` can run such a coroutine to its end in one step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import httpx2

from ragged_format.errors import LimitExceededError, Where

__all__ = ["Answer", "BlockingIo", "Call", "Io", "TaskIo", "run_now"]

T = TypeVar("T")
R = TypeVar("R")

# A connection that does not open, or a server that stops in the middle.
_CONNECT_S = 10.0
_STALL_S = 60.0
_END: Any = object()


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request."""

    method: str
    url: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    wait_s: float = 0.0  # how long the server may be silent on purpose
    max_bytes: int = 1 << 30  # largest answer


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole HTTP answer; its body as it came, content coding included."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Io(Protocol):
    """What the shared code of the clients needs of the world."""

    async def send(self, call: Call) -> Answer:
        """Return the answer to one request; raises ``httpx2.TransportError``."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    async def call(self, function: Callable[[], T]) -> T:
        """Run what takes long without holding others up."""
        ...

    def each(
        self, function: Callable[[T], Coroutine[Any, Any, R]], items: Iterator[T], in_flight: int
    ) -> AsyncIterator[R]:
        """Apply a coroutine function to items, some at a time; results as they come."""
        ...


def run_now(coroutine: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """Return the result of a coroutine that never suspends.

    Examples
    --------
    >>> async def twice(number: int) -> int:
    ...     return 2 * number
    >>> run_now(twice(4))
    8
    """
    steps: Any = coroutine if isinstance(coroutine, Coroutine) else coroutine.__await__()
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a blocking call was suspended")


def _request(client: Any, call: Call) -> Any:
    timeout = httpx2.Timeout(_STALL_S, connect=_CONNECT_S, read=_STALL_S + call.wait_s, pool=None)
    # Bodies are taken as they come: the reader of streams decodes zstd, within its own limits.
    headers = {"accept-encoding": "identity", **call.headers}
    return client.stream(
        call.method, call.url, params=dict(call.params), headers=headers, content=call.content,
        timeout=timeout,
    )  # fmt: skip


class _Body:
    """The parts of an answer, counted."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._call.max_bytes:
            raise LimitExceededError(
                "the server's answer is larger than the limit", where=Where(file=self._call.url),
                expected=f"<= {self._call.max_bytes} bytes", got=f">= {self._size} bytes",
            )  # fmt: skip
        self._parts.append(part)

    def answer(self, response: Any) -> Answer:
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status_code, headers, b"".join(self._parts))


class _Thread(threading.local):
    """What ends the pauses of a thread."""

    def __init__(self) -> None:
        self.stopped = threading.Event()


class BlockingIo:
    """Blocking calls; several at a time in threads. Its coroutines never suspend."""

    def __init__(self, **options: Any) -> None:
        self._http = httpx2.Client(**options)
        self._thread = _Thread()

    async def send(self, call: Call) -> Answer:
        body = _Body(call)
        with _request(self._http, call) as response:
            for part in response.iter_raw():
                body.add(part)
            return body.answer(response)

    async def sleep(self, seconds: float) -> None:
        if self._thread.stopped.wait(seconds):
            raise CancelledError

    async def call(self, function: Callable[[], T]) -> T:
        return function()

    async def each(
        self, function: Callable[[T], Coroutine[Any, Any, R]], items: Iterator[T], in_flight: int
    ) -> AsyncIterator[R]:
        if in_flight == 1:
            for item in items:
                yield await function(item)
            return
        stopped = threading.Event()
        # Not `concurrent.futures.wait`: interrupted at the wrong step, it keeps locks of futures,
        # for which their threads then wait for ever.
        done: SimpleQueue[Future[R]] = SimpleQueue()
        with ThreadPoolExecutor(in_flight, "ragged-push") as pool:
            running = 0
            try:
                for item in items:
                    future = pool.submit(self._apply, stopped, function, item)
                    future.add_done_callback(done.put)
                    running += 1
                    if running == in_flight:
                        running -= 1
                        yield done.get().result()
                for _ in range(running):
                    yield done.get().result()
            finally:
                # The caller has failed or was interrupted: nobody waits for what is left.
                stopped.set()

    def _apply(
        self,
        stopped: threading.Event,
        function: Callable[[T], Coroutine[Any, Any, R]],
        item: T,
    ) -> R:
        self._thread.stopped = stopped
        # Made here, so that one which is cancelled before it begins is none.
        return run_now(function(item))

    def close(self) -> None:
        self._http.close()


class TaskIo:
    """Calls in an asyncio event loop; several at a time in tasks."""

    def __init__(self, **options: Any) -> None:
        self._http = httpx2.AsyncClient(**options)

    async def send(self, call: Call) -> Answer:
        body = _Body(call)
        async with _request(self._http, call) as response:
            async for part in response.aiter_raw():
                body.add(part)
            return body.answer(response)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def call(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function)

    async def each(
        self, function: Callable[[T], Coroutine[Any, Any, R]], items: Iterator[T], in_flight: int
    ) -> AsyncIterator[R]:
        running: set[asyncio.Task[R]] = set()
        try:
            while (item := await asyncio.to_thread(next, items, _END)) is not _END:
                running.add(asyncio.create_task(function(item)))
                if len(running) == in_flight:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def close(self) -> None:
        await self._http.aclose()
