"""Hot files: mapped, immutable, and never read wrong."""

import os
import pickle
import struct

import pyarrow as pa
import pytest
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
from ragged_format.flatbuffer import blocks_of
from ragged_format.testing import packed_batches, sample_batches, schemas, variants

TINY = rf.sample_schema(vocab_size=100, columns=["group_id"])


def tiny_batches():
    return [small_batch((2, 1), seed=i, prefix=f"{i}-", schema=TINY) for i in range(2)]


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.arrow"


@given(sample_batches() | packed_batches())
def test_a_file_gives_every_form_back(tmp_path_factory, batch):
    path = tmp_path_factory.mktemp("f") / "a.arrow"
    forms = list(variants(batch, same_schema=True).values())
    trailer = rf.write_file(path, forms)
    file = rf.read_file(path, validate="full")
    assert equal(list(file), [batch] * len(forms))
    assert equal([file.batch(i) for i in range(len(forms))], [batch] * len(forms))
    assert file.schema.equals(batch.schema, check_metadata=True)
    assert file.trailer == trailer
    assert file.num_rows == batch.num_rows * len(forms)


@given(schemas(), st.data())
def test_batches_keep_their_bounds(tmp_path_factory, schema, data):
    path = tmp_path_factory.mktemp("f") / "a.arrow"
    batches = data.draw(st.lists(sample_batches(schema), max_size=4))
    rf.write_file(path, batches, schema)
    file = rf.read_file(path)
    assert file.rows_per_batch == tuple(b.num_rows for b in batches)
    assert equal(list(file), batches)


def test_a_file_is_a_stream_with_a_footer(path):
    batches = three_batches()
    rf.write_file(path, batches)
    stream = stream_bytes(batches)
    data = path.read_bytes()
    assert data[:8] == b"ARROW1\0\0"
    assert data[8 : 8 + len(stream)] == stream
    assert data[-6:] == b"ARROW1"


def test_batches_are_views_of_the_mapping(path):
    """Nothing is allocated, also for a slice."""
    rf.write_file(path, [small_batch((500,) * 50)])
    before = pa.total_allocated_bytes()
    batch = rf.read_file(path).batch(0).slice(10, 5)
    assert pa.total_allocated_bytes() - before < 1000
    assert batch.num_rows == 5


def test_rewriting_a_mapped_file_keeps_the_readers_content(path):
    """apache/arrow#39642: a file that is rewritten in place kills whoever has it mapped."""
    old, new = three_batches(), [small_batch((1,), seed=9)]
    rf.write_file(path, old)
    file = rf.read_file(path)
    first = file.batch(0)
    rf.write_file(path, new)
    assert equal([first, *file], [old[0], *old])
    assert equal(list(rf.read_file(path)), new)
    path.unlink()
    assert equal(list(file), old)


def test_an_exception_leaves_no_file_or_the_old_one(path, tmp_path):
    """bespokelabsai/curator#51: a crashed writer leaves a file that later runs take for whole."""
    batches = three_batches()

    def failing():
        yield batches[0]
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        rf.write_file(path, failing())
    assert names(tmp_path) == []
    rf.write_file(path, batches)
    with pytest.raises(RuntimeError, match="stop"):
        rf.write_file(path, failing())
    assert equal(list(rf.read_file(path)), batches)
    assert names(tmp_path) == ["a.arrow"]


def test_writers_close_once(path, tmp_path):
    with rf.FileWriter(path, small_schema()) as writer:
        writer.write(small_batch(), {"cursor": "1"})
        size = writer.nbytes
        assert size > 0
        trailer = writer.close()
        assert writer.close() is trailer
        writer.abort()
    assert path.stat().st_size > size
    assert rf.read_file(path).metadata(0) == {b"cursor": b"1"}
    writer = rf.FileWriter(tmp_path / "b.arrow", small_schema())
    writer.abort()
    assert names(tmp_path) == ["a.arrow"]


def test_a_failing_close_leaves_nothing(path, tmp_path, monkeypatch):
    writer = rf.FileWriter(path, small_schema())
    writer.write(small_batch())

    def full(descriptor):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        writer.close()
    assert names(tmp_path) == []


