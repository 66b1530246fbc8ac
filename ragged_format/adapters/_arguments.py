"""Checks of the arguments that all adapters take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ragged_format.errors import ConversionError
from ragged_format.schema import Column

__all__ = ["columns_of", "records_of", "wrong_option"]


def records_of(payloads: Any) -> Iterable[Any]:
    """Return the payloads of a call, which are an iterable of records and not one record.

    Raises
    ------
    ConversionError
        They are something else (``RF-A011``).
    """
    if isinstance(payloads, Iterable) and not isinstance(payloads, str | bytes | Mapping):
        return payloads
    raise ConversionError(
        "payloads are an iterable of records", code="RF-A011", expected="a list of records",
        got=f"a {type(payloads).__name__}", remedy="pass a list: to_samples([record], …)",
    )  # fmt: skip


def columns_of(columns: Any) -> tuple[str | Column, ...] | None:
    """Return the columns that are asked for; ``None`` is those that the records have.

    Raises
    ------
    ConversionError
        They are no list of names and declarations (``RF-A011``).
    """
    if columns is None:
        return None
    if isinstance(columns, Iterable) and not isinstance(columns, str | bytes):
        listed = tuple(columns)
        if all(isinstance(column, str | Column) for column in listed):
            return listed
        columns = listed
    raise ConversionError(
        "columns are a list of names and declarations", code="RF-A011",
        expected="names of standard columns, rf.Column", got=repr(columns),
        remedy="pass a list, as in columns=['candidate_counts', 'candidate_ids']",
    )  # fmt: skip


def wrong_option(name: str, expected: str, got: object) -> ConversionError:
    """Return the error for an option of the wrong kind."""
    return ConversionError(
        f"{name} is {expected}", code="RF-A011", expected=expected, got=repr(got),
        remedy=f"pass {expected}, or leave it out",
    )  # fmt: skip
