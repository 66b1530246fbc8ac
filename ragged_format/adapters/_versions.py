"""Weight versions of engines as the format's integer policy versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ragged_format.adapters._values import malformed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragged_format.adapters._choice import Choice, VersionSpan
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.lists import Int64

__all__ = ["UNKNOWN_VERSION", "Versions", "read_versions"]

UNKNOWN_VERSION = -1


@dataclass(frozen=True, slots=True)
class Versions:
    """Policy versions of a call.

    Attributes
    ----------
    oldest : list of int or None
        By choice; ``None`` where a version is unknown.
    by_target : (g,) int64
        ``UNKNOWN_VERSION`` where unknown.
    is_mixed : bool
        Some choice spans more than one version, and all versions are known.
    """

    oldest: list[int | None]
    by_target: Int64
    is_mixed: bool


def read_versions(
    choices: Sequence[Choice], mapping: Mapping[str, int] | int | None, report: ConversionReport
) -> Versions:
    """Return the versions of all choices; strings become integers or are looked up.

    Parameters
    ----------
    choices : sequence of Choice
    mapping : mapping of str to int, or int, optional
        Number of each version string; one number is for every choice. Without it, or for strings
        that it lacks, the string is parsed as an integer.
    report : ConversionReport
        Counts what was mapped and what stays unknown.
    """
    oldest: list[int | None] = []
    numbers: list[int] = []
    lengths: list[int] = []
    is_mixed = False
    for choice in choices:
        size = len(choice.token_ids)
        if isinstance(mapping, int):
            numbers.append(mapping)
            lengths.append(size)
            oldest.append(mapping)
            continue
        mine = set()
        end = 0
        for span in choice.versions:
            if not end <= span.start <= span.end <= size:
                _misplaced(choice, end, span)
            number = _number(span, mapping or {}, report)
            for value, length in (
                (UNKNOWN_VERSION, span.start - end),
                (number, span.end - span.start),
            ):
                if length:
                    mine.add(value)
                    numbers.append(value)
                    lengths.append(length)
            end = span.end
        if end < size:
            mine.add(UNKNOWN_VERSION)
            numbers.append(UNKNOWN_VERSION)
            lengths.append(size - end)
        oldest.append(None if UNKNOWN_VERSION in mine else min(mine, default=None))
        is_mixed = is_mixed or len(mine - {UNKNOWN_VERSION}) > 1
    if is_mixed and UNKNOWN_VERSION in numbers:
        report.noted["policy_versions_left_out"] += 1
        is_mixed = False
    by_target = np.repeat(np.array(numbers, np.int64), np.array(lengths, np.int64))
    return Versions(oldest, by_target, is_mixed)


def _misplaced(choice: Choice, end: int, span: VersionSpan) -> NoReturn:
    malformed(
        "weight versions are spans of the generated tokens in order",
        choice.place("weight_versions"),
        f"{end} <= start <= end <= {len(choice.token_ids)}", span,
    )  # fmt: skip


def _number(span: VersionSpan, mapping: Mapping[str, int], report: ConversionReport) -> int:
    if span.version in mapping:
        report.converted["weight_version_mapped"] += 1
        return mapping[span.version]
    text = span.version
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else UNKNOWN_VERSION
