"""`ragged pack`: rows that hold every scored token once, and figures that add up."""

import io

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.packing import unpack_row
from ragged_format.testing import assert_ragged_equal, rollouts

KEYS = {
    "command", "ok", "path", "input", "packing", "fork", "token_budget", "ranks", "samples",
    "planned", "without_target", "oversize", "dropped", "rows", "steps", "missing_rows", "tokens",
    "unique_tokens", "targets", "load", "slowest_load", "packing_ratio", "fill", "imbalance",
    "null_advantages", "conflicts", "records", "shards", "bytes", "tasks", "resumed", "unchanged",
}  # fmt: skip


def unpacked(path):
    """The members of all rows, by sample id."""
    batch = rf.concat([unpack_row(row) for row in rf.Dataset(path).batches()])
    order = np.argsort(batch["sample_id"].to_pylist())
    return rf.take(batch, order)


@pytest.mark.parametrize("packing", ["tree", "sequence"])
@pytest.mark.parametrize("fork", ["token", "transition"])
def test_every_sample_comes_back_out_of_its_row(
    invoke, invoke_json, tmp_path, dataset, samples, packing, fork
):
    found = invoke_json(
        "pack", dataset, tmp_path / "out", "--packing", packing, "--fork", fork,
        "--token-budget", "90",
    )  # fmt: skip
    assert set(found) == KEYS
    assert invoke("validate", tmp_path / "out").exit_code == 0
    expected = rf.take(samples, np.argsort(samples["sample_id"].to_pylist()))
    assert_ragged_equal(unpacked(tmp_path / "out"), expected)
    rows = rf.Dataset(tmp_path / "out")
    lengths = [len(ids) for ids in rows[:]["input_ids"].to_pylist()]
    assert max(lengths) <= 90
    assert found["rows"] == len(lengths)
    assert found["unique_tokens"] == sum(lengths)
    assert found["tokens"] == sum(map(len, samples["input_ids"].to_pylist()))
    assert found["packing_ratio"] == round(found["tokens"] / found["unique_tokens"], 4)
    assert found["fill"] == round(sum(lengths) / (90 * len(lengths)), 4)
    assert (found["packing_ratio"] > 1) == (packing == "tree")
    [made] = rows.lineage["jobs"]
    assert made["job"] == "pack"
    chosen = {"packing": packing, "fork": fork, "token_budget": 90, "ranks": 1}
    assert made["options"] | chosen == made["options"]
    assert made["figures"]["rows"] == len(lengths)


def test_text(invoke, tmp_path, dataset):
    done = invoke("pack", dataset, tmp_path / "out", "--token-budget", "60", "--ranks", "2")
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f" rows → {tmp_path / 'out'}")
    labels = [line.split()[0] for line in lines[1:]]
    assert labels[:5] == ["samples", "tokens", "targets", "fill", "imbalance"]
    assert "packing ratio" in done.stdout


def test_through_pipes(invoke, samples):
    sink = io.BytesIO()
    rf.write_stream(sink, [samples])
    done = invoke("pack", "-", "-", "--token-budget", "90", stdin=sink.getvalue())
    rows = list(rf.read_stream(done.stdout_bytes, validate="full"))
    assert sum(len(ids) for part in rows for ids in part["member_sample_id"]) == 24
    assert " rows → -" in done.stderr


def test_windows_are_planned_by_themselves_and_counted_together(invoke_json, tmp_path, dataset):
    words = ("pack", dataset, "--ranks", "2", "--token-budget", "60")
    whole = invoke_json(*words, tmp_path / "whole")
    parts = invoke_json(*words, tmp_path / "parts", "--shard-bytes", "1KiB")
    assert (whole["tasks"], parts["tasks"] > 3) == (1, True)
    for key in ("samples", "planned", "tokens", "targets", "missing_rows"):
        assert whole[key] == parts[key]
    assert parts["rows"] % 2 == 0
    assert_ragged_equal(unpacked(tmp_path / "whole"), unpacked(tmp_path / "parts"))


