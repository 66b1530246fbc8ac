"""The page: sections into one HTML document that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from typing import Any

from ragged_format import __version__
from ragged_pipeline.reports import sections as first
from ragged_pipeline.reports import sections_training as then
from ragged_pipeline.reports.blocks import Block, Figure, Note, Section, Table, Tile
from ragged_pipeline.reports.escaping import escaped, sentence
from ragged_pipeline.reports.numerals import bytes_text, full
from ragged_pipeline.reports.palette import DARK, LIGHT, css_variables
from ragged_pipeline.reports.sections_data import data_section
from ragged_pipeline.reports.svg import svg

__all__ = ["MARK", "figures_of", "page", "sections_of"]

# By this a report is known again, and may be replaced by another.
MARK = '<meta name="generator" content="ragged report'
# Pixels of a chart over the whole width, over half of it, and on a phone.
WIDE, HALF = 800.0, 350.0


def sections_of(data: dict[str, Any]) -> list[Section]:
    """Return the sections of a report, in the order in which they are shown."""
    packed = [then.balance(data), then.forest(data)] if data["packing"] is not None else []
    return [
        first.lengths(data), first.sets(data), first.heads(data), first.padding(data),
        then.packing(data), *packed, then.staleness(data), then.rewards(data), data_section(data),
    ]  # fmt: skip


def figures_of(sections: Iterable[Section]) -> list[Figure]:
    """Return all figures of sections."""
    return [block for s in sections for block in s.blocks if isinstance(block, Figure)]


def page(data: dict[str, Any], sections: list[Section]) -> str:
    """Return the document.

    Parameters
    ----------
    data : dict
        Statistics with ``source``.
    sections : list of Section
        Made of them by :func:`sections_of`.
    """
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    source = data["source"]
    title = f"Report: {source['name']}"
    overview = Section("overview", "Overview", _overview(data))
    links = "".join(
        f'<li><a href="#{s.key}">{escaped(s.title)}</a></li>' for s in [overview, *sections]
    )
    facts = "".join(
        f"<div><dt>{escaped(label)}</dt><dd>{escaped(value)}</dd></div>"
        for label, value in _facts(source)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'{MARK} {__version__}">\n'
        # Nothing is loaded and no script runs, whatever a hostile name contains.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'sha256-{digest}'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<header class="top"><div><h1>{escaped(source["name"])}</h1>'
        f'<p>{escaped(_kind(source))}</p><dl class="facts">{facts}</dl></div></header>\n'
        f'<div class="frame">\n<nav aria-label="Sections"><ol>{links}</ol></nav>\n<main>\n'
        + "\n".join(map(_section, [overview, *sections]))
        + f"\n<footer>Written by ragged-format {escaped(__version__)}. Values are shown as they "
        "are; <code>ragged validate</code> checks them.</footer>\n</main>\n</div>\n"
        "</body>\n</html>\n"
    )


def _style() -> str:
    names = [role for role in LIGHT if role != "page"]
    roles = "".join(f".{role}{{color:var(--{role})}}" for role in names if role != "card")
    text = (files("ragged_pipeline.reports") / "page.css").read_text(encoding="utf-8")
    return (
        f":root{{{css_variables(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{css_variables(DARK)}}}}}"
        f"{roles}rect.card,text.card{{color:var(--card)}}\n" + text
    ).replace("\n", "")


def _kind(source: dict[str, Any]) -> str:
    what = {
        "sample": "one record per sample", "packed": "packed training rows",
    }[source["profile"]]  # fmt: skip
    return f"{source['kind'].capitalize()} of profile {source['profile']}: {what}."


def _facts(source: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [("format", source["format_version"]), ("vocabulary", full(source["vocab_size"]))]
    if (dataset := source["dataset"]) is not None:
        facts += [
            ("generation", full(dataset["generation"])), ("fingerprint", dataset["fingerprint"]),
        ]  # fmt: skip
    return facts + [(key, str(value)) for key, value in list(source["metadata"].items())[:8]]


def _overview(data: dict[str, Any]) -> list[Tile]:
    totals, source = data["totals"], data["source"]
    tiles = [
        Tile("records", full(totals["records"])),
        Tile("samples", full(totals["samples"])),
        Tile("tokens", full(totals["tokens"])),
        Tile("targets", full(totals["targets"])),
        Tile("in memory", bytes_text(totals["bytes"]), "uncompressed columns"),
    ]
    if (dataset := source["dataset"]) is not None:
        shards = first.plural(dataset["num_shards"], "shard")
        tiles.append(Tile("on disk", bytes_text(dataset["bytes"]), shards))
    for axis, count in totals["elements"].items():
        if axis not in {"record", "token", "target", "member"}:
            tiles.append(Tile(f"{axis} elements", full(count)))
    return tiles


def _section(section: Section) -> str:
    tiles = "".join(map(_tile, section.tiles))
    blocks = "".join(map(_block, _arranged(section.blocks)))
    return (
        f'<section id="{section.key}" aria-labelledby="{section.key}-h">'
        f'<h2 id="{section.key}-h">{escaped(section.title)}</h2>'
        + (f'<dl class="tiles">{tiles}</dl>' if tiles else "")
        + (f'<div class="cards">{blocks}</div>' if blocks else "")
        + "</section>"
    )


def _arranged(blocks: list[Block]) -> list[Block]:
    """Return the blocks, a figure that would stand beside an empty place made wide."""
    out: list[Block] = []
    beside = False
    for number, block in enumerate(blocks):
        half = isinstance(block, Figure) and not block.wide
        after = blocks[number + 1] if number + 1 < len(blocks) else None
        alone = not beside and not (isinstance(after, Figure) and not after.wide)
        if isinstance(block, Figure) and half and alone:
            block = replace(block, wide=True)
        beside = half and not alone and not beside
        out.append(block)
    return out


def _tile(tile: Tile) -> str:
    note = f'<dd class="small">{escaped(tile.note)}</dd>' if tile.note else ""
    return (
        f'<div class="tile"><dt>{escaped(tile.label)}</dt>'
        f'<dd class="value">{escaped(tile.value)}</dd>{note}</div>'
    )


def _block(block: Block) -> str:
    if isinstance(block, Note):
        return f'<p class="note">{sentence(block.text)}</p>'
    if isinstance(block, Table):
        return (
            f'<div class="card wide"><h3>{escaped(block.title)}</h3>'
            f'<p class="caption">{sentence(block.caption)}</p>'
            f"{_table(block.title, block.headers, block.rows, set(block.numbers))}</div>"
        )
    drawn = [("broad", WIDE), ("narrow", HALF)] if block.wide else [("broad", HALF)]
    charts = "".join(
        svg(
            block.draw(width), key=f"{block.key}-{variant}", title=block.title,
            description=block.caption, variant=variant,
        )
        for variant, width in drawn
    )  # fmt: skip
    table = _table(block.title, block.headers, block.rows, set(block.headers[1:]))
    return (
        f'<figure class="card{" wide" * block.wide}" id="figure-{block.key}">'
        f"<figcaption><h3>{escaped(block.title)}</h3>"
        f'<p class="caption">{sentence(block.caption)}</p></figcaption>'
        f'<div class="plot{" both" * block.wide}">{charts}</div>'
        f"<details><summary>Numbers</summary>{table}</details></figure>"
    )


def _table(
    title: str, headers: Iterable[str], rows: Iterable[Iterable[str]], numbers: set[str]
) -> str:
    names = list(headers)
    classes = [' class="n"' if name in numbers else "" for name in names]
    head = "".join(
        f'<th scope="col"{kind}>{escaped(name)}</th>'
        for name, kind in zip(names, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row"{kind}>{escaped(cell)}</th>' if number == 0
            else f"<td{kind}>{escaped(cell)}</td>"
            for number, (cell, kind) in enumerate(zip(row, classes, strict=True))
        )
        + "</tr>"
        for row in rows
    )  # fmt: skip
    # A region that scrolls can be reached by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(title)}: numbers">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
