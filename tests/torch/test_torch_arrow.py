"""Batches of tensors as Arrow data again."""

import gc

import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format import SchemaMismatchError
from ragged_format.digest import digest
from ragged_format.packing import attention_mask, pack_row, varlen_index
from ragged_format.parse import parse_schema
from ragged_format.testing import packed_batches, sample_batches, variants
from ragged_format.torch import RaggedBatch, RaggedLoader


@given(st.one_of(sample_batches(), packed_batches()))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_what_went_in_comes_out(batch):
    for variant in variants(batch, same_schema=True).values():
        back = RaggedBatch.from_arrow(variant).to_arrow()
        assert parse_schema(back.schema) == parse_schema(batch.schema)
        assert parse_schema(back.schema).metadata == {}
        assert digest(back) == digest(variant)
        back.validate(full=True)


def test_only_the_columns_that_were_loaded(samples):
    back = RaggedBatch.from_arrow(samples, ["candidate_ids", "reward"]).to_arrow()
    for name in ("candidate_ids", "candidate_counts", "reward"):
        assert back.column(name).equals(samples.column(name))
    assert "input_ids" not in back.schema.names


def test_columns_with_shapes_and_nulls():
    columns = [
        rf.Column("experts", "token", pa.int16(), shape=(2, 2)),
        rf.Column("note", "record", pa.string(), nullable=True),
        rf.Column("grade", "record", pa.float64(), nullable=True),
    ]
    rows = [
        {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1],
         "experts": [[1, 2, 3, 4], [5, 6, 7, 8]], "note": None, "grade": 1.5},
        {"sample_id": "b", "input_ids": [3], "completion_mask": [0],
         "experts": [[9, 9, 9, 9]], "note": "ä", "grade": None},
    ]  # fmt: skip
    batch = pa.RecordBatch.from_pylist(rows, schema=rf.sample_schema(vocab_size=9, columns=columns))
    back = RaggedBatch.from_arrow(batch).to_arrow()
    assert back.equals(batch)
    assert back.to_pylist() == rows


def test_numbers_are_not_copied_and_outlive_the_loader(samples):
    loader = RaggedLoader(samples, batch_size=3)
    kept = []
    for batch in loader:
        back = batch.to_arrow()
        address = back.column("input_ids").values.buffers()[1].address
        assert address == batch["input_ids"].data_ptr()
        kept.append(back)
    loader.close()
    del loader, batch
    gc.collect()
    assert pa.Table.from_batches(kept).to_pylist() == samples.to_pylist()


def test_masks_of_a_row_that_was_loaded(samples):
    row = pack_row(samples)
    back = RaggedBatch.from_arrow(row).to_arrow()
    assert (attention_mask(back) == attention_mask(row)).all()
    assert varlen_index(back).cu_seqlens_k.tolist() == varlen_index(row).cu_seqlens_k.tolist()


def test_a_batch_elsewhere_is_refused(samples):
    moved = RaggedBatch.from_arrow(samples).to(torch.device("meta"))
    with pytest.raises(SchemaMismatchError, match="on the CPU"):
        moved.to_arrow()
