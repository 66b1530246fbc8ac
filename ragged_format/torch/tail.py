"""Logs that samples are read from while they are being written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ragged_format.errors import StateMismatchError
from ragged_format.local_files import path_text, scheme_of
from ragged_format.sources import open_source

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Page", "SourceTail", "Tail", "tail_of"]


class Page(NamedTuple):
    """What one read of a log gave.

    Attributes
    ----------
    batches : sequence of RecordBatch
        New samples, profile ``sample``; none where nothing came in time.
    cursor : str, optional
        From where to read on.
    is_end : bool
        Nothing will ever follow.
    """

    batches: Sequence[pa.RecordBatch]
    cursor: str | None
    is_end: bool = False


@runtime_checkable
class Tail(Protocol):
    """A log of samples that can be read again from any cursor that it gave out.

    Attributes
    ----------
    identity : str
        Names the log, so that a state is not resumed on another one.
    """

    @property
    def identity(self) -> str:
        """Name of the log."""
        ...

    def read(self, after: str | None, *, wait_s: float) -> Page:
        """Return what follows a cursor, waiting up to `wait_s` for it; ``None`` is the oldest."""
        ...


class SourceTail:
    """Any source of samples as a log that ends: its cursor counts batches.

    Parameters
    ----------
    place : path or URL
        What ``rf.open_source`` opens. It is opened anew to go back, so a stream that can be read
        once only cannot resume.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self._place = path_text(place)
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._read = 0

    @property
    def identity(self) -> str:
        """The place."""
        return self._place

    def read(self, after: str | None, *, wait_s: float) -> Page:  # noqa: ARG002 - nothing to wait for
        """Return the next batch."""
        wanted = _number(after)
        if self._batches is None or self._read != wanted:
            self._batches, self._read = open_source(self._place).batches(), 0
            while self._read < wanted:
                if next(self._batches, None) is None:
                    raise StateMismatchError(
                        "the source ends before the cursor", expected=f">= {wanted} batches",
                        got=self._read, remedy="resume on the source that the state belongs to",
                    )  # fmt: skip
                self._read += 1
        batch = next(self._batches, None)
        if batch is None:
            return Page([], str(self._read), is_end=True)
        self._read += 1
        return Page([batch], str(self._read))


def _number(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdecimal()):
        raise StateMismatchError(
            "the cursor is none of this source", expected="a number of batches", got=repr(cursor),
            remedy="resume on the source that the state belongs to",
        )  # fmt: skip
    return int(cursor)


def tail_of(source: Tail | str | os.PathLike[str]) -> Tail:
    """Return the log behind a place.

    A source with a method ``tail``, as that of a server has, is followed for ever; any other one
    ends.
    """
    if isinstance(source, Tail):
        return source
    if isinstance(source, str) and scheme_of(source) not in (None, "file"):
        opened = open_source(source)
        if hasattr(opened, "tail"):
            log: Tail = opened.tail()
            return log
    return SourceTail(source)
