"""``ragged sweep``: what crashed writers and abandoned jobs left in a dataset goes away."""

from __future__ import annotations

from typing import Annotated

import typer

from ragged_format.cli.options import duration
from ragged_format.cli.output import Json, Output, format_count
from ragged_format.writer import GRACE_S
from ragged_format.writer import sweep as sweep_dataset

__all__ = ["sweep"]


def sweep(
    ctx: typer.Context,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Dataset: a directory or a URL.")],
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            metavar="TIME",
            parser=duration,
            help="Spare what was changed since, as 90m or 7d. [default: 24h]",
            show_default=False,
        ),
    ] = GRACE_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, list it.")] = False,
    json: Json = False,
) -> None:
    """Remove what crashed writers, overwrites and abandoned jobs left in a dataset.

    Nothing of a writer or a job that is running is touched, and nothing that the manifest lists.
    A job that was interrupted cannot go on afterwards; it begins anew.
    """
    out = Output(ctx, json=json)
    names = sweep_dataset(path, grace_s=older_than, dry_run=dry_run)
    count = f"{format_count(len(names))} {'entry' if len(names) == 1 else 'entries'}"
    what = "to remove" if dry_run else "removed"
    out.text(*names, f"{count} {what}, older than {older_than / 3600:g} h")
    out.result({"path": path, "removed": names, "dry_run": dry_run})
