"""`ragged convert`: from an engine's responses to a dataset, all of it or nothing."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

import ragged_format as rf
from ragged_format.adapters import conversion as engines
from ragged_format.adapters import registry, vllm
from ragged_format.codes import CODES
from ragged_format.testing import assert_ragged_equal

KEYS = {
    "command", "ok", "path", "inputs", "records", "report", "shards", "bytes", "tasks", "resumed",
    "unchanged",
}  # fmt: skip
LEDGERS = ["responses", "samples", "tokens", "targets", "log_probs", "candidates", "head_entries"]


def record(number, *, heads=False, support=True, choices=2):
    """One request and response as vLLM's /inference/v1/generate gives it."""
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
    if not support:
        choice["sampling_mask"] = None
    return {
        "request": {"token_ids": [5, 6, 7], "sampling_params": {"temperature": 1.0, "n": choices}},
        "response": {
            "request_id": f"r{number}", "prompt_token_ids": [5, 6, 7],
            "choices": [choice | {"index": index} for index in range(choices)],
        },
    }  # fmt: skip


def write(path, records):
    path.write_bytes(b"".join(json.dumps(r).encode() + b"\n" for r in records))
    return path


@pytest.fixture
def windows_of_two(monkeypatch):
    monkeypatch.setattr(engines, "WINDOW_RECORDS", 2)


VLLM = ("convert", "--from", "vllm", "--vocab-size", "10")


def test_records_become_the_samples_that_the_adapter_gives(
    invoke, invoke_json, tmp_path, windows_of_two
):
    records = [record(n, heads=True) for n in range(5)]
    source = write(tmp_path / "in.jsonl", records)
    found = invoke_json(*VLLM, source, tmp_path / "out")
    assert set(found) == KEYS
    assert found["records"] == 10
    assert found["report"]["tokens"] == {"taken": 50, "stored": 50, "dropped": {}}
    dataset = rf.Dataset(tmp_path / "out")
    expected = vllm.to_samples(records, vocab_size=10)
    assert_ragged_equal(dataset[:], expected)
    (job,) = dataset.lineage["jobs"]
    assert (job["job"], job["options"]["adapter"]) == ("convert", "vllm")
    assert job["inputs"][0]["names"] == ["in.jsonl"]
    assert str(tmp_path) not in json.dumps(job)
    assert invoke("validate", tmp_path / "out").exit_code == 0


def test_the_report_is_printed(invoke, tmp_path):
    source = write(tmp_path / "in.jsonl", [record(0, heads=True), record(1, support=False)])
    done = invoke(*VLLM, "--on-missing-support", "flag", source, tmp_path / "out")
    lines = done.stdout.splitlines()
    assert lines[0] == f"4 samples → {tmp_path / 'out'}"
    assert [line.split()[0] for line in lines[2:9]] == [name.split("_")[0] for name in LEDGERS]
    assert "support_missing" in done.stdout


def test_several_inputs_directories_and_compression(invoke_json, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.jsonl", [record(0)])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(record(1)).encode()))
    (tmp_path / "c.json").write_text(json.dumps([record(2), record(3)], indent=1))
    found = invoke_json(*VLLM, folder, tmp_path / "c.json", tmp_path / "out")
    assert found["inputs"] == [
        str(folder / "a.jsonl"), str(folder / "b.jsonl.gz"), str(tmp_path / "c.json"),
    ]  # fmt: skip
    assert rf.Dataset(tmp_path / "out")[:]["sample_id"].to_pylist() == [
        f"r{n}/{i}" for n in range(4) for i in range(2)
    ]


def test_from_standard_input_to_standard_output(invoke, tmp_path):
    records = [record(n) for n in range(3)]
    done = invoke(*VLLM, "-", "-", stdin=b"".join(json.dumps(r).encode() + b"\n" for r in records))
    assert done.exit_code == 0
    (batch,) = rf.read_stream(done.stdout_bytes)
    assert_ragged_equal(batch, vllm.to_samples(records, vocab_size=10))
    assert done.stderr.startswith("6 samples → -\n")


def test_json_goes_to_stderr_where_stdout_has_the_data(invoke):
    text = json.dumps(record(0)).encode()
    assert json.loads(invoke(*VLLM, "--json", "-", "-", stdin=text).stderr)["records"] == 2
    done = invoke(*VLLM, "--json", "-", "-", stdin=b"nonsense")
    assert (done.exit_code, done.stdout_bytes) == (1, b"")
    assert json.loads(done.stderr)["code"] == "RF-A001"


@pytest.mark.parametrize("first", ["heads", "plain"])
def test_columns_that_only_some_windows_have(invoke_json, tmp_path, windows_of_two, first):
    """The first window does not decide: nothing that a later one has is lost."""
    records = [record(n, heads=(n < 2) == (first == "heads")) for n in range(4)]
    source = write(tmp_path / "in.jsonl", records)
    found = invoke_json(*VLLM, source, tmp_path / "out")
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], vllm.to_samples(records, vocab_size=10))
    assert found["report"]["samples"] == {"taken": 8, "stored": 8, "dropped": {}}


