"""Single messages: the cheapest form between processes that know the schema."""

import pickle
import struct
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from support.containers import equal, messages, small_batch, small_schema, stream_bytes

import ragged_format as rf
from ragged_format import flatbuffer as ipc
from ragged_format.testing import packed_batches, rollouts, sample_batches, variants


@given(sample_batches() | packed_batches())
def test_a_message_gives_the_batch_back(batch):
    for form in variants(batch, same_schema=True).values():
        back = rf.decode_message(rf.encode_message(form), batch.schema)
        assert equal([back], [batch])
        assert back.schema.equals(batch.schema, check_metadata=True)


def test_a_message_of_a_slice_holds_the_slice_only(rng):
    """apache/arrow#26685: a pickled slice carries its whole parent."""
    batch = rollouts(rng, num_samples=64)
    small = batch.slice(3, 1)
    message = rf.encode_message(small)
    assert message.size < 3 * small.nbytes
    assert len(pickle.dumps(small)) > 10 * message.size
    assert equal([rf.decode_message(message, batch.schema)], [small])


@pytest.mark.parametrize("shift", range(8))
def test_misaligned_messages_are_aligned(shift):
    """apache/arrow#32276: zero-copy transport delivers bytes at odd addresses."""
    batch = small_batch()
    message = rf.encode_message(batch).to_pybytes()
    data = bytearray(8 + len(message))
    buffer = pa.py_buffer(data)
    start = next(i for i in range(8) if (buffer.address + i) % 8 == shift)
    memoryview(data)[start : start + len(message)] = message
    back = rf.decode_message(buffer.slice(start, len(message)), batch.schema)
    assert equal([back], [batch])
    for array in back.columns:
        for part in array.buffers():
            assert part is None or part.size == 0 or part.address % 8 == 0


def test_every_bytes_like_is_taken():
    batch = small_batch()
    message = rf.encode_message(batch)
    for form in (message, bytes(message), bytearray(message), memoryview(message)):
        assert equal([rf.decode_message(form, batch.schema)], [batch])


def test_a_cut_message_is_refused_at_every_byte():
    batch = small_batch()
    message = bytes(rf.encode_message(batch))
    for size in range(len(message)):
        with pytest.raises(rf.TruncatedError):
            rf.decode_message(message[:size], batch.schema)


def test_a_flipped_message_never_gives_another_exception():
    batch = small_batch()
    message = bytearray(rf.encode_message(batch))
    for place in range(len(message)):
        for flip in (0xFF, 1 << place % 8):
            message[place] ^= flip
            try:
                rf.decode_message(bytes(message), batch.schema).to_pylist()
            except rf.RaggedError:
                pass
            finally:
                message[place] ^= flip


def test_other_messages_are_refused():
    batch = small_batch()
    with pytest.raises(rf.CorruptError, match="not a record batch"):
        rf.decode_message(batch.schema.serialize(), batch.schema)
    with pytest.raises(rf.CorruptError, match="does not begin with its mark"):
        rf.decode_message(b"x" * 64, batch.schema)
    with pytest.raises(rf.TruncatedError):
        rf.decode_message(ipc.END_OF_STREAM, batch.schema)
    with pytest.raises(rf.CorruptError):
        rf.decode_message(rf.encode_message(batch), small_schema(None))


def test_decreasing_offsets_are_refused():
    """huggingface/datasets#8350: Arrow's reader takes them, others crash."""
    schema = small_schema([])
    ids = pa.LargeListArray.from_arrays([0, 3, 1, 4], pa.array([1, 2, 3, 4], pa.int32()))
    mask = pa.array([[0, 0, 0], [], [0]], schema.field(2).type)
    broken = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b", "c"]), ids.cast(schema.field(1).type), mask], schema=schema
    )
    pa.ipc.read_record_batch(broken.serialize(), schema).validate()
    with pytest.raises(rf.InvariantError, match="RF-I001"):
        rf.decode_message(broken.serialize(), schema)


def test_a_compressed_message_is_limited_by_what_it_declares():
    """A lying uncompressed length of 2^45 would make Arrow allocate it."""
    batch = small_batch((200,) * 50)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue().to_pybytes()
    bounds = messages(stream)
    message = stream[bounds[1] : bounds[2]]
    assert equal([rf.decode_message(message, batch.schema)], [batch])
    with pytest.raises(rf.LimitExceededError):
        rf.decode_message(message, batch.schema, max_bytes=1000)
    head = 8 + struct.unpack_from("<i", message, 4)[0]
    lying = bytearray(message)
    assert struct.unpack_from("<q", lying, head)[0] < 1 << 20
    struct.pack_into("<q", lying, head, 1 << 45)
    with pytest.raises(rf.LimitExceededError):
        rf.decode_message(lying, batch.schema)
    struct.pack_into("<q", lying, head, -7)
    with pytest.raises(rf.CorruptError):
        rf.decode_message(lying, batch.schema)


@pytest.mark.parametrize(
    "metadata",
    [
        {b"k": b"v"},
        {b"": b""},
        {b"a" * n: b"b" * (n * 7) for n in range(9)},
        {b"k": bytes(1 << 16)},
    ],
)
def test_metadata_put_into_a_message_is_read_by_arrow(metadata):
    batch = small_batch()
    message = batch.serialize().to_pybytes()
    start = 8 + ipc.prefix_size(message[:8])
    header = ipc.parse_header(message[8:start])
    head = ipc.with_metadata(message[8:start], header, metadata)
    assert len(head) % 8 == 0
    stream = batch.schema.serialize().to_pybytes() + head + message[start:] + ipc.END_OF_STREAM
    reader = pa.ipc.open_stream(stream)
    back, got = reader.read_next_batch_with_custom_metadata()
    assert back.equals(batch)
    assert dict(got) == metadata
    parsed = ipc.parse_header(head[8:])
    assert (parsed.kind, parsed.body_bytes) == (header.kind, header.body_bytes)
    assert parsed.metadata == metadata


def test_a_key_that_is_there_twice_is_refused():
    batch = small_batch()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata=pa.KeyValueMetadata([("k", "1"), ("k", "2")]))
    stream = sink.getvalue().to_pybytes()
    bounds = messages(stream)
    with pytest.raises(rf.CorruptError, match="twice"):
        rf.decode_message(stream[bounds[1] : bounds[2]], batch.schema)


def test_header_of_streams_of_this_library():
    stream = stream_bytes([small_batch()])
    bounds = messages(stream)
    kinds = [ipc.parse_header(stream[a + 8 : b]).kind for a, b in pairwise(bounds[:-1])]
    assert kinds == [ipc.SCHEMA, ipc.BATCH, ipc.BATCH]
