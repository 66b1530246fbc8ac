"""``GET /v1/samples``: records after a cursor, as one Arrow stream; waits for new ones if asked to.

The answer is complete if its trailer is there. When something fails after it began, the connection
is broken off: neither trailer nor end-of-stream mark is ever sent for a part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import zstandard

from ragged_format.streams import StreamWriter
from ragged_server.http.body import (
    ClientGoneError,
    Headers,
    Receive,
    Scope,
    Send,
    headers_of_scope,
)
from ragged_server.http.errors import BadRequestError, BusyError, NotAcceptableError
from ragged_server.http.ingest import ARROW
from ragged_server.http.respond import accepts, parameters_of, send_bytes

if TYPE_CHECKING:
    from ragged_server.http.context import AnyStore, Context
    from ragged_server.store.records import Page

__all__ = ["CURSOR_KEY", "Query", "SlowReaderError", "Tail"]

# Custom metadata of every batch: where to read on after it.
CURSOR_KEY = "ragged_server:cursor"
_PARAMETERS = ("after", "wait", "max_bytes", "rank", "world_size", "min_policy_version")
_MAX_WORLD = 1 << 20
_MAX_CURSOR = 512
_LEVEL = 1
# Reads wait so long for a place among those that are answered.
_SLOT_S = 10.0
# A part of the answer that is handed to the transport at once.
_PIECE = 1 << 20

T = TypeVar("T")


class SlowReaderError(Exception):
    """The client takes nothing of its answer; the connection is broken off."""


@dataclass(frozen=True, slots=True)
class Query:
    """What a read asks for.

    Attributes
    ----------
    after : str, optional
        Cursor; ``None`` is the oldest record.
    wait_s : float
        How long to wait for records.
    max_bytes : int
    rank, world_size : int
        The share of records that is wanted.
    min_policy_version : int, optional
        Older records are left out.
    """

    after: str | None
    wait_s: float
    max_bytes: int
    rank: int
    world_size: int
    min_policy_version: int | None


class Tail:
    """The route.

    Parameters
    ----------
    context : Context
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a stream of the records, 204 if the log has no schema yet."""
        context = self._context
        headers = headers_of_scope(scope)
        authorization = headers.get(b"authorization")
        context.keys.check(
            None if authorization is None else authorization.decode("latin-1"), "read"
        )
        if not accepts(headers.get(b"accept"), ARROW):
            raise NotAcceptableError(
                "Accept excludes the only media type that there is", expected=ARROW,
                got=headers[b"accept"][:200].decode("latin-1"),
            )  # fmt: skip
        query = self._query(scope)
        store = context.store
        page = await self._page(store, query, receive)
        await self._slot()
        try:
            await self._answer(send, store, page, headers)
        finally:
            context.read_slots.release()

    async def _answer(self, send: Send, store: AnyStore, page: Page, headers: Headers) -> None:
        fields = [
            (b"ragged-cursor", page.cursor.encode()),
            (b"ragged-records", b"%d" % page.records),
            (b"ragged-lag", b"%d" % page.lag),
            (b"cache-control", b"no-store"),
        ]
        schema = store.schema
        if schema is None:
            await send({"type": "http.response.start", "status": 204, "headers": fields})
            await send({"type": "http.response.body", "body": b""})
            return
        fields += [(b"content-type", ARROW.encode()), (b"vary", b"accept-encoding, authorization")]
        is_compressed = _takes_zstd(headers)
        if is_compressed:
            fields.append((b"content-encoding", b"zstd"))
        await self._stream(send, schema, page, fields, is_compressed=is_compressed)

    def _query(self, scope: Scope) -> Query:
        settings = self._context.settings
        parameters = parameters_of(scope, _PARAMETERS)
        after = parameters.text("after") or None
        if after is not None and len(after) > _MAX_CURSOR:
            raise BadRequestError("the cursor is too long", expected=f"<= {_MAX_CURSOR} characters")
        world_size = parameters.integer("world_size", 1, 1, _MAX_WORLD)
        rank = parameters.integer("rank", 0, 0)
        if rank >= world_size:
            raise BadRequestError(
                "the rank is not one of the world", expected=f"rank < world_size = {world_size}",
                got=rank,
            )  # fmt: skip
        version = None
        if parameters.text("min_policy_version") is not None:
            version = parameters.integer("min_policy_version", 0, -(1 << 63))
        max_bytes = parameters.integer("max_bytes", settings.page_bytes, 1)
        wait_s = min(parameters.number("wait", 0.0), settings.max_wait_s)
        return Query(
            after, wait_s, min(max_bytes, settings.max_page_bytes), rank, world_size, version
        )

    async def _page(self, store: AnyStore, query: Query, receive: Receive) -> Page:
        """Return a page with records, or an empty one when the time is up."""
        context = self._context
        loop = asyncio.get_running_loop()
        end = loop.time() + query.wait_s
        after = query.after
        gone = None
        try:
            while True:
                # Asked for before the read, so that no commit between the two is missed.
                told = context.wakeups.wait()
                try:
                    page = await self._read(store, query, after)
                    left = end - loop.time()
                    if page.records or left <= 0 or context.is_draining:
                        return page
                    if page.lag and page.cursor != after:
                        after = page.cursor  # records of other ranks only; there are more
                        continue
                    after = page.cursor
                    if len(context.wakeups) > context.settings.max_waiting:
                        raise _busy("reads wait", "max_waiting", context.settings.max_waiting)
                    gone = gone or asyncio.ensure_future(_disconnected(receive))
                    await asyncio.wait(
                        {told, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                    )
                    if gone.done():
                        raise ClientGoneError
                finally:
                    context.wakeups.leave(told)
        finally:
            if gone is not None:
                gone.cancel()

    async def _read(self, store: AnyStore, query: Query, after: str | None) -> Page:
        read = partial(
            store.read, after, max_bytes=query.max_bytes, rank=query.rank,
            world_size=query.world_size, min_policy_version=query.min_policy_version,
        )  # fmt: skip
        return await self._in_thread(read)

    async def _slot(self) -> None:
        """Wait for one of the ``max_readers`` places of reads that are answered."""
        context = self._context
        try:
            async with asyncio.timeout(_SLOT_S):
                await context.read_slots.acquire()
        except TimeoutError as err:
            limit = context.settings.max_readers
            raise _busy("reads are answered", "max_readers", limit) from err

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._context.readers, work)

    async def _stream(
        self,
        send: Send,
        schema: pa.Schema,
        page: Page,
        fields: list[tuple[bytes, bytes]],
        *,
        is_compressed: bool,
    ) -> None:
        context = self._context
        context.reading += 1
        try:
            pieces = _encoded(schema, page, is_compressed=is_compressed)
            piece = await self._in_thread(partial(next, pieces, b""))
            if page.records == 0:
                rest = await self._in_thread(lambda: b"".join(pieces))
                context.metrics.sent.inc(len(piece) + len(rest))
                await send_bytes(send, 200, piece + rest, fields)
                return
            await send({"type": "http.response.start", "status": 200, "headers": fields})
            while piece:
                following = await self._in_thread(partial(next, pieces, b""))
                await self._send(send, piece, more=bool(following))
                context.metrics.sent.inc(len(piece))
                piece = following
            context.metrics.sent_records.inc(page.records)
        finally:
            context.reading -= 1

    async def _send(self, send: Send, piece: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._context.settings.send_timeout_s):
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        except TimeoutError as err:
            raise SlowReaderError from err


class _Sink:
    """Collects what a writer writes, compressed if asked for."""

    def __init__(self, *, is_compressed: bool) -> None:
        self._parts: list[bytes | memoryview] = []
        self._size = 0
        self._compressor: Any = None
        if is_compressed:
            self._compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()

    def write(self, data: bytes | memoryview) -> None:
        if self._compressor is not None:
            data = self._compressor.compress(data)
        self._parts.append(data)
        self._size += len(data)

    def take(self, *, least: int = 1) -> bytes:
        """Return what is there if it is at least so much, else nothing."""
        if self._size < least:
            return b""
        out = b"".join(self._parts)
        self._parts, self._size = [], 0
        return out

    def finish(self) -> None:
        if self._compressor is not None:
            data = self._compressor.flush()
            self._parts.append(data)
            self._size += len(data)


def _encoded(schema: pa.Schema, page: Page, *, is_compressed: bool) -> Iterator[bytes]:
    """Yield a page as a stream, in pieces of at least a megabyte; the last one ends it."""
    sink: Any = _Sink(is_compressed=is_compressed)
    writer = StreamWriter(sink, schema)
    last = len(page.batches) - 1
    for number, batch in enumerate(page.batches):
        # The last one leads behind what was left out after it, too.
        cursor = page.cursor if number == last else page.cursors[number]
        message = page.messages[number] if page.messages else None
        if message is not None:
            writer.write_message(message, {CURSOR_KEY: cursor})
        else:
            writer.write(batch, {CURSOR_KEY: cursor})
        if piece := sink.take(least=_PIECE):
            yield piece
    writer.close()
    sink.finish()
    yield sink.take()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _takes_zstd(headers: Headers) -> bool:
    for part in headers.get(b"accept-encoding", b"").lower().split(b","):
        name, _, quality = part.partition(b";")
        if name.strip() == b"zstd":
            return quality.strip().replace(b" ", b"") not in (
                b"q=0",
                b"q=0.0",
                b"q=0.00",
                b"q=0.000",
            )
    return False


def _busy(what: str, name: str, limit: int) -> BusyError:
    return BusyError(
        f"as many {what} as may", expected=f"{name} <= {limit}", got="one more", retry_after_s=1.0,
        remedy=f"send it again later, or raise {name} on the server",
    )  # fmt: skip
