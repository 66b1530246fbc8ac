"""Every argument of every job, given what it is not: a typed error with a remedy, nothing made."""

import json

import numpy as np
import pytest

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.testing import rollouts

BATCH = rollouts(np.random.default_rng(0), num_samples=4, prompt_length=4, response_length=4)
RECORD = {
    "request": {"token_ids": [5, 6]},
    "response": {"request_id": "a", "choices": [{
        "index": 0, "token_ids": [7], "finish_reason": "stop", "sampling_mask": [[7]],
        "logprobs": {"content": [{"token": "token_id:7", "logprob": 0.0, "top_logprobs": []}]},
    }]},
}  # fmt: skip


class Nothing:
    """An object that can do nothing."""

    def __repr__(self):
        return "nothing"


NOTHING = Nothing()
WRONG = {
    "places": [None, 5, 1.5, b"x", "", [], [None], NOTHING],
    "place": [None, 5, 1.5, b"x", "", "-", NOTHING],
    "choice": [5, None, "nope", [], NOTHING],
    "size": [1.5, "a", None, -1, 0, True, [], 1 << 63, NOTHING],
    "workers": [1.5, "a", -1, 0, True, NOTHING],
    "bytes": [None, -1, 0, "x", "1e9", [], 1.5, NOTHING],
    "integer": ["a", 1.5, [], True, 1 << 70, NOTHING],
    "row": ["a", 1.5, -1, NOTHING],
    "number": ["a", None, -1, [], float("nan"), float("inf"), NOTHING],
    "function": [5, "x"],
    "names": [5, "abc", [5], [None], NOTHING],
    "by": [5, [5], [None], [], NOTHING],
    "condition": [5, [], b"x", "", "x", "reward", NOTHING],
    "mapping": [5, "x", [1], {1: 2}, {"nope": 1}, NOTHING],
    "parts": [
        None, 5, "x", {}, {"a": 1}, {"a": "x", "b": 1}, {1: 0.5, 2: 0.5}, {"a/b": 0.5, "c": 0.5},
        {"..": 0.5, "c": 0.5}, {"": 0.5, "c": 0.5}, {"a": float("nan"), "b": 1},
        {"a": 0.5, "b": None}, NOTHING,
    ],
}  # fmt: skip
RUNNING = {
    "mode": "choice", "workers": "workers", "memory": "bytes", "engine": "choice",
    "progress": "function",
}  # fmt: skip


def filtered(*places, where="reward > 0", **given):
    return rp.filter_dataset(*places, where, **given)


# What is called, the arguments that it needs, and the kinds of all that are tried.
JOBS = {
    "filter": (
        filtered, {}, {"where": "condition", "min_policy_version": "integer",
                       "finish_reasons": "names"} | RUNNING,
    ),
    "advantages": (
        rp.advantages, {}, {"baseline": "choice", "scale": "choice", "single": "choice",
                            "null_reward": "choice", "eps": "number"} | RUNNING,
    ),
    "dedupe": (rp.dedupe, {}, {"by": "choice"} | RUNNING),
    "split": (
        rp.split, {"parts": {"a": 0.5, "b": 0.5}},
        {"parts": "parts", "by": "choice", "seed": "integer"} | RUNNING,
    ),
    "merge": (
        rp.merge, {}, {"sort_by": "by", "shard_bytes": "bytes", "batch_rows": "size"} | RUNNING
    ),
    "shuffle": (rp.shuffle, {}, {"seed": "integer", "shard_bytes": "bytes"} | RUNNING),
    "pack": (
        rp.pack_dataset, {"token_budget": 99},
        {"token_budget": "size", "ranks": "size", "window": "size", "packing": "choice",
         "fork": "choice", "tail": "choice", "null_advantage": "choice",
         "shard_bytes": "bytes"} | RUNNING,
    ),
    "compact": (rp.compact, {}, {"shard_bytes": "bytes"} | RUNNING),
    "expand": (rp.expand, {}, {"shard_bytes": "bytes"} | RUNNING),
    "convert": (
        rp.convert, {"adapter": "vllm", "options": {"vocab_size": 9}},
        {"options": "mapping", "task_bytes": "size"} | RUNNING,
    ),
    "export": (
        rp.export, {"to": "parquet"},
        {"to": "choice", "columns": "names", "options": "mapping", "progress": "function"},
    ),
    "report": (
        rp.report, {}, {"ranks": "workers", "token_budget": "workers", "batch_size": "workers",
                        "workers": "workers", "row": "row", "progress": "function"},
    ),
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with rf.Writer("in", BATCH.schema) as writer:
        writer.write(BATCH)
    (tmp_path / "in.jsonl").write_text(json.dumps(RECORD) + "\n")
    return tmp_path


def refused(call, here, told):
    with pytest.raises(rf.RaggedError) as caught:
        call()
    error = caught.value
    parts = [error.expected is not None, error.got is not None, bool(error.remedy)]
    assert all(parts), f"{told}: {error}"
    assert sorted(path.name for path in here.iterdir()) == ["in", "in.jsonl"], told


@pytest.mark.parametrize("name", JOBS)
def test_what_an_argument_of_a_job_is_not(here, name):
    call, needed, kinds = JOBS[name]
    source = "in.jsonl" if name == "convert" else "in"
    for option, kind in kinds.items():
        for value in WRONG[kind]:
            given = {**needed, option: value}
            refused(lambda given=given: call(source, "out", **given), here, (option, value))


@pytest.mark.parametrize("name", JOBS)
def test_what_a_place_of_a_job_is_not(here, name):
    call, needed, _ = JOBS[name]
    source = "in.jsonl" if name == "convert" else "in"
    for value in WRONG["places"]:
        refused(lambda value=value: call(value, "out", **needed), here, ("in", value))
    for value in WRONG["place"] if name not in ("report", "split") else ["", 5]:
        refused(lambda value=value: call(source, value, **needed), here, ("out", value))
