"""``ragged split``: records into named parts."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ragged_format.cli.output import Json, Output, format_bytes, format_count, grid, heading
from ragged_pipeline.cli.common import (
    Engine,
    Force,
    Memory,
    OnDuplicate,
    Workers,
    WriteMode,
    result_json,
    shown_progress,
)
from ragged_pipeline.cli.spool import replayable
from ragged_pipeline.defaults import MEMORY

__all__ = ["split"]


def split(
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="IN", show_default=False, help="Dataset, file or stream; - reads stdin."
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="OUT", show_default=False, help="Directory; each part is a dataset in it."
        ),
    ],
    part: Annotated[
        list[str],
        typer.Option(
            "--part", metavar="NAME=FRACTION", show_default=False,
            help="A part and its share, as train=0.9; repeat for all. They add up to 1.",
        ),
    ],
    by: Annotated[
        Literal["group", "record"],
        typer.Option("--by", help="Keep the samples of a group_id together, or not."),
    ] = "group",
    seed: Annotated[int, typer.Option("--seed", help="Another seed, another split.")] = 0,
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Split records into named parts by a hash, so that no group is in two of them."""
    from ragged_pipeline.api import split as run

    out = Output(ctx, json=json)
    parts = _parts(part)
    with replayable(path) as place, shown_progress("splitting") as progress:
        done = run(
            place, target, parts, by=by, seed=seed, mode=mode, on_duplicate=on_duplicate,
            workers=workers, memory=memory, engine=engine, force=force, progress=progress,
        )  # fmt: skip
    total = sum(result.rows for result in done.values())
    lines = [
        (name, f"{format_count(result.rows)} records, {result.rows / max(total, 1):.1%}, "
         f"{format_bytes(result.bytes)}" + (", unchanged" if result.unchanged else ""))
        for name, result in done.items()
    ]  # fmt: skip
    out.text(heading(f"{format_count(total)} records → {target}"), grid(lines))
    out.result({
        "path": target, "input": path, "records": total,
        "parts": {name: result_json(result) for name, result in done.items()},
    })  # fmt: skip


def _parts(words: list[str]) -> dict[str, float]:
    out: dict[str, float] = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not equals or share <= 0 or name in out:
            raise typer.BadParameter(f"{word!r}: expected NAME=FRACTION", param_hint="'--part'")
        out[name] = share
    return out
