"""The equality of the tests: blind to physical form, exact about values and their place."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from ragged_format.testing import assert_ragged_equal, sample_batches, variants

NAN = float("nan")
LISTS = [[1, 2], [], [3]]


def differ(left, right, *texts):
    with pytest.raises(AssertionError) as caught:
        assert_ragged_equal(left, right)
    assert all(text in str(caught.value) for text in texts), caught.value


def table(value, type_=None):
    return pa.table({"a": pa.array(value, type_)})


@given(batch=sample_batches())
def test_forms_are_equal_and_records_are_not(batch):
    for form in variants(batch).values():
        assert_ragged_equal(form, batch)
        assert_ragged_equal(batch, form)
    if batch.num_rows:
        differ(batch, batch.slice(1), "rows")
        renamed = batch.set_column(0, batch.schema.field(0), pa.array(["?"] * batch.num_rows))
        differ(batch, renamed, "row 0, column 'sample_id'", "'?'")


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
@pytest.mark.parametrize("other", [pa.list_, pa.large_list, pa.list_view])
def test_list_types_do_not_count(kind, other):
    left = pa.table({"a": pa.chunked_array([pa.array(LISTS[:1], kind(pa.int8())),
                                            pa.array(LISTS[1:], kind(pa.int8()))])})  # fmt: skip
    assert_ragged_equal(left, table(LISTS, other(pa.int8())))
    differ(
        left, table([[1, 2], [], [4]], other(pa.int8())), "row 2, column 'a', position 0: 3 != 4"
    )


def test_text_types_do_not_count():
    texts = ["a", None, "bc"]
    forms = [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
    ]
    for form in forms:
        assert_ragged_equal(table(texts, form), table(texts))
        differ(table(texts, form), table(["a", None, "bd"]), "row 2, column 'a': 'bc' != 'bd'")
    blobs = [b"a", None]
    for form in (pa.binary(), pa.large_binary(), pa.binary_view()):
        assert_ragged_equal(table(blobs, form), table(blobs))


def test_value_types_count():
    differ(table([1], pa.int8()), table([1], pa.int16()), "int8 != int16")
    differ(table([1.0], pa.float32()), table([1.0], pa.float64()), "float != double")
    differ(table([["a"]]), table([[b"a"]]), "string")
    differ(table([[1]]), table([1]), "type")
    differ(table([[[1]]], pa.list_(pa.list_(pa.int64(), 1))), table([[[1]]]), "fixed_size")


def test_nan_and_zeros():
    """``Table.equals`` is false for NaN."""
    odd = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
    assert_ragged_equal(table([list(odd)], pa.list_(pa.float32())),
                        table([[NAN] * 3], pa.list_(pa.float32())))  # fmt: skip
    differ(table([NAN, 1.0]), table([NAN, NAN]), "row 1", "1.0 != nan")
    differ(table([[0.0, 0.0]]), table([[0.0, -0.0]]), "position 1: 0.0 != -0.0")
    assert_ragged_equal(table([1.0, None]), table([1.0, None]))
    differ(table([1.0, None]), table([1.0, 2.0]), "row 1", "None != 2.0")


def test_the_first_difference_is_named():
    differ(table([[1], [2, 3]]), table([[1], [2]]), "row 1, column 'a': length 2 != 1")
    differ(table([[1], None]), table([[1], []]), "row 1", "None != []")
    differ(table([[1, None]]), table([[1, 0]]), "row 0, column 'a', position 1: None != 0")
    nested = [[[1], [2, 3]], [[4, 5]]]
    other = [[[1], [2, 3]], [[4, 6]]]
    differ(table(nested), table(other), "row 1", "5 != 6")
    fixed = pa.list_(pa.list_(pa.int8(), 2))
    differ(table([[[1, 2]], [[3, 4], [5, 6]]], fixed), table([[[1, 2]], [[3, 4], [5, 7]]], fixed),
           "row 1, column 'a', position 1, value 1: 6 != 7")  # fmt: skip


def test_a_null_list_hides_its_values():
    """scikit-hep/awkward#624: what a null list covers is no value."""
    mask = pa.array([True, False])
    hidden = pa.table({"a": pa.LargeListArray.from_arrays([0, 2, 4], [1, 2, 3, 4], mask=mask)})
    assert_ragged_equal(hidden, table([None, [3, 4]]))
    differ(hidden, table([[1, 2], [3, 4]]), "None != [1, 2]")


def test_columns_and_schemas():
    left, right = pa.table({"a": [1], "b": [2]}), pa.table({"b": [2], "a": [1]})
    assert_ragged_equal(left, right)
    differ(left, left.select(["a"]), "columns ['a', 'b'] != ['a']")
    with pytest.raises(AssertionError, match="schemas differ"):
        assert_ragged_equal(left, right, check_schema=True)
    with_metadata = left.replace_schema_metadata({"x": "y"})
    assert_ragged_equal(left, with_metadata)
    with pytest.raises(AssertionError, match="schemas differ"):
        assert_ragged_equal(left, with_metadata, check_schema=True)
    assert_ragged_equal(left, left, check_schema=True)
