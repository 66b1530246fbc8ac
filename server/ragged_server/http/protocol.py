"""Limits on connections that uvicorn does not have: size and time of headers, and unread bodies.

uvicorn's parser keeps a header field of any size in memory until its end arrives, waits for it
without limit, and reads and drops the rest of a body whose request was answered already; or it
closes, where the answer says so, and what was not read has the kernel reset the connection, often
before a client that sends first has seen the answer (RFC 9112 §9.6).
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

import httptools
import numpy as np
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ragged_format.errors import RaggedError
from ragged_server.http.body import Receive, Scope, Send
from ragged_server.http.direct import TAKE_BODY, BodyReceiver, Bytes
from ragged_server.http.errors import (
    BadRequestError,
    BusyError,
    HeaderTooLargeError,
    SlowRequestError,
)
from ragged_server.http.problems import MEDIA_TYPE, headers_of, problem, status_of
from ragged_server.logs import log
from ragged_server.settings import ServerSettings

__all__ = ["protocol_class"]

# What nobody reads is taken and dropped so long, and so much of it (of bodies, beyond the largest):
# a client that is still sending gets to see the answer.
_LINGER_S = 5.0
_LINGER_BYTES = 16 << 20
_LINGER_HEADER_BYTES = 1 << 20
_MAX_FIELDS = 100


def protocol_class(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """Return the protocol for connections of a server with these limits."""

    class Limited(_LimitedProtocol):
        limits = settings

    return Limited


class _LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bytes since a header began, or between two pieces of a body: chunk sizes and trailers.
        self._overhead = 0
        self._is_reading_header = True
        self._is_refused = False
        # Answered for the last time; what still comes is dropped.
        self._is_ending = False
        self._timer: asyncio.TimerHandle | None = None
        self._lingering: int | None = None
        self._most_lingering = 0
        # How the body is framed whose request asked for another protocol, and whether the parser
        # is just being told so.
        self._upgrade_framing: bytes | None = None
        self._is_replaying = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._for_cycles = _LateClose(self, transport)
        if len(self.connections) > self.limits.max_connections:
            limit = self.limits.max_connections
            self._refuse(
                BusyError(
                    "too many connections are open", expected=f"max_connections <= {limit}",
                    got=f"> {limit}", retry_after_s=1.0,
                ),
                is_sending=False,  # the limit is that of open files
            )  # fmt: skip
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._lingering is not None:
            self._lingering += len(data)
            if self._lingering > self._most_lingering:
                self._close()
                return
        if self._is_ending:
            return
        self._overhead += len(data)
        self._feed(data)
        if self.transport.is_closing() or self._is_refused or self._is_ending:
            return
        if self._is_reading_header and self._timer is None:
            self._start_header_timer()  # most headers come whole, and need none
        if self._overhead > self.limits.max_header_bytes:
            if self._is_reading_header:
                self._refuse(self._header_too_large(f"> {self.limits.max_header_bytes} bytes"))
            elif not self._body_is_read():
                self._abort_body()

    def _feed(self, data: bytes) -> None:
        try:
            self._unset_keepalive_if_required()
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:
            self._ignore_upgrade(data[switch.args[0] :])
        except httptools.HttpParserError as err:
            self.send_400_response(str(err))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on with HTTP/1.1, as a server may: some clients ask for h2c with every request.

        The parser has left the body to the other protocol; a new one is told of its framing.
        """
        self.parser = self._new_parser()
        framing, self._upgrade_framing = self._upgrade_framing, None
        if framing is not None:
            self._is_replaying = True
            try:
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
            finally:
                self._is_replaying = False
        if rest:
            self._feed(rest)

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def on_url(self, url: bytes) -> None:
        if not self._is_replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_replaying:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        if self._is_replaying:
            return
        super().on_message_begin()
        self._is_reading_header = True
        self._overhead = 0
        self._stop_timer()

    def _take_body(self, cycle: Any, size: int) -> Bytes | BodyReceiver:
        """Return a body of this size, or what receives it; see :mod:`ragged_server.http.direct`."""
        came: bytes | bytearray = cycle.body
        filled = len(came)
        cycle.body = b""
        if cycle.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        if filled >= size:
            return came
        # Not cleared: nobody sees it before it is full.
        buffer = np.empty(size, np.uint8).data
        buffer[:filled] = came
        receiver = BodyReceiver(self, self.transport, buffer, filled, self._body_is_there)
        receiver.start()
        return receiver

    def _body_is_there(self) -> None:
        """Begin behind a body that the parser did not see."""
        self.parser = self._new_parser()
        self.cycle.more_body = False

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            return
        if self.parser.should_upgrade():
            self._upgrade_framing = _framing(self.headers)
        self._stop_timer()
        self._is_reading_header = False
        self._overhead = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        error: RaggedError | None = None
        if size > self.limits.max_header_bytes:
            error = self._header_too_large(f"{size} bytes")
        elif len(self.headers) > _MAX_FIELDS:
            error = HeaderTooLargeError(
                "the header has too many fields", expected=f"<= {_MAX_FIELDS}",
                got=len(self.headers), limits={"fields": _MAX_FIELDS},
            )  # fmt: skip
        if error is None:
            super().on_headers_complete()
            self.cycle.transport = self._for_cycles  # type: ignore[assignment]
            # Of this request: others may begin before its route asks for the body.
            take_body = partial(self._take_body, self.cycle)
            self.scope[TAKE_BODY] = take_body  # type: ignore[literal-required]
            return
        app, self.app = self.app, _Refusal(error)
        try:
            super().on_headers_complete()
            self.cycle.transport = self._for_cycles  # type: ignore[assignment]
        finally:
            self.app = app

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        cycle: Any = self.cycle
        if not (cycle.body or cycle.response_complete):
            # The first piece, most often the only one, is kept as it is: no copy.
            cycle.body, body = body, b""
        elif type(cycle.body) is bytes:
            cycle.body = bytearray(cycle.body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade_framing is not None:
            return  # the body follows
        super().on_message_complete()
        self._overhead = 0
        if self._lingering is not None and not self._is_ending:
            self._lingering = None
            self._stop_timer()

    def on_response_complete(self) -> None:
        if self._is_ending:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        is_last = self.cycle.response_complete  # no other request has begun
        if self.transport.is_closing() or not is_last or self._body_is_read():
            return
        # uvicorn would take the rest of this body without end.
        self._linger()

    def close_after_answer(self) -> None:
        """Close when an answer says so, in a way that the client sees it."""
        has_rest = self.cycle.response_complete and self.cycle.more_body
        # A body that goes to its memory directly is cut: that memory is not reserved any more.
        if has_rest and self.transport.get_protocol() is self:
            self._end()
        else:
            self.transport.close()

    def _end(self) -> None:
        """Send no more; take and drop what comes until the client closes, for a while."""
        if self.transport.is_closing():
            return
        if self.pipeline:
            self.transport.close()  # answers to earlier requests are under way
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # As if the client had gone: nobody waits for the rest, or answers a second time.
            cycle.disconnected = True
            cycle.message_event.set()
        self._is_ending = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger()
        self.flow.resume_reading()

    def _linger(self) -> None:
        self._unset_keepalive_if_required()
        self._lingering = 0
        is_body = not self._is_reading_header
        self._most_lingering = (
            self.limits.max_request_bytes + _LINGER_BYTES if is_body else _LINGER_HEADER_BYTES
        )
        self._stop_timer()
        self._timer = self.loop.call_later(_LINGER_S, self._close)

    def _body_is_read(self) -> bool:
        return self.cycle is None or not self.cycle.more_body

    def _start_header_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.limits.header_timeout_s, self._header_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _header_is_late(self) -> None:
        limit = self.limits.header_timeout_s
        self._refuse(
            SlowRequestError(
                "the header did not arrive in time", expected=f"header_timeout_s <= {limit:g}",
                got="a part of it", limits={"header_timeout_s": limit},
            ),
            is_sending=False,
        )  # fmt: skip

    def _header_too_large(self, got: str) -> RaggedError:
        limit = int(self.limits.max_header_bytes)
        return HeaderTooLargeError(
            "the header is too large", expected=f"max_header_bytes <= {limit}", got=got,
            limits={"max_header_bytes": limit},
        )  # fmt: skip

    def _abort_body(self) -> None:
        """End a request whose body is framed by more than it holds."""
        if not self.cycle.response_started:
            error = BadRequestError(
                "the chunks of the body have too much around them",
                expected=f"<= {int(self.limits.max_header_bytes)} bytes between two pieces",
                got="more",
            )  # fmt: skip
            self._write(error)
        self._end()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        self._refuse(
            BadRequestError("the request is not HTTP/1.1", expected="an HTTP/1.1 request", got=msg)
        )

    def _refuse(self, error: RaggedError, *, is_sending: bool = True) -> None:
        """Answer before there is a request, and close.

        Parameters
        ----------
        error : RaggedError
        is_sending : bool
            Whether more may come of what is refused, for whose sender the connection stays a while.
        """
        self._is_refused = not is_sending
        self._stop_timer()
        if not self.transport.is_closing():
            cycle = self.cycle
            # An answer to the request whose body comes, unless others are to be answered before.
            if (
                cycle is None
                or cycle.response_complete
                or (cycle.more_body and not self.pipeline and not cycle.response_started)
            ):
                self._write(error)
            if is_sending:
                self._end()
            else:
                self.transport.close()

    def _write(self, error: RaggedError) -> None:
        status, fields, body = _answer(error, self.client)
        lines = [f"HTTP/1.1 {status} Refused\r\n".encode()]
        lines += [b"".join((name, b": ", value, b"\r\n")) for name, value in fields]
        self.transport.write(b"".join((*lines, b"\r\n", body)))

    def _close(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()


def _framing(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the header field that says how a body is framed, None if there is no body."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and int(value) > 0):
            return name + b": " + value
    return None


class _LateClose:
    """A transport for the answers of one connection, whose closing is the connection's decision."""

    __slots__ = ("_owner", "is_closing", "write")

    def __init__(self, owner: _LimitedProtocol, transport: asyncio.Transport) -> None:
        self._owner = owner
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        """Close when the client has seen the answer."""
        self._owner.close_after_answer()


class _Refusal:
    """An application that answers one request with an error and closes the connection."""

    def __init__(self, error: RaggedError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        status, fields, body = _answer(self._error, scope.get("client"))
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})


def _answer(
    error: RaggedError, client: tuple[str, int] | None
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, header and body for a request that no route sees, and log it."""
    request_id = os.urandom(8).hex()
    status = status_of(error)
    log.info(
        "connection_refused", client=(client or ("",))[0], status=status, code=error.code,
        what=error.what, request_id=request_id,
    )  # fmt: skip
    body = problem(error, request_id)
    fields = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        (b"x-request-id", request_id.encode()),
        *headers_of(error),
    ]
    return status, fields, body
