"""`ragged filter`, `dedupe`, `advantages`, `split`, `merge` and `reshard` on the command line."""

import io
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app
from ragged_format.testing import assert_ragged_equal, rollouts

KEYS = {
    "command", "ok", "path", "inputs", "records", "shards", "bytes", "tasks", "resumed",
    "unchanged", "figures",
}  # fmt: skip


def invoke(*words, stdin=None):
    done = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def found(*words, exit_code=0, stdin=None):
    done = invoke(*words, "--json", stdin=stdin)
    assert done.exit_code == exit_code, done.output
    data = json.loads(done.stdout)
    assert (data["command"], data["ok"]) == (words[0], exit_code == 0)
    return data


@pytest.fixture(scope="module")
def batch():
    return rollouts(
        np.random.default_rng(5), num_samples=40, vocab_size=300, prompt_length=8,
        response_length=9, group_size=4, max_candidates=10, top_k=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(batch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands") / "in"
    with rf.Writer(folder, batch.schema, batch_rows=10) as writer:
        writer.write(batch)
    return folder


def test_filter(batch, source, tmp_path):
    data = found("filter", source, tmp_path / "out", "--where", "reward > 0")
    rewards = np.array([x or 0.0 for x in batch["reward"].to_pylist()])
    assert set(data) == KEYS
    assert data["records"] == rf.Dataset(tmp_path / "out").num_rows == int((rewards > 0).sum())
    assert sum(data["figures"]["dropped"].values()) == 40 - data["records"]
    text = invoke("filter", source, tmp_path / "out", "--where", "reward > 0").stdout
    assert "made by the same job" in text
    assert "dropped" in text


def test_a_filter_without_condition_is_refused(source, tmp_path):
    assert found("filter", source, tmp_path / "out", exit_code=1)["code"] == "RF-J001"
    data = found("filter", source, tmp_path / "out", "--where", "rewards > 0", exit_code=1)
    assert "reward" in data["expected"]


def test_filter_through_pipes(batch, source):
    shard = rf.Dataset(source)
    stream = io.BytesIO()
    rf.write_stream(stream, shard.batches(), shard.schema)
    done = invoke("filter", "-", "-", "--where", "token_length > 0", stdin=stream.getvalue())
    assert done.exit_code == 0
    assert_ragged_equal(rf.concat(list(rf.read_stream(done.stdout_bytes))), batch)
    assert "40 records → -" in done.stderr


def test_dedupe_of_several_inputs(batch, source, tmp_path):
    data = found("dedupe", source, source, tmp_path / "out")
    assert (data["records"], data["figures"]) == (40, {"duplicates": 40})
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], batch)


def test_advantages(source, tmp_path):
    options = ("--scale", "none", "--null-reward", "skip")
    data = found("advantages", source, tmp_path / "out", *options)
    got = rf.Dataset(tmp_path / "out")[:]
    groups = {}
    for name, value in zip(got["group_id"].to_pylist(), got["advantage"].to_pylist(), strict=True):
        groups.setdefault(name, []).append(value or 0.0)
    assert all(abs(sum(values)) < 1e-9 for values in groups.values())
    assert data["figures"]["groups"] == len(groups) == 10


def test_split(source, tmp_path):
    words = ("split", source, tmp_path / "out", "--part", "train=0.75", "--part", "test=0.25")
    data = found(*words)
    parts = {name: rf.Dataset(tmp_path / "out" / name) for name in ("train", "test")}
    assert data["records"] == sum(part.num_rows for part in parts.values()) == 40
    groups = [set(part[:]["group_id"].to_pylist()) for part in parts.values()]
    assert not groups[0] & groups[1]
    assert all(part["unchanged"] for part in found(*words)["parts"].values())
    assert "train" in invoke(*words).stdout


@pytest.mark.parametrize(
    "parts", [("train",), ("train=x",), ("a=0.5", "a=0.5"), ("train=0",)], ids=str
)
def test_parts_that_are_none_are_wrong_usage(source, tmp_path, parts):
    words = [word for part in parts for word in ("--part", part)]
    assert invoke("split", source, tmp_path / "out", *words).exit_code == 2


def test_merge_and_reshard(batch, source, tmp_path):
    data = found("merge", source, tmp_path / "out", "--shard-bytes", "10kB", "--workers", "1")
    assert data["shards"] > 2
    data = found("reshard", tmp_path / "out", tmp_path / "one", "--batch-rows", "7")
    assert data["shards"] == 1
    dataset = rf.Dataset(tmp_path / "one")
    assert_ragged_equal(dataset[:], batch)
    assert [part.num_rows for part in dataset.batches()] == [7, 7, 7, 7, 7, 5]
    data = found("merge", source, tmp_path / "one", exit_code=1)
    assert (data["code"], "--mode append" in data["remedy"]) == ("RF-C009", True)
    assert found("merge", source, tmp_path / "x", "--memory", "1MB", exit_code=1)["code"] == (
        "RF-J001"
    )
