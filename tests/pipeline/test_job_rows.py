"""filter, dedupe, split and advantages against the same thing written out in plain Python."""

import math
import statistics

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from support.jobs import bytes_of

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.testing import assert_ragged_equal, rollouts
from ragged_pipeline.jobs.advantages import Advantages
from ragged_pipeline.jobs.dedupe import Dedupe
from ragged_pipeline.jobs.filter import Filter
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.jobs.sort import Sort
from ragged_pipeline.jobs.split import SplitPart
from ragged_pipeline.runner import run

ROWS = 300


def changed(batch, **columns):
    """The batch with other values in some record columns."""
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else batch.column(n)
        for n, field in enumerate(batch.schema)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(3)
    found = rollouts(
        rng, num_samples=ROWS, vocab_size=500, prompt_length=8, response_length=10, group_size=6,
        max_candidates=20, top_k=4,
    )  # fmt: skip
    group = [f"g{n // 6}" if n % 50 else f"alone{n}" for n in range(ROWS)]
    rollout = [f"r{n // 2}" if n % 3 == 0 else None for n in range(ROWS)]
    rollout[0:3] = ["fork", "fork", None]
    reward = [round(float(x), 2) for x in rng.normal(size=ROWS)]
    for n in range(1, ROWS):
        first = rollout.index(rollout[n])
        if rollout[n] is not None and group[n] == group[first]:
            reward[n] = reward[first]
    reasons = [("stop", "length", None)[n % 3] for n in range(ROWS)]
    versions = [None if n % 7 == 0 else n // 20 for n in range(ROWS)]
    return changed(
        found, group_id=group, rollout_id=rollout, reward=reward, finish_reason=reasons,
        policy_version=versions,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(batch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "in"
    with rf.Writer(folder, batch.schema, batch_rows=17, max_shard_bytes=1) as writer:
        writer.write(batch)
    return folder


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch):
    """Several tasks and partitions, however little data there is."""
    for job in (Dedupe, Advantages, Filter, SplitPart):
        monkeypatch.setattr(job, "shard_bytes", 60_000)
    monkeypatch.setattr("ragged_pipeline.exchange.PARTITION_ROWS", 100)


def done(job, source, out, workers=1):
    result = run(job, source, out, workers=workers)
    dataset = rf.Dataset(out)
    dataset.validate()
    return result, dataset[:]


def test_a_filter_keeps_what_its_conditions_say(batch, source, tmp_path):
    result, got = done(Filter(where="reward > 0 and token_length < 20"), source, tmp_path / "a")
    rows = batch.to_pylist()
    keep = [n for n, row in enumerate(rows) if row["reward"] > 0 and len(row["input_ids"]) < 20]
    assert 0 < len(keep) < ROWS
    assert_ragged_equal(got, rf.take(batch, keep))
    assert result.figures == {"dropped": {"where": ROWS - len(keep)}}
    assert result.tasks > 3


def test_a_filter_counts_by_the_first_reason(batch, source, tmp_path):
    job = Filter(min_policy_version=5, finish_reasons=["stop"], where="policy_version < 10")
    result, got = done(job, source, tmp_path / "a")
    expected, keep = {}, []
    for n, row in enumerate(batch.to_pylist()):
        version, reason = row["policy_version"], row["finish_reason"]
        if version is None:
            why = "policy_version unknown"
        elif version < 5:
            why = "stale"
        elif reason != "stop":
            why = f"finish_reason {reason}"
        elif version >= 10:
            why = "where"
        else:
            keep.append(n)
            continue
        expected[why] = expected.get(why, 0) + 1
    assert result.figures["dropped"] == expected
    assert_ragged_equal(got, rf.take(batch, keep))


def test_a_condition_that_is_null_drops_as_in_sql(batch, source, tmp_path):
    result, got = done(Filter(where="policy_version > 3"), source, tmp_path / "a")
    rows = batch.to_pylist()
    unknown = sum(row["policy_version"] is None for row in rows)
    assert result.figures["dropped"]["where is null"] == unknown > 0
    assert got.num_rows == sum((row["policy_version"] or 0) > 3 for row in rows)


def test_a_polars_expression_filters(batch, source, tmp_path):
    expression = pl.col("group_id").str.ends_with("7") | (pl.col("candidate_length") > 60)
    text = expression.meta.serialize(format="json")
    _, got = done(Filter(expression=text), source, tmp_path / "a", workers=2)
    keep = [
        n for n, row in enumerate(batch.to_pylist())
        if row["group_id"].endswith("7") or len(row["candidate_ids"]) > 60
    ]  # fmt: skip
    assert_ragged_equal(got, rf.take(batch, keep))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "at least one condition"),
        ({"where": "reward >"}, "not SQL"),
        ({"where": "nothing > 0"}, "names what the input has not"),
        ({"where": "reward > avg(reward)"}, "depends on other records"),
        ({"where": "lag(reward) over (order by reward) > 0"}, "depends on other records"),
        ({"where": "reward + 1"}, "no condition"),
        ({"where": "reward / group_id > 3"}, "types"),
        ({"expression": "{}"}, "not what polars serializes"),
    ],
)
def test_conditions_that_are_none_are_refused_beforehand(source, tmp_path, options, what):
    with pytest.raises(rf.JobError, match=what):
        run(Filter(**options), source, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_a_condition_on_neighbours_is_refused(source, tmp_path):
    for expression in (
        pl.col("reward") > pl.col("reward").shift(1), pl.col("reward").cum_sum() > 0,
        pl.col("reward").rank() > 3, pl.col("reward").over("group_id") > 0,
    ):  # fmt: skip
        text = expression.meta.serialize(format="json")
        with pytest.raises(rf.JobError, match="other records"):
            run(Filter(expression=text), source, tmp_path / "out", workers=1)


@pytest.mark.parametrize(("where", "rows"), [("true", ROWS), ("1 = 2", 0), ("not false", ROWS)])
def test_a_condition_that_names_no_column_holds_for_all_or_none(source, tmp_path, where, rows):
    result, _ = done(Filter(where=where), source, tmp_path / "a")
    assert result.rows == rows


@pytest.mark.parametrize("where", ["cast(group_id as int) > 1", "date(group_id) is null"])
def test_a_condition_without_a_value_for_a_record_is_refused(source, tmp_path, where):
    with pytest.raises(rf.JobError, match="where has no value for some records") as refused:
        run(Filter(where=where), source, tmp_path / "out", workers=1)
    assert refused.value.remedy


def test_a_condition_with_more_or_fewer_values_than_records_is_refused(source, tmp_path):
    for expression in (
        pl.col("reward").drop_nulls().head(2) > 0, pl.lit(pl.Series([True, False])),
        pl.col("reward").filter(pl.col("reward") > 0) > 0, pl.col("reward").append(1.0) > 0,
    ):  # fmt: skip
        text = expression.meta.serialize(format="json")
        with pytest.raises(rf.JobError):
            run(Filter(expression=text), source, tmp_path / "out", workers=1)


def test_a_filter_that_drops_everything_leaves_an_empty_dataset(source, tmp_path):
    result, got = done(Filter(where="reward > 1000"), source, tmp_path / "a")
    assert (result.rows, result.shards, got.num_rows) == (0, 0, 0)


@pytest.mark.parametrize("by", ["sample_id", "record", "tokens", "prompt", "completion"])
def test_dedupe_keeps_the_first_in_order(batch, source, tmp_path, by):
    twice = rf.concat([batch.slice(40, 30), batch.slice(45, 3)])
    other = changed(twice, sample_id=[f"o{n}" for n in range(33)])
    with rf.Writer(tmp_path / "more", batch.schema, batch_rows=10, validate="structural") as writer:
        writer.write([twice, other])

    def key(row):
        scored = row["completion_mask"].index(1) if 1 in row["completion_mask"] else None
        ids = row["input_ids"]
        cut = len(ids) if scored is None else scored
        return {
            "sample_id": row["sample_id"], "record": str(row), "tokens": str(ids),
            "prompt": str(ids[:cut]), "completion": str(ids[cut:]),
        }[by]  # fmt: skip

    everything = rf.concat([batch, twice, other])
    seen, keep = set(), []
    for n, row in enumerate(everything.to_pylist()):
        if key(row) not in seen:
            keep.append(n)
        seen.add(key(row))
    result = run(Dedupe(by=by), [source, tmp_path / "more"], tmp_path / "out", workers=1)
    assert result.figures == {"duplicates": everything.num_rows - len(keep)}
    assert result.rows_in == everything.num_rows
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], rf.take(everything, keep))


