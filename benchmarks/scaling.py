"""What offline jobs cost per million tokens, and what many tokens need.

``python -m benchmarks.scaling FILE... --tokens 10e9`` reads what ``python -m benchmarks.pipeline``
wrote with ``--json``, takes each job at its largest scale, and prints two Markdown tables: the cost
per million tokens of the input, and what so many tokens take, the first one times a number.
Then it writes and reads a manifest of as many shards.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ragged_format as rf
from ragged_format.manifest import Manifest, Shard, read_manifest, write_manifest
from ragged_format.testing import rollouts
from ragged_pipeline.defaults import CONVERT_BYTES, TASK_BYTES

__all__ = ["costs", "manifest_cost"]

# Input that becomes one shard, where it is not TASK_BYTES; a report makes none.
SHARD_BYTES = {"convert": CONVERT_BYTES, "report": float("inf")}
MEMORY_NAME = ": anonymous memory"


def costs(figures: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what each job cost per token at its largest scale.

    Parameters
    ----------
    figures : sequence of mapping
        As ``python -m benchmarks.pipeline --json FILE`` writes them.

    Returns
    -------
    dict
        By job: ``cpu`` seconds, and bytes ``read``, ``spilled`` and ``made``, all per token, and
        peak ``anonymous`` memory in bytes.
    """
    out = {}
    for figure in figures:
        job, found, _ = str(figure["name"]).partition(MEMORY_NAME)
        if not found:
            continue
        runs = figure["details"]
        run = runs[max(runs, key=int)]
        tokens = run["tokens"]
        out[job] = {
            "cpu": run["cpu"] / tokens, "read": run["bytes"] / tokens,
            "spilled": max(0, run["written"] - run["made"]) / tokens, "made": run["made"] / tokens,
            "anonymous": run["anonymous"],
        }  # fmt: skip
    return out


def manifest_cost(shards: int, folder: Path) -> dict[str, float]:
    """Return ``bytes`` of a manifest of so many shards, and CPU seconds to ``write``, ``read``."""
    batch = rollouts(np.random.default_rng(0), num_samples=4)
    with rf.Writer(folder, batch.schema) as writer:
        writer.write(batch)
    small = read_manifest(folder)
    many = tuple(
        Shard(f"shard-{'0' * 16}-{n:05d}.arrow", 7000, TASK_BYTES - n, f"{n:032x}")
        for n in range(shards)
    )
    begin = time.process_time()
    write_manifest(folder, Manifest(small.known, many, small.generation + 1, small.lineage))
    written = time.process_time()
    read = read_manifest(folder)
    end = time.process_time()
    if len(read.shards) != shards:
        raise RuntimeError(f"read {len(read.shards)} shards of {shards}")
    nbytes = (folder / "manifest.json").stat().st_size
    return {"bytes": nbytes, "write": written - begin, "read": end - written}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tokens", type=float, default=10e9)
    args = parser.parse_args()
    found = costs([figure for file in args.files for figure in json.loads(file.read_text())])
    print("| job | CPU s | MB read | MB spilled | MB made | peak anonymous memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for job, cost in found.items():
        print(
            f"| `{job}` | {cost['cpu'] * 1e6:.2f} | {cost['read']:.1f} | {cost['spilled']:.1f} | "
            f"{cost['made']:.1f} | {cost['anonymous'] / 1e6:.0f} MB |"
        )
    print(f"\n{args.tokens:,.0f} tokens:\n")
    print("| job | core hours | GB read | GB on disk at once, input left out | shards made |")
    print("| --- | --- | --- | --- | --- |")
    most = 0
    for job, cost in found.items():
        shards = round(cost["read"] * args.tokens / SHARD_BYTES.get(job, TASK_BYTES))
        most = max(most, shards)
        print(
            f"| `{job}` | {cost['cpu'] * args.tokens / 3600:.1f} | "
            f"{cost['read'] * args.tokens / 1e9:,.0f} | "
            f"{(cost['spilled'] + cost['made']) * args.tokens / 1e9:,.0f} | {shards:,} |"
        )
    for shards in (most, 10 * most):
        with tempfile.TemporaryDirectory() as folder:
            cost = manifest_cost(shards, Path(folder))
        print(
            f"\n{shards:,} shards in a manifest: {cost['bytes'] / 1e6:.2f} MB, CPU: written in "
            f"{cost['write'] * 1e3:.0f} ms, read and checked in {cost['read'] * 1e3:.0f} ms."
        )


if __name__ == "__main__":
    main()
