"""A dataset is an Arrow stream for whoever asks for one."""

import pyarrow as pa
import pytest
from support.containers import small_batch

import ragged_format as rf

BATCHES = [small_batch((2, 1), seed=i, prefix=f"{i}-") for i in range(3)]
WHOLE = pa.Table.from_batches(BATCHES)


@pytest.fixture(params=["hot", "compact"])
def dataset(request, tmp_path):
    path = tmp_path / "data"
    with rf.Writer(path, BATCHES[0].schema, encoding=request.param, batch_rows=3) as writer:
        writer.write(BATCHES)
    return rf.Dataset(path)


def test_pyarrow_reads_it_with_its_metadata(dataset):
    table = pa.table(dataset)
    assert table.equals(WHOLE)
    assert table.schema.equals(dataset.schema, check_metadata=True)
    reader = pa.RecordBatchReader.from_stream(dataset)
    assert [batch.num_rows for batch in reader] == [batch.num_rows for batch in dataset.batches()]


def test_a_projection_is_exported(dataset):
    part = rf.Dataset(dataset.path, columns=["sample_id", "candidate_ids"])
    assert pa.table(part).equals(WHOLE.select(part.schema.names))


def test_it_is_exported_again_and_checked_as_a_whole(dataset):
    assert pa.table(dataset).equals(pa.table(dataset))
    rf.validate(dataset)
    assert rf.canonical(dataset).num_rows == dataset.num_rows


def test_other_tools_read_it(dataset):
    polars = pytest.importorskip("polars")
    assert polars.DataFrame(dataset)["sample_id"].to_list() == WHOLE["sample_id"].to_pylist()
    nanoarrow = pytest.importorskip("nanoarrow")
    assert len(nanoarrow.Array(dataset)) == dataset.num_rows
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        connection.register("records", dataset)
        assert connection.sql("SELECT count(*) FROM records").fetchall() == [(dataset.num_rows,)]


def test_an_error_on_the_way_reaches_the_consumer(dataset):
    for shard in dataset.shards:
        (dataset.path / shard.name).unlink()
    with pytest.raises(Exception, match="RF-C0"):
        pa.table(dataset)
