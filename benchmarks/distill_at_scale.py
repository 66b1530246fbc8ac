"""Offline distillation from end to end, at two sizes: seconds, bytes and peak memory of each step.

``python -m benchmarks.distill_at_scale [--tokens N] [--k K] [--folder DIR]`` makes a teacher's
heads in DistillKit's form, in the size asked for and a quarter of it, and runs what a user would:
convert, validate, compact, then one epoch over the compact dataset, with the forward KL and its
gradient for one batch in `KL_EVERY`, on one thread: the student's matrix products would take all
the time. A step is a process of its own; its memory is the anonymous part (``RssAnon``) of it and
its children, sampled, so that mapped files do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks import distill
from ragged_format.adapters import distillkit
from ragged_format.torch import RaggedLoader, forward_kl, head_log_probs

__all__ = ["main"]

VOCAB_SIZE = 8_192
HIDDEN = 16
TOKEN_BUDGET = 4_096
KL_EVERY = 16
DECODED_BYTES = 1 << 28
# Tokens of one file, whose heads are those of one block, moved and noised.
FILE_TOKENS = 65_536
BLOCK_TOKENS = 4_096
_RAGGED = [sys.executable, "-c", "from ragged_format.cli import app; app()"]
_LOOK_S = 0.02


def _batches(tokens: int, k: int) -> Iterator[pa.RecordBatch]:
    """Yield samples of `FILE_TOKENS` targets each; no two heads are equal."""
    block_ids, block_values = distill.heads(k, BLOCK_TOKENS, VOCAB_SIZE)
    rng = np.random.default_rng(1)
    for first in range(0, tokens, FILE_TOKENS):
        ids, values = [], []
        for _ in range(FILE_TOKENS // BLOCK_TOKENS):
            moved = (block_ids + rng.integers(VOCAB_SIZE)) % VOCAB_SIZE
            ids.append(moved.astype(np.int32))
            noised = block_values + rng.normal(0, 0.01, block_values.shape) - 0.05
            values.append(-np.sort(-noised.astype(np.float32), axis=1))
        batch = distill.samples_of(
            np.concatenate(ids), np.concatenate(values), pa.float32(), vocab_size=VOCAB_SIZE
        )
        names = pa.array([f"s{first}-{row}" for row in range(batch.num_rows)])
        yield batch.set_column(0, batch.schema.field(0), names)


def _train(folder: str) -> None:
    """One epoch of forward KL with its gradient over all heads of a compact dataset."""
    torch.manual_seed(0)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB_SIZE, HIDDEN, requires_grad=True)
    optimizer = torch.optim.SGD([embedding, weight], lr=0.5)
    losses, targets = [], 0
    begin, in_steps = time.monotonic(), 0.0
    loader = RaggedLoader(
        folder, token_budget=TOKEN_BUDGET, shuffle="block", block_size=128, window=2,
        max_decoded_bytes=DECODED_BYTES,
    )  # fmt: skip
    for number, batch in enumerate(loader):
        counts = batch["teacher_topk_counts"]
        targets += len(counts)
        if number % KL_EVERY:
            continue
        since = time.monotonic()
        positions = batch["completion_mask"].nonzero()[:, 0]
        tokens = batch["input_ids"].long()
        nothing = torch.zeros(0, dtype=torch.int64)
        _, student = head_log_probs(
            embedding[tokens], weight, positions - 1, tokens[positions], nothing,
            torch.zeros_like(counts), batch["teacher_topk_ids"], counts,
        )  # fmt: skip
        loss = forward_kl(student, batch["teacher_topk_log_probs"], counts).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
        in_steps += time.monotonic() - since
    sys.stdout.write(json.dumps({
        "targets": targets, "steps": len(losses), "loss": float(np.mean(losses)),
        "in_steps": in_steps, "loading": time.monotonic() - begin - in_steps,
        "decoded_bytes": loader._producer.records.kept.decoded_bytes,  # noqa: SLF001
    }))  # fmt: skip


class _Peak(threading.Thread):
    """Samples the anonymous memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.ended = pid, 0, False

    def run(self) -> None:
        """Look until told to end."""
        while not self.ended:
            self.peak = max(self.peak, sum(map(_anonymous, _tree(self.pid))))
            time.sleep(_LOOK_S)


def _tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text()
        except OSError:
            continue
        found += map(int, children.split())
    return found


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def _step(command: list[str]) -> tuple[float, int, str]:
    """Return seconds, peak of anonymous memory and output of one process."""
    begin = time.monotonic()
    # Its output is small: it fits the pipe while the process runs.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = _Peak(process.pid)
    peak.start()
    out, err = process.communicate()
    peak.ended = True
    if process.returncode:
        sys.exit(f"{command[-4:]} failed:\n{out}{err}")
    return time.monotonic() - begin, peak.peak, out


def _size(place: Path) -> int:
    return sum(entry.stat().st_size for entry in place.rglob("*") if entry.is_file())


def _run(tokens: int, k: int, folder: Path) -> dict[str, tuple[float, int, int]]:
    """Return seconds, peak memory and bytes written of each step."""
    given, hot, compact = (folder / name for name in ("given", "hot", "compact"))
    distillkit.write(_batches(tokens, k), str(given), k=k)
    steps: dict[str, tuple[Path | None, list[str]]] = {
        "convert": (hot, [*_RAGGED, "convert", "--from", "distillkit", str(given), str(hot)]),
        "validate": (None, [*_RAGGED, "validate", str(hot)]),
        "compact": (compact, [*_RAGGED, "compact", str(hot), str(compact)]),
        "load and KL": (
            None, [sys.executable, "-m", "benchmarks.distill_at_scale", "--train", str(compact)]
        ),
    }  # fmt: skip
    figures = {"given (DistillKit, exact)": (0.0, 0, _size(given))}
    for name, (made, command) in steps.items():
        seconds, peak, out = _step(command)
        figures[name] = seconds, peak, 0 if made is None else _size(made)
        if made is None and name != "validate":
            facts: dict[str, Any] = json.loads(out)
            if facts["targets"] != tokens:
                sys.exit(f"{facts['targets']} targets of {tokens} were loaded")
            sys.stdout.write(
                f"{facts['steps']} steps of KL (mean {facts['loss']:.2f}) in "
                f"{facts['in_steps']:.0f} s; loading {facts['loading']:.1f} s, "
                f"decoded batches kept {facts['decoded_bytes'] / 1e6:.0f} MB\n"
            )
    return figures


def main(argv: list[str] | None = None) -> None:
    """Run all steps at both sizes and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32 * FILE_TOKENS)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--folder", help="where to work. Default: a temporary directory")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.train:
        torch.set_num_threads(1)
        _train(args.train)
        return
    load = os.getloadavg()[0]
    sys.stdout.write(f"K = {args.k}, vocabulary {VOCAB_SIZE}, load {load:.1f}\n")
    for tokens in (args.tokens // 4, args.tokens):
        whole = -(-tokens // FILE_TOKENS) * FILE_TOKENS
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            figures = _run(whole, args.k, Path(scratch))
        sys.stdout.write(f"{whole} targets\n")
        for name, (seconds, peak, size) in figures.items():
            rate = f"{whole / seconds / 1e3:7.0f} k/s" if seconds else " " * 11
            memory = f"{peak / 1e6:6.0f} MB anonymous" if peak else " " * 19
            stored = f"{size / whole:6.1f} B a target" if size else ""
            sys.stdout.write(f"  {name:26} {seconds:7.1f} s {rate} {memory} {stored}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
