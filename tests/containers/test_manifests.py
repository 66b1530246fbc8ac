"""A manifest that is not exactly what a writer wrote is refused."""

import base64
import json
import struct
from contextlib import suppress

import pytest
import xxhash
from support.containers import small_batch, small_schema

import ragged_format as rf
from ragged_format.manifest import Manifest, Shard


@pytest.fixture
def path(tmp_path):
    with rf.Writer(tmp_path / "x", small_schema(), batch_rows=2, max_shard_bytes=1) as writer:
        writer.write(small_batch())
    return tmp_path / "x"


def load(path):
    return json.loads((path / "manifest.json").read_text())


def save(path, data, *, checksum=True):
    """Write a manifest, its checksum made right as the specification words it."""
    if checksum:
        data.pop("checksum", None)
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        data["checksum"] = xxhash.xxh3_128(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(data))


def test_the_text_is_as_specified(path):
    data = load(path)
    assert set(data) == {
        "checksum", "fingerprint", "format_version", "generation", "identity", "lineage",
        "profile", "schema", "shards", "vocab_size",
    }  # fmt: skip
    assert data["format_version"] == "0.1"
    assert data["generation"] == 1
    assert data["profile"] == "sample"
    assert data["vocab_size"] == 1000
    assert base64.b64decode(data["schema"]) == small_schema().serialize().to_pybytes()
    identity = rf.parse_schema(small_schema()).identity
    assert data["identity"] == xxhash.xxh3_128(identity.encode()).hexdigest()
    content = bytes.fromhex(data["identity"])
    for entry, name in zip(
        data["shards"], sorted(p.name for p in path.glob("*.arrow")), strict=True
    ):
        file = rf.read_file(path / name)
        assert entry == {
            "name": name, "rows": file.num_rows, "bytes": (path / name).stat().st_size,
            "digest": file.trailer.digest, "encoding": "hot",
        }  # fmt: skip
        content += bytes.fromhex(entry["digest"]) + struct.pack("<Q", entry["rows"])
    assert data["fingerprint"] == xxhash.xxh3_128(content).hexdigest()
    save(path, data)
    assert load(path)["checksum"] == data["checksum"]
    assert rf.Dataset(path).num_rows == 3


def test_any_flipped_byte_is_an_error_or_has_no_effect(path):
    data = bytearray((path / "manifest.json").read_bytes())
    expected = rf.Dataset(path).fingerprint
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        with suppress(rf.RaggedError):
            assert Manifest.from_json(bytes(data)).fingerprint == expected
        data[place] ^= 1 << place % 8


def test_any_cut_is_an_error(path):
    data = (path / "manifest.json").read_bytes()
    for size in range(len(data) - 1):
        with pytest.raises(rf.ManifestError, match="RF-C007"):
            Manifest.from_json(data[:size])
    (path / "manifest.json").write_bytes(data[:100])
    with pytest.raises(rf.ManifestError) as caught:
        rf.Dataset(path)
    assert caught.value.where.file == str(path / "manifest.json")


def test_a_changed_manifest_fails_its_checksum(path):
    data = load(path)
    data["lineage"] = {"a": 1}
    save(path, data, checksum=False)
    with pytest.raises(rf.ManifestError, match="does not match its checksum"):
        rf.Dataset(path)


