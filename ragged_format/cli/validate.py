"""``ragged validate``: whether data is whole and keeps every invariant."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ragged_format.cli.output import Json, Output, format_count, grid
from ragged_format.cli.sources import describe, opened, placed_batches
from ragged_format.cli.totals import Totals
from ragged_format.codes import CODES
from ragged_format.dataset import Dataset
from ragged_format.shard_file import ShardFile
from ragged_format.unique_ids import SAMPLE_ID, SeenIds, source_ids
from ragged_format.validate import validate_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragged_format.sources import Source

__all__ = ["validate", "validate_source"]


def validate(
    ctx: typer.Context,
    path: Annotated[
        str, typer.Argument(help="Dataset, file or stream; - reads a stream from standard input.")
    ],
    json: Json = False,
) -> None:
    """Read everything, compare digests, check every invariant.

    Exit code 0 says that the data is complete, unchanged since it was written, and valid; 1 that it
    is not, with the code of the broken rule and its first place.
    """
    out = Output(ctx, json=json)
    started = time.perf_counter()
    with opened(path) as source:
        with out.progress("validating", source.num_rows) as advance:
            totals = validate_source(source, path, advance)
        identity = describe(source)
    seconds = time.perf_counter() - started
    elements = {axis: format_count(n) for axis, n in totals.elements.items()}
    checked = f"{elements['record']} records, {elements['token']} tokens, "
    checked += f"{elements['target']} targets" + _more(elements)
    against = (
        "digests, trailer, manifest, " if identity["kind"] == "dataset" else "digests, trailer, "
    )
    against += f"{sum(code.error == 'InvariantError' for code in CODES.values())} rules"
    out.text(
        Text.assemble(("valid", "bold green"), f": {path}"),
        grid(
            [
                ("data", "{kind}, profile {profile}, format {format_version}".format(**identity)),
                ("vocabulary", format_count(identity["vocab_size"])),
                ("checked", checked),
                ("against", against),
                ("took", f"{seconds:.2f} s"),
            ]
        ),
    )
    out.result({"path": path, **identity, **totals.to_json(), "seconds": round(seconds, 6)})


def validate_source(source: Source, path: str, advance: Callable[[int], None]) -> Totals:
    """Verify and fully validate every batch of a source, and the uniqueness of sample ids.

    Ids are compared over all batches when all of them are found valid; memory is bounded.

    Raises
    ------
    RaggedError
        With the place of the first fault.
    """
    schema = source.ragged_schema
    totals = Totals(schema)
    ids = _ids_of(source, path) if SAMPLE_ID in schema else None
    for where, batch in placed_batches(source, path):
        validate_batch(batch, schema, "full", where)
        if ids is not None:
            ids.add(batch.column(SAMPLE_ID), where)
        totals.add(batch)
        advance(batch.num_rows)
    if ids is not None:
        ids.require_unique()
    return totals


def _ids_of(source: Source, path: str) -> SeenIds:
    """Return what compares the ids of a source, read again from it where that is possible."""
    if isinstance(source, Dataset | ShardFile):
        return SeenIds(lambda: source_ids(source, name=path))
    return SeenIds()


def _more(elements: dict[str, str]) -> str:
    rest = {axis: n for axis, n in elements.items() if axis not in ("record", "token", "target")}
    return "".join(f", {n} on {axis}" for axis, n in rest.items())
