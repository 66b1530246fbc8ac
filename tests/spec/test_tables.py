"""Text, machine-readable files and code of the specification say the same, in both directions."""

import json
import re
import shutil
from pathlib import Path

import jsonschema
import pyarrow as pa
import pytest
from support.containers import digest_input, model_digest

import ragged_format as rf
from ragged_format import byte_source, errors, flatbuffer, messages, rules, writer
from ragged_format.codes import CODES
from ragged_format.manifest import Manifest
from ragged_format.profiles import ALTERNATIVES, REQUIRED, ROOT_AXES, STANDARD
from ragged_format.rules import FULL_RULES, TargetFlag
from ragged_format.schema import (
    FORMAT_VERSION,
    HEAD_KINDS,
    OWN_KEYS,
    PRIMITIVES,
    PROFILES,
    SUPPORTED_FEATURES,
    type_name,
)
from ragged_format.trailer import CHECKSUM_KEY, DIGEST_KEY, TRAILER_KEY, Tally
from ragged_server.http import codes
from ragged_server.store import commits
from ragged_server.store.commits import COMMIT_KEY
from spec.tables import columns as words
from spec.tables import digest_example
from spec.tables.codes import FAMILIES, WHY
from spec.tables.metadata import KEYS, LOG_PROB
from spec.tables.render import SECTIONS, fill, json_files, render, words_of
from spec.vectors.breaches import BREACHES

FOLDER = Path(__file__).parents[2] / "spec"
PAGES = sorted(FOLDER.glob("*.md"))
PREFIX = "ragged_format:"
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


def test_identity_is_as_specified():
    """The text of §4.6, written out."""
    counts = rf.Column("own_counts", "token", pa.uint8(), opens="own", head_kind="set")
    size = rf.Column("size", "record", pa.int32(), shape=(2,))
    schema = rf.sample_schema(vocab_size=7, columns=["reward", "ref_log_probs", counts, size])
    schema = schema.with_metadata({**schema.metadata, b"team:run": b"1"})
    mode = '{\\"mode\\":\\"processed\\",\\"normalizer\\":\\"support\\",\\"value\\":\\"log_prob\\"}'

    def column(name, kind, nullable="false", **metadata):
        keys = ",".join(f'"ragged_format:{k}":"{v}"' for k, v in sorted(metadata.items()))
        return f'{{"metadata":{{{keys}}},"name":"{name}","nullable":{nullable},"type":"{kind}"}}'

    columns = ",".join([
        column("sample_id", "string", axis="record"),
        column("reward", "float64", "true", axis="record"),
        column("input_ids", "int32", axis="token", fill="-1"),
        column("completion_mask", "uint8", axis="token", fill="0", mask="true", opens="target"),
        column("ref_log_probs", "float32", axis="target", fill="-30000.0", log_prob=mode),
        column("own_counts", "uint8", axis="token", fill="0", head_kind="set", opens="own"),
        column("size", "int32", axis="record", shape="[2]"),
    ])  # fmt: skip
    assert rf.parse_schema(schema).identity == (
        f'{{"columns":[{columns}],"profile":"sample","required_features":[],'
        '"root_axes":["token"],"vocab_size":7}'
    )


# Manifest and trailer


def some_manifest(tmp_path):
    schema = rf.sample_schema(vocab_size=7, columns=[])
    row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    with rf.Writer(tmp_path / "d", schema, lineage={"from": "x"}) as out:
        out.write(pa.RecordBatch.from_pylist([row], schema=schema))
    return json.loads((tmp_path / "d" / "manifest.json").read_text())


def test_manifest_schema_describes_what_writers_write(tmp_path):
    schema = load("manifest.schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    manifest = some_manifest(tmp_path)
    jsonschema.validate(manifest, schema)
    assert set(manifest) == set(schema["required"]) == set(schema["properties"])
    shard = schema["properties"]["shards"]["items"]
    assert set(manifest["shards"][0]) == set(shard["required"]) == set(shard["properties"])
    vector = FOLDER / "vectors/v0/valid/dataset-two-shards/manifest.json"
    jsonschema.validate(json.loads(vector.read_text()), schema)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generation", 0), ("profile", "dialog"), ("vocab_size", "7"), ("identity", "X"),
        ("format_version", "1"), ("shards", {}), ("lineage", []), ("checksum", None),
    ],
)  # fmt: skip
def test_manifest_schema_refuses_what_it_must(tmp_path, key, value):
    manifest = {**some_manifest(tmp_path), key: value}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, load("manifest.schema.json"))
    with pytest.raises(rf.RaggedError):
        Manifest.from_json(json.dumps(manifest).encode())


