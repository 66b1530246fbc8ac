"""`ragged demo`: the main job, its figures, and what it leaves alone."""

import json
import sys
from pathlib import Path

import pytest

import ragged_format as rf
from ragged_format.cli import demo
from ragged_format.packing import unpack_row
from ragged_format.testing import assert_ragged_equal

KEYS = {
    "command", "ok", "directory", "records", "tokens", "targets", "elements", "counts",
    "conversion", "packing", "packing_ratio", "padding", "bytes", "seconds",
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_whole_job(invoke, invoke_json, here):
    found = invoke_json("demo")
    assert set(found) == KEYS
    assert found["directory"] == "demo-output"
    assert list(found["seconds"]) == ["convert", "validate", "pack", "load", "pad"]
    out = here / "demo-output"
    assert sorted(path.name for path in out.iterdir()) == ["packed", "rollouts.jsonl.gz", "samples"]
    for name in ("samples", "packed"):
        assert invoke("validate", out / name).exit_code == 0
    samples, packed = rf.Dataset(out / "samples"), rf.Dataset(out / "packed")
    assert found["records"] == samples.num_rows > 50
    assert found["conversion"]["samples"]["stored"] == samples.num_rows
    assert found["packing"]["rows"] == packed.num_rows
    # Nothing is lost on the way: the rows hold the samples.
    members = rf.concat([unpack_row(row) for row in packed.batches()])
    order = {name: n for n, name in enumerate(members["sample_id"].to_pylist())}
    same = rf.take(members, [order[name] for name in samples[:]["sample_id"].to_pylist()])
    assert_ragged_equal(same, samples[:])


def test_the_figures(invoke_json, here):
    found = invoke_json("demo", "elsewhere")
    rows = rf.Dataset(here / "elsewhere" / "packed")[:].to_pylist()
    widths = [max(row["candidate_counts"]) for row in rows]
    slots = sum(w * len(row["target_ids"]) for w, row in zip(widths, rows, strict=True))
    used = sum(len(row["candidate_ids"]) for row in rows)
    assert found["padding"] == {"slots": slots, "used": used, "avoided": round(1 - used / slots, 4)}
    assert found["elements"]["candidate"] == used
    assert found["packing_ratio"] == found["packing"]["packing_ratio"] > 1.2
    assert found["bytes"]["ragged"] < found["bytes"]["json"] < found["bytes"]["dense"]
    shards = (here / "elsewhere" / "packed").glob("*.arrow")
    assert found["bytes"]["ragged"] == sum(shard.stat().st_size for shard in shards)
    histogram = found["counts"]["candidate"]["histogram"]
    assert sum(b["count"] for b in histogram) == found["targets"]


def test_text_and_the_commands_that_it_suggests(invoke, here):
    lines = invoke("demo").stdout.splitlines()
    stages = [line.split()[0] for line in lines[2:7]]
    assert stages == ["convert", "validate", "pack", "load", "pad"]
    assert all(line.endswith(" ms") for line in lines[2:7])
    assert max(map(len, lines)) <= 80
    suggested = lines[lines.index("Look at it") + 1 :]
    assert len(suggested) == 4
    for command in suggested:
        assert invoke(*command.split()[1:]).exit_code == 0, command


def test_again_it_replaces_its_own_output_only(invoke_json, here):
    out = here / "demo-output"
    invoke_json("demo")
    first = {path: path.read_bytes() for path in out.rglob("*.arrow")}
    for place in (out, out / "samples", out / "packed"):
        (place / "mine.txt").write_text("keep")
        (place / "shard-mine.arrow").write_text("keep")
    invoke_json("demo")
    assert len(list(out.rglob("mine.txt"))) == 3
    assert len(list(out.rglob("shard-mine.arrow"))) == 3
    assert not [path for path in first if path.exists()]
    assert len(list(out.rglob("*.arrow"))) == 3 + len(first)


def test_a_foreign_dataset_is_left_alone(invoke_json, here, samples):
    path = Path("demo-output") / "packed"
    with rf.Writer(path, samples.schema) as writer:
        writer.write(samples)
    found = invoke_json("demo", exit_code=1)
    assert (found["code"], found["where"]["file"]) == ("RF-C009", str(path))
    assert rf.Dataset(path).num_rows == 24
    assert not (here / "demo-output" / "samples").exists()


def test_a_foreign_file_is_left_alone(invoke_json, here):
    path = here / "demo-output" / "rollouts.jsonl.gz"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    assert invoke_json("demo", exit_code=1)["code"] == "RF-C009"
    assert path.read_bytes() == b"mine"
    path.unlink()
    (here / "demo-output" / "samples").write_bytes(b"mine")
    assert invoke_json("demo", exit_code=1)["where"]["file"] == "demo-output/samples"
    assert (here / "demo-output" / "samples").read_bytes() == b"mine"


def test_without_torch_the_last_stages_are_skipped(invoke, invoke_json, here, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    text = invoke("demo").stdout
    assert text.count("skipped: pip install 'ragged-format[torch]'") == 2
    found = json.loads(invoke("demo", "--json").stdout)
    assert list(found["seconds"]) == ["convert", "validate", "pack"]
    assert found["padding"] == {"slots": 0, "used": 0, "avoided": 0.0}


@pytest.mark.parametrize(("worth_s", "is_told"), [(-1.0, True), (1e9, False)])
def test_compiling_is_no_part_of_the_times(invoke, tmp_path, monkeypatch, worth_s, is_told):
    module = sys.modules["ragged_format.cli.demo"]
    monkeypatch.setattr(module, "_WORTH_A_WORD_S", worth_s)
    shown = invoke("demo", tmp_path / "data").output
    assert ("The parser was compiled first" in shown) == is_told
