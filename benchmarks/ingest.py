"""Durable ingest over HTTP, and what a route costs.

64 connections of one client process send real rollouts (`ingest_load.py`) to a server in a process
of its own, each its next request when the last one was acknowledged. The floor is raw TCP, grouped
writes and one fdatasync for many requests, without parsing, validation, digests or an index
(`ingest_peer.py`), from the same client with the same bytes. Both write new files in one directory;
rounds alternate. Times are elapsed ones, since two processes share the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse

from benchmarks.harness import (
    Figure,
    Sample,
    Settings,
    interleave,
    median_ratio,
    median_s,
    raw,
    speed_figure,
    total,
)
from benchmarks.ingest_load import (
    body_of,
    cpu_s,
    http_done,
    http_request,
    process,
    samples,
    send,
    serve,
)
from benchmarks.ingest_queues import process_queue_s, transfer_queue_s
from ragged_server.client import Client
from ragged_server.http.app import create_app
from ragged_server.http.respond import send_json
from ragged_server.http.routes import require
from ragged_server.settings import load_settings

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["run"]

CONNECTIONS = 64
# Requests of one connection in a round, by samples of a request.
REQUESTS = {16: 2, 1: 20}
GOALS = {16: 0.5, 1: 0.25}
JSON_GOAL = 10.0
QUEUE_GOAL = 3.0
ROUTE_CALLS = 200


def run(settings: Settings) -> list[Figure]:
    """Time both routes, and ingest against the floor, JSON and queues."""
    figures = [_route(settings)]
    for number in REQUESTS:
        figures += _ingest(number, settings)
    return figures


@dataclass(slots=True)
class _Contender:
    """One server: how it is run, what it is sent, and what was measured."""

    run: Callable[[Path], AbstractContextManager[tuple[int, int]]]
    requests: list[list[bytes]]
    warm_up: list[list[bytes]]
    is_done: Callable[[bytearray], bool]
    samples: list[Sample] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    read: list[Sample] = field(default_factory=list)


def _contenders(number: int, settings: Settings) -> dict[str, _Contender]:
    count = 1 if settings.quick else REQUESTS[number]
    connections = 4 if settings.quick else CONNECTIONS
    made = [
        [samples(number, f"{c}-{r}", first=c + r) for r in range(count)] for c in range(connections)
    ]
    first = [[samples(1, f"warm-{c}", first=c)] for c in range(connections)]

    def requests(
        of: Callable[[pa.RecordBatch], bytes],
    ) -> tuple[list[list[bytes]], list[list[bytes]]]:
        return tuple([[of(b) for b in own] for own in some] for some in (made, first))  # type: ignore[return-value]

    return {
        "ours": _Contender(serve, *requests(_arrow), http_done),
        "floor": _Contender(_floor, *requests(_plain), _plain_done),
        "json": _Contender(partial(_floor, kind="--json"), *requests(_json), http_done),
    }


def _arrow(batch: pa.RecordBatch) -> bytes:
    return http_request(body_of(batch))


def _plain(batch: pa.RecordBatch) -> bytes:
    body = body_of(batch)
    return len(body).to_bytes(8, "little") + body


def _json(batch: pa.RecordBatch) -> bytes:
    text = json.dumps(batch.to_pylist(), separators=(",", ":")).encode()
    return http_request(text, b"application/json")


def _ingest(number: int, settings: Settings) -> list[Figure]:
    contenders = _contenders(number, settings)
    disk = []
    size = sum(len(body) for some in contenders["ours"].requests for body in some)
    rounds = max(1, settings.rounds // 2)
    with tempfile.TemporaryDirectory(dir=os.environ.get("RAGGED_BENCH_DIR")) as folder:
        names = list(contenders)
        for turn in range(rounds):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                place = Path(folder) / f"{name}-{turn}"
                _one(contenders[name], place, reads=name == "ours")
                shutil.rmtree(place, ignore_errors=True)
                place.unlink(missing_ok=True)
            disk.append(_write_rate(Path(folder) / "disk", size))
    ours, floor, peer = contenders.values()
    count = sum(map(len, ours.requests))
    latencies = sorted(ours.latencies)
    p99 = latencies[int(len(latencies) * 0.99)] * 1e3
    rate = f"{size / median_s(ours.samples) / 1e6:.0f} MB/s"
    figures = [
        Figure(
            f"durable ingest, {number} samples a request, share of raw TCP + fdatasync",
            f"{rate}, {count / median_s(ours.samples):.0f} requests/s, p99 {p99:.0f} ms, server"
            f" {_cpu_ms(ours, count):.2f} ms CPU each",
            f"floor {size / median_s(floor.samples) / 1e6:.0f} MB/s, {_cpu_ms(floor, count):.2f} ms"
            f" (disk alone {float(np.median(disk)) / 1e6:.0f} MB/s)",
            median_ratio(floor.samples, ours.samples),
            GOALS[number],
            details=raw(ours=ours.samples, floor=floor.samples),
        ),
        Figure(
            f"the same, {number} samples a request, and a FastAPI route with json.loads",
            rate,
            f"json {number * count / median_s(peer.samples):.0f} samples/s,"
            f" {_cpu_ms(peer, count):.2f} ms CPU each",
            median_ratio(peer.samples, ours.samples),
            JSON_GOAL,
            details=raw(ours=ours.samples, json=peer.samples),
        ),
    ]
    return figures if number == 1 else [*figures, *_queues(number, count, ours, rounds)]


def _one(contender: _Contender, place: Path, *, reads: bool) -> None:
    with contender.run(place) as (port, pid):
        send(port, contender.warm_up, contender.is_done)
        before = cpu_s(pid)
        seconds, latencies = send(port, contender.requests, contender.is_done)
        contender.server_cpu_s.append(cpu_s(pid) - before)
        contender.samples.append(Sample(seconds, seconds))
        contender.latencies += latencies
        if reads:
            begin = time.perf_counter()
            with Client(f"http://127.0.0.1:{port}") as client:
                for _ in client.tail(follow=False):
                    pass
            seconds = time.perf_counter() - begin
            contender.read.append(Sample(seconds, seconds))


def _cpu_ms(contender: _Contender, count: int) -> float:
    return 1e3 * float(np.median(contender.server_cpu_s)) / count


def _queues(number: int, count: int, ours: _Contender, rounds: int) -> list[Figure]:
    """Compare with what puts samples into memory and gets them again."""
    through = total(ours.samples, ours.read)
    rate = f"{number * count / median_s(through):.0f} samples/s"
    name = "put and get, 16 samples a request; ours durable and validated"
    peers = {"TransferQueue": transfer_queue_s(count, rounds)}
    peers["multiprocessing.Queue"] = [process_queue_s(number * count) for _ in range(rounds)]
    figures = []
    for peer, seconds in peers.items():
        goal = QUEUE_GOAL if peer == "TransferQueue" else None
        if seconds is None:
            figures.append(Figure(f"{name}, {peer}", rate, f"{peer}: not installed", goal=goal))
            continue
        times = [Sample(value, value) for value in seconds]
        figures.append(
            Figure(
                f"{name}, {peer}", rate,
                f"{peer} {number * count / median_s(times):.0f} samples/s",
                median_ratio(times, through), goal, details=raw(ours=through, peer=times),
            )
        )  # fmt: skip
    return figures


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
def _floor(place: Path, kind: str = "--raw") -> Iterator[tuple[int, int]]:
    with process("-m", "benchmarks.ingest_peer", str(place), kind) as running:
        assert running.stdout is not None
        yield int(running.stdout.readline()), running.pid


def _plain_done(answer: bytearray) -> bool:
    return len(answer) >= 8


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
