"""``ragged report``: what is in the data, as a page, as pictures and as numbers."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ragged_format.cli.output import Json, Output, format_bytes, format_count, grid, heading
from ragged_format.cli.sources import opened
from ragged_pipeline.reports.numerals import percent

__all__ = ["report"]

DEFAULT = "report.html"


def report(
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="IN", help="Dataset, file, stream or URL; - reads a stream from standard input."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT",
            help="The page; - writes it to standard output. By default report.html, and no page "
            "where --json or --png asks for something else.",
        ),
    ] = None,
    png: Annotated[
        str | None, typer.Option("--png", metavar="DIR", help="Write each figure as PNG, too.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            help="Ranks that share packed rows; by default those that the lineage names.",
        ),
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(
            "--token-budget",
            metavar="N",
            min=1,
            help="Tokens of a full row; by default those that the lineage names.",
        ),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option("--row", metavar="INDEX", min=0, help="Packed row whose prefix tree to draw."),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", metavar="N", min=1, help="Records that are padded together."),
    ] = 8,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="Processes; by default one per core."),
    ] = None,
    json: Json = False,
) -> None:
    """Describe data of any size: sets, heads, lengths, padding, packing, staleness, rewards.

    The page is one HTML file that needs nothing else. Memory is bounded, and the figures are the
    same for any number of processes.
    """
    from ragged_pipeline.reports import api

    to_stdout = out == "-"
    printed = Output(ctx, json=json, data_on_stdout=to_stdout)
    page: Any = sys.stdout.buffer if to_stdout else out
    if out is None and not json and png is None:
        page = DEFAULT
    with opened(path) as source, printed.progress("reading", source.num_rows) as advance:
        found = api.report(
            source, page, png_dir=png, ranks=ranks, token_budget=token_budget, row=row,
            batch_size=batch_size, workers=workers, progress=advance, name=api.name_of(path),
        )  # fmt: skip
    printed.text(heading(path), grid(_lines(found.statistics)))
    if found.html is not None and not to_stdout:
        printed.text(f"page: {found.html}")
    if found.pngs:
        printed.text(f"pictures: {len(found.pngs)} in {png}")
    printed.result({"path": path, "html": found.html, "pngs": found.pngs, **found.statistics})


def _lines(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures that matter most, for people."""
    totals = data["totals"]
    lines = [
        (
            "records",
            f"{format_count(totals['records'])}, {format_count(totals['samples'])} samples",
        ),
        ("tokens", f"{format_count(totals['tokens'])}, {format_count(totals['targets'])} targets"),
        ("in memory", format_bytes(totals["bytes"])),
    ]
    for axis in data["axes"]:
        if axis["head_kind"] == "set" and axis["sizes"]["total"]:
            lines.append(
                ("sets", f"{percent(axis['singleton_share'])} singletons, widest "
                 f"{format_count(axis['sizes']['max'])} ids")
            )  # fmt: skip
        elif axis["mass"] and axis["mass"]["heads"]:
            lines.append((axis["axis"], f"mean mass {axis['mass']['mean']:.4f}"))
    packing, balance = data["packing"], data["balance"]
    if packing is not None and packing["tokens"]:
        lines.append(("packing", f"ratio {packing['ratio']:.3f}, fill {percent(packing['fill'])}"))
    if balance is not None and balance["imbalance"]:
        lines.append(("balance", f"{balance['imbalance']:.4f} over {balance['ranks']} ranks"))
    if (reward := data["reward"]) is not None and reward["count"]:
        lines.append(("reward", f"mean {reward['mean']:.4g}"))
    return lines
