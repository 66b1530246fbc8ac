"""``ragged pack``: samples become training rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragged_format.cli.options import size_option
from ragged_format.cli.output import Json, Output, format_count, grid, heading
from ragged_format.record_files import STDIN
from ragged_pipeline.cli.common import (
    Engine,
    Force,
    Memory,
    Workers,
    WriteMode,
    result_json,
    result_lines,
    shown_progress,
    stdout_stream,
)
from ragged_pipeline.cli.spool import replayable
from ragged_pipeline.defaults import MEMORY, TASK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["pack"]

Packing = Literal["tree", "sequence"]
Fork = Literal["token", "transition"]
NullAdvantage = Literal["error", "keep"]
Tail = Literal["keep", "drop"]

_LEFT_OUT = {
    "without_target": "left out: nothing in them is scored",
    "oversize": "left out: longer than the budget",
    "dropped": "left out: no row for every rank",
}


def pack(
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            show_default=False,
            help="Samples: dataset, file or stream; - reads stdin.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="OUT", show_default=False, help="Dataset to write; - writes a stream to stdout."
        ),
    ],
    packing: Annotated[
        Packing, typer.Option("--packing", help="Share common prefixes, or lay samples end to end.")
    ] = "tree",
    fork: Annotated[
        Fork,
        typer.Option(
            "--fork", help="Share while tokens agree, or only while the next one agrees as well."
        ),
    ] = "token",
    token_budget: Annotated[
        int,
        typer.Option(
            "--token-budget", metavar="N", min=1, help="Most tokens of a row, shared once."
        ),
    ] = 16384,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, help="Ranks between which load is even.")
    ] = 1,
    window: Annotated[
        int, typer.Option("--window", metavar="N", min=1, help="Samples planned together.")
    ] = 4096,
    within_group: Annotated[
        bool, typer.Option("--within-group", help="Share only between samples of one group_id.")
    ] = False,
    null_advantage: Annotated[
        NullAdvantage, typer.Option("--null-advantage", help="A sample whose advantage is null.")
    ] = "error",
    tail: Annotated[
        Tail, typer.Option("--tail", help="Rows left over where ranks need equally many.")
    ] = "keep",
    shard_bytes: Annotated[
        int, size_option("--shard-bytes", "Samples that become one shard, about.", TASK_BYTES)
    ] = TASK_BYTES,
    mode: WriteMode = "error",
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Pack samples into training rows of at most a number of tokens, evenly over ranks."""
    from ragged_pipeline.jobs.pack import pack_dataset

    out = Output(ctx, json=json, data_on_stdout=target == STDIN)
    with (
        replayable(path) as source,
        shown_progress("packing") as progress,
        stdout_stream(target) as place,
    ):
        done = pack_dataset(
            source, place, packing=packing, fork=fork, token_budget=token_budget, ranks=ranks,
            window=window, within_group=within_group, null_advantage=null_advantage, tail=tail,
            shard_bytes=shard_bytes, mode=mode, workers=workers, memory=memory, engine=engine,
            force=force, progress=progress,
        )  # fmt: skip
    figures = done.figures
    options = {
        "packing": packing, "fork": fork, "token_budget": token_budget, "ranks": ranks,
    }  # fmt: skip
    out.text(
        heading(f"{format_count(figures['rows'])} rows → {target}"),
        grid([*_lines(figures, token_budget, ranks), *result_lines(done)]),
    )
    out.result({**result_json(done), "path": target, "input": path, **options, **figures})


def _lines(figures: Mapping[str, Any], token_budget: int, ranks: int) -> list[tuple[str, str]]:
    """Return what became of the samples, for people."""
    count = {name: format_count(n) for name, n in figures.items() if isinstance(n, int)}
    lines = [
        ("samples", f"{count['samples']}, {count['planned']} in rows"),
        ("tokens", f"{count['tokens']}, forwarded {count['unique_tokens']}: "
         f"packing ratio {figures['packing_ratio']:.2f}"),
        ("targets", count["targets"]),
        ("fill", f"{figures['fill']:.1%} of {format_count(token_budget)} tokens"),
    ]  # fmt: skip
    if ranks > 1:
        lines.append(("imbalance", f"{figures['imbalance']:.3f} over {ranks} ranks, "
                      f"{count['steps']} step{'s' * (figures['steps'] != 1)}"))  # fmt: skip
    lines += [
        ("samples", f"{count[reason]} {label}")
        for reason, label in _LEFT_OUT.items() if figures[reason]
    ]  # fmt: skip
    if figures["missing_rows"]:
        lines.append(("rows", f"{count['missing_rows']} missing in the last step: too few samples"))
    if figures["null_advantages"]:
        lines.append(("advantages", f"{count['null_advantages']} null, kept"))
    lines += [
        ("conflicts", f"{name}: {format_count(n)} tokens differ from the shared copy")
        for name, n in figures["conflicts"].items()
    ]  # fmt: skip
    return lines
