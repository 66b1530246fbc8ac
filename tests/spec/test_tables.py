"""Tables, machine-readable files and code of the specification say the same, in both directions."""

import json
import re
import shutil

import pyarrow as pa
import pytest
from support.spec_pages import FOLDER, PAGES, load, page, tables

import ragged_format as rf
from ragged_format import errors, rules
from ragged_format.codes import CODES
from ragged_format.profiles import ALTERNATIVES, REQUIRED, ROOT_AXES, STANDARD
from ragged_format.rules import FULL_RULES, TargetFlag
from ragged_format.schema import (
    HEAD_KINDS,
    OWN_KEYS,
    PRIMITIVES,
    PROFILES,
    type_name,
)
from ragged_format.trailer import CHECKSUM_KEY, DIGEST_KEY, TRAILER_KEY
from ragged_server.http import codes
from ragged_server.store import commits
from ragged_server.store.commits import COMMIT_KEY
from spec.tables import columns as words
from spec.tables.codes import FAMILIES, WHY
from spec.tables.metadata import KEYS, LOG_PROB
from spec.tables.render import SECTIONS, fill, json_files, render, words_of
from spec.vectors.breaches import BREACHES

PREFIX = "ragged_format:"


# Generation


def test_rendering_is_deterministic_and_current(tmp_path):
    copy = tmp_path / "spec"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("vectors", "schema", "__pycache__"))
    for number in range(2):
        render(copy)
        for path in [*copy.glob("*.md"), *copy.glob("schema/*.json")]:
            kept = FOLDER / path.relative_to(copy)
            assert path.read_bytes() == kept.read_bytes(), (number, path.name)
    assert {p.name for p in (FOLDER / "schema").iterdir()} == set(json_files())


def test_every_generated_part_is_on_a_page_once():
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert sorted(re.findall(r"<!-- generated: ([a-z-]+) -->", text)) == sorted(SECTIONS)
    assert fill(text) == text


# Columns


@pytest.mark.parametrize("profile", PROFILES)
def test_columns_json_is_the_code(profile):
    stated = load("columns.json")["profiles"][profile]
    assert stated["root_axes"] == list(ROOT_AXES[profile])
    assert [c["name"] for c in stated["columns"]] == list(STANDARD[profile])
    for entry in stated["columns"]:
        column = STANDARD[profile][entry["name"]]
        mode = None if column.log_prob is None else column.log_prob.to_json()
        assert entry["axis"] == column.axis
        assert entry["type"] == type_name(column.type)
        kinds = {type_name(kind) for kind in ALTERNATIVES.get(column.name, ())}
        assert set(entry["alternative_types"]) == kinds
        assert entry["required"] == (column.name in REQUIRED[profile])
        assert (entry["nullable"], entry["opens"], entry["mask"]) == (
            column.nullable, column.opens, column.mask,
        )  # fmt: skip
        assert (entry["head_kind"], entry["log_prob"]) == (column.head_kind, mode)
        assert entry["fill"] == (None if column.axis == "record" else column.fill)
    parsed = rf.parse_schema(
        rf.sample_schema(vocab_size=1) if profile == "sample" else rf.packed_schema(vocab_size=1)
    )
    for axis in stated["axes"]:
        assert vars_of(parsed.axes[axis["name"]]) == axis
    assert [axis["name"] for axis in stated["axes"]] == list(parsed.axes)


def vars_of(axis):
    return {"name": axis.name, "parent": axis.parent, "counts": axis.counts, "mask": axis.mask}


@pytest.mark.parametrize("profile", PROFILES)
def test_column_tables_are_the_json(profile):
    stated = {c["name"]: c for c in load("columns.json")["profiles"][profile]["columns"]}
    heading = f"Profile `{profile}`"
    found = {}
    for table in tables("02-schema.md", heading):
        if "Arrow type" not in table[0] or "fill" not in table[0]:
            continue
        rows = {row["name"].strip("`"): row for row in table}
        if set(rows) <= set(stated) and not set(rows) & set(found):
            found.update(rows)
        if len(found) == len(stated):
            break
    assert set(found) == set(stated)
    for name, row in found.items():
        entry = stated[name]
        kinds = " or ".join([entry["type"], *entry["alternative_types"]])
        lists = f"large_list<{kinds}>" if entry["axis"] != "record" else kinds
        assert row["Arrow type"] == f"`{lists}`"
        assert row["null"] == ("yes" if entry["nullable"] else "no")
        assert row["fill"] == ("" if entry["fill"] is None else str(entry["fill"]))
        assert ("**required**" in row["meaning, unit"]) == entry["required"]
        opens = re.findall(r"opens `(\w+)`", row["meaning, unit"])
        assert opens == ([entry["opens"]] if entry["opens"] else [])
        kind = re.findall(r"head kind `(\w+)`", row["meaning, unit"])
        assert kind == ([entry["head_kind"]] if entry["head_kind"] else [])
        assert [code for code in row["codes"].split(", ") if code] == entry["codes"]


