"""Public reports about tables and Parquet files of nested data, as small cases on jobs."""

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.adapters import parquet
from ragged_format.testing import assert_ragged_equal, rollouts

WORDS = (
    rf.Column("words", "token", pa.string()),
    rf.Column("boxes", "token", pa.float32(), shape=(4,)),
)


def texts(count=40):
    """Records with lists of text and of tensors, the columns that readers had trouble with."""
    schema = rf.sample_schema(vocab_size=9, columns=["group_id", "reward", *WORDS])
    rows = [
        {
            "sample_id": f"{n}", "group_id": f"g{n // 4}", "reward": float(n % 3),
            "input_ids": [1] * (n % 7), "completion_mask": [0] * (n % 7),
            "words": [f"{n}-{k}" * 20 for k in range(n % 7)],
            "boxes": [[float(k)] * 4 for k in range(n % 7)],
        }
        for n in range(count)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema=schema)


@pytest.fixture
def dataset(tmp_path):
    with rf.Writer(tmp_path / "in", texts().schema) as writer:
        writer.write(texts())
    return tmp_path / "in"


def test_lengths_may_be_subtracted_from(dataset):
    """pola-rs/polars#18054: a length less 2 became 4294967294."""
    lengths = rp.scan(dataset).select(pl.col("token_length") - 5).collect()
    assert lengths["token_length"].to_list() == [n % 7 - 5 for n in range(40)]
    done = rp.filter_dataset(dataset, dataset.parent / "short", "token_length - 5 < 0", workers=1)
    assert done.rows == sum(n % 7 < 5 for n in range(40))


def test_sums_of_lengths_do_not_wrap():
    """pola-rs/polars#13782, pola-rs/polars#10740: sums of 32-bit lengths wrapped, also grouped."""
    frame = rp.to_frame(texts(8), rf.parse_schema(texts(8).schema))
    huge = frame.with_columns(
        token_length=pl.lit(2**31, pl.Int64).cast(frame["token_length"].dtype)
    )
    assert huge["token_length"].sum() == 8 * 2**31
    assert (
        huge.group_by("group_id").agg(pl.col("token_length").sum())["token_length"].max() == 2**33
    )


@pytest.mark.parametrize("name", ["one.parquet", "folder"])
def test_exported_lists_of_text_are_read_by_every_path(dataset, tmp_path, monkeypatch, name):
    """huggingface/datasets#7793, apache/arrow#4115: a row group too large for nested columns.

    "Nested data conversions not implemented for chunked array outputs": it was written, and could
    not be read. Row groups are bounded, also where one batch is larger.
    """
    monkeypatch.setattr(parquet, "GROUP_BYTES", 2000)
    rp.export(dataset, tmp_path / name, to="parquet")
    files = sorted((tmp_path / name).glob("*")) if name == "folder" else [tmp_path / name]
    groups = [pq.ParquetFile(file).metadata.row_group(0) for file in files]
    assert pq.ParquetFile(files[0]).num_row_groups > 4
    assert all(0 < group.num_rows < 20 for group in groups)
    whole = rf.canonical(pads.dataset(files).to_table(), texts().schema)
    assert_ragged_equal(whole, texts())
    parts = [b for file in files for b in pq.ParquetFile(file).iter_batches(3)]
    assert_ragged_equal(rf.canonical(pa.Table.from_batches(parts), texts().schema), texts())
    done = rp.convert([tmp_path / name], tmp_path / "back", adapter="parquet", workers=1)
    assert done.rows == 40
    assert_ragged_equal(rf.Dataset(tmp_path / "back")[:], texts())


@pytest.mark.parametrize("groups", [1, 40])
def test_parquet_is_read_in_constant_memory(tmp_path, monkeypatch, groups):
    """apache/arrow#39808, #45439, #47266, ray-project/ray#49158: scanning piled up memory."""
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1 << 16)
    batch = rollouts(np.random.default_rng(0), num_samples=800)
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_batches([batch]), path, row_group_size=800 // groups)
    before, held, count = pa.total_allocated_bytes(), [], 0
    for rows in parquet.payloads(path):
        held.append(pa.total_allocated_bytes() - before)
        count += rows.num_rows
    assert count == 800
    assert len(held) >= 40
    assert max(held[len(held) // 2 :]) < 1.5 * max(held[: len(held) // 2])


def test_what_was_shuffled_is_contiguous(dataset, tmp_path):
    """huggingface/datasets#5541, #1755: one chunk per row after a shuffle, ten times slower."""
    rp.shuffle(dataset, tmp_path / "mixed", seed=1, workers=1)
    mixed = rf.Dataset(tmp_path / "mixed")
    assert [batch.num_rows for batch in mixed.batches()] == [40]
    order = [int(i) for i in mixed[:].column("sample_id").to_pylist()]
    assert order != sorted(order)
    taken = rf.Dataset(dataset).take(order[::-1])
    assert isinstance(taken, pa.RecordBatch)  # which has no chunks
    assert_ragged_equal(taken, rf.take(texts(), order[::-1]))
