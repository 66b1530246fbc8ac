"""Arrow lists to flat values and offsets, and back."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format.lists import flat, offsets_of, ranges, segment_sums, to_list, to_numpy

VALUE_TYPES = [pa.int8(), pa.int32(), pa.uint64(), pa.float16(), pa.float64(), pa.string()]
LIST_TYPES = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def as_python(array):
    """The lists of `array` through :func:`flat`, in the obvious way."""
    values, offsets = flat(array)
    items = values.to_pylist()
    assert offsets[0] == 0
    assert offsets.dtype == np.int64
    assert len(offsets) == len(array) + 1
    assert offsets[-1] == len(items)
    return [items[a:b] for a, b in itertools.pairwise(offsets)]


@st.composite
def nested(draw):
    type_ = draw(st.sampled_from(VALUE_TYPES))
    item = st.text(max_size=3) if type_ == pa.string() else st.integers(0, 100)
    lists = draw(st.lists(st.lists(item, max_size=4), max_size=6))
    if pa.types.is_floating(type_):
        lists = [[float(v) for v in one] for one in lists]
    return lists, type_


@given(case=nested(), kind=st.sampled_from(LIST_TYPES))
def test_flat_gives_the_lists(case, kind):
    lists, type_ = case
    assert as_python(pa.array(lists, kind(type_))) == lists


@given(case=nested(), kind=st.sampled_from(LIST_TYPES), data=st.data())
def test_flat_of_a_slice_is_the_slice(case, kind, data):
    lists, type_ = case
    start = data.draw(st.integers(0, len(lists)))
    length = data.draw(st.integers(0, len(lists) - start))
    array = pa.array(lists, kind(type_)).slice(start, length)
    assert as_python(array) == lists[start : start + length]


@given(case=nested(), kind=st.sampled_from(LIST_TYPES), data=st.data())
def test_flat_joins_chunks(case, kind, data):
    """lance-format/lance#7538: offsets of several written batches were not rebased."""
    lists, type_ = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lists)), max_size=3)))
    parts = [lists[a:b] for a, b in itertools.pairwise([0, *cuts, len(lists)])]
    whole = pa.array(lists, kind(type_))
    built = pa.chunked_array([pa.array(p, kind(type_)) for p in parts], kind(type_))
    sliced = pa.chunked_array(
        [whole.slice(a, b - a) for a, b in itertools.pairwise([0, *cuts, len(lists)])]
    )
    assert as_python(built) == as_python(sliced) == lists


@given(case=nested())
def test_flat_of_first_offset_above_zero(case):
    lists, type_ = case
    unused = [*lists[:1], *lists, *lists[-1:]]
    values = pa.array([v for one in unused for v in one], type_)
    ends = np.cumsum([0] + [len(one) for one in unused])
    skip = len(lists[:1])
    offsets = pa.array(ends[skip : skip + len(lists) + 1])
    array = pa.LargeListArray.from_arrays(offsets, values)
    assert as_python(array) == lists


@given(case=nested().filter(lambda case: case[1] != pa.string()), width=st.integers(1, 3))
def test_flat_keeps_fixed_size_elements(case, width):
    lists, type_ = case
    wide = [[[v] * width for v in one] for one in lists]
    array = pa.array(wide, pa.large_list(pa.list_(type_, width)))
    numbers = flat(array).numpy()
    assert numbers.shape == (sum(map(len, lists)), width)
    assert numbers.tolist() == [v for one in wide for v in one]
    assert flat(array[1:]).numpy().tolist() == [v for one in wide[1:] for v in one]


@given(case=nested())
def test_to_list_inverts_flat(case):
    lists, type_ = case
    column = rf.Column("own", "token", type_)
    array = pa.array(lists, pa.list_(type_))
    back = to_list(*flat(array), column)
    assert back.type.equals(column.arrow_type, check_metadata=True)
    assert back.to_pylist() == lists


def test_flat_is_a_view():
    array = pa.array([[1, 2], [3], [], [4]], pa.large_list(pa.int64()))
    values, offsets = flat(array[1:])
    assert values.buffers()[1].address == array.values.buffers()[1].address
    whole = flat(array)
    assert whole.offsets.ctypes.data == array.offsets.buffers()[1].address
    assert not whole.offsets.flags.writeable
    column = rf.Column("own", "token", pa.int64())
    again = to_list(values, offsets, column)
    assert again.values.buffers()[1].address == array.values.buffers()[1].address


def test_values_of_a_slice_ignore_it_and_flat_does_not():
    """apache/arrow#37733: ``ListArray.values`` gives the values of the parent."""
    array = pa.array([[1], [1, 2], [1, 2, 3]])[1:]
    assert len(array.values) == 6
    assert as_python(array) == [[1, 2], [1, 2, 3]]


def test_numbers_of_a_slice():
    """apache/arrow#20512: conversion to numpy ignored the offset of a slice."""
    array = pa.array([[0], [10, 11], [20]], pa.large_list(pa.int16()))[1:]
    assert flat(array).numpy().tolist() == [10, 11, 20]
    fixed = pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int16(), 2)))[1:]
    assert flat(fixed).numpy().tolist() == [[3, 4], [5, 6]]


