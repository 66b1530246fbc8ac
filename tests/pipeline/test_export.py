"""Export: Parquet and Hugging Face directories hold what the data holds, and come whole."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ragged_format as rf
from ragged_format.adapters import hf, parquet
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.packing import pack_row
from ragged_format.testing import assert_ragged_equal, rollouts
from ragged_pipeline.conversion import convert
from ragged_pipeline.exporting import export, to_hf


@pytest.fixture(scope="module")
def samples():
    own = rf.Column("experts", "token", pa.int16(), shape=(2,), fill=-1)
    batch = rollouts(np.random.default_rng(2), num_samples=60, vocab_size=500, top_k=4)
    schema = rf.sample_schema(vocab_size=500, columns=[
        *(c for c in rf.parse_schema(batch.schema) if c.name not in ("sample_id", "input_ids",
                                                                     "completion_mask")), own,
    ])  # fmt: skip
    lengths = [len(ids) for ids in batch["input_ids"].to_pylist()]
    rows = batch.to_pylist()
    for row, length in zip(rows, lengths, strict=True):
        row["experts"] = [[number % 7, 1] for number in range(length)]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("export") / "in"
    with rf.Writer(path, samples.schema, batch_rows=16) as writer:
        writer.write(samples)
    return path


def test_parquet_comes_back_as_it_was(dataset, samples, tmp_path):
    done = export(dataset, tmp_path / "out.parquet", to="parquet")
    assert done.figures == {"files": 1, "records": 60}
    assert done.bytes == (tmp_path / "out.parquet").stat().st_size
    assert_ragged_equal(rf.canonical(pq.read_table(tmp_path / "out.parquet")), samples)
    converted = convert(tmp_path / "out.parquet", tmp_path / "back", adapter="parquet")
    assert converted.rows == 60
    assert_ragged_equal(rf.Dataset(tmp_path / "back")[:], samples)


def test_parquet_of_many_files(dataset, samples, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1)
    done = export(dataset, tmp_path / "out", to="parquet",
                  options={"file_bytes": 1, "compression": "snappy"})  # fmt: skip
    assert done.figures["files"] == done.shards > 2
    assert min(path.name for path in (tmp_path / "out").iterdir()) == "part-00000.parquet"
    assert_ragged_equal(rf.canonical(pq.read_table(tmp_path / "out")), samples)


def test_packed_rows_are_exported_too(samples, tmp_path):
    row = pack_row(samples, null_advantage="keep")
    rf.write_file(tmp_path / "in", [row])
    export(tmp_path / "in", tmp_path / "out.parquet", to="parquet")
    assert_ragged_equal(rf.canonical(pq.read_table(tmp_path / "out.parquet")), row)


def test_other_tools_read_the_parquet(dataset, samples, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    export(dataset, tmp_path / "out.parquet", to="parquet", columns=["candidate_ids"])
    query = f"select sum(len(candidate_ids)), count(*) from '{tmp_path}/out.parquet'"
    candidates = sum(map(len, samples["candidate_ids"].to_pylist()))
    assert duckdb.sql(query).fetchall() == [(candidates, 60)]


def test_a_table_of_another_tool_says_what_was_assumed(tmp_path):
    table = pa.table({
        "sample_id": ["a", "b"], "input_ids": [[1, 2], [3]], "completion_mask": [[0, 1], [0]],
        "reward": [1.0, None], "comment": ["x", None],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(ConversionError) as caught:
        parquet.to_samples([table])
    assert (caught.value.code, caught.value.expected) == ("RF-A011", "vocab_size")
    done = convert(tmp_path / "in.parquet", tmp_path / "out", adapter="parquet",
                   options={"vocab_size": 9})  # fmt: skip
    report = done.figures["report"]
    assert report["unread"] == {"comment": 1}
    assert sum(report["noted"].values()) == 1
    stored = rf.Dataset(tmp_path / "out")
    assert stored.schema.names == ["sample_id", "reward", "input_ids", "completion_mask"]
    assert stored[:]["reward"].to_pylist() == [1.0, None]


def test_wrong_tables_are_refused(samples, tmp_path):
    report = ConversionReport()
    with pytest.raises(ConversionError, match="required columns"):
        parquet.to_samples([pa.table({"text": ["a"]})], vocab_size=9, report=report)
    with pytest.raises(ConversionError, match="another vocabulary"):
        parquet.to_samples([samples], vocab_size=9)
    with pytest.raises(ConversionError, match="nothing to convert"):
        parquet.to_samples([], vocab_size=9)
    with pytest.raises(ConversionError, match="wanted is missing"):
        parquet.to_samples([samples.select(["sample_id", "input_ids", "completion_mask"])],
                           schema=samples.schema)  # fmt: skip
    chosen = parquet.to_samples([samples], columns=["reward"])
    assert chosen.schema.names == ["sample_id", "reward", "input_ids", "completion_mask"]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(rf.CorruptError, match="Parquet"):
        list(parquet.payloads(str(tmp_path / "broken.parquet")))


LOAD = """
import json, sys, datasets
found = datasets.load_from_disk(sys.argv[1])
print(json.dumps([found.num_rows, found[:]["candidate_ids"] == json.load(sys.stdin),
                  sorted(found.column_names)]))
