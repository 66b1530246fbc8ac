"""Valid batches always pass; any change of one value is judged as plain Python judges it."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forests import packed_records
from support.rule_oracle import broken_codes

import ragged_format as rf
from ragged_format.schema import RECORD
from ragged_format.testing import packed_batches, sample_batches, variants

NUMBERS = [0, -1, 1, 2, 3, 31, 32, 63, 64, 199_999, 200_000, 255, 2**31 - 1, -(2**31), 2**62]
FLOATS = [0.0, -0.0, -0.5, -1e-3, 1e-4, 2e-4, 0.5, -30000.0, -math.inf, math.inf, math.nan]
TEXTS = ["", "{}", "[]", "{", '{"a": NaN}', "null", "s1", "é"]


@given(sample_batches())
def test_valid_samples_pass_in_every_form(batch):
    for form in variants(batch, same_schema=True).values():
        rf.validate(form)
        rf.validate(form, level="structural")
    rf.validate(pa.Table.from_batches([batch.slice(i, 1) for i in range(len(batch))], batch.schema))


@given(packed_batches() | packed_records())
def test_valid_packed_records_pass_in_every_form(batch):
    assert broken_codes(batch, rf.parse_schema(batch.schema)) == set()
    for form in variants(batch, same_schema=True).values():
        rf.validate(form)


def check(batch, schema):
    """Compare the verdict on a batch with that of the oracle."""
    expected = broken_codes(batch, schema)
    if not expected:
        rf.validate(batch)
        return
    with pytest.raises(rf.InvariantError) as info:
        rf.validate(batch)
    error = info.value
    assert error.code in expected
    assert error.where.column in schema
    assert 0 <= error.where.row < batch.num_rows
    value = batch.column(error.where.column)[error.where.row].as_py()
    if error.where.position is not None:
        assert 0 <= error.where.position < len(value)


def mutated(draw, batch, schema, wanted=None):
    """Return the batch with one value, null, surplus or missing element somewhere in a column."""
    rows = batch.to_pylist()
    column = draw(st.sampled_from([c for c in schema if wanted is None or c.name in wanted]))
    row = draw(st.integers(0, len(rows) - 1))
    if column.axis == RECORD:
        rows[row][column.name] = value(draw, column)
    else:
        items = list(rows[row][column.name])
        at = draw(st.integers(0, len(items)))
        kind = draw(st.sampled_from(["set", "set", "set", "insert", "delete", "swap"]))
        new = [] if kind == "delete" else [value(draw, column)]
        if kind == "swap":
            items[at : at + 2] = items[at : at + 2][::-1]
        else:
            items[at : at + (kind != "insert")] = new
        rows[row][column.name] = items
    return pa.RecordBatch.from_pylist(rows, schema=batch.schema)


def value(draw, column):
    if draw(st.integers(0, 9)) == 0 and not column.shape:
        return None
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        text = draw(st.sampled_from(TEXTS))
        return text if pa.types.is_string(column.type) else text.encode()
    dtype = column.type.to_pandas_dtype()
    if pa.types.is_integer(column.type):
        info = np.iinfo(dtype)
        pool = [number for number in NUMBERS if info.min <= number <= info.max]
        number = dtype(draw(st.sampled_from(pool)))
    else:
        number = dtype(draw(st.sampled_from(FLOATS)))
    return [number.item()] * column.width if column.shape else number


@given(st.data())
def test_one_mutation_of_samples_is_judged_right(data):
    batch = data.draw(sample_batches(min_rows=1, max_rows=3, max_length=5, max_width=3))
    schema = rf.parse_schema(batch.schema)
    for _ in range(4):
        check(mutated(data.draw, batch, schema), schema)


@given(st.data())
def test_one_mutation_of_packed_records_is_judged_right(data):
    batch = data.draw(packed_records())
    schema = rf.parse_schema(batch.schema)
    if batch.num_rows == 0:
        return
    structure = [name for name in schema.columns if "sample_id" not in name]
    for _ in range(6):
        check(mutated(data.draw, batch, schema, structure), schema)


@given(st.data())
def test_arbitrary_arrays_never_raise_anything_else(data):
    """Random lengths and values under the right schema: a verdict, never a crash."""
    batch = data.draw(sample_batches(max_rows=0) | packed_batches(sample_batches(max_rows=0)))
    schema = rf.parse_schema(batch.schema)
    rows = data.draw(st.integers(1, 3))
    records = [
        {
            column.name: value(data.draw, column)
            if column.axis == RECORD
            else [value(data.draw, column) for _ in range(data.draw(st.integers(0, 3)))]
            for column in schema
        }
        for _ in range(rows)
    ]
    check(pa.RecordBatch.from_pylist(records, schema=batch.schema), schema)