def test_columns_that_come_late_through_a_pipe(invoke_json, tmp_path, windows_of_two):
    records = [record(n, heads=n > 1) for n in range(4)]
    text = b"".join(json.dumps(r).encode() + b"\n" for r in records)
    invoke_json(*VLLM, "-", tmp_path / "out", stdin=text)
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], vllm.to_samples(records, vocab_size=10))
    assert not list(tmp_path.glob("out/.*"))
    columns = "rollout_log_probs,candidate_counts,candidate_ids,topk_counts,topk_ids,topk_log_probs"
    invoke_json(*VLLM, "--columns", columns, "-", tmp_path / "named", stdin=text)
    assert rf.Dataset(tmp_path / "named").schema.names == [
        "sample_id", "input_ids", "completion_mask", *columns.split(","),
    ]  # fmt: skip


def test_remedies_name_options_not_arguments(invoke, invoke_json, tmp_path):
    raw = record(0)
    raw["response"]["choices"][0]["logprobs"]["content"][-1]["logprob"] = -0.25
    source = write(tmp_path / "in.jsonl", [raw])
    found = invoke_json(*VLLM, source, tmp_path / "out", exit_code=1)
    assert "pass --logprobs-mode raw, or run" in found["remedy"]
    assert "pass --logprobs-mode raw, or run" in invoke(*VLLM, source, tmp_path / "out").stderr


def test_modes(invoke_json, tmp_path, windows_of_two):
    first = write(tmp_path / "a.jsonl", [record(0, heads=True)])
    second = write(tmp_path / "b.jsonl", [record(1)])
    out = tmp_path / "out"
    invoke_json(*VLLM, "--mode", "append", first, out)
    refused = invoke_json(*VLLM, second, out, exit_code=1)
    assert (refused["code"], "--mode append" in refused["remedy"]) == ("RF-C009", True)
    assert rf.Dataset(out).num_rows == 2
    invoke_json(*VLLM, "--mode", "append", second, out)
    assert rf.Dataset(out)[:]["sample_id"].to_pylist() == ["r0/0", "r0/1", "r1/0", "r1/1"]
    invoke_json(*VLLM, "--mode", "overwrite", second, out)
    assert rf.Dataset(out)[:]["sample_id"].to_pylist() == ["r1/0", "r1/1"]
    assert "topk_ids" not in rf.Dataset(out).schema.names


def test_columns_that_are_named_must_be_those_that_are_there(invoke_json, tmp_path):
    source = write(tmp_path / "a.jsonl", [record(0)])
    other = write(tmp_path / "b.jsonl", [record(1)])
    columns = ("--columns", "candidate_counts,candidate_ids", "--mode", "append")
    invoke_json(*VLLM, *columns, source, tmp_path / "out")
    invoke_json(*VLLM, *columns, other, tmp_path / "out")
    assert rf.Dataset(tmp_path / "out").num_rows == 4
    columns = ("--columns", "rollout_log_probs", "--mode", "append")
    found = invoke_json(*VLLM, *columns, write(other, [record(2)]), tmp_path / "out", exit_code=1)
    assert found["code"] == "RF-S010"


