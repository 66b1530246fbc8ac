"""Batches of few records are compared in Python, of many by Arrow: with the same outcome."""

from contextlib import contextmanager

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format import rules
from ragged_format.errors import InvariantError

SCHEMA = rf.sample_schema(
    vocab_size=10, columns=["candidate_counts", "candidate_ids", "provenance", "metrics"]
)
LONG = f'{{"b": {"9" * 5000}}}'
texts = st.sampled_from([None, "{}", '{"a": 1}', '{"a": NaN}', "[]", "", "x", LONG])
token = st.sampled_from([0, 5, 9, 10, -1, -(2**31), 2**31 - 1])


@st.composite
def rows(draw):
    tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    sets = [sorted({*draw(st.sets(st.integers(0, 9), max_size=3)), t}) for t in tokens[1:]]
    row = {
        "sample_id": draw(st.sampled_from(["a", "b", "c", "d", "e", ""])),
        "input_ids": tokens,
        "completion_mask": [0] + [1] * (len(tokens) - 1),
        "candidate_counts": [len(own) for own in sets],
        "candidate_ids": [value for own in sets for value in own],
        "provenance": draw(texts),
        "metrics": draw(texts),
    }
    if draw(st.integers(0, 4)) == 0:
        name = draw(st.sampled_from(["input_ids", "candidate_ids"]))
        if row[name]:
            row[name][draw(st.integers(0, len(row[name]) - 1))] = draw(token)
    return row


@contextmanager
def many():
    before = rules._FEW, rules._PART_SIZE
    rules._FEW, rules._PART_SIZE = -1, 2
    try:
        yield
    finally:
        rules._FEW, rules._PART_SIZE = before


def outcome(batch):
    try:
        rf.validate(batch)
    except InvariantError as err:
        return str(err), err.where
    return None


@given(st.lists(rows(), max_size=4))
def test_few_and_many_records_have_the_same_outcome(made):
    batch = pa.RecordBatch.from_pylist(made, schema=SCHEMA)
    with many():
        expected = outcome(batch)
    assert outcome(batch) == expected
    assert outcome(batch) == expected  # texts are remembered
