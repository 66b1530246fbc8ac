"""A write that failed on the way is the writer's last: nothing that follows is taken for whole."""

import io
import os

import pyarrow as pa
import pytest
from support.containers import (
    equal,
    messages,
    small_batch,
    small_schema,
    stream_bytes,
    three_batches,
)

import ragged_format as rf
from ragged_format.compact.files import CompactWriter
from ragged_format.local_files import NewFile


class FullOnce:
    """A file that is full for one write after the first `room` bytes, and takes a part of it."""

    def __init__(self, file, room):
        self._file = file
        self._room = room

    def write(self, data):
        view = memoryview(data).cast("B")
        if self._room is not None and len(view) > self._room:
            self._file.write(view[: self._room])
            self._room = None
            raise OSError(28, "no space left on device")
        if self._room is not None:
            self._room -= len(view)
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture
def full_once(monkeypatch):
    """Let the next file that a writer makes be full for a moment after so many bytes."""

    def after(room):
        def init(self, path):
            monkeypatch.undo()
            self.__init__(path)
            self.file = FullOnce(self.file, room)

        monkeypatch.setattr(NewFile, "__init__", init)

    return after


def room_for_one_batch():
    return messages(stream_bytes(three_batches()[:1]))[2] + 100


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def write_again_and_again(writer, data):
    for _ in range(99):
        writer.write(data)


@pytest.mark.parametrize("encoding", ["hot", "compact"])
def test_nothing_is_committed_after_a_failed_write(tmp_path, full_once, encoding):
    full_once(room_for_one_batch() if encoding == "hot" else 8000)
    batches = three_batches()
    writer = rf.Writer(tmp_path / "x", batches[0].schema, batch_rows=1, encoding=encoding)
    with pytest.raises(OSError, match="no space"):
        write_again_and_again(writer, batches)
    with pytest.raises(rf.DatasetExistsError, match="an earlier write failed"):
        writer.write(batches[0])
    with pytest.raises(rf.DatasetExistsError, match="an earlier write failed"):
        writer.close()
    assert names(tmp_path / "x") == []
    with rf.Writer(tmp_path / "x", batches[0].schema) as another:
        another.write(batches)
    rf.Dataset(tmp_path / "x").verify()


@pytest.mark.parametrize("kind", [rf.FileWriter, rf.StreamWriter, CompactWriter])
def test_no_file_appears_after_a_failed_write(tmp_path, full_once, kind):
    full_once(8000)
    batch = small_batch()
    writer = kind(tmp_path / "x.arrow", batch.schema)
    with pytest.raises(OSError, match="no space"):
        write_again_and_again(writer, batch)
    for step in (lambda: writer.write(batch), writer.close):
        with pytest.raises(rf.DatasetExistsError, match="an earlier write failed"):
            step()
    writer.abort()
    assert names(tmp_path) == []


def test_a_stream_has_no_end_after_a_failed_write():
    data = io.BytesIO()
    batches = three_batches()
    writer = rf.StreamWriter(FullOnce(data, room_for_one_batch()), batches[0].schema)
    writer.write(batches[0])
    with pytest.raises(OSError, match="no space"):
        writer.write(batches[1])
    for step in (lambda: writer.write(batches[1]), writer.close):
        with pytest.raises(rf.DatasetExistsError, match="an earlier write failed"):
            step()
    reader = rf.read_stream(data.getvalue())
    assert equal([next(reader)], batches[:1])
    with pytest.raises(rf.TruncatedError):
        next(reader)


@pytest.mark.parametrize("kind", [rf.FileWriter, rf.StreamWriter, CompactWriter])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(rf.DatasetExistsError, match="taken by something else"):
            kind(tmp_path / name, small_schema())
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["folder", "pipe"]


@pytest.mark.parametrize("kind", [rf.FileWriter, rf.StreamWriter])
def test_a_writer_that_cannot_begin_leaves_nothing(tmp_path, full_once, kind):
    full_once(1)
    with pytest.raises(OSError, match="no space"):
        kind(tmp_path / "x.arrow", small_schema())
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", [rf.FileWriter, rf.StreamWriter, CompactWriter])
@pytest.mark.parametrize("end", ["close", "abort"])
def test_nothing_is_written_after_the_end(tmp_path, kind, end):
    path = tmp_path / "x.arrow"
    writer = kind(path, small_schema())
    writer.write(small_batch())
    getattr(writer, end)()
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(rf.DatasetExistsError, match="the writer is finished"):
        writer.write(small_batch())
    if end == "abort":
        with pytest.raises(rf.DatasetExistsError, match="the writer is finished"):
            writer.close()
    assert (path.read_bytes() if path.exists() else None) == before


def test_an_aborted_stream_gets_no_end():
    """Basekick-Labs/arc#722: the error path wrote the end of the stream."""
    sink = io.BytesIO()
    writer = rf.StreamWriter(sink, small_schema())
    writer.write(small_batch())
    writer.abort()
    with pytest.raises(rf.DatasetExistsError, match="the writer is finished"):
        writer.close()
    with pytest.raises(rf.TruncatedError):
        list(rf.read_stream(sink.getvalue()))


def test_an_invalid_batch_of_a_table_keeps_all_of_it_out(tmp_path):
    good = small_batch()
    bad = good.to_pylist()
    bad[0]["input_ids"][0] = 10**6
    table = pa.Table.from_batches([good, pa.RecordBatch.from_pylist(bad, schema=good.schema)])
    with rf.Writer(tmp_path / "x", good.schema) as writer:
        with pytest.raises(rf.InvariantError, match="RF-I007") as caught:
            writer.write(table)
        assert caught.value.where.batch == 1
        assert writer.num_rows == 0
        writer.write(good)
    assert equal([rf.Dataset(tmp_path / "x")[:]], [good])
