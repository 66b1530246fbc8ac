"""polars over datasets and back: lengths, types, metadata, laziness."""

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.testing import assert_ragged_equal, rollouts, sample_batches, variants
from ragged_pipeline.frames import frame_schema


@given(sample_batches())
def test_a_frame_has_record_columns_and_lengths(batch):
    schema = rf.parse_schema(batch.schema)
    frame = rp.to_frame(batch, schema)
    assert dict(frame.schema) == frame_schema(schema)
    for column in schema.on("record"):
        got, expected = frame[column.name].to_list(), batch.column(column.name).to_pylist()
        assert str(got) == str(expected)  # NaN is itself
    for axis in schema.axes.values():
        if f"{axis.name}_length" in frame.columns:
            lengths = frame[f"{axis.name}_length"]
            assert lengths.dtype == pl.Int64
            for column in schema.on(axis.name):
                assert lengths.to_list() == [len(x) for x in batch.column(column.name).to_pylist()]


@given(sample_batches())
def test_slices_have_the_lengths_of_their_records(batch):
    schema = rf.parse_schema(batch.schema)
    whole = rp.to_frame(batch, schema)
    for form in variants(batch, same_schema=True).values():
        if isinstance(form, pa.RecordBatch):
            assert rp.to_frame(form, schema).equals(whole)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frames") / "in"
    batch = rollouts(np.random.default_rng(5), num_samples=50, vocab_size=300, group_size=5)
    with rf.Writer(folder, batch.schema, batch_rows=8) as writer:
        writer.write(batch)
    return folder, batch


def test_a_scan_reads_only_what_is_asked(source, monkeypatch):
    folder, batch = source
    asked = []
    batches = rf.Dataset.batches

    def watched(self, *, columns=None, **options):
        asked.append(columns)
        return batches(self, columns=columns, **options)

    monkeypatch.setattr(rf.Dataset, "batches", watched)
    got = (
        rp.scan(folder).filter(pl.col("token_length") > 300).group_by("group_id")
        .agg(pl.len(), pl.col("reward").mean()).sort("group_id").collect()
    )  # fmt: skip
    assert set(asked[0]) == {"group_id", "reward", "input_ids"}
    rows = [row for row in batch.to_pylist() if len(row["input_ids"]) > 300]
    assert got["len"].sum() == len(rows) > 0
    assert got["group_id"].to_list() == sorted({row["group_id"] for row in rows})


def test_a_scan_stops_early(source):
    folder, batch = source
    head = rp.scan(folder).select("sample_id").head(11).collect()
    assert head["sample_id"].to_list() == batch["sample_id"].to_pylist()[:11]
    assert rp.scan(folder).collect().height == 50
    assert rp.scan(rf.Dataset(folder)).select(pl.len()).collect().item() == 50


@given(sample_batches())
def test_polars_and_back_is_the_identity(batch):
    frame = pl.DataFrame(pa.Table.from_batches([batch]))
    back = rp.from_polars(frame, batch.schema)
    assert back.schema.equals(batch.schema, check_metadata=True)
    assert_ragged_equal(back, batch)


def test_frames_that_do_not_fit_are_refused():
    schema = rf.sample_schema(vocab_size=9, columns=[])
    rows = {"sample_id": ["a"], "input_ids": [[1, 2]], "completion_mask": [[0, 1]]}
    with pytest.raises(rf.JobError, match="columns of the frame"):
        rp.from_polars(pl.DataFrame({**rows, "more": [1]}), schema)
    with pytest.raises(rf.InvariantError):
        rp.from_polars(pl.DataFrame({**rows, "input_ids": [[1, None]]}), schema)
    with pytest.raises(rf.InvariantError):
        rp.from_polars(pl.DataFrame({**rows, "input_ids": [[1, 99]]}), schema)
    with pytest.raises(rf.JobError, match="input_ids"):
        rp.from_polars(pl.DataFrame({**rows, "input_ids": [[1, 2**40]]}), schema)
    with pytest.raises(rf.JobError, match="input_ids"):
        rp.from_polars(pl.DataFrame({**rows, "input_ids": [["a"]]}), schema)


def test_names_of_the_package_are_those_it_lists():
    for name in rp.__all__:
        assert getattr(rp, name) is not None
    assert set(rp.__all__) <= set(dir(rp))
    with pytest.raises(AttributeError):
        rp.nothing  # noqa: B018