def test_what_is_left_out_is_counted_and_said(invoke, invoke_json, tmp_path):
    schema = rf.sample_schema(vocab_size=9, columns=["advantage"])
    rows = [
        {"sample_id": "short", "input_ids": [1, 2], "completion_mask": [0, 1], "advantage": 1.0},
        {"sample_id": "null", "input_ids": [1, 3], "completion_mask": [0, 1], "advantage": None},
        {"sample_id": "long", "input_ids": [1] * 9, "completion_mask": [0] + [1] * 8,
         "advantage": 1.0},
        {"sample_id": "context", "input_ids": [1, 2], "completion_mask": [0, 0], "advantage": 1.0},
    ]  # fmt: skip
    rf.write_file(tmp_path / "in", [pa.RecordBatch.from_pylist(rows, schema=schema)])
    words = ("pack", tmp_path / "in", "--token-budget", "4", "--null-advantage", "keep")
    found = invoke_json(*words, tmp_path / "a", "--ranks", "4")
    assert [found[key] for key in ("samples", "planned", "without_target", "oversize")] == [
        4, 2, 1, 1,
    ]  # fmt: skip
    assert (found["missing_rows"], found["null_advantages"]) == (2, 1)
    text = invoke(*words, tmp_path / "b", "--ranks", "4").stdout
    assert "1 left out: nothing in them is scored" in text
    assert "1 left out: longer than the budget" in text
    assert "2 missing in the last step" in text
    assert "1 null, kept" in text
    dropped = invoke_json(*words, tmp_path / "c", "--ranks", "4", "--tail", "drop")
    assert (dropped["dropped"], dropped["rows"]) == (2, 0)
    assert rf.Dataset(tmp_path / "c").num_rows == 0
    refused = invoke_json("pack", tmp_path / "in", tmp_path / "d", exit_code=1)
    assert refused["code"] == "RF-P001"
    assert not (tmp_path / "d" / "manifest.json").exists()


def test_conflicting_token_columns_are_counted(invoke, invoke_json, tmp_path):
    schema = rf.sample_schema(vocab_size=9, columns=[rf.Column("seen", "token", pa.int8())])
    rows = [
        {"sample_id": str(n), "input_ids": [1, 2, n], "completion_mask": [0, 0, 1],
         "seen": [7, n, 7]} for n in (3, 4)
    ]  # fmt: skip
    rf.write_file(tmp_path / "in", [pa.RecordBatch.from_pylist(rows, schema=schema)])
    assert invoke_json("pack", tmp_path / "in", tmp_path / "a")["conflicts"] == {"seen": 1}
    assert "seen: 1 tokens differ" in invoke("pack", tmp_path / "in", tmp_path / "b").stdout


def test_sharing_within_groups_only(invoke_json, tmp_path):
    schema = rf.sample_schema(vocab_size=9, columns=["group_id"])
    rows = [
        {"sample_id": f"{n}", "group_id": f"g{n}", "input_ids": [1, 2, n], "completion_mask":
         [0, 0, 1]} for n in (3, 4)
    ]  # fmt: skip
    rf.write_file(tmp_path / "in", [pa.RecordBatch.from_pylist(rows, schema=schema)])
    assert invoke_json("pack", tmp_path / "in", tmp_path / "a")["unique_tokens"] == 4
    found = invoke_json("pack", tmp_path / "in", tmp_path / "b", "--within-group")
    assert found["unique_tokens"] == 6


def test_no_samples_no_rows(invoke_json, tmp_path, samples):
    rf.write_stream(tmp_path / "in", [], samples.schema)
    found = invoke_json("pack", tmp_path / "in", tmp_path / "out")
    assert (found["rows"], found["imbalance"], found["packing_ratio"]) == (0, 1.0, 1.0)
    assert rf.Dataset(tmp_path / "out").ragged_schema.profile == "packed"


def test_packed_rows_are_not_packed_again(invoke_json, tmp_path, dataset):
    invoke_json("pack", dataset, tmp_path / "out")
    found = invoke_json("pack", tmp_path / "out", tmp_path / "again", exit_code=1)
    assert found["code"] == "RF-S002"


def test_existing_output_is_refused_unless_told_otherwise(invoke_json, tmp_path, dataset):
    out = tmp_path / "out"
    first = invoke_json("pack", dataset, out)
    again = invoke_json("pack", dataset, out)
    assert (first["unchanged"], again["unchanged"]) == (False, True)
    assert again["rows"] == first["rows"]
    other = ("pack", dataset, out, "--token-budget", "90")
    assert invoke_json(*other, exit_code=1)["code"] == "RF-C009"
    more = invoke_json(*other, "--mode", "append")
    assert rf.Dataset(out).num_rows == first["rows"] + more["rows"]
    invoke_json("pack", dataset, out, "--mode", "overwrite", "--force")
    assert rf.Dataset(out).num_rows == first["rows"]


@pytest.mark.parametrize(
    "words",
    [("--packing", "knapsack"), ("--token-budget", "0"), ("--ranks", "none"), ("--fork", "")],
)
def test_wrong_usage(invoke, dataset, tmp_path, words):
    assert invoke("pack", dataset, tmp_path / "out", *words).exit_code == 2


def test_rows_of_many_samples_stay_within_the_budget(invoke_json, tmp_path):
    batch = rollouts(np.random.default_rng(3), num_samples=200, vocab_size=99, columns=[])
    rf.write_file(tmp_path / "in", [batch])
    found = invoke_json("pack", tmp_path / "in", tmp_path / "out", "--token-budget", "2000",
                        "--ranks", "4", "--window", "50")  # fmt: skip
    assert found["rows"] % 4 == 0
    assert found["imbalance"] < 1.5
