"""A damaged stream raises a typed error, or gives exactly what was written; never anything else."""

import io
import struct
from itertools import pairwise

import pyarrow as pa
import pytest
import xxhash
import zstandard
from support.containers import (
    equal,
    messages,
    small_batch,
    stream_bytes,
    three_batches,
)
from support.streams import TINY, read, tiny_batches

import ragged_format as rf
from ragged_format import flatbuffer as ipc


def test_a_stream_cut_at_any_byte_is_an_error():
    """apache/arrow#49896, Basekick-Labs/arc#722."""
    stream = stream_bytes(tiny_batches())
    trailer_end = messages(stream)[-2]
    for size in range(len(stream)):
        with pytest.raises(rf.TruncatedError) as caught:
            read(stream[:size])
        missing_end = isinstance(caught.value, rf.MissingEndOfStreamError)
        assert missing_end == (size >= trailer_end)
        assert caught.value.code == ("RF-C003" if missing_end else "RF-C002")


def test_a_compressed_stream_cut_at_any_byte_is_an_error_or_whole():
    batches = tiny_batches()
    packed = zstandard.compress(stream_bytes(batches))
    for size in range(len(packed)):
        try:
            got = read(packed[:size])
        except rf.RaggedError:
            continue
        assert equal(got, batches)


@pytest.mark.parametrize("flip", [0xFF, None])
def test_a_flipped_byte_is_an_error_or_has_no_effect(flip):
    batches = tiny_batches()
    stream = bytearray(stream_bytes(batches))
    harmless = 0
    for place in range(len(stream)):
        change = flip or 1 << place % 8
        stream[place] ^= change
        try:
            got = read(bytes(stream))
        except rf.RaggedError:
            pass
        else:
            assert equal(got, batches), place
            harmless += 1
        stream[place] ^= change
    # What has no effect is padding and unused parts of Arrow's metadata.
    assert harmless < len(stream) / 3


def test_flips_in_values_are_checksum_errors():
    stream = bytearray(stream_bytes(tiny_batches()))
    bounds = messages(stream)
    head = 8 + struct.unpack_from("<i", stream, bounds[1] + 4)[0]
    message = ipc.parse_header(bytes(stream[bounds[1] + 8 : bounds[1] + head]))
    flatbuffer = bytes(stream[bounds[1] + 8 : bounds[1] + head])
    buffers = ipc.layout_of(flatbuffer, message, memoryview(b"")).buffers
    pairs = list(zip(buffers[::2], buffers[1::2], strict=True))
    for offset, size in pairs:
        for place in range(size):
            at = bounds[1] + head + offset + place
            stream[at] ^= 4
            with pytest.raises(rf.ChecksumError):
                read(bytes(stream))
            stream[at] ^= 4


def test_flips_in_schema_metadata_are_found():
    schema = TINY.with_metadata({**TINY.metadata, b"note": b"some text"})
    batch = pa.RecordBatch.from_arrays(tiny_batches()[0].columns, schema=schema)
    stream = stream_bytes([batch])
    changed = stream.replace(b"some text", b"same text")
    assert changed != stream
    with pytest.raises(rf.ChecksumError, match="schema digest"):
        read(changed)
    with pytest.raises(rf.ChecksumError, match="schema digest"):
        list(rf.read_stream(changed, verify=False))


def test_a_stream_cut_between_messages_is_an_error():
    """Basekick-Labs/arc#722: plain Arrow reads it as a complete stream."""
    batches = three_batches()
    stream = stream_bytes(batches)
    for number, bound in enumerate(messages(stream)[1:-2]):
        with pa.ipc.open_stream(stream[:bound]) as plain:
            assert plain.read_all().num_rows == 3 * number
        reader = rf.read_stream(stream[:bound])
        for expected in batches[:number]:
            assert equal([next(reader)], [expected])
        with pytest.raises(rf.TruncatedError, match="cut between two messages"):
            next(reader)


