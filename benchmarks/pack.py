"""Packing one row: ours against the installed reference trainer and its published forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import ragged_format as rf
from benchmarks import shapes
from benchmarks.harness import Figure, Settings, interleave, median_s, speed_figure, time_text
from benchmarks.reference import rows
from benchmarks.reference.queue import queue_samples
from ragged_format.lists import flat
from ragged_format.packing import pack_row

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["run"]

# What the pull request that made the reference ragged published for its own machine, in ms.
PUBLISHED = {"main": (256, 881), "before": (282, 1_040), "after": (15, 66)}
GOALS = {"plain": 40.0, "before": 400.0}
NAMES = {
    "plain": "trl add + pack, bare",
    "main": "main: + dense mask",
    "before": "before: + dense mask, dict top-K",
    "after": "after: + flat mask, top-K arrays",
}
VARIANTS = {
    "cold": "ours in one cold call",
    "transition": "ours by transition",
    "sequence": "ours by sequence",
}
# Ours goes round over these rows, so that a call does not find its input in the caches.
ROWS = 8
SHAPES: dict[str, Callable[[int], shapes.Rollouts]] = {
    "agent": shapes.agent,
    "multi_turn": shapes.multi_turn,
}


def run(settings: Settings) -> list[Figure]:
    """Time `pack_row` and all forms of the reference on both shapes."""
    figures = []
    for number, shape in enumerate(SHAPES):
        figures += _shape(shape, number, settings)
    return figures


def _shape(shape: str, number: int, settings: Settings) -> list[Figure]:
    generate = SHAPES[shape]
    rollouts = generate(shapes.SEED)
    batches = [shapes.to_arrow(generate(shapes.SEED + i)) for i in range(ROWS)]
    turn = itertools.cycle(batches)
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: pack_row(next(turn), packing="tree"),
        "cold": lambda: pack_row(next(turn), packing="tree"),
        "transition": lambda: pack_row(next(turn), packing="tree", fork="transition"),
        "sequence": lambda: pack_row(next(turn), packing="sequence"),
    }
    version = rows.trl_version()
    if version is None:
        ours = time_text(median_s(interleave(contenders, settings)["ours"]))
        return [
            Figure(f"{shape}: {NAMES[form]}", ours, "trl: not installed", goal=GOALS.get(form))
            for form in NAMES
        ]
    tree_row = rows.tree_row_class()
    dicts, arrays = queue_samples(rollouts, "dicts"), queue_samples(rollouts, "arrays")
    contenders |= {
        "plain": lambda: rows.pack_row(dicts, tree_row, "plain"),
        "main": lambda: rows.pack_row(dicts, tree_row, "main"),
        "before": lambda: rows.pack_row(dicts, tree_row, "before"),
        "after": lambda: rows.pack_row(arrays, tree_row, "after"),
    }
    check_same(batches[0], rows.pack_row(arrays, tree_row, "after"))
    samples = interleave(contenders, settings, single=("cold",))
    label = f"trl {version}"
    figures = []
    for form, name in NAMES.items():
        note = f" (published {PUBLISHED[form][number]} ms)" if form in PUBLISHED else ""
        figures.append(
            speed_figure(
                f"{shape}: {name}",
                samples["ours"],
                samples[form],
                label=label,
                note=note,
                goal=GOALS.get(form),
            )
        )
    for ours, what in VARIANTS.items():
        name = f"{shape}: {NAMES['plain']}; {what}"
        figures.append(speed_figure(name, samples[ours], samples["plain"], label=label))
    return figures


def check_same(batch: pa.RecordBatch, reference: dict[str, Any]) -> None:
    """Raise unless ours and the reference's row hold the same targets and sets.

    Both are compared with forks one token early, as the reference forks.
    """
    row = pack_row(batch, packing="tree", fork="transition")
    column = {
        c.name: flat(row.column(c.name)).numpy()
        for c in rf.parse_schema(row.schema)
        if c.axis in ("token", "target")
    }
    labels = reference["shift_labels"].numpy()[reference["token_index"].numpy()]
    sets = reference["sampling_mask_counts"].numpy()[reference["token_index"].numpy()]
    pairs: dict[str, tuple[Any, Any]] = {
        "forwarded tokens": (len(column["input_ids"]), len(reference["input_ids"])),
        "target ids": (column["target_ids"], labels),
        "log-probs": (column["rollout_log_probs"], reference["old_log_probs"].numpy()),
        "set sizes": (column["candidate_counts"], sets),
        "members": (column["member_index"], reference["segment_id"].numpy()),
    }
    for what, (ours, theirs) in pairs.items():
        if not np.array_equal(ours, theirs):
            raise RuntimeError(f"ours and the reference's row differ in {what}")