@pytest.mark.parametrize("by", ["group", "record"])
def test_split_puts_every_record_into_one_part(batch, source, tmp_path, by):
    parts = {"train": 0.5, "dev": 0.2, "test": 0.3}
    found = {}
    for part in parts:
        job = SplitPart(parts=parts, part=part, by=by, seed=1)
        _, found[part] = done(job, source, tmp_path / part)
    ids = [id_ for got in found.values() for id_ in got["sample_id"].to_pylist()]
    assert sorted(ids) == sorted(batch["sample_id"].to_pylist())
    groups = [set(got["group_id"].to_pylist()) for got in found.values()]
    shared = any(groups[a] & groups[b] for a in range(3) for b in range(a))
    assert shared == (by == "record")
    for part, fraction in parts.items():
        spread = 4 * math.sqrt(fraction * (1 - fraction) * ROWS * (6 if by == "group" else 1))
        assert abs(found[part].num_rows - fraction * ROWS) < spread
    order = {id_: n for n, id_ in enumerate(batch["sample_id"].to_pylist())}
    places = [order[id_] for id_ in found["train"]["sample_id"].to_pylist()]
    assert places == sorted(places)


def test_splits_that_are_none_are_refused():
    for parts in ({"a": 1.0}, {"a": 0.5, "b": 0.6}, {"a": -0.5, "b": 1.5}, {"a/b": 0.5, "c": 0.5}):
        with pytest.raises(rf.JobError):
            SplitPart(parts=parts, part=next(iter(parts)))


