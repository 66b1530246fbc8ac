"""Streams of others: versions and features that are not ours, sizes that lie, crafted values."""

import io
import struct
from itertools import pairwise

import pyarrow as pa
import pytest
import zstandard
from support.containers import (
    equal,
    messages,
    small_batch,
    small_schema,
    stream_bytes,
    three_batches,
)
from support.streams import TINY, read, tiny_batches

import ragged_format as rf
from ragged_format import flatbuffer as ipc
from ragged_format.digest import digest_plan, message_digest


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"ARROW1\0\0" + bytes(20), "an Arrow IPC file"),
        (b"PAR1" + bytes(20), "a Parquet file"),
        (b'{"input_ids": [1]}', "JSON text"),
        (b'  [{"a": 1}]', "JSON text"),
        (b"\x1f\x8b\x08" + bytes(20), "gzip data"),
        (b"hello world", "bytes 68 65"),
        (b"\xff\xff\xff", "RF-C002"),
        (b"\x10\x00\x00\x00" + bytes(30), "bytes 10 00"),  # a stream of before Arrow 0.15
    ],
)
def test_other_data_is_named(data, name):
    for source in (data, io.BytesIO(data)):
        with pytest.raises((rf.NotRaggedError, rf.TruncatedError), match=name):
            rf.read_stream(source)


def test_plain_arrow_is_not_ragged():
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"a": [1]})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(rf.NotRaggedError, match="RF-S001"):
        rf.read_stream(sink.getvalue())


def test_plain_arrow_with_our_schema_has_no_trailer():
    sink = pa.BufferOutputStream()
    batch = small_batch()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    reader = rf.read_stream(sink.getvalue(), verify=False)
    assert equal([next(reader)], [batch])
    with pytest.raises(rf.TruncatedError, match="not of this format"):
        next(reader)
    with pytest.raises(rf.ChecksumError):
        read(sink.getvalue())


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (b"version", b"9.0", rf.UnsupportedVersionError),
        (b"version", b"one", rf.NotRaggedError),
        (b"required_features", b'["time_travel"]', rf.UnsupportedFeatureError),
        (b"profile", b"other", rf.NotRaggedError),
        (b"vocab_size", b"-1", rf.SchemaMismatchError),
    ],
)
def test_versions_and_features(key, value, error):
    metadata = {**TINY.metadata, b"ragged_format:" + key: value}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TINY.with_metadata(metadata)) as writer:
        writer.write_batch(tiny_batches()[0])
    with pytest.raises(error):
        rf.read_stream(sink.getvalue())


def test_a_newer_minor_version_is_read():
    schema = TINY.with_metadata({**TINY.metadata, b"ragged_format:version": b"0.99"})
    batch = pa.RecordBatch.from_arrays(tiny_batches()[0].columns, schema=schema)
    assert equal(read(stream_bytes([batch])), [batch])


def test_big_endian_data_is_refused():
    stream = bytearray(stream_bytes(tiny_batches()))
    size = struct.unpack_from("<i", stream, 4)[0]
    flatbuffer = stream[8 : 8 + size]
    table = ipc.parse_header(bytes(flatbuffer)).table
    vtable = table - struct.unpack_from("<i", flatbuffer, table)[0]
    # Little endian is the default and not stored; let the field lie on one that is not zero.
    struct.pack_into(
        "<H", stream, 8 + vtable + 4, *struct.unpack_from("<H", flatbuffer, vtable + 6)
    )
    with pytest.raises(rf.UnsupportedFeatureError, match="big-endian"):
        rf.read_stream(stream)


def test_dictionaries_are_refused():
    field = TINY.field("sample_id")
    schema = TINY.set(0, field.with_type(pa.dictionary(pa.int32(), pa.string())))
    batch = tiny_batches()[0]
    columns = [batch.column(0).dictionary_encode(), *batch.columns[1:]]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    with pytest.raises(rf.SchemaMismatchError):
        read(sink.getvalue())


def test_a_lying_body_size_allocates_nothing():
    """A header of some hundred bytes that declares an enormous body."""
    stream = bytearray(stream_bytes(tiny_batches()))
    bounds = messages(stream)
    start = bounds[1] + 8
    root = struct.unpack_from("<I", stream, start)[0]
    vtable = root - struct.unpack_from("<i", stream, start + root)[0]
    place = start + root + struct.unpack_from("<H", stream, start + vtable + 10)[0]
    for size in (1 << 45, (1 << 63) - 1):
        struct.pack_into("<q", stream, place, size)
        for source in (bytes(stream), io.BytesIO(stream)):
            with pytest.raises(rf.LimitExceededError):
                read(source)
    struct.pack_into("<q", stream, place, 1 << 29)
    with pytest.raises(rf.TruncatedError):
        read(io.BytesIO(stream))
    struct.pack_into("<q", stream, place, -8)
    with pytest.raises(rf.CorruptError):
        read(io.BytesIO(stream))


@pytest.mark.parametrize("size", [-1, -(1 << 31), (1 << 31) - 1])
def test_a_lying_metadata_size(size):
    stream = bytearray(stream_bytes(tiny_batches()))
    struct.pack_into("<i", stream, 4, size)
    with pytest.raises(rf.CorruptError):
        read(bytes(stream))


