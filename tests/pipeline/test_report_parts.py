"""Reading for a report: every kind of source, in parts, in several processes."""

import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app
from ragged_format.parse import parse_schema
from ragged_format.testing import rollouts
from ragged_pipeline.jobs.pack import pack_dataset
from ragged_pipeline.reports import collect, report
from ragged_pipeline.reports.api import name_of
from ragged_pipeline.reports.groups import Groups
from ragged_pipeline.reports.mass import Mass
from ragged_pipeline.reports.statistics import Statistics
from ragged_pipeline.reports.tally import LIMIT, Tally, Words


@pytest.fixture(scope="module")
def samples():
    return [
        rollouts(
            np.random.default_rng(seed),
            num_samples=20,
            vocab_size=400,
            prompt_length=9,
            response_length=9,
            group_size=4,
            max_candidates=30,
            prefix=f"s{seed}",
        )
        for seed in range(4)
    ]


@pytest.fixture(scope="module")
def dataset(samples, tmp_path_factory):
    """Four shards of several batches each."""
    path = tmp_path_factory.mktemp("parts") / "data"
    for number, batch in enumerate(samples):
        mode = "append" if number else "error"
        with rf.Writer(path, batch.schema, mode=mode, batch_rows=6) as writer:
            writer.write(batch)
    return path


def figures(source, **options):
    """All figures but what names the source."""
    found = dict(report(source, **options).statistics)
    found.pop("source")
    return json.dumps(found)


def test_figures_are_the_same_for_any_number_of_workers(dataset):
    assert figures(dataset, workers=1) == figures(dataset, workers=2) == figures(dataset, workers=3)


def test_large_shards_are_read_in_parts(dataset, monkeypatch):
    whole = figures(dataset, workers=1)
    monkeypatch.setattr(collect, "PART_BYTES", 10_000)
    monkeypatch.setattr(collect, "SLICE_BYTES", 3_000)
    parts = collect.parts_of(rf.Dataset(dataset))
    assert len(parts) > 8
    assert [part.record for part in parts] == np.cumsum([0, *[p.rows for p in parts]])[:-1].tolist()
    # Sums of a group's rewards are the only figures that could differ in their last bit.
    assert figures(dataset, workers=1) == whole
    assert figures(dataset, workers=2) == whole


def test_every_kind_of_source_gives_the_same_figures(samples, dataset, tmp_path):
    whole = figures(dataset)
    rf.write_file(tmp_path / "file.arrow", samples)
    with rf.Writer(tmp_path / "compact", samples[0].schema, encoding="compact") as writer:
        for batch in samples:
            writer.write(batch)
    rf.write_stream(tmp_path / "stream.arrows", samples)
    assert figures(tmp_path / "file.arrow") == whole
    assert figures(tmp_path / "compact") == whole
    shard = tmp_path / "compact" / rf.Dataset(tmp_path / "compact").shards[0].name
    assert figures(shard) == whole
    assert figures(tmp_path / "stream.arrows") == whole
    assert figures(io.BytesIO((tmp_path / "stream.arrows").read_bytes())) == whole


def test_a_missing_shard_is_named_from_a_worker(dataset, tmp_path):
    copied = tmp_path / "data"
    copied.mkdir()
    for file in dataset.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    (copied / rf.Dataset(copied).shards[2].name).unlink()
    with pytest.raises(rf.MissingShardError) as caught:
        report(copied, workers=2)
    assert caught.value.code == "RF-C006"