@pytest.mark.parametrize("mode", ["error", "append"])
def test_an_id_is_taken_once(invoke_json, tmp_path, windows_of_two, mode):
    source = write(tmp_path / "a.jsonl", [record(n) for n in (0, 1, 2)])
    out = tmp_path / "out"
    if mode == "append":
        invoke_json(*VLLM, source, out)
        write(source, [record(n) for n in (3, 1)])
    else:
        write(source, [record(n) for n in (0, 1, 0)])
    found = invoke_json(*VLLM, "--mode", mode, source, out, exit_code=1)
    assert found["code"] == "RF-I006"
    assert "'r1/0'" in found["got"] if mode == "append" else "'r0/0'" in found["got"]
    assert (out / "manifest.json").exists() == (mode == "append")


def test_the_same_files_are_appended_once(invoke_json, tmp_path):
    source = write(tmp_path / "a.jsonl", [record(0)])
    out = tmp_path / "out"
    for mode, unchanged in (("append", False), ("append", True), ("error", True)):
        found = invoke_json(*VLLM, "--mode", mode, source, out)
        assert (found["unchanged"], found["records"]) == (unchanged, 2)
    assert rf.Dataset(out).num_rows == 2
    other = write(tmp_path / "b.jsonl", [record(1)])
    for unchanged in (False, True):
        found = invoke_json(*VLLM, "--mode", "append", other, out)
        assert found["unchanged"] == unchanged
    assert rf.Dataset(out).num_rows == 4


def test_appending_to_another_vocabulary_is_refused(invoke_json, tmp_path):
    source = write(tmp_path / "a.jsonl", [record(0)])
    invoke_json(*VLLM, source, tmp_path / "out")
    found = invoke_json(
        "convert", "--from", "vllm", "--vocab-size", "11", "--mode", "append", source,
        tmp_path / "out", exit_code=1,
    )  # fmt: skip
    assert found["code"] == "RF-A011"


def test_an_error_names_file_and_line(invoke_json, tmp_path, windows_of_two):
    bad = record(3)
    bad["response"]["choices"][1]["sampling_mask"][0] = [1, 9]
    source = write(tmp_path / "a.jsonl", [record(0), record(1), record(2), bad])
    found = invoke_json(*VLLM, source, tmp_path / "out", exit_code=1)
    assert found["code"] == "RF-A005"
    assert found["where"]["file"] == str(source)
    assert found["where"]["row"] == 3
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_line_that_is_not_json(invoke_json, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps(record(0)) + "\n{'single': 'quotes'}\n")
    found = invoke_json(*VLLM, source, tmp_path / "out", exit_code=1)
    assert (found["where"]["row"], found["code"]) == (1, "RF-A001")


@pytest.mark.parametrize("value", ["7", "null", "[1]", '"text"'])
def test_a_record_that_is_not_an_object(invoke_json, tmp_path, value):
    source = tmp_path / "a.jsonl"
    source.write_text(value + "\n")
    assert invoke_json(*VLLM, source, tmp_path / "out", exit_code=1)["code"] == "RF-A002"


def test_error_answers_are_refused_or_skipped_and_counted(invoke, invoke_json, tmp_path):
    answer = {
        "request": {},
        "response": {"error": {"message": "", "code": 500}},
        "http_status": 500,
    }
    source = write(tmp_path / "a.jsonl", [record(0), answer])
    found = invoke_json(*VLLM, source, tmp_path / "out", exit_code=1)
    assert found["code"] == "RF-A003"
    found = invoke_json(*VLLM, "--on-error", "skip", source, tmp_path / "out")
    assert found["report"]["responses"]["dropped"] == {"RF-A003": 1}
    text = invoke(*VLLM, "--on-error", "skip", source, tmp_path / "other").stdout
    assert f"RF-A003  {CODES['RF-A003'].rule}" in text


def test_input_without_records_is_refused(invoke_json, tmp_path):
    (tmp_path / "a.jsonl").touch()
    found = invoke_json(*VLLM, tmp_path / "a.jsonl", tmp_path / "out", exit_code=1)
    assert found["what"] == "the input has no records"


