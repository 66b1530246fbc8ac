"""Every operation on every axis, against the plain model of records and elements."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import axis_model as model

import ragged_format as rf
from ragged_format.ragged import axis_view
from ragged_format.testing import (
    assert_ragged_equal,
    packed_batches,
    rollouts,
    sample_batches,
    schemas,
    variants,
)
from ragged_format.validate import validate

BATCHES = st.one_of(sample_batches(), packed_batches(sample_batches(max_rows=3)))


def assert_is(batch, elements, schema):
    """`batch` is a valid Arrow batch of exactly these elements."""
    batch.validate(full=True)
    # repr, because NaN is not equal to itself and 0.0 is equal to -0.0.
    for got, expected in zip(batch.to_pylist(), model.rows(elements, schema), strict=True):
        assert {k: repr(v) for k, v in got.items()} == {k: repr(v) for k, v in expected.items()}


def draw_axis(data, schema, *, record=True):
    """Draw an axis whose lengths are known: opened by counts, or with a column on it."""
    known = [a.name for a in schema.axes.values() if a.counts is not None or schema.on(a.name)]
    return data.draw(st.sampled_from(["record"] * record + known), label="axis")


def check(batch, operation, expected, schema):
    """`operation` gives `expected` on every physical variant of the batch, with its schema."""
    result = operation(batch)
    assert result.schema.equals(batch.schema, check_metadata=True)
    assert_is(result, expected, schema)
    for name, variant in variants(batch, same_schema=True).items():
        try:
            assert_ragged_equal(operation(variant), result, check_schema=True)
        except AssertionError as err:
            err.add_note(f"variant {name!r}")
            raise
    return result


@given(batch=BATCHES)
def test_model_round_trips(batch):
    schema = rf.parse_schema(batch.schema)
    assert_is(batch, model.records(batch), schema)


@given(batch=BATCHES, data=st.data())
def test_take_reorders_repeats_and_drops(batch, data):
    schema = rf.parse_schema(batch.schema)
    elements = model.records(batch)
    axis = draw_axis(data, schema)
    size = model.size(elements, schema, axis)
    indices = data.draw(st.lists(st.integers(0, size - 1), max_size=8) if size else st.just([]))
    lengths = None
    if axis != "record":
        parents = len(model.lists(elements, model.path(schema, axis)))
        if schema.axes[axis].mask:
            indices = indices[:parents]
            lengths = data.draw(
                st.permutations([1] * len(indices) + [0] * (parents - len(indices)))
            )
        else:
            owners = st.integers(0, parents - 1)
            drawn = data.draw(
                st.lists(owners, min_size=len(indices), max_size=len(indices))
                if parents
                else st.just([])
            )
            lengths = np.bincount(drawn, minlength=parents)
    check(
        batch,
        lambda b: rf.take(b, indices, axis=axis, lengths=lengths),
        model.take(elements, schema, axis, indices, lengths),
        schema,
    )


@given(batch=BATCHES, data=st.data())
def test_select_keeps_what_is_asked(batch, data):
    schema = rf.parse_schema(batch.schema)
    elements = model.records(batch)
    axis = draw_axis(data, schema)
    size = model.size(elements, schema, axis)
    share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    keep = np.random.default_rng(data.draw(st.integers(0, 99))).random(size) < share
    check(
        batch,
        lambda b: rf.select(b, axis, keep),
        model.select(elements, schema, axis, keep),
        schema,
    )


@given(batch=BATCHES, data=st.data())
def test_select_targets_keeps_validity(batch, data):
    schema = rf.parse_schema(batch.schema)
    elements = model.records(batch)
    size = model.size(elements, schema, "target")
    keep = np.random.default_rng(data.draw(st.integers(0, 99))).random(size) < 0.5
    expected = model.select(elements, schema, "target", keep)
    result = check(batch, lambda b: rf.select_targets(b, keep), expected, schema)
    validate(result)


@given(batch=BATCHES, start=st.integers(0, 4), length=st.none() | st.integers(0, 4), data=st.data())
def test_slice_axis(batch, start, length, data):
    schema = rf.parse_schema(batch.schema)
    elements = model.records(batch)
    axis = draw_axis(data, schema)
    stop = None if length is None else data.draw(st.sampled_from([start + length, length]))
    expected = model.slice_axis(elements, schema, axis, start, stop)
    check(batch, lambda b: rf.slice_axis(b, start, stop, axis=axis), expected, schema)


@pytest.mark.parametrize("axis", ["record", "token", "target", "candidate"])
@pytest.mark.parametrize("bounds", [(2, 1), (3, 0), (10**6, 1), (10**6, None), (1, 10**6)])
def test_slice_bounds_that_cross_or_lie_outside(axis, bounds):
    batch = rollouts(np.random.default_rng(0), num_samples=4, prompt_length=3, response_length=9)
    schema = rf.parse_schema(batch.schema)
    expected = model.slice_axis(model.records(batch), schema, axis, *bounds)
    check(batch, lambda b: rf.slice_axis(b, *bounds, axis=axis), expected, schema)


@given(batch=BATCHES, data=st.data())
def test_join_runs_of_records(batch, data):
    schema = rf.parse_schema(batch.schema)
    rows = batch.num_rows
    ends = data.draw(st.sets(st.integers(1, rows - 1))) if rows > 1 else set()
    counts = np.diff([0, *sorted(ends), rows]) if rows else []
    expected = model.join(model.records(batch), counts)
    check(batch, lambda b: rf.join(b, counts), expected, schema)


@given(batch=BATCHES, data=st.data())
def test_concat_records(batch, data):
    schema = rf.parse_schema(batch.schema)
    cuts = data.draw(st.lists(st.integers(0, batch.num_rows), max_size=3).map(sorted))
    bounds = [0, *cuts, batch.num_rows]
    elements = model.records(batch)

    def operation(whole):
        return rf.concat([whole.slice(a, b - a) for a, b in itertools.pairwise(bounds)])

    check(batch, operation, elements, schema)


@given(batch=BATCHES, data=st.data())
def test_concat_joins_record_by_record_on_an_inner_axis(batch, data):
    schema = rf.parse_schema(batch.schema)
    axis = draw_axis(data, schema, record=False)
    other = rf.take(batch, np.arange(batch.num_rows)[::-1])
    mine, theirs = model.records(batch), model.records(other)
    pairs = [element for pair in zip(mine, theirs, mine, strict=True) for element in pair]
    expected = model.join(pairs, [3] * batch.num_rows)
    check(batch, lambda b: rf.concat([b, other, b], axis=axis), expected, schema)


@given(batch=BATCHES, data=st.data())
def test_axis_view_counts_elements_per_parent_and_record(batch, data):
    schema = rf.parse_schema(batch.schema)
    axis = draw_axis(data, schema, record=False)
    elements = model.records(batch)
    steps = model.path(schema, axis)
    per_parent = [len(one) for one in model.lists(elements, steps)]
    per_record = [sum(len(one) for one in model.lists([e], steps)) for e in elements]
    for variant in variants(batch, same_schema=True).values():
        view = axis_view(variant, axis)
        assert view.parent_offsets[0] == view.record_offsets[0] == 0
        assert np.diff(view.parent_offsets).tolist() == per_parent
        assert np.diff(view.record_offsets).tolist() == per_record


# --- cut ------------------------------------------------------------------------------------------


def with_offset(schemas):
    """Schemas with the column that a left cut needs."""

    def add(schema):
        parsed = rf.parse_schema(schema)
        if "token_offset" in parsed:
            return schema
        columns = [*parsed, rf.standard_column("token_offset")]
        return rf.sample_schema(
            vocab_size=parsed.vocab_size, columns=columns, root_axes=parsed.root_axes[1:]
        )

    return schemas.map(add)


def cut_model(elements, start, stop):
    """Slice the tokens; the token that is now first has no target; note the offset."""
    out = []
    for element in elements:
        tokens = element.children["token"]
        kept = tokens[start:stop] if stop is None or stop > start else []
        if start and kept:
            first = kept[0]
            kept = [model.Element(first.values, {**first.children, "target": []}), *kept[1:]]
        values = dict(element.values)
        if start:
            values["token_offset"] = (values["token_offset"] or 0) + min(start, len(tokens))
        out.append(model.Element(values, {**element.children, "token": kept}))
    return out


@given(
    batch=sample_batches(with_offset(schemas())),
    start=st.integers(0, 4),
    length=st.none() | st.integers(0, 6),
)
def test_cut_drops_the_target_that_nothing_predicts(batch, start, length):
    """verl-project/verl#6593: the tokens were cut for a rank, the teacher's heads were not."""
    schema = rf.parse_schema(batch.schema)
    stop = None if length is None else start + length
    expected = cut_model(model.records(batch), start, stop)
    result = check(batch, lambda b: rf.cut(b, start, stop), expected, schema)
    validate(result)