class Deadly(rf.Dataset):
    """A dataset whose worker dies when it gets it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_worker_that_dies_is_an_error_and_no_hang(dataset):
    with pytest.raises(rf.RaggedError) as caught:
        report(Deadly(dataset), workers=2)
    assert caught.value.code == "RF-J002"
    assert "exit status 3" in str(caught.value)


def test_a_source_that_cannot_be_sent_is_an_error_and_no_hang(dataset):
    source = rf.Dataset(dataset)
    source.__class__ = type("Local", (rf.Dataset,), {"__reduce__": lambda self: (lambda: 0, ())})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        report(source, workers=2)


@pytest.mark.parametrize("option", ["ranks", "token_budget", "batch_size", "workers", "row"])
@pytest.mark.parametrize("value", [-1, 1.5, "a", True], ids=repr)
def test_wrong_options_are_refused(dataset, option, value):
    with pytest.raises(rf.LimitExceededError):
        report(dataset, **{option: value})


def test_progress_counts_every_record(dataset):
    seen = []
    report(dataset, progress=seen.append)
    assert sum(seen) == 80


def test_a_tally_folds_alike_however_it_is_divided():
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 1 << 40, 3 * LIMIT)
    whole = Tally()
    whole.add(numbers)
    parts = [Tally() for _ in range(7)]
    for tally, part in zip(parts, np.array_split(numbers, 7), strict=True):
        tally.add(part)
    merged = Tally()
    for tally in reversed(parts):
        merged.merge(tally)
    assert merged.to_json() == whole.to_json()
    assert (merged.values == whole.values).all()
    assert not whole.is_exact
    assert len(whole.values) < LIMIT
    assert whole.total == int(numbers.sum())
    exact = np.sort(numbers)
    for share in (0.05, 0.5, 0.99):
        assert whole.quantile(share) == pytest.approx(exact[int(share * len(exact))], rel=0.01)


def test_many_groups_become_a_sample_of_whole_groups(monkeypatch):
    monkeypatch.setattr("ragged_pipeline.reports.groups.LIMIT", 100)
    rng = np.random.default_rng(0)
    names = [f"group-{i}" for i in range(1000)]
    keys = pa.array(names)
    rewards = rng.normal(size=(4, 1000))
    whole, first, second = Groups(), Groups(), Groups()
    for part in rewards:
        whole.add(keys, part)
    first.add(keys, rewards[0])
    first.add(keys, rewards[1])
    second.add(keys, rewards[2])
    second.add(pa.array(names[::-1]), rewards[3][::-1])
    first.merge(second)
    assert whole.level >= 3
    assert first.level == whole.level
    table = whole.table
    assert 0 < len(table["count"]) <= 100
    assert (table["count"] == 4).all()
    order = sorted(range(1000), key=lambda i: xxhash.xxh3_64_intdigest(names[i].encode()))
    expected = [rewards[:, i].mean() for i in order[: len(table["count"])]]
    np.testing.assert_allclose(table["mean"], expected)
    np.testing.assert_allclose(first.table["mean"], expected)
    for groups in (whole, first):
        named = groups.to_json()["named"]
        assert [g["group_id"] for g in named] == [names[i] for i in order[:12]]
        np.testing.assert_allclose([g["mean"] for g in named], expected[:12])
        assert {g["samples"] for g in named} == {4}


def test_words_beyond_the_limit_are_counted_together():
    words = Words()
    words.add([f"w{i}" for i in range(2000)], [1] * 2000)
    data = words.to_json()
    assert len(data["values"]) == 1024
    assert data["others"] == 976
    assert words.total == 2000


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_command_writes_a_page_pictures_and_figures(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("report", dataset)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert "page: report.html" in done.output

    done = invoke("report", dataset, "other.html", "--json", "--ranks", 2, "--workers", 2)
    data = json.loads(done.stdout)
    assert (data["command"], data["ok"], data["html"]) == ("report", True, "other.html")
    assert data["totals"]["records"] == 80
    assert (tmp_path / "other.html").exists()


def test_command_prints_figures_alone_or_the_page(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(invoke("report", dataset, "--json").stdout)["html"] is None
    done = invoke("report", dataset, "-")
    assert done.stdout.startswith("<!doctype html>")
    assert "80 samples" in done.stderr
    assert not list(tmp_path.iterdir())


def test_command_reports_errors(tmp_path):
    done = invoke("report", tmp_path / "nowhere", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["code"] == "RF-C008"


def test_impossible_log_probs_are_counted():
    mass = Mass("vocabulary", in_order=True)
    mass.add(
        np.array([np.log(0.5), np.nan, 0.5, -np.inf, 1e9, np.log(0.25), 0.0], np.float32),
        np.array([2, 0, 1, 1, 1, 1, 1]),
    )
    data = mass.to_json()
    assert (data["heads"], data["not_finite"], data["above_one"]) == (6, 2, 1)
    assert data["mean"] == pytest.approx((0.5 + np.exp(0.5) + 0 + 0 + 0.25 + 1) / 6, abs=1e-7)
    tails = {b["low"]: b["count"] for b in data["tail_histogram"] if b["count"]}
    assert tails == {0.0: 2, 0.5: 4}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("-", "standard input"),
        ("/home/someone/data/train/", "train"),
        ("s3://key:secret@bucket/train?token=1", "bucket/train"),
        (Path("/data/train"), "train"),
    ],
    ids=str,
)
def test_names_leave_out_where_data_lay(place, name):
    assert name_of(place) == name


def test_a_stream_on_standard_input(samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rf.write_stream(tmp_path / "stream.arrows", samples)
    content = (tmp_path / "stream.arrows").read_bytes()
    done = CliRunner().invoke(app, ["report", "-", "--json"], input=content)
    data = json.loads(done.stdout)
    assert (data["source"]["name"], data["source"]["kind"]) == ("standard input", "stream")
    assert data["totals"]["records"] == 80


def test_counters_do_not_grow_with_the_data(samples):
    schema = parse_schema(samples[0].schema)

    def size(times):
        statistics = Statistics(schema, collect.Options())
        for number in range(times):
            statistics.add(samples[number % 4], 20 * number)
        return len(pickle.dumps(statistics))

    assert size(64) < 1.1 * size(4)


def test_ranks_and_budget_come_from_the_lineage_of_the_pack_job(dataset, tmp_path):
    made = pack_dataset(dataset, tmp_path / "rows", token_budget=120, ranks=2, workers=1)
    data = report(tmp_path / "rows").statistics
    assert (data["balance"]["ranks"], data["packing"]["budget"]) == (2, 120)
    assert data["packing"]["budget_is_known"]
    assert round(data["packing"]["fill"], 4) == made.figures["fill"]
    assert round(data["packing"]["ratio"], 4) == made.figures["packing_ratio"]
    assert round(data["balance"]["imbalance"], 4) == made.figures["imbalance"]
    assert report(tmp_path / "rows", ranks=3, token_budget=200).statistics["balance"]["ranks"] == 3
