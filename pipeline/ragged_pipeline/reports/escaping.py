"""Texts of the data as texts of the page."""

from __future__ import annotations

import re
from html import escape

__all__ = ["escaped", "sentence"]

# Letters of a text that are shown.
LONGEST = 300
# Control characters, and those that turn the direction of what follows.
_UNSEEN = dict.fromkeys(
    [*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F),
     *range(0x2066, 0x206A)],
    "\ufffd",
)  # fmt: skip


def escaped(text: str) -> str:
    """Return a text without markup and control characters, cut where it is very long.

    Examples
    --------
    >>> escaped("<b>"), escaped("a" * 1000)[-3:]
    ('&lt;b&gt;', 'aa…')
    """
    if len(text) > LONGEST:
        text = text[:LONGEST] + "…"
    return escape(text.translate(_UNSEEN))


def sentence(text: str) -> str:
    """Return our own text, whole, numbers and per cent signs kept on one line."""
    return escape(re.sub(r"(?<=\d) (?=%)", "\u00a0", text).translate(_UNSEEN))
