"""``ragged export``: records of this format in the form that another system reads."""

from __future__ import annotations

import errno
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import typer
from rich.text import Text

from ragged_format.cli.adapter_options import AdapterOptions, chosen_options, list_adapters
from ragged_format.cli.output import Json, Output, format_count, grid, heading
from ragged_format.cli.sources import describe, opened, placed_batches
from ragged_format.errors import ConversionError, RaggedError, Where
from ragged_format.profiles import REQUIRED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ragged_format.adapters.registry import Writer
    from ragged_format.sources import Source

__all__ = ["export"]


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
    out = Output(ctx, json=json)
    writer = _writer(system)
    chosen = chosen_options(ctx, writer.write, {"lossy": lossy}, options)
    with opened(path) as source:
        identity = describe(source)
        if identity["profile"] != writer.profile:
            raise _other_profile(system, writer, path, identity["profile"])
        with out.progress("exporting", source.num_rows) as advance:
            schema = _selected(source, path, columns)
            batches = _Counted(source, path, schema, advance)
            counts = write_whole(
                target, lambda place: dict(writer.write(iter(batches), place, **chosen))
            )
    out.text(
        heading(f"{format_count(batches.records)} records → {target}"),
        grid([(name.replace("_", " "), Text(format_count(n))) for name, n in counts.items()]),
    )
    out.result({"path": target, "to": system, "records": batches.records, "counts": counts})


def _writer(name: str) -> Writer:
    from ragged_format.adapters import registry

    try:
        return registry.choose_writer(name)
    except ConversionError as err:
        raise typer.BadParameter(
            f"{err.what}: {name!r}. Supported: {err.expected}.", param_hint="'--to'"
        ) from None


def _other_profile(system: str, writer: Writer, path: str, profile: str) -> ConversionError:
    advice = "pack the samples first: ragged pack IN OUT"
    return ConversionError(
        f"{system} is written from {writer.profile} records", where=Where(file=path),
        expected=f"profile {writer.profile!r}", got=f"profile {profile!r}",
        remedy=advice if writer.profile == "packed" else "export the samples that were packed",
    )  # fmt: skip


def _selected(source: Source, path: str, columns: str | None) -> pa.Schema:
    """Return the schema with the columns that are named, and those that all records have."""
    schema = source.ragged_schema
    if columns is None:
        return schema.to_arrow()
    named = {name for name in columns.split(",") if name}
    if unknown := sorted(named - set(schema.columns)):
        raise typer.BadParameter(
            f"{path} has no column {', '.join(unknown)}. It has: {', '.join(schema.columns)}.",
            param_hint="'--columns'",
        )
    return schema.select({*named, *REQUIRED[schema.profile]}).to_arrow()


class _Counted:
    """Batches of a source, counted as they pass."""

    def __init__(
        self, source: Source, path: str, schema: pa.Schema, advance: Callable[[int], None]
    ) -> None:
        self.records = 0
        self._source, self._path, self._schema, self._advance = source, path, schema, advance

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for _, batch in placed_batches(self._source, self._path):
            arrays = [batch.column(name) for name in self._schema.names]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
            self.records += batch.num_rows
            self._advance(batch.num_rows)


def write_whole(target: str, write: Callable[[str], dict[str, int]]) -> dict[str, int]:
    """Call `write` with a place beside `target`, and move what it made there when it is whole.

    Raises
    ------
    FileExistsError
        There is something at `target`.
    """
    if Path(target).exists():
        raise FileExistsError(errno.EEXIST, "there is something already", target)
    beside = Path(target).with_name(f".{Path(target).name}.{secrets.token_hex(4)}.tmp")
    try:
        counts = write(str(beside))
        beside.replace(target)
    except (RaggedError, OSError, KeyboardInterrupt):
        _remove(beside)
        raise
    return counts


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
