"""The floor of durable ingest: raw TCP, grouped writes, one fdatasync for many requests.

``python -m benchmarks.ingest_peer FILE`` prints the port that it listens on. A request is its size
(u64, little-endian) and that many bytes; it is answered with 8 bytes when it is on disk. Nothing is
parsed, checked or indexed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import uvloop


class Writer(threading.Thread):
    """Writes whatever waits as one group, syncs it, and tells the connections."""

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._loop = loop
        self._waiting: list[tuple[Connection, bytes]] = []
        self._changed = threading.Condition()

    def put(self, connection: Connection, body: bytes) -> None:
        with self._changed:
            self._waiting.append((connection, body))
            self._changed.notify()

    def run(self) -> None:
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
            self._loop.call_soon_threadsafe(_answer, [connection for connection, _ in group])


def _answer(connections: list[Connection]) -> None:
    for connection in connections:
        connection.transport.write(b"durable.")


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
            self._writer.put(self, self._buffer)  # type: ignore[arg-type]
            self._begin(8)
        else:
            self._begin(int.from_bytes(self._buffer, "little"))
        self._in_body = not self._in_body


async def main(path: str) -> None:
    loop = asyncio.get_running_loop()
    writer = Writer(path, loop)
    writer.start()
    server = await loop.create_server(lambda: Connection(writer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
