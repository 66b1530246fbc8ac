"""Messages of compact files: compressed as the spec says, stored as they are, and damaged."""

import struct

import numpy as np
import pyarrow as pa
import pytest
import zstandard

import ragged_format as rf
from ragged_format.compact.files import CompactReader, CompactWriter
from ragged_format.compact.messages import MessageFile
from ragged_format.testing import assert_ragged_equal, rollouts


@pytest.fixture
def data():
    return rollouts(np.random.default_rng(7), num_samples=12, columns=None)


@pytest.fixture
def path(tmp_path, data):
    with CompactWriter(tmp_path / "a.arrow", data.schema) as writer:
        writer.write(data)
    return tmp_path / "a.arrow"


def rewritten(path, target, *, codec):
    """Write the same record batches under another compression."""
    with pa.ipc.open_file(path) as file:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_file(target, file.schema, options=options) as writer:
            for index in range(file.num_record_batches):
                batch, metadata = file.get_batch_with_custom_metadata(index)
                writer.write_batch(batch, custom_metadata=metadata)
    return target


def test_values_are_those_that_arrow_reads(path):
    with pa.ipc.open_file(path) as file:
        batch = file.get_batch(0)
    stored = MessageFile(path, batch.schema.names).batch(0)
    for name in batch.schema.names:
        assert stored(name).tobytes() == batch[name][0].as_py()
        assert stored(name) is stored(name)


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_buffers_may_be_stored_as_they_are(path, data, tmp_path, codec):
    other = rewritten(path, tmp_path / "b.arrow", codec=codec)
    assert_ragged_equal(rf.concat(list(CompactReader(other))), data)


def test_other_compression_is_refused(path, tmp_path):
    other = rewritten(path, tmp_path / "b.arrow", codec="lz4")
    with pytest.raises(rf.CorruptError, match="damaged"):
        list(CompactReader(other))


def frames(data):
    """Return where the zstd frames of a file begin, each after its declared size."""
    out, at = [], data.find(zstandard.MAGIC_NUMBER.to_bytes(4, "little"))
    while at >= 0:
        out.append(at)
        at = data.find(zstandard.MAGIC_NUMBER.to_bytes(4, "little"), at + 4)
    return out


@pytest.mark.parametrize("size", [-2, 0, 1, 1 << 40, (1 << 63) - 1])
def test_a_declared_size_that_lies_is_found(path, size):
    whole = path.read_bytes()
    assert len(frames(whole)) > 5
    for at in frames(whole):
        if whole[at - 8 : at] == struct.pack("<q", size):
            continue
        path.write_bytes(whole[: at - 8] + struct.pack("<q", size) + whole[at:])
        with pytest.raises(rf.RaggedError):
            list(CompactReader(path, verify=False))


def test_a_damaged_frame_is_found_or_changes_nothing(path, data):
    whole = path.read_bytes()
    found = 0
    for at in frames(whole):
        for place in (at, at + 4, at + 5, at + 9):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            try:
                assert_ragged_equal(rf.concat(list(CompactReader(path))), data)
            except rf.RaggedError:
                found += 1
    assert found > 2 * len(frames(whole))
