"""Bodies of requests: read whole into memory that was reserved before, within time and size."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ragged_server.http_errors import BadRequestError, SlowRequestError
from ragged_server.limits import Budget, Reservation, too_large

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


async def read_body(receive: Receive, size: int, settings: ServerSettings) -> bytearray:
    """Return the whole body of a request.

    Parameters
    ----------
    receive : callable
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
        late = loop.time() >= end
        name = "body_timeout_s" if late else "body_idle_timeout_s"
        limit = settings.body_timeout_s if late else idle
        raise SlowRequestError(
            "the body did not arrive in time", expected=f"{name} <= {limit:g}",
            got=f"{len(out)} bytes", limits={name: limit}, headers={"Connection": "close"},
            remedy="send smaller requests",
        ) from err  # fmt: skip
