"""Conversion of engine output in files, in windows of bounded memory, whatever the engine.

An engine is a module of :mod:`ragged_format.adapters` with a function ``to_samples``, which takes
records whose ``response`` is a mapping or JSON text.
"""

from __future__ import annotations

import json
import pkgutil
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ragged_format import adapters
from ragged_format.adapters.report import ConversionReport
from ragged_format.canonical import require_same
from ragged_format.cli.inputs import Line, read_lines
from ragged_format.errors import ConversionError, Where
from ragged_format.parse import parse_schema
from ragged_format.profiles import sample_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

__all__ = ["Conversion", "WiderSchemaError", "engine_names", "load_engine"]

WINDOW_RECORDS = 256
WINDOW_BYTES = 32 << 20


def engine_names() -> list[str]:
    """Return the engines whose responses can be converted."""
    names = [m.name for m in pkgutil.iter_modules(adapters.__path__) if m.name[0] != "_"]
    return [name for name in names if load_engine(name) is not None]


def load_engine(name: str) -> Callable[..., pa.RecordBatch] | None:
    """Return ``to_samples`` of an engine, or ``None`` if there is no such engine."""
    path = f"{adapters.__name__}.{name}"
    if not name.isidentifier() or name.startswith("_") or find_spec(path) is None:
        return None
    found = getattr(import_module(path), "to_samples", None)
    return found if callable(found) else None


@dataclass
class Conversion:
    """Files of an engine's responses as batches of samples.

    Parameters
    ----------
    to_samples : callable
        Of the engine's adapter.
    files : sequence of str
        Paths of JSON or JSON lines, or ``-``.
    options : mapping
        Arguments of `to_samples`, ``vocab_size`` among them.
    schema : pyarrow.Schema, optional
        Exact schema of the result. ``None``: the columns that the records have.

    Attributes
    ----------
    report : ConversionReport
        Counts of the windows converted so far.
    """

    to_samples: Callable[..., pa.RecordBatch]
    files: Sequence[str]
    options: Mapping[str, Any]
    schema: pa.Schema | None = None

    def __post_init__(self) -> None:
        self.report = ConversionReport()

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
        for window in _windows(read_lines(self.files, advance)):
            report = ConversionReport()
            batch = self._call(window, self.schema if is_exact else None, report)
            if self.schema is None:
                self.schema = batch.schema
            elif batch.schema != self.schema:
                if _joined(self.schema, batch.schema) != self.schema:
                    raise WiderSchemaError
                report = ConversionReport()
                batch = self._call(window, self.schema, report)
            self.report += report
            yield batch

    def widest(self) -> Conversion:
        """Return the same conversion with the schema of all columns that any window has.

        Converts everything once to find out.
        """
        schema = None
        for window in _windows(read_lines(self.files, lambda _: None)):
            found = self._call(window, None, None).schema
            schema = found if schema is None else _joined(schema, found)
        return replace(self, schema=schema)

    def _call(
        self, window: list[Line], schema: pa.Schema | None, report: ConversionReport | None
    ) -> pa.RecordBatch:
        options = dict(self.options) if schema is None else {**self.options, "schema": schema}
        records = [parse_record(line) for line in window]
        try:
            return self.to_samples(records, report=report, **options)
        except ConversionError as err:
            if err.where.row is not None:
                line = window[err.where.row].where
                err.where = replace(err.where, file=line.file, row=line.row)
            raise


class WiderSchemaError(Exception):
    """A window has columns that earlier ones lack; see :meth:`Conversion.widest`."""


def _windows(lines: Iterator[Line]) -> Iterator[list[Line]]:
    window: list[Line] = []
    size = 0
    for line in lines:
        window.append(line)
        size += len(line.record) if isinstance(line.record, bytes) else 0
        if len(window) >= WINDOW_RECORDS or size >= WINDOW_BYTES:
            yield window
            window, size = [], 0
    if window:
        yield window


def parse_record(line: Line) -> Any:
    """Return the record of a line; where simdjson is installed, its response as JSON text.

    Adapters read that text faster than the objects that ``json`` would make of it.

    Raises
    ------
    ConversionError
        The line is not JSON.
    """
    if not isinstance(line.record, bytes):
        return line.record
    if (simdjson := _simdjson()) is not None:
        with suppress(ValueError, RuntimeError):  # what it refuses, json judges
            document = simdjson.Parser().parse(line.record)
            if isinstance(document, simdjson.Object):
                return {key: _plain(key, document[key]) for key in document}
    try:
        return json.loads(line.record)
    except ValueError as err:
        raise ConversionError(
            "a line is not JSON", where=line.where, expected="one JSON object a line", got=err,
            remedy="a file that holds one JSON document ends in .json",
        ) from err  # fmt: skip


def _plain(key: str, value: Any) -> Any:
    if hasattr(value, "as_dict"):
        return value.mini if key == "response" else value.as_dict()
    return value.as_list() if hasattr(value, "as_list") else value


@cache
def _simdjson() -> Any:
    try:
        return import_module("simdjson")
    except ImportError:
        return None


def _joined(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Return the schema with the columns of both."""
    mine, other = parse_schema(first), parse_schema(second)
    both = {**mine.columns, **other.columns}
    columns = [mine.columns.get(name, column) for name, column in both.items()]
    wanted = sample_schema(vocab_size=mine.vocab_size, columns=columns)
    # A column that both have must be declared the same in both.
    require_same(other, parse_schema(wanted).select(other.columns), Where())
    return wanted
