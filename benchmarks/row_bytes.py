"""Bytes of one packed row: ours against the reference's two published forms."""

from __future__ import annotations

from benchmarks import pack, shapes
from benchmarks.harness import Figure, Settings
from benchmarks.reference import rows
from benchmarks.reference.queue import queue_samples
from ragged_format.packing import pack_row

__all__ = ["run"]

GOALS = {"agent": 0.3, "multi_turn": 1.0}


def run(settings: Settings) -> list[Figure]:  # noqa: ARG001 - sizes need no settings
    """Measure the bytes of the rows that benchmark `pack` times."""
    figures = []
    for shape, generate in pack.SHAPES.items():
        rollouts = generate(shapes.SEED)
        row = pack_row(shapes.to_arrow(rollouts), packing="tree")
        message = row.serialize().size / 1e6
        ours = f"{row.nbytes / 1e6:.3f} MB (message {message:.3f})"
        peer = "trl: not installed"
        if rows.trl_version() is not None:
            tree_row = rows.tree_row_class()
            after = rows.pack_row(queue_samples(rollouts, "arrays"), tree_row, "after")
            before = rows.pack_row(queue_samples(rollouts, "dicts"), tree_row, "before")
            peer = (
                f"after {rows.row_bytes(after) / 1e6:.2f} MB, "
                f"before {rows.row_bytes(before) / 1e6:.1f} MB"
            )
        figures.append(
            Figure(
                f"{shape}: bytes of a packed row",
                ours,
                peer,
                message,
                GOALS[shape],
                unit=" MB",
                at_most=True,
            )
        )
    return figures
