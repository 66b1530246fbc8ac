"""Single records and columns of compact shards: what is decoded, and what is kept."""

from functools import partial

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.compact import files as compact_files
from ragged_format.compact.decoder import BatchDecoder
from ragged_format.compact.files import CompactReader
from ragged_format.compact.messages import MessageFile, StoredBatch
from ragged_format.testing import assert_ragged_equal, rollouts

SETS = ["rollout_log_probs", "candidate_counts", "candidate_ids"]
ROWS, BATCH = 90, 30


@pytest.fixture(scope="module", params=["sets", "all"])
def data(request):
    columns = SETS if request.param == "sets" else None
    return rollouts(np.random.default_rng(3), num_samples=ROWS, columns=columns)


@pytest.fixture
def path(tmp_path, data):
    options = {"encoding": "compact", "batch_rows": BATCH}
    with rf.Writer(tmp_path / "data", data.schema, **options) as writer:
        writer.write(data)
    return tmp_path / "data"


@pytest.fixture
def decoded(monkeypatch):
    """Return the calls that decode: rows of one batch and columns, or None for all."""
    calls = []
    real = BatchDecoder.batch

    def batch(self, wanted=None, rows=None):
        calls.append((rows, None if wanted is None else tuple(wanted.columns)))
        return real(self, wanted, rows)

    monkeypatch.setattr(BatchDecoder, "batch", batch)
    return calls


@pytest.fixture
def opened(monkeypatch):
    """Return the numbers of batches that were opened to be decompressed."""
    calls = []
    real = MessageFile.batch

    def batch(self, index):
        calls.append(index)
        return real(self, index)

    monkeypatch.setattr(MessageFile, "batch", batch)
    return calls


@pytest.fixture
def used(monkeypatch):
    """Return the names of columns that were decompressed."""
    names = set()
    real = StoredBatch.__call__

    def value(self, name):
        names.add(name)
        return real(self, name)

    monkeypatch.setattr(StoredBatch, "__call__", value)
    return names


def order_of(rows, seed=0):
    return np.random.default_rng(seed).permutation(rows).tolist()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("columns", [None, ["candidate_ids"], ["sample_id", "rollout_log_probs"]])
def test_records_in_any_order_are_those_of_the_data(path, data, columns, verify):
    dataset = rf.Dataset(path, columns=columns, verify=verify)
    names = dataset.schema.names
    for row in order_of(ROWS):
        got = dataset[row]
        assert got.schema.equals(dataset.schema, check_metadata=True)
        assert_ragged_equal(got, data.slice(row, 1).select(names))
    assert_ragged_equal(dataset[:], data.select(names))


def test_one_record_of_sets_is_decoded_alone_and_its_batch_decompressed_once(
    path, data, decoded, opened
):
    dataset = rf.Dataset(path)
    for row in (3, 17, 4):
        assert_ragged_equal(dataset[row], data.slice(row, 1))
    assert opened == [0]
    if "topk_ids" not in data.schema.names:
        assert [rows for rows, _ in decoded] == [(3, 4), (17, 18), (4, 5)]
    else:  # the log-probs that heads share are those of all records
        assert decoded == [(None, None)]


def test_a_batch_of_which_many_records_are_asked_for_is_decoded_whole(path, decoded, opened):
    dataset = rf.Dataset(path)
    for row in range(BATCH):
        dataset[row]
    assert [rows for rows, _ in decoded].count(None) == 1
    assert len(decoded) <= BATCH / compact_files._ALONE
    assert opened == [0]


@pytest.mark.parametrize("rows", [[5, 33, 61], [61, 5, 5, 33], list(range(25)), [40], [0, 89]])
def test_taking_decodes_each_batch_that_is_touched_once(path, data, rows, opened):
    dataset = rf.Dataset(path)
    expected = rf.concat([data.slice(row, 1) for row in rows])
    assert_ragged_equal(dataset.take(rows), expected)
    assert sorted(opened) == sorted({row // BATCH for row in rows})
    opened.clear()
    narrow = dataset.take(rows, columns=["candidate_ids"])
    assert_ragged_equal(narrow, expected.select(narrow.schema.names))


def test_what_is_taken_keeps_no_batch(path):
    dataset = rf.Dataset(path)
    for rows in ([7], [7, 70], list(range(20, 40))):
        got = dataset.take(rows)
        for name in ("input_ids", "candidate_ids"):
            kept = sum(b.size for b in got[name].buffers() if b is not None)
            assert kept <= 2 * got[name].nbytes + 256, name


def test_columns_that_are_not_asked_for_are_not_decoded(path, decoded):
    dataset = rf.Dataset(path, columns=["input_ids"])
    dataset[3]
    for _ in dataset.batches():
        pass
    dataset.take(list(range(29)))
    for _ in rf.Dataset(path).batches(columns=["input_ids"]):
        pass
    assert {columns for _, columns in decoded} == {("input_ids",)}


def test_a_batch_that_is_kept_is_not_decoded_for_fewer_columns(path, decoded):
    reader = CompactReader(path / rf.Dataset(path).shards[0].name, verify=False)
    whole = reader.batch(1)
    narrow = reader.batch(1, columns=["candidate_ids"])
    assert narrow.schema.names == ["completion_mask", "candidate_counts", "candidate_ids"]
    assert reader.rows(1, np.array([2, 2, 5])).num_rows == 3
    assert len(decoded) == 1
    assert_ragged_equal(narrow, whole.select(narrow.schema.names))
    with pytest.raises(rf.SchemaMismatchError):
        reader.batch(1, columns=["absent"])
    with pytest.raises(rf.OutOfRangeError):
        reader.rows(9, np.array([0]))


def test_a_reader_of_some_columns_decodes_these(path, data, decoded):
    file = path / rf.Dataset(path).shards[0].name
    reader = CompactReader(file, columns=["input_ids"], verify=False)
    assert_ragged_equal(rf.concat(list(reader)), data.select(["input_ids"]))
    assert_ragged_equal(reader.batch(2), data.slice(60).select(["input_ids"]))
    assert {columns for _, columns in decoded} == {("input_ids",)}
    with pytest.raises(rf.SchemaMismatchError):
        list(reader.batches(columns=["candidate_ids"]))


def test_columns_that_are_not_asked_for_are_not_decompressed(path, used):
    rf.Dataset(path, columns=["input_ids"])[3]
    assert used == {"header", "record", "axis:token", "column:input_ids"}


@pytest.mark.parametrize("columns", ["input_ids", [], 5, [5]])
def test_columns_that_are_no_list_of_names_are_refused(path, columns):
    reader = CompactReader(path / rf.Dataset(path).shards[0].name, verify=False)
    for ask in (reader.batches, partial(reader.batch, 0)):
        with pytest.raises(rf.SchemaMismatchError):
            ask(columns=columns)