"""


def test_hugging_face_opens_the_directory(dataset, samples, tmp_path):
    done = to_hf(dataset, tmp_path / "out", options={"file_bytes": 1})
    assert done.figures["files"] == 4
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path / "out")], check=True,
        input=json.dumps(samples["candidate_ids"].to_pylist()), capture_output=True, text=True,
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert json.loads(found.stdout) == [60, True, sorted(samples.schema.names)]


def test_a_hugging_face_directory_by_its_documented_form(dataset, samples, tmp_path):
    to_hf(dataset, tmp_path / "out")
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    tables = []
    for file in state["_data_files"]:
        with pa.OSFile(str(tmp_path / "out" / file["filename"])) as source:
            tables.append(pa.ipc.open_stream(source).read_all())
    assert_ragged_equal(rf.canonical(pa.concat_tables(tables)), samples)
    hf.write([samples.slice(0, 59)], str(tmp_path / "other"))
    other = json.loads((tmp_path / "other" / "state.json").read_text())
    assert other["_fingerprint"] != state["_fingerprint"]


def test_no_records_make_an_empty_table(samples, tmp_path):
    rf.write_file(tmp_path / "in", [], samples.schema)
    export(tmp_path / "in", tmp_path / "out.parquet", to="parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert (table.num_rows, table.schema.names) == (0, samples.schema.names)
    to_hf(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / "data-00000-of-00001.arrow").exists()


def test_several_inputs_follow_each_other(dataset, samples, tmp_path):
    rf.write_stream(tmp_path / "more", [samples.slice(0, 5)])
    progress = []
    done = export([dataset, tmp_path / "more"], tmp_path / "out.parquet", to="parquet",
                  columns=[], progress=progress.append)  # fmt: skip
    assert done.rows == 65
    names = pq.read_schema(tmp_path / "out.parquet").names
    assert names == ["sample_id", "input_ids", "completion_mask"]
    assert progress[-1].done > 0


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [({"to": "nothing"}, ConversionError, "RF-A001"),
     ({"to": "trl"}, ConversionError, "RF-A001"),
     ({"to": "parquet", "columns": ["nothing"]}, rf.SchemaMismatchError, "RF-S003"),
     ({"to": "parquet", "options": {"compression": "lzma"}}, rf.LimitExceededError, "RF-L001")],
    ids=["form", "profile", "column", "option"],
)  # fmt: skip
def test_wrong_exports_leave_nothing(dataset, tmp_path, options, error, code):
    with pytest.raises(error) as caught:
        export(dataset, tmp_path / "out", **options)
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(dataset, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FileExistsError):
        export(dataset, tmp_path / "out", to="parquet")
    assert (tmp_path / "out").read_text() == "mine"


def test_parquet_counts_what_it_takes():
    schema = rf.sample_schema(
        vocab_size=9,
        columns=["rollout_log_probs", "candidate_counts", "candidate_ids"],
    )
    rows = [
        {"sample_id": "a", "input_ids": [5, 6, 7], "completion_mask": [0, 1, 1],
         "rollout_log_probs": [-0.5, 0.0], "candidate_counts": [3, 1],
         "candidate_ids": [2, 6, 8, 7]},
        {"sample_id": "b", "input_ids": [5], "completion_mask": [0], "rollout_log_probs": [],
         "candidate_counts": [], "candidate_ids": []},
    ]  # fmt: skip
    report = ConversionReport()
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    parquet.to_samples([batch.slice(0, 1), batch.slice(1)], report=report)
    ledgers = (
        report.samples, report.tokens, report.targets, report.log_probs, report.candidates,
        report.head_entries,
    )  # fmt: skip
    assert [ledger.taken for ledger in ledgers] == [2, 4, 2, 2, 4, 0]
    assert report.unbalanced() == []
