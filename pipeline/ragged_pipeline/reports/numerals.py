"""Numbers as people read them."""

from __future__ import annotations

import math

__all__ = ["bytes_text", "full", "percent", "short", "span"]


def full(number: float | None) -> str:
    """Return a number with separators; fractions with four significant digits.

    Examples
    --------
    >>> full(1234567), full(3.14159), full(0.00001234), full(None)
    ('1,234,567', '3.142', '1.234e-05', '-')
    """
    if number is None:
        return "-"
    if isinstance(number, int) or (number == int(number) and abs(number) < 1e15):
        return f"{int(number):,}"
    return f"{number:,.1f}" if abs(number) >= 1000 else f"{number:.4g}"


def short(number: float) -> str:
    """Return a number in few letters.

    Examples
    --------
    >>> short(950), short(12_345), short(3_400_000), short(0.25)
    ('950', '12.3k', '3.4M', '0.25')
    """
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{number / scale:.3g}".replace("e+03", "000") + unit
    return full(number)


def percent(share: float | None) -> str:
    """Return a share in per cent, never rounded up to all or down to nothing.

    Examples
    --------
    >>> shares = (0.4567, 0.99999, 0.0000001, 1.0, None)
    >>> [percent(share) for share in shares]
    ['45.7 %', '> 99.9 %', '< 0.1 %', '100 %', '-']
    """
    if share is None:
        return "-"
    if share in {0, 1}:
        return f"{100 * share:.0f} %"
    if share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def bytes_text(number: float) -> str:
    """Return bytes in decimal units.

    Examples
    --------
    >>> [bytes_text(number) for number in (512, 1_536_000)]
    ['512 B', '1.54 MB']
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            break
        number /= 1000
    text = f"{number:.0f}" if unit == "B" else f"{number:,.2f}"
    return f"{text} {unit}"


def span(low: float, high: float | None, *, integer: bool) -> str:
    """Return the label of a bin.

    Examples
    --------
    >>> span(3, 4, integer=True), span(5, 5, integer=True), span(0.5, 1.0, integer=False)
    ('3–4', '5', '0.5 to 1')
    """
    if high is None or math.isinf(high):
        return f"over {short(low)}"
    if low == high:
        return full(low)
    return f"{full(low)}\u2013{full(high)}" if integer else f"{full(low)} to {full(high)}"
