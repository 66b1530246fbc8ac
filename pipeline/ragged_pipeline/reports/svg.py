"""Drawings as SVG for the page."""

from __future__ import annotations

from ragged_pipeline.reports.drawing import FONT, Drawing, Line, Rect, Shape
from ragged_pipeline.reports.escaping import escaped, sentence

__all__ = ["svg"]


def svg(drawing: Drawing, *, key: str, title: str, description: str, variant: str = "") -> str:
    """Return an ``<svg>`` element whose colors come from the page's classes.

    Parameters
    ----------
    drawing : Drawing
    key : str
        Unique on the page; names the title and the description.
    title, description : str
        What a reader hears who does not see the chart.
    variant : str
        Further class of the element.
    """
    body = "".join(map(_shape, drawing.shapes))
    return (
        f'<svg class="chart {variant}" viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}" '
        f'width="{_n(drawing.width)}" height="{_n(drawing.height)}" '
        f'role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escaped(title)}</title><desc id="{key}-d">{sentence(description)}'
        f"</desc>{body}</svg>"
    )


def _shape(shape: Shape) -> str:
    if isinstance(shape, Rect):
        radius = f' rx="{_n(shape.radius)}"' if shape.radius else ""
        tip = f"<title>{escaped(shape.tip)}</title>" if shape.tip else ""
        return (
            f'<rect class="f {shape.paint}" x="{_n(shape.x)}" y="{_n(shape.y)}" '
            f'width="{_n(shape.width)}" height="{_n(shape.height)}"{radius}>{tip}</rect>'
        )
    if isinstance(shape, Line):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.points)
        dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
        width = f' stroke-width="{_n(shape.width)}"' if shape.width != 1 else ""
        return f'<polyline class="l {shape.paint}" points="{points}"{width}{dashes}/>'
    anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    size = f' font-size="{_n(shape.size)}"' if shape.size != FONT else ""
    bold = ' font-weight="600"' if shape.bold else ""
    return (
        f'<text class="f {shape.paint}" x="{_n(shape.x)}" y="{_n(shape.y)}"{anchor}{size}{bold}>'
        f"{escaped(shape.text)}</text>"
    )


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
