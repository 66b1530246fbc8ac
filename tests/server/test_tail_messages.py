"""Whole batches of segments are read as they are stored, with the digest that they came with."""

import pyarrow as pa
import pytest
from support.store_kit import request, samples

import ragged_format as rf
from ragged_format.errors import ChecksumError
from ragged_format.testing import assert_ragged_equal
from ragged_server.http.tail import CURSOR_KEY, _encoded
from ragged_server.process.remote_store import RemoteStore, StoreServer
from ragged_server.store.records import StoreSettings
from ragged_server.store.store import Store

KEY = CURSOR_KEY.encode()


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "log", StoreSettings()) as found:
        for number in range(3):
            found.append(request(samples(4, prefix=f"s{number}-", seed=number))).result()
        yield found


def streamed(store, page):
    return rf.read_stream(b"".join(_encoded(store.schema, page, is_compressed=False)))


def test_messages_are_there_for_whole_batches_only(store):
    page = store.read(None, max_bytes=1 << 20)
    assert [message is None for message in page.messages] == [False] * 3
    half = store.read(None, max_bytes=1 << 20, rank=0, world_size=2)
    assert len(half.messages) == len(half.batches)
    for batch, message in zip(half.batches, half.messages, strict=True):
        assert (message is None) == (batch.num_rows < 4)


def test_a_stream_of_stored_messages_is_that_of_their_batches(store):
    page = store.read(None, max_bytes=1 << 20)
    reader = streamed(store, page)
    cursors = []
    for batch, expected in zip(reader, page.batches, strict=True):
        assert_ragged_equal(batch, expected)
        cursors.append(reader.metadata[KEY].decode())
        assert set(reader.metadata) == {KEY}
    assert tuple(cursors) == page.cursors
    assert reader.trailer is not None
    plain = pa.ipc.open_stream(b"".join(_encoded(store.schema, page, is_compressed=False)))
    assert [batch.num_rows for batch in plain] == [4, 4, 4, 0]


def test_workers_get_the_same_messages(store, tmp_path):
    path = tmp_path / "socket"
    with StoreServer(store, path), RemoteStore(path) as remote:
        ours, theirs = (one.read(None, max_bytes=1 << 20) for one in (store, remote))
        parted = remote.read(None, max_bytes=1 << 20, rank=0, world_size=2)
        stored = store.read(None, max_bytes=1 << 20, rank=0, world_size=2)
    assert [one.to_pybytes() for one in theirs.messages] == [
        one.to_pybytes() for one in ours.messages
    ]
    assert [one is None for one in parted.messages] == [one is None for one in stored.messages]


def test_the_reader_finds_what_was_damaged_on_the_disk(store):
    page = store.read(None, max_bytes=1 << 20)
    path = next((store.directory / "log").glob("*.arrows"))
    data = bytearray(path.read_bytes())
    place = data.index(b"s1-")
    data[place] ^= 1
    path.write_bytes(bytes(data))
    page = store.read(None, max_bytes=1 << 20)
    with pytest.raises(ChecksumError):
        list(streamed(store, page))


def test_a_message_without_digest_is_not_written():
    batch = samples(2)
    sink = pa.BufferOutputStream()
    writer = rf.StreamWriter(sink, batch.schema)
    with pytest.raises(ChecksumError, match="no digest"):
        writer.write_message(batch.serialize())
    writer.write(batch)
    writer.close()
    assert [one.num_rows for one in rf.read_stream(sink.getvalue())] == [2]
