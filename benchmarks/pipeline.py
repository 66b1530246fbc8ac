"""Anonymous memory and throughput of offline jobs at 1, 4 and 16 times the data.

Every job runs in a process of its own with two workers. While it runs, the anonymous memory of that
process and of all its children (``Anonymous`` of ``/proc/PID/smaps_rollup``; mapped pages of files
are not part of it) is added up 20 times a second; reported is the peak. Throughput is input bytes
by CPU time of all these processes (``ratio``) and by elapsed time (``wall``), start-up
included.

Tasks are of a quarter of the smallest input, and of 64 MiB at most, so that both workers are busy
at every scale. Kernels are compiled on a first run: run it twice after an installation.

``python -m benchmarks.pipeline --full`` goes up to more than 5 GB of input, and needs 40 GB of disk
where ``--folder`` points.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import ragged_format as rf
from benchmarks.harness import Figure, Settings, format_table
from ragged_format.testing import rollouts

__all__ = ["JOBS", "measure", "run"]

SCALES = (1, 4, 16)
# Bytes of input at scale 1.
QUICK_BYTES, SMALL_BYTES, FULL_BYTES = 2_000_000, 24_000_000, 340_000_000
MEMORY = "2GiB"
WORKERS = 2
VOCAB_SIZE = 49152  # of the recorded rollouts
SPREAD_GOAL, THROUGHPUT_GOAL = 1.15, 0.9
INTERVAL_S = 0.05

_CONVERT = (
    'rp.convert(source, out, adapter="vllm", options={"vocab_size": 49152}, task_bytes=size, '
    "**running)"
)
# By name: the input, and the call.
JOBS: dict[str, tuple[str, str]] = {
    "convert": ("json", _CONVERT),
    "filter": ("samples", 'rp.filter_dataset(source, out, "token_length > 200", **running)'),
    "advantages": ("samples", 'rp.advantages(source, out, null_reward="skip", **running)'),
    "dedupe": ("samples", 'rp.dedupe(source, out, by="tokens", **running)'),
    "shuffle": ("samples", "rp.shuffle(source, out, shard_bytes=size, **running)"),
    "pack": (
        "samples",
        "rp.pack_dataset(source, out, token_budget=8192, ranks=2, shard_bytes=size, **running)",
    ),
    "compact": ("samples", "rp.compact(source, out, shard_bytes=size, **running)"),
    "report": ("samples", 'rp.report(source, out + ".html", workers=running["workers"])'),
}
NEEDED = ("convert", "shuffle", "pack", "compact", "report")
_CHILD = """
import sys
import ragged_pipeline as rp
source, out = sys.argv[1:3]
size = {size}
running = {{"workers": {workers}, "memory": "{memory}"}}
{call}
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One job on one input.

    Attributes
    ----------
    nbytes : int
        Of the input.
    seconds, cpu : float
        Elapsed, and of all its processes.
    anonymous : int
        Peak of the anonymous memory of all its processes, in bytes.
    written, made : int
        Bytes that it wrote to files, and those of them that stay as its output.
    tokens : int
        Of the input.
    """

    nbytes: int
    seconds: float
    cpu: float
    anonymous: int
    written: int = 0
    made: int = 0
    tokens: int = 0

    @property
    def spilled(self) -> int:
        """Bytes that it wrote and took away again."""
        return max(0, self.written - self.made)

    @property
    def rate(self) -> float:
        """Bytes per second of CPU time."""
        return self.nbytes / self.cpu

    @property
    def wall_rate(self) -> float:
        """Bytes per second of elapsed time."""
        return self.nbytes / self.seconds


def write_json(path: Path, nbytes: int) -> int:
    """Write recorded vLLM rollouts again and again, each time with other ids; returns tokens."""
    import gzip

    shipped = resources.files("ragged_format") / "demo_data" / "rollouts.jsonl.gz"
    lines = gzip.decompress(shipped.read_bytes()).splitlines()
    id_ = re.compile(rb'"request_id":"([^"]*)"')
    counts = [_tokens_of(json.loads(line)["response"]) for line in lines]
    tokens = 0
    with path.open("wb") as sink:
        copy = 0
        while sink.tell() < nbytes:
            for line, count in zip(lines, counts, strict=True):
                sink.write(id_.sub(rb'"request_id":"%d-\1"' % copy, line) + b"\n")
                tokens += count
                if sink.tell() >= nbytes:
                    break
            copy += 1
    return tokens


def _tokens_of(response: dict[str, Any]) -> int:
    """Return the tokens of all samples of a response, prompts included."""
    prompt = len(response["prompt_token_ids"])
    return sum(prompt + len(choice["token_ids"]) for choice in response["choices"])


def write_samples(path: Path, nbytes: int) -> int:
    """Write generated rollouts again and again, with other ids and groups; returns tokens."""
    batch = rollouts(np.random.default_rng(0), num_samples=1024, vocab_size=VOCAB_SIZE)
    written = copy = tokens = 0
    with rf.Writer(path, batch.schema, validate="off", max_shard_bytes=128 << 20) as writer:
        while written < nbytes:
            part = renamed(batch, copy)
            part = part.slice(0, max(1, min(1024, (nbytes - written) * 1024 // part.nbytes + 1)))
            writer.write(part)
            written += part.nbytes
            tokens += pc.sum(pc.list_value_length(part.column("input_ids"))).as_py()
            copy += 1
    return tokens


def renamed(batch: pa.RecordBatch, copy: int) -> pa.RecordBatch:
    """Return the batch with other ids; the tokens of copies are equal."""
    arrays = []
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if name in ("sample_id", "group_id", "rollout_id"):
            values = [None if x is None else f"{copy}-{x}" for x in array.to_pylist()]
            arrays.append(pa.array(values, array.type))
        else:
            arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


INPUTS: dict[str, Callable[[Path, int], int]] = {"json": write_json, "samples": write_samples}


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file())


def measure(job: str, source: Path, out: Path, task_bytes: int, tokens: int = 0) -> Run:
    """Run a job in a process of its own and watch its memory; `tokens` are those of the input."""
    call = JOBS[job][1]
    code = _CHILD.format(workers=WORKERS, memory=MEMORY, size=task_bytes, call=call)
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", code, str(source), str(out)])
    peak = 0
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        peak = max(peak, sum(map(anonymous, tree(process.pid))))
        time.sleep(INTERVAL_S)
    seconds = time.monotonic() - begin
    process.returncode = status
    if status:
        raise RuntimeError(f"{job} failed with status {status}")
    made = sum(size_of(path) for path in (out, Path(f"{out}.html")) if path.exists())
    # Blocks of 512 bytes, also of files that are gone before the disk has them.
    return Run(
        size_of(source), seconds, used.ru_utime + used.ru_stime, peak, used.ru_oublock * 512, made,
        tokens,
    )  # fmt: skip


def tree(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def anonymous(pid: int) -> int:
    """Return the anonymous memory of a process in bytes, 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Anonymous:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def measure_all(
    jobs: Sequence[str], folder: Path, base: int, scales: Sequence[int] = SCALES
) -> dict[str, dict[int, Run]]:
    """Run jobs at all scales, one scale after the other; inputs and outputs do not stay."""
    done: dict[str, dict[int, Run]] = {job: {} for job in jobs}
    for scale in scales:
        for kind, write in INPUTS.items():
            wanted = [job for job in jobs if JOBS[job][0] == kind]
            if not wanted:
                continue
            source = folder / f"{kind}.jsonl"
            tokens = write(source, base * scale)
            for job in wanted:
                out = folder / "out"
                done[job][scale] = measure(job, source, out, min(base // 4, 64 << 20), tokens)
                remove(out)
                remove(Path(f"{out}.html"))
                print(f"  {job} {scale}x: {done[job][scale]}", file=sys.stderr, flush=True)
            remove(source)
    return done


def remove(path: Path) -> None:
    """Remove a file or a directory, or nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def figures(done: dict[str, dict[int, Run]]) -> list[Figure]:
    """Return memory and throughput of every job."""
    out = []
    for job, runs in done.items():
        peaks = {scale: part.anonymous for scale, part in runs.items()}
        rates = {scale: part.rate for scale, part in runs.items()}
        first, last = runs[min(runs)], runs[max(runs)]
        details = {
            str(scale): {
                "bytes": part.nbytes, "seconds": part.seconds, "cpu": part.cpu,
                "anonymous": part.anonymous, "written": part.written, "made": part.made,
                "tokens": part.tokens,
            }
            for scale, part in runs.items()
        }  # fmt: skip
        out.append(Figure(
            f"{job}: anonymous memory, largest to smallest",
            " ".join(f"{scale}x {peak / 1e6:.0f} MB" for scale, peak in peaks.items()),
            f"limit {MEMORY}", max(peaks.values()) / min(peaks.values()), SPREAD_GOAL,
            at_most=True, details=details,
        ))  # fmt: skip
        out.append(Figure(
            f"{job}: throughput, {max(runs)}x to {min(runs)}x of {first.nbytes / 1e6:.0f} MB",
            " ".join(f"{scale}x {rate / 1e6:.1f} MB/CPU-s" for scale, rate in rates.items()),
            "itself", last.rate / first.rate, THROUGHPUT_GOAL,
            wall_ratio=last.wall_rate / first.wall_rate,
        ))  # fmt: skip
    return out


def run(settings: Settings) -> list[Figure]:
    """Measure the jobs that must be flat, on small data; see ``--full`` of this module."""
    base = QUICK_BYTES if settings.quick else SMALL_BYTES
    with tempfile.TemporaryDirectory() as folder:
        scales = SCALES[:2] if settings.quick else SCALES
        return figures(measure_all(NEEDED, Path(folder), base, scales))


def main() -> None:
    """Measure jobs by name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--full", action="store_true", help="more than 5 GB at the largest scale")
    parser.add_argument("--base", type=int, help="bytes of input at scale 1")
    parser.add_argument("--folder", type=Path, help="where inputs and outputs lie meanwhile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    args = parser.parse_args()
    base = args.base or (FULL_BYTES if args.full else SMALL_BYTES)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        done = figures(measure_all(args.jobs or list(JOBS), Path(folder), base))
    print(format_table(done))
    if args.json:
        args.json.write_text(json.dumps([figure.to_json() for figure in done], indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("POLARS_MAX_THREADS", "2")
    main()
