"""`ragged convert` and `ragged export` for every adapter: what they list, tell apart, refuse."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from support.vllm_rollouts import VOCAB_SIZE, recorded

import ragged_format as rf
from ragged_format.adapters import registry, sglang, vllm, vllm_openai
from ragged_format.errors import ConversionError
from ragged_format.testing import assert_ragged_equal

SGLANG = Path(__file__).parent.parent / "data" / "sglang" / "generate_req0.json"


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def small(*names, category="openai_endpoints"):
    return recorded(category, names=set(names))


@pytest.fixture
def samples(tmp_path):
    """A dataset of two samples."""
    record = small("completions_n4")
    batch = vllm_openai.to_samples(record, vocab_size=VOCAB_SIZE)
    with rf.Writer(tmp_path / "samples", batch.schema) as writer:
        writer.write(batch)
    return tmp_path / "samples"


@pytest.fixture
def other(monkeypatch):
    """An adapter that writes one line of text a record."""

    def write_lines(batches, path, *, end="\n", fail=False, lossy=False):
        """Write the ids of samples."""
        count = 0
        with Path(path).open("w") as sink:
            for batch in batches:
                for id_ in batch.column("sample_id").to_pylist():
                    sink.write(id_ + end)
                    count += 1
                if fail:
                    raise ConversionError("this form cannot hold it", got="it")
        return {"lines": count, "left_out": int(lossy)}

    own = registry.Writer(write=write_lines, profile="sample", makes="a text file")
    adapter = registry.Adapter(name="other", title="Lines", writes=own)
    known = registry.all_adapters() | {"other": adapter}
    monkeypatch.setattr(registry, "all_adapters", lambda: known)


@pytest.mark.parametrize(
    ("records", "module", "name"),
    [
        (small("completions_n4", "chat_n4"), vllm_openai, "vllm_openai"),
        (recorded("abort"), vllm, "vllm"),
        ([json.loads(SGLANG.read_text())], sglang, "sglang"),
    ],
    ids=["vllm_openai", "vllm", "sglang"],
)
@pytest.mark.parametrize("named", [True, False])
def test_records_of_every_engine(invoke_json, tmp_path, records, module, name, named):
    source = write(tmp_path / "a.jsonl", records)
    words = ["--from", name] if named else []
    found = invoke_json("convert", *words, "--vocab-size", VOCAB_SIZE, source, tmp_path / "out")
    assert found["records"] == module.to_samples(records, vocab_size=VOCAB_SIZE).num_rows
    expected = module.to_samples(records, vocab_size=VOCAB_SIZE)
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], expected)
    (job,) = rf.Dataset(tmp_path / "out").lineage["jobs"]
    assert job["options"]["adapter"] == name


def test_an_option_of_the_adapter(invoke, invoke_json, tmp_path):
    source = write(tmp_path / "a.jsonl", small("prompt_logprobs1", category="variants"))
    words = ("convert", "--from", "vllm", "--vocab-size", VOCAB_SIZE, source, tmp_path / "out")
    invoke_json(*words, "--option", "targets=prompt")
    assert "teacher_topk_ids" in rf.Dataset(tmp_path / "out").schema.names
    for bad in ("targets", "target=prompt"):
        done = invoke(*words, "-o", bad)
        assert done.exit_code == 2
    assert "targets" in done.stderr


def test_another_form_in_the_middle_is_named(invoke_json, tmp_path):
    records = [*recorded("abort"), *small("chat_n4"), *recorded("abort")]
    source = write(tmp_path / "a.jsonl", records)
    found = invoke_json(
        "convert", "--vocab-size", VOCAB_SIZE, source, tmp_path / "out", exit_code=1
    )
    assert found["code"] == "RF-A001"
    assert found["got"] == "vllm_openai"
    assert (found["where"]["file"], found["where"]["row"]) == (str(source), len(recorded("abort")))
    assert "--from vllm_openai" in found["remedy"]
    assert not (tmp_path / "out").exists()


def test_the_wrong_name_is_named(invoke_json, tmp_path):
    words = ("convert", "--from", "vllm", "--vocab-size", VOCAB_SIZE, SGLANG, tmp_path / "out")
    found = invoke_json(*words, exit_code=1)
    assert (found["code"], found["got"]) == ("RF-A001", "sglang")


def test_a_form_that_nothing_recognizes(invoke_json, tmp_path):
    source = write(tmp_path / "a.jsonl", [{"question": "?", "answer": {"text": "!"}}])
    words = ("convert", "--vocab-size", VOCAB_SIZE, source, tmp_path / "out")
    found = invoke_json(*words, exit_code=1)
    assert found["code"] == "RF-A001"
    assert found["got"] == "an object of question, answer {text}"
    assert "vllm" in found["expected"]
    found = invoke_json("convert", "--vocab-size", "9", "-", tmp_path / "out", exit_code=1)
    assert "--from" in found["remedy"]
    (tmp_path / "b.jsonl").touch()
    words = ("convert", "--vocab-size", "9", tmp_path / "b.jsonl", tmp_path / "out")
    assert invoke_json(*words, exit_code=1)["what"] == "the input has no records"


@pytest.mark.parametrize("command", ["convert", "export"])
def test_what_there_is_is_listed(invoke, invoke_json, command):
    found = invoke_json(command, "--list")
    names = [adapter["name"] for adapter in found["adapters"]]
    direction = {"convert": "reads", "export": "writes"}[command]
    assert names == [n for n, a in registry.all_adapters().items() if getattr(a, direction)]
    text = invoke(command, "--list").stdout
    assert all(name in text for name in names)


def test_export_writes_what_the_adapter_writes(invoke_json, invoke, tmp_path, samples, other):
    out = tmp_path / "ids.txt"
    found = invoke_json("export", "--to", "other", samples, out, "-o", "end=;")
    ids = rf.Dataset(samples)[:].column("sample_id").to_pylist()
    assert out.read_text() == ";".join(ids) + ";"
    assert (found["records"], found["counts"]) == (len(ids), {"lines": len(ids), "left_out": 0})
    found = invoke_json("export", "--to", "other", "--lossy", samples, tmp_path / "more")
    assert found["counts"]["left_out"] == 1
    assert (
        f"{len(ids)} records" in invoke("export", "--to", "other", samples, tmp_path / "c").stdout
    )


def test_export_of_some_columns(invoke, invoke_json, tmp_path, samples, monkeypatch):
    seen = []

    def write_schema(batches, path, *, width):
        seen.extend(batch.schema.names for batch in batches)
        Path(path).write_text(str(width))
        return {}

    own = registry.Writer(write=write_schema, profile="sample", makes="a text file")
    adapter = registry.Adapter(name="other", title="Lines", writes=own)
    monkeypatch.setattr(registry, "all_adapters", lambda: {"other": adapter})
    words = ("export", "--to", "other", samples, tmp_path / "out", "--columns", "group_id")
    done = invoke(*words)
    assert done.exit_code == 2  # the adapter needs a width
    assert "width" in done.stderr
    invoke_json(*words, "-o", "width=5")
    assert seen == [["sample_id", "group_id", "input_ids", "completion_mask"]]
    done = invoke(*words[:-1], "reward", "-o", "width=5")
    assert done.exit_code == 2
    assert "rollout_log_probs" in done.stderr.replace("\n", "").replace(" ", "")


def test_export_leaves_nothing_where_it_fails(invoke_json, tmp_path, samples, other):
    out = tmp_path / "ids.txt"
    words = ("export", "--to", "other", samples, out)
    found = invoke_json(*words, "-o", "fail=true", exit_code=1)
    assert found["code"] == "RF-A001"
    assert [path.name for path in tmp_path.iterdir()] == ["samples"]
    out.write_text("mine")
    assert invoke_json(*words, exit_code=1)["error"] == "DatasetExistsError"
    assert out.read_text() == "mine"


def test_export_of_the_other_profile_says_what_to_do(invoke_json, tmp_path, samples, other):
    packed = tmp_path / "packed"
    invoke_json("pack", samples, packed, "--null-advantage", "keep")
    found = invoke_json("export", "--to", "other", packed, tmp_path / "out", exit_code=1)
    assert found["expected"] == "profile 'sample'"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["vllm", "nothing"])
def test_export_to_what_nothing_writes_is_wrong_usage(invoke, tmp_path, samples, other, name):
    done = invoke("export", "--to", name, samples, tmp_path / "out")
    assert done.exit_code == 2
    assert "other" in done.stderr


def test_export_reads_streams_as_well(invoke, invoke_json, tmp_path, samples, other):
    sink = pa.BufferOutputStream()
    rf.write_stream(sink, rf.Dataset(samples).batches())
    done = invoke(
        "export", "--to", "other", "-", tmp_path / "ids.txt", stdin=sink.getvalue().to_pybytes()
    )
    assert done.exit_code == 0
    assert len((tmp_path / "ids.txt").read_text().splitlines()) == 4


def test_a_record_is_recognized_by_at_most_one_adapter():
    for record in recorded():
        assert len(registry.recognize(record)) <= 1
