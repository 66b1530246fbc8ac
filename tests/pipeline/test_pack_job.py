"""The pack job: rows and figures that do not depend on how it runs."""

import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from support.prefix_trie import structure

import ragged_format as rf
from ragged_format.packing import pack_row, plan_rows, unpack_row
from ragged_format.testing import assert_ragged_equal, rollouts
from ragged_pipeline import records
from ragged_pipeline.jobs import pack as pack_job
from ragged_pipeline.jobs.pack import Pack, pack_dataset


@pytest.fixture(scope="module")
def samples():
    """1,200 samples in groups of 8, of very different lengths."""
    parts = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        part = rollouts(
            rng, num_samples=200, vocab_size=500, prompt_length=20,
            response_length=int(rng.integers(20, 90)), max_candidates=9, top_k=3,
        )  # fmt: skip
        ids = [f"{seed}-{i}" for i in range(200)]
        groups = [f"{seed}-{i // 8}" for i in range(200)]
        for name, values in (("sample_id", ids), ("group_id", groups)):
            place = part.schema.get_field_index(name)
            part = part.set_column(place, part.schema.field(name), pa.array(values))
        parts.append(part)
    return rf.concat(parts)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("pack-job") / "samples"
    with rf.Writer(path, samples.schema, batch_rows=64, max_shard_bytes=300_000) as writer:
        writer.write(samples)
    assert len(rf.Dataset(path).shards) > 2
    return path


OPTIONS = {"token_budget": 600, "ranks": 4, "shard_bytes": 400_000}


@pytest.fixture(scope="module")
def packed(tmp_path_factory, dataset):
    out = tmp_path_factory.mktemp("pack-job") / "rows"
    return out, pack_dataset(dataset, out, workers=1, **OPTIONS)


def members(path):
    """The samples of all rows, sorted by id."""
    rows = (batch.slice(i, 1) for batch in rf.Dataset(path).batches() for i in range(len(batch)))
    batch = rf.concat([unpack_row(row) for row in rows])
    return rf.take(batch, np.argsort(batch["sample_id"].to_pylist()))


def test_every_sample_is_in_one_row(packed, samples):
    out, done = packed
    rf.Dataset(out).validate()
    expected = rf.take(samples, np.argsort(samples["sample_id"].to_pylist()))
    assert_ragged_equal(members(out), expected)
    assert done.rows == rf.Dataset(out).num_rows == done.figures["rows"]


@pytest.mark.parametrize("running", [{"workers": 2}, {"workers": 2, "memory": "1GiB"}],
                         ids=["two workers", "less memory"])  # fmt: skip
def test_bytes_do_not_depend_on_how_it_runs(packed, dataset, tmp_path, running):
    out, done = packed
    again = pack_dataset(dataset, tmp_path / "rows", **OPTIONS, **running)
    assert again.figures == done.figures
    names = sorted(path.name for path in out.iterdir())
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == names
    for name in names:
        assert (tmp_path / "rows" / name).read_bytes() == (out / name).read_bytes(), name


def test_figures_follow_from_the_rows(packed, samples):
    out, done = packed
    rows = rf.Dataset(out)
    assert rows.lineage["jobs"][0]["figures"] == done.figures
    sizes, loads = [], []
    for batch in rows.batches():
        for i in range(len(batch)):
            parts = structure(batch.slice(i, 1))
            sizes.append(len(parts["input_ids"]))
            loads.append(sum(depth + 1 for depth in parts["position_ids"]))
    steps = np.array(loads).reshape(-1, 4)
    figures = done.figures
    assert figures["unique_tokens"] == sum(sizes)
    assert max(sizes) <= 600
    assert figures["tokens"] == sum(map(len, samples["input_ids"].to_pylist()))
    assert figures["packing_ratio"] == round(figures["tokens"] / sum(sizes), 4)
    assert figures["fill"] == round(sum(sizes) / 600 / len(sizes), 4)
    assert figures["load"] == sum(loads)
    assert figures["imbalance"] == round(steps.max(axis=1).sum() * 4 / sum(loads), 4)
    assert (figures["samples"], figures["planned"], figures["missing_rows"]) == (1200, 1200, 0)


def test_only_the_end_of_the_data_pays_for_ranks(packed, samples):
    _, done = packed
    whole = plan_rows(samples, 600)
    # The best that windows of this size can do, in whole steps.
    assert done.figures["fill"] > 0.97 * whole.fill
    assert done.figures["imbalance"] <= 1.03


