"""Arguments of the wrong kind are typed errors that name what was expected."""

import io
import socket

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


@pytest.mark.parametrize("name", ["batch_rows", "batch_bytes", "max_shard_bytes"])
@pytest.mark.parametrize("size", [0, -1, 1.5, "9", None, True])
def test_sizes_of_a_writer_that_are_no_positive_integers(tmp_path, samples, name, size):
    with pytest.raises(rf.LimitExceededError, match=f"{name} is a positive integer"):
        rf.Writer(tmp_path / "data", samples.schema, **{name: size})
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("size", [0, -1, 1.5, "9", True])
def test_a_batch_size_that_is_no_positive_integer(dataset, size):
    with pytest.raises(rf.LimitExceededError, match="batch_size is a positive integer"):
        dataset.batches(batch_size=size)


@pytest.mark.parametrize("shape", [(1.5,), 3, (0,), (2, -2), ("2",), (2**16, 2**15)])
def test_a_shape_that_no_element_has(shape):
    with pytest.raises(rf.SchemaMismatchError, match="shape"):
        rf.Column("own", "token", pa.int8(), shape=shape)


def test_a_shape_of_any_sequence_of_integers():
    column = rf.Column("own", "token", pa.int8(), shape=[np.int64(2), 3])
    assert column == rf.Column("own", "token", pa.int8(), shape=(2, 3))
    assert hash(column) == hash(rf.Column("own", "token", pa.int8(), shape=(2, 3)))


@pytest.mark.parametrize("texts", [(5, "token", None), ("own", None, None), ("own", "token", 5)])
def test_names_that_are_no_text(texts):
    name, axis, opens = texts
    with pytest.raises(rf.SchemaMismatchError, match="text"):
        rf.Column(name, axis, pa.int8(), opens=opens)


@pytest.mark.parametrize("columns", [5, "group_id", [5], [None]])
def test_columns_that_are_no_list_of_names(columns):
    with pytest.raises(rf.SchemaMismatchError, match="a list of names"):
        rf.sample_schema(vocab_size=9, columns=columns)


def kind(value):
    """A name that is the same in every process."""
    return type(value).__name__


class GivesText:
    def read(self, size):
        return "x" * size


@pytest.mark.parametrize(
    "source", [None, 5, [b""], io.StringIO("text"), GivesText(), socket.socket], ids=kind
)
def test_a_source_that_gives_no_bytes(source):
    with pytest.raises(rf.NotRaggedError, match="no bytes"):
        rf.read_stream(source)


@pytest.mark.parametrize("sink", [None, 5, io.StringIO(), b"x"], ids=kind)
def test_a_sink_that_takes_no_bytes(samples, sink):
    with pytest.raises(rf.UnsupportedFeatureError, match="takes no bytes"):
        rf.write_stream(sink, samples)


def test_a_socket_that_does_not_wait(samples):
    """Once it was read as cut, and writing to it went on for ever."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        with pytest.raises(rf.UnsupportedFeatureError, match="non-blocking"):
            rf.read_stream(right.makefile("rb"))
        with (
            left.makefile("wb", buffering=0) as sink,
            pytest.raises(rf.UnsupportedFeatureError, match="non-blocking"),
        ):
            rf.write_stream(sink, [samples] * 9999)
