"""Bodies straight from the socket into the memory that was reserved for them.

uvicorn copies a body four times on its way to the application, on the event loop. Where the length
of a body is known, its route may take it from the connection itself: at once if it came with its
header, and else another protocol has the transport for as long as the body lasts, and lets the
kernel write into the request's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from typing import Any

__all__ = ["TAKE_BODY", "BodyReceiver", "Bytes", "TakeBody"]

# Key of the scope: a function that returns the whole body, or what receives it.
TAKE_BODY = "ragged.take_body"


class BodyReceiver(asyncio.BufferedProtocol):
    """Has a connection until a buffer is full, then gives it back.

    Parameters
    ----------
    owner : asyncio.Protocol
        Has the connection otherwise.
    transport : asyncio.Transport
    buffer : memoryview
        Of unsigned bytes, writable.
    filled : int
        Bytes of the buffer that are there already, fewer than all.
    when_full : callable
        Called when the connection is the owner's again.

    Attributes
    ----------
    buffer : memoryview
    done : Future of bool
        True when the buffer is full, False if the connection ended before.
    filled : int
    """

    def __init__(
        self,
        owner: Any,
        transport: Any,
        buffer: memoryview,
        filled: int,
        when_full: Callable[[], None],
    ) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.buffer = buffer
        self.filled = filled
        self._size = len(buffer)
        self._owner = owner
        self._transport = transport
        self._when_full = when_full

    def start(self) -> None:
        """Take the connection."""
        # Transports choose how they read when reading begins.
        self._owner.flow.pause_reading()
        self._transport.set_protocol(self)
        self._owner.flow.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return where the next bytes go."""
        return self.buffer[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count what came; gives the connection back when nothing is missing."""
        self.filled += nbytes
        if self.filled >= self._size:
            self._owner.flow.pause_reading()
            self._transport.set_protocol(self._owner)
            self._owner.flow.resume_reading()
            self._when_full()
            self._end(is_full=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on that the connection is gone."""
        self._end(is_full=False)
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass on."""
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._owner.resume_writing()

    def _end(self, *, is_full: bool) -> None:
        if not self.done.done():
            self.done.set_result(is_full)


Bytes: TypeAlias = bytes | bytearray | memoryview
TakeBody: TypeAlias = Callable[[int], Bytes | BodyReceiver]
