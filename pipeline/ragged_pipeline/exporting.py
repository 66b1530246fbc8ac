"""Export: records of this format in the form that another system reads, streamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ragged_format.arguments import check_callable, names_of
from ragged_format.canonical import require_same
from ragged_format.dataset import Dataset
from ragged_format.errors import (
    ConversionError,
    DatasetExistsError,
    JobError,
    RaggedError,
    SchemaMismatchError,
    Where,
)
from ragged_format.local_files import local_path, path_text, usable_place
from ragged_format.profiles import REQUIRED
from ragged_format.sources import open_source
from ragged_format.storage import is_remote
from ragged_pipeline.progress import Meter, Report
from ragged_pipeline.runner import Result, places_of

if TYPE_CHECKING:
    from ragged_format.adapters.registry import Writer
    from ragged_format.schema import RaggedSchema
    from ragged_format.sources import Source

__all__ = ["export", "to_hf", "write_whole"]


def export(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    to: str,
    columns: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Report | None = None,
) -> Result:
    """Write records in the form that another system reads, with bounded memory.

    Guarantees: `out` appears whole, when all of the input is written, or not at all.

    Parameters
    ----------
    inputs : path or URL, or a sequence of them
        Datasets, files or streams (``"-"``: standard input), one after the other.
    out : path
        File or directory to make; there must be nothing.
    to : str
        Name of an adapter that writes: "parquet", "hf", "trl", …
    columns : sequence of str, optional
        Optional columns to export. Default: all.
    options : mapping, optional
        Further arguments of the adapter's ``write``.
    progress : callable, optional
        Receives a :class:`ragged_pipeline.progress.Progress` every now and then.

    Returns
    -------
    Result
        ``figures`` are the counts of the adapter; ``shards`` and ``bytes`` those of the files made.

    Raises
    ------
    ConversionError
        No adapter writes this form, it is written from records of the other profile, or it cannot
        hold the data (``RF-A001``).
    SchemaMismatchError
        A column is not there (``RF-S003``), or the inputs differ (``RF-S010``).
    DatasetExistsError
        There is something at `out` (``RF-C009``).

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import pyarrow.parquet as pq
    >>> import ragged_format as rf
    >>> from ragged_format.testing import rollouts
    >>> samples = rollouts(np.random.default_rng(0), num_samples=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = rf.write_file(f"{folder}/in.arrow", samples).rows
    ...     done = export(f"{folder}/in.arrow", f"{folder}/out.parquet", to="parquet")
    ...     table = pq.read_table(f"{folder}/out.parquet")
    >>> done.rows, done.figures, rf.canonical(table).equals(samples)
    (8, {'files': 1, 'records': 8}, True)
    """
    from ragged_format.adapters.registry import adapter_arguments, choose_writer

    writer = choose_writer(to)
    chosen = adapter_arguments(writer.write, options)
    if columns is not None:
        columns = names_of("columns", columns)
    if progress is not None:
        check_callable("progress", progress)
    records = _Records(places_of(inputs), writer, to, columns, progress)
    target = path_text(out)
    with _placed(target) as place:
        counts = write_whole(place, lambda path: dict(writer.write(iter(records), path, **chosen)))
        made = [path.stat().st_size for path in _files(Path(place)) if path.is_file()]
    return Result(
        job="export", path=target, plan="", rows_in=records.rows, rows=records.rows,
        shards=len(made), bytes=sum(made), figures=dict(sorted(counts.items())),
    )  # fmt: skip


def to_hf(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    **options: Any,
) -> Result:
    """Write a directory that Hugging Face's ``datasets.load_from_disk`` opens.

    The library itself is not needed. Parameters as for :func:`export`.
    """
    return export(inputs, out, to="hf", **options)


class _Records:
    """Batches of all inputs, checked, with the columns that are wanted, and counted."""

    def __init__(
        self, places: list[str], writer: Writer, to: str, columns: Sequence[str] | None,
        progress: Report | None,
    ) -> None:  # fmt: skip
        if not places:
            raise JobError(
                "an export reads at least one input", expected="a dataset", got="none",
                remedy="name the datasets or files",
            )  # fmt: skip
        self.rows = 0
        self._places, self._writer, self._to = places, writer, to
        self._columns, self._progress = columns, progress
        # Wrong input is refused before anything is written; a stream is opened once.
        self._opened = [open_source(place) for place in places]
        first = self._opened[0].ragged_schema if places else None
        for place, source in zip(places, self._opened, strict=True):
            self._check(source.ragged_schema, place)
            if first is not None:
                require_same(first, source.ragged_schema, Where(file=place))

    def _check(self, schema: RaggedSchema, place: str) -> None:
        profile = self._writer.profile
        if profile not in ("any", schema.profile):
            advice = "pack the samples first: ragged pack IN OUT"
            raise ConversionError(
                f"{self._to} is written from {profile} records", where=Where(file=place),
                expected=f"profile {profile!r}", got=f"profile {schema.profile!r}",
                remedy=advice if profile == "packed" else "export the samples that were packed",
            )  # fmt: skip
        if unknown := sorted(set(self._columns or ()) - set(schema.columns)):
            raise SchemaMismatchError(
                "there is no such column", code="RF-S003", where=Where(file=place),
                expected=", ".join(schema.columns), got=", ".join(unknown),
                remedy="name columns of the input",
            )  # fmt: skip

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        meter = Meter(sum(map(_size, self._opened)), self._progress)
        meter.stage("write", 1, 1)
        schema = self._schema()
        for source in self._opened:
            resource: Any = source
            with closing(resource) if hasattr(source, "close") else nullcontext():
                some = False
                for batch in _verified(source):
                    some = True
                    yield _under(batch, schema)
                    self.rows += batch.num_rows
                    meter.advance(batch.nbytes)
                if not some and source is self._opened[0] and len(self._opened) == 1:
                    yield pa.RecordBatch.from_pylist([], schema=schema)
        meter.end()

    def _schema(self) -> pa.Schema:
        known = self._opened[0].ragged_schema
        if self._columns is None:
            return known.to_arrow()
        return known.select({*self._columns, *REQUIRED[known.profile]}).to_arrow()


def _under(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([batch.column(n) for n in schema.names], schema=schema)


def _verified(source: Source) -> Iterator[pa.RecordBatch]:
    return source.batches(verify=True) if isinstance(source, Dataset) else source.batches()


def _size(source: Source) -> int:
    if isinstance(source, Dataset):
        return sum(shard.bytes for shard in source.shards)
    path = getattr(source, "path", None)
    return Path(path).stat().st_size if path is not None and Path(path).is_file() else 0


@contextmanager
def _placed(target: str) -> Iterator[str]:
    """Yield where to write on this machine for what shall be at a path or URL."""
    if not is_remote(target):
        yield str(local_path(target))
        return
    from ragged_pipeline.stores.file_output import file_output

    with file_output(target) as path:
        yield str(path)


def _files(path: Path) -> Iterator[Path]:
    yield from path.rglob("*") if path.is_dir() else [path]


def write_whole(target: str, write: Callable[[str], dict[str, int]]) -> dict[str, int]:
    """Call `write` with a place beside `target`, and move what it made there when it is whole.

    Raises
    ------
    DatasetExistsError
        There is something at `target` (``RF-C009``).
    DatasetNotFoundError, StorageError
        Nothing can be made there, see :func:`ragged_format.local_files.usable_place`.
    """
    path = Path(target)
    if target == "-":
        raise DatasetExistsError(
            "an export is written to files, and - stands for standard output",
            where=Where(file=target), expected="a path or URL", got="'-'",
            remedy="name a place; one called so is ./-",
        )  # fmt: skip
    if path.exists():
        raise DatasetExistsError(
            "there is something at the place of the export", where=Where(file=target),
            expected="nothing", got="a directory" if path.is_dir() else "a file",
            remedy="choose another path, or remove it first",
        )  # fmt: skip
    beside = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp{path.suffix}")
    try:
        with usable_place(path):
            counts = write(str(beside))
            beside.replace(target)
    except BaseException as err:
        _remove(beside)
        # Arrow does not say which file it could not write.
        if isinstance(err, OSError) and err.filename is None and not isinstance(err, RaggedError):
            err.filename = target
        raise
    return counts


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