def test_an_end_mark_instead_of_the_trailer_is_an_error():
    stream = stream_bytes(three_batches())
    bounds = messages(stream)
    for bound in bounds[1:-2]:
        with pytest.raises(rf.TruncatedError, match="ends without its trailer"):
            read(stream[:bound] + ipc.END_OF_STREAM)


def test_a_missing_end_mark_is_its_own_error():
    """paleolimbot/duckdb-nanoarrow#49: a producer forgot the end of the stream."""
    stream = stream_bytes(three_batches())
    for size in range(1, 9):
        with pytest.raises(rf.MissingEndOfStreamError, match="RF-C003"):
            read(stream[:-size])


@pytest.mark.parametrize("extra", [b"\0", b"x", ipc.END_OF_STREAM, b"\n"])
def test_bytes_behind_the_end_are_an_error(extra):
    stream = stream_bytes(three_batches())
    with pytest.raises(rf.CorruptError, match="bytes after the end-of-stream mark"):
        read(stream + extra)
    assert len(list(rf.read_stream(stream + extra, trailing="leave"))) == 3


def test_lost_repeated_and_exchanged_batches_are_found():
    stream = stream_bytes(three_batches())
    bounds = messages(stream)
    parts = [stream[a:b] for a, b in pairwise(bounds)]
    schema, a, b, c, trailer, end = parts
    for order in ([a, b], [a, b, c, c], [b, a, c], [a, c], []):
        with pytest.raises(rf.ChecksumError):
            read(b"".join((schema, *order, trailer, end)))
    with pytest.raises(rf.CorruptError, match="something follows the trailer"):
        read(b"".join((schema, a, b, c, trailer, trailer, end)))
    with pytest.raises(rf.CorruptError, match="something follows the trailer"):
        read(b"".join((schema, a, b, c, trailer, c, end)))
    with pytest.raises(rf.CorruptError, match="not a record batch"):
        read(b"".join((schema, a, schema, b, c, trailer, end)))
    assert len(read(b"".join(parts))) == 3


def test_a_batch_of_another_stream_is_found():
    """Each part is intact; only the running digest tells."""
    one, other = stream_bytes(three_batches()), stream_bytes([small_batch(seed=9)] * 3)
    a, b = messages(one), messages(other)
    mixed = one[: a[2]] + other[b[2] : b[3]] + one[a[3] :]
    with pytest.raises(rf.ChecksumError, match="running digest"):
        read(mixed)
    assert len(list(rf.read_stream(mixed, verify=False))) == 3


def test_metadata_of_a_batch_is_covered():
    def write(cursor):
        sink = io.BytesIO()
        with rf.StreamWriter(sink, TINY) as writer:
            writer.write(tiny_batches()[0], {"cursor": cursor})
        return sink.getvalue()

    stream = write("17")
    with pytest.raises(rf.ChecksumError, match="running digest"):
        read(stream.replace(b"\x0217\0" if b"\x0217\0" in stream else b"17\0\0", b"18\0\0", 1))


def with_batch_metadata(metadata):
    """Return a stream whose one batch has other custom metadata than ours."""
    batch = tiny_batches()[0]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TINY) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    stream = stream_bytes([batch])
    bounds = messages(stream)
    foreign = sink.getvalue().to_pybytes()
    return foreign[: messages(foreign)[2]] + stream[bounds[2] :]


def test_a_batch_without_digest_is_an_error():
    with pytest.raises(rf.ChecksumError, match="has no digest"):
        read(with_batch_metadata({"other": "x"}))
    assert len(list(rf.read_stream(with_batch_metadata({"other": "x"}), verify=False))) == 1


