"""What needs a GPU: padding against copy bandwidth, the head with and without sets, copies a batch.

Without CUDA the lines are printed with their goals and no measurement. ``settings.quick`` makes the
inputs small. Elapsed time counts: the CPU only launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from benchmarks import shapes
from benchmarks.harness import (
    Figure,
    Settings,
    interleave,
    median_ratio,
    median_s,
    raw,
    time_text,
)
from benchmarks.head import Case, heavy_tail, ours, step
from ragged_format.packing import pack_row
from ragged_format.torch import RaggedBatch, pad_ragged

__all__ = ["run"]

PADDING, HEAD, COPIES = "padding against a copy", "head with sets against without", "copies a batch"
COPY_GOAL, HEAD_GOAL = 0.7, 1.3
TARGETS, WIDTH = 20_000, 512
VOCABULARY, HIDDEN = 131_072, 2_048


def run(settings: Settings, device: str | None = None) -> list[Figure]:
    """Time padding and head on `device`, default CUDA where there is one."""
    if device is None and not torch.cuda.is_available():
        nothing = "no CUDA device"
        return [
            Figure(PADDING, nothing, "copy", goal=COPY_GOAL),
            Figure(HEAD, nothing, "full vocabulary", goal=HEAD_GOAL, at_most=True),
            Figure(COPIES, nothing, "-", goal=1.0, unit="", at_most=True),
        ]
    place = torch.device(device or "cuda")
    return [_padding(place, settings), *_head(place, settings), _copies(place)]


def _padding(device: torch.device, settings: Settings) -> Figure:
    targets = TARGETS // 20 if settings.quick else TARGETS
    case = heavy_tail(targets, WIDTH, 4_096, 8)
    host = case.candidate_counts
    values, counts = case.candidate_ids.to(device), host.to(device)
    table = torch.empty(targets, WIDTH, dtype=values.dtype, device=device)
    other = torch.empty_like(table)
    samples = interleave(
        {
            "ours": _timed(device, lambda: pad_ragged(values, counts, WIDTH, host_counts=host)),
            "copy": _timed(device, lambda: other.copy_(table)),
        },
        settings,
    )
    return Figure(
        f"{PADDING} of ({targets}, {WIDTH})", time_text(median_s(samples["ours"], "wall")),
        f"copy {time_text(median_s(samples['copy'], 'wall'))}",
        median_ratio(samples["copy"], samples["ours"], "wall"), COPY_GOAL, details=raw(**samples),
    )  # fmt: skip


def _head(device: torch.device, settings: Settings) -> list[Figure]:
    quick = settings.quick
    sizes = (500, 64, 1_024, 64) if quick else (TARGETS, WIDTH, VOCABULARY, HIDDEN)
    dtype = torch.float32 if quick else torch.bfloat16
    case = heavy_tail(*sizes)
    leaves = [t.detach().to(device, dtype).requires_grad_() for t in (case.hidden, case.weight)]
    others = [t.to(device) for t in (case.pred_index, case.target_ids)]
    ids, counts = case.candidate_ids.to(device), case.candidate_counts.to(device)
    with_sets = Case(leaves[0], leaves[1], others[0], others[1], ids, counts)
    without = Case(leaves[0], leaves[1], others[0], others[1], ids[:0], torch.zeros_like(counts))
    full = _timed(device, partial(step, ours, without))
    figures = []
    kernels: list[Literal["auto", "triton"]] = ["auto"]
    if device.type == "cuda":
        kernels.append("triton")
    for kernel in kernels:
        head: Callable[[Case], Tensor] = partial(ours, kernel=kernel)
        own = _timed(device, partial(step, head, with_sets))
        samples = interleave({"ours": own, "full": full}, settings)
        figures.append(Figure(
            f"{HEAD}, kernel {kernel}", time_text(median_s(samples["ours"], "wall")),
            f"full vocabulary {time_text(median_s(samples['full'], 'wall'))}",
            median_ratio(samples["ours"], samples["full"], "wall"), HEAD_GOAL, at_most=True,
            details=raw(**samples),
        ))  # fmt: skip
    return figures


def _copies(device: torch.device) -> Figure:
    batch = RaggedBatch.from_arrow(pack_row(shapes.to_arrow(shapes.agent())))
    if device.type != "cuda":
        return Figure(COPIES, "no CUDA device", "-", goal=1.0, unit="", at_most=True)
    batch = batch.pin_memory()
    with torch.profiler.profile() as profile:
        moved = batch.to(device, non_blocking=True)
        torch.cuda.synchronize()
    copies = [event for event in profile.events() if "Memcpy HtoD" in event.name]
    return Figure(
        COPIES, f"{len(copies)} from host to device, {moved.nbytes / 1e6:.3g} MB", "-",
        float(len(copies)), 1.0, unit="", at_most=True,
    )  # fmt: skip


def _timed(device: torch.device, call: Callable[[], object]) -> Callable[[], object]:
    def timed() -> object:
        out = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return out

    return timed
