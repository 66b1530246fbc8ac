"""Charts: data into shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragged_pipeline.reports.bins import nice
from ragged_pipeline.reports.drawing import FONT, Drawing, fitted, text_width
from ragged_pipeline.reports.numerals import full, short

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Bar", "Scale", "Strip", "bars", "columns", "curve", "strips"]

_SMALL = 11.0
_TOP = 22.0
# Pixels of a column at most.
_WIDEST = 84.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers to pixels, linear or logarithmic, with ticks.

    On a logarithmic scale 0 and what is below `low` lie at the lower end.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, number: float) -> float:
        """Return the pixel of a number."""
        if self.log:
            share = math.log(max(number, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (number - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self, wanted: int) -> list[float]:
        """Return at most about as many round numbers within the scale."""
        if self.log:
            first = math.ceil(math.log10(self.low) - 1e-9)
            last = math.floor(math.log10(self.high) + 1e-9)
            if last - first < 2:
                tens = [10.0**power for power in range(first - 1, last + 2)]
                fine = [m * t for t in tens for m in (1, 2, 5) if self.low <= m * t <= self.high]
                return fine if len(fine) > 1 else [self.low, self.high]
            every = max(1, math.ceil((last - first) / (wanted + 2)))
            return [10.0**power for power in range(first, last + 1, every)]
        step = nice((self.high - self.low) / max(wanted, 1))
        number = math.ceil(self.low / step - 1e-9)
        out: list[float] = []
        while number * step <= self.high * (1 + 1e-9):
            out.append(round(number * step, 12))
            number += 1
        return out


def counting(values: Sequence[float], start: float, end: float, *, log: bool) -> Scale:
    """Return the scale of an axis of counts, from 0 or, logarithmic, from below 1."""
    top = max([*values, 1])
    if not log:
        return Scale(0, top * 1.1, start, end)
    return Scale(0.7, max(top, 10) * 1.8, start, end, log=True)


def columns(
    width: float, labels: Sequence[str], values: Sequence[int], *, x_label: str, y_label: str,
    log: bool = False, paint: str = "series1", height: float = 220.0,
    paints: Sequence[str] | None = None, edges: bool = False,
    notes: Sequence[str] | None = None,
) -> Drawing:  # fmt: skip
    """Return a histogram: one column per bin.

    Parameters
    ----------
    width : float
        Pixels.
    labels, values : sequences of one length
        Of the bins.
    x_label, y_label : str
        What the axes show, with units.
    log : bool
        Whether counts are drawn logarithmically.
    paint : str
        Color of the columns.
    paints : sequence of str, optional
        A color for each.
    edges : bool
        Labels name the lower ends of the bins, so that they stand below the left edges.
    notes : sequence of str, optional
        Written above the columns where all fit.
    """
    drawing = Drawing(width, height)
    bottom = height - 40
    y = counting(values, bottom, _TOP, log=log)
    ticks = [tick for tick in y.ticks(4 if log else 5) if tick == int(tick)]
    left = max(text_width(short(t), _SMALL) for t in ticks) + 10
    _rows(drawing, y, ticks, left, width)
    drawing.text(0, 11, y_label + (", logarithmic" if log else ""), size=_SMALL)
    slot = (width - left) / max(len(values), 1)
    gap = max(min(6.0, slot * 0.18), slot - _WIDEST)
    fits = notes is not None and max(map(_small_width, notes), default=0) < slot - 2
    for number, value in enumerate(values):
        if value:
            top = y(value)
            drawing.rect(
                left + number * slot + gap / 2, top, slot - gap, bottom - top,
                paints[number] if paints else paint, tip=f"{labels[number]}: {full(value)}",
                radius=min(2.0, slot / 4),
            )  # fmt: skip
            if fits and notes is not None:
                drawing.text(
                    left + (number + 0.5) * slot, top - 4, notes[number], anchor="middle",
                    size=_SMALL,
                )  # fmt: skip
    drawing.line((left, bottom), (width, bottom), paint="line")
    every = max(1, math.ceil((max(map(_small_width, labels), default=0) + 8) / slot))
    for number in range(0, len(labels), every):
        x = left + number * slot + (0 if edges else slot / 2)
        anchor = "middle"
        if x + _small_width(labels[number]) / 2 > width:
            x, anchor = width, "end"
        drawing.text(x, bottom + 15, labels[number], anchor=anchor, size=_SMALL)
    drawing.text((left + width) / 2, height - 5, x_label, anchor="middle", size=_SMALL)
    return drawing


def _small_width(text: str) -> float:
    return text_width(text, _SMALL)


def _rows(drawing: Drawing, y: Scale, ticks: list[float], left: float, width: float) -> None:
    for tick in ticks:
        drawing.line((left, y(tick)), (width, y(tick)), paint="grid")
        drawing.text(left - 6, y(tick) + 4, short(tick), anchor="end", size=_SMALL)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its length, and what is written behind it."""

    label: str
    value: float
    note: str
    paint: str = "series1"


