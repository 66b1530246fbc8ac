"""Arguments of the wrong kind are typed errors that name what was expected."""

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.packing import pack_row, plan_rows, unpack_row
from ragged_format.testing import assert_ragged_equal, rollouts


@pytest.fixture(scope="module")
def samples():
    return rollouts(np.random.default_rng(0), num_samples=4, prompt_length=5, response_length=5)


@pytest.fixture
def dataset(tmp_path, samples):
    with rf.Writer(tmp_path / "data", samples.schema) as writer:
        writer.write(samples)
    return rf.Dataset(tmp_path / "data")


def test_an_unknown_level_of_validation(samples):
    with pytest.raises(rf.LimitExceededError, match="level"):
        rf.validate(samples, level="cheap")


@pytest.mark.parametrize("index", ["a", 1.5, None, (0, 1)])
def test_an_index_that_is_no_integer(dataset, index):
    with pytest.raises(rf.OutOfRangeError):
        dataset[index]


def test_numpy_integers_are_indices(dataset):
    assert_ragged_equal(dataset[np.int64(1)], dataset[1])


@pytest.mark.parametrize("schema", [None, "schema", {}])
def test_a_schema_that_is_none(tmp_path, schema):
    with pytest.raises(rf.NotRaggedError):
        rf.Writer(tmp_path / "data", schema)
    with pytest.raises(rf.NotRaggedError):
        rf.parse_schema(schema)


def test_a_file_where_the_dataset_should_be(tmp_path, samples):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(rf.DatasetExistsError):
            rf.Writer(path, samples.schema)


@pytest.mark.parametrize("call", [pack_row, unpack_row, lambda data: plan_rows(data, 9)])
@pytest.mark.parametrize("data", [None, 1, {"input_ids": []}])
def test_data_that_is_no_arrow_batch(call, data):
    with pytest.raises(rf.SchemaMismatchError):
        call(data)


def test_tables_are_packed_like_batches(samples):
    table = pa.Table.from_batches([samples.slice(0, 1), samples.slice(1)])
    row = pack_row(table, null_advantage="keep")
    assert_ragged_equal(row, pack_row(samples, null_advantage="keep"))
    assert_ragged_equal(unpack_row(pa.Table.from_batches([row])), unpack_row(row))


@pytest.mark.parametrize("options", [{"token_budget": 9.5}, {"token_budget": 9, "ranks": "2"}])
def test_a_plan_is_counted_in_integers(samples, options):
    with pytest.raises(rf.PackingError):
        plan_rows(samples, **options)
