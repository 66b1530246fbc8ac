"""``ragged export``: records of this format in the form that another system reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ragged_format.cli.adapter_options import (
    AdapterOptions,
    ListingCommand,
    chosen_options,
    list_adapters,
)
from ragged_format.cli.output import Json, Output, format_bytes, format_count, grid, heading
from ragged_format.errors import ConversionError, SchemaMismatchError
from ragged_pipeline.cli.common import shown_progress

if TYPE_CHECKING:
    from ragged_format.adapters.registry import Writer

__all__ = ["app", "export"]

app = typer.Typer(add_completion=False)


@app.command(cls=ListingCommand)
def export(
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            show_default=False,
            help="Dataset, file or stream; - reads a stream from standard input.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="OUT", show_default=False, help="File or directory to write; must not exist."
        ),
    ],
    system: Annotated[
        str,
        typer.Option("--to", metavar="NAME", help="Whose form it is to be; --list names all."),
    ],
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="A,B,…",
            help="Optional columns to export. Default: all, which the form must have a place for.",
        ),
    ] = None,
    lossy: Annotated[
        bool,
        typer.Option(
            "--lossy", help="Leave out what the form cannot hold, counted, instead of refusing."
        ),
    ] = False,
    options: AdapterOptions = None,
    _listed: Annotated[
        bool,
        typer.Option(
            "--list",
            is_eager=True,
            callback=list_adapters("writes"),
            help="List what can be written, and exit.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Write records in the form that another system reads.

    OUT appears whole, when all of the input is written, or not at all.
    """
    from ragged_pipeline.exporting import export as export_records

    out = Output(ctx, json=json)
    writer = _writer(system)
    chosen = chosen_options(ctx, writer.write, {"lossy": lossy}, options)
    named = None if columns is None else [name for name in columns.split(",") if name]
    with shown_progress("exporting") as progress:
        try:
            done = export_records(
                path, target, to=system, columns=named, options=chosen, progress=progress
            )
        except SchemaMismatchError as err:
            if named is None or err.code != "RF-S003":
                raise
            raise typer.BadParameter(
                f"{path} has no column {err.got}. It has: {err.expected}.",
                param_hint="'--columns'",
            ) from None
    lines = [(name.replace("_", " "), Text(format_count(n))) for name, n in done.figures.items()]
    lines.append(("bytes", Text(format_bytes(done.bytes))))
    out.text(heading(f"{format_count(done.rows)} records → {target}"), grid(lines))
    out.result({
        "path": target, "to": system, "records": done.rows, "counts": done.figures,
        "bytes": done.bytes,
    })  # fmt: skip


def _writer(name: str) -> Writer:
    from ragged_format.adapters import registry

    try:
        return registry.choose_writer(name)
    except ConversionError as err:
        raise typer.BadParameter(
            f"{err.what}: {name!r}. Supported: {err.expected}.", param_hint="'--to'"
        ) from None
