"""The floor of durable ingest, and a JSON endpoint: grouped writes, one fdatasync for many.

``python -m benchmarks.ingest_peer FILE`` prints the port that it listens on. A request is its size
(u64, little-endian) and that many bytes; it is answered with 8 bytes when it is on disk. Nothing is
parsed, checked or indexed. With ``--json`` it is a FastAPI application whose one route calls
`json.loads` and writes the body in the same way; it makes no arrays and checks nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response


class Writer(threading.Thread):
    """Writes whatever waits as one group, syncs it, and tells those who wait, on the loop."""

    def __init__(
        self,
        path: str,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[list[Any]], None],
    ) -> None:
        super().__init__(daemon=True)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._loop = loop
        self._tell = tell
        self._waiting: list[tuple[Any, bytes | bytearray]] = []
        self._changed = threading.Condition()

    def put(self, who: object, body: bytes | bytearray) -> None:
        """Queue a body for someone."""
        with self._changed:
            self._waiting.append((who, body))
            self._changed.notify()

    def run(self) -> None:
        """Write for ever."""
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                group, self._waiting = self._waiting, []
            for start in range(0, len(group), 512):
                parts = [body for _, body in group[start : start + 512]]
                left = sum(map(len, parts))
                written = os.writev(self._file, parts)
                if written < left:  # the rest by simple means: it hardly ever happens
                    rest = memoryview(b"".join(parts))[written:]
                    while rest:
                        rest = rest[os.write(self._file, rest) :]
            os.fdatasync(self._file)
            self._loop.call_soon_threadsafe(self._tell, [who for who, _ in group])


def _answer(connections: list[Connection]) -> None:
    for connection in connections:
        connection.transport.write(b"durable.")


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        future.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """One client: receives straight into the memory of the request."""

    transport: asyncio.Transport

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._begin(8)
        self._in_body = False

    def _begin(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < len(self._buffer):
            return
        if self._in_body:
            self._writer.put(self, self._buffer)
            self._begin(8)
        else:
            self._begin(int.from_bytes(self._buffer, "little"))
        self._in_body = not self._in_body


async def raw(path: str) -> None:
    """Serve raw TCP."""
    loop = asyncio.get_running_loop()
    writer = Writer(path, loop, _answer)
    writer.start()
    server = await loop.create_server(lambda: Connection(writer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def json_route(path: str) -> None:
    """Serve the FastAPI application."""
    loop = asyncio.get_running_loop()
    writer = Writer(path, loop, _resolve)
    writer.start()
    app = FastAPI()

    @app.post("/v1/samples")
    async def ingest(request: Request) -> Response:
        body = await request.body()
        rows = json.loads(body)
        durable = loop.create_future()
        writer.put(durable, body)
        await durable
        return Response(json.dumps({"stored": len(rows)}), 201, media_type="application/json")

    config = uvicorn.Config(app, http="httptools", log_config=None, access_log=False, backlog=256)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        print(listener.getsockname()[1], flush=True)
        await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    uvloop.run((json_route if "--json" in sys.argv else raw)(sys.argv[1]))
