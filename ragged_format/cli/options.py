"""Values of options that several commands take."""

from __future__ import annotations

from typing import Any

import typer

from ragged_format.arguments import parse_bytes, parse_seconds
from ragged_format.errors import LimitExceededError

__all__ = ["duration", "size", "size_option"]


def duration(text: str | float) -> float:
    """Return a number of seconds; anything else is wrong usage."""
    try:
        return parse_seconds(text)
    except LimitExceededError as err:
        raise _wrong(text, "a duration is a number of seconds, or has a unit: 90, 15m, 7d") from err


def size(text: str | int) -> int:
    """Return a number of bytes; anything else is wrong usage."""
    try:
        return parse_bytes(text)
    except LimitExceededError as err:
        raise _wrong(text, "a size is a number of bytes, or has a unit: 64MiB, 1.5GB") from err


def _wrong(text: object, what: str) -> typer.BadParameter:
    return typer.BadParameter(f"{text!r}: {what}")


def size_option(name: str, text: str, default: int | None = None) -> Any:
    """Return an option that is a size; `default` is what its parameter has, for the help."""
    # typer would show the number, and sets a text of ours in parentheses; the bracket is escaped,
    # since help is markup of rich.
    shown = "" if default is None else rf" \[default: {_in_words(default)}]"
    return typer.Option(name, metavar="SIZE", parser=size, help=text + shown, show_default=False)


def _in_words(number: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number % 1024**power == 0:
            return f"{number // 1024**power}{unit}"
    return str(number)