def test_unknown_keys_are_ignored_and_covered(path):
    data = load(path)
    data["note"] = "é"
    save(path, data)
    assert rf.Dataset(path).num_rows == 3
    data["note"] = "e"
    save(path, data, checksum=False)
    with pytest.raises(rf.ManifestError):
        rf.Dataset(path)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"7", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"checksum": NaN}']
)
def test_other_text_is_malformed(path, text):
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(rf.ManifestError):
        rf.Dataset(path)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("format_version", "7.0", rf.UnsupportedVersionError),
        ("format_version", None, rf.ManifestError),
        ("format_version", "0.1.2", rf.ManifestError),
        ("generation", "1", rf.ManifestError),
        ("generation", True, rf.ManifestError),
        ("lineage", [], rf.ManifestError),
        ("generation", 0, rf.ManifestError),
        ("profile", "packed", rf.ManifestError),
        ("vocab_size", 7, rf.ManifestError),
        ("schema", "!", rf.ManifestError),
        ("schema", 7, rf.ManifestError),
        ("schema", "AAAA", rf.RaggedError),
        ("shards", 7, rf.ManifestError),
        ("shards", [7], rf.ManifestError),
        ("shards", [{}], rf.ManifestError),
        ("shards", [], rf.ManifestError),
        ("identity", "0" * 32, rf.ManifestError),
        ("fingerprint", "0" * 32, rf.ManifestError),
    ],
)
def test_wrong_values(path, key, value, error):
    data = load(path)
    data[key] = value
    save(path, data)
    with pytest.raises(error):
        rf.Dataset(path)


def test_the_version_is_compared_before_anything_else(path):
    """A later version may have another checksum, and other keys."""
    save(path, {"format_version": "1.0", "checksum": "another kind"}, checksum=False)
    with pytest.raises(rf.UnsupportedVersionError):
        rf.Dataset(path)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("name", "../x.arrow", rf.ManifestError),
        ("name", "/etc/x.arrow", rf.ManifestError),
        ("name", "x.txt", rf.ManifestError),
        ("name", 7, rf.ManifestError),
        ("name", "a\0.arrow", rf.ManifestError),
        ("name", "x" * 250 + ".arrow", rf.ManifestError),
        ("rows", -1, rf.ManifestError),
        ("rows", 2**70, rf.ManifestError),
        ("bytes", 2**63, rf.ManifestError),
        ("digest", " " + "0" * 32, rf.ManifestError),
        ("rows", 1.0, rf.ManifestError),
        ("rows", "2", rf.ManifestError),
        ("bytes", -1, rf.ManifestError),
        ("digest", "00", rf.ManifestError),
        ("digest", "x" * 32, rf.ManifestError),
        ("digest", None, rf.ManifestError),
        ("encoding", "other", rf.UnsupportedFeatureError),
    ],
)
def test_wrong_entries(path, key, value, error):
    data = load(path)
    data["shards"][0][key] = value
    save(path, data)
    with pytest.raises(error):
        rf.Dataset(path)


@pytest.mark.parametrize(
    ("key", "what"), [("rows", "number of records"), ("bytes", "size"), ("digest", "digest")]
)
def test_entries_that_do_not_fit_their_file(path, key, what):
    manifest = Manifest.from_json((path / "manifest.json").read_bytes())
    first, *others = manifest.shards
    entry = first.to_json() | {key: "0" * 32 if key == "digest" else getattr(first, key) + 1}
    changed = Manifest(manifest.known, (Shard.from_json(entry), *others), 1, {})
    (path / "manifest.json").write_bytes(changed.to_json())
    with pytest.raises(rf.BrokenShardError, match=what):
        rf.Dataset(path).take([0])


def test_a_newer_schema_is_refused(path):
    data = load(path)
    metadata = {**small_schema().metadata, b"ragged_format:required_features": b'["x"]'}
    message = small_schema().with_metadata(metadata).serialize().to_pybytes()
    data["schema"] = base64.b64encode(message).decode()
    save(path, data)
    with pytest.raises(rf.UnsupportedFeatureError) as caught:
        rf.Dataset(path)
    assert caught.value.where.file.endswith("manifest.json")


def test_lists_of_shards_in_another_order_are_another_dataset(path):
    manifest = Manifest.from_json((path / "manifest.json").read_bytes())
    turned = Manifest(manifest.known, manifest.shards[::-1], 1, {})
    assert turned.fingerprint != manifest.fingerprint
    assert turned.identity == manifest.identity