def test_columns(path):
    batches = three_batches()
    rf.write_file(path, batches)
    file = rf.read_file(path, columns=["candidate_ids", "sample_id"])
    names = ["sample_id", "completion_mask", "candidate_counts", "candidate_ids"]
    assert file.schema.names == list(file.ragged_schema.columns) == names
    assert file.batch(1).equals(batches[1].select(names))
    (first, *_) = file.batches(columns=["sample_id"])
    assert first.equals(batches[0].select(["sample_id"]))
    with pytest.raises(rf.SchemaMismatchError, match="RF-S003"):
        file.batches(columns=["reward"])


def test_there_is_no_batch_outside(path):
    rf.write_file(path, three_batches())
    file = rf.read_file(path)
    for index in (-1, 3):
        with pytest.raises(rf.OutOfRangeError, match="RF-L002"):
            file.batch(index)


def test_readers_pickle(path):
    batches = three_batches()
    rf.write_file(path, batches)
    file = pickle.loads(pickle.dumps(rf.read_file(path, columns=["sample_id"], verify=False)))
    assert file.schema.names == ["sample_id"]
    assert file.num_rows == 9
    assert "rows=9, batches=3" in repr(file)
    assert file.is_random_access


def test_many_batches_are_forgotten_and_found_again(path):
    batch = small_batch((1,))
    rf.write_file(path, [batch] * 300)
    file = rf.read_file(path)
    for index in (*range(300), 0, 299):
        assert file.batch(index).num_rows == 1


def test_a_file_cut_at_any_byte_is_an_error(path):
    """apache/arrow#49896."""
    rf.write_file(path, tiny_batches())
    data = path.read_bytes()
    for size in range(len(data)):
        replace(path, data[:size])
        with pytest.raises(rf.TruncatedError):
            rf.read_file(path)


def test_a_flipped_byte_is_an_error_or_has_no_effect(path):
    batches = tiny_batches()
    rf.write_file(path, batches)
    data = bytearray(path.read_bytes())
    for place in range(len(data)):
        change = 1 << place % 8
        data[place] ^= change
        replace(path, data)
        try:
            got = list(rf.read_file(path))
        except rf.RaggedError:
            pass
        else:
            assert equal(got, batches), place
        data[place] ^= change


def test_flips_in_values_are_checksum_errors(path):
    batch = small_batch((50,) * 4)
    rf.write_file(path, [batch])
    data = path.read_bytes()
    values = batch.column("input_ids").values.to_numpy().tobytes()
    place = data.index(values)
    broken = data[: place + 40] + bytes([data[place + 40] ^ 1]) + data[place + 41 :]
    replace(path, broken)
    file = rf.read_file(path)
    for _ in range(2):
        with pytest.raises(rf.ChecksumError) as caught:
            file.batch(0)
        assert caught.value.where == rf.Where(str(path), 0)
    with pytest.raises(rf.ChecksumError):
        list(file)
    unverified = rf.read_file(path, verify=False)
    assert unverified.batch(0).num_rows == 4
    assert len(list(unverified)) == 1
    with pytest.raises(rf.ChecksumError):
        unverified.verify()


def test_verify_returns_the_trailer(path):
    trailer = rf.write_file(path, three_batches())
    assert rf.read_file(path).verify() == trailer


def test_exchanged_batches_are_found(path):
    """Two blocks of the footer point to each other's batch, of equal size and rows."""
    batches = [small_batch((2, 2), seed=i, prefix=f"{i}-", schema=TINY) for i in range(2)]
    rf.write_file(path, batches)
    data = bytearray(path.read_bytes())
    bounds = [8 + b for b in messages(stream_bytes(batches))]
    first, second = struct.pack("<q", bounds[1]), struct.pack("<q", bounds[2])
    a, b = data.rindex(first), data.rindex(second)
    data[a : a + 8], data[b : b + 8] = second, first
    replace(path, data)
    with pytest.raises(rf.RaggedError):
        list(rf.read_file(path))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", rf.TruncatedError),
        (b"ARROW1\0\0", rf.TruncatedError),
        (b"ARROW1\0\0" + bytes(4) + b"ARROW1", rf.TruncatedError),
        (b"ARROW1\0\0" + bytes(40) + b"\x10\0\0\0" + b"ARROW1", rf.CorruptError),
        (b"ARROW1\0\0" + bytes(40) + b"\xff\xff\xff\x7f" + b"ARROW1", rf.TruncatedError),
        (b"ARROW1\0\0" + bytes(40) + b"\xff\xff\xff\xff" + b"ARROW1", rf.TruncatedError),
        (b"PAR1" + bytes(40), rf.NotRaggedError),
        (b"hello", rf.NotRaggedError),
    ],
)
def test_other_files(path, data, error):
    replace(path, data)
    with pytest.raises(error) as caught:
        rf.read_file(path)
    assert type(caught.value) is error
    assert caught.value.where.file == str(path)


