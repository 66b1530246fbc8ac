"""Streams give back what was written, over every kind of source and sink."""

import io
import pickle
import socket
import threading

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.containers import (
    equal,
    messages,
    small_batch,
    small_schema,
    stream_bytes,
    three_batches,
)

import ragged_format as rf
from ragged_format.testing import (
    assert_ragged_equal,
    packed_batches,
    rollouts,
    sample_batches,
    schemas,
    variants,
)


@given(sample_batches() | packed_batches())
def test_a_stream_gives_every_form_back(batch):
    forms = list(variants(batch, same_schema=True).values())
    stream = stream_bytes(forms)
    reader = rf.read_stream(stream, validate="full")
    assert equal(list(reader), [batch] * len(forms))
    assert reader.schema.equals(batch.schema, check_metadata=True)
    assert reader.trailer.rows_per_batch == (batch.num_rows,) * len(forms)


@given(schemas(), st.data())
def test_batches_are_delivered_one_by_one(schema, data):
    batches = data.draw(st.lists(sample_batches(schema), max_size=4))
    stream = stream_bytes(batches, schema)
    got = list(rf.read_stream(io.BytesIO(stream)))
    assert [b.num_rows for b in got] == [b.num_rows for b in batches]
    assert equal(got, batches)


@given(sample_batches(min_rows=1), st.data())
def test_columns_are_selected_with_the_counts_they_need(batch, data):
    names = data.draw(st.lists(st.sampled_from(batch.schema.names), min_size=1, unique=True))
    wanted = rf.parse_schema(batch.schema).select(names)
    reader = rf.read_stream(stream_bytes([batch]), columns=names)
    (got,) = reader
    assert got.schema.names == list(wanted.columns) == reader.schema.names
    assert_ragged_equal(got, batch.select(list(wanted.columns)))
    assert reader.schema.metadata == batch.schema.metadata
    assert list(reader.ragged_schema.columns) == got.schema.names


def test_unknown_columns_are_refused():
    for columns in (["nothing"], []):
        with pytest.raises(rf.SchemaMismatchError, match="RF-S003"):
            rf.read_stream(stream_bytes([small_batch()]), columns=columns)


def test_tables_and_readers_are_written():
    batches = three_batches()
    table = pa.Table.from_batches(batches)
    for data in (
        table,
        [table],
        table.to_reader(),
        [batches[0], pa.Table.from_batches(batches[1:])],
    ):
        assert equal(list(rf.read_stream(stream_bytes(data))), batches)
    assert equal(list(rf.read_stream(stream_bytes(batches[0]))), batches[:1])


def test_a_stream_of_no_batches():
    schema = small_schema()
    reader = rf.read_stream(stream_bytes([], schema))
    assert list(reader) == []
    assert (reader.trailer.batches, reader.trailer.rows) == (0, 0)
    assert reader.schema.equals(schema, check_metadata=True)
    with pytest.raises(rf.SchemaMismatchError, match="without a schema"):
        stream_bytes([])


def test_the_trailer_is_returned():
    batches = three_batches()
    trailer = rf.write_stream(io.BytesIO(), batches)
    assert trailer.rows == 9
    assert trailer.batches == 3
    assert trailer.schema_digest == rf.schema_digest(batches[0].schema).hex()


def test_what_is_not_a_batch_is_refused():
    sink = io.BytesIO()
    with pytest.raises(rf.SchemaMismatchError, match="not an Arrow batch"):
        rf.write_stream(sink, [{"input_ids": [1]}], small_schema())
    with pytest.raises(rf.NotRaggedError):
        rf.write_stream(sink, [pa.record_batch({"a": [1]})])


class OneByteAtATime:
    """A source with ``read`` only that returns less than asked; it cannot seek."""

    def __init__(self, data):
        self._file = io.BytesIO(data)

    def read(self, size):
        return self._file.read(min(size, 3))


class ShortInto(io.RawIOBase):
    """A raw source and sink that takes and gives a few bytes at a time."""

    def __init__(self, data=b""):
        self.data = bytearray(data)

    def readable(self):
        return True

    def writable(self):
        return True

    def readinto(self, out):
        part = self.data[: min(len(out), 5)]
        out[: len(part)] = part
        del self.data[: len(part)]
        return len(part)

    def write(self, data):
        part = bytes(data)[:5]
        self.data += part
        return len(part)


@pytest.mark.parametrize(
    "make", [io.BytesIO, OneByteAtATime, ShortInto, bytearray, memoryview, pa.py_buffer]
)
@pytest.mark.parametrize("packed", [False, True])
def test_short_reads(make, packed):
    """apache/arrow#49896: a read that returns less than asked is not the end."""
    batches = three_batches()
    stream = stream_bytes(batches)
    if packed:
        stream = zstandard.compress(stream)
    reader = rf.read_stream(make(stream))
    assert equal(list(reader), batches)
    assert reader.trailer.batches == 3


def test_raw_sinks_may_take_a_part():
    sink = ShortInto()
    batches = three_batches()
    rf.write_stream(sink, batches)
    assert bytes(sink.data) == stream_bytes(batches)


