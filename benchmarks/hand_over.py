"""What a training step costs on rank 0: planning, packing and handing rows to two processes.

Samples of two groups of the agent shape become one row for each of two ranks. The reference does
what its trainer does on the same samples, without their candidate sets and heads: planner,
collator, and accelerate's dispatcher, which broadcasts the whole padded batch. Ours plans, packs
and scatters rows with sets and heads. A second process receives; CPU time is that of rank 0 alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

import ragged_format as rf
from benchmarks import shapes
from benchmarks.harness import (
    Figure,
    Settings,
    interleave,
    median_s,
    speed_figure,
    time_text,
)
from benchmarks.reference import queue, rows
from ragged_format.packing import pack_row, plan_rows
from ragged_format.torch.distributed import scatter_rows

__all__ = ["joined", "plan_and_pack", "run"]

RANKS = 2
GROUPS = 2
BUDGET = 9_300  # one group of the shape has about 9,200 unique tokens
GOAL = 20.0


def joined() -> pa.RecordBatch:
    """Return the samples of all groups as one batch."""
    parts = []
    for number in range(GROUPS):
        batch = shapes.to_arrow(shapes.agent(shapes.SEED + number))
        for name in ("sample_id", "group_id"):
            index = batch.schema.get_field_index(name)
            renamed = pa.array([f"{number}-{value}" for value in batch.column(name).to_pylist()])
            batch = batch.set_column(index, batch.schema.field(index), renamed)
        parts.append(batch)
    return rf.concat(parts)


def plan_and_pack(samples: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Return the rows of one step, one per rank."""
    plan = plan_rows(samples, BUDGET, RANKS)
    return [pack_row(rf.take(samples, row)) for row in plan.rows]


def run(settings: Settings) -> list[Figure]:
    """Time both on rank 0 while another process receives."""
    samples = joined()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        context = multiprocessing.get_context("spawn")
        peer = context.Process(target=_receive, args=(store,), daemon=True)
        peer.start()
        try:
            return _compare(samples, store, settings)
        finally:
            peer.kill()
            peer.join()


def _compare(samples: pa.RecordBatch, store: str, settings: Settings) -> list[Figure]:
    group = _join(store, 0)
    planned = plan_and_pack(samples)

    def ours() -> None:
        scatter_rows(plan_and_pack(samples), group=group).wait()

    contenders: dict[str, Callable[[], object]] = {
        "ours": ours,
        "plan": lambda: plan_and_pack(samples),
        "scatter": lambda: scatter_rows(planned, group=group).wait(),
    }
    version = rows.trl_version()
    name = f"rank 0, a step of {RANKS} agent rows"
    if version is None:
        done = interleave(contenders, settings)
        return [Figure(name, time_text(median_s(done["ours"])), "trl: not installed", goal=GOAL)]
    steps = _reference_steps(_repeat())
    contenders["reference"] = lambda: next(steps)
    collated = _collated()
    contenders["collated"] = lambda: next(collated)
    batch = next(steps)
    done = interleave(contenders, settings)
    sent = sum(tensor.nbytes for tensor in batch.values()) * RANKS
    own = scatter_rows(planned, group=group)
    own.wait()
    label = f"trl {version}"
    return [
        speed_figure(f"{name}: plan, pack, hand over", done["ours"], done["reference"],
                     label=label, goal=GOAL),
        speed_figure(f"{name}: plan and pack", done["plan"], done["collated"], label=label),
        Figure(f"{name}: hand over", time_text(median_s(done["scatter"])), "-"),
        Figure("bytes to the other rank", f"{own.nbytes_sent / 1e6:.3g} MB, with sets and heads",
               f"{label} {sent / 1e6:.3g} MB, without", sent / own.nbytes_sent),
    ]  # fmt: skip


def _join(store: str, rank: int) -> dist.ProcessGroup:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29401", "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true", "TRL_EXPERIMENTAL_SILENCE": "1",
    }  # fmt: skip
    if not dist.is_initialized():
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    group = dist.new_group(backend="gloo")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(group)
    return group


def _receive(store: str) -> None:
    """Receive both kinds of hand-over, each in a thread and on a group of its own."""
    torch.set_num_threads(1)
    group = _join(store, 1)
    if rows.trl_version() is not None:
        threading.Thread(target=_exhaust, daemon=True).start()
    while scatter_rows(group=group).wait() is not None:
        pass


def _exhaust() -> None:
    for _ in _reference_steps(iter(())):
        pass


def _repeat() -> Iterator[dict[str, Any]]:
    """Yield the samples of all groups for ever: the planner emits a step when the next begins."""
    queued: list[dict[str, Any]] = []
    for number in range(GROUPS):
        samples = queue.queue_samples(shapes.agent(shapes.SEED + number), "arrays")
        queued += [sample.to_dict() | {"group_id": number} for sample in samples]
    return itertools.cycle(queued)


def _planner(samples: Iterator[dict[str, Any]]) -> tuple[Any, Any]:
    from trl.experimental.async_grpo import async_grpo_trainer as trl

    batcher = trl.TokenBudgetBatcher(samples, RANKS, BUDGET, trl.defaultdict(list))
    return batcher, trl.DataCollatorForRollout(0, RANKS, token_budget=BUDGET)


def _collated() -> Iterator[Any]:
    """Yield the reference's batches before they are dispatched."""
    batcher, collate = _planner(_repeat())
    for micro_batch in batcher:
        yield collate([micro_batch])


def _reference_steps(samples: Iterator[dict[str, Any]]) -> Iterator[Any]:
    """Yield this rank's rows as the reference's trainer gets them."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    options = DataLoaderConfiguration(split_batches=True, dispatch_batches=True)
    batcher, collate = _planner(samples)
    loader = torch.utils.data.DataLoader(batcher, batch_size=1, collate_fn=collate)
    yield from Accelerator(cpu=True, dataloader_config=options).prepare(loader)
