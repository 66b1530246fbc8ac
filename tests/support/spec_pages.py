"""Pages and machine-readable files of the specification."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "spec"
PAGES = sorted(FOLDER.glob("*.md"))
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def load(name):
    return json.loads((FOLDER / "schema" / name).read_text(encoding="utf-8"))


def tables(name, heading=""):
    """Return the tables of a page, from a heading on, as lists of rows: dicts by column title."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    text = text[text.index(heading) :]
    out = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [
            [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()
        ]
        head, _, *rows = lines
        out.append([dict(zip(head, row, strict=True)) for row in rows])
    return out
