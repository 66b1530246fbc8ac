"""Arrays that Arrow's readers hand out although using them crashes, and nulls in odd places."""

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format import Column
from ragged_format.soundness import check_arrays

SCHEMA = rf.sample_schema(vocab_size=10, columns=[])
LISTS = pa.large_list(pa.field("item", pa.int32(), nullable=False))


def batch_of(input_ids, masks=None, schema=SCHEMA):
    rows = len(input_ids)
    ids = pa.array([f"s{i}" for i in range(rows)])
    if masks is None:
        masks = pa.array([[0]] * rows, schema.field("completion_mask").type)
    return pa.RecordBatch.from_arrays([ids, input_ids, masks], schema=schema)


def lists(offsets, values, mask=None):
    mask = None if mask is None else pa.array(mask)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), pa.array(values, pa.int32()), type=LISTS, mask=mask
    )


def received(offsets, values):
    """Return a batch whose lists have any offsets, as a reader hands it out: unchecked."""
    sound = [0] * (len(offsets) - 1) + [len(values)]
    batch = batch_of(lists(sound, values))
    return patched(batch, np.array(sound, np.int64), np.array(offsets, np.int64))


def patched(batch, old, new):
    """Return the batch of the IPC message in which the last occurrence of `old` became `new`."""
    message = bytearray(batch.serialize().to_pybytes())
    place = message.rindex(old.tobytes())
    message[place : place + old.nbytes] = new.tobytes()
    return pa.ipc.read_record_batch(pa.py_buffer(bytes(message)), batch.schema)


def fault(data, **options):
    with pytest.raises(rf.InvariantError) as info:
        rf.validate(data, **options)
    return info.value


@pytest.mark.parametrize("level", ["structural", "full"])
@pytest.mark.parametrize(
    ("offsets", "row"),
    [
        ([0, 3, 1, 4], 1),
        ([0, 2, 1, 4], 1),
        ([4, 2, 3, 4], 0),
        ([0, 1, 2, 5], 2),
        ([0, 9, 9, 9], 0),
        ([-1, 1, 2, 3], None),
        ([0, 1, 2, -1], 2),
        ([2**40, 2**40, 2**40, 2**40], 0),
        ([0, 2**62, 1, 2], 0),
    ],
)
def test_wrong_offsets(offsets, row, level):
    """huggingface/datasets#8350: an offset vector that falls crashes other readers.

    huggingface/datasets#5531: offsets that span more values than there are.
    """
    error = fault(received(offsets, [1, 2, 3, 4]), level=level)
    assert (error.code, error.where.column) == ("RF-I001", "input_ids")
    assert error.where.row == row
    assert error.__cause__ is not None


def test_wrong_offsets_outside_a_slice_do_not_count():
    batch = received([4, 0, 1, 2, 1], [1, 2, 3, 4])
    rf.validate(batch.slice(1, 2), level="structural")
    assert fault(batch.slice(1, 3)).where.row == 2


def test_wrong_offsets_in_one_batch_of_a_table():
    good, bad = batch_of(lists([0, 1], [1])), received([0, 1, 0], [1])
    good = good.set_column(0, SCHEMA.field(0), pa.array(["other"]))
    error = fault(pa.Table.from_batches([good, bad, good]))
    assert (error.code, error.where.batch, error.where.row) == ("RF-I001", 1, 1)


def test_broken_text_is_placed():
    raw = pa.array([b"a", b"b", b"\xff\xfe", b"c"], pa.binary())
    ids = pa.StringArray.from_buffers(4, raw.buffers()[1], raw.buffers()[2])
    batch = pa.RecordBatch.from_arrays(
        [ids, lists([0, 1, 1, 1, 1], [1]), pa.array([[0], [], [], []], SCHEMA.field(2).type)],
        schema=SCHEMA,
    )
    error = fault(batch)
    assert (error.code, error.where.column, error.where.row) == ("RF-I001", "sample_id", 2)


def test_broken_text_inside_a_list_names_the_column():
    words = Column("words", "token", pa.string())
    schema = rf.sample_schema(vocab_size=10, columns=[words])
    raw = pa.array([b"a", b"\xff"], pa.binary())
    text = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    lists_ = pa.LargeListArray.from_arrays(pa.array([0, 2]), text, type=words.arrow_type)
    row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 0], "words": ["", ""]}
    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    error = fault(batch.set_column(3, schema.field(3), lists_))
    assert (error.code, error.where.column) == ("RF-I001", "words")


def test_short_buffer():
    """apache/arrow#49896: a message can state buffers that are shorter than its arrays need."""
    batch = batch_of(lists([0, 1, 2, 2, 2, 2], [1, 2]))
    length = np.array([48], np.int64)  # of six offsets: of the mask's, and before it of the ids'
    short = patched(batch, length, length - 32)
    error = fault(short)
    assert (error.code, error.where) == ("RF-I001", rf.Where(row=1, column="completion_mask"))


@pytest.mark.parametrize("level", ["structural", "full"])
def test_null_list_over_values(level):
    """vortex-data/vortex#5423, apache/arrow#37733: a null may cover a segment that is not empty."""
    array = lists([0, 2, 4], [1, 2, 3, 4], mask=[False, True])
    error = fault(batch_of(array), level=level)
    assert (error.code, error.where) == ("RF-I002", rf.Where(None, None, 1, "input_ids", None))


