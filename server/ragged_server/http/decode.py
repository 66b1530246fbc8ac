"""Bodies of requests as validated batches; runs in threads, within limits."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import zstandard

from ragged_format.decoding import Content
from ragged_format.errors import (
    ConversionError,
    CorruptError,
    LimitExceededError,
    RaggedError,
    TruncatedError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.streams import StreamReader
from ragged_format.validate import validate, validate_batch
from ragged_server.http.direct import Bytes
from ragged_server.http.errors import BadRequestError, TooLargeError
from ragged_server.http.limits import ContentLimits, Reservation, too_large

if TYPE_CHECKING:
    from ragged_server.settings import ServerSettings

__all__ = ["Body", "Decoded", "Together", "decode", "decode_together"]

Form: TypeAlias = Literal["arrow", "json", "ndjson"]

# Window that a zstd frame may ask for: what level 19 needs; --long frames are refused.
_MAX_WINDOW = 8 << 20
# Most memory of batches that are validated together.
_TOGETHER_BYTES = 4 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Body:
    """One body as it came, and how to read it.

    Attributes
    ----------
    data : bytes-like
    form : {"arrow", "json", "ndjson"}
    is_compressed : bool
        Whether it is zstd frames.
    source : str
        Adapter that reads it, where it is JSON.
    options : mapping
        Further arguments of the adapter.
    """

    data: Bytes
    form: Form
    is_compressed: bool = False
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a body holds.

    Attributes
    ----------
    schema : pyarrow.Schema
    batches : list of pyarrow.RecordBatch
        Validated in full; views of the body where it is not compressed.
    report : dict, optional
        What became of everything in engine JSON.
    messages : list of pyarrow.Buffer
        The message of each batch as it came; none where the body was no Arrow stream.
    contents : list of Content
        What these messages hold.
    """

    schema: pa.Schema
    batches: list[pa.RecordBatch]
    report: dict[str, Any] | None = None
    messages: list[pa.Buffer] = field(default_factory=list)
    contents: list[Content] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Together:
    """Bodies that were validated as one.

    Attributes
    ----------
    members : list of int
        Their numbers.
    found : list of Decoded
        Of each of them.
    whole : pyarrow.RecordBatch
        All their batches end to end, in this order: valid, and every sample_id is there once.
    """

    members: list[int]
    found: list[Decoded]
    whole: pa.RecordBatch


def decode(
    body: Body,
    settings: ServerSettings,
    reservation: Reservation,
    log_schema: Callable[[], pa.Schema | None],
) -> Decoded:
    """Decode and validate a body.

    Parameters
    ----------
    body : Body
    settings : ServerSettings
    reservation : Reservation
        Of the body's bytes; it grows by what decompression makes of them.
    log_schema : callable
        Returns the schema of the log, if it has one yet; JSON is converted to it.

    Raises
    ------
    RaggedError
        The body is malformed, incomplete, too large or invalid; see the status table of
        ``spec/08-http.md``.
    """
    if body.form == "arrow":
        return _arrow(body, reservation, settings)
    return _json(body, settings, reservation, log_schema())


class _Decompressed:
    """The content of zstd frames; counts it against the limit and the budget as it comes."""

    def __init__(self, data: Bytes, limit: int, name: str, reservation: Reservation) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._reader = decompressor.stream_reader(io.BytesIO(data), read_across_frames=True)
        self._limit = limit
        self._name = name
        self._reservation = reservation
        self._done = 0

    def readinto(self, out: memoryview) -> int:
        # One byte more than the limit shows that there is more, and no more is made.
        room = self._limit + 1 - self._done
        try:
            got = int(self._reader.readinto(out[:room]))
        except zstandard.ZstdError as err:
            raise CorruptError(
                "the zstd data is corrupt", expected=f"frames with windows <= {_MAX_WINDOW} bytes",
                got=str(err),
            ) from err  # fmt: skip
        if not self._done and out[:4] == _ZSTD_MAGIC:
            raise UnsupportedFeatureError(
                "the body is compressed twice", expected="zstd frames of an Arrow stream or JSON",
                got="zstd frames of zstd frames", remedy="compress it once",
            )  # fmt: skip
        self._done += got
        if self._done > self._limit:
            raise too_large("the body, decompressed,", self._name, self._limit, f"> {self._limit}")
        self._reservation.grow(got)
        return got

    def read(self, size: int) -> bytes:
        out = memoryview(bytearray(min(size, self._limit + 1)))
        return bytes(out[: self.readinto(out)])


