"""Containers, digests and canonical JSON as the pages word them, read without this library."""

import base64
import io
import json
import math
import re
import struct
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.containers import model_digest, model_schema_digest

import ragged_format as rf
from ragged_format.digest import canonical_json

FOLDER = Path(__file__).parents[2] / "spec" / "vectors" / "v0" / "valid"
STREAMS = sorted([*FOLDER.glob("*.arrows"), *FOLDER.glob("*.zst")])
HOT = [*FOLDER.glob("*.arrow"), *FOLDER.glob("*/shard-*-0000[01].arrow")]
FILES = sorted(path for path in HOT if b"compact_version" not in path.read_bytes())
PREFIX = b"ragged_format:"
MARK = bytes.fromhex("ffffffff00000000")


def xxh(data):
    return xxhash.xxh3_128(data).hexdigest()


def as_canonical(value):
    """Return canonical JSON by the words of §4.5."""
    if isinstance(value, dict):
        items = [f"{as_canonical(k)}:{as_canonical(value[k])}" for k in sorted(value)]
        return "{" + ",".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_canonical, value)) + "]"
    if isinstance(value, str):
        short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f",
                 "\r": "\\r"}  # fmt: skip
        out = (short.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value)
        return '"' + "".join(out) + '"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, int) else as_number(value)


def as_number(number):
    """Return a float by the words of §4.5: the fewest digits that read back."""
    sign = "-" if math.copysign(1, number) < 0 else ""
    number = abs(number)
    if number == 0:
        return f"{sign}0.0"
    text = next(t for n in range(17) if float(t := f"{number:.{n}e}") == number)
    mantissa, exponent = text.split("e")
    digits, exponent = mantissa.replace(".", ""), int(exponent)
    if -4 <= exponent < 16:
        if exponent < 0:
            return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
        digits = digits.ljust(exponent + 1, "0")
        return f"{sign}{digits[: exponent + 1]}.{digits[exponent + 1 :] or '0'}"
    point = f".{digits[1:]}" if digits[1:] else ""
    return f"{sign}{digits[0]}{point}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json(value):
    assert canonical_json(value).decode() == as_canonical(value)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (-30000.0, "-30000.0"), (1e-5, "1e-05"), (1.5e16, "1.5e+16"), (1e15, "1000000000000000.0"),
        (1e-4, "0.0001"), (0.7, "0.7"), (-0.0, "-0.0"), (5e-324, "5e-324"), (1e300, "1e+300"),
    ],
)  # fmt: skip
def test_numbers_of_canonical_json(number, text):
    assert canonical_json(number).decode() == as_number(number) == text


def messages(data):
    """Yield (metadata, batch) of a stream or file as plain Arrow reads it."""
    if data.startswith(b"ARROW1"):
        with pa.ipc.open_file(data) as reader:
            for number in range(reader.num_record_batches):
                batch, metadata = reader.get_batch_with_custom_metadata(number)
                yield dict(metadata or {}), batch
        return
    with pa.ipc.open_stream(data) as reader:
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            yield dict(metadata or {}), batch


def content(path):
    data = path.read_bytes()
    if path.suffix == ".zst":
        assert data.startswith(bytes.fromhex("28b52ffd"))
        reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
        return reader.read()
    return data


def running_digest(batches):
    """Return the running digest by §6.2."""
    out = b""
    for metadata, batch in batches:
        out += model_digest(batch)
        others = {key: value for key, value in metadata.items() if key != PREFIX + b"digest"}
        out += struct.pack("<I", len(others))
        for key in sorted(others):
            for text in (key, others[key]):
                out += struct.pack("<I", len(text)) + text
    return xxh(out)


