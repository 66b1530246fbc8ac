"""Conversion in ranges: the same samples however the input is cut, and every form of input."""

import gzip
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.job_kills import duration, killed_until_done
from support.jobs import bytes_of
from support.vllm_rollouts import VOCAB_SIZE, recorded

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format import hash_runs
from ragged_format.adapters import vllm
from ragged_format.testing import assert_ragged_equal
from ragged_pipeline.foreign import ForeignFile, ForeignInputs
from ragged_pipeline.jobs.convert import Convert

OPTIONS = {"vocab_size": 10}


def record(number, *, heads=False, choices=2):
    entry = {"token_id": 4, "logprob": -0.5, "rank": 1}
    other = {"token_id": 9, "logprob": -1.5, "rank": 2}
    choice = {
        "finish_reason": "stop", "token_ids": [4, 2], "sampling_mask": [[1, 4, 9], [2]],
        "logprobs": {"content": [
            entry | {"top_logprobs": [entry, other] if heads else [entry]},
            {"token_id": 2, "logprob": 0.0, "rank": 1,
             "top_logprobs": [{"token_id": 2, "logprob": 0.0, "rank": 1}]},
        ]},
    }  # fmt: skip
    return {
        "request": {"token_ids": [5, 6, 7], "sampling_params": {"temperature": 1.0, "n": choices}},
        "response": {
            "request_id": f"r{number}", "prompt_token_ids": [5, 6, 7],
            "choices": [choice | {"index": index} for index in range(choices)],
        },
    }  # fmt: skip


def lines(records):
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def convert(source, out, **options):
    options = {"adapter": "vllm", "options": OPTIONS, "workers": 1} | options
    result = rp.convert(source, out, **options)
    dataset = rf.Dataset(out)
    dataset.validate()
    return result, dataset[:]


@pytest.mark.parametrize("task_bytes", [1, 700, 3000, 1 << 20])
def test_samples_do_not_depend_on_how_a_file_is_cut(tmp_path, task_bytes):
    records = [record(n) for n in range(20)]
    (tmp_path / "a.jsonl").write_bytes(b"\n" + lines(records[:7]) + b" \n\n" + lines(records[7:]))
    result, got = convert(tmp_path / "a.jsonl", tmp_path / "out", task_bytes=task_bytes)
    assert_ragged_equal(got, vllm.to_samples(records, **OPTIONS))
    assert (result.shards == 1) == (task_bytes == 1 << 20)
    assert result.figures["report"]["responses"] == {"taken": 20, "stored": 20, "dropped": {}}


@given(
    data=st.lists(st.sampled_from([b"", b"a", b"bc", b"d" * 9]), max_size=30),
    ends=st.booleans(),
    task_bytes=st.integers(1, 40),
)
def test_ranges_are_whole_lines_and_all_of_them(tmp_path_factory, data, ends, task_bytes):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(b"\n".join(data) + (b"\n" if ends and data else b""))
    file = ForeignFile(str(path), "a", "a", "lines")
    inputs = ForeignInputs([file], task_bytes=task_bytes)
    runs, weights = inputs.tasks(task_bytes)
    assert sum(weights) == path.stat().st_size
    found = [
        (line.where.row, line.record)
        for run in runs
        for line in inputs.read(run, None, lambda _: None)
    ]
    assert found == [(n, line) for n, line in enumerate(data) if line]


def test_columns_that_some_ranges_lack_are_in_all_shards(tmp_path):
    records = [record(n, heads=5 < n < 8) for n in range(12)]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    result, got = convert(tmp_path / "a.jsonl", tmp_path / "out", task_bytes=1500)
    assert result.shards > 3
    report = {}
    assert_ragged_equal(got, vllm.to_samples(records, **OPTIONS, report=report))
    assert result.figures["report"] == report


def test_an_error_in_a_late_range_names_its_line(tmp_path):
    bad = record(11)
    bad["response"]["choices"][1]["sampling_mask"][0] = [1, 9]
    (tmp_path / "a.jsonl").write_bytes(lines([record(n) for n in range(11)]) + lines([bad]))
    for workers in (1, 2):
        with pytest.raises(rf.ConversionError) as caught:
            convert(tmp_path / "a.jsonl", tmp_path / "out", task_bytes=900, workers=workers)
        assert caught.value.where.row == 11
        assert caught.value.where.file == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize("form", ["gz", "zst", "json", "parquet", "hf", "hf-splits", "nested"])