def decode_together(
    bodies: Sequence[tuple[Body, Reservation]], settings: ServerSettings
) -> tuple[list[Decoded | BaseException], list[Together]]:
    """Decode small Arrow bodies, not compressed, and validate them as if they were one.

    Parameters
    ----------
    bodies : sequence of (Body, Reservation)
    settings : ServerSettings

    Returns
    -------
    outcomes : list of Decoded or exception
        What :func:`decode` returns or raises for each of them.
    groups : list of Together
        Those that are valid as one, by schema; others were validated by themselves.
    """
    out: list[Decoded | BaseException] = []
    by_schema: dict[int, list[int]] = {}
    for number, (body, reservation) in enumerate(bodies):
        try:
            decoded = _arrow(body, reservation, settings, validated=False)
        except BaseException:  # noqa: BLE001  validation may have found another fault before
            out.append(_alone(body, reservation, settings))
            continue
        out.append(decoded)
        by_schema.setdefault(id(decoded.schema), []).append(number)
    groups: list[Together] = []
    pending = list(by_schema.values())
    for members in pending:
        found = [one for number in members if isinstance(one := out[number], Decoded)]
        whole = _valid_whole(found, settings)
        if whole is not None:
            groups.append(Together(members, found, whole))
        elif len(members) > 1:
            # Those without fault shall not pay for the others.
            half = len(members) // 2
            pending += [members[:half], members[half:]]
        else:
            (number,) = members
            out[number] = _alone(*bodies[number], settings)
    return out, groups


def _alone(
    body: Body, reservation: Reservation, settings: ServerSettings
) -> Decoded | BaseException:
    try:
        return _arrow(body, reservation, settings)
    except BaseException as err:  # noqa: BLE001  it is raised where the request is awaited
        return err


def _valid_whole(found: Sequence[Decoded], settings: ServerSettings) -> pa.RecordBatch | None:
    """Return batches of one schema end to end, if all are valid and within the limits.

    Every rule holds for records by themselves, but that of ids: it is stricter here.
    """
    batches = [batch for one in found for batch in one.batches]
    if not batches:
        return None
    if sum(batch.get_total_buffer_size() for batch in batches) > _TOGETHER_BYTES:
        return None  # buffers were compressed: they are not copied on top
    ragged = _ragged(found[0].schema)
    try:
        whole = pa.concat_batches(batches)
        validate_batch(whole, ragged, "full", Where())
        ContentLimits(settings).check_sizes(whole, ragged)
        offsets = np.asarray(whole.column("input_ids").offsets)
        end = 0
        for one in found:
            start, end = end, end + sum(batch.num_rows for batch in one.batches)
            tokens = int(offsets[end] - offsets[start])
            if end - start > settings.max_request_records or tokens > settings.max_request_tokens:
                return None
    except (RaggedError, pa.ArrowException):
        return None
    return whole


