"""Batches of tensors against the records as Python lists."""

import json
import pickle
import struct
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format import InvariantError, LimitExceededError, SchemaMismatchError
from ragged_format.schema import RECORD
from ragged_format.testing import in_sequence, packed_batches, sample_batches, variants
from ragged_format.torch import RaggedBatch
from ragged_format.torch.arena import allocate

batches = st.one_of(sample_batches(), packed_batches())


def flat_lists(record_batch, column):
    values = record_batch.column(column.name).to_pylist()
    return values if column.axis == RECORD else [item for record in values for item in record]


def same_bits(tensor, items, column):
    """Whether a tensor holds exactly these Python numbers, NaNs included."""
    expected = np.array(items, column.type.to_pandas_dtype()).reshape(-1, *column.shape)
    if not column.shape:
        expected = expected.reshape(-1)
    return tuple(tensor.shape) == expected.shape and tensor.numpy().tobytes() == expected.tobytes()


def bits(tensor):
    return tensor.numpy().tobytes()


def row_counts(schema, record, axis):
    """Return the values in each table row of one record, by the definition of a row."""
    opened = schema.axes[axis]
    if opened.counts is None:
        return [next(len(record[column.name]) for column in schema.on(axis))]
    counts = record[opened.counts]
    if not opened.mask:
        return list(counts)
    groups, at = [], 0
    for size in row_counts(schema, record, opened.parent):
        groups.append(sum(counts[at : at + size]))
        at += size
    return groups


def assert_equal(batch, expected):
    """Compare every column, length and validity with a record batch."""
    assert batch.num_rows == expected.num_rows
    records = expected.to_pylist()
    for column in batch.schema:
        items = flat_lists(expected, column)
        assert batch.valid(column.name).tolist() == [item is not None for item in items]
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            assert batch.strings(column.name) == items
        elif None in items:
            missing = float("nan") if pa.types.is_floating(column.type) else column.fill
            items = [missing if item is None else item for item in items]
            assert struct.pack(f"{len(items)}d", *items) == struct.pack(
                f"{len(items)}d", *batch[column.name].tolist()
            )
        else:
            assert same_bits(batch[column.name], items, column)
        if column.axis != RECORD:
            lengths = [len(record[column.name]) for record in records]
            assert batch.lengths(column.axis).tolist() == lengths
            assert batch.lengths_host(column.axis).tolist() == lengths
            assert batch.offsets(column.axis).tolist() == np.cumsum([0, *lengths]).tolist()


@given(record_batch=batches)
def test_a_batch_holds_the_records(record_batch):
    assert_equal(RaggedBatch.from_arrow(record_batch), record_batch)


@given(record_batch=batches, cut=st.integers(0, 5))
def test_how_the_records_come_makes_no_difference(record_batch, cut):
    for form in variants(record_batch, same_schema=True).values():
        assert_equal(RaggedBatch.from_arrow(form), record_batch)
    parts = [record_batch.slice(0, cut), record_batch.slice(cut)]
    assert_equal(RaggedBatch.from_arrow(parts), record_batch)
    singles = [
        RaggedBatch.from_arrow(record_batch.slice(row, 1)) for row in range(record_batch.num_rows)
    ]
    if singles:
        assert_equal(RaggedBatch.collate(singles), record_batch)


@given(record_batch=batches)
def test_all_tensors_are_views_of_one_aligned_arena(record_batch):
    batch = RaggedBatch.from_arrow(record_batch)
    first, last = batch.arena.data_ptr(), batch.arena.data_ptr() + batch.arena.numel()
    tensors = [batch[name] for name in batch]
    tensors += [batch.offsets(axis) for axis in batch.plan.axes[1:]]
    tensors += [batch.valid(column.name) for column in batch.schema if column.nullable]
    ends = []
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().data_ptr() == batch.arena.untyped_storage().data_ptr()
        if tensor.numel():
            assert tensor.data_ptr() % 64 == 0
            assert first <= tensor.data_ptr() <= last - tensor.nbytes
            ends.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    ends.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