@pytest.mark.parametrize("path", STREAMS + FILES, ids=lambda path: path.name)
def test_container_is_as_specified(path):
    data = content(path)
    *batches, (last, trailer_batch) = messages(data)
    for metadata, batch in batches:
        assert metadata[PREFIX + b"digest"] == model_digest(batch).hex().encode()
    assert trailer_batch.num_rows == 0
    assert set(last) == {PREFIX + b"trailer", PREFIX + b"trailer_checksum"}
    text = last[PREFIX + b"trailer"]
    assert last[PREFIX + b"trailer_checksum"].decode() == xxh(text)
    stated = json.loads(text)
    assert text.decode() == as_canonical(stated)
    rows = [batch.num_rows for _, batch in batches]
    assert stated == {
        "batches": len(batches), "rows": sum(rows), "rows_per_batch": rows, "version": "0.1",
        "digest": running_digest(batches),
        "schema_digest": model_schema_digest(trailer_batch.schema).hex(),
    }  # fmt: skip


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name)
def test_stream_framing_is_as_specified(path):
    data, at, kinds = content(path), 0, []
    while True:
        assert data[at : at + 4] == b"\xff" * 4
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if size == 0:
            assert data[at:] == MARK
            break
        assert size % 8 == 0
        message = pa.ipc.read_message(pa.py_buffer(data[at:]))
        kinds.append(message.type)
        assert message.metadata_version == pa.ipc.MetadataVersion.V5
        at += 8 + size + (message.body.size if message.body else 0)
    assert kinds[0] == "schema"
    assert set(kinds[1:]) == {"record batch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_layout_is_as_specified(path):
    data = path.read_bytes()
    assert data.startswith(b"ARROW1\0\0")
    assert data.endswith(b"ARROW1")
    size = int.from_bytes(data[-10:-6], "little", signed=True)
    footer = len(data) - 10 - size
    assert data[footer - 8 : footer] == MARK
    stream = data[8:footer]
    assert [b for _, b in messages(stream)] == [b for _, b in messages(data)]


def identity(parsed):
    """Return the identity by §4.6."""
    names = {"float": "float32", "double": "float64", "halffloat": "float16"}
    value = {
        "columns": [
            {"name": c.name, "nullable": c.nullable, "type": names.get(str(c.type), str(c.type)),
             "metadata": c.metadata()}
            for c in parsed
        ],
        "profile": parsed.profile, "required_features": list(parsed.required_features),
        "root_axes": list(parsed.root_axes), "vocab_size": parsed.vocab_size,
    }  # fmt: skip
    return as_canonical(value)


def test_manifest_is_as_specified(tmp_path):
    schema = rf.sample_schema(vocab_size=9, columns=["reward"])
    for name in "ab":
        row = {"sample_id": name, "input_ids": [1], "completion_mask": [0], "reward": 0.5}
        lineage = {"runs": {name: [1, 1.5, "é\n"]}}
        with rf.Writer(tmp_path, schema, mode="append", lineage=lineage) as writer:
            writer.write(pa.RecordBatch.from_pylist([row], schema=schema))
    for text in (
        (tmp_path / "manifest.json").read_bytes(),
        (FOLDER / "dataset-two-shards" / "manifest.json").read_bytes(),
    ):
        manifest = json.loads(text)
        checksum = manifest.pop("checksum")
        assert xxh(as_canonical(manifest).encode()) == checksum
        arrow = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(manifest["schema"])))
        parsed = rf.parse_schema(arrow)
        assert (manifest["profile"], manifest["vocab_size"]) == ("sample", parsed.vocab_size)
        assert manifest["identity"] == xxh(identity(parsed).encode())
        data = bytes.fromhex(manifest["identity"])
        for shard in manifest["shards"]:
            assert re.fullmatch(r"shard-[0-9a-f]{16}-\d+\.arrow", shard["name"])
            data += bytes.fromhex(shard["digest"]) + struct.pack("<Q", shard["rows"])
        assert manifest["fingerprint"] == xxh(data)
    for shard in json.loads((tmp_path / "manifest.json").read_bytes())["shards"]:
        file = (tmp_path / shard["name"]).read_bytes()
        *batches, _ = messages(file)
        assert shard["bytes"] == len(file)
        assert shard["rows"] == sum(batch.num_rows for _, batch in batches)
        assert shard["digest"] == running_digest(batches)


def test_a_stream_of_the_library_is_as_specified():
    schema = rf.sample_schema(vocab_size=9, columns=[])
    row = {"sample_id": "a", "input_ids": [1], "completion_mask": [0]}
    sink = io.BytesIO()
    rf.write_stream(sink, [pa.RecordBatch.from_pylist([row], schema=schema)])
    *batches, (last, _) = messages(sink.getvalue())
    stated = json.loads(last[PREFIX + b"trailer"])
    assert stated["digest"] == running_digest(batches)
    assert sink.getvalue().endswith(MARK)