def test_every_form_of_records(tmp_path, form):
    records = [record(n) for n in range(9)]
    text = lines(records)
    source = tmp_path / "in"
    source.mkdir()
    if form == "gz":
        (source / "a.jsonl.gz").write_bytes(gzip.compress(text[:50]) + gzip.compress(text[50:]))
    elif form == "zst":
        (source / "a.jsonl.zst").write_bytes(zstandard.compress(text))
    elif form == "json":
        (source / "a.json").write_text(json.dumps(records))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(records), source / "a.parquet", row_group_size=2)
    elif form == "nested":
        for n, one in enumerate(records):
            (source / f"d{n % 3}").mkdir(exist_ok=True)
            (source / f"d{n % 3}" / f"{n}.jsonl").write_bytes(lines([one]))
        records = [records[n] for n in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
    else:
        splits = (
            {"train": records[:4], "test": records[4:]} if form == "hf-splits" else {"": records}
        )
        for name, part in splits.items():
            write_hf(source / name, part)
        if form == "hf-splits":
            (source / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    result, got = convert(source, tmp_path / "out", task_bytes=400)
    assert_ragged_equal(got, vllm.to_samples(records, **OPTIONS))
    assert result.rows == 18
    assert convert(source, tmp_path / "told", adapter=None)[1].equals(got) or form == "nested"


def write_hf(folder, records):
    """What `datasets.Dataset.save_to_disk` leaves: Arrow streams and a list of them."""
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(records)
    names = []
    for n in range(2):
        names.append(f"data-{n:05d}-of-00002.arrow")
        part = table.slice(n * (len(records) // 2), len(records) // 2 if n == 0 else None)
        with pa.ipc.new_stream(folder / names[-1], table.schema) as sink:
            sink.write_table(part, max_chunksize=2)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": x} for x in names]})
    )


def test_a_parquet_file_of_another_system_is_refused(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(rf.ConversionError, match="not recognized"):
        convert(tmp_path / "a.parquet", tmp_path / "out", adapter=None)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(rf.CorruptError):
        convert(tmp_path / "b.parquet", tmp_path / "out")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "state.json").write_text("{}")
    with pytest.raises(rf.CorruptError, match="Hugging Face"):
        convert(tmp_path / "hf", tmp_path / "out")


def test_real_rollouts_convert_alike_in_any_ranges(tmp_path):
    records = recorded("abort")
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    options = {"vocab_size": VOCAB_SIZE}
    _, got = convert(tmp_path / "a.jsonl", tmp_path / "out", options=options, task_bytes=2000)
    assert_ragged_equal(got, vllm.to_samples(records, **options))


def test_an_id_in_two_ranges_is_found(tmp_path):
    records = [record(n) for n in range(10)]
    (tmp_path / "a.jsonl").write_bytes(lines([*records, records[2]]))
    with pytest.raises(rf.InvariantError) as caught:
        convert(tmp_path / "a.jsonl", tmp_path / "out", task_bytes=800)
    assert caught.value.code == "RF-I006"
    assert "'r2/0'" in caught.value.got
    with pytest.raises(rf.DatasetNotFoundError):
        rf.Dataset(tmp_path / "out")


@given(
    parts=st.lists(st.lists(st.integers(0, 50), max_size=20), max_size=5),
    size=st.integers(1, 10),
    wide=st.booleans(),
)
def test_repeated_hashes_are_those_that_occur_twice(parts, size, wide):
    factor = (1 << 64) // 51 if wide else 1
    arrays = [np.sort(np.array([x * factor for x in part], np.uint64)) for part in parts]
    everything = [x * factor for part in parts for x in part]
    expected = sorted({x for x in everything if everything.count(x) > 1})
    found = hash_runs.repeated(arrays, size=size)
    assert [h for part in found for h in part.tolist()] == expected


def test_ids_whose_hashes_agree_are_compared_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(hash_runs, "_hash", lambda _: 0)
    (tmp_path / "a.jsonl").write_bytes(lines([record(n) for n in range(6)]))
    assert convert(tmp_path / "a.jsonl", tmp_path / "out", task_bytes=800)[0].rows == 12


def test_the_bytes_are_those_of_names_and_content_not_of_places(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(lines([record(n) for n in range(6)]))
        convert(tmp_path / name, tmp_path / f"out-{name}", task_bytes=900, workers=2)
    assert bytes_of(tmp_path / "out-x") == bytes_of(tmp_path / "out-y")
    (tmp_path / "y" / "a.jsonl").write_bytes(lines([record(n) for n in range(7)]))
    with pytest.raises(rf.DatasetExistsError):
        convert(tmp_path / "y", tmp_path / "out-y", task_bytes=900)


def test_a_killed_conversion_resumes_to_the_same_bytes(tmp_path):
    records = [record(n, heads=n == 50) for n in range(120)]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    options = {"adapter": "vllm", "options": OPTIONS, "task_bytes": 8000}

    def order(out):
        job = ("ragged_pipeline.jobs.convert", "Convert", options)
        return [*job, str(tmp_path / "a.jsonl"), str(tmp_path / out), 2]

    seconds = duration(order("whole"))
    killed_until_done(order("cut"), seconds, random.Random(0), kills=2)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_shards_are_copied_where_there_are_no_hard_links(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines([record(n) for n in range(6)]))
    convert(tmp_path / "a.jsonl", tmp_path / "linked", task_bytes=900)

    def refused(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refused)
    convert(tmp_path / "a.jsonl", tmp_path / "copied", task_bytes=900)
    assert bytes_of(tmp_path / "linked") == bytes_of(tmp_path / "copied")


@pytest.mark.parametrize(
    "packed", [bytes, gzip.compress, zstandard.compress], ids=["", "gz", "zst"]
)
def test_standard_input_is_kept_until_it_is_converted(tmp_path, packed):
    import io

    records = [record(n, heads=n == 7) for n in range(9)]
    stdin = io.BytesIO(packed(lines(records)))
    for workers in (1, 2):
        stdin.seek(0)
        out = tmp_path / str(workers)
        _, got = convert("-", out, stdin=stdin, task_bytes=1000, workers=workers)
        assert_ragged_equal(got, vllm.to_samples(records, **OPTIONS))
        assert {path.suffix for path in out.iterdir()} == {".arrow", ".json", ".lock"}
    with pytest.raises(rf.ConversionError) as caught:
        convert("-", tmp_path / "no", stdin=io.BytesIO(b"{}\nnonsense"))
    assert caught.value.where.file == "-"


def test_no_input_is_refused(tmp_path):
    with pytest.raises(rf.JobError):
        rp.convert([], tmp_path / "out", adapter="vllm")
    with pytest.raises(rf.DatasetNotFoundError):
        convert(tmp_path / "nothing", tmp_path / "out")


def test_a_job_is_made_again_of_its_options():
    schema = rf.sample_schema(vocab_size=10, columns=["reward"])
    from ragged_pipeline.jobs.convert import schema_text

    job = Convert(adapter="vllm", options=OPTIONS, schema=schema_text(schema))
    assert Convert.from_options(job.options()).options() == job.options()