@given(record_batch=batches, multiple_of=st.sampled_from([None, 1, 4]))
def test_tables_are_the_padded_lists(record_batch, multiple_of):
    batch = RaggedBatch.from_arrow(record_batch)
    records = record_batch.to_pylist()
    for column in batch.schema:
        if column.axis == RECORD or column.fill is None or column.nullable:
            continue
        counts = [n for record in records for n in row_counts(batch.schema, record, column.axis)]
        width = max(counts, default=0)
        width += -width % (multiple_of or 1)
        dtype = column.type.to_pandas_dtype()
        items = np.array(flat_lists(record_batch, column), dtype).reshape(-1, *column.shape)
        table = batch.padded(column.name, multiple_of=multiple_of)
        assert table.shape == (len(counts), width, *column.shape)
        filled = np.full(table.shape, column.fill, dtype)
        at = 0
        for row, count in enumerate(counts):
            filled[row, :count] = items[at : at + count]
            at += count
        assert table.numpy().tobytes() == filled.tobytes()
        mask = batch.padded_mask(column.axis, multiple_of=multiple_of)
        assert mask.tolist() == [[slot < count for slot in range(width)] for count in counts]
        assert batch.width(column.axis, multiple_of) == width
        for rows, part in batch.buckets(column.name):
            assert bits(part[:, :width]) == bits(table[rows][:, : part.shape[1]])
        for start, stop, part in batch.chunks(column.name, 2):
            assert bits(part) == bits(table[start:stop, : part.shape[1]])


@given(record_batch=batches)
def test_counts_are_those_of_the_column_that_opens_the_axis(record_batch):
    batch = RaggedBatch.from_arrow(record_batch)
    for name in batch.plan.axes[1:]:
        axis = batch.schema.axes[name]
        expected = (
            batch.lengths(name).tolist()
            if axis.counts is None
            else flat_lists(record_batch, batch.schema[axis.counts])
        )
        assert batch.counts(name).tolist() == expected
        assert batch.counts_host(name).tolist() == expected


@given(record_batch=batches)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
def test_copies_hold_the_same(record_batch):
    batch = RaggedBatch.from_arrow(record_batch)
    batch.state = {"epoch": 1}
    for copy in (batch.clone(), pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert_equal(copy, record_batch)
        assert copy.state == {"epoch": 1}
    assert batch.to("cpu") is batch
    assert batch.clone().arena.data_ptr() != batch.arena.data_ptr()


def test_on_another_device_widths_and_text_stay_known(samples):
    """The meta device has no values: what works on it does not read any from the device."""
    batch = RaggedBatch.from_arrow(samples)
    moved = batch.to(torch.device("meta"))
    assert moved.device.type == "meta"
    assert moved.strings("sample_id") == batch.strings("sample_id")
    assert moved.lengths_host("token").tolist() == batch.lengths("token").tolist()
    for name in ("input_ids", "rollout_log_probs", "candidate_ids", "topk_log_probs"):
        assert moved.padded(name).shape == batch.padded(name).shape
        assert [table.shape for _, table in moved.buckets(name)] == [
            table.shape for _, table in batch.buckets(name)
        ]
        assert [table.shape for _, _, table in moved.chunks(name, 7)] == [
            table.shape for _, _, table in batch.chunks(name, 7)
        ]
    assert moved.clone().strings("sample_id") == batch.strings("sample_id")
    assert moved._host.numel() < batch.nbytes / 2
    with pytest.raises(SchemaMismatchError, match="only batches on the CPU"):
        RaggedBatch.collate([moved])


def test_moving_is_one_copy(samples, monkeypatch):
    batch = RaggedBatch.from_arrow(samples)
    copies = []
    original = torch.Tensor.to

    def counted(self, *args, **kwargs):
        copies.append(self.numel())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    batch.to("meta", non_blocking=True)
    assert copies == [batch.nbytes]


def test_pinning_keeps_the_type(samples, monkeypatch):
    """pytorch/pytorch#32150, #67831, #48419, ray-project/ray#64653: pinning lost batch types."""
    from torch.utils.data._utils.pin_memory import pin_memory

    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append(1) or self.clone())
    batch = RaggedBatch.from_arrow(samples)
    pinned = pin_memory(batch)
    assert type(pinned) is RaggedBatch
    assert calls == [1]
    assert pinned.arena.data_ptr() != batch.arena.data_ptr()
    assert_equal(pinned, samples)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert batch.pin_memory() is batch


def test_tensors_may_be_written_and_the_source_stays(samples):
    """pytorch/pytorch#5442: tensors over read-only memory."""
    before = samples.column("input_ids").to_pylist()
    batch = RaggedBatch.from_arrow(samples)
    for name in batch:
        batch[name].zero_()
    assert samples.column("input_ids").to_pylist() == before


def test_columns_behave_like_keys(samples):
    batch = RaggedBatch.from_arrow(samples, columns=["candidate_ids", "sample_id"])
    names = ["sample_id", "completion_mask", "candidate_counts", "candidate_ids"]
    assert batch.keys() == list(batch) == names
    assert len(batch) == 4
    assert "candidate_ids" in batch
    assert "input_ids" not in batch
    assert bytes(dict(batch)["sample_id"].tolist()).decode() == "".join(
        samples.column("sample_id").to_pylist()
    )
    assert repr(batch).startswith("RaggedBatch(num_rows=37, nbytes=")
    assert batch.lengths("target").sum() == batch["completion_mask"].sum()


