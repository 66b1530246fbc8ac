"""What sections of the page are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragged_pipeline.reports.drawing import Drawing

__all__ = ["Block", "Figure", "Note", "Section", "Table", "Tile"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its caption and its numbers.

    Attributes
    ----------
    key : str
        Name of the PNG file and of the element.
    title, caption : str
        What is shown, with units and how many values.
    draw : callable
        Returns the chart for a width in pixels.
    headers, rows : sequences
        The numbers as a table.
    wide : bool
        Takes the whole width of the page.
    """

    key: str
    title: str
    caption: str
    draw: Callable[[float], Drawing]
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title; columns named in `numbers` are aligned to the right."""

    title: str
    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence in the place of a figure for which there is no data."""

    text: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One number that matters."""

    label: str
    value: str
    note: str = ""


Block = Figure | Table | Note


@dataclass(slots=True)
class Section:
    """A part of the page."""

    key: str
    title: str
    tiles: list[Tile] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
