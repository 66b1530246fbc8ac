"""Numbers at their ends, of numpy's kinds, and nulls where none may be."""

import json

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.torch import Mixture, RaggedBatch, RaggedIterable, RaggedLoader

KINDS = [RaggedLoader, RaggedIterable]


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_json_whatever_kind_of_integers_came(samples, kind):
    loader = kind(
        samples, batch_size=np.int64(10), seed=np.uint8(3), rank=np.int32(0),
        world_size=np.int16(1), shuffle=True, block_size=np.int64(9),
    )  # fmt: skip
    loader.set_epoch(np.int64(2))
    state = json.loads(json.dumps(loader.state_dict()))
    batches = list(loader)
    assert json.loads(json.dumps(batches[0].state))["position"] == 10
    plain = kind(samples, batch_size=10, seed=3, shuffle=True)
    plain.load_state_dict(state)
    got = [batch.strings("sample_id") for batch in plain]
    assert got == [batch.strings("sample_id") for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 1 << 63}, {"epoch": 1 << 70}, {"batches": 1 << 70}, {"position": 1 << 70},
        {"epoch": 1.0}, {"position": 8.0}, {"position": -1}, {"position": True}, {"batches": None},
    ],
)  # fmt: skip
def test_states_that_were_edited(samples, kind, change):
    loader = kind(samples, batch_size=4)
    state = next(iter(kind(samples, batch_size=4))).state
    with pytest.raises(rf.StateMismatchError) as caught:
        loader.load_state_dict({**state, **change})
    assert caught.value.remedy
    assert len(list(loader)) == 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "option",
    [
        {"batch_size": 1 << 40}, {"token_budget": 1 << 63}, {"world_size": 1 << 40},
        {"block_size": 1 << 62}, {"window": 1 << 63},
    ],
)  # fmt: skip
def test_options_beyond_all_use(samples, kind, option):
    with pytest.raises(rf.LimitExceededError) as caught:
        kind(samples, **option)
    assert caught.value.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_have_an_end(samples, kind):
    loader = kind(samples, batch_size=40, shuffle=True)
    with pytest.raises(rf.LimitExceededError):
        loader.set_epoch(1 << 63)
    loader.set_epoch((1 << 62) - 1)
    assert [batch.num_rows for batch in loader] == [37]


def test_a_look_ahead_beyond_all_use(samples):
    with pytest.raises(rf.LimitExceededError, match="prefetch"):
        RaggedLoader(samples, prefetch=1 << 40)


def with_column(batch, name, array):
    index = batch.schema.get_field_index(name)
    columns = [array if n == index else column for n, column in enumerate(batch.columns)]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def test_a_null_where_none_may_be_is_not_filled(samples):
    tokens = samples.column("input_ids")
    values = pa.array([None, *tokens.values.to_pylist()[1:]], pa.int32())
    broken = pa.LargeListArray.from_arrays(tokens.offsets, values, type=tokens.type)
    with pytest.raises(rf.InvariantError, match="RF-I002") as caught:
        RaggedBatch.from_arrow(with_column(samples, "input_ids", broken))
    assert caught.value.where.column == "input_ids"
    names = pa.array([None, *samples.column("sample_id").to_pylist()[1:]], pa.string())
    with pytest.raises(rf.InvariantError, match="RF-I002"):
        RaggedBatch.from_arrow(with_column(samples, "sample_id", names))


def test_the_ends_of_every_number_type():
    kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
             pa.uint64()]  # fmt: skip
    columns = [rf.Column(f"x_{kind}", "token", kind) for kind in kinds]
    schema = rf.sample_schema(vocab_size=9, columns=columns)
    row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    ends = {}
    for kind, column in zip(kinds, columns, strict=True):
        limits = np.iinfo(kind.to_pandas_dtype())
        ends[column.name] = [int(limits.min), int(limits.max)]
    data = pa.RecordBatch.from_pylist([row | ends], schema=schema)
    (batch,) = RaggedLoader(data)
    assert {name: batch[name].tolist() for name in ends} == ends


def test_mixtures_of_nothing_and_at_the_end_of_epochs(samples):
    with pytest.raises(rf.LimitExceededError, match="no records"):
        RaggedLoader(Mixture([samples.slice(0, 0)] * 2))
    for number in (1 << 61, 1 << 58):
        loader = RaggedLoader(Mixture([samples, samples]), batch_size=40)
        loader.set_epoch(number)
        with pytest.raises(rf.LimitExceededError, match="no such epoch"):
            next(iter(loader))
    loader.set_epoch(1 << 40)
    assert [batch.num_rows for batch in loader] == [40, 34]
