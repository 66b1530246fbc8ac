"""Packing offline: a whole job against the reference's planner and packing, and how full rows are.

The reference gets its samples in memory, without candidate sets and heads, and does what its
trainer does before collation: the planner, which inserts samples into tries, and packing. Ours is
timed in memory, and as a job that reads a dataset, verifies, plans, packs, validates and writes
another one durably, with sets and heads.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import ragged_format as rf
from benchmarks import shapes
from benchmarks.harness import Figure, Settings, interleave, median_s, speed_figure, time_text
from benchmarks.reference import queue, rows
from benchmarks.row_bounds import imbalance_bound, rows_bound, tree_imbalance_bound
from ragged_format.lists import flat
from ragged_format.packing import pack_row, plan_rows
from ragged_pipeline.jobs.pack import pack_dataset
from ragged_pipeline.records import Records

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["run", "unique_tokens"]

RANKS = 2
GROUP = 8
GOAL = 40.0
FILL, IMBALANCE = 0.97, 1.03
VOCAB_SIZE = 49152
# Shape, and a budget that one group fits into.
SHAPES: dict[str, tuple[Callable[[int], shapes.Rollouts], int]] = {
    "agent": (shapes.agent, 9_400),
    "multi_turn": (shapes.multi_turn, 28_700),
}


def run(settings: Settings) -> list[Figure]:
    """Time both shapes, and measure fill and balance on several sets."""
    groups = 4 if settings.quick else 16
    figures = []
    for shape, (generate, budget) in SHAPES.items():
        figures += _speed(shape, generate, budget, groups, settings)
    for name, samples, budget in _sets(quick=settings.quick):
        for packing in ("tree", "sequence"):
            figures += _quality(name, samples, budget, packing)
    return figures


def _speed(
    shape: str,
    generate: Callable[[int], shapes.Rollouts],
    budget: int,
    groups: int,
    settings: Settings,
) -> list[Figure]:
    parts = [generate(shapes.SEED + number) for number in range(groups)]
    samples = joined(parts)
    records = Records([samples], samples.schema)
    queued = [
        sample.to_dict() | {"group_id": number}
        for number, part in enumerate(parts)
        for sample in queue.queue_samples(part, "arrays")
    ]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with rf.Writer(place / "in", samples.schema) as writer:
            writer.write(samples)
        numbers = itertools.count()

        def job() -> None:
            out = place / f"out-{next(numbers)}"
            pack_dataset(place / "in", out, token_budget=budget, ranks=RANKS, workers=1)
            shutil.rmtree(out)

        def in_memory() -> list[pa.RecordBatch]:
            plan = plan_rows(samples, budget, RANKS)
            return [pack_row(records.take(row)) for row in plan.rows]

        contenders: dict[str, Callable[[], object]] = {"memory": in_memory, "job": job}
        version = rows.trl_version()
        names = {"memory": f"{shape}, {groups} groups: plan and pack in memory",
                 "job": f"{shape}, {groups} groups: the job, dataset to dataset"}  # fmt: skip
        figures = [_ratio(shape, samples, budget, queued if version else None)]
        if version is None:
            done = interleave(contenders, settings)
            return figures + [
                Figure(names[key], time_text(median_s(done[key])), "trl: not installed", goal=GOAL)
                for key in names
            ]
        contenders["reference"] = lambda: _reference(queued)
        done = interleave(contenders, settings)
        return figures + [
            speed_figure(
                names[key], done[key], done["reference"],
                label=f"trl {version}, planner and pack", goal=goal,
            )
            for key, goal in (("memory", GOAL), ("job", None))
        ]  # fmt: skip


def joined(parts: list[shapes.Rollouts]) -> pa.RecordBatch:
    """Return groups as one batch, with ids and groups of their own."""
    import pyarrow as pa

    out = []
    for number, part in enumerate(parts):
        batch = shapes.to_arrow(part, first_id=GROUP * number)
        index = batch.schema.get_field_index("group_id")
        names = pa.array([f"group-{number}"] * batch.num_rows)
        out.append(batch.set_column(index, batch.schema.field(index), names))
    return rf.concat(out)


def _reference(queued: list[dict[str, Any]]) -> list[Any]:
    from trl.experimental.async_grpo import async_grpo_trainer as trl

    planner = trl.FixedCountBatcher(queued, RANKS, RANKS * GROUP)
    return [row.pack() for micro_batch in planner for row in micro_batch]


def unique_tokens(batch: pa.RecordBatch) -> int:
    """Return how many different prefixes samples have, counted by hashes and without a forest."""
    ids, offsets = flat(batch.column("input_ids"))
    tokens = ids.to_numpy(zero_copy_only=False).astype(np.uint64)
    seen = []
    for start, stop in itertools.pairwise(offsets.tolist()):
        place = np.arange(1, stop - start + 1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            mixed = (tokens[start:stop] << np.uint64(32) | place) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            seen.append(np.cumsum(mixed ^ (mixed >> np.uint64(32)), dtype=np.uint64) ^ place)
    return len(np.unique(np.concatenate([np.zeros(0, np.uint64), *seen])))


def _ratio(
    shape: str, samples: pa.RecordBatch, budget: int, queued: list[dict[str, Any]] | None
) -> Figure:
    """Return tokens per forwarded token against the count of different prefixes."""
    plan = plan_rows(samples, budget, RANKS)
    forwarded = int(plan.unique_tokens.sum())
    counted = unique_tokens(samples)
    if queued is not None:
        theirs = sum(len(row["input_ids"]) for row in _reference(queued))
        same = plan_rows(samples, budget, RANKS, fork="transition")
        if int(same.unique_tokens.sum()) != theirs:
            raise RuntimeError(f"the reference forwards {theirs} tokens, ours {same.metrics()}")
    return Figure(
        f"{shape}: forwarded tokens", f"{forwarded:,}, packing ratio {plan.packing_ratio:.4f}",
        f"different prefixes: {counted:,}", forwarded / counted, 1.0, at_most=True,
    )  # fmt: skip


def _sets(*, quick: bool) -> Iterator[tuple[str, pa.RecordBatch, int]]:
    size = 8 if quick else 1
    yield "real vLLM rollouts", _real(), 4_096
    short = shapes.to_arrow(shapes.many(4_000 // size, median=400))
    yield "log-normal, median 400", short, 16_384
    long = shapes.to_arrow(shapes.many(1_600 // size))
    yield "log-normal, median 4,000", long, 32_768
    yield "agent", joined([shapes.agent(n) for n in range(64 // size)]), 65_536
    yield "multi-turn", joined([shapes.multi_turn(n) for n in range(64 // size)]), 65_536


def _real() -> pa.RecordBatch:
    from ragged_format.adapters.conversion import Conversion
    from ragged_format.adapters.registry import choose_reader

    shipped = resources.files("ragged_format") / "demo_data" / "rollouts.jsonl.gz"
    with resources.as_file(shipped) as path:
        conversion = Conversion(choose_reader("vllm"), [str(path)], {"vocab_size": VOCAB_SIZE})
        return rf.concat(list(conversion.batches(lambda _: None)))


def _quality(name: str, samples: pa.RecordBatch, budget: int, packing: Any) -> list[Figure]:
    lengths = flat(samples.column("input_ids")).offsets
    lengths = np.diff(lengths)
    figures = []
    for ranks in (2, 8):
        plan = plan_rows(samples, budget, ranks, packing=packing)
        fewest = rows_bound(samples, lengths, budget, packing)
        best_rows = -(-fewest // ranks) * ranks
        tokens = int(plan.unique_tokens.sum())
        bound = tokens / (best_rows * budget)
        label = f"{name}, {packing}, {budget:,} tokens, {ranks} ranks"
        figures.append(
            Figure(
                f"{label}: row fill", f"{plan.fill:.4f} in {len(plan.rows)} rows",
                f"bound {bound:.4f} in {best_rows} rows", plan.fill / min(FILL, bound), 1.0,
            )
        )  # fmt: skip
        if packing == "sequence":
            least = imbalance_bound(lengths, budget, ranks)
        else:
            whole = plan_rows(samples.filter(lengths <= budget), int(lengths.sum()) + 1)
            least = tree_imbalance_bound(
                lengths, int(whole.unique_tokens.sum()), int(whole.load.sum()), budget, ranks
            )
        figures.append(
            Figure(
                f"{label}: imbalance", f"{plan.imbalance:.4f}", f"bound {least:.4f}",
                plan.imbalance / max(IMBALANCE, least), 1.0, at_most=True,
            )
        )  # fmt: skip
    return figures