def bars(
    width: float, items: Sequence[Bar], *, x_label: str, log: bool = False, low: float = 0.0
) -> Drawing:
    """Return horizontal bars, one per item, with names on the left and notes behind them."""
    narrow = width < 500
    row = 40.0 if narrow else 26.0
    drawing = Drawing(width, row * len(items) + 30)
    left = 0.0
    if not narrow:
        left = min(max((text_width(item.label) for item in items), default=0) + 12, width * 0.34)
    right = width - max((_small_width(item.note) for item in items), default=0) - 10
    top = max([item.value for item in items], default=1) or 1
    x = Scale(low, top, left, right)
    if log:
        positive = [item.value for item in items if item.value > 0] or [1]
        x = Scale(min(positive) / 2, max(top, min(positive) * 2), left, right, log=True)
    for number, item in enumerate(items):
        y = number * row
        middle = y + (row - 12 if narrow else row / 2)
        if narrow:
            drawing.text(0, y + 14, fitted(item.label, width), paint="ink", size=_SMALL)
        else:
            label = fitted(item.label, left - 12)
            drawing.text(left - 10, middle + 4, label, paint="ink", anchor="end")
        length = max(x(item.value) - left, 1.0) if item.value > 0 else 0.0
        drawing.rect(left, middle - 8, right - left, 16, "soft", radius=2)
        if length:
            tip = f"{item.label}: {item.note}"
            drawing.rect(left, middle - 8, length, 16, item.paint, tip=tip, radius=2)
        drawing.text(right + 8, middle + 4, item.note, paint="ink", size=_SMALL)
    text = x_label + (", logarithmic" if log else "")
    drawing.text(left, drawing.height - 8, text, size=_SMALL)
    return drawing


@dataclass(frozen=True, slots=True)
class Strip:
    """The quantiles of one measure: p1, p5, p25, p50, p75, p95, p99, and its mean."""

    label: str
    quantiles: tuple[float, ...]
    mean: float
    paint: str = "series1"


def strips(width: float, items: Sequence[Strip], *, x_label: str) -> Drawing:
    """Return, for each measure, its quantiles on one logarithmic axis."""
    narrow = width < 500
    row = 46.0 if narrow else 38.0
    drawing = Drawing(width, row * len(items) + 46)
    left = 4.0 if narrow else max(text_width(i.label, FONT) for i in items) + 14
    bottom = row * len(items) + 4
    values = [v for item in items for v in (*item.quantiles, item.mean) if v > 0] or [1.0]
    low, high = min(values) / 1.2, max(values) * 1.2
    x = Scale(low, max(high, low * 2), left, width - 14, log=True)
    for tick in x.ticks(4 if narrow else 8):
        drawing.line((x(tick), 0), (x(tick), bottom), paint="grid")
        drawing.text(x(tick), bottom + 15, short(tick), anchor="middle", size=_SMALL)
    for number, item in enumerate(items):
        middle = number * row + (row - 14 if narrow else row / 2)
        if narrow:
            drawing.text(0, number * row + 13, item.label, paint="ink", size=_SMALL)
        else:
            drawing.text(left - 10, middle + 4, item.label, paint="ink", anchor="end")
        p1, p5, p25, p50, p75, p95, p99 = map(x, item.quantiles)
        drawing.line((p1, middle), (p99, middle), paint=item.paint, width=1.5)
        drawing.rect(p5, middle - 3, max(p95 - p5, 1), 6, item.paint)
        tip = f"{item.label}: half of all between {full(item.quantiles[2])} and " + full(
            item.quantiles[4]
        )
        drawing.rect(p25, middle - 9, max(p75 - p25, 2), 18, item.paint, tip=tip, radius=3)
        drawing.rect(p50 - 1.5, middle - 9, 3, 18, "card")
        drawing.rect(x(item.mean) - 2, middle - 13, 4, 4, "ink", tip=f"mean {full(item.mean)}")
    drawing.text(
        (left + width) / 2, drawing.height - 6, f"{x_label}, logarithmic", anchor="middle",
        size=_SMALL,
    )  # fmt: skip
    return drawing


def curve(
    width: float, points: Sequence[tuple[int, float]], *, x_label: str, y_label: str,
    paint: str = "series1", height: float = 220.0,
) -> Drawing:  # fmt: skip
    """Return shares over doubling numbers as a line with points."""
    drawing = Drawing(width, height)
    bottom, left, right = height - 40, 44.0, width - 16
    least = min(share for _, share in points)
    low = 0.0 if least < 0.5 else math.floor(least * 10 - 1e-9) / 10
    low = min(low, 0.9)
    y = Scale(low, 1.0, bottom, _TOP)
    for tick in y.ticks(4):
        drawing.line((left, y(tick)), (width, y(tick)), paint="grid")
        drawing.text(left - 6, y(tick) + 4, f"{tick:.0%}", anchor="end", size=_SMALL)
    drawing.text(0, 11, y_label, size=_SMALL)
    steps = max(len(points) - 1, 1)
    places = [
        (left + 10 + (right - left - 10) * number / steps, y(min(max(share, low), 1.0)))
        for number, (_, share) in enumerate(points)
    ]
    drawing.line((left, bottom), (width, bottom), paint="line")
    if len(places) > 1:
        drawing.line(*places, paint=paint, width=2.0)
    every = max(1, math.ceil(44 * len(points) / (right - left)))
    for number, ((k, share), (x, top)) in enumerate(zip(points, places, strict=True)):
        drawing.rect(x - 3.5, top - 3.5, 7, 7, paint, tip=f"first {k}: {share:.2%}", radius=3.5)
        if number % every == 0 or number == len(points) - 1:
            drawing.text(x, bottom + 15, str(k), anchor="middle", size=_SMALL)
    drawing.text((left + width) / 2, height - 5, x_label, anchor="middle", size=_SMALL)
    return drawing
