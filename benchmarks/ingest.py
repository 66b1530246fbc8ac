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
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
)
from benchmarks.ingest_load import body_of, http_done, http_request, process, samples, send, serve
from ragged_server.app import create_app
from ragged_server.respond import send_json
from ragged_server.routes import require
from ragged_server.settings import load_settings

__all__ = ["run"]

CONNECTIONS = 64
# Requests of one connection in a round, by samples of a request.
REQUESTS = {16: 2, 1: 20}
GOALS = {16: 0.5, 1: 0.25}
ROUTE_CALLS = 200


def run(settings: Settings) -> list[Figure]:
    """Time both routes, and ingest against the floor."""
    figures = [_route(settings)]
    for number, requests in REQUESTS.items():
        count = 1 if settings.quick else requests
        connections = 4 if settings.quick else CONNECTIONS
        bodies = [
            [body_of(samples(number, f"{c}-{r}", first=c + r)) for r in range(count)]
            for c in range(connections)
        ]
        figures.append(_ingest(number, bodies, settings))
    return figures


def _ingest(number: int, bodies: list[list[bytes]], settings: Settings) -> Figure:
    size = sum(len(body) for some in bodies for body in some)
    http = [[http_request(body) for body in some] for some in bodies]
    plain = [[len(body).to_bytes(8, "little") + body for body in some] for some in bodies]
    ours, floor, disk = [], [], []
    latencies: list[float] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("RAGGED_BENCH_DIR")) as folder:
        for turn in range(max(1, settings.rounds // 2)):
            for name in ("ours", "floor") if turn % 2 else ("floor", "ours"):
                place = Path(folder) / f"{name}-{turn}"
                if name == "ours":
                    with serve(place) as (port, _):
                        seconds, latencies = send(port, http, http_done)
                    ours.append(Sample(seconds, seconds))
                else:
                    with _floor(place) as port:
                        floor.append(Sample(*[send(port, plain, _plain_done)[0]] * 2))
                    disk.append(_write_rate(place, size))
                shutil.rmtree(place, ignore_errors=True)
                place.unlink(missing_ok=True)
    latencies.sort()
    ours_rate, floor_rate = (size / median_s(part) / 1e6 for part in (ours, floor))
    p99 = latencies[int(len(latencies) * 0.99)] * 1e3
    return Figure(
        f"durable ingest, {number} samples a request, share of raw TCP + fdatasync",
        f"{ours_rate:.0f} MB/s, {len(latencies) / median_s(ours):.0f} requests/s, p99 {p99:.0f} ms",
        f"floor {floor_rate:.0f} MB/s (disk alone {float(np.median(disk)) / 1e6:.0f} MB/s)",
        median_ratio(floor, ours),
        GOALS[number],
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
def _floor(place: Path) -> Iterator[int]:
    with process("-m", "benchmarks.ingest_peer", str(place)) as running:
        assert running.stdout is not None
        yield int(running.stdout.readline())


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