def test_limits():
    batches = three_batches()
    stream = stream_bytes(batches)
    bounds = messages(stream)
    assert len(list(rf.read_stream(stream, max_bytes=len(stream)))) == 3
    reader = rf.read_stream(stream, max_bytes=bounds[3])
    assert equal([next(reader), next(reader)], batches[:2])
    with pytest.raises(rf.LimitExceededError, match="RF-L001"):
        next(reader)
    largest = max(b - a for a, b in pairwise(bounds))
    assert len(list(rf.read_stream(stream, max_message_bytes=largest))) == 3
    with pytest.raises(rf.LimitExceededError):
        list(rf.read_stream(stream, max_message_bytes=largest - 1))
    with pytest.raises(rf.LimitExceededError):
        rf.read_stream(stream, max_message_bytes=100)


def test_metadata_that_is_too_large_is_a_limit():
    stream = stream_bytes(tiny_batches())
    for size, error in ((64 << 20, rf.TruncatedError), ((64 << 20) + 8, rf.LimitExceededError)):
        with pytest.raises(error):
            read(stream[:4] + struct.pack("<i", size) + stream[8:])


@pytest.mark.parametrize("log", [27, 28])
def test_windows_of_zstd_frames_are_limited(log):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=log)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(stream_bytes(tiny_batches())) + compressor.flush()
    if log == 27:
        assert equal(read(data), tiny_batches())
        return
    with pytest.raises(rf.LimitExceededError, match="window"):
        read(data)


def test_a_zstd_bomb_is_limited():
    batch = small_batch((30_000,), schema=small_schema([]))
    flat = pa.RecordBatch.from_arrays(
        [
            batch.column(0),
            pa.array([[1] * 300_000], batch.schema.field(1).type),
            pa.array([[0] * 300_000], batch.schema.field(2).type),
        ],
        schema=batch.schema,
    )
    packed = zstandard.compress(stream_bytes([flat]))
    assert len(packed) < 5000
    assert len(read(packed)) == 1
    with pytest.raises(rf.LimitExceededError):
        list(rf.read_stream(packed, max_bytes=100_000))
    with pytest.raises(rf.LimitExceededError):
        list(rf.read_stream(packed, max_message_bytes=100_000))


def test_corrupt_zstd_is_corrupt():
    packed = bytearray(zstandard.compress(stream_bytes(three_batches())))
    packed[len(packed) // 2] ^= 0xFF
    with pytest.raises(rf.RaggedError):
        read(bytes(packed))
    with pytest.raises(rf.CorruptError, match="zstd"):
        read(b"\x28\xb5\x2f\xfd" + b"\xff" * 40)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_bodies_are_read_within_the_limit(codec):
    batch = small_batch((300,) * 20)
    ours = stream_bytes([batch])
    bounds = messages(ours)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={"ragged_format:digest": rf.digest(batch).hex()})
    packed = sink.getvalue().to_pybytes()
    packed = packed[: messages(packed)[2]] + ours[bounds[2] :]
    assert len(packed) < len(ours)
    assert equal(read(packed), [batch])
    with pytest.raises(rf.LimitExceededError, match="decompressed"):
        list(rf.read_stream(packed, max_message_bytes=len(packed)))


def crafted(ids, masks, *, digest=True):
    """Return a stream of one batch with these raw arrays, digests as if it were in order."""
    schema = small_schema([])
    batch = pa.RecordBatch.from_arrays(
        [pa.array([str(i) for i in range(len(ids))]), ids, masks], schema=schema
    )
    metadata = {"ragged_format:digest": "0" * 32}
    if digest:
        message = batch.serialize().to_pybytes()
        start = 8 + ipc.prefix_size(message[:8])
        header, body = ipc.parse_header(message[8:start]), memoryview(message)[start:]
        content = message_digest(digest_plan(schema), ipc.layout_of(message[8:start], header, body))
        metadata = {"ragged_format:digest": content.hex()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue().to_pybytes()


def test_crafted_offsets_are_refused():
    """huggingface/datasets#8350: the digest is right, the offsets are not."""
    kind = small_schema([]).field("input_ids").type
    ids = pa.LargeListArray.from_arrays([0, 3, 1, 4], pa.array([1, 2, 3, 4], pa.int32())).cast(kind)
    masks = pa.array([[0], [0], [0, 0]], small_schema([]).field("completion_mask").type)
    stream = crafted(ids, masks)
    pa.ipc.open_stream(stream).read_all().validate()
    for verify in (True, False):
        with pytest.raises(rf.InvariantError, match="RF-I001") as caught:
            list(rf.read_stream(stream, verify=verify))
        assert caught.value.where.batch == 0
    with pytest.raises(rf.ChecksumError):
        read(crafted(ids, masks, digest=False))


def test_lengths_that_disagree_are_found_by_validation():
    schema = small_schema([])
    ids = pa.array([[1, 2], [3]], schema.field("input_ids").type)
    masks = pa.array([[0], [0, 0]], schema.field("completion_mask").type)
    stream = crafted(ids, masks)
    with pytest.raises(rf.InvariantError, match="RF-I003"):
        list(rf.read_stream(stream, validate="structural"))


def test_a_stream_of_another_writer_has_no_digests():
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, small_schema()) as writer:
        writer.write(small_batch())
    with pytest.raises(rf.ChecksumError, match="its writer is not of this format") as caught:
        list(rf.read_stream(sink.getvalue()))
    assert caught.value.remedy == "import data of other writers"
