"""Durable ingest over HTTP, and what a route costs.

64 connections of one client process send samples of 4,200 tokens (75 kB each: ids, log-probs, sets)
to a server in a process of its own, each its next request when the last one was acknowledged. The
peer is the floor: raw TCP, grouped writes and one fdatasync for many requests, without parsing,
validation, digests or an index (`ingest_peer.py`), from the same client with the same bytes. Both
write new files in one directory; rounds alternate. Times are elapsed ones, since two processes
share the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import uvloop
from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse

import ragged_format as rf
from benchmarks.harness import (
    Figure,
    Sample,
    Settings,
    interleave,
    median_ratio,
    median_s,
    raw,
    speed_figure,
)
from ragged_server.app import create_app
from ragged_server.respond import send_json
from ragged_server.routes import require
from ragged_server.settings import load_settings

__all__ = ["run"]

CONNECTIONS = 64
TOKENS = 4_200
VOCAB_SIZE = 150_000
# Requests of one connection in a round, by samples of a request.
REQUESTS = {16: 2, 1: 20}
GOALS = {16: 0.5, 1: 0.25}
COLUMNS = ["group_id", "rollout_log_probs", "candidate_counts", "candidate_ids"]
HEAD = (
    b"POST /v1/samples HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/vnd.apache.arrow.stream\r\ncontent-length: %d\r\n\r\n"
)
ROUTE_CALLS = 200


def run(settings: Settings) -> list[Figure]:
    """Time both routes, and ingest against the floor."""
    figures = [_route(settings)]
    for samples, requests in REQUESTS.items():
        count = 1 if settings.quick else requests
        connections = 4 if settings.quick else CONNECTIONS
        bodies = [[_body(samples, f"{c}-{r}") for r in range(count)] for c in range(connections)]
        figures.append(_ingest(samples, bodies, settings))
    return figures


def _body(samples: int, tag: str) -> bytes:
    """Return a stream of so many samples whose ids begin with `tag`."""
    schema = rf.sample_schema(vocab_size=VOCAB_SIZE, columns=COLUMNS)
    rng = np.random.default_rng(abs(hash(tag)) % (1 << 32))
    ids = rng.integers(0, VOCAB_SIZE, samples * TOKENS).astype(np.int32).reshape(samples, TOKENS)
    targets = TOKENS - 1
    mask = np.ones((samples, TOKENS), np.uint8)
    mask[:, 0] = 0
    names = pa.array([f"{tag}-{n}" for n in range(samples)])
    values: dict[str, npt.NDArray[Any]] = {
        "input_ids": ids,
        "completion_mask": mask,
        "rollout_log_probs": rng.uniform(-3, 0, (samples, targets)).astype(np.float32),
        "candidate_counts": np.ones((samples, targets), np.int32),
        "candidate_ids": np.ascontiguousarray(ids[:, 1:]),
    }
    arrays = []
    for field in schema:
        if field.name in values:
            data = values[field.name]
            offsets = np.arange(samples + 1, dtype=np.int64) * data.shape[1]
            lists = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(data.ravel()))
            arrays.append(lists.cast(field.type))
        else:
            arrays.append(names)
    sink = io.BytesIO()
    rf.write_stream(sink, [pa.RecordBatch.from_arrays(arrays, schema=schema)])
    return sink.getvalue()


def _ingest(samples: int, bodies: list[list[bytes]], settings: Settings) -> Figure:
    size = sum(len(body) for some in bodies for body in some)
    http = [[HEAD % len(body) + body for body in some] for some in bodies]
    plain = [[len(body).to_bytes(8, "little") + body for body in some] for some in bodies]
    ours, floor, disk = [], [], []
    latencies: list[float] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("RAGGED_BENCH_DIR")) as folder:
        for number in range(max(1, settings.rounds // 2)):
            for name in ("ours", "floor") if number % 2 else ("floor", "ours"):
                place = Path(folder) / f"{name}-{number}"
                if name == "ours":
                    with _server(place) as port:
                        seconds, latencies = _send(port, http, _http_done)
                    ours.append(Sample(seconds, seconds))
                else:
                    with _floor(place) as port:
                        floor.append(Sample(*[_send(port, plain, _plain_done)[0]] * 2))
                    disk.append(_write_rate(place, size))
                shutil.rmtree(place, ignore_errors=True)
                place.unlink(missing_ok=True)
    latencies.sort()
    ours_rate, floor_rate = (size / median_s(part) / 1e6 for part in (ours, floor))
    p99 = latencies[int(len(latencies) * 0.99)] * 1e3
    return Figure(
        f"durable ingest, {samples} samples a request, share of raw TCP + fdatasync",
        f"{ours_rate:.0f} MB/s, {len(latencies) / median_s(ours):.0f} requests/s, p99 {p99:.0f} ms",
        f"floor {floor_rate:.0f} MB/s (disk alone {float(np.median(disk)) / 1e6:.0f} MB/s)",
        median_ratio(floor, ours),
        GOALS[samples],
        details=raw(ours=ours, floor=floor),
    )


def _write_rate(place: Path, size: int) -> float:
    """Return bytes per second of one sequential write and fdatasync."""
    data = os.urandom(1 << 20)
    begin = time.perf_counter()
    with place.with_suffix(".disk").open("wb") as file:
        for _ in range(max(1, size >> 20)):
            file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
    seconds = time.perf_counter() - begin
    place.with_suffix(".disk").unlink()
    return max(1, size >> 20) * len(data) / seconds


@contextlib.contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def _server(place: Path) -> Iterator[int]:
    run = "from ragged_format.cli import main; main()"
    options = ("--port", "0", "--json", "--log-requests", "errors")
    with _process("-c", run, "serve", str(place), *options) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        port = int(url.rpartition(":")[2])
        _wait_until_ready(url)
        yield port


def _wait_until_ready(url: str) -> None:
    while httpx2.get(f"{url}/readyz").status_code != 200:
        time.sleep(0.02)


@contextlib.contextmanager
def _floor(place: Path) -> Iterator[int]:
    with _process("-m", "benchmarks.ingest_peer", str(place)) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


def _http_done(answer: bytearray) -> bool:
    head, separator, body = bytes(answer).partition(b"\r\n\r\n")
    if not separator:
        return False
    if not head.startswith(b"HTTP/1.1 201"):
        raise RuntimeError(bytes(answer).decode(errors="replace"))
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return len(body) >= length


def _plain_done(answer: bytearray) -> bool:
    return len(answer) >= 8


class _Client(asyncio.Protocol):
    """One connection that sends its next request when the last one was answered."""

    def __init__(self, requests: list[bytes], is_done: Callable[[bytearray], bool]) -> None:
        self._requests = iter(requests)
        self._is_done = is_done
        self.latencies: list[float] = []
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

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


def _send(
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


def _route(settings: Settings) -> Figure:
    """Time a request around a handler that only reads its body: plain ASGI and FastAPI."""

    async def plain(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        body = (await receive())["body"]
        await send_json(send, 201, {"stored": len(body)})

    async def route(
        request: Request,
        source: str | None = None,  # noqa: ARG001
        vocab_size: int | None = None,  # noqa: ARG001
        idempotency_key: str | None = Header(None),  # noqa: ARG001
    ) -> JSONResponse:
        return JSONResponse({"stored": len(await request.body())}, 201)

    with asyncio.Runner() as runner:
        app = runner.run(_made(load_settings(Path("unused"), log_requests="none")))
        app._samples = {"POST": plain}  # noqa: SLF001
        app._rest.post("/fastapi", dependencies=[Depends(require("ingest"))])(route)  # noqa: SLF001
        samples = interleave(
            {path: partial(_run_calls, runner, app, path) for path in ("/v1/samples", "/fastapi")},
            settings,
        )
    each = {
        path: [Sample(s.cpu / ROUTE_CALLS, s.wall / ROUTE_CALLS) for s in part]
        for path, part in samples.items()
    }
    name = "a request around a handler that reads its body"
    return speed_figure(name, each["/v1/samples"], each["/fastapi"], label="FastAPI route")


def _same(client: _Client) -> _Client:
    return client


def _run_calls(runner: asyncio.Runner, app: Any, path: str) -> None:
    runner.run(_calls(app, path))


async def _made(settings: Any) -> Any:
    return create_app(settings, _no_store)


def _no_store() -> Any:
    raise RuntimeError("no store is opened here")


async def _calls(app: Any, path: str) -> None:
    headers = [
        (b"host", b"localhost"), (b"content-type", b"application/vnd.apache.arrow.stream"),
        (b"content-length", b"10"), (b"user-agent", b"bench"), (b"accept", b"*/*"),
    ]  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"0123456789", "more_body": False}

    async def send(message: Any) -> None:
        if message.get("status", 201) != 201:
            raise RuntimeError(message)

    for _ in range(ROUTE_CALLS):
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "state": {},
        }  # fmt: skip
        await app(scope, receive, send)
