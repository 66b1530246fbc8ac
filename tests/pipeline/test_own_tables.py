"""Tables with columns of this format are taken for what they are, whatever trainers' rows are."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.adapters import parquet
from ragged_format.adapters.report import ConversionReport

HEADS = ["teacher_topk_counts", "teacher_topk_ids", "teacher_topk_log_probs"]
ROW = {
    "sample_id": "a", "input_ids": [1, 2, 3], "completion_mask": [0, 1, 1],
    "teacher_topk_counts": [2, 1], "teacher_topk_ids": [4, 5, 6],
    "teacher_topk_log_probs": [-0.5, -1.5, -0.25],
}  # fmt: skip


def dataset(path, *names):
    schema = rf.sample_schema(vocab_size=10, columns=HEADS)
    rows = [ROW | {"sample_id": name} for name in names]
    with rf.Writer(path, schema) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    return rf.Dataset(path)


@pytest.mark.parametrize("names", [("a", "b"), ()])
def test_an_export_comes_back_without_being_told_what_it_is(tmp_path, names):
    """Rows with these heads could be TRL's."""
    there = dataset(tmp_path / "in", *names)
    rp.export(tmp_path / "in", tmp_path / "x.parquet", to="parquet")
    done = rp.convert(tmp_path / "x.parquet", tmp_path / "out", workers=1)
    assert done.rows == len(names)
    back = rf.Dataset(tmp_path / "out")
    assert back[:].to_pylist() == there[:].to_pylist()


@pytest.mark.parametrize("columns", [HEADS, [], ["old_log_probs", "candidate_counts"]])
def test_tables_of_other_tools_are_known_by_their_columns(tmp_path, columns):
    row = ROW | {"old_log_probs": [-0.5, -0.5], "candidate_counts": [0, 0]}
    row = {name: row[name] for name in ["sample_id", "input_ids", "completion_mask", *columns]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    rp.convert(tmp_path / "x.parquet", tmp_path / "out", options={"vocab_size": 10}, workers=1)
    assert set(rf.Dataset(tmp_path / "out").schema.names) == set(row)


def test_rows_of_trl_are_still_those_of_trl(tmp_path):
    row = {
        "sample_id": "a", "input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "advantage": 0.5,
        "old_log_probs": [0.0, -0.5, -0.25],
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    rp.convert(tmp_path / "x.parquet", tmp_path / "out", options={"vocab_size": 10}, workers=1)
    assert "rollout_log_probs" in rf.Dataset(tmp_path / "out").schema.names


def test_a_saved_hugging_face_dataset_of_ours_says_how_to_read_it(tmp_path):
    dataset(tmp_path / "in", "a")
    rp.to_hf(tmp_path / "in", tmp_path / "hf")
    with pytest.raises(rf.ConversionError, match="read from Parquet") as caught:
        rp.convert(tmp_path / "hf", tmp_path / "out", workers=1)
    assert "to_parquet" in caught.value.remedy


def test_doubles_become_the_nearest_floats_and_are_counted():
    exact = ROW["teacher_topk_log_probs"]
    table = pa.Table.from_pylist([ROW, ROW | {"teacher_topk_log_probs": [-0.1, -1.5, -0.3]}])
    for one in (table, table.to_batches()[0]):
        report = ConversionReport()
        batch = parquet.to_samples([one], vocab_size=10, report=report)
        assert report.converted == {"teacher_topk_log_probs_rounded": 2}
        got = batch.column("teacher_topk_log_probs")
        assert got[0].as_py() == exact
        assert np.array(got[1].as_py(), np.float32).tolist() == got[1].as_py()
        np.testing.assert_allclose(got[1].as_py(), [-0.1, -1.5, -0.3], rtol=1e-7)
    report = ConversionReport()
    parquet.to_samples([table.slice(0, 1)], vocab_size=10, report=report)
    assert report.converted == {}