def test_rows_of_masks_below_other_axes():
    own = [
        rf.Column("chosen", "target", pa.uint8(), opens="choice", mask=True),
        rf.Column("choice_ids", "choice", pa.int32(), fill=-1),
        rf.Column("kept", "candidate", pa.uint8(), opens="kept_candidate", mask=True),
        rf.Column("kept_ids", "kept_candidate", pa.int32(), fill=-1),
    ]
    schema = rf.sample_schema(vocab_size=99, columns=["candidate_counts", "candidate_ids", *own])
    rows = [
        {"sample_id": "a", "input_ids": [1, 2, 3], "completion_mask": [0, 1, 1],
         "candidate_counts": [3, 1], "candidate_ids": [2, 5, 7, 3], "kept": [1, 0, 1, 0],
         "kept_ids": [20, 70], "chosen": [0, 1], "choice_ids": [8]},
        {"sample_id": "b", "input_ids": [1, 4], "completion_mask": [0, 1],
         "candidate_counts": [0], "candidate_ids": [], "kept": [], "kept_ids": [],
         "chosen": [0], "choice_ids": []},
    ]  # fmt: skip
    batch = RaggedBatch.from_arrow(pa.RecordBatch.from_pylist(rows, schema=schema))
    assert batch.padded("kept_ids").tolist() == [[20, 70], [-1, -1], [-1, -1]]
    assert batch.padded("choice_ids").tolist() == [[8], [-1]]
    assert batch.padded_mask("choice", 2).tolist() == [[True, False], [False, False]]
    assert batch.counts("kept_candidate").tolist() == [1, 0, 1, 0]
    moved = batch.to("meta")
    assert moved.padded("kept_ids").shape == (3, 2)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64", "int8"])
def test_counts_of_any_integer_type(kind):
    own = [
        rf.Column("parts", "token", pa.type_for_alias(kind), opens="part"),
        rf.Column("part_ids", "part", pa.int64(), fill=-1),
    ]
    schema = rf.sample_schema(vocab_size=99, columns=own)
    row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1], "parts": [2, 1],
           "part_ids": [5, 6, 7]}  # fmt: skip
    batch = RaggedBatch.from_arrow(pa.RecordBatch.from_pylist([row], schema=schema))
    assert batch.padded("part_ids").tolist() == [[5, 6], [7, -1]]
    assert batch.padded_mask("part").tolist() == [[True, True], [True, False]]
    assert [table.tolist() for _, table in batch.buckets("part_ids")] == [[[7]], [[5, 6]]]
    assert [table.tolist() for _, _, table in batch.chunks("part_ids", 1)] == [[[5, 6]], [[7]]]


def test_an_axis_without_loaded_columns_has_lengths(samples):
    batch = RaggedBatch.from_arrow(samples, columns=["candidate_counts"])
    assert batch.lengths("candidate").tolist() == [
        len(ids) for ids in samples.column("candidate_ids").to_pylist()
    ]


def test_equal_lengths_and_a_single_record_stay_ragged(samples):
    """verl-project/verl#6407, verl-project/verl#6073."""
    one = samples.slice(4, 1)
    for record_batch in (one, rf.concat([one, one, one])):
        batch = RaggedBatch.from_arrow(record_batch)
        assert type(batch) is RaggedBatch
        assert batch["input_ids"].dim() == 1
        assert batch.padded("input_ids").shape[0] == record_batch.num_rows
        assert batch.padded("candidate_ids").dim() == 2


def test_one_call_pads_all_columns_of_an_axis_alike(samples):
    """verl-project/verl#7514, #7012: mask and log-probs were padded to different lengths."""
    batch = RaggedBatch.from_arrow(samples)
    shapes = {
        batch.padded(name, multiple_of=8).shape for name in ("rollout_log_probs", "topk_counts")
    }
    assert shapes == {(37, batch.width("target", 8))}
    assert batch.padded_mask("target", multiple_of=8).shape in shapes


def test_fills_come_from_the_schema(samples):
    batch = RaggedBatch.from_arrow(samples)
    assert batch.padded("topk_ids", 64)[0, -1] == -1
    assert batch.padded("topk_log_probs", 64)[0, -1] == -30000.0
    assert batch.padded("topk_log_probs", 64, fill=-7)[0, -1] == -7
    assert batch.padded("candidate_ids", 1, truncate=True).shape[1] == 1
    with pytest.raises(LimitExceededError):
        batch.padded("candidate_ids", 1)


