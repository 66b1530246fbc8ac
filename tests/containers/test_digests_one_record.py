"""The digest of one record has a short way; it gives what the general way gives."""

import importlib
import struct
from contextlib import contextmanager

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format.digest import digest_plan, message_digest
from ragged_format.errors import RaggedError
from ragged_format.flatbuffer import Layout, layout_of, parse_header, prefix_size

# The package's function `digest` hides the module of that name.
module = importlib.import_module("ragged_format.digest")
SCHEMA = rf.sample_schema(
    vocab_size=10,
    columns=["group_id", "policy_version", "temperature", "finish_reason", rf.Column(
        "embedding", "record", pa.float32(), shape=(3,),
    ), rf.Column("blob", "record", pa.binary(), nullable=True)],
)  # fmt: skip
PLAN = digest_plan(SCHEMA)
text = st.one_of(st.none(), st.text(max_size=5))
rows = st.fixed_dictionaries(
    {
        "sample_id": st.text(max_size=5),
        "input_ids": st.just([1, 2]),
        "completion_mask": st.just([0, 1]),
        "group_id": text,
        "finish_reason": text,
        "policy_version": st.one_of(st.none(), st.integers(0, 9)),
        "temperature": st.one_of(st.none(), st.floats(0, 2)),
        "embedding": st.just([0.5, -0.0, 1.0]),
        "blob": st.one_of(st.none(), st.binary(max_size=5)),
    }
)


@contextmanager
def general():
    own, module._one_value = module._one_value, lambda *_: None
    try:
        yield
    finally:
        module._one_value = own


def layout_of_row(row):
    batch = pa.RecordBatch.from_pylist([row], schema=SCHEMA)
    message = memoryview(batch.serialize()).cast("B")
    size = prefix_size(message[:8])
    flatbuffer = message[8 : 8 + size]
    return layout_of(flatbuffer, parse_header(flatbuffer), message[8 + size :])


def outcome(layout):
    try:
        return message_digest(PLAN, layout)
    except RaggedError as err:
        return type(err), str(err)


@given(rows)
def test_the_short_way_gives_the_same_digest(row):
    layout = layout_of_row(row)
    with general():
        expected = outcome(layout)
    assert outcome(layout) == expected
    assert isinstance(expected, bytes)


@given(rows, st.data())
def test_forged_layouts_have_the_same_outcome(row, data):
    layout = layout_of_row(row)
    nodes, buffers = list(layout.nodes), list(layout.buffers)
    body = bytearray(layout.body)
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from([nodes, buffers]))
        at = data.draw(st.integers(0, len(part) - 1))
        part[at] = data.draw(st.sampled_from([-8, -1, 0, 1, 4, 8, 9, 64, 1 << 40, len(body)]))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.sampled_from([0, 1, 5, 255]))
    forged = Layout(1, _longs(nodes), _longs(buffers), memoryview(bytes(body)), compressed=False)
    with general():
        expected = outcome(forged)
    assert outcome(forged) == expected


def _longs(values):
    return memoryview(struct.pack(f"<{len(values)}q", *values)).cast("q")


@pytest.mark.parametrize("value", ["é", "", None])
def test_the_digest_of_a_record_is_that_of_its_batch(value):
    row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1], "group_id": value,
           "embedding": [1.0, 2.0, 3.0]}  # fmt: skip
    batch = pa.RecordBatch.from_pylist([row, row | {"sample_id": "b"}], schema=SCHEMA)
    assert module.record_digests(batch)[1].tobytes() == rf.digest(batch.slice(1))