def _arrow(
    body: Body, reservation: Reservation, settings: ServerSettings, *, validated: bool = True
) -> Decoded:
    limit = settings.max_decoded_bytes
    if body.is_compressed:
        if not body.data:
            raise TruncatedError("the body is empty", expected="zstd frames", got="no bytes")
        source: Any = _Decompressed(body.data, limit, "max_decoded_bytes", reservation)
    else:
        if body.data[:4] == _ZSTD_MAGIC:
            raise UnsupportedFeatureError(
                "the body is zstd data, and the header does not say so",
                expected="Content-Encoding: zstd", got="no Content-Encoding",
                remedy="name the coding, or send the stream as it is",
            )  # fmt: skip
        source = pa.py_buffer(body.data)
    limits = ContentLimits(settings)
    level: Literal["full", "off"] = "full" if validated else "off"
    batches: list[pa.RecordBatch] = []
    messages: list[pa.Buffer] = []
    contents: list[Content] = []
    decoded = 0
    try:
        reader = StreamReader(source, validate=level, max_message_bytes=limit)
        for batch in reader:
            # A batch costs time and memory even without records.
            if len(batches) == settings.max_request_batches:
                name, most = "max_request_batches", settings.max_request_batches
                raise too_large("the number of batches", name, most, f"> {most}")
            decoded += batch.get_total_buffer_size()
            if decoded > limit:
                raise too_large("the body, in memory,", "max_decoded_bytes", limit, decoded)
            if validated:
                limits.add(batch, reader.ragged_schema)
            batches.append(batch)
            if reader.message is not None and reader.content is not None:
                messages.append(reader.message)
                contents.append(reader.content)
    except LimitExceededError as err:
        raise TooLargeError(
            err.what, code=TooLargeError.code, where=err.where, expected=err.expected, got=err.got,
            limits={"max_decoded_bytes": limit},
            remedy="send less in one request, or raise max_decoded_bytes on the server",
        ) from err  # fmt: skip
    if decoded > reservation.size:
        reservation.grow(decoded - reservation.size)  # buffers were compressed
    return Decoded(reader.schema, batches, messages=messages, contents=contents)


def _json(
    body: Body, settings: ServerSettings, reservation: Reservation, log_schema: pa.Schema | None
) -> Decoded:
    from ragged_format.adapters.registry import choose_reader, option_names
    from ragged_format.adapters.report import ConversionReport

    limit = settings.max_json_bytes
    if body.is_compressed:
        text = b"".join(_pieces(_Decompressed(body.data, limit, "max_json_bytes", reservation)))
    else:
        text = bytes(body.data)
    if len(text) > limit:
        raise too_large("the body of JSON", "max_json_bytes", limit, len(text))
    reader = choose_reader(body.source)
    takes = option_names(reader.to_samples)
    options = dict(body.options)
    if unknown := [name for name in options if name not in takes and name != "vocab_size"]:
        raise BadRequestError(
            f"this source does not take {unknown[0]}", expected=", ".join(takes), got=unknown[0],
            remedy="leave it out",
        )  # fmt: skip
    if log_schema is not None and "schema" in takes:
        options["schema"] = log_schema
        options.pop("vocab_size", None)
    elif "vocab_size" not in options:
        if settings.vocab_size is not None:
            options["vocab_size"] = settings.vocab_size
        elif reader.needs_vocab_size:
            raise BadRequestError(
                "the log has no schema yet, and JSON does not say the size of the vocabulary",
                expected="?vocab_size=", got="none",
                remedy="name the model's vocab_size (config.json), or start the server with it",
            )  # fmt: skip
    records = list(_records(body.form, text))
    if not records:
        raise ConversionError("the body has no records", expected="at least one", got="none")
    report = ConversionReport()
    batch = reader.to_samples(records, report=report, **options)
    # An adapter keeps every invariant; whether this one did is checked like everything else.
    validate(batch)
    limits = ContentLimits(settings)
    limits.add(batch, _ragged(batch.schema))
    return Decoded(batch.schema, [batch], report.to_dict())


def _ragged(schema: pa.Schema) -> Any:
    from ragged_format.known_schemas import known_schema

    return known_schema(schema).ragged


def _pieces(source: _Decompressed) -> Iterator[bytes]:
    while piece := source.read(1 << 20):
        yield piece


def _records(form: Form, text: bytes) -> Iterator[Any]:
    """Yield the records of a document (one, or a list of them) or of lines."""
    from ragged_format.adapters import read_record

    if form == "ndjson":
        for row, line in enumerate(text.split(b"\n")):
            if line and not line.isspace():
                try:
                    yield read_record(line)
                except (ValueError, RecursionError) as err:
                    raise _not_json("a line is not JSON", Where(row=row), err) from err
        return
    try:
        value = read_record(text)
    except (ValueError, RecursionError) as err:
        raise _not_json("the body is not JSON", Where(), err) from err
    yield from value if isinstance(value, list) else [value]


def _not_json(what: str, where: Where, err: Exception) -> RaggedError:
    return BadRequestError(
        what, where=where, expected="JSON objects with request and response", got=str(err)[:200],
        remedy="send one document as application/json, one record a line as application/x-ndjson",
    )  # fmt: skip
