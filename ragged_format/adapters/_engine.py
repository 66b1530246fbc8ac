"""Records of any engine as one batch: text parsed in windows, answers read, errors by policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._assemble import assemble
from ragged_format.adapters._json import read_many
from ragged_format.adapters._stream import is_stream
from ragged_format.adapters._values import malformed
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._choice import Choice
    from ragged_format.adapters._columns import Options

__all__ = ["Answer", "GroupId", "convert"]

# JSON texts that are parsed together.
_WINDOW_BYTES = 1 << 20
_WINDOW_RECORDS = 1024
_TEXT = object()
# A record with one of these fields is a response without its request.
_BARE = frozenset({"choices", "meta_info"})

GroupId = str | Callable[[Mapping[str, Any]], str | None]
"""Key of the record that holds the group, or a function of the record."""


@dataclass(slots=True)
class Answer:
    """One record and its response.

    Attributes
    ----------
    record : mapping
        With ``request`` and values of the user.
    response : object
        A parsed response, or the bytes of an event stream.
    where : Where
        Of the record.
    unread : Counter
        Counts fields that have no place in samples.
    left_out : ConversionReport, optional
        Other counts of the reader, of which most records have none; see :attr:`counts`.
    """

    record: Mapping[str, Any]
    response: Any
    where: Where
    unread: Counter[str] = field(default_factory=Counter)
    left_out: ConversionReport | None = None

    @property
    def counts(self) -> ConversionReport:
        """Counts of what the reader leaves out, which hold only if the record converts."""
        if self.left_out is None:
            self.left_out = ConversionReport()
        return self.left_out

    def group_of(self, group_id: GroupId | None) -> Callable[[Mapping[str, Any]], Any] | None:
        """Return the function that gives the group of a record; ``None``: none was asked for."""
        if group_id is None:
            return (lambda record: record["group_id"]) if "group_id" in self.record else None
        return group_id if callable(group_id) else (lambda record: record.get(group_id))


def convert(
    records: Iterable[Any],
    read: Callable[[Answer], list[Choice]],
    options: Options,
    report: ConversionReport | MutableMapping[str, Any] | None,
) -> pa.RecordBatch:
    """Return the choices of all records as one batch; adds to `report` when all is done.

    Parameters
    ----------
    records : iterable of mappings
    read : callable
        Returns the choices of an answer.
    options : Options
        With what to do where an answer cannot be read.
    report : ConversionReport or mutable mapping, optional
    """
    counts = ConversionReport()
    choices: list[Choice] = []
    for number, (record, response) in enumerate(_with_responses(records)):
        counts.responses.taken += 1
        try:
            answer = _answer(record, response, number, options)
            found = read(answer)
            if not found:
                malformed("a response has choices", answer.where, "at least one choice", "none")
        except ConversionError as err:
            if options.on_error == "raise":
                raise
            counts.responses.drop(err.code)
            continue
        counts.responses.stored += 1
        counts.unread.update(answer.unread)
        if answer.left_out is not None:
            counts += answer.left_out
        choices += found
    batch = assemble(choices, options, counts)
    counts.add_to(report)
    return batch


def _answer(record: Any, response: Any, number: int, options: Options) -> Answer:
    if not isinstance(record, Mapping):
        malformed("a record is a mapping", Where(row=number), "request and response", record)
    name = record.get("source", record.get("name"))
    where = Where(file=name if isinstance(name, str) else None, row=number)
    mode = record.get("logprobs_mode")
    if mode is not None and mode not in (options.mode.mode, f"{options.mode.mode}_logprobs"):
        raise ConversionError(
            "a record is of another log-prob mode than the call", code="RF-A007", where=where,
            expected=options.mode.mode, got=mode,
            remedy="convert records of one mode per call, and pass their logprobs_mode",
        )  # fmt: skip
    if isinstance(response, ValueError):
        malformed("a response is JSON", where, "JSON, or an event stream", str(response))
    return Answer({} if record is response else record, response, where)


def _with_responses(records: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each record with its response: JSON text parsed, a stream as bytes, or a ValueError."""
    window: list[tuple[Any, Any]] = []
    texts: list[bytes] = []
    size = 0
    for record in records_of(records):
        response, is_text = _response(record)
        window.append((record, _TEXT if is_text else response))
        if is_text:
            texts.append(response)
            size += len(response)
        if size >= _WINDOW_BYTES or len(window) >= _WINDOW_RECORDS:
            yield from _parsed(window, texts)
            window, texts, size = [], [], 0
    yield from _parsed(window, texts)


def _parsed(window: list[tuple[Any, Any]], texts: list[bytes]) -> Iterator[tuple[Any, Any]]:
    values = iter(read_many(texts))
    for record, response in window:
        yield record, next(values) if response is _TEXT else response


def _response(record: Any) -> tuple[Any, bool]:
    """Return the response, text as bytes, and whether it is JSON text."""
    if not isinstance(record, Mapping):
        return None, False
    if not {"response", "response_text"} & record.keys() and _BARE & record.keys():
        return record, False
    response = record.get("response", record.get("response_text"))
    if isinstance(response, str):
        response = response.encode(errors="surrogatepass")
    if not isinstance(response, bytes | bytearray | memoryview):
        return response, False
    text = bytes(response)
    return text, not is_stream(text)
