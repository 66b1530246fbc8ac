"""Public reports about files and logs of Arrow data, as small cases."""

import io

import pyarrow as pa
import pytest
from support.containers import messages, small_batch, stream_bytes

import ragged_format as rf


def test_files_can_be_mapped_whichever_function_wrote_them(tmp_path):
    """pola-rs/polars#11581: what one function wrote could be mapped, what another wrote not."""
    batch = small_batch((500,) * 50)
    rf.write_file(tmp_path / "a.arrow", [batch])
    with rf.Writer(tmp_path / "data", batch.schema) as writer:
        writer.write(batch)
    paths = [tmp_path / "a.arrow", *(tmp_path / "data").glob("*.arrow")]
    assert len(paths) == 2
    for path in paths:
        file = rf.read_file(path, verify=False)
        before = pa.total_allocated_bytes()
        assert file.batch(0).num_rows == 50
        assert pa.total_allocated_bytes() - before < 1000


@pytest.mark.parametrize(("verify", "code"), [(True, "RF-C004"), (False, "RF-I001")])
def test_mapped_files_are_checked_before_they_are_used(tmp_path, verify, code):
    """pola-rs/polars#28258, #28218, ClickHouse/ClickHouse#106395, commandprompt/pgcolumnar#228.

    Where offsets were not looked at, readers of mapped files left the file.
    """
    batch = small_batch((3, 2))
    rf.write_file(tmp_path / "a.arrow", [batch])
    data = (tmp_path / "a.arrow").read_bytes()
    good = b"".join(n.to_bytes(8, "little") for n in (0, 3, 5))
    bad = b"".join(n.to_bytes(8, "little") for n in (0, 7, 5))
    assert good in data
    (tmp_path / "a.arrow").write_bytes(data.replace(good, bad))
    with pytest.raises(rf.RaggedError, match=code):
        rf.read_file(tmp_path / "a.arrow", verify=verify).batch(0)


def test_what_was_written_before_a_crash_is_read():
    """apache/arrow#42729: a format with its index at the end loses all with it."""
    batches = [small_batch((2,), seed=seed, prefix=f"{seed}") for seed in range(4)]
    data = stream_bytes(batches)
    bounds = messages(data)
    reader = rf.read_stream(data[: bounds[3] + 40])  # the schema, two batches, and a part of one
    got = [rf.digest(next(reader)) for _ in range(2)]
    assert got == [rf.digest(batch) for batch in batches[:2]]
    with pytest.raises(rf.TruncatedError):
        next(reader)


def test_a_row_of_a_large_batch_is_sent_alone():
    """ray-project/ray#29814: a slice that was sent carried the buffers of its parent."""
    batch = small_batch((500,) * 200)
    sink = io.BytesIO()
    rf.write_stream(sink, batch.slice(7, 1))
    assert len(sink.getvalue()) < batch.nbytes / 20
    (alone,) = rf.read_stream(sink.getvalue())
    assert alone.get_total_buffer_size() < batch.nbytes / 20


@pytest.mark.parametrize("encoding", ["hot", "compact"])
def test_one_row_of_many_batches_is_read_by_itself(tmp_path, encoding):
    """apache/arrow#39565: taking one row of a table of many chunks read and joined all of them."""
    with rf.Writer(
        tmp_path / "data", small_batch().schema, batch_rows=1, encoding=encoding
    ) as writer:
        for number in range(60):
            writer.write(small_batch((400,), seed=number, prefix=f"{number}-"))
    dataset = rf.Dataset(tmp_path / "data")
    dataset.take([3])
    before = pa.total_allocated_bytes()
    row = dataset.take([30])
    assert row.num_rows == 1
    assert row["sample_id"].to_pylist()[0].startswith("30-")
    assert pa.total_allocated_bytes() - before < 5 * row.nbytes