def oracle(batch, baseline="mean", scale="std", eps=1e-6, single="zero"):
    rows = batch.to_pylist()
    groups = {}
    for n, row in enumerate(rows):
        if row["reward"] is not None:
            name = row["rollout_id"] if row["rollout_id"] is not None else (n,)
            groups.setdefault(row["group_id"], {}).setdefault(name, []).append(n)
    out = [None] * len(rows)
    for conversations in groups.values():
        rewards = {name: rows[ns[0]]["reward"] for name, ns in conversations.items()}
        values = list(rewards.values())
        for name, ns in conversations.items():
            reward = rewards[name]
            if len(values) == 1:
                got = {"zero": 0.0, "reward": reward}[single]
            else:
                base = sum(values) / len(values)
                if baseline == "leave_one_out":
                    base = (sum(values) - reward) / (len(values) - 1)
                got = reward - base
                if scale == "std":
                    got /= statistics.stdev(values) + eps
            for n in ns:
                out[n] = got
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"baseline": "leave_one_out", "scale": "none"},
        {"scale": "none", "single": "reward"},
        {"baseline": "leave_one_out", "eps": 1e-4},
    ],
    ids=["grpo", "rloo", "dr-grpo", "leave-one-out-std"],
)
def test_advantages_are_those_of_whole_groups(batch, source, tmp_path, options):
    result, got = done(Advantages(**options), source, tmp_path / "out")
    expected = oracle(batch, **options)
    assert got["advantage"].to_pylist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    groups = batch["group_id"].to_pylist()
    assert result.figures["groups"] == len(set(groups))
    assert result.figures["groups_of_one"] == sum(name.startswith("alone") for name in set(groups))
    rest = [name for name in batch.schema.names if name != "advantage"]
    assert_ragged_equal(got.select(rest), batch.select(rest))


def test_a_conversation_counts_once_however_many_branches_it_has(tmp_path):
    schema = rf.sample_schema(vocab_size=9, columns=["group_id", "rollout_id", "reward"])
    rows = [
        {"sample_id": str(n), "group_id": "g", "rollout_id": rollout, "reward": reward,
         "input_ids": [1], "completion_mask": [0]}
        for n, (rollout, reward) in enumerate([("a", 1.0), ("a", 1.0), ("a", 1.0), ("b", 0.0)])
    ]  # fmt: skip
    with rf.Writer(tmp_path / "in", schema) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    _, got = done(Advantages(scale="none"), tmp_path / "in", tmp_path / "out")
    assert got["advantage"].to_pylist() == [0.5, 0.5, 0.5, -0.5]
    assert got.schema.names == [*schema.names, "advantage"] or "advantage" in got.schema.names


def write(folder, batch):
    with rf.Writer(folder, batch.schema, batch_rows=50) as writer:
        writer.write(batch)
    return folder