def test_a_socket_needs_no_seeking():
    batches = three_batches()
    left, right = socket.socketpair()

    def send():
        with left, left.makefile("wb") as sink:
            rf.write_stream(sink, batches)

    thread = threading.Thread(target=send)
    thread.start()
    with right, right.makefile("rb") as source:
        assert equal(list(rf.read_stream(source)), batches)
    thread.join()


def test_streams_that_follow_each_other_in_memory():
    batches = three_batches()
    source = io.BytesIO(b"".join(stream_bytes([batch]) for batch in batches) + b"rest")
    for batch in batches:
        reader = rf.read_stream(source, trailing="leave")
        assert equal(list(reader), [batch])
        reader.close()
    assert source.read() == b"rest"
    reader.close()
    assert source.read() == b""


def test_streams_that_follow_each_other():
    batches = three_batches()
    left, right = socket.socketpair()
    with left, right, left.makefile("wb") as sink, right.makefile("rb") as source:
        for batch in batches:
            rf.write_stream(sink, [batch])
        for batch in batches:  # would hang if a reader looked behind the end
            assert equal(list(rf.read_stream(source, trailing="leave")), [batch])


def test_a_zstd_stream_is_read_from_memory_and_from_several_frames():
    batches = three_batches()
    stream = stream_bytes(batches)
    frames = zstandard.compress(stream[:777]) + zstandard.compress(stream[777:])
    assert equal(list(rf.read_stream(frames)), batches)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_path_appears_whole(tmp_path):
    path = tmp_path / "a.arrows"
    batches = three_batches()
    with rf.StreamWriter(path, batches[0].schema) as writer:
        writer.write(batches[0])
        assert not path.exists()
        writer.write(batches[1])
    assert equal(list(rf.read_stream(path)), batches[:2])
    assert equal(list(rf.read_stream(str(path))), batches[:2])
    rf.write_stream(path, batches)
    assert equal(list(rf.read_stream(path)), batches)
    assert names(tmp_path) == ["a.arrows"]


def test_an_exception_leaves_no_file_or_the_old_one(tmp_path):
    path = tmp_path / "a.arrows"
    batches = three_batches()

    def failing():
        yield batches[0]
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        rf.write_stream(path, failing())
    assert names(tmp_path) == []
    rf.write_stream(path, batches)
    with pytest.raises(RuntimeError, match="stop"):
        rf.write_stream(path, failing())
    assert equal(list(rf.read_stream(path)), batches)
    assert names(tmp_path) == ["a.arrows"]


def test_an_exception_writes_no_end():
    """Basekick-Labs/arc#722: the error path wrote the end of the stream."""
    sink = io.BytesIO()
    batches = three_batches()

    def failing():
        yield from batches[:2]
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        rf.write_stream(sink, failing())
    reader = rf.read_stream(sink.getvalue())
    assert equal([next(reader), next(reader)], batches[:2])
    with pytest.raises(rf.TruncatedError, match="cut between two messages"):
        next(reader)


class FullDisk(io.BytesIO):
    def flush(self):
        raise OSError(28, "no space left on device")


class WriteOnly:
    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data


def test_a_sink_needs_write_only():
    sink = WriteOnly()
    rf.write_stream(sink, three_batches())
    assert sink.data == stream_bytes(three_batches())


class Broken(io.RawIOBase):
    def readinto(self, out):
        raise OSError(5, "input/output error")


def test_errors_of_the_transport_pass_through():
    with pytest.raises(OSError, match="input/output"):
        rf.read_stream(Broken())


def test_a_failing_flush_is_not_a_success():
    with pytest.raises(OSError, match="no space"):
        rf.write_stream(FullDisk(), three_batches())


def test_closing_twice_writes_one_trailer():
    sink = io.BytesIO()
    writer = rf.StreamWriter(sink, small_schema())
    writer.write(small_batch())
    assert writer.close() is writer.close()
    writer.abort()
    assert sink.getvalue() == stream_bytes([small_batch()])


def test_an_aborted_path_leaves_nothing(tmp_path):
    writer = rf.StreamWriter(tmp_path / "a.arrows", small_schema())
    writer.abort()
    assert names(tmp_path) == []


def test_the_message_of_a_batch_is_the_one_that_came():
    batch = rollouts(np.random.default_rng(0), num_samples=3)
    sink = io.BytesIO()
    rf.write_stream(sink, [batch, batch.slice(1)])
    data = pa.py_buffer(sink.getvalue())
    reader = rf.read_stream(data)
    assert reader.message is None
    start = len(batch.schema.serialize())
    for got in reader:
        message = reader.message
        assert message.address == data.address + start
        assert rf.decode_message(message, batch.schema).equals(got)
        start += message.size


def test_batch_metadata_goes_along():
    sink = io.BytesIO()
    batches = three_batches()
    with rf.StreamWriter(sink, batches[0].schema) as writer:
        writer.write(batches[0], {"cursor": "17", b"raw": b"\xff\0"})
        writer.write(batches[1])
        writer.write(batches[2], {})
    reader = rf.read_stream(sink.getvalue())
    seen = [reader.metadata for _ in reader]
    assert seen == [{b"cursor": b"17", b"raw": b"\xff\0"}, {}, {}]


