"""Parquet with the columns of this format: for other tools, and back from them.

Files of :func:`write` keep the Arrow schema, so that what they hold comes back as it was. Files of
other tools have no metadata of this format: their columns are taken by their standard names, and
the report says what was assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.arguments import check_choice, check_size
from ragged_format.canonical import canonical
from ragged_format.errors import ConversionError, CorruptError, Where
from ragged_format.lists import flat
from ragged_format.parse import parse_schema
from ragged_format.profiles import REQUIRED, SAMPLE_COLUMNS, sample_schema
from ragged_format.ragged import concat
from ragged_format.schema import NAMESPACE

__all__ = ["ADAPTER", "payloads", "to_samples", "write"]

Compression = Literal["zstd", "snappy", "none"]
SUFFIX = ".parquet"
# Bytes of records, uncompressed, that make a row group and a file.
GROUP_BYTES = 32 << 20
FILE_BYTES = 1 << 30
# Rows that are read at a time, fewer where they are large.
_ROWS = 1024
_VERSION = f"{NAMESPACE}version".encode()


def payloads(path: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file in batches of bounded size; an empty one if there are none.

    Raises
    ------
    CorruptError
        It is not a whole Parquet file (``RF-C001``).
    """
    try:
        with pq.ParquetFile(path) as source:
            some = False
            for number in range(source.num_row_groups):
                group = source.metadata.row_group(number)
                fit = group.num_rows * GROUP_BYTES // max(group.total_byte_size, 1)
                rows = max(1, min(_ROWS, fit))
                for batch in source.iter_batches(batch_size=rows, row_groups=[number]):
                    some = True
                    yield batch
            if not some:  # it states columns all the same
                yield pa.RecordBatch.from_pylist([], schema=source.schema_arrow)
    except (pa.ArrowException, OSError) as err:
        raise CorruptError(
            "Arrow cannot read the Parquet file", where=Where(file=path),
            expected="a whole Parquet file", got=str(err),
        ) from err  # fmt: skip