@pytest.mark.parametrize(("row", "position", "flat"), [(0, 0, 0), (1, 0, 2), (1, 1, 3), (3, 2, 6)])
def test_null_item_is_placed(row, position, flat):
    values = [1, 2, 3, 4, 5, 6, 7]
    values[flat] = None
    array = lists([0, 2, 4, 4, 7], values)
    error = fault(batch_of(array))
    assert error.where == rf.Where(None, None, row, "input_ids", position)
    sliced = batch_of(array).slice(row, 1)
    assert fault(sliced).where == rf.Where(None, None, 0, "input_ids", position)


def test_null_outside_the_lists_does_not_count():
    array = lists([1, 2, 3], [None, 1, 2, None])
    rf.validate(batch_of(array))


def test_null_in_fixed_size_elements_is_placed():
    experts = Column("routed_experts", "token", pa.int16(), shape=(2, 2))
    schema = rf.sample_schema(vocab_size=10, columns=[experts])
    element = [1, 2, 3, 4]
    rows = [
        {"sample_id": "a", "input_ids": [1], "completion_mask": [0], "routed_experts": [element]},
        {
            "sample_id": "b", "input_ids": [1, 1], "completion_mask": [0, 0],
            "routed_experts": [element, element],
        },
    ]  # fmt: skip
    rf.validate(pa.RecordBatch.from_pylist(rows, schema=schema))
    rows[1]["routed_experts"] = [element, [1, None, 3, 4]]
    error = fault(pa.RecordBatch.from_pylist(rows, schema=schema))
    assert error.where == rf.Where(None, None, 1, "routed_experts", 1)
    rows[1]["routed_experts"] = [None, element]
    error = fault(pa.RecordBatch.from_pylist(rows, schema=schema))
    assert error.where == rf.Where(None, None, 1, "routed_experts", 0)


def test_member_items_may_be_null_but_member_lists_not():
    schema = rf.packed_schema(vocab_size=10, columns=["member_reward"])
    row = {
        "input_ids": [1], "position_ids": [0], "node_lengths": [1], "node_parents": [-1],
        "pred_index": [], "target_ids": [], "member_index": [], "member_sample_id": ["a"],
        "member_reward": [None], "member_leaf": [0], "member_lengths": [1],
    }  # fmt: skip
    rf.validate(pa.RecordBatch.from_pylist([row], schema=schema))
    row["member_reward"] = None
    error = fault(pa.RecordBatch.from_pylist([row], schema=schema))
    assert error.where == rf.Where(None, None, 0, "member_reward", None)
    row |= {"member_reward": [1.0], "member_sample_id": [None]}
    error = fault(pa.RecordBatch.from_pylist([row], schema=schema))
    assert error.where == rf.Where(None, None, 0, "member_sample_id", 0)


def test_ids_are_compared_over_the_batches_of_a_table():
    row = {"sample_id": "a", "input_ids": [1], "completion_mask": [0]}
    batch = pa.RecordBatch.from_pylist([row], schema=SCHEMA)
    error = fault(pa.Table.from_batches([batch, batch]), where=rf.Where(file="f"))
    assert (error.code, error.where.batch, error.where.row) == ("RF-I006", 1, 0)
    assert "'a', also at file 'f', batch 0, row 0" in error.got
    rf.validate(pa.Table.from_batches([batch, batch]), level="structural")


def test_empty_data_is_valid():
    rf.validate(SCHEMA.empty_table())
    rf.validate(pa.RecordBatch.from_pylist([], schema=SCHEMA))
    packed = rf.packed_schema(vocab_size=10)
    rf.validate(pa.RecordBatch.from_pylist([], schema=packed))
    empty = {f.name: None if f.nullable else [] for f in packed}
    rf.validate(pa.RecordBatch.from_pylist([empty, empty], schema=packed))
    full = rf.sample_schema(vocab_size=10)
    empty = {f.name: None if f.nullable else [] for f in full} | {"sample_id": "a"}
    rf.validate(pa.RecordBatch.from_pylist([empty], schema=full))


def test_an_axis_without_columns_is_empty():
    schema = rf.sample_schema(vocab_size=10, columns=[], root_axes=["frame"])
    row = {"sample_id": "a", "input_ids": [1], "completion_mask": [0]}
    rf.validate(pa.RecordBatch.from_pylist([row], schema=schema))


def test_what_is_not_arrow_is_refused():
    with pytest.raises(rf.SchemaMismatchError):
        rf.validate({"input_ids": [[1]]})
    with pytest.raises(rf.NotRaggedError):
        rf.validate(pa.table({"input_ids": [[1]]}))


def test_a_fault_of_the_batch_alone_has_no_column():
    class Lengths:
        """A batch whose columns have other lengths than it says; pyarrow makes none."""

        schema, columns = pa.schema([]), ()

        def validate(self, *, full):
            raise pa.ArrowInvalid("In column 0: length mismatch")

    with pytest.raises(rf.InvariantError) as info:
        check_arrays(Lengths())
    assert (info.value.code, info.value.where) == ("RF-I001", rf.Where())
