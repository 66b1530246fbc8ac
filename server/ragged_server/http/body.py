"""Bodies of requests: read whole into memory that was reserved before, within time and size."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ragged_server.http.direct import TAKE_BODY, BodyReceiver, Bytes, TakeBody
from ragged_server.http.errors import BadRequestError, SlowRequestError
from ragged_server.http.limits import Budget, Reservation, too_large

if TYPE_CHECKING:
    from ragged_server.settings import ServerSettings

__all__ = [
    "ClientGoneError",
    "Headers",
    "Receive",
    "Scope",
    "Send",
    "headers_of_scope",
    "read_body",
]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = dict[bytes, bytes]


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


def headers_of_scope(scope: Scope) -> Headers:
    """Return the header fields of a request by lower-case name; of repeated ones, the list."""
    out: Headers = {}
    for name, value in scope["headers"]:
        out[name] = value if name not in out else out[name] + b", " + value
    return out


def stated_length(headers: Headers, settings: ServerSettings) -> int | None:
    """Return the size that Content-Length states, checked; ``None`` for chunked bodies.

    Raises
    ------
    BadRequestError
        It is not a number (``RF-H001``).
    TooLargeError
        It exceeds ``max_request_bytes`` (``RF-H008``).
    """
    text = headers.get(b"content-length")
    if text is None or b"transfer-encoding" in headers:
        return None
    if not text.isdigit() or len(text) > 19:
        raise BadRequestError(
            "Content-Length is not a number", expected="digits", got=text[:40].decode("latin-1")
        )
    length = int(text)
    if length > settings.max_request_bytes:
        raise too_large("the body", "max_request_bytes", settings.max_request_bytes, length)
    return length


def reserve_body(headers: Headers, settings: ServerSettings, budget: Budget) -> Reservation:
    """Reserve the memory of a body before any of it is read: its length, or the cap if chunked.

    Raises
    ------
    BadRequestError, TooLargeError
        See :func:`stated_length`.
    BusyError
        Bodies in flight use up what they may (``RF-H014``).
    """
    length = stated_length(headers, settings)
    return budget.reserve(settings.max_request_bytes if length is None else length)


async def read_body(scope: Scope, receive: Receive, size: int, settings: ServerSettings) -> Bytes:
    """Return the whole body of a request.

    Parameters
    ----------
    scope, receive
        Of ASGI.
    size : int
        Bytes reserved: more raise, as a body that lies about its length does.
    settings : ServerSettings

    Raises
    ------
    TooLargeError
        A chunked body exceeds ``max_request_bytes`` (``RF-H008``).
    SlowRequestError
        No byte came for ``body_idle_timeout_s``, or not all within ``body_timeout_s``
        (``RF-H007``).
    ClientGoneError
        The client went away.
    """
    take_body = scope.get(TAKE_BODY)
    framing = {name for name, _ in scope["headers"]} & {b"content-length", b"transfer-encoding"}
    if take_body is not None and framing == {b"content-length"}:
        return await _read_directly(take_body, size, settings)
    out = bytearray()
    loop = asyncio.get_running_loop()
    idle = settings.body_idle_timeout_s
    end = loop.time() + settings.body_timeout_s
    try:
        async with asyncio.timeout_at(min(loop.time() + idle, end)) as timer:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGoneError
                out += message.get("body", b"")
                if len(out) > size:
                    raise too_large("the body", "max_request_bytes", size, f"> {size}")
                if not message.get("more_body", False):
                    return out
                timer.reschedule(min(loop.time() + idle, end))
    except TimeoutError as err:
        raise _slow(settings, len(out), is_late=loop.time() >= end) from err


async def _read_directly(take_body: TakeBody, size: int, settings: ServerSettings) -> Bytes:
    """Return the body: as it came with its header, or written by the kernel into its memory."""
    receiver = take_body(size)
    if not isinstance(receiver, BodyReceiver):
        return receiver
    loop = asyncio.get_running_loop()
    end = loop.time() + settings.body_timeout_s
    while not receiver.done.done():
        before = receiver.filled
        timeout = min(settings.body_idle_timeout_s, end - loop.time())
        await asyncio.wait({receiver.done}, timeout=timeout)
        is_late = loop.time() >= end
        if not receiver.done.done() and (is_late or receiver.filled == before):
            raise _slow(settings, receiver.filled, is_late=is_late)
    if not receiver.done.result():
        raise ClientGoneError
    return receiver.buffer


def _slow(settings: ServerSettings, got: int, *, is_late: bool) -> SlowRequestError:
    name = "body_timeout_s" if is_late else "body_idle_timeout_s"
    limit = getattr(settings, name)
    return SlowRequestError(
        "the body did not arrive in time", expected=f"{name} <= {limit:g}", got=f"{got} bytes",
        limits={name: limit}, headers={"Connection": "close"}, remedy="send smaller requests",
    )  # fmt: skip
