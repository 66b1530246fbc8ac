"""Conversion of other systems' data in files, in windows of bounded memory, whatever the system.

What there is to read, and how, says :mod:`ragged_format.adapters.registry`. It is imported when it
is needed, since adapters import their parser.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragged_format.canonical import require_same
from ragged_format.errors import ConversionError, RaggedError, Where
from ragged_format.parse import parse_schema
from ragged_format.profiles import sample_schema
from ragged_format.record_files import JSON_SUFFIXES, STDIN, Line, find_inputs, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from ragged_format.adapters.registry import Reader
    from ragged_format.adapters.report import ConversionReport

__all__ = [
    "Conversion",
    "WiderSchemaError",
    "detect",
    "engine_names",
    "find_files",
    "joined_schema",
    "read_payloads",
]

WINDOW_RECORDS = 256
# The parsed records of a window take several times their text.
WINDOW_BYTES = 4 << 20
# Errors that can mean that a record is of another system.
_OTHER_FORM = frozenset({"RF-A001", "RF-A002", "RF-A006", "RF-A009", "RF-A010"})


def engine_names() -> list[str]:
    """Return the names of the adapters that read something."""
    from ragged_format.adapters import registry

    return [name for name, adapter in registry.all_adapters().items() if adapter.reads is not None]


def find_files(reader: Reader, paths: Sequence[str]) -> list[str]:
    """Return what there is to read: files of the adapter's suffixes, found in directories too.

    Raises
    ------
    DatasetNotFoundError
        A path does not exist or has no such file (``RF-C008``).
    ConversionError
        A pipe, of which only JSON lines can be read.
    """
    if reader.payloads is not None and STDIN in paths:
        raise ConversionError(
            "this form cannot be read from standard input", where=Where(file=STDIN),
            expected="files", got=STDIN,
        )  # fmt: skip
    return find_inputs(paths, reader.suffixes)


def detect(paths: Sequence[str]) -> str:
    """Return the name of the adapter that recognizes the first record.

    Raises
    ------
    ConversionError
        None does, or more than one (``RF-A001``).
    """
    from ragged_format.adapters import registry

    path = paths[0]
    if path == STDIN:
        raise ConversionError(
            "the form of a pipe is not known beforehand", where=Where(file=path),
            expected=", ".join(engine_names()), got=None, remedy="name the form with --from",
        )  # fmt: skip
    found = _by_files(path)
    if found is None:
        line = next(read_lines(find_inputs([path])[:1], lambda _: None), None)
        if line is None:
            raise ConversionError(
                "the input has no records", where=Where(file=path), expected="at least one",
                got="none",
            )  # fmt: skip
        record = parse_record(line)
        found = registry.recognize(record)
        if not found:
            raise registry.unrecognized(record, line.where)
    if len(found) != 1:
        raise ConversionError(
            "the form is not certain", where=Where(file=path), expected="one form",
            got=" or ".join(found), remedy="name the form with --from",
        )  # fmt: skip
    return found[0]


def _by_files(path: str) -> list[str] | None:
    """Return the adapters that read files of these names, or ``None`` where they are JSON."""
    from ragged_format.adapters import registry

    names = [path] if Path(path).is_file() else [str(p) for p in Path(path).rglob("*")]
    if not names or any(name.removesuffix(".gz").removesuffix(".zst").endswith(JSON_SUFFIXES)
                        for name in names):  # fmt: skip
        return None
    found = {
        name: adapter.reads
        for name, adapter in registry.all_adapters().items()
        if adapter.reads is not None
        and adapter.reads.payloads is not None
        and any(file.endswith(adapter.reads.suffixes) for file in names)
    }
    if len(found) > 1:
        certain = [name for name, reader in found.items() if _is_first_of(reader, path)]
        return certain or list(found)
    return list(found) or None


def _is_first_of(reader: Reader, path: str) -> bool:
    """Return whether an adapter can read the first payload and recognizes it."""
    if reader.payloads is None or reader.recognizes is None:
        return False
    try:
        first = next(iter(reader.payloads(find_files(reader, [path])[0])), None)
    except RaggedError:
        return False
    return first is not None and reader.recognizes(first)


@dataclass
class Conversion:
    """Files of a system's payloads as batches of samples.

    Parameters
    ----------
    reader : Reader
        Of the adapter.
    files : sequence of str
        As :func:`find_files` gives them.
    options : mapping
        Arguments of the adapter's ``to_samples``.
    schema : pyarrow.Schema, optional
        Exact schema of the result. ``None``: the columns that the records have.
    name : str, optional
        Of the adapter, for errors.
    source : callable, optional
        ``source(advance)`` yields the records instead of those of `files`.

    Attributes
    ----------
    report : ConversionReport
        Counts of the windows converted so far.
    """

    reader: Reader
    files: Sequence[str]
    options: Mapping[str, Any]
    schema: pa.Schema | None = None
    name: str | None = None
    source: Callable[[Callable[[int], None]], Iterator[Line]] | None = None

    def __post_init__(self) -> None:
        from ragged_format.adapters.registry import option_names
        from ragged_format.adapters.report import ConversionReport

        self.report = ConversionReport()
        takes = option_names(self.reader.to_samples)
        self._takes_schema, self._takes_prefix = "schema" in takes, "id_prefix" in takes

    def batches(self, advance: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
        """Yield a batch for each window; all have :attr:`schema`, which the first one may set.

        Raises
        ------
        WiderSchemaError
            A window has columns that the schema, set by the first, lacks.
        ConversionError
            With the file and line of the record at fault.
        """
        is_exact = self.schema is not None
        for window in self._windows(advance):
            report = type(self.report)()
            batch = self._call(window, self.schema if is_exact else None, report)
            if self.schema is None:
                self.schema = batch.schema
            elif batch.schema != self.schema:
                if joined_schema(self.schema, batch.schema) != self.schema:
                    raise WiderSchemaError
                report = type(self.report)()
                batch = self._call(window, self.schema, report)
            self.report += report
            yield batch

    def widest(self) -> Conversion:
        """Return the same conversion with the schema of all columns that any window has.

        Converts everything once to find out.
        """
        schema = None
        for window in self._windows(lambda _: None):
            found = self._call(window, None, None).schema
            schema = found if schema is None else joined_schema(schema, found)
        return replace(self, schema=schema)

    def _windows(self, advance: Callable[[int], None]) -> Iterator[list[Line]]:
        if self.source is not None:
            lines = self.source(advance)
        elif self.reader.payloads is None:
            lines = read_lines(self.files, advance)
        else:
            lines = read_payloads(self.reader.payloads, self.files, advance)
        return _windows(lines, min(self.reader.window, WINDOW_RECORDS))

    def _call(
        self, window: list[Line], schema: pa.Schema | None, report: ConversionReport | None
    ) -> pa.RecordBatch:
        options = dict(self.options)
        if schema is not None:
            self._check_takes_schema(window)
            options["schema"] = schema
        if self._takes_prefix and "id_prefix" not in options:
            # Payloads without an identity are numbered within a call.
            first = window[0].where
            options["id_prefix"] = f"{Path(first.file or '').stem}/{first.row}"
        records = [parse_record(line) for line in window]
        try:
            return self.reader.to_samples(records, report=report, **options)
        except ConversionError as err:
            if err.where.row is None:
                raise
            line = window[err.where.row].where
            at = replace(err.where, file=line.file, row=line.row)
            if err.code in _OTHER_FORM:
                self._check_form(records[err.where.row], at, err)
            err.where = at
            raise

    def _check_form(self, record: Any, where: Where, err: ConversionError) -> None:
        """Raise if the record that caused an error is of another system."""
        from ragged_format.adapters import registry

        found = registry.recognize(record)
        if found and self.name is not None and self.name not in found:
            other = registry.unrecognized(
                record, where, expected=f"{self.name}, as all of the input"
            )
            other.remedy = f"{other.remedy} (read as {self.name}: {err.what})"
            raise other from err

    def _check_takes_schema(self, window: list[Line]) -> None:
        if not self._takes_schema:
            raise ConversionError(
                "the columns of this form cannot be chosen, and they differ", code="RF-A011",
                where=window[0].where, expected="the same columns in all payloads", got="others",
                remedy="convert payloads with the same fields together",
            )  # fmt: skip


class WiderSchemaError(Exception):
    """A window has columns that earlier ones lack; see :meth:`Conversion.widest`."""


def read_payloads(
    read: Callable[[str], Any], files: Sequence[str], advance: Callable[[int], None]
) -> Iterator[Line]:
    """Yield what an adapter reads itself in files, with its place."""
    for file in files:
        for row, payload in enumerate(read(file)):
            yield Line(Where(file=file, row=row), payload)
        if Path(file).is_file():
            advance(Path(file).stat().st_size)


def _windows(lines: Iterator[Line], limit: int) -> Iterator[list[Line]]:
    window: list[Line] = []
    size = 0
    for line in lines:
        window.append(line)
        size += len(line.record) if isinstance(line.record, bytes) else 0
        if len(window) >= limit or size >= WINDOW_BYTES:
            yield window
            window, size = [], 0
    if window:
        yield window


def parse_record(line: Line) -> Any:
    """Return the record of a line, its big lists as arrays.

    Raises
    ------
    ConversionError
        The line is not JSON.
    """
    from ragged_format.adapters import read_record

    if not isinstance(line.record, bytes):
        return line.record
    try:
        return read_record(line.record)
    except ValueError as err:
        raise ConversionError(
            "a line is not JSON", where=line.where, expected="one JSON object a line", got=err,
            remedy="a file that holds one JSON document ends in .json",
        ) from err  # fmt: skip


def joined_schema(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Return the schema with the columns of both."""
    mine, other = parse_schema(first), parse_schema(second)
    both = {**mine.columns, **other.columns}
    columns = [mine.columns.get(name, column) for name, column in both.items()]
    wanted = sample_schema(vocab_size=mine.vocab_size, columns=columns)
    # A column that both have must be declared the same in both.
    require_same(other, parse_schema(wanted).select(other.columns), Where())
    return wanted