def forged_trailer(text, *, rows=False, **more):
    """Return a stream of no batches with a trailer that has a right checksum and this text."""
    checksum = xxhash.xxh3_128(text).hexdigest()
    metadata = {"ragged_format:trailer": text, "ragged_format:trailer_checksum": checksum, **more}
    sink = pa.BufferOutputStream()
    batch = tiny_batches()[0]
    with pa.ipc.new_stream(sink, TINY) as writer:
        writer.write_batch(batch if rows else batch.slice(0, 0), custom_metadata=metadata)
    return sink.getvalue().to_pybytes()


GOOD = (
    b'{"batches":0,"digest":"%s","rows":0,"rows_per_batch":[],"schema_digest":"%s","version":"0.1"}'
    % (xxhash.xxh3_128(b"").hexdigest().encode(), rf.schema_digest(TINY).hex().encode())
)


def test_a_hand_made_trailer_is_one():
    assert read(forged_trailer(GOOD)) == []


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b"null", b"\xff", GOOD.replace(b"[]", b'["x"]'),
     GOOD.replace(b'"rows":0', b'"rows":1'), GOOD.replace(b'"batches":0', b'"batches":2'),
     GOOD.replace(b"[]", b"7"), b"[" * 100_000, GOOD.replace(b',"version":"0.1"', b""),
     GOOD.replace(b'"0.1"', b'"0"'), GOOD.replace(b'"0.1"', b"0.1"),
     GOOD.replace(b"[]", b"[-1, 1]").replace(b'"batches":0', b'"batches":2'),
     GOOD.replace(b'"rows":0,"rows_per_batch":[]', b'"rows":0,"rows_per_batch":[0.0]')
     .replace(b'"batches":0', b'"batches":1'), GOOD.replace(b'"digest":"', b'"digest":"A')],
)  # fmt: skip
def test_malformed_trailers_are_corrupt(text):
    with pytest.raises(rf.CorruptError, match="trailer is malformed"):
        read(forged_trailer(text))


def test_a_trailer_of_another_major_version_is_refused():
    with pytest.raises(rf.UnsupportedVersionError):
        read(forged_trailer(GOOD.replace(b'"0.1"', b'"1.0"')))


def test_a_trailer_with_other_keys_is_corrupt():
    """The checksum would not cover them."""
    with pytest.raises(rf.CorruptError, match="other metadata than its own"):
        read(forged_trailer(GOOD, more="x"))


def test_a_trailer_with_rows_is_corrupt():
    with pytest.raises(rf.CorruptError, match="trailer has rows"):
        read(forged_trailer(GOOD, rows=True))


def test_a_changed_trailer_fails_its_checksum():
    stream = stream_bytes(tiny_batches())
    with pytest.raises(rf.ChecksumError, match="trailer does not match its checksum"):
        read(stream.replace(b'"batches":2', b'"batches":3'))


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"", "empty"), (zstandard.compress(b""), "empty")],
)
def test_empty_input_is_truncated(data, what):
    for source in (data, io.BytesIO(data)):
        with pytest.raises(rf.TruncatedError, match=what):
            rf.read_stream(source)


def test_the_end_mark_alone():
    with pytest.raises(rf.TruncatedError, match="before its schema"):
        rf.read_stream(ipc.END_OF_STREAM)


def test_a_batch_instead_of_the_schema():
    stream = stream_bytes(tiny_batches())
    with pytest.raises(rf.CorruptError, match="does not begin with a schema"):
        rf.read_stream(stream[messages(stream)[1] :])


def test_flips_of_offsets_and_null_counts_are_checksum_errors():
    """Arrow's metadata of a batch: lengths, null counts, places of buffers."""
    batch = small_batch()
    stream = bytearray(stream_bytes([batch]))
    bounds = messages(stream)
    size = struct.unpack_from("<i", stream, bounds[1] + 4)[0]
    start = bounds[1] + 8
    found = 0
    for place in range(start, start + size):
        for flip in (1, 0x80):
            stream[place] ^= flip
            try:
                got = read(bytes(stream))
            except rf.RaggedError:
                found += 1
            else:
                assert equal(got, [batch])
            stream[place] ^= flip
    assert found > size / 2
