"""What needs a GPU: padding against copy bandwidth, the head with and without sets, copies, waits.

Without CUDA the lines are printed with their goals and no measurement. Results on the device are
compared with those of the CPU before anything is timed. ``settings.quick`` makes the inputs small.
Elapsed time counts: the CPU only launches kernels. ``details`` of the first line name the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

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
from ragged_format.torch import RaggedBatch, pad_buckets, pad_ragged

__all__ = ["run"]

PADDING, HEAD = "padding against a copy", "head with sets against without"
COPIES, WAITS = "copies a batch", "waits of the host a step of the head"
COPY_GOAL, HEAD_GOAL = 0.7, 1.3
TARGETS, WIDTH = 20_000, 512
# A table of 400 MB: copying it takes longer than launching the kernels that pad.
PADDED = 200_000
# Calls between two synchronisations: what those cost is no part of padding or of a copy.
CALLS = 10
VOCABULARY, HIDDEN = 131_072, 2_048

Kernel = Literal["auto", "triton"]


def run(settings: Settings, device: str | None = None) -> list[Figure]:
    """Time padding and head on `device`, default CUDA where there is one."""
    if device is None and not torch.cuda.is_available():
        nothing = "no CUDA device"
        return [
            Figure(PADDING, nothing, "copy", goal=COPY_GOAL),
            Figure(HEAD, nothing, "full vocabulary", goal=HEAD_GOAL, at_most=True),
            _counted(COPIES, nothing, None),
            _counted(WAITS, nothing, None),
        ]
    place = torch.device(device or "cuda")
    kernels: list[Kernel] = ["auto", "triton"] if place.type == "cuda" else ["auto"]
    check_device(place, kernels)
    return [
        _padding(place, settings), *_head(place, kernels, settings), _copies(place), _waits(place)
    ]  # fmt: skip


def check_device(device: torch.device, kernels: Iterable[Kernel]) -> None:
    """Raise unless tables, log-probs and gradients on the device are those of the CPU."""
    case = heavy_tail(500, 64, 1_024, 64)
    values, counts = case.candidate_ids, case.candidate_counts
    there = values.to(device), counts.to(device)
    padded = [pad_ragged(*there, host_counts=counts)]
    padded += [table for _, table in pad_buckets(*there, host_counts=counts)]
    expected = [pad_ragged(values, counts), *(table for _, table in pad_buckets(values, counts))]
    for mine, other in zip(padded, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), other)
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        moved = case.to(device, dtype)
        # What the CPU makes of the numbers as the dtype has them.
        near = moved.to(torch.device("cpu"), torch.float32)
        heads: list[Callable[[Case], Tensor]] = [partial(ours, kernel=kernel) for kernel in kernels]
        pairs = [(head, moved, near) for head in heads]
        for head, far, close_by in [*pairs, (ours, moved.without_sets(), near.without_sets())]:
            for mine, other in zip(step(head, far), step(ours, close_by), strict=True):
                torch.testing.assert_close(mine.cpu().float(), other, rtol=close, atol=close)


def _padding(device: torch.device, settings: Settings) -> Figure:
    targets = PADDED // 200 if settings.quick else PADDED
    case = heavy_tail(targets, WIDTH, 4_096, 8)
    host = case.candidate_counts
    values, counts = case.candidate_ids.to(device), host.to(device)
    table = torch.zeros(targets, WIDTH, dtype=values.dtype, device=device)
    other = torch.empty_like(table)
    pad = partial(pad_ragged, values, counts, WIDTH, host_counts=host)
    samples = interleave(
        {
            "ours": _timed(device, pad, CALLS),
            "copy": _timed(device, lambda: other.copy_(table), CALLS),
        },
        settings,
    )
    seconds = {name: median_s(part, "wall") / CALLS for name, part in samples.items()}
    return Figure(
        f"{PADDING} of ({targets}, {WIDTH})", time_text(seconds["ours"]),
        f"copy {time_text(seconds['copy'])}",
        median_ratio(samples["copy"], samples["ours"], "wall"), COPY_GOAL,
        details={"device": _described(device), "calls": CALLS, **raw(**samples)},
    )  # fmt: skip


def _head(device: torch.device, kernels: Iterable[Kernel], settings: Settings) -> list[Figure]:
    quick = settings.quick
    sizes = (500, 64, 1_024, 64) if quick else (TARGETS, WIDTH, VOCABULARY, HIDDEN)
    case = heavy_tail(*sizes).to(device, torch.float32 if quick else torch.bfloat16)
    full = _timed(device, partial(step, ours, case.without_sets()))
    figures = []
    for kernel in kernels:
        head: Callable[[Case], Tensor] = partial(ours, kernel=kernel)
        samples = interleave({"ours": _timed(device, partial(step, head, case)), "full": full},
                             settings)  # fmt: skip
        figures.append(Figure(
            f"{HEAD}, kernel {kernel}", time_text(median_s(samples["ours"], "wall")),
            f"full vocabulary {time_text(median_s(samples['full'], 'wall'))}",
            median_ratio(samples["ours"], samples["full"], "wall"), HEAD_GOAL, at_most=True,
            details=raw(**samples),
        ))  # fmt: skip
    return figures


def _copies(device: torch.device) -> Figure:
    if device.type != "cuda":
        return _counted(COPIES, "no CUDA device", None)
    batch = RaggedBatch.from_arrow(pack_row(shapes.to_arrow(shapes.agent()))).pin_memory()
    batch.to(device)  # what the first copy of a process sets up is no part of one
    with torch.profiler.profile() as profile:
        moved = batch.to(device, non_blocking=True)
        moved.padded("candidate_ids")
        torch.cuda.synchronize(device)
    copies = [event for event in profile.events() if "Memcpy HtoD" in event.name]
    size = f"{moved.nbytes / 1e6:.3g} MB"
    return _counted(COPIES, f"{len(copies)} from host to device, {size}", len(copies))


def _waits(device: torch.device) -> Figure:
    """Count what torch finds to wait for the device; the head's check of ids and labels does."""
    if device.type != "cuda":
        return _counted(WAITS, "no CUDA device", None)
    case = heavy_tail(500, 64, 1_024, 64).to(device, torch.float32)
    step(ours, case)
    found = {}
    for on_outside in ("flag", "error"):
        head: Callable[[Case], Tensor] = partial(ours, on_outside=on_outside)
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step(head, case)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        found[on_outside] = sum("synchronizing" in str(one.message) for one in caught)
    text = f"{found['error']}, with labels only flagged {found['flag']}"
    return _counted(WAITS, text, found["error"])


def _counted(name: str, ours_text: str, number: int | None) -> Figure:
    ratio = None if number is None else float(number)
    return Figure(name, ours_text, "-", ratio, 1.0, unit="", at_most=True)


def _described(device: torch.device) -> dict[str, Any]:
    """Return what figures of a GPU need beside the versions of the packages."""
    if device.type != "cuda":
        return {"name": str(device)}
    return {
        "name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda,
        "capability": torch.cuda.get_device_capability(device),
        "memory": torch.cuda.get_device_properties(device).total_memory,
    }  # fmt: skip


def _timed(
    device: torch.device, call: Callable[[], object], calls: int = 1
) -> Callable[[], object]:
    def timed() -> None:
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return timed