def test_manifest_table_names_its_keys(tmp_path):
    table = next(t for t in tables("05-containers.md", "## 5.4") if "value" in t[0])
    named = {key for row in table for key in re.findall(r"`(\w+)`", row["key"])}
    assert named == set(some_manifest(tmp_path))


def test_trailer_schema_describes_what_writers_write():
    tally = Tally()
    tally.add(bytes(16), 3, {})
    trailer = json.loads(tally.trailer("0" * 32).to_metadata()[TRAILER_KEY])
    schema = load("trailer.schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(trailer, schema)
    assert set(trailer) == set(schema["required"]) == set(schema["properties"])


# Digests, limits, versions, links


def test_digest_example_is_right():
    data = b"".join(piece for _, piece in digest_example.parts())
    batch = digest_example.batch()
    rf.validate(batch)
    assert data == digest_input(batch)
    assert rf.digest(batch).hex() == model_digest(batch).hex() == digest_example.result()
    text = (FOLDER / "06-digests.md").read_text(encoding="utf-8")
    assert f"{len(data)} bytes; xxh3-128: `{digest_example.result()}`" in text
    (table,) = [t for t in tables("06-digests.md", "### Worked") if "bytes" in t[0]]
    shown = b""
    for row in table:
        assert int(row["offset"], 16) == len(shown)
        shown += bytes.fromhex(row["bytes"].strip("`")) if row["bytes"] != "(nothing)" else b""
    assert shown == data


def test_records_of_the_digest_example_are_shown():
    text = (FOLDER / "06-digests.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert [json.loads(line) for line in block.splitlines()] == digest_example.RECORDS


def test_limits_are_those_of_the_code():
    (table,) = [t for t in tables("09-security.md") if "default limit" in t[0]]
    limits = {row["what"]: row["default limit"] for row in table}
    assert limits == {
        "metadata of one message": f"{flatbuffer.MAX_METADATA_BYTES >> 20} MiB",
        "one message, also as decompressed": f"{messages.MAX_MESSAGE_BYTES >> 30} GiB",
        "window of a zstd frame": f"{byte_source._MAX_WINDOW >> 20} MiB",
        "a whole stream, as decompressed": "none; services MUST set one",
    }
    text = (FOLDER / "05-containers.md").read_text(encoding="utf-8")
    assert f"about {writer.BATCH_ROWS:,} records or {writer.BATCH_BYTES >> 20} MiB" in text
    assert f"({writer.GRACE_S / 3600:.0f} hours by default)" in text


def test_version_is_that_of_the_code():
    version = ".".join(map(str, FORMAT_VERSION))
    assert f"| version | {version} |" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"## {version} (draft)" in (FOLDER / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in ("columns.json", "codes.json", "metadata.json"):
        assert load(name)["format_version"] == version
    # The versioning page and the metadata table say so.
    assert not SUPPORTED_FEATURES


def anchors(path):
    text = path.read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@page
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


@page
def test_sections_that_pages_refer_to_exist(path):
    numbers = set()
    for other in PAGES:
        numbers |= set(re.findall(r"^#+ (\d+(?:\.\d+)?)\b", other.read_text("utf-8"), re.MULTILINE))
    for number in re.findall(r"(?<!RFC \d{4} )§(\d+(?:\.\d+)?)", path.read_text(encoding="utf-8")):
        assert number in numbers, number


@page
def test_one_word_per_thing(path):
    """Synonyms stand in the table of terms only."""
    if path.name == "01-terminology.md":
        return
    text = path.read_text(encoding="utf-8").lower()
    for synonym in (
        "sampling mask",
        "top-k table",
        "candidate mask",
        "row group",
        "shuffle buffer",
    ):
        assert synonym not in text, synonym