def test_packed_rows_have_one_row_per_record_or_target(samples):
    packed = in_sequence(samples, [7, 1, 29])
    batch = RaggedBatch.from_arrow(packed)
    assert batch.padded("input_ids").shape[0] == 3
    assert batch.padded("candidate_ids").shape[0] == len(batch["target_ids"])
    assert batch.strings("member_sample_id") == samples.column("sample_id").to_pylist()
    assert batch.lengths("member").tolist() == [7, 1, 29]


def test_binary_columns_are_bytes():
    schema = rf.sample_schema(vocab_size=9, columns=[rf.Column("blob", RECORD, pa.binary())])
    row = {"sample_id": "a", "input_ids": [], "completion_mask": [], "blob": b"\xff\x00"}
    batch = RaggedBatch.from_arrow(pa.RecordBatch.from_pylist([row], schema=schema))
    assert batch.strings("blob") == [b"\xff\x00"]


def test_missing_names_say_what_there_is(samples):
    batch = RaggedBatch.from_arrow(samples, columns=["sample_id"])
    for call in (
        lambda: batch["candidate_ids"],
        lambda: batch.padded("candidate_ids"),
        lambda: batch.valid("candidate_ids"),
        lambda: batch.strings("candidate_ids"),
        lambda: RaggedBatch.from_arrow(samples, columns=["nope"]),
    ):
        with pytest.raises(SchemaMismatchError) as caught:
            call()
        assert caught.value.code == "RF-S003"
        assert "sample_id" in str(caught.value)
    for name in ("candidate_ids", 0):
        with pytest.raises(KeyError, match="RF-S003"):  # as of any mapping
            batch[name]
    for axis in ("candidate", RECORD):
        with pytest.raises(SchemaMismatchError) as caught:
            batch.lengths(axis)
        assert caught.value.code == "RF-S006"


def test_only_numbers_below_the_record_are_padded(samples):
    batch = RaggedBatch.from_arrow(samples)
    for name in ("sample_id", "reward"):
        with pytest.raises(SchemaMismatchError, match="only number columns"):
            batch.padded(name)
    with pytest.raises(SchemaMismatchError, match="not text"):
        batch.strings("reward")


def test_batches_that_cannot_be_joined(samples):
    with pytest.raises(SchemaMismatchError):
        RaggedBatch.from_arrow([])
    with pytest.raises(SchemaMismatchError):
        RaggedBatch.collate([])
    some = RaggedBatch.from_arrow(samples, columns=["input_ids"])
    with pytest.raises(SchemaMismatchError) as caught:
        RaggedBatch.collate([RaggedBatch.from_arrow(samples), some])
    assert (caught.value.code, caught.value.where.batch) == ("RF-S010", 1)
    with pytest.raises(SchemaMismatchError) as caught:
        RaggedBatch.from_arrow([samples, samples.drop_columns(["reward"])])
    assert (caught.value.code, caught.value.where.column) == ("RF-S003", "reward")


def broken(samples, name, offsets):
    column = samples.column(name)
    memory = np.zeros(4, np.int64)
    buffers = [None, pa.py_buffer(memory)]
    lists = pa.Array.from_buffers(column.type, 3, buffers, children=[column.values])
    memory[:] = offsets  # behind pyarrow's back, which checks a little when it makes an array
    return samples.set_column(samples.schema.get_field_index(name), samples.field(name), lists)


def test_lists_that_are_not_safe_to_slice(samples):
    part = samples.slice(0, 3)
    good = [int(n) for n in part.column("input_ids").offsets.to_pylist()]
    total = len(part.column("input_ids").values)
    cases = [
        (broken(part, "input_ids", [good[0], good[2], good[1], good[3]]), "RF-I001"),
        (broken(part, "input_ids", [good[0], good[1], good[2], total + 5]), "RF-I001"),
        (broken(part, "completion_mask", [good[0], good[1] - 1, good[2], good[3]]), "RF-I003"),
        (broken(part, "candidate_log_probs", [0, 0, 0, 0]), "RF-I005"),
    ]
    for record_batch, code in cases:
        with pytest.raises(InvariantError) as caught:
            RaggedBatch.from_arrow(record_batch)
        assert caught.value.code == code
        assert caught.value.where.batch == 0


def test_memory_is_aligned():
    for options in ({}, {"shared": True}):
        for nbytes in (0, 1, 1000, 5_000_000):
            memory = allocate(nbytes, **options)
            assert memory.numel() == nbytes
            assert memory.data_ptr() % 64 == 0
            assert memory.is_shared() == bool(options)


def test_without_torch_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import ragged_format as rf, json\n"
        "try:\n    import ragged_format.torch\n"
        "except rf.MissingDependencyError as err:\n    print(json.dumps(err.to_dict()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["remedy"] == "pip install ragged-format[torch]"