@pytest.mark.parametrize("metadata", [{"ragged_format:digest": "x"}, {"a": 1}, {1: "a"}])
def test_reserved_and_odd_metadata_is_refused(metadata):
    with rf.StreamWriter(io.BytesIO(), small_schema()) as writer:
        with pytest.raises(rf.SchemaMismatchError, match="RF-S009"):
            writer.write(small_batch(), metadata)
        writer.write(small_batch())


def test_provenance_in_schema_metadata_may_differ():
    batch = small_batch()
    other = batch.schema.with_metadata({**batch.schema.metadata, b"run": b"7"})
    relabelled = pa.RecordBatch.from_arrays(batch.columns, schema=other)
    got = list(rf.read_stream(stream_bytes([batch, relabelled])))
    assert got[1].schema.equals(batch.schema, check_metadata=True)


def test_another_schema_is_refused_with_its_place():
    with rf.StreamWriter(io.BytesIO(), small_schema()) as writer:
        writer.write(small_batch())
        with pytest.raises(rf.SchemaMismatchError, match="RF-S010") as caught:
            writer.write(small_batch(schema=small_schema([])))
    assert caught.value.where.batch == 1


def test_validation_of_writers_and_readers():
    schema = small_schema([])
    row = {"sample_id": "a", "input_ids": [5000], "completion_mask": [0]}
    bad = pa.RecordBatch.from_pylist([row], schema=schema)
    with pytest.raises(rf.InvariantError, match="RF-I007") as caught:
        rf.write_stream(io.BytesIO(), [bad], validate="full")
    assert caught.value.where.batch == 0
    stream = stream_bytes([bad])
    assert len(list(rf.read_stream(stream, validate="structural"))) == 1
    with pytest.raises(rf.InvariantError, match="RF-I007"):
        list(rf.read_stream(stream, validate="full"))


def test_misspelt_choices_are_refused(tmp_path):
    stream = stream_bytes([small_batch()])
    with pytest.raises(rf.LimitExceededError, match="'full' or 'structural' or 'off'"):
        rf.read_stream(stream, validate="ful")
    with pytest.raises(rf.LimitExceededError):
        rf.read_stream(stream, trailing="ignore")
    with pytest.raises(rf.LimitExceededError):
        rf.write_stream(io.BytesIO(), [small_batch()], validate="ful")
    rf.write_file(tmp_path / "a.arrow", [small_batch()])
    with pytest.raises(rf.LimitExceededError):
        rf.read_file(tmp_path / "a.arrow", validate="ful")


def test_a_failed_reader_goes_on_failing():
    stream = bytearray(stream_bytes(three_batches()))
    place = messages(stream)[3] - 8
    stream[place] ^= 1
    reader = rf.read_stream(stream)
    next(reader)
    for _ in range(2):
        with pytest.raises(rf.ChecksumError) as caught:
            next(reader)
        assert caught.value.where.batch == 1
    with pytest.raises(rf.ChecksumError):
        list(reader)


def test_a_finished_reader_is_finished():
    reader = rf.read_stream(stream_bytes([small_batch()]))
    assert len(list(reader)) == 1
    assert list(reader) == []


def test_readers_follow_the_protocol_of_sources():
    batches = three_batches()
    with rf.read_stream(stream_bytes(batches)) as reader:
        assert reader.num_rows is None
        assert not reader.is_random_access
        got = list(reader.batches(columns=["candidate_ids"]))
    assert got[0].schema.names == ["completion_mask", "candidate_counts", "candidate_ids"]
    assert [b.num_rows for b in got] == [3, 3, 3]


def test_missing_paths_and_directories(tmp_path):
    with pytest.raises(rf.DatasetNotFoundError, match="RF-C008"):
        rf.read_stream(tmp_path / "none")
    with pytest.raises(rf.NotRaggedError, match="a directory"):
        rf.read_stream(tmp_path)


def test_errors_name_the_file_and_close_it(tmp_path):
    path = tmp_path / "a.arrows"
    path.write_bytes(stream_bytes(three_batches())[:-1])
    with pytest.raises(rf.MissingEndOfStreamError) as caught:
        list(rf.read_stream(path))
    assert caught.value.where.file == str(path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_batches_do_not_change_with_the_source():
    source = io.BytesIO(stream_bytes([small_batch()]))
    reader = rf.read_stream(source)
    batch = next(reader)
    with source.getbuffer() as view:
        view[:] = bytes(len(view))
    assert equal([batch], [small_batch()])


def test_memory_of_batches_is_aligned():
    data = stream_bytes([small_batch()])
    for shift in range(3):
        padded = pa.py_buffer(bytearray(bytes(shift) + data)).slice(shift)
        for source in (io.BytesIO(data), padded):
            (batch,) = rf.read_stream(source)
            for array in batch.columns:
                for part in array.buffers():
                    assert part is None or part.size == 0 or part.address % 8 == 0
