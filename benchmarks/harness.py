"""Interleaved timing on two clocks, and the table of figures.

All contenders of one comparison run in one process, on the same data, in turn: a round calls each
of them once (a slice of several calls where one is short), and the ratio is taken within the round,
so that a change of the machine's speed hits both sides. Reported are medians over rounds.

The CPU clock counts all threads of the process, so that work handed to a pool is not missed. The
garbage collector runs between slices and is off inside them: formats of many Python objects would
otherwise pay for the objects that the benchmark itself holds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = [
    "Figure",
    "Sample",
    "Settings",
    "format_table",
    "interleave",
    "median_ratio",
    "median_s",
    "rate_text",
    "raw",
    "speed_figure",
    "time_text",
    "total",
]

Clock = Literal["cpu", "wall"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to run.

    Attributes
    ----------
    rounds : int
        Rounds of an interleaved comparison.
    slice_s : float
        Least length of a contender's slice of a round, in seconds.
    quick : bool
        Small inputs and few rounds: shows that everything runs; the figures mean little.
    """

    rounds: int = 11
    slice_s: float = 0.02
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds per call of one slice, on both clocks."""

    cpu: float
    wall: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    Attributes
    ----------
    name : str
        What is measured.
    ours, peer : str
        Measured values with units; `peer` begins with the peer's name.
    ratio : float, optional
        How many times better ours is than the peer, or as `unit` says; ``None`` if not measured.
    wall_ratio : float, optional
        The same ratio by elapsed time; `ratio` is by CPU time.
    goal : float, optional
        The least ratio wanted (the largest where `at_most`); ``None`` for a line without a goal.
    unit : str
        Written behind ratio and goal.
    """

    name: str
    ours: str
    peer: str
    ratio: float | None = None
    goal: float | None = None
    wall_ratio: float | None = None
    unit: str = "x"
    at_most: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; ``None`` without a goal or a measurement."""
        if self.goal is None or self.ratio is None:
            return None
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal

    def to_json(self) -> dict[str, Any]:
        """Return the figure as plain JSON values."""
        return asdict(self) | {"details": dict(self.details), "met": self.met}


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    settings: Settings,
    *,
    single: Collection[str] = (),
) -> dict[str, list[Sample]]:
    """Time every contender once per round; the order turns from round to round.

    Parameters
    ----------
    contenders : mapping of name to callable
        Each call does the whole job once. Its result is freed inside the timed slice.
    settings : Settings
    single : collection of str
        Contenders that are called once a slice however short that is. Such a call comes right after
        a collection and finds caches and branch predictors cold.

    Returns
    -------
    dict of name to list of Sample
        One sample per round.
    """
    calls = {
        name: _calls_per_slice(call, 0 if name in single else settings.slice_s)
        for name, call in contenders.items()
    }
    names = list(contenders)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    enabled = gc.isenabled()
    try:
        for number in range(settings.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                gc.collect()
                gc.disable()
                samples[name].append(_slice(contenders[name], calls[name]))
                gc.enable()
    finally:
        (gc.enable if enabled else gc.disable)()
    return samples


def _calls_per_slice(call: Callable[[], object], slice_s: float) -> int:
    call()  # fills caches and imports
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    return max(1, round(slice_s / max(once, 1e-7)))


def _slice(call: Callable[[], object], calls: int) -> Sample:
    repeat = range(calls)
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    for _ in repeat:
        call()
    cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
    return Sample(cpu / calls / 1e9, wall / calls / 1e9)


def median_s(samples: list[Sample], clock: Clock = "cpu") -> float:
    """Return the median seconds per call."""
    return float(statistics.median(getattr(sample, clock) for sample in samples))


def median_ratio(slower: list[Sample], faster: list[Sample], clock: Clock = "cpu") -> float:
    """Return the median over rounds of ``slower / faster``."""
    ratios = [getattr(a, clock) / getattr(b, clock) for a, b in zip(slower, faster, strict=True)]
    return float(statistics.median(ratios))


def time_text(seconds: float) -> str:
    """Return a duration with a unit that suits it.

    Examples
    --------
    >>> time_text(0.000042), time_text(0.0318), time_text(2.5)
    ('42.0 µs', '31.8 ms', '2.50 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.2f} s"


def total(*parts: list[Sample]) -> list[Sample]:
    """Return the sum of several contenders' times, round by round."""
    return [
        Sample(sum(part.cpu for part in rounds), sum(part.wall for part in rounds))
        for rounds in zip(*parts, strict=True)
    ]


def speed_figure(
    name: str,
    ours: list[Sample],
    peer: list[Sample],
    *,
    label: str = "",
    note: str = "",
    goal: float | None = None,
) -> Figure:
    """Return the figure "ours is so many times faster than the peer".

    Parameters
    ----------
    name : str
        Name of the figure.
    ours, peer : list of Sample
        Of the same rounds.
    label, note : str
        Written before and behind the peer's time.
    goal : float, optional
        The least ratio wanted.
    """
    return Figure(
        name,
        time_text(median_s(ours)),
        f"{label} {time_text(median_s(peer))}{note}".strip(),
        median_ratio(peer, ours),
        goal,
        median_ratio(peer, ours, "wall"),
        details=raw(ours=ours, peer=peer),
    )


def raw(**samples: list[Sample]) -> dict[str, Any]:
    """Return the samples as plain JSON values, for `Figure.details`."""
    return {name: [asdict(sample) for sample in part] for name, part in samples.items()}


def rate_text(size: int, samples: list[Sample]) -> str:
    """Return `size` bytes per median CPU second, as GB/s or MB/s."""
    rate = size / median_s(samples)
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def format_table(figures: list[Figure]) -> str:
    """Return the figures as an aligned text table."""
    header = ("figure", "ours", "peer", "ratio", "wall", "goal", "met")
    rows = [header, *(_cells(figure) for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(lines)


def _cells(figure: Figure) -> tuple[str, ...]:
    met = {True: "yes", False: "NO", None: "-"}[figure.met]
    sign = "≤" if figure.at_most else "≥"
    goal = "-" if figure.goal is None else f"{sign} {_number(figure.goal)}{figure.unit}"
    ratio = "-" if figure.ratio is None else f"{_number(figure.ratio)}{figure.unit}"
    if figure.met is False and figure.ratio is not None and ratio == goal[2:]:
        ratio = f"{figure.ratio:.5g}{figure.unit}"  # a miss does not print as the goal
    wall = "-" if figure.wall_ratio is None else f"{_number(figure.wall_ratio)}{figure.unit}"
    return figure.name, figure.ours, figure.peer, ratio, wall, goal, met


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
