"""Write the conformance vectors, deterministically; an argument names another folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

import ragged_format as rf
from ragged_format.codes import CODES
from ragged_format.digest import digest, schema_digest
from ragged_format.schema import RECORD, type_name
from spec.vectors.breaches import BREACHES, Breach
from spec.vectors.broken_containers import BrokenContainer, broken_containers, schema_stream
from spec.vectors.broken_schemas import broken_schemas
from spec.vectors.build import Tree, container
from spec.vectors.valid import Valid, valid_vectors

FOLDER = Path(__file__).parent / "v0"

# Codes of situations, not of data, by code or family: no vector can show them.
UNSHOWN = {
    "RF-C008": "says that nothing is at a place",
    "RF-C009": "says what a writer finds at its target",
    "RF-C010": "says what a place answers",
    "RF-L002": "is about an argument of a call",
    "RF-T": "is about a saved state or other processes",
    "RF-A": "is about data of other formats",
    "RF-P": "is about a request to pack",
    "RF-J": "is about a request or a process",
    "RF-D": "is about an installation",
}
# Breaches that become vectors besides the first of each code.
FURTHER = {
    "RF-I002-item", "RF-I003-member", "RF-I006-empty", "RF-I008-negative", "RF-I016-own",
    "RF-I017-approximate", "RF-I019-half", "RF-I021-nan", "RF-I022-temperature", "RF-I032-order",
    "RF-I039-last-token", "RF-I040-branch",
}  # fmt: skip


def chosen_breaches() -> list[Breach]:
    """Return the breaches that become vectors."""
    out, seen = [], set()
    for breach in BREACHES:
        if breach.code not in seen or breach.stem in FURTHER:
            out.append(breach)
        seen.add(breach.code)
    return out


def vector_names() -> dict[str, list[str]]:
    """Return the names of the invalid vectors of every code that has some."""
    stems = [(breach.code, breach.stem) for breach in chosen_breaches()]
    stems += [(broken.code, f"{broken.code}-{broken.name}") for broken in broken_schemas()]
    stems += [(fault.code, f"{fault.code}-{fault.name}") for fault in broken_containers()]
    out: dict[str, list[str]] = {}
    for code, stem in stems:
        out.setdefault(code, []).append(stem)
    return out


def write_vectors(folder: Path) -> None:
    """Replace `folder` by freshly generated vectors."""
    files: Tree = {}
    for vector in valid_vectors():
        suffix = "" if isinstance(vector.data, dict) else _suffix(vector.data)
        _add(files, f"valid/{vector.name}", suffix, vector.data, _valid_facts(vector))
    for breach in chosen_breaches():
        batch = breach.batch(breach.good, breach.bad)
        _add(files, f"invalid/{breach.stem}", ".arrows", container(breach.schema, [batch]), {
            "code": breach.code, "description": CODES[breach.code].rule,
            "verify": breach.code != "RF-I002",
            "where": {"batch": 0, "row": 1, "column": breach.column, "position": breach.position},
        })  # fmt: skip
    for broken in broken_schemas():
        data = schema_stream(broken.schema)
        _add(files, f"invalid/{broken.code}-{broken.name}", ".arrows", data, {
            "code": broken.code, "description": broken.description, "verify": True,
            "where": {"column": broken.column},
        })  # fmt: skip
    for fault in broken_containers():
        name = f"invalid/{fault.code}-{fault.name}"
        _add(files, name, fault.suffix, fault.data, _facts(fault))
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _suffix(data: bytes) -> str:
    if data.startswith(b"ARROW1"):
        return ".arrow"
    return ".arrows" if data.startswith(b"\xff") else ".arrows.zst"


def _facts(fault: BrokenContainer) -> dict[str, Any]:
    return {
        "code": fault.code, "description": fault.description, "verify": fault.verify,
        "where": dict(fault.where),
    }  # fmt: skip


def _valid_facts(vector: Valid) -> dict[str, Any]:
    parsed = rf.parse_schema(vector.schema)
    return {
        "description": vector.description,
        "profile": parsed.profile,
        "vocab_size": parsed.vocab_size,
        "columns": [[c.name, c.axis, type_name(c.type), list(c.shape)] for c in parsed],
        "schema_digest": schema_digest(vector.schema).hex(),
        "batches": [
            {"digest": digest(batch).hex(), "records": _records(batch)} for batch in vector.batches
        ],
        "metadata": [
            {key.decode(): value.hex() for key, value in metadata.items()}
            for metadata in vector.metadata
        ],
    }


def _records(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the records as JSON values; binary values in hexadecimal."""
    binary = {c.name: c.axis for c in rf.parse_schema(batch.schema) if c.type == pa.binary()}
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        for name, axis in binary.items():
            value = row[name]
            row[name] = _hex(value) if axis == RECORD else [_hex(item) for item in value]
    return rows


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _add(files: Tree, name: str, suffix: str, data: bytes | Tree, facts: Any) -> None:
    if isinstance(data, dict):
        files.update({f"{name}/{file}": content for file, content in data.items()})
    else:
        files[name + suffix] = data
    files[f"{name}.json"] = f"{_text(facts)}\n".encode()


def _text(value: Any, depth: int = 0) -> str:
    """Return JSON with one line per record, column and other small value."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if depth == 4 or len(flat) < 90 or not isinstance(value, dict | list):
        return flat
    indent = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
        return "{" + indent + f",{indent}".join(items) + indent[:-1] + "}"
    return "[" + indent + f",{indent}".join(_text(i, depth + 1) for i in value) + indent[:-1] + "]"


if __name__ == "__main__":
    write_vectors(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
