"""Arguments that make no sense raise typed errors that name the argument."""

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format import ragged
from ragged_format.testing import fill_batch, in_sequence

NARROW = [
    "candidate_counts", "candidate_ids", "token_offset",
    rf.Column("small", "target", pa.int8(), opens="few"), rf.Column("few_ids", "few", pa.int64()),
    rf.Column("bare", "token", pa.uint8(), opens="nothing"),
]  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    schema = rf.sample_schema(vocab_size=300, columns=NARROW, root_axes=["unused"])
    return fill_batch(schema, np.random.default_rng(1), [6, 0, 4], scored=1.0)


def fails(error, code, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert caught.value.code == code
    assert caught.value.expected is not None
    assert caught.value.got is not None
    return caught.value


@pytest.mark.parametrize("indices", [[3], [-1], [0, 1, 99]])
def test_an_index_outside_the_records(batch, indices):
    error = fails(rf.LimitExceededError, "RF-L002", rf.take, batch, indices)
    assert error.where.position == len(indices) - 1
    assert error.got == indices[-1]


def test_an_index_outside_an_inner_axis(batch):
    error = fails(rf.LimitExceededError, "RF-L002", rf.take, batch, [10], axis="token", lengths=[1])
    assert "token axis" in str(error)
    assert error.expected == "0 <= index < 10"


@pytest.mark.parametrize("indices", [[0.0], [True], ["a"], 1, [[0]], np.array([1.5])])
def test_indices_that_are_no_integers(batch, indices):
    fails(rf.SchemaMismatchError, "RF-S004", rf.take, batch, indices)


@pytest.mark.parametrize(
    "lengths", [None, [2, 0], [1, 0, 0], [2, 1, -1], [1, 0, 0, 1]], ids=lambda value: str(value)
)
def test_lengths_that_do_not_fit(batch, lengths):
    error = fails(
        rf.InvariantError, "RF-I005", rf.take, batch, [0, 1], axis="token", lengths=lengths
    )
    assert "each parent element" in error.remedy


def test_a_mask_cannot_count_to_two(batch):
    error = fails(
        rf.InvariantError, "RF-I008", rf.take, batch, [0, 1], axis="target",
        lengths=[0, 2, *[0] * 8],
    )  # fmt: skip
    assert (error.where.column, error.where.position) == ("completion_mask", 1)


def test_counts_do_not_wrap(batch):
    """pola-rs/polars#10740: a count of 200 in 8 bits became -56 without a word."""
    targets = int(ragged.axis_view(batch, "few").parent_offsets.size) - 1
    lengths = [200, *[0] * (targets - 1)]
    error = fails(
        rf.LimitExceededError, "RF-L001", rf.take, batch, [0] * 200, axis="few", lengths=lengths
    )
    assert (error.where.column, error.where.position) == ("small", 0)
    assert (error.expected, error.got) == ("<= 127", 200)
    kept = rf.take(batch, [0] * 127, axis="few", lengths=[127, *[0] * (targets - 1)])
    assert max(v for one in kept.column("small").to_pylist() for v in one) == 127


@pytest.mark.parametrize("axis", ["record", "token", "candidate"])
@pytest.mark.parametrize("extra", [-1, 1])
def test_keep_of_another_length(batch, axis, extra):
    size = batch.num_rows
    if axis != "record":
        size = int(ragged.axis_view(batch, axis).parent_offsets[-1])
    error = fails(rf.InvariantError, "RF-I003", rf.select, batch, axis, np.ones(size + extra, bool))
    assert error.expected == f"({size},)"


def test_keep_that_lists_positions(batch):
    error = fails(rf.SchemaMismatchError, "RF-S004", rf.select, batch, "record", [0, 1, 1])
    assert "take" in error.remedy


@pytest.mark.parametrize("axis", ["tokens", "", "teacher_topk"])
def test_an_axis_that_does_not_exist(batch, axis):
    for call in (
        lambda: rf.take(batch, [0], axis=axis, lengths=[1]),
        lambda: rf.select(batch, axis, np.ones(1, bool)),
        lambda: rf.slice_axis(batch, axis=axis),
        lambda: rf.concat([batch], axis=axis),
        lambda: ragged.axis_view(batch, axis),
    ):
        error = fails(rf.SchemaMismatchError, "RF-S006", call)
        assert error.got == axis
        assert "token, unused, target" in error.expected


def test_an_axis_without_columns_has_no_lengths(batch):
    error = fails(rf.SchemaMismatchError, "RF-S006", ragged.axis_view, batch, "unused")
    assert "lengths are unknown" in error.what


def test_an_axis_that_only_its_counts_describe(batch):
    none = rf.slice_axis(batch, stop=0, axis="nothing")
    assert none.column("bare").to_pylist() == [[0] * 6, [], [0] * 4]


@pytest.mark.parametrize("bounds", [(-1, None), (0, -1), (-2, -1)])
@pytest.mark.parametrize("axis", ["record", "target"])
def test_negative_bounds(batch, bounds, axis):
    fails(rf.LimitExceededError, "RF-L002", rf.slice_axis, batch, *bounds, axis=axis)
    fails(rf.LimitExceededError, "RF-L002", rf.cut, batch, *bounds)


def test_only_samples_are_cut(batch):
    error = fails(rf.SchemaMismatchError, "RF-S003", rf.cut, in_sequence(batch), 0, 1)
    assert error.got == "packed"


@pytest.mark.parametrize("counts", [[3, 1], [1, 1], [3, 0], [4, -1], []])
def test_runs_that_do_not_fit(batch, counts):
    fails(rf.InvariantError, "RF-I005", rf.join, batch, counts)


def test_runs_that_are_no_integers(batch):
    fails(rf.SchemaMismatchError, "RF-S004", rf.join, batch, [1.0, 2.0])


def test_concat_of_nothing():
    fails(rf.SchemaMismatchError, "RF-S004", rf.concat, [])


def test_concat_of_other_schemas(batch):
    other = fill_batch(
        rf.sample_schema(vocab_size=301, columns=NARROW, root_axes=["unused"]),
        np.random.default_rng(1),
        [1],
    )
    error = fails(rf.SchemaMismatchError, "RF-S010", rf.concat, [batch, batch, other])
    assert error.where.batch == 2
    assert (error.expected, error.got) == (300, 301)


def test_concat_of_unequal_numbers_of_records(batch):
    fails(rf.InvariantError, "RF-I003", rf.concat, [batch, batch[:2]], axis="token")


def test_concat_takes_other_metadata_of_the_first(batch):
    run = batch.replace_schema_metadata({**batch.schema.metadata, b"run": b"2"})
    assert rf.concat([batch, run]).schema.equals(batch.schema, check_metadata=True)
    assert rf.concat([run, batch]).schema.metadata[b"run"] == b"2"


def test_concat_of_one_batch_is_that_batch(batch):
    assert rf.concat([batch]) is batch
    assert rf.concat([batch], axis="token") is batch


def test_text_beyond_2_gib(batch, monkeypatch):
    """apache/arrow#25822: text keeps 32-bit offsets, so that concatenation has a limit."""

    def overflow(_batches):
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(ragged.pa, "concat_batches", overflow)
    error = fails(rf.LimitExceededError, "RF-L001", rf.concat, [batch, batch])
    assert "offset overflow" in error.got