@given(batch=sample_batches(), stop=st.integers(0, 6))
def test_right_cut_needs_no_further_column(batch, stop):
    schema = rf.parse_schema(batch.schema)
    expected = model.slice_axis(model.records(batch), schema, "token", 0, stop)
    validate(check(batch, lambda b: rf.cut(b, stop=stop), expected, schema))


@given(batch=sample_batches(with_offset(schemas())), first=st.integers(1, 3))
def test_cuts_add_up(batch, first):
    assert_ragged_equal(rf.cut(rf.cut(batch, first), 2), rf.cut(batch, first + 2))


def test_left_cut_asks_for_the_offset_column():
    batch = rollouts(np.random.default_rng(0), num_samples=2)
    with pytest.raises(rf.SchemaMismatchError, match="token_offset") as caught:
        rf.cut(batch, 1)
    assert caught.value.code == "RF-S003"


# --- relations between operations -----------------------------------------------------------------


@given(batch=BATCHES, data=st.data())
def test_select_is_take_of_what_is_kept(batch, data):
    schema = rf.parse_schema(batch.schema)
    axis = draw_axis(data, schema, record=False)
    view = axis_view(batch, axis)
    keep = np.random.default_rng(0).random(int(view.parent_offsets[-1])) < 0.5
    sums = [int(keep[a:b].sum()) for a, b in itertools.pairwise(view.parent_offsets)]
    taken = rf.take(batch, np.flatnonzero(keep), axis=axis, lengths=sums)
    assert_ragged_equal(rf.select(batch, axis, keep), taken, check_schema=True)


@given(batch=BATCHES)
def test_concat_of_parts_is_the_whole(batch):
    parts = [batch.slice(i, 1) for i in range(batch.num_rows)] or [batch]
    assert_ragged_equal(rf.concat(parts), batch, check_schema=True)


def test_operations_agree_on_large_realistic_data():
    batch = rollouts(np.random.default_rng(3), num_samples=40, turns=3, columns=None)
    order = np.random.default_rng(4).permutation(40)
    back = np.argsort(order)
    assert_ragged_equal(rf.take(rf.take(batch, order), back), batch)
    narrow = rf.slice_axis(batch, stop=7, axis="candidate")
    assert np.diff(axis_view(narrow, "candidate").parent_offsets).max() == 7
    validate(rf.slice_axis(batch, stop=7, axis="topk"))