def test_missing_files_and_directories(tmp_path):
    with pytest.raises(rf.DatasetNotFoundError, match="RF-C008"):
        rf.read_file(tmp_path / "none.arrow")
    with pytest.raises(rf.NotRaggedError, match="a directory"):
        rf.read_file(tmp_path)


def replace(path, data):
    """Never in place: an error of an earlier reader may hold its mapping."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def plain_file(path, batches, schema, **options):
    path.unlink(missing_ok=True)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer,
    ):
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)


def test_a_file_without_its_schema(path):
    rf.write_file(path, tiny_batches())
    data = bytearray(path.read_bytes())
    data[12:16] = bytes(4)
    replace(path, data)
    with pytest.raises(rf.CorruptError, match="no schema"):
        rf.read_file(path)


@pytest.mark.parametrize("footer", [b"", b"\x08\0\0\0"])
def test_malformed_footers(footer):
    with pytest.raises(rf.CorruptError, match="malformed"):
        blocks_of(footer)


def test_a_footer_without_batches():
    # The root table at 8 has a vtable, at 4, without any field.
    assert blocks_of(bytes([8, 0, 0, 0, 4, 0, 4, 0, 4, 0, 0, 0])) == []


def test_files_of_other_writers(path):
    batch = small_batch()
    plain_file(path, [(batch, None)], batch.schema)
    with pytest.raises(rf.TruncatedError, match="no trailer"):
        rf.read_file(path)
    plain_file(path, [], batch.schema)
    with pytest.raises(rf.TruncatedError, match="no trailer"):
        rf.read_file(path)
    plain = pa.record_batch({"a": [1]})
    plain_file(path, [(plain, None)], plain.schema)
    with pytest.raises(rf.NotRaggedError):
        rf.read_file(path)


def test_dictionaries_are_refused(path):
    batch = pa.record_batch({"a": pa.array(["x"]).dictionary_encode()})
    plain_file(path, [(batch, None)], batch.schema)
    with pytest.raises(rf.CorruptError, match="dictionaries"):
        rf.read_file(path)


def pieces(path):
    """Return batches and custom metadata as plain Arrow sees them, the trailer included."""
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        return [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_files_are_read(path, codec):
    batches = [small_batch((300,) * 20)]
    rf.write_file(path, batches)
    plain_file(path, pieces(path), batches[0].schema, compression=codec)
    assert equal(list(rf.read_file(path)), batches)


def test_trailers_that_do_not_fit(path):
    batches = three_batches()
    rf.write_file(path, batches)
    whole = pieces(path)
    schema = batches[0].schema
    plain_file(path, whole, schema)
    assert equal(list(rf.read_file(path)), batches)
    plain_file(path, [whole[0], whole[3]], schema)
    with pytest.raises(rf.ChecksumError, match="number of batches"):
        rf.read_file(path)
    plain_file(path, [whole[0], whole[0], whole[0], whole[3]], schema)
    with pytest.raises(rf.ChecksumError, match="running digest"):
        list(rf.read_file(path))
    plain_file(path, [*whole[:3], (batches[0], whole[3][1])], schema)
    with pytest.raises(rf.CorruptError, match="trailer has rows"):
        rf.read_file(path)
    labelled = schema.with_metadata({**schema.metadata, b"run": b"1"})
    plain_file(
        path,
        [(pa.RecordBatch.from_arrays(b.columns, schema=labelled), m) for b, m in whole],
        labelled,
    )
    with pytest.raises(rf.ChecksumError, match="schema digest"):
        rf.read_file(path)
    other = [small_batch((1,), prefix="x")]
    rf.write_file(path.with_name("b.arrow"), other)
    plain_file(path, [pieces(path.with_name("b.arrow"))[0], *whole[1:]], schema)
    with pytest.raises(rf.ChecksumError, match="records that the trailer states"):
        rf.read_file(path).batch(0)
