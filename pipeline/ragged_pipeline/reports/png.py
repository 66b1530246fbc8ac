"""Drawings as PNG, by matplotlib's rasteriser; nothing of its plotting is used."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

from ragged_format.errors import MissingDependencyError
from ragged_pipeline.reports.drawing import Drawing, Line, Rect, Text
from ragged_pipeline.reports.palette import LIGHT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Painter"]

_DPI = 100
# Pixels of the picture per pixel of the drawing.
_SCALE = 2
_MARGIN = 16.0
_TITLE = 26.0
_ANCHORS: dict[str, Literal["left", "center", "right"]] = {
    "start": "left", "middle": "center", "end": "right",
}  # fmt: skip


class Painter:
    """Paints drawings into files.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed (``RF-D001``).
    """

    def __init__(self) -> None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.lines import Line2D
            from matplotlib.patches import Rectangle
        except ModuleNotFoundError as err:
            raise MissingDependencyError(
                "PNG files are painted by matplotlib, which is not installed",
                expected="module 'matplotlib'", got="nothing",
                remedy="pip install 'ragged-format[report]', or leave the PNG files out",
            ) from err  # fmt: skip
        self._canvas, self._figure = FigureCanvasAgg, Figure
        self._line, self._rectangle = Line2D, Rectangle

    def paint(
        self, drawing: Drawing, path: Path, *, title: str, palette: dict[str, str] = LIGHT
    ) -> None:
        """Write a drawing, with its title above it, to a PNG file."""
        width, height = drawing.width + 2 * _MARGIN, drawing.height + 2 * _MARGIN + _TITLE
        figure = self._figure(
            figsize=(width / _DPI, height / _DPI), dpi=_DPI * _SCALE, facecolor=palette["card"]
        )
        canvas = self._canvas(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(-_MARGIN, drawing.width + _MARGIN)
        axes.set_ylim(drawing.height + _MARGIN, -_MARGIN - _TITLE)
        heading = Text(0, -_TITLE / 2, title, "ink", size=15, bold=True)
        for order, shape in enumerate([heading, *drawing.shapes]):
            artist = self._artist(shape, palette)
            artist.set_zorder(order)
            axes.add_artist(artist)
        with warnings.catch_warnings():
            # Ids may have letters that the font lacks; they are painted as boxes.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            canvas.print_png(path, metadata={"Title": title})  # type: ignore[no-untyped-call]

    def _artist(self, shape: Rect | Line | Text, palette: dict[str, str]) -> Any:
        color = palette[shape.paint]
        if isinstance(shape, Rect):
            return self._rectangle(
                (shape.x, shape.y), shape.width, shape.height, facecolor=color, linewidth=0
            )
        if isinstance(shape, Line):
            xs, ys = zip(*shape.points, strict=True)
            return self._line(
                xs, ys, color=color, linewidth=_points(shape.width), solid_capstyle="butt",
                linestyle=(0, (4, 3)) if shape.dashed else "-",
            )  # fmt: skip
        from matplotlib.text import Text as Label

        return Label(
            shape.x, shape.y, shape.text, color=color, fontsize=_points(shape.size),
            horizontalalignment=_ANCHORS[shape.anchor],
            verticalalignment="baseline", fontweight="bold" if shape.bold else "normal",
            parse_math=False, fontfamily="DejaVu Sans",
        )  # fmt: skip


def _points(pixels: float) -> float:
    return pixels * 72 / _DPI
