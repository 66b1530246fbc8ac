"""Load for a server: real rollouts as requests, and connections that send them.

The samples are the 16 largest of the recording in `benchmarks/data`, 77 kB each: token ids,
log-probs and sampling masks of a real vLLM server. Only their ids are new in every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pyarrow as pa
import uvloop

import ragged_format as rf
from ragged_format.ragged import take

__all__ = [
    "Connection",
    "body_of",
    "cpu_s",
    "http_done",
    "http_request",
    "process",
    "samples",
    "send",
    "serve",
]

RECORDED = Path(__file__).parent / "data" / "recorded.arrow"
LARGEST = 16
HEAD = (
    b"POST /v1/samples HTTP/1.1\r\nhost: localhost\r\ncontent-type: %s\r\n"
    b"content-length: %d\r\n\r\n"
)
ARROW = b"application/vnd.apache.arrow.stream"


@lru_cache(maxsize=1)
def _largest() -> pa.RecordBatch:
    recorded = rf.concat(list(rf.open_source(RECORDED).batches()))
    sizes = [take(recorded, np.array([row])).nbytes for row in range(recorded.num_rows)]
    return take(recorded, np.argsort(sizes)[::-1][:LARGEST].copy())


def samples(count: int, tag: str, *, first: int = 0) -> pa.RecordBatch:
    """Return so many of the samples, from one on, in turn, with ids that begin with `tag`."""
    batch = take(_largest(), (np.arange(count) + first) % LARGEST)
    names = pa.array([f"{tag}-{n}" for n in range(count)])
    for column in ("sample_id", "group_id"):
        at = batch.schema.get_field_index(column)
        batch = batch.set_column(at, batch.schema.field(at), names)
    return batch


def body_of(batch: pa.RecordBatch) -> bytes:
    """Return the batch as a stream."""
    sink = io.BytesIO()
    rf.write_stream(sink, [batch])
    return sink.getvalue()


def http_request(body: bytes, media_type: bytes = ARROW) -> bytes:
    """Return a whole request."""
    return HEAD % (media_type, len(body)) + body


def http_done(answer: bytearray) -> bool:
    """Return whether an answer is whole; raises if it is not 200 or 201."""
    head, separator, body = bytes(answer).partition(b"\r\n\r\n")
    if not separator:
        return False
    if not head.startswith((b"HTTP/1.1 201", b"HTTP/1.1 200")):
        raise RuntimeError(bytes(answer).decode(errors="replace"))
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return len(body) >= length


class _Client(asyncio.Protocol):
    """One connection that sends its next request when the last one was answered."""

    def __init__(self, requests: list[bytes], is_done: Callable[[bytearray], bool]) -> None:
        self._requests = iter(requests)
        self._is_done = is_done
        self.latencies: list[float] = []
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_exception(exc or ConnectionError("the server closed a connection"))

    def start(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.finished.set_result(None)
            return
        self._answer = bytearray()
        self._begin = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        try:
            done = self._is_done(self._answer)
        except RuntimeError as err:
            self.finished.set_exception(err)
            return
        if done:
            self.latencies.append(time.perf_counter() - self._begin)
            self.start()


class Connection(asyncio.Protocol):
    """One connection that is asked one thing after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport: Any = transport
        self._answer = bytearray()
        self._done: asyncio.Future[None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what waits."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed a connection"))

    async def ask(self, request: bytes) -> None:
        """Send a request and return when it is acknowledged."""
        self._answer = bytearray()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        """Resolve the request when its answer is whole."""
        self._answer += data
        if self._done is None or self._done.done():
            return
        try:
            if http_done(self._answer):
                self._done.set_result(None)
        except RuntimeError as err:
            self._done.set_exception(err)


def _same(client: _Client) -> _Client:
    return client


def send(
    port: int, requests: list[list[bytes]], is_done: Callable[[bytearray], bool]
) -> tuple[float, list[float]]:
    """Return the seconds for all requests of all connections, and the latency of each."""

    async def main() -> tuple[float, list[float]]:
        loop = asyncio.get_running_loop()
        clients = [_Client(some, is_done) for some in requests]
        for client in clients:
            await loop.create_connection(partial(_same, client), "127.0.0.1", port)
        begin = time.perf_counter()
        for client in clients:
            client.start()
        await asyncio.gather(*(client.finished for client in clients))
        seconds = time.perf_counter() - begin
        return seconds, [value for client in clients for value in client.latencies]

    return uvloop.run(main())


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python command whose first line of output is awaited by the caller."""
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        try:
            yield running
        finally:
            running.terminate()


@contextlib.contextmanager
def serve(place: Path, *options: str) -> Iterator[tuple[int, int]]:
    """Run ``ragged serve`` as it is shipped; yield its port and its process id."""
    command = "from ragged_format.cli import main; main()"
    fixed = ("--port", "0", "--json", "--log-requests", "errors")
    with process("-c", command, "serve", str(place), *fixed, *options) as running:
        assert running.stdout is not None
        url = json.loads(running.stdout.readline())["url"]
        while httpx2.get(f"{url}/readyz", timeout=60, trust_env=False).status_code != 200:
            time.sleep(0.02)
        yield int(url.rpartition(":")[2]), running.pid
