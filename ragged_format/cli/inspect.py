"""``ragged inspect``: what the data is; values are shown, not checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ragged_format.cli.histogram import histogram_table
from ragged_format.cli.output import Json, Output, format_bytes, format_count, grid, heading
from ragged_format.cli.records import column_json, record_table, schema_table
from ragged_format.cli.sources import describe, opened
from ragged_format.cli.totals import Totals
from ragged_format.dataset import Dataset
from ragged_format.errors import LimitExceededError, Where
from ragged_format.schema import RaggedSchema
from ragged_format.validate import validate_batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from ragged_format.sources import Source

__all__ = ["inspect"]

_IDS = ("sample_id", "member_sample_id")
_SHARDS = 10
# Characters of a job's options; --json has all.
_LINEAGE = 300


def inspect(
    ctx: typer.Context,
    path: Annotated[
        str, typer.Argument(help="Dataset, file or stream; - reads a stream from standard input.")
    ],
    head: Annotated[
        int, typer.Option("--head", metavar="N", min=0, help="Show the first N records.")
    ] = 0,
    record: Annotated[
        str | None,
        typer.Option(
            "--record",
            metavar="ID|INDEX",
            help="Show the record with this sample_id (of a packed row: of a member), or index.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show columns on their axes, identity, shards, sizes, and how candidate sets are distributed.

    Values are not checked; `ragged validate` does that.
    """  # fmt: skip
    out = Output(ctx, json=json)
    with opened(path) as source:
        schema = source.ragged_schema
        totals, search = Totals(schema), _Search(schema, head, record)
        columns = None if search.is_wanted else totals.columns
        with out.progress("reading", source.num_rows) as advance:
            for batch in source.batches(columns=columns):
                totals.add(batch)
                search.look_at(batch)
                advance(batch.num_rows)
        search.end(path)
        _print(out, path, source, totals, search)
        out.result(
            {
                "path": path,
                **describe(source),
                "required_features": list(schema.required_features),
                "metadata": schema.metadata,
                "dataset": _dataset_json(source),
                **totals.to_json(),
                "axes": [
                    {"name": a.name, "parent": a.parent, "counts": a.counts, "mask": a.mask}
                    for a in schema.axes.values()
                ],
                "columns": [column_json(column) for column in schema],
                "counts": {axis: counts.to_json() for axis, counts in totals.counts.items()},
                "shown": [{"index": index, **rows.to_pylist()[0]} for index, rows in search.found],
            }
        )


def _dataset_json(source: Source) -> dict[str, Any] | None:
    if not isinstance(source, Dataset):
        return None
    return {
        "generation": source.generation,
        "fingerprint": source.fingerprint,
        "lineage": source.lineage,
        "bytes": sum(shard.bytes for shard in source.shards),
        "shards": [shard.to_json() for shard in source.shards],
    }


def _lineage(lineage: Mapping[str, Any]) -> list[str]:
    """Return a line for each job that made a dataset, and for everything else in its lineage."""
    out = []
    for key, value in lineage.items():
        jobs = value if key == "jobs" and isinstance(value, list) else []
        if not jobs or not all(isinstance(job, dict) and "job" in job for job in jobs):
            out.append(f"{key} = {value}")
            continue
        for job in jobs:
            given = [f"{name} {text}" for name, text in _options(job.get("options"))]
            text = ", ".join([str(job["job"]), *given])
            out.append(text if len(text) <= _LINEAGE else text[:_LINEAGE] + "…")
    return out


def _options(options: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of a job that have a value, those of its adapter too."""
    for name, value in options.items() if isinstance(options, dict) else ():
        if isinstance(value, dict):
            yield from _options(value)
        elif value is not None:
            yield name, value


def _print(out: Output, path: str, source: Source, totals: Totals, search: _Search) -> None:
    schema = source.ragged_schema
    rows = [
        ("data", "{kind}, profile {profile}, format {format_version}".format(**describe(source))),
        ("vocabulary", format_count(schema.vocab_size)),
    ]
    rows += [("metadata", f"{key} = {value}") for key, value in schema.metadata.items()]
    if isinstance(source, Dataset):
        size = sum(shard.bytes for shard in source.shards)
        shards = f"{len(source.shards)} shard{'s' * (len(source.shards) != 1)}"
        rows += [
            ("size", f"{format_bytes(size)} in {shards}, generation {source.generation}"),
            ("fingerprint", source.fingerprint),
        ]
        rows += [("lineage", text) for text in _lineage(source.lineage)]
        rows += [
            ("shard", f"{s.name}  {format_count(s.rows)} records  {format_bytes(s.bytes)}")
            for s in source.shards[:_SHARDS]
        ]
        if len(source.shards) > _SHARDS:
            rows.append(("", f"… {len(source.shards) - _SHARDS} more; --json lists all"))
    out.text(heading(path), grid([(label, Text(value)) for label, value in rows]))
    out.text("", schema_table(schema, totals.elements))
    for axis, counts in totals.counts.items():
        if not counts.elements:
            continue
        owner = schema.axes[axis].parent
        out.text("", heading(f"{axis} elements per {owner}"), Text("  " + counts.sentence()))
        if axis == "candidate":
            out.text(histogram_table(counts, zero="0 (full)"))
    for index, batch in search.found:
        out.text("", heading(f"record {index}"), record_table(schema, batch))


@dataclass
class _Search:
    """The records to show: the first ones, and one that is named."""

    schema: RaggedSchema
    head: int
    record: str | None
    found: list[tuple[int, pa.RecordBatch]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen = 0
        self._by_index: tuple[int, pa.RecordBatch] | None = None
        self._by_id: tuple[int, pa.RecordBatch] | None = None
        self._ids = next((name for name in _IDS if name in self.schema), None)
        text = self.record or ""
        self._index = int(text) if text.isascii() and text.isdigit() else None

    @property
    def is_wanted(self) -> bool:
        """Whether whole records are needed."""
        return self.head > 0 or self.record is not None

    def look_at(self, batch: pa.RecordBatch) -> None:
        """Take the records wanted out of the next batch."""
        start, self._seen = self._seen, self._seen + batch.num_rows
        for row in range(min(self.head - start, batch.num_rows)):
            self.found.append(self._take(batch, row, start))
        if self.record is None or self._by_id is not None:
            return
        if self._index is not None and start <= self._index < self._seen:
            self._by_index = self._take(batch, self._index - start, start)
        if self._ids is not None:
            ids = batch.column(self._ids).to_pylist()
            for row, value in enumerate(ids):
                if value == self.record or (isinstance(value, list) and self.record in value):
                    self._by_id = self._take(batch, row, start)
                    break

    def _take(self, batch: pa.RecordBatch, row: int, start: int) -> tuple[int, pa.RecordBatch]:
        one = batch.slice(row, 1)
        # Broken lists would crash whoever shows them.
        validate_batch(one, self.schema, "structural", Where())
        return start + row, one

    def end(self, path: str) -> None:
        """Add the named record; an id comes before an index of the same digits.

        Raises
        ------
        LimitExceededError
            There is no such record (``RF-L002``).
        """
        named = self._by_id or self._by_index
        if self.record is not None and named is None:
            raise LimitExceededError(
                "there is no such record", code="RF-L002", where=Where(file=path),
                expected=f"a {self._ids or 'record'} of the data, or 0 <= index < {self._seen}",
                got=self.record,
            )  # fmt: skip
        if named is not None and named[0] >= self.head:
            self.found.append(named)
