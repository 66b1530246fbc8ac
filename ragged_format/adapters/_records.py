"""Parts of records and responses that engines have in common: identity, extras, usage, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters._columns import FROM_RECORD
from ragged_format.adapters._values import malformed, plain
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from collections import Counter

    from ragged_format.adapters._choice import Choice
    from ragged_format.lists import Int64

__all__ = [
    "RECORD_READ",
    "check_length",
    "check_usage",
    "count_unread",
    "error_of",
    "find_request_id",
    "in_record",
    "record_value",
    "refused",
    "to_json",
    "whole",
]

# What is read of a record, whatever the engine.
RECORD_READ = frozenset({
    *FROM_RECORD, "request", "response", "response_text", "request_id", "group_id", "http_status",
    "engine_version", "logprobs_mode", "source", "name",
})  # fmt: skip


def in_record(where: Where, column: str, position: int | None = None) -> Where:
    """Return where a field of a record, or one of its elements, is."""
    return Where(where.file, row=where.row, column=column, position=position)


def whole(value: Any) -> int | None:
    """Return an integer, or ``None`` for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def find_request_id(
    sources: Sequence[Mapping[str, Any]], where: Where, keys: Sequence[str] = ("request_id",)
) -> str:
    """Return the first non-empty string under one of `keys` in one of `sources`.

    Raises
    ------
    ConversionError
        There is none (``RF-A010``).
    """
    for source in sources:
        for key in keys:
            value = source.get(key)
            if isinstance(value, str) and value:
                return value
    raise ConversionError(
        "a sample has no identity", code="RF-A010", where=where,
        expected=f"a string {keys[0]!r} in the response, the record or the request", got=None,
        remedy="put the request's id into the record as 'request_id'",
    )  # fmt: skip


def refused(where: Where, got: object, remedy: str | None = None) -> ConversionError:
    """Return the error for an engine's error answer (``RF-A003``)."""
    return ConversionError(
        "the engine refused the request", code="RF-A003", where=where, expected="a result", got=got,
        remedy=remedy or "correct the request; on_error='skip' converts the other records",
    )  # fmt: skip


def error_of(record: Mapping[str, Any], response: Mapping[str, Any]) -> str | None:
    """Return what an error answer says, ``None`` for a result."""
    status = record.get("http_status")
    failed = isinstance(status, int) and status >= 400
    if not (response.get("error") or response.get("object") == "error" or failed):
        return None
    error = response.get("error") or response
    detail = error if isinstance(error, Mapping) else {"message": error}
    return f"{detail.get('code', status)}: {detail.get('message')}"


def record_value(
    record: Mapping[str, Any], name: str, position: int, size: int, where: Where
) -> Any:
    """Return one of the record's own values; a list has one value per choice."""
    value = record[name]
    if isinstance(value, list | tuple | np.ndarray):
        if len(value) != size:
            raise ConversionError(
                f"a list of {name} has one value per choice", code="RF-A006",
                where=Where(where.file, row=where.row, column=name), expected=size, got=len(value),
            )  # fmt: skip
        value = value[position]
    if isinstance(value, np.generic):
        value = value.item()
    if name == "metrics" and isinstance(value, Mapping):
        return to_json(value, where, name)
    return value


def to_json(value: Any, where: Where, field: str) -> str:
    """Return canonical JSON; raises where the value is of another type, NaN or infinite."""
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False,
            default=plain,
        )  # fmt: skip
    except (TypeError, ValueError) as err:
        malformed(f"{field} are JSON values", in_record(where, field), "JSON values", err)


def check_length(out: Choice, field: str, length: int) -> None:
    """Raise unless a field has one element per generated token (``RF-A006``)."""
    if length != len(out.token_ids):
        raise ConversionError(
            f"{field} has one element per generated token", code="RF-A006", where=out.place(field),
            expected=len(out.token_ids), got=length,
            remedy="the columns of this choice are not aligned; do not cut or pad them",
        )  # fmt: skip


def check_usage(usage: Any, prompt: Int64, choices: Sequence[Choice], where: Where) -> None:
    """Raise unless ``usage`` of a response counts the tokens that were read (``RF-A006``)."""
    if not isinstance(usage, Mapping):
        return
    have = {
        "prompt_tokens": len(prompt),
        "completion_tokens": sum(len(choice.token_ids) for choice in choices),
    }
    for key, count in have.items():
        if (told := usage.get(key)) is not None and told != count:
            raise ConversionError(
                f"usage.{key} counts the tokens of the response", code="RF-A006", where=where,
                expected=told, got=count,
                remedy="the response lacks tokens or choices that the engine generated",
            )  # fmt: skip


def count_unread(
    unread: Counter[str], source: Mapping[str, Any], read: frozenset[str], prefix: str
) -> None:
    """Count the fields of `source` that are not null and not among those that are read."""
    for key in source.keys() - read:
        if source[key] is not None:
            unread[prefix + key] += 1
