"""A chart as a list of shapes, from which SVG and PNG are made alike.

Coordinates are pixels, from the upper left corner. Colors are roles (``"series1"``, ``"grid"``, …),
so that one drawing serves the light and the dark page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FONT", "Drawing", "Line", "Rect", "Shape", "Text", "fitted", "text_width"]

FONT = 12.0
# Mean width of a letter as a share of the font size, of the fonts that pages and pictures use.
_LETTER = 0.61


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; `tip` is shown where a pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    paint: str
    tip: str = ""
    radius: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    paint: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; `y` is the baseline, `anchor` one of start, middle and end."""

    x: float
    y: float
    text: str
    paint: str = "muted"
    anchor: str = "start"
    size: float = FONT
    bold: bool = False


Shape = Rect | Line | Text


@dataclass(slots=True)
class Drawing:
    """Shapes on a canvas.

    Attributes
    ----------
    width, height : float
        Pixels.
    shapes : list of Shape
        Painted in this order.
    """

    width: float
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, paint: str, *, tip: str = "",
        radius: float = 0.0,
    ) -> None:  # fmt: skip
        """Add a rectangle."""
        self.shapes.append(Rect(x, y, width, height, paint, tip, radius))

    def line(
        self, *points: tuple[float, float], paint: str, width: float = 1.0, dashed: bool = False
    ) -> None:
        """Add a line."""
        self.shapes.append(Line(points, paint, width, dashed))

    def text(
        self, x: float, y: float, text: str, *, paint: str = "muted", anchor: str = "start",
        size: float = FONT, bold: bool = False,
    ) -> None:  # fmt: skip
        """Add a text."""
        self.shapes.append(Text(x, y, text, paint, anchor, size, bold))


def text_width(text: str, size: float = FONT) -> float:
    """Return about how wide a text is."""
    # Letters of East Asian scripts and emoji are about twice as wide.
    return sum(_LETTER if ord(c) < 0x1100 else 1.05 for c in text) * size


def fitted(text: str, width: float, size: float = FONT, *, tail: bool = False) -> str:
    """Return a text, cut with an ellipsis where it is wider than `width`.

    Parameters
    ----------
    text : str
    width, size : float
        Pixels.
    tail : bool
        Keep its end rather than its beginning.

    Examples
    --------
    >>> fitted("environment", 40), fitted("math", 40), fitted("rollout/7", 40, tail=True)
    ('env…', 'math', '…t/7')
    """
    if tail:
        kept = fitted(text[::-1], width, size)
        return kept[::-1]
    whole, text = text, text[: int(width) + 1]  # no letter is narrower than a pixel
    if text == whole and text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…"