@pytest.mark.parametrize("kind", [pa.ListArray, pa.LargeListArray])
def test_a_null_list_over_values_is_refused(kind):
    """scikit-hep/awkward#624: a null list may cover values, which flatten() then skips."""
    mask = pa.array([False, True])
    array = kind.from_arrays([0, 2, 4], [1, 2, 3, 4], mask=mask)
    assert array.flatten().to_pylist() == [1, 2]
    assert array.offsets.to_pylist() == [0, 2, 4]
    with pytest.raises(rf.InvariantError, match="a list is null") as caught:
        flat(array)
    assert (caught.value.code, caught.value.where.row) == ("RF-I002", 1)


def test_only_null_lists():
    """lance-format/lance#4679: lists that are all null came back with items."""
    with pytest.raises(rf.InvariantError) as caught:
        flat(pa.array([None, None], pa.list_(pa.int32())))
    assert caught.value.where.row == 0


def test_a_null_list_in_a_later_chunk_is_named_by_its_row():
    chunks = pa.chunked_array([[[1]], [[2], None]])
    with pytest.raises(rf.InvariantError) as caught:
        flat(chunks)
    assert caught.value.where.row == 2


def test_a_sliced_list_is_cast_by_its_own_values():
    """huggingface/datasets#2461, huggingface/datasets#6213: the cast used the parent's values."""
    array = pa.array([[0], [10], [20], [2**40]]).slice(1, 2)
    values, offsets = flat(array)
    column = rf.Column("own", "token", pa.int32())
    assert to_list(values, offsets, column).to_pylist() == [[10], [20]]


def test_offsets_behind_the_values_are_refused():
    """huggingface/datasets#5531: offsets that span more values than there are.

    pyarrow checks the first and the last offset of a whole array only, so a slice can be broken.
    """
    child = pa.array([1, 2, 3], pa.int32())
    buffers = [None, pa.py_buffer(np.array([0, 4, 1, 3], np.int64))]
    array = pa.Array.from_buffers(pa.large_list(pa.int32()), 3, buffers, children=[child])
    for broken in (array[:1], array[1:2]):
        with pytest.raises(rf.InvariantError, match="outside the values") as caught:
            flat(broken)
        assert caught.value.code == "RF-I001"


def test_list_views_are_gathered():
    """A view may hold its lists in any order, and pyarrow's own cast loses the last one."""
    array = pa.ListViewArray.from_arrays(
        pa.array([3, 0, 0], pa.int32()), pa.array([1, 2, 0], pa.int32()), pa.array([1, 2, 3, 4])
    )
    assert as_python(array) == [[4], [1, 2], []]
    assert as_python(array[1:]) == [[1, 2], []]


@pytest.mark.parametrize(
    "array",
    [pa.array([1, 2]), pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.chunked_array([[1]])],
)
def test_what_is_not_a_list_is_refused(array):
    with pytest.raises(rf.SchemaMismatchError, match="not a list") as caught:
        flat(array)
    assert caught.value.code == "RF-S004"


def test_no_chunks_at_all():
    assert as_python(pa.chunked_array([], pa.list_(pa.int8()))) == []
    with pytest.raises(rf.SchemaMismatchError):
        flat(pa.chunked_array([], pa.int8()))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, None]),
        pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
        pa.array([[1, None]], pa.list_(pa.int64(), 2)),
    ],
)
def test_nulls_are_no_numbers(values):
    with pytest.raises(rf.InvariantError) as caught:
        to_numpy(values)
    assert caught.value.code == "RF-I002"


def test_offsets_stay_64_bit_beyond_2_31():
    """apache/arrow#43185, apache/arrow#25822, ray-project/ray#29492: 32-bit offsets overflowed.

    Also apache/arrow#44164 and lincc-frameworks/nested-pandas#95.

    Lists of nulls are long without taking memory.
    """
    size = 2**30
    one = pa.ListArray.from_arrays(pa.array([0, size], pa.int32()), pa.nulls(size))
    chunks = pa.chunked_array([one, one, one])
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        chunks.combine_chunks()
    values, offsets = flat(chunks)
    assert len(values) == 3 * size
    assert offsets.tolist() == [0, size, 2 * size, 3 * size]


def test_sums_of_small_types_do_not_wrap():
    """pola-rs/polars#10740, pola-rs/polars#17340: sums of 32-bit and smaller counts wrapped."""
    for dtype in (np.uint8, np.int8, np.int32, np.uint32):
        top = np.iinfo(dtype).max
        sums = segment_sums(np.full(3, top, dtype), np.array([0, 1, 1, 3]))
        assert sums.tolist() == [int(top), 0, 2 * int(top)]
        assert sums.dtype == np.int64


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=6))
def test_ranges(pairs):
    starts = np.array([a for a, _ in pairs], np.int64)
    lengths = np.array([n for _, n in pairs], np.int64)
    assert ranges(starts, lengths).tolist() == [i for a, n in pairs for i in range(a, a + n)]


@given(st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=5))
def test_segment_sums(lists):
    values = np.array([v for one in lists for v in one], np.uint8)
    offsets = offsets_of(np.array([len(one) for one in lists], np.int64))
    assert segment_sums(values, offsets).tolist() == [sum(one) for one in lists]


def test_to_list_takes_arrays_of_a_shape():
    column = rf.Column("routes", "token", pa.int16(), shape=(2, 2))
    values = np.arange(12).reshape(3, 2, 2)
    array = to_list(values, np.array([0, 1, 3]), column)
    assert array.type == column.arrow_type
    assert array.to_pylist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7], [8, 9, 10, 11]]]
    assert flat(array).numpy().tolist() == values.reshape(3, 4).tolist()
