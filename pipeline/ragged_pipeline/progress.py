"""How far a job is, at what rate, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Meter", "Progress", "Report"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running job.

    Attributes
    ----------
    stage : str
        Name of the stage under way.
    stages : (int, int)
        Its number, from 1, and how many there are.
    done, total : int
        Bytes of input done and to be done, over all stages; both about.
    seconds : float
        Since the start.
    rate : float
        Bytes per second, of what this run did itself.
    left : float or None
        Seconds that remain at this rate; ``None`` before there is one.
    """

    stage: str
    stages: tuple[int, int]
    done: int
    total: int
    seconds: float
    rate: float
    left: float | None


Report = Callable[[Progress], None]


class Meter:
    """Adds up what tasks report, and calls `report` at most ten times a second.

    Parameters
    ----------
    total : int
        Bytes over all stages.
    report : callable, optional
        Receives a :class:`Progress`.
    """

    INTERVAL_S = 0.1

    def __init__(self, total: int, report: Report | None) -> None:
        self._report = report
        self._total = total
        self._skipped = self._settled = self._floating = 0
        self._start = time.monotonic()
        self._last = 0.0
        self._stage, self._stages = "", (0, 0)

    def stage(self, name: str, number: int, stages: int) -> None:
        """Begin a stage."""
        self._stage, self._stages = name, (number, stages)
        self._send()

    def skip(self, weight: int) -> None:
        """Count what an earlier run did."""
        self._skipped += weight
        self._total -= weight

    def advance(self, weight: int) -> None:
        """Count what a task did so far, about."""
        self._floating += weight
        self._tell()

    def settle(self, weight: int) -> None:
        """Count a task as finished; what it reported on the way was about this much."""
        self._settled += weight
        self._floating = max(self._floating - weight, 0)
        self._tell()

    def end(self) -> None:
        """Report the end of a stage."""
        self._send()

    def _tell(self) -> None:
        if time.monotonic() - self._last >= self.INTERVAL_S:
            self._send()

    def _send(self) -> None:
        if self._report is None:
            return
        self._last = time.monotonic()
        seconds = self._last - self._start
        own = min(self._settled + self._floating, self._total)
        rate = own / seconds if seconds > 0 else 0.0
        left = (self._total - own) / rate if rate else None
        done = own + self._skipped
        self._report(
            Progress(
                self._stage, self._stages, done, self._total + self._skipped, seconds, rate, left
            )
        )