def test_records_without_reward_are_refused_or_left_out(batch, tmp_path):
    rewards = batch["reward"].to_pylist()
    rewards[7] = rewards[100] = None
    lacking = changed(batch, reward=rewards)
    source = write(tmp_path / "in", lacking)
    with pytest.raises(rf.JobError, match="null_reward='skip'") as caught:
        run(Advantages(), source, tmp_path / "no", workers=1)
    assert batch["sample_id"][7].as_py() in caught.value.got
    result, got = done(Advantages(null_reward="skip"), source, tmp_path / "out")
    assert result.figures["null_rewards"] == 2
    assert same(got["advantage"].to_pylist(), oracle(lacking))


def same(got, expected):
    return all(
        a is b if a is None or b is None else a == pytest.approx(b, rel=1e-9, abs=1e-9)
        for a, b in zip(got, expected, strict=True)
    )


def test_contradictions_in_groups_are_refused(batch, tmp_path):
    rewards = batch["reward"].to_pylist()
    rewards[1] = rewards[0] + 1  # both are branches of "fork", in one group or not
    groups = batch["group_id"].to_pylist()
    groups[0] = groups[1]
    source = write(tmp_path / "a", changed(batch, reward=rewards, group_id=groups))
    with pytest.raises(rf.JobError, match="different rewards") as caught:
        run(Advantages(), source, tmp_path / "no", workers=1)
    assert str(caught.value.got).startswith(f"{rewards[1]} beside {rewards[0]}; ")
    with pytest.raises(rf.JobError, match="one conversation only"):
        run(Advantages(single="error"), write(tmp_path / "b", batch), tmp_path / "no", workers=1)
    groups[5] = None
    source = write(tmp_path / "c", changed(batch, group_id=groups))
    with pytest.raises(rf.JobError, match="no group"):
        run(Advantages(), source, tmp_path / "no", workers=1)


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e308])
@pytest.mark.parametrize("options", [{}, {"baseline": "leave_one_out", "scale": "none"}], ids=str)
def test_rewards_that_give_no_finite_advantage_are_refused(batch, tmp_path, reward, options):
    rewards = [reward if n % 50 == 7 else -reward for n in range(ROWS)]
    source = tmp_path / "in"
    with rf.Writer(source, batch.schema, validate="off") as writer:
        writer.write(changed(batch, reward=rewards, rollout_id=[None] * ROWS))
    with pytest.raises(rf.JobError, match=r"no finite number|too large") as refused:
        run(Advantages(**options), source, tmp_path / "out", workers=1)
    assert refused.value.where.column == "reward"
    assert refused.value.remedy


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("by", [["finish_reason", "token_length"], ["policy_version"]], ids=str)
@pytest.mark.parametrize("shard_bytes", [60_000, 1 << 20])
def test_sort_is_stable_with_nulls_last(batch, source, tmp_path, by, descending, shard_bytes):
    result = rp.merge(
        [source], tmp_path / "out", sort_by=by, descending=descending, shard_bytes=shard_bytes,
        workers=1,
    )  # fmt: skip
    assert (result.shards > 2) == (shard_bytes == 60_000)
    rows = batch.to_pylist()

    def value(n, name):
        row = rows[n]
        return len(row["input_ids"]) if name == "token_length" else row[name]

    order = list(range(ROWS))
    for name in reversed(by):
        known = [n for n in order if value(n, name) is not None]
        known.sort(key=lambda n, name=name: value(n, name), reverse=descending)
        order = known + [n for n in order if value(n, name) is None]
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], rf.take(batch, order))


def test_a_sort_by_nothing_known_is_refused(source, tmp_path):
    for by in (["nothing"], []):
        with pytest.raises(rf.JobError):
            rp.reshard(source, tmp_path / "out", sort_by=by)


@pytest.mark.parametrize(
    "job",
    [
        Sort(by=["reward"], shard_bytes=60_000),
        Filter(where="reward > 0"), Dedupe(by="prompt"), Advantages(),
        SplitPart(parts={"a": 0.5, "b": 0.5}, part="b"), Merge(shard_bytes=60_000),
    ],
    ids=lambda job: job.name,
)  # fmt: skip
def test_bytes_do_not_depend_on_workers_or_interruption(source, tmp_path, monkeypatch, job):
    run(job, source, tmp_path / "one", workers=1)
    run(job, source, tmp_path / "two", workers=2)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    produce = type(job).produce
    calls = []

    def interrupted(self, plan, stage, task, context):
        calls.append(task)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        return produce(self, plan, stage, task, context)

    monkeypatch.setattr(type(job), "produce", interrupted)
    interruptions = 0
    while True:
        try:
            run(job, source, tmp_path / "cut", workers=1)
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 1
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "one")
