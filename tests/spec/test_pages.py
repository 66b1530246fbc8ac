"""What pages of the specification state beside their tables: identity, schemas, examples, links."""

import json
import re

import jsonschema
import pyarrow as pa
import pytest
from support.containers import digest_input, model_digest
from support.spec_pages import FOLDER, PAGES, load, page, tables

import ragged_format as rf
from ragged_format import byte_source, flatbuffer, messages, writer
from ragged_format.manifest import Manifest
from ragged_format.schema import (
    FORMAT_VERSION,
    SUPPORTED_FEATURES,
)
from ragged_format.trailer import TRAILER_KEY, Tally
from spec.tables import digest_example


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
