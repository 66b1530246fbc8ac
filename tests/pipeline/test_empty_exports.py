"""Exports of no records, and the way back."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.testing import rollouts


@pytest.fixture(scope="module")
def samples():
    return rollouts(np.random.default_rng(0), num_samples=4, vocab_size=300)


@pytest.fixture
def empty(samples, tmp_path):
    with rf.Writer(tmp_path / "empty", samples.schema):
        pass
    return tmp_path / "empty"


@pytest.mark.parametrize("name", ["out.parquet", "out"])
@pytest.mark.parametrize("adapter", ["parquet", None])
def test_an_empty_parquet_export_comes_back(samples, empty, tmp_path, name, adapter):
    rp.export(empty, tmp_path / name, to="parquet")
    done = rp.convert(tmp_path / name, tmp_path / "back", adapter=adapter)
    dataset = rf.Dataset(tmp_path / "back")
    assert (done.rows, dataset.num_rows) == (0, 0)
    assert dataset.schema.equals(samples.schema, check_metadata=True)
    dataset.validate()


def test_an_empty_file_among_others_is_no_end(samples, empty, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    with rf.Writer(tmp_path / "full", samples.schema) as writer:
        writer.write(samples)
    rp.export(empty, folder / "a.parquet", to="parquet")
    rp.export(tmp_path / "full", folder / "b.parquet", to="parquet")
    assert rp.convert(folder, tmp_path / "back", adapter="parquet").rows == 4


def test_an_empty_table_of_another_tool_needs_a_vocabulary(tmp_path):
    columns = {"sample_id": pa.string(), "input_ids": pa.list_(pa.int32())}
    schema = pa.schema(columns | {"completion_mask": pa.list_(pa.int8())})
    pq.write_table(schema.empty_table(), tmp_path / "a.parquet")
    with pytest.raises(rf.ConversionError, match="vocabulary"):
        rp.convert(tmp_path / "a.parquet", tmp_path / "no", adapter="parquet")
    options = {"vocab_size": 10}
    done = rp.convert(tmp_path / "a.parquet", tmp_path / "out", adapter="parquet", options=options)
    assert done.rows == 0
    assert rf.Dataset(tmp_path / "out").schema.names == schema.names


def test_a_form_that_states_no_columns_without_records_is_refused(empty, tmp_path):
    rp.export(empty, tmp_path / "out", to="skycap", options={"lossy": True})
    with pytest.raises(rf.ConversionError, match="no records"):
        rp.convert(
            tmp_path / "out", tmp_path / "back", adapter="skycap", options={"vocab_size": 300}
        )
