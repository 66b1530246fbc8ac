"""Streams, files and datasets with one fault each in their bytes."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ragged_format.digest import canonical_json, digest, text_digest
from ragged_format.known_schemas import known_schema
from ragged_format.manifest import MANIFEST_NAME
from ragged_format.trailer import TRAILER_KEY, Tally, batch_metadata
from spec.vectors.build import Tree, container, dataset, int64s, messages, shard
from spec.vectors.compact import Columns, Edit, Header, compact_file
from spec.vectors.valid import named, sample

SCHEMA = sample()


@dataclass(frozen=True)
class BrokenContainer:
    """Bytes that are refused with `code`: a stream, a file, or the files of a dataset.

    `verify` is false where the fault shows only to a reader that does not compare digests first.
    """

    code: str
    name: str
    description: str
    data: bytes | Tree
    suffix: str = ".arrows"
    verify: bool = True
    where: Mapping[str, Any] = field(default_factory=dict)


def _batch(*ids: str, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    rows = [{name: named(i)[name] for name in schema.names} for i in ids]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def _bad_offsets(last: int) -> bytes:
    """Return a stream of two records in which the offsets of input_ids end with `last`."""
    data = container(SCHEMA, [_batch("a", "b")])
    place = data.index(int64s(0, 4, 8)) + 16
    return data[:place] + int64s(last) + data[place + 8 :]


def _u32(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "little")


def _target(flatbuffer: bytes, table: int, field: int) -> int:
    """Return the place that an offset field of a table leads to."""
    vtable = table - int.from_bytes(flatbuffer[table : table + 4], "little", signed=True)
    slot = vtable + 4 + 2 * field
    place = table + int.from_bytes(flatbuffer[slot : slot + 2], "little")
    return place + _u32(flatbuffer, place)


def _big_endian(data: bytes) -> bytes:
    """Declare the data big-endian.

    Arrow leaves the default, little, out of the Schema table. A new Message and a new Schema table,
    which has the flag, go before the old flatbuffer; their offsets lead to its two vectors.
    """
    schema, *rest = messages(data)
    old = schema[8:]
    table = _target(old, _u32(old, 0), 2)
    fields, metadata = (56 + _target(old, table, number) for number in (1, 2))
    head = struct.pack(
        "<I 5H 2x iHBxI 5H 2x iH2xII",
        16,  # the Message table
        *(10, 12, 4, 6, 8),  # its vtable
        *(12, 4, 1, 16),  # to the vtable, version 5, a schema, the Schema table
        *(10, 16, 4, 8, 12),  # its vtable
        *(12, 1, fields - 48, metadata - 52),  # to the vtable, big-endian, the vectors
    )
    prefix = schema[:4] + (len(head) + len(old)).to_bytes(4, "little")
    return b"".join([prefix, head, old, *rest])


def _bomb() -> bytes:
    """Declare 2^40 bytes behind one compressed buffer of a few bytes."""
    row = {"sample_id": "a", "input_ids": [5] * 64, "completion_mask": [0] * 64}
    schema = sample()
    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    first, message, *rest = messages(container(schema, [batch], compression="zstd"))
    body = 8 + _u32(message, 4)
    # A compressed buffer begins with its uncompressed size: 64 int32 here.
    place = next(i for i in range(body, len(message), 8) if message[i : i + 8] == int64s(256))
    return b"".join([first, message[:place], int64s(2**40), message[place + 8 :], *rest])


def _trailer_with_rows() -> bytes:
    batch = _batch("a")
    sink, tally = io.BytesIO(), Tally()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch, custom_metadata=batch_metadata(digest(batch), {}))
        tally.add(digest(batch), 1, {})
        closing = tally.trailer(known_schema(SCHEMA).digest)
        writer.write_batch(_batch("b"), custom_metadata=closing.to_metadata())
    return sink.getvalue()


def _trailer_that_lies(**edits: Any) -> bytes:
    """State other facts in a trailer whose own checksum is right."""
    batch = _batch("a", "b")
    tally = Tally()
    tally.add(digest(batch), 2, {})
    stated = json.loads(tally.trailer(known_schema(SCHEMA).digest).to_metadata()[TRAILER_KEY])
    text = canonical_json({**stated, **edits})
    keys = {TRAILER_KEY: text, TRAILER_KEY + b"_checksum": text_digest(text).hex().encode()}
    return container(SCHEMA, [batch], trailer_edits=keys)


def _streams() -> list[BrokenContainer]:
    two = [_batch("a", "b"), _batch("c")]
    data = container(SCHEMA, two)
    parts = messages(data)
    token = (8).to_bytes(4, "little") + (9).to_bytes(4, "little")  # of the first record's tokens
    flip = data.index(token)
    flipped = data[:flip] + bytes([data[flip] ^ 1]) + data[flip + 1 :]
    key = data.rindex(b'"rows":3')
    return [
        BrokenContainer("RF-I001", "decreasing", "Offsets that fall.",
                        _bad_offsets(1), verify=False,
                        where={"batch": 0, "row": 1, "column": "input_ids"}),
        BrokenContainer("RF-I001", "beyond", "An offset behind the last value.",
                        _bad_offsets(9), verify=False,
                        where={"batch": 0, "row": 1, "column": "input_ids"}),
        BrokenContainer("RF-C001", "garbage", "A message that does not begin with its mark.",
                        parts[0] + b"\x00" * 64),
        BrokenContainer("RF-C001", "trailing", "Bytes behind the end-of-stream mark.",
                        data + b"\x00"),
        BrokenContainer("RF-C001", "trailer-rows", "A trailer that has a record.",
                        _trailer_with_rows()),
        BrokenContainer("RF-C002", "empty", "No bytes at all.", b""),
        BrokenContainer("RF-C002", "in-body", "Cut inside the body of a message.",
                        b"".join(parts[:2]) + parts[2][:-8], where={"batch": 1}),
        BrokenContainer("RF-C002", "in-metadata", "Cut inside the metadata of a message.",
                        b"".join(parts[:2]) + parts[2][:20], where={"batch": 1}),
        BrokenContainer("RF-C002", "between", "Cut exactly between two messages.",
                        b"".join(parts[:3]), where={"batch": 2}),
        BrokenContainer("RF-C002", "no-trailer", "The end-of-stream mark without a trailer.",
                        container(SCHEMA, two, trailer=False), where={"batch": 2}),
        BrokenContainer("RF-C003", "no-mark", "Everything but the end-of-stream mark.",
                        b"".join(parts[:-1])),
        BrokenContainer("RF-C004", "content", "One bit of a token id differs.", flipped,
                        where={"batch": 0}),
        BrokenContainer("RF-C004", "dropped", "A whole batch is missing.",
                        b"".join([parts[0], *parts[2:]])),
        BrokenContainer("RF-C004", "swapped", "Two batches have changed places.",
                        b"".join([parts[0], parts[2], parts[1], *parts[3:]])),
        BrokenContainer("RF-C004", "trailer", "The trailer does not match its checksum.",
                        data[:key] + b'"rows":4' + data[key + 8 :]),
        BrokenContainer("RF-C004", "other-schema", "The trailer states another schema.",
                        _trailer_that_lies(schema_digest="0" * 32)),
        BrokenContainer("RF-C001", "trailer-text", "A trailer whose numbers of records are text.",
                        _trailer_that_lies(rows_per_batch=["2"])),
        BrokenContainer("RF-V001", "trailer-major", "A trailer of a later major version.",
                        _trailer_that_lies(version="1.0")),
        BrokenContainer("RF-L001", "bomb", "A buffer that declares 2^40 bytes.", _bomb()),
        BrokenContainer("RF-V002", "big-endian", "Big-endian data.", _big_endian(data)),
    ]  # fmt: skip


def _files() -> list[BrokenContainer]:
    data = container(SCHEMA, [_batch("a", "b")], file=True)
    token = data.index((8).to_bytes(4, "little") + (9).to_bytes(4, "little"))
    bare = container(SCHEMA, [_batch("a", "b")], file=True, trailer=False)
    footer = int.from_bytes(data[-10:-6], "little")
    broken = data[: -10 - footer] + bytes(footer) + data[-10:]
    return [
        BrokenContainer("RF-C001", "footer", "A footer of zeros.", broken, ".arrow"),
        BrokenContainer("RF-C002", "file-cut", "A file without its footer.", data[:-footer],
                        ".arrow"),
        BrokenContainer("RF-C002", "file-no-trailer", "A file without a trailer.", bare, ".arrow"),
        BrokenContainer("RF-C004", "file-content", "One bit of a token id differs.",
                        data[:token] + bytes([data[token] ^ 1]) + data[token + 1 :], ".arrow",
                        where={"batch": 0}),
    ]  # fmt: skip


def _stated(name: str, place: int, value: Any) -> Edit:
    """Return an edit of what the header states of a block: its size, type, planes or transform."""

    def edit(header: Header, columns: Columns) -> None:
        del columns
        header["blocks"][name][place] = value

    return edit


def _other_token(header: Header, columns: Columns) -> None:
    """Flip a bit of the lowest plane of the token ids."""
    del header
    first, *rest = columns["column:input_ids"]
    columns["column:input_ids"] = bytes([first ^ 1, *rest])


def _compact_files() -> list[BrokenContainer]:
    batches = [_batch("a", "b")]

    def broken(code: str, name: str, text: str, data: bytes) -> BrokenContainer:
        return BrokenContainer(code, f"compact-{name}", text, data, ".arrow")

    version = {b"ragged_format:compact_version": b"3"}
    feature = {b"ragged_format:required_features": b'["compact","novel"]'}
    major = {b"ragged_format:version": b"1.0"}
    return [
        broken("RF-V001", "major", "A compact file of a later major version.",
               compact_file(SCHEMA, batches, metadata=major)),
        broken("RF-V002", "version", "A later version of the compact encoding.",
               compact_file(SCHEMA, batches, metadata=version)),
        broken("RF-V002", "feature", "A compact file that requires an unknown feature as well.",
               compact_file(SCHEMA, batches, metadata=feature)),
        broken("RF-C001", "transform", "A transform that does not exist.",
               compact_file(SCHEMA, batches, edit=_stated("column:input_ids", 3, "rot13"))),
        broken("RF-C001", "axis-transform", "Lengths of an axis with a transform.",
               compact_file(SCHEMA, batches, edit=_stated("axis:token", 3, "differences"))),
        broken("RF-C001", "size", "A block of another size than its axis.",
               compact_file(SCHEMA, batches, edit=_stated("column:input_ids", 0, 7))),
        broken("RF-C004", "content", "One bit of a token id differs.",
               compact_file(SCHEMA, batches, edit=_other_token)),
    ]  # fmt: skip


def resealed(manifest: bytes, **edits: Any) -> bytes:
    """Return a manifest with keys replaced and its checksum made right again."""
    data = {**json.loads(manifest), **edits}
    del data["checksum"]
    data["checksum"] = text_digest(canonical_json(data)).hex()
    return json.dumps(data, indent=1, sort_keys=True).encode() + b"\n"


def _datasets() -> list[BrokenContainer]:
    first, second = shard(0, _batch("a", "b")), shard(1, _batch("c"))
    tree = dataset(SCHEMA, first, second)
    manifest = tree[MANIFEST_NAME]
    other = shard(1, _batch("c", schema=sample("reward")))
    twice = shard(1, _batch("a"))

    def broken(
        code: str, name: str, text: str, edits: Mapping[str, bytes | None], **options: Any
    ) -> BrokenContainer:
        files = {k: v for k, v in {**tree, **edits}.items() if v is not None}
        return BrokenContainer(code, name, text, files, "", **options)

    def with_manifest(code: str, name: str, text: str, data: bytes) -> BrokenContainer:
        return BrokenContainer(code, name, text, {MANIFEST_NAME: data}, "")

    entries = json.loads(manifest)["shards"]
    escaping = [entries[0], {**entries[1], "name": "../a.arrow"}]
    frozen = [entries[0], {**entries[1], "encoding": "frozen"}]
    return [
        BrokenContainer("RF-S010", "shard-identity", "A shard of another identity.",
                        dataset(SCHEMA, first, other), ""),
        BrokenContainer("RF-I006", "two-shards", "One sample_id in two shards.",
                        dataset(SCHEMA, first, twice), "",
                        where={"batch": 0, "row": 0, "column": "sample_id"}),
        broken("RF-C005", "shard-bytes", "A shard is longer than listed.",
               {second[0].name: second[1] + b"\x00"}),
        broken("RF-C005", "shard-content", "A shard of the right size holds other records.",
               {second[0].name: shard(1, _batch("d"))[1]}),
        broken("RF-C006", "shard-missing", "A listed shard is not there.", {second[0].name: None}),
        with_manifest("RF-C007", "cut", "The manifest is cut.", manifest[:-20]),
        with_manifest("RF-C007", "checksum", "The manifest does not match its checksum.",
                      manifest.replace(b'"generation": 3', b'"generation": 4')),
        with_manifest("RF-C007", "fingerprint", "The fingerprint does not follow.",
                      resealed(manifest, fingerprint="0" * 32)),
        with_manifest("RF-C007", "escape", "A shard name leads out of the directory.",
                      resealed(manifest, shards=escaping)),
        with_manifest("RF-V001", "manifest-major", "A manifest of a later major version.",
                      resealed(manifest, format_version="1.0")),
        with_manifest("RF-V002", "encoding", "A shard of an unknown encoding.",
                      resealed(manifest, shards=frozen)),
    ]  # fmt: skip


def broken_containers() -> list[BrokenContainer]:
    """Return all broken containers."""
    return [*_streams(), *_files(), *_compact_files(), *_datasets()]


def schema_stream(schema: pa.Schema) -> bytes:
    """Return a stream of no batches, also of a schema that is not of this format."""
    return container(schema, [])
