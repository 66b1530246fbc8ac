"""Machine-readable files and the generated parts of the text, from the code.

``python spec/tables/render.py [FOLDER]`` rewrites ``schema/*.json`` and everything between
``<!-- generated: NAME -->`` and ``<!-- end -->`` in the pages of the specification.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ragged_format as rf
from ragged_format.codes import CODES
from ragged_format.lists import flat
from ragged_format.profiles import ALTERNATIVES, MEMBER_PREFIX, REQUIRED, ROOT_AXES, STANDARD
from ragged_format.rules import FULL_RULES
from ragged_format.schema import FORMAT_VERSION, RECORD, Column, Profile, RaggedSchema, type_name
from spec.tables import columns as words
from spec.tables import digest_example
from spec.tables.codes import FAMILIES, WHY, checked_by
from spec.tables.manifest import manifest_schema, trailer_schema
from spec.tables.metadata import KEYS, LOG_PROB
from spec.vectors.generate import UNSHOWN, vector_names

FOLDER = Path(__file__).parents[1]
VERSION = ".".join(map(str, FORMAT_VERSION))
PROFILES: tuple[Profile, ...] = ("sample", "packed")
_SYMBOLS = {"token": "L", "target": "M", "node": "S", "member": "N"}
_MARKED = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _all_columns(profile: Profile) -> RaggedSchema:
    return RaggedSchema(profile, 1, STANDARD[profile].values(), ROOT_AXES[profile])


def _alternatives(column: Column) -> list[str]:
    return [type_name(kind) for kind in ALTERNATIVES.get(column.name, ())]


def _arrow_type(column: Column, kind: str) -> str:
    return kind if column.axis == RECORD else f"large_list<{kind}>"


def words_of(profile: Profile, name: str) -> tuple[str, tuple[str, ...]]:
    """Return meaning and codes of a standard column."""
    if profile == "packed" and name in words.PACKED:
        return words.PACKED[name]
    if profile == "packed" and name.startswith(MEMBER_PREFIX):
        text, codes = words.SAMPLE[name.removeprefix(MEMBER_PREFIX)]
        # A sample may be packed more than once.
        return f"of the member: {text}", () if name == "member_sample_id" else codes
    return words.SAMPLE[name]


def columns_json() -> dict[str, Any]:
    """Return all standard columns of both profiles."""
    profiles = {}
    for profile in PROFILES:
        schema = _all_columns(profile)
        profiles[profile] = {
            "root_axes": list(ROOT_AXES[profile]),
            "axes": [
                {"name": a.name, "parent": a.parent, "counts": a.counts, "mask": a.mask}
                for a in schema.axes.values()
            ],
            "columns": [
                {
                    "name": c.name,
                    "axis": c.axis,
                    "type": type_name(c.type),
                    "alternative_types": _alternatives(c),
                    "arrow_type": _arrow_type(c, type_name(c.type)),
                    "required": c.name in REQUIRED[profile],
                    "nullable": c.nullable,
                    "fill": c.fill if c.axis != RECORD else None,
                    "opens": c.opens,
                    "mask": c.mask,
                    "head_kind": c.head_kind,
                    "log_prob": None if c.log_prob is None else c.log_prob.to_json(),
                    "codes": list(words_of(profile, c.name)[1]),
                }
                for c in schema
            ],
        }
    return {"format_version": VERSION, "profiles": profiles}


def codes_json() -> dict[str, Any]:
    """Return the catalogue of codes."""
    rules = {rule.code: rule for rule in FULL_RULES}
    vectors = vector_names()
    out = []
    for entry in CODES.values():
        rule = rules.get(entry.code)
        out.append(
            {
                "code": entry.code,
                "error": entry.error,
                "rule": entry.rule,
                "why": WHY.get(entry.code),
                "level": entry.level,
                "profile": rule.profile if rule else None,
                "after": list(rule.after) if rule else [],
                "checked_by": checked_by(entry.code),
                "vectors": vectors.get(entry.code, []),
                "no_vector": _no_vector(entry.code),
            }
        )
    return {"format_version": VERSION, "codes": out}


def _no_vector(code: str) -> str | None:
    return next((text for prefix, text in UNSHOWN.items() if code.startswith(prefix)), None)


def metadata_json() -> dict[str, Any]:
    """Return the catalogue of metadata keys."""
    return {
        "format_version": VERSION,
        "namespace": "ragged_format:",
        "keys": [
            {
                "key": f"ragged_format:{key.name}", "place": key.place, "type": key.type,
                "required": key.required, "identity": key.identity, "meaning": key.meaning,
            }
            for key in KEYS
        ],
        "log_prob": [
            {"key": key, "values": values, "default": default, "meaning": meaning}
            for key, values, default, meaning in LOG_PROB
        ],
    }  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _length(schema: RaggedSchema, axis: str) -> str:
    opened = schema.axes[axis]
    if opened.counts is None:
        return f"{_SYMBOLS[axis]}, given by each record"
    return f"Σ `{opened.counts}` of the record"


def _columns(profile: Profile) -> str:
    schema = _all_columns(profile)
    out = []
    for axis in (RECORD, *schema.axes):
        if not schema.on(axis):
            continue
        title = f"**Axis `{axis}`**"
        if axis != RECORD:
            opened = schema.axes[axis]
            parent = f", below `{opened.parent}`" if opened.parent != RECORD else ", a root axis"
            title += f"{parent}; length {_length(schema, axis)}"
        rows = []
        for c in schema.on(axis):
            meaning, codes = words_of(profile, c.name)
            kinds = [type_name(c.type), *_alternatives(c)]
            marks = [
                "**required**" if c.name in REQUIRED[profile] else "",
                f"opens `{c.opens}`" if c.opens else "",
                f"head kind `{c.head_kind}`" if c.head_kind else "",
            ]
            note = "; ".join(filter(None, [meaning, *marks]))
            rows.append([
                f"`{c.name}`", f"`{_arrow_type(c, ' or '.join(kinds))}`",
                ("yes" if c.nullable else "no"), note,
                "" if c.axis == RECORD or c.fill is None else f"{c.fill}", ", ".join(codes),
            ])  # fmt: skip
        head = ["name", "Arrow type", "null", "meaning, unit", "fill", "codes"]
        out.append(f"{title}\n\n{_table(head, rows)}")
    return "\n".join(out)


def _flags() -> str:
    head = ["bit", "name", "set where", "then holds"]
    return _table(head, [[str(bit), f"`{n}`", text, then] for bit, n, text, then in words.FLAGS])


def _codes(prefix: str, *, packed: bool = False) -> str:
    rows = []
    for entry in codes_json()["codes"]:
        code = entry["code"]
        if not code.startswith(prefix) or (entry["profile"] == "packed") != packed:
            continue
        vectors = ", ".join(f"`{name.removeprefix(code + '-')}`" for name in entry["vectors"])
        row = [code, entry["rule"].replace("<", "\\<"), entry["why"] or "", f"`{entry['error']}`"]
        if prefix == "RF-I":
            row += [entry["level"], ", ".join(entry["after"])]
        rows.append([*row, vectors or f"none: {entry['no_vector']}"])
    head = ["code", "statement", "why", "error class"]
    head += ["level", "needs"] if prefix == "RF-I" else []
    return _table([*head, "vectors"], rows)


def _families() -> str:
    names = {"RF-I": "see below"}
    return _table(
        ["prefix", "family", "who checks"],
        [[f"`{p}`", name, names.get(p, who)] for p, name, who in FAMILIES],
    )


def _keys(place: str) -> str:
    rows = [
        [f"`ragged_format:{k.name}`", k.type, k.required, "yes" if k.identity else "no", k.meaning]
        for k in KEYS
        if k.place == place
    ]
    return _table(["key", "type", "required", "identity", "meaning"], rows)


def _log_prob() -> str:
    head = ["key", "values", "default", "meaning"]
    return _table(head, [[f"`{key}`", *rest] for key, *rest in LOG_PROB])


def _digest() -> str:
    records = "\n".join(json.dumps(record, ensure_ascii=False) for record in digest_example.RECORDS)
    out = [f"```json\n{records}\n```\n\n"]
    rows, at = [], 0
    for label, data in digest_example.parts():
        for start in range(0, max(len(data), 1), 16):
            piece = data[start : start + 16]
            rows.append([f"{at + start:04x}", f"`{piece.hex(' ')}`" if piece else "(nothing)",
                         label if start == 0 else ""])  # fmt: skip
        at += len(data)
    out.append(_table(["offset", "bytes", "what"], rows))
    out.append(f"\n{at} bytes; xxh3-128: `{digest_example.result()}`\n")
    return "".join(out)


def _buffers() -> str:
    batch = digest_example.batch()
    rows = []
    for c in rf.parse_schema(batch.schema):
        offsets, values = "", batch.column(c.name).to_pylist()
        if c.axis != RECORD:
            values, ends = flat(batch.column(c.name))
            offsets, values = ", ".join(map(str, ends)), values.to_pylist()
        shown = json.dumps(values).removeprefix("[").removesuffix("]")
        rows.append([f"`{c.name}`", f"`{c.axis}`", offsets, shown])
    return _table(["column", "axis", "list offsets", "values"], rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "columns-sample": lambda: _columns("sample"),
    "columns-packed": lambda: _columns("packed"),
    "flags": _flags,
    "families": _families,
    **{f"codes-{p[-1].lower()}": (lambda p=p: _codes(p)) for p, _, _ in FAMILIES},  # type: ignore[misc]
    "codes-packed": lambda: _codes("RF-I", packed=True),
    "keys-schema": lambda: _keys("schema"),
    "keys-field": lambda: _keys("field"),
    "keys-batch": lambda: _keys("batch"),
    "keys-trailer": lambda: _keys("trailer"),
    "keys-commit": lambda: _keys("commit"),
    "log-prob": _log_prob,
    "buffers": _buffers,
    "digest-example": _digest,
}


def json_files() -> dict[str, Any]:
    """Return the content of ``schema/``, by file name."""
    return {
        "columns.json": columns_json(),
        "codes.json": codes_json(),
        "metadata.json": metadata_json(),
        "manifest.schema.json": manifest_schema(),
        "trailer.schema.json": trailer_schema(),
    }


def fill(text: str) -> str:
    """Return a page with its generated parts made anew."""
    return _MARKED.sub(lambda m: f"{m[1]}\n{SECTIONS[m[2]]()}\n{m[3]}", text)


def render(folder: Path) -> None:
    """Rewrite the machine-readable files and the pages in a copy of the specification."""
    (folder / "schema").mkdir(exist_ok=True)
    for name, data in json_files().items():
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        (folder / "schema" / name).write_text(text, encoding="utf-8")
    for page in sorted(folder.glob("*.md")):
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    render(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
