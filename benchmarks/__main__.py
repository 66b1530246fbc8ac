"""Run benchmarks by name and print their figures."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks.environment import (
    describe,
    pin_threads,
    set_thread_variables,
    settle_allocator,
)

BENCHMARKS = (
    "pack",
    "pack_job",
    "row_bytes",
    "serialize",
    "arena",
    "loader",
    "convert",
    "head",
    "hand_over",
    "device",
    "distill",
    "compact",
    "ingest",
    "pipeline",
)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks named on the command line; 0 even where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")

    set_thread_variables()
    pin_threads()
    settle_allocator()
    from benchmarks.harness import Figure, Settings, format_table

    settings = Settings(rounds=3, slice_s=0.002, quick=True) if args.quick else Settings()
    if args.rounds:
        settings = Settings(args.rounds, settings.slice_s, settings.quick)
    environment = describe()
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    print(
        f"{environment['cpu']}, {environment['cores']} cores, load {environment['load_average']}, "
        f"Python {environment['python']}\n{versions}\n"
        "One thread; medians of per-round ratios; ratio: CPU time of all threads, wall: elapsed.\n"
    )
    done: dict[str, list[Figure]] = {}
    for name in args.names or BENCHMARKS:
        module = importlib.import_module(f"benchmarks.{name}")
        done[name] = module.run(settings)
        print(f"{name}\n{format_table(done[name])}\n", flush=True)
    if args.json:
        report = {
            "environment": environment,
            "quick": settings.quick,
            "figures": {name: [f.to_json() for f in figures] for name, figures in done.items()},
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