def test_words_are_of_the_standard_columns():
    assert set(words.SAMPLE) == set(STANDARD["sample"])
    structure = [n for n in STANDARD["packed"] if not n.startswith("member_")]
    assert set(words.PACKED) <= set(STANDARD["packed"])
    assert set(structure) <= set(words.PACKED) | set(words.SAMPLE)


def test_codes_of_columns_are_those_that_breaches_show():
    for breach in BREACHES:
        profile = rf.parse_schema(breach.schema).profile
        if breach.column in STANDARD[profile] and breach.code >= "RF-I006":
            assert breach.code in words_of(profile, breach.column)[1], breach.stem
    for profile in PROFILES:
        for name in STANDARD[profile]:
            assert set(words_of(profile, name)[1]) <= set(CODES)


def test_flags():
    constants = {name.lower(): value for name, value in vars(TargetFlag).items() if name.isupper()}
    assert {name: 1 << bit for bit, name, _, _ in words.FLAGS} == constants
    (table,) = [t for t in tables("02-schema.md") if "bit" in t[0]]
    assert {row["name"].strip("`"): 1 << int(row["bit"]) for row in table} == constants
    for row in table:
        for absent in row["then holds"].split(", "):
            name, value = absent.split()
            assert STANDARD["sample"][name].axis == "target"
            assert float(value) == 0
        named = {part.split()[0] for part in row["then holds"].split(", ")}
        bit = 1 << int(row["bit"])
        assert named == {name for name, mask in rules._ABSENT.items() if mask & bit}


