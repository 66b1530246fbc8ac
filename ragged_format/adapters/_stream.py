"""Event streams of vLLM: deltas of each choice put together into one response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters._json import read_json
from ragged_format.adapters._values import (
    Entries,
    LogProbs,
    Place,
    Rows,
    as_ids,
    as_log_probs,
    as_rows,
    malformed,
)
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = ["is_stream", "join_masks", "read_events", "read_stream", "truncated"]

_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
_DONE = b"[DONE]"


def is_stream(text: bytes) -> bool:
    """Return whether `text` is an event stream and not JSON."""
    return text.lstrip(b"\xef\xbb\xbf\r\n \t").startswith(_FIELDS)


def read_stream(text: bytes, where: Where) -> dict[str, Any]:
    """Return the response that the events of a stream add up to.

    Deltas are put together per choice; choices may interleave. An event with an error is the
    response.

    Raises
    ------
    ConversionError
        The stream has no ``[DONE]``, goes on after it, or a choice never finished (``RF-A008``);
        an event is malformed (``RF-A002``); events are of different requests (``RF-A006``).
    """
    return _merge(read_events(text, where), where)


def read_events(text: bytes, where: Where) -> list[Any]:
    """Return the value of every event of a stream; only of the last where that is an error.

    Raises
    ------
    ConversionError
        The stream has no ``[DONE]`` or goes on after it (``RF-A008``), or an event is not JSON
        (``RF-A002``).
    """
    events = _events(text)
    if not events or events[-1] != _DONE:
        # An error ends a stream too, and says more.
        if events and (error := _error(events[-1])) is not None:
            return [error]
        raise truncated(
            where, "an event 'data: [DONE]' at the end", _tail(events[-1] if events else text)
        )
    if _DONE in events[:-1]:
        raise truncated(where, "nothing after 'data: [DONE]'", "another event")
    try:
        # One document, so that the lists of all events are read together.
        chunks = read_json(b"[" + b",".join(events[:-1]) + b"]")
    except ValueError as err:
        malformed("an event is JSON", where, "JSON", str(err))
    if len(chunks) != len(events) - 1:
        malformed("an event is one JSON object", where, len(events) - 1, len(chunks))
    return list(chunks)


def truncated(where: Where, expected: str, got: str) -> ConversionError:
    """Return the error for an event stream that is not complete."""
    return ConversionError(
        "the event stream is not complete", code="RF-A008", where=where, expected=expected,
        got=got, remedy="the connection was cut: request the rollout again",
    )  # fmt: skip


def _tail(text: bytes) -> str:
    return "… " + text[-80:].decode(errors="replace")


def _events(text: bytes) -> list[bytes]:
    """Return the data of each event: lines of one event joined, comments and names left out."""
    text = text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events: list[bytes] = []
    data: list[bytes] = []
    for line in text.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            events.append(b"\n".join(data))
            data = []
    # A last event without its empty line was cut, except that nothing can follow [DONE].
    if data == [_DONE]:
        events.append(_DONE)
    return events


def _error(event: bytes) -> dict[str, Any] | None:
    try:
        value = read_json(event)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "error" in value else None


def _merge(chunks: Sequence[Any], where: Where) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    deltas: dict[Any, list[Mapping[str, Any]]] = {}
    for chunk in chunks:
        if not isinstance(chunk, Mapping):
            malformed("an event is a JSON object", where, "an object", chunk)
        if "error" in chunk:
            return dict(chunk)
        for key, value in chunk.items():
            if key == "choices":
                continue
            if key == "request_id" and merged.get(key, value) != value:
                raise ConversionError(
                    "events of one stream are of one request", code="RF-A006", where=where,
                    expected=merged[key], got=value,
                )  # fmt: skip
            if value is not None:
                merged[key] = value
        choices = chunk.get("choices") or ()
        for delta in choices:
            if not isinstance(delta, Mapping) or not isinstance(delta.get("index"), int):
                malformed("a delta has the index of its choice", where, "an index", delta)
            deltas.setdefault(delta["index"], []).append(delta)
    if not deltas:
        raise truncated(where, "events with choices", "none")
    merged["choices"] = [_choice(index, parts, where) for index, parts in sorted(deltas.items())]
    return merged


def _choice(index: int, deltas: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for delta in deltas:
        out.update((key, value) for key, value in delta.items() if value is not None)
        for key in delta:
            out.setdefault(key, None)
    if any("message" in delta or "delta" in delta for delta in deltas):
        return out  # a chat stream, which the reader of the response refuses
    if out.get("finish_reason") is None:
        raise truncated(where, f"a finish_reason of choice {index}", "none")
    texts = [delta["text"] for delta in deltas if isinstance(delta.get("text"), str)]
    if texts:
        out["text"] = "".join(texts)
    tokens = [as_ids(d.get("token_ids"), partial(_at, where, index, "token_ids")) for d in deltas]
    out["token_ids"] = np.concatenate(tokens)
    if out.get("sampling_mask") is not None:
        out["sampling_mask"] = join_masks(
            deltas, tokens, partial(_at, where, index, "sampling_mask")
        )
    if out.get("logprobs") is not None:
        out["logprobs"] = {
            "content": _log_probs(deltas, tokens, partial(_at, where, index, "logprobs"))
        }
    return out


def _at(where: Where, index: int, field: str, position: int | None = None) -> Where:
    column = f"choices[{index}].{field}"
    return Where(where.file, row=where.row, column=column, position=position)


def join_masks(deltas: Sequence[Mapping[str, Any]], tokens: Sequence[Int64], place: Place) -> Rows:
    """Return the sets of all deltas; null for the tokens of a delta that has none."""
    parts = []
    for delta, ids in zip(deltas, tokens, strict=True):
        mask = delta.get("sampling_mask")
        if mask is None:
            none = np.zeros(len(ids), np.int64)
            parts.append(Rows(none[:0], none, np.ones(len(ids), bool)))
        else:
            parts.append(as_rows(mask, place))
            _check_delta(len(parts[-1].counts), ids, "sampling_mask", place)
    null = np.concatenate(
        [np.zeros(len(p.counts), bool) if p.null is None else p.null for p in parts]
    )
    values = np.concatenate([part.values for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    return Rows(values, counts, null if null.any() else None)


def _log_probs(
    deltas: Sequence[Mapping[str, Any]], tokens: Sequence[Int64], place: Place
) -> LogProbs:
    parts = []
    for delta, ids in zip(deltas, tokens, strict=True):
        given = delta.get("logprobs")
        content = given.get("content") if isinstance(given, Mapping) else given
        if content is None:
            parts.append(_no_log_probs(ids))
        else:
            parts.append(as_log_probs(content, place))
            _check_delta(len(parts[-1].values), ids, "logprobs", place)
    by_text = any(part.ids is None and len(part.values) for part in parts)
    lists = [part.entries for part in parts]
    entries = Entries(*(np.concatenate(column) for column in zip(*lists, strict=True)))
    return LogProbs(
        None if by_text else np.concatenate(list(tokens)),
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.null for part in parts]),
        np.concatenate([part.counts for part in parts]),
        entries,
        sum(part.text_entries for part in parts),
    )


def _no_log_probs(ids: Int64) -> LogProbs:
    none = np.zeros(len(ids), np.int64)
    values = np.full(len(ids), np.nan)
    entries = Entries(none[:0], values[:0], np.zeros(0, bool), none[:0])
    return LogProbs(ids, values, np.ones(len(ids), bool), none, entries)


def _check_delta(length: int, ids: Int64, field: str, place: Place) -> None:
    if length != len(ids):
        raise ConversionError(
            f"{field} of a delta has one element per token of the delta", code="RF-A006",
            where=place(), expected=len(ids), got=length,
            remedy="deltas are not cumulative: check which engine sent the stream",
        )  # fmt: skip
