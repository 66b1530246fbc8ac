"""The prefix forest of a packed row as a picture: depth to the right, branches downwards."""

from __future__ import annotations

from typing import Any

from ragged_pipeline.reports.charts import Scale
from ragged_pipeline.reports.drawing import Drawing, fitted, text_width
from ragged_pipeline.reports.numerals import full, short

__all__ = ["MOST_LINES", "forest_chart"]

MOST_LINES = 64
_SMALL = 11.0
_GAP = 2.0


def forest_chart(width: float, tree: dict[str, Any]) -> Drawing:
    """Return the forest: each node a box from its depth on, as high as the leaves below it.

    Parameters
    ----------
    width : float
        Pixels.
    tree : dict
        ``tree`` of the statistics.
    """
    nodes = tree["nodes"]
    depths, first, last, drawn = _placed(nodes)
    names: dict[int, list[str]] = {}
    for member in tree["members"]:
        names.setdefault(member["leaf"], []).append(str(member["sample_id"]))
    members = _members_below(nodes, names)
    parents = {node["parent"] for node in nodes}
    lines = max((last[node] for node in drawn), default=0)
    height = 22.0 if lines <= 24 else 15.0 if lines <= 40 else 11.0
    narrow = width < 500
    label = 0.0 if narrow or height < 15 else min(150.0, width * 0.2)
    longest = max((depths[n] + nodes[n]["length"] for n in drawn), default=1)
    x = Scale(0, max(longest, 1), 0, width - label)
    drawing = Drawing(width, lines * height + 42)
    for node in drawn:
        length = nodes[node]["length"]
        left, right = x(depths[node]), x(depths[node] + length)
        top, bottom = first[node] * height, last[node] * height
        share = members[node]
        paint, ink = ("series1", "on") if share > 1 else ("pale1", "ink")
        tip = (
            f"{full(length)} tokens from position {full(depths[node])}, in {full(share)} "
            f"member{'s' * (share != 1)}, {full(nodes[node]['targets'])} targets"
        )
        wide = max(right - left - _GAP / 2, 0.75)
        drawing.rect(left, top, wide, bottom - top - _GAP, paint, tip=tip, radius=2)
        note = f"{short(length)} \u00d7 {share}" if share > 1 else short(length)
        if height >= 15 and wide > text_width(note, _SMALL) + 6:
            middle = (top + bottom - _GAP) / 2 + 4
            drawing.text(left + 5, middle, note, paint=ink, size=_SMALL)
        if label and node in names and node not in parents:
            more = f" +{len(names[node]) - 1}" if len(names[node]) > 1 else ""
            room = label - 10 - text_width(more, _SMALL)
            text = fitted(names[node][0], room, _SMALL, tail=True) + more
            drawing.text(right + 6, bottom - _GAP - 5, text, size=_SMALL)
    foot = lines * height + 4
    drawing.line((0, foot), (width - label, foot), paint="line")
    for tick in x.ticks(4 if narrow else 8):
        drawing.line((x(tick), foot), (x(tick), foot + 4), paint="line")
        anchor = "start" if tick == 0 else "end" if x(tick) > width - 20 else "middle"
        drawing.text(x(tick), foot + 17, short(tick), anchor=anchor, size=_SMALL)
    middle = (width - label) / 2
    drawing.text(middle, foot + 33, "position, tokens", anchor="middle", size=_SMALL)
    return drawing


def _placed(
    nodes: list[dict[str, Any]],
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return depth, first and end line of each node, and the nodes within the lines drawn."""
    children: list[list[int]] = [[] for _ in nodes]
    depths: list[int] = []
    for node, data in enumerate(nodes):
        parent = data["parent"]
        depths.append(0 if parent < 0 else depths[parent] + nodes[parent]["length"])
        if parent >= 0:
            children[parent].append(node)
    sizes = [0] * len(nodes)
    for node in range(len(nodes) - 1, -1, -1):
        sizes[node] = sum(sizes[child] for child in children[node]) or 1
    first = [0] * len(nodes)
    line = 0
    for node, data in enumerate(nodes):
        if data["parent"] < 0:
            first[node] = line
            line += sizes[node]
        at = first[node]
        for child in children[node]:
            first[child] = at
            at += sizes[child]
    last = [min(a + size, MOST_LINES) for a, size in zip(first, sizes, strict=True)]
    return depths, first, last, [node for node in range(len(nodes)) if first[node] < MOST_LINES]


def _members_below(nodes: list[dict[str, Any]], names: dict[int, list[str]]) -> list[int]:
    out = [len(names.get(node, ())) for node in range(len(nodes))]
    for node in range(len(nodes) - 1, -1, -1):
        if nodes[node]["parent"] >= 0:
            out[nodes[node]["parent"]] += out[node]
    return out