def test_missing_input(invoke_json, tmp_path):
    found = invoke_json(*VLLM, tmp_path / "nothing", tmp_path / "out", exit_code=1)
    assert found["code"] == "RF-C008"


def test_output_where_a_file_is(invoke_json, tmp_path):
    source = write(tmp_path / "a.jsonl", [record(0)])
    found = invoke_json(*VLLM, source, source, exit_code=1)
    assert (found["error"], found["code"]) == ("DatasetExistsError", "RF-C009")
    assert found["where"]["file"] == str(source)


@pytest.mark.parametrize("name", ["sglang9", "_values", "report", "../vllm", "", "os.path"])
def test_an_unknown_engine_is_a_usage_error_that_lists_the_known(invoke, tmp_path, name):
    done = invoke("convert", "--from", name, "--vocab-size", "9", "a", tmp_path / "b")
    assert done.exit_code == 2
    assert "vllm" in done.stderr


@pytest.mark.parametrize(
    "words", [("--from", "vllm"), ("--vocab-size", "0"), ("--vocab-size", "x")]
)
def test_wrong_usage(invoke, words):
    assert invoke("convert", *words, "a", "b").exit_code == 2


def test_memory_does_not_grow_with_the_input(invoke_json, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "WINDOW_BYTES", 20_000)
    peaks = []
    for size in (100, 800):
        source = write(tmp_path / f"{size}.jsonl", [record(n, heads=True) for n in range(size)])
        tracemalloc.start()
        invoke_json(*VLLM, source, tmp_path / f"{size}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000


def test_a_window_of_which_nothing_is_left(invoke_json, tmp_path, windows_of_two):
    answer = {"request": {}, "response": {"error": {"message": ""}}, "http_status": 500}
    source = write(tmp_path / "a.jsonl", [answer, answer, record(0, heads=True)])
    found = invoke_json(*VLLM, "--on-error", "skip", source, tmp_path / "out")
    assert (found["records"], found["report"]["head_entries"]["stored"]) == (2, 6)


TRICKY = [
    record(0),
    record(1) | {"reward": 0.1, "metrics": [{"é😀": [1, {"a": None}]}, {}]},
    record(2) | {"created": 2**70},
    record(3) | {"note": float("nan")},
    record(4) | {"response": json.dumps(record(4)["response"])},
]


def test_lines_mean_what_json_says(invoke_json, tmp_path):
    invoke_json(*VLLM, write(tmp_path / "a.jsonl", TRICKY), tmp_path / "out")
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], vllm.to_samples(TRICKY, vocab_size=10))


@pytest.fixture
def other_system(monkeypatch):
    """An adapter whose payloads are no JSON, and that has few options."""

    def payloads(path):
        yield from map(int, Path(path).read_text().split())

    def to_samples(numbers, *, vocab_size, schema=None, on_error="raise", report=None):
        records = [record(number) for number in numbers]
        return vllm.to_samples(records, vocab_size=vocab_size, report=report)

    reader = registry.Reader(to_samples=to_samples, payloads=payloads, suffixes=(".n",), window=2)
    monkeypatch.setattr(registry, "choose_reader", lambda name: reader)


def test_payloads_that_an_adapter_reads_itself(invoke_json, tmp_path, other_system):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.n").write_text("0 1 2")
    (folder / "b.n").write_text("3")
    (folder / "c.json").write_text("nothing to read here")
    words = ("convert", "--from", "other", "--vocab-size", "10")
    found = invoke_json(*words, folder, tmp_path / "out")
    assert found["inputs"] == [str(folder / "a.n"), str(folder / "b.n")]
    expected = vllm.to_samples([record(n) for n in range(4)], vocab_size=10)
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], expected)


def test_an_option_that_the_adapter_lacks_is_wrong_usage(invoke, tmp_path, other_system):
    (tmp_path / "a.n").write_text("0")
    words = ("convert", "--from", "other", "--vocab-size", "10", tmp_path / "a.n", tmp_path / "out")
    done = invoke(*words, "--logprobs-mode", "raw")
    assert done.exit_code == 2
    assert "--logprobs-mode" in done.stderr
    assert invoke(*words, "--on-error", "skip").exit_code == 0