def to_samples(
    payloads: Iterable[pa.RecordBatch | pa.Table],
    vocab_size: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    schema: pa.Schema | None = None,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return tables with columns of standard names as one batch of samples.

    Parameters
    ----------
    payloads : iterable of pyarrow.RecordBatch or pyarrow.Table
        With ``sample_id``, ``input_ids`` and ``completion_mask`` at least.
    vocab_size : int, optional
        Needed where the tables do not state it, compared where they do.
    columns : sequence of str, optional
        Optional columns wanted. Default: all that are known.
    schema : pyarrow.Schema, optional
        Exact schema of the result.
    report : ConversionReport or mutable mapping, optional
        Receives the counts; ``unread`` has the columns that are not known, ``noted`` what was
        assumed of tables without metadata, ``converted`` the doubles that became the nearest
        float32.

    Raises
    ------
    ConversionError
        A required column is missing (``RF-A001``), the vocabulary is not known or another, or there
        is no payload (``RF-A011``).
    SchemaMismatchError, InvariantError
        A column does not fit its declaration.

    Examples
    --------
    >>> import pyarrow as pa
    >>> table = pa.table(
    ...     {"sample_id": ["a"], "input_ids": [[5, 6]], "completion_mask": [[0, 1]], "note": ["x"]}
    ... )
    >>> report = ConversionReport()
    >>> to_samples([table], vocab_size=10, report=report).num_columns, dict(report.unread)
    (3, {'note': 1})
    """
    counts = ConversionReport()
    parts = [
        _part(table, vocab_size, columns, schema, counts, Where(row=number))
        for number, table in enumerate(records_of(payloads))
    ]
    if not parts:
        raise ConversionError(
            "there is nothing to convert", code="RF-A011", expected="at least one table", got=0
        )
    batch = concat(parts)
    counts.responses.taken = counts.responses.stored = len(parts)
    counts.samples.taken = counts.samples.stored = batch.num_rows
    for ledger, names in (
        (counts.tokens, ("input_ids",)),
        (counts.log_probs, ("rollout_log_probs",)),
        (counts.candidates, ("candidate_ids",)),
        (counts.head_entries, ("topk_ids", "teacher_topk_ids")),
    ):
        there = [name for name in names if name in batch.schema.names]
        ledger.taken = ledger.stored = sum(len(flat(batch.column(name)).values) for name in there)
    scored = int(np.count_nonzero(flat(batch.column("completion_mask")).values))
    counts.targets.taken = counts.targets.stored = scored
    counts.add_to(report)
    return batch


def _part(
    table: pa.RecordBatch | pa.Table,
    vocab_size: int | None,
    columns: Sequence[str] | None,
    schema: pa.Schema | None,
    counts: ConversionReport,
    where: Where,
) -> pa.RecordBatch:
    if not isinstance(table, pa.RecordBatch | pa.Table):
        raise ConversionError(
            "a payload is a table of samples", code="RF-A011", where=where,
            expected="a Table or a RecordBatch", got=f"a {type(table).__name__}",
            remedy="pass a list of what parquet.payloads yields",
        )  # fmt: skip
    names = table.schema.names
    if missing := sorted(set(REQUIRED["sample"]) - set(names)):
        raise ConversionError(
            "a table of samples has the required columns", where=where,
            expected=", ".join(sorted(REQUIRED["sample"])), got=f"no {', '.join(missing)}",
            remedy="rename the columns, or convert with the adapter of the system that wrote them",
        )  # fmt: skip
    if schema is None:
        schema = _schema(table.schema, vocab_size, columns, counts, where)
    stated = parse_schema(schema).vocab_size
    if vocab_size not in (None, stated):
        raise ConversionError(
            "the data has another vocabulary", code="RF-A011", where=where, expected=vocab_size,
            got=stated,
        )  # fmt: skip
    known = [name for name in names if name in schema.names]
    for name in sorted(set(names) - set(known)):
        counts.unread[name] += table.num_rows - table.column(name).null_count
    if lacking := [name for name in schema.names if name not in names]:
        raise ConversionError(
            "a column that is wanted is missing", where=where, expected=", ".join(lacking),
            got=", ".join(names), remedy="ask for fewer columns",
        )  # fmt: skip
    return canonical(_rounded(table.select(known), schema, counts), schema)


def _rounded(
    table: pa.RecordBatch | pa.Table, schema: pa.Schema, counts: ConversionReport
) -> pa.Table:
    """Return a table with doubles as the nearest floats where those are declared; counted."""
    table = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
    for number, field in enumerate(table.schema):
        kind = field.type
        declared = schema.field(field.name).type
        if not (_is_list(kind) and _is_list(declared) and pa.types.is_float64(kind.value_type)
                and pa.types.is_float32(declared.value_type)):  # fmt: skip
            continue
        whole = table.column(number)
        column = whole.cast(pa.large_list(pa.float32()))
        before, after = pc.list_flatten(whole), pc.list_flatten(column).cast(pa.float64())
        if changed := pc.sum(pc.not_equal(before, after)).as_py():
            counts.converted[f"{field.name}_rounded"] += changed
        table = table.set_column(number, field.name, column)
    return table


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _schema(
    found: pa.Schema, vocab_size: int | None, columns: Sequence[str] | None,
    counts: ConversionReport, where: Where,
) -> pa.Schema:  # fmt: skip
    """Return the schema that a table states, or that its column names stand for."""
    wanted = found.names if columns is None else [*REQUIRED["sample"], *columns]
    if _VERSION in (found.metadata or {}):
        declared = parse_schema(found)
        return declared.select([name for name in declared.columns if name in wanted]).to_arrow()
    if vocab_size is None:
        raise ConversionError(
            "the table does not state the vocabulary", code="RF-A011", where=where,
            expected="vocab_size", got=None, remedy="give it: vocab_size=N",
        )  # fmt: skip
    optional = [c.name for c in SAMPLE_COLUMNS if c.name not in REQUIRED["sample"]]
    chosen = [name for name in optional if name in found.names and name in wanted]
    counts.noted["assumed that columns of standard names follow the specification"] += 1
    return sample_schema(vocab_size=vocab_size, columns=chosen)


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    compression: Compression = "zstd",
    file_bytes: int = FILE_BYTES,
) -> dict[str, int]:
    """Write records as Parquet: one file where `path` ends so, else a directory of files.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Of one schema.
    path : str
        File ``….parquet``, or directory of files ``part-00000.parquet``, …
    compression : {"zstd", "snappy", "none"}
    file_bytes : int
        Bytes of records, uncompressed, of one file of a directory, about.

    Returns
    -------
    dict of str to int
        ``records`` and ``files``.
    """
    check_choice("compression", compression, ("zstd", "snappy", "none"))
    check_size("file_bytes", file_bytes)
    counts = {"records": 0, "files": 0}
    one = path.endswith(SUFFIX)
    if not one:
        Path(path).mkdir()
    writer: pq.ParquetWriter | None = None
    written = 0
    try:
        for group in _groups(batches):
            if writer is None:
                name = path if one else str(Path(path) / f"part-{counts['files']:05d}{SUFFIX}")
                writer = pq.ParquetWriter(name, group.schema, compression=compression)
                counts["files"] += 1
            writer.write_table(group, row_group_size=max(group.num_rows, 1))
            counts["records"] += group.num_rows
            written += group.nbytes
            if written >= file_bytes and not one:
                writer.close()
                writer, written = None, 0
    finally:
        if writer is not None:
            writer.close()
    return counts


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield row groups of about `GROUP_BYTES`; an empty one if there are no records."""
    held: list[pa.RecordBatch] = []
    size = 0
    some = False
    for batch in chain.from_iterable(map(_pieces, batches)):
        if batch.num_rows or not some:
            held.append(batch)
            size += batch.nbytes
        if size >= GROUP_BYTES:
            yield pa.Table.from_batches(held)
            held, size, some = [], 0, True
    if held:
        yield pa.Table.from_batches(held)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in slices of about `GROUP_BYTES`: readers hold a whole row group."""
    rows = max(1, batch.num_rows * GROUP_BYTES // max(batch.nbytes, GROUP_BYTES))
    for start in range(0, max(batch.num_rows, 1), rows):
        yield batch.slice(start, rows)


def _recognizes(payload: Any) -> bool:
    return isinstance(payload, pa.RecordBatch) and set(REQUIRED["sample"]) <= set(
        payload.schema.names
    )


ADAPTER = Adapter(
    name="parquet",
    title="Parquet with the columns of this format",
    reads=Reader(
        to_samples=to_samples, payloads=payloads, suffixes=(SUFFIX,), window=1,
        needs_vocab_size=False, recognizes=_recognizes,
    ),
    writes=Writer(write=write, profile="any", makes="a directory of files, or one file .parquet"),
)  # fmt: skip