def test_value_types_and_head_kinds():
    text = (FOLDER / "02-schema.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"T is one of (.*?) \(RF-S004\)", text, re.DOTALL)
    names = re.findall(r"`(\w+)`", listed)
    assert names == [type_name(kind) for kind in PRIMITIVES.values()]
    (table,) = [t for t in tables("02-schema.md") if "head kind" in t[0]]
    assert [row["head kind"].strip("`") for row in table] == list(HEAD_KINDS)


# Codes


def test_codes_json_is_the_code():
    stated = {entry["code"]: entry for entry in load("codes.json")["codes"]}
    assert list(stated) == list(CODES)
    rules = {rule.code: rule for rule in FULL_RULES}
    for code, entry in CODES.items():
        got = stated[code]
        assert (got["error"], got["rule"], got["level"]) == (entry.error, entry.rule, entry.level)
        assert tuple(got["after"]) == (rules[code].after if code in rules else ())
        assert got["profile"] == (rules[code].profile if code in rules else None)
        for vector in got["vectors"]:
            facts = json.loads((FOLDER / "vectors/v0/invalid" / f"{vector}.json").read_text())
            assert facts["code"] == code
        assert bool(got["vectors"]) != bool(got["no_vector"])


def test_code_tables_are_the_json():
    stated = {entry["code"]: entry for entry in load("codes.json")["codes"]}
    found = {}
    for table in tables("03-invariants.md"):
        for row in table:
            if "statement" in row:
                assert row["code"] not in found
                found[row["code"]] = row
    assert set(found) == set(stated)
    for code, row in found.items():
        entry = stated[code]
        assert row["statement"].replace("\\<", "<") == entry["rule"]
        assert row["error class"] == f"`{entry['error']}`"
        assert row["why"] == (entry["why"] or "")
        if code.startswith("RF-I"):
            assert row["level"] == entry["level"]
            assert [c for c in row["needs"].split(", ") if c] == entry["after"]
        names = [f"{code}-{name}" for name in re.findall(r"`([\w-]+)`", row["vectors"])]
        assert names == entry["vectors"]


def test_vectors_and_codes_name_each_other():
    listed = {v for entry in load("codes.json")["codes"] for v in entry["vectors"]}
    assert listed == {p.stem for p in (FOLDER / "vectors/v0/invalid").glob("*.json")}


def test_every_code_that_data_can_break_says_why():
    families = {prefix for prefix, _, _ in FAMILIES}
    assert {code[:4] for code in CODES} == families
    data = {code for code in CODES if code[:4] in {"RF-S", "RF-V", "RF-I", "RF-C", "RF-L"}}
    assert set(WHY) == data


def test_codes_belong_to_their_error_classes():
    defaults = {}
    for name in errors.__all__:
        kind = getattr(errors, name)
        if (
            isinstance(kind, type)
            and issubclass(kind, rf.RaggedError)
            and kind is not rf.RaggedError
        ):
            defaults[kind.code] = kind
            assert kind.code in CODES
    for entry in CODES.values():
        assert issubclass(getattr(errors, entry.error), rf.RaggedError)


@page
def test_pages_name_codes_that_exist(path):
    named = set(re.findall(r"RF-[A-Z]\d+", path.read_text(encoding="utf-8")))
    # Codes of the HTTP interface have a table of their own, in 08-http.md.
    assert named <= {*CODES, *codes.CODES}


def test_code_of_the_library_names_codes_that_exist():
    for path in (FOLDER.parent / "ragged_format").rglob("*.py"):
        named = set(re.findall(r"RF-[A-Z]\d+", path.read_text(encoding="utf-8")))
        assert named <= {*CODES, "RF-E000"}, path.name


# Metadata


def maximal_columns():
    return [
        rf.Column("a_counts", "token", pa.int32(), opens="a", head_kind="draws", share_key=True),
        rf.Column("a_mask", "token", pa.int8(), opens="b", mask=True, media=True),
        rf.Column(
            "a_log_probs", "a", pa.float32(), approximate=True,
            log_prob=rf.LogProb(temperature=0.5),
        ),
        rf.Column("tensor", "token", pa.float32(), shape=(2, 3)),
    ]  # fmt: skip


def keys_of(place):
    return {PREFIX + key.name for key in KEYS if key.place == place}


def test_metadata_keys_are_those_of_the_code():
    assert keys_of("schema") == set(OWN_KEYS)
    schema = rf.sample_schema(vocab_size=1, columns=maximal_columns())
    assert keys_of("schema") == {key.decode() for key in schema.metadata}
    written = {key.decode() for field in schema for key in field.metadata}
    assert keys_of("field") == written
    assert keys_of("batch") == {DIGEST_KEY.decode()}
    assert keys_of("trailer") == {TRAILER_KEY.decode(), CHECKSUM_KEY.decode()}
    assert keys_of("commit") == {COMMIT_KEY.decode(), commits.CHECKSUM_KEY.decode()}
    assert {row[0] for row in LOG_PROB} == set(rf.LogProb(temperature=0.5).to_json())
    for name, values, default, _ in LOG_PROB:
        if name in rf.LogProb.CHOICES:
            assert re.findall(r"`(\w+)`", values) == sorted(
                rf.LogProb.CHOICES[name], key=values.index
            )
            assert default == f"`{getattr(rf.LogProb(), name)}`"


@pytest.mark.parametrize("key", sorted(key.name for key in KEYS if key.place == "field"))
def test_every_field_key_is_read(key):
    """A value that no key allows is refused, so that no key of the table is ignored."""
    schema = rf.sample_schema(vocab_size=1, columns=maximal_columns())
    name = {
        "log_prob": "a_log_probs", "shape": "tensor", "fill": "tensor", "head_kind": "a_counts"
    }.get(key, "a_mask")  # fmt: skip
    index = schema.get_field_index(name)
    field = schema.field(index)
    bad = "record" if key == "opens" else "?"
    metadata = {**field.metadata, (PREFIX + key).encode(): bad.encode()}
    with pytest.raises(rf.SchemaMismatchError):
        rf.parse_schema(schema.set(index, field.with_metadata(metadata)))


@pytest.mark.parametrize("key", ["version", "profile", "vocab_size", "root_axes"])
def test_required_schema_keys_are_required(key):
    schema = rf.sample_schema(vocab_size=1)
    metadata = {k: v for k, v in schema.metadata.items() if k != (PREFIX + key).encode()}
    with pytest.raises(rf.NotRaggedError):
        rf.parse_schema(schema.with_metadata(metadata))
    (entry,) = [k for k in KEYS if (k.name, k.place) == (key, "schema")]
    assert entry.required == "yes"


def test_metadata_tables_are_the_json():
    stated = load("metadata.json")
    assert stated["namespace"] == PREFIX
    found = {}
    for table in tables("04-metadata.md"):
        for row in table:
            if "required" in row:
                found[row["key"].strip("`")] = row
    assert set(found) == {entry["key"] for entry in stated["keys"]}
    for entry in stated["keys"]:
        row = found[entry["key"]]
        assert row["type"] == entry["type"]
        assert row["required"] == entry["required"]
        assert row["identity"] == ("yes" if entry["identity"] else "no")
        assert row["meaning"] == entry["meaning"]
