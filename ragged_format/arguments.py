"""Checks of arguments: what is of the wrong kind is a typed error that names the argument."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

from ragged_format.errors import LimitExceededError, RaggedError, SchemaMismatchError

__all__ = [
    "check_callable",
    "check_choice",
    "check_integer",
    "check_mapping",
    "check_number",
    "check_seed",
    "check_size",
    "check_text",
    "column_names",
    "list_of",
    "names_of",
    "parse_bytes",
    "parse_seconds",
    "shown",
    "texts_of",
]

T = TypeVar("T")


def shown(value: object) -> object:
    """Return a value for the ``got`` of an error, where ``None`` would be nothing."""
    return "None" if value is None else value


def check_choice(name: str, value: object, choices: Sequence[str]) -> int:
    """Return which of the values that an argument may have it has; raise if none."""
    if not isinstance(value, str) or value not in choices:
        listed = " or ".join(map(repr, choices))
        raise LimitExceededError(
            f"{name} has no such choice", expected=listed, got=shown(value), remedy=f"pass {listed}"
        )
    return choices.index(value)


# What an argument that counts something is below: such numbers become int64.
_INT64_END = 1 << 63


def check_size(name: str, value: object, below: int = _INT64_END) -> None:
    """Raise unless an argument is a positive integer, and < `below`."""
    _check_integer(name, value, 1, below, f"{name} is a positive integer")


def check_integer(
    name: str, value: object, least: int, below: int | None = None, *, code: str | None = None
) -> None:
    """Raise unless an argument is an integer >= `least`, and < `below` where that is given."""
    _check_integer(name, value, least, below, f"{name} is out of its range", code)


def _check_integer(
    name: str, value: Any, least: int, below: int | None, what: str, code: str | None = None
) -> None:
    if type(value) is not int:  # the common case costs nothing more
        try:
            whole = not isinstance(value, bool) and operator.index(value) is not None
        except TypeError:
            whole = False
    else:
        whole = True
    if whole and value >= least and (below is None or value < below):
        return
    too_large = whole and below is not None and value >= below
    limits = f">= {least}"
    if below is not None and (too_large or below != _INT64_END):
        limits += f" and < {below}"
    raise LimitExceededError(
        what, code=code, expected=f"an integer {limits}", got=repr(value),
        remedy=f"pass {name} {limits}",
    )  # fmt: skip


def check_seed(seed: object) -> None:
    """Raise unless a seed is an integer of 64 bits, with a sign or not."""
    _check_integer("seed", seed, -_INT64_END, 2 * _INT64_END, "a seed is an integer of 64 bits")


def check_number(name: str, value: object, least: float | None = None) -> None:
    """Raise unless an argument is a real number, and >= `least` where that is given."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if number and (least is None or value >= least):  # type: ignore[operator]
        return
    limits = "a number" + ("" if least is None else f" >= {least}")
    raise LimitExceededError(
        f"{name} is {limits}", expected=limits, got=repr(value), remedy=f"pass {limits}"
    )


def check_text(name: str, value: object) -> None:
    """Raise unless an argument is text."""
    if not isinstance(value, str):
        raise _wrong(name, "text", value)


def check_callable(name: str, value: object) -> None:
    """Raise unless an argument can be called."""
    if not callable(value):
        raise _wrong(name, "a function", value)


def check_mapping(name: str, value: object) -> None:
    """Raise unless an argument is a mapping."""
    if not isinstance(value, Mapping):
        raise _wrong(name, "a mapping", value)


def _wrong(name: str, expected: str, value: object) -> RaggedError:
    return LimitExceededError(
        f"{name} is {expected}", expected=expected, got=f"{value!r}, a {type(value).__name__}",
        remedy=f"pass {expected}",
    )  # fmt: skip


def list_of(name: str, kind: type[T], values: Any) -> list[T]:
    """Return values of one kind as a list; anything else is an error."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        listed = list(values)
        if all(isinstance(value, kind) for value in listed):
            return listed
        values = listed
    raise SchemaMismatchError(
        f"{name} are a list of {_plural(kind)}", code="RF-S003", got=repr(values),
        expected=f"a list of {_plural(kind)}", remedy="pass a list",
    )  # fmt: skip


def _plural(kind: type) -> str:
    return "names, as text" if kind is str else f"{kind.__name__} objects"


def names_of(name: str, names: object) -> tuple[str, ...]:
    """Return names as a tuple; text alone is no list of names."""
    return tuple(list_of(name, str, names))


def texts_of(name: str, texts: Any) -> dict[str, str]:
    """Return a mapping of text to text as a dict; ``None`` is an empty one."""
    try:
        pairs = dict(texts or {})
        sound = all(isinstance(text, str) for pair in pairs.items() for text in pair)
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise SchemaMismatchError(
            f"{name} is a mapping of text to text", code="RF-S009", expected="{str: str}",
            got=repr(texts), remedy="store other values as JSON text",
        )  # fmt: skip
    return pairs


def column_names(columns: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the columns that are asked for, at least one; ``None`` is all of them.

    Raises
    ------
    SchemaMismatchError
        They are no list of names, or none (``RF-S003``).
    """
    if columns is None:
        return None
    names = names_of("columns", columns)
    if not names:
        raise SchemaMismatchError(
            "no columns are selected", code="RF-S003", expected="at least one column", got="[]",
            remedy="leave columns out for all of them",
        )  # fmt: skip
    return names


_SIZE = re.compile(r"\s*(\d+)(\.\d+)?\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(size: int | str, name: str = "a size in bytes") -> int:
    """Return a number of bytes, given as an integer or as text with a unit.

    Units are B, kB, MB, GB and TB, powers of 1000, and KiB, MiB, GiB and TiB, powers of 1024; the B
    may be left out, and letters may be small or large.

    Raises
    ------
    LimitExceededError
        It is not a positive size (``RF-L001``).

    Examples
    --------
    >>> parse_bytes("2GiB"), parse_bytes("1.5 MB"), parse_bytes("64k"), parse_bytes(1024)
    (2147483648, 1500000, 64000, 1024)
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        # A lone i is no unit, and bytes have no parts.
        if match is None or (match[4] and not match[3]) or (match[2] and not match[3]):
            raise LimitExceededError(
                f"{name} is a number, or has a unit", expected="65536, 64MiB, 1.5GB", got=size,
                remedy="write it as one of these",
            )  # fmt: skip
        unit = (1024 if match[4] else 1000) ** " kmgt".index(match[3].lower() or " ")
        size = int(match[1]) * unit + int(float(match[2] or 0) * unit)
    check_size(name, size)
    return int(size)


_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", re.ASCII)


def parse_seconds(time: float | str, name: str = "a duration") -> float:
    """Return a number of seconds, given as a number or as text that may have a unit.

    Raises
    ------
    LimitExceededError
        It is no duration (``RF-L001``).

    Examples
    --------
    >>> parse_seconds("90"), parse_seconds("500ms"), parse_seconds("1.5h"), parse_seconds(7)
    (90.0, 0.5, 5400.0, 7.0)
    """
    if isinstance(time, str):
        match = _DURATION.fullmatch(time)
        if match is None:
            raise LimitExceededError(
                f"{name} is a number of seconds, or has a unit", expected="90, 500ms, 15m, 7d",
                got=time, remedy="write it as one of these",
            )  # fmt: skip
        return float(match[1]) * _UNITS[match[2] or "s"]
    check_number(name, time, 0)
    return float(time)
