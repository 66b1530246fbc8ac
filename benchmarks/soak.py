"""Minutes of steady load on a server, to see whether latency or memory grow.

``python -m benchmarks.soak`` sends real rollouts, one a request, at a fixed rate over 64
connections to a `ragged serve` that seals, merges and removes what is old, while one reader follows
the log. It prints the 50th and 99th percentile of the time to the acknowledgement and the anonymous
memory of the server, by minute, and the slope of each with its 95 % confidence interval. Latencies
count from the moment when a request was due: waiting for a free connection is part of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.ingest_load import Connection, body_of, http_request, samples, serve
from ragged_server.client import AsyncClient

__all__ = ["main", "slope"]

CONNECTIONS = 64
# 97.5th percentile of Student's t by degrees of freedom; beyond, that of the normal distribution.
_T = (
    12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def slope(values: list[float]) -> tuple[float, float]:
    """Return the least-squares slope of values by their number, and half its 95 % interval.

    Examples
    --------
    >>> slope([1.0, 2.0, 3.0])
    (1.0, 0.0)
    >>> best, half = slope([1.0, 1.2, 0.9, 1.1])
    >>> abs(best) < half
    True
    """
    x = np.arange(len(values)) - (len(values) - 1) / 2
    y = np.asarray(values)
    best = float(x @ y / (x @ x))
    free = len(values) - 2
    rest = y - y.mean() - best * x
    error = float(np.sqrt(rest @ rest / free / (x @ x)))
    return best, (_T[free - 1] if free <= len(_T) else 1.96) * error


@dataclass(slots=True)
class Measured:
    """What one run found: (seconds since the start, value)."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    read: int = 0

    def by_minute(self, minutes: int) -> dict[str, list[float]]:
        """Return percentiles of latency in ms and mean memory in MiB of each minute."""
        out: dict[str, list[float]] = {"p50": [], "p99": [], "memory": []}
        for minute in range(minutes):
            begin = 60.0 * minute
            times = [1e3 * s for at, s in self.latencies if begin <= at < begin + 60]
            memory = [size / 2**20 for at, size in self.memory if begin <= at < begin + 60]
            out["p50"].append(float(np.percentile(times, 50)))
            out["p99"].append(float(np.percentile(times, 99)))
            out["memory"].append(float(np.mean(memory)))
        return out


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process and its children."""
    total = 0
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        total += 1024 * int(status.partition("RssAnon:")[2].split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += anonymous_bytes(int(child))
    return total


async def _load(port: int, pid: int, rate: float, seconds: float) -> Measured:
    loop = asyncio.get_running_loop()
    found = Measured()
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        free.put_nowait(connection)
    begin = loop.time()
    side = [asyncio.create_task(_watch(pid, begin, found)), asyncio.create_task(_read(port, found))]
    sent: set[asyncio.Task[None]] = set()
    for number in range(int(rate * seconds)):
        due = begin + number / rate
        request = http_request(body_of(samples(1, f"soak-{number}", first=number)))
        if (early := due - loop.time()) > 0:
            await asyncio.sleep(early)
        task = asyncio.create_task(_send(free, request, due, begin, found))
        sent.add(task)
        task.add_done_callback(sent.discard)
    await asyncio.gather(*sent)
    for task in side:
        task.cancel()
    for result in await asyncio.gather(*side, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return found


async def _send(
    free: asyncio.Queue[Connection], request: bytes, due: float, begin: float, found: Measured
) -> None:
    connection = await free.get()
    await connection.ask(request)
    free.put_nowait(connection)
    now = asyncio.get_running_loop().time()
    found.latencies.append((due - begin, now - due))


async def _watch(pid: int, begin: float, found: Measured) -> None:
    loop = asyncio.get_running_loop()
    while True:
        found.memory.append((loop.time() - begin, anonymous_bytes(pid)))
        await asyncio.sleep(1.0)


async def _read(port: int, found: Measured) -> None:
    async with AsyncClient(f"http://127.0.0.1:{port}") as client:
        async for page in client.tail():
            found.read += page.records


def _run(place: Path, options: tuple[str, ...], rate: float, seconds: float) -> Measured:
    with serve(place, *options) as (port, pid):
        return uvloop.run(_load(port, pid, rate, seconds))


def main(argv: list[str] | None = None) -> int:
    """Run the load and print what it found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=int, default=10, help="at least 3")
    parser.add_argument("--warm-up", type=int, default=2, help="minutes before, not counted")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    options = (
        "--workers", str(args.workers), "--segment-bytes", "32MiB", "--retain-bytes", "256MiB",
        "--grace", "10s",
    )  # fmt: skip
    minutes = args.minutes + args.warm_up
    begin_load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=os.environ.get("RAGGED_BENCH_DIR")) as folder:
        started = time.perf_counter()
        found = _run(Path(folder) / "live", options, args.rate, 60.0 * minutes)
        took = time.perf_counter() - started
    figures = found.by_minute(minutes)
    print(
        f"{len(found.latencies)} requests of one sample in {took:.0f} s, {found.read} records read,"
        f" {args.workers} worker(s); load average {begin_load:.1f} before,"
        f" {os.getloadavg()[0]:.1f} after"
    )
    print("minute  p50 ms  p99 ms  anonymous MiB")
    for minute, row in enumerate(zip(*figures.values(), strict=True)):
        mark = " (warm-up)" if minute < args.warm_up else ""
        print(f"{minute:6}  {row[0]:6.1f}  {row[1]:6.1f}  {row[2]:13.1f}{mark}")
    slopes = {}
    for name, unit in (("p50", "ms"), ("p99", "ms"), ("memory", "MiB")):
        values = figures[name][args.warm_up :]
        best, half = slopes[name] = slope(values)
        flat = "flat: 0 lies inside" if abs(best) <= half else "0 lies outside"
        print(
            f"{name}: {best:+.3f} ± {half:.3f} {unit} a minute, at a mean of"
            f" {np.mean(values):.1f} {unit} ({flat})"
        )
    if args.json:
        args.json.write_text(json.dumps({"by_minute": figures, "slopes": slopes}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