def test_rows_of_a_window_are_those_of_the_planner(dataset, samples, tmp_path):
    pack_dataset(dataset, tmp_path / "rows", token_budget=600, ranks=3, tail="drop")
    plan = plan_rows(samples, 600, 3, tail="drop")
    expected = rf.concat([pack_row(rf.take(samples, row)) for row in plan.rows])
    assert_ragged_equal(rf.Dataset(tmp_path / "rows")[:], expected)


def test_the_tail_is_dropped_by_name(dataset, tmp_path):
    done = pack_dataset(dataset, tmp_path / "rows", **OPTIONS | {"ranks": 16}, tail="drop")
    figures = done.figures
    assert figures["rows"] % 16 == 0
    assert figures["dropped"] > 0
    assert figures["planned"] + figures["dropped"] == figures["samples"]


def test_too_few_samples_for_the_ranks(tmp_path, samples):
    rf.write_file(tmp_path / "in", [samples.slice(0, 3), samples.slice(500, 2)])
    done = pack_dataset(tmp_path / "in", tmp_path / "rows", ranks=8, shard_bytes=1)
    assert (done.figures["rows"], done.figures["missing_rows"]) == (5, 3)
    assert len(rf.Dataset(tmp_path / "rows")) == 5


def test_a_compact_input_gives_the_same_rows(packed, dataset, tmp_path):
    out, _ = packed
    source = rf.Dataset(dataset)
    with rf.Writer(tmp_path / "in", source.schema, encoding="compact", batch_rows=64) as writer:
        writer.write(source.batches())
    done = pack_dataset(tmp_path / "in", tmp_path / "rows", token_budget=600, ranks=4)
    assert_ragged_equal(members(tmp_path / "rows"), members(out))
    assert done.figures["samples"] == 1200


def test_files_of_open_rows_are_closed_again(packed, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "OPEN_FILES", 1)
    monkeypatch.setattr(pack_job, "DEAL_TOKENS", 1000)
    done = pack_dataset(dataset, tmp_path / "rows", workers=1, **OPTIONS)
    assert done.figures["planned"] == 1200
    assert done.figures["rows"] % 4 == 0
    assert_ragged_equal(members(tmp_path / "rows"), members(packed[0]))


def test_several_inputs_are_packed_together(dataset, tmp_path, samples):
    names = [f"more-{i}" for i in range(8)]
    more = samples.slice(0, 8).set_column(0, samples.schema.field("sample_id"), pa.array(names))
    rf.write_file(tmp_path / "more", [more])
    done = pack_dataset([dataset, tmp_path / "more"], tmp_path / "rows", token_budget=600)
    assert done.figures["planned"] == 1208
    assert members(tmp_path / "rows").num_rows == 1208


def test_options_are_kept_as_json():
    job = Pack(token_budget=9, ranks=2, packing="sequence")
    options = json.loads(json.dumps(job.options()))
    assert Pack.from_options(options).options() == options


@pytest.mark.parametrize(
    ("wrong", "code"),
    [({"packing": "x"}, "RF-P001"), ({"token_budget": 0}, "RF-L001"), ({"ranks": 0}, "RF-L001"),
     ({"tail": "open"}, "RF-P001"), ({"shard_bytes": 0}, "RF-L001")],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_errors(dataset, tmp_path, wrong, code):
    with pytest.raises(rf.RaggedError) as caught:
        pack_dataset(dataset, tmp_path / "rows", **wrong)
    assert caught.value.code == code
    assert not (tmp_path / "rows").exists()


def test_a_null_advantage_names_the_sample_and_commits_nothing(tmp_path):
    schema = rf.sample_schema(vocab_size=9, columns=["advantage"])
    rows = [
        {"sample_id": f"{i}", "input_ids": [1, i], "completion_mask": [0, 1],
         "advantage": None if i == 3 else 1.0} for i in range(8)
    ]  # fmt: skip
    rf.write_file(tmp_path / "in", [pa.RecordBatch.from_pylist(rows, schema=schema)])
    with pytest.raises(rf.PackingError, match="no advantage"):
        pack_dataset(tmp_path / "in", tmp_path / "rows", shard_bytes=1, ranks=2, workers=2)
    with pytest.raises(rf.DatasetNotFoundError):
        rf.Dataset(tmp_path / "rows")
    kept = pack_dataset(
        tmp_path / "in", tmp_path / "rows", shard_bytes=1, ranks=2, null_advantage="keep"
    )
    assert kept.figures["null_advantages"] == 1


def test_steps_lie_one_after_the_other_in_every_shard(packed):
    out, _ = packed
    shards = rf.Dataset(out).shards
    assert len(shards) > 2
    assert all(shard.rows % 4 == 0 for shard in shards)
    bounds = np.cumsum([0, *(shard.rows for shard in shards)])
    assert all(b > a for a, b in pairwise(bounds.tolist()))
