"""Plans hold every sample once, keep the budget, and balance the ranks."""

import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefix_trie import SCHEMA, batch_of, random_samples, sharing_samples, structure

import ragged_format as rf
from ragged_format.packing import Plan, deal_rows, pack_row, plan_rows
from ragged_format.packing import plan as planning
from ragged_format.packing.attention import attention_mask
from ragged_format.packing.bins import Row, Window, spread
from ragged_format.testing import rollouts, variants

OPTIONS = st.fixed_dictionaries({
    "packing": st.sampled_from(["tree", "sequence"]),
    "fork": st.sampled_from(["token", "transition"]),
    "within_group": st.booleans(),
    "window": st.sampled_from([1, 2, 3, 100]),
    "tail": st.sampled_from(["keep", "drop"]),
    "max_repeat": st.sampled_from([0.0, 0.5, 1.0, 100.0]),
})  # fmt: skip


@given(
    samples=sharing_samples(max_samples=14), budget=st.integers(1, 20), ranks=st.integers(1, 4),
    options=OPTIONS,
)  # fmt: skip
def test_a_plan_accounts_for_every_sample_and_row(samples, budget, ranks, options):
    batch = batch_of(samples)
    plan = plan_rows(batch, budget, ranks, **options)
    scored = [sum(s["mask"]) for s in samples]
    lengths = [len(s["tokens"]) for s in samples]
    fitting = [i for i, s in enumerate(scored) if s and lengths[i] <= budget]
    assert plan.without_target.tolist() == [i for i, s in enumerate(scored) if not s]
    assert plan.oversize.tolist() == [i for i, s in enumerate(scored) if s and lengths[i] > budget]
    planned = [i for row in plan.rows for i in row.tolist()]
    assert sorted([*planned, *plan.dropped.tolist()]) == fitting
    pack = {name: options[name] for name in ("packing", "fork", "within_group")}
    for number, row in enumerate(plan.rows):
        assert row.tolist() == sorted(row.tolist())
        packed = pack_row(rf.take(batch, row), **pack)
        assert plan.unique_tokens[number] == len(structure(packed)["input_ids"]) <= budget
        assert plan.load[number] == attention_mask(packed).sum()
        assert plan.tokens[number] == sum(lengths[i] for i in row)
        assert plan.targets[number] == sum(scored[i] for i in row) > 0
    _check_ranks(plan, options["tail"], len(fitting))


def _check_ranks(plan, tail, available):
    per_rank = [len(plan.for_rank(rank)) for rank in range(plan.ranks)]
    assert sum(per_rank) == len(plan.rows)
    if tail == "keep":
        assert not len(plan.dropped)
        # A step is short only where no row has a sample to give.
        assert plan.missing_rows == 0 or len(plan.rows) == available
    else:
        assert plan.missing_rows == 0
    if plan.missing_rows == 0:
        assert len(set(per_rank)) == 1


@given(samples=sharing_samples(max_samples=14), budget=st.integers(1, 20), options=OPTIONS)
def test_plans_are_the_same_for_the_same_samples(samples, budget, options):
    batch = batch_of(samples)
    expected = plan_rows(batch, budget, 2, **options)
    forms = variants(batch, same_schema=True) | {
        "table": pa.Table.from_batches([batch]),
        "chunks": pa.Table.from_batches(
            [batch.slice(i, 1) for i in range(len(batch))], schema=batch.schema
        ),
    }
    for name, form in forms.items():
        plan = plan_rows(form, budget, 2, **options)
        assert [row.tolist() for row in plan.rows] == [r.tolist() for r in expected.rows], name
        assert plan.metrics() == expected.metrics()


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("window", [100, 4096])
def test_ranks_change_the_number_of_rows_to_a_multiple_only(ranks, window):
    batch = batch_of(random_samples(np.random.default_rng(1), 600, prompts=60))
    alone = plan_rows(batch, 200, window=window)
    dealt = plan_rows(batch, 200, ranks, window=window)
    assert len(dealt.rows) == -(-len(alone.rows) // ranks) * ranks
    dropping = plan_rows(batch, 200, ranks, window=window, tail="drop")
    assert len(dropping.rows) == len(alone.rows) // ranks * ranks
    # Whole clusters change rows, so that no prefix is stored more often.
    assert dealt.unique_tokens.sum() <= 1.02 * alone.unique_tokens.sum()


@pytest.mark.parametrize("packing", ["tree", "sequence"])
def test_rows_of_a_step_exchange_samples_until_their_loads_are_even(packing):
    rng = np.random.default_rng(2)
    lengths = np.clip(rng.lognormal(np.log(40), 0.7, 3000), 4, 400).astype(int).tolist()
    samples = [
        {"tokens": rng.integers(0, 16, n).tolist(), "mask": [0] + [1] * (n - 1)} for n in lengths
    ]
    batch = batch_of(samples, schema_of_tokens())
    plan = plan_rows(batch, 1200, 8, packing=packing)
    assert plan.imbalance <= 1.02
    # No fewer rows of these tokens can be dealt in whole steps.
    fewest = -(-int(plan_rows(batch, 10**9, packing=packing).unique_tokens.sum()) // 1200)
    assert len(plan.rows) == -(-fewest // 8) * 8


def test_samples_that_repeat_within_a_step_are_exchanged_as_well():
    short = [{"tokens": [1, 2, 3], "mask": [0, 1, 1]}] * 6
    long = [{"tokens": [i, *[4] * 19], "mask": [0] + [1] * 19} for i in range(6)]
    plan = plan_rows(batch_of(short + long), 63, 3, packing="sequence")
    assert sorted(i for row in plan.rows for i in row.tolist()) == list(range(12))
    assert plan.imbalance == 1.0


def groups(rng, count, prompt, response, size=8, system=30):
    """Return groups of samples with log-normal lengths, after one system prompt."""
    head = rng.integers(0, 16, system).tolist()
    out = []
    for _ in range(count):
        start = head + rng.integers(0, 16, _length(rng, prompt)).tolist()
        for _ in range(size):
            tail = rng.integers(0, 16, _length(rng, response)).tolist()
            mask = [0] * len(start) + [1] * len(tail)
            out.append({"tokens": start + tail, "mask": mask})
    return out


def _length(rng, median):
    return int(np.clip(rng.lognormal(np.log(median), 0.6), 1, 8 * median))


@pytest.mark.parametrize(
    ("prompt", "response", "budget", "imbalance"),
    # Few rows of large indivisible groups balance less well.
    [(20, 200, 3000, 1.03), (200, 40, 4000, 1.08), (60, 120, 2400, 1.03)],
    ids=["reasoning", "agent", "mixed"],
)
def test_realistic_rows_are_full_and_ranks_balanced(prompt, response, budget, imbalance):
    samples = groups(np.random.default_rng(5), 192, prompt, response)
    plan = plan_rows(batch_of(samples, schema_of_tokens()), budget, tail="drop")
    assert plan.fill >= 0.97
    dealt = plan_rows(batch_of(samples, schema_of_tokens()), budget, 4, tail="drop")
    assert dealt.imbalance <= imbalance
    # Sharing is what it would be in one row, but for what few cuts repeat.
    ideal = plan_rows(batch_of(samples, schema_of_tokens()), 10**9)
    assert plan.unique_tokens.sum() <= 1.08 * ideal.unique_tokens.sum()


def schema_of_tokens():
    return rf.sample_schema(vocab_size=16, columns=[])


def test_groups_that_fit_stay_together():
    samples = groups(np.random.default_rng(6), 20, 100, 10, system=0)
    batch = batch_of(samples, schema_of_tokens())
    plan = plan_rows(batch, 2000, max_repeat=0)
    for row in plan.rows:
        assert all(8 * (i // 8) + k in row for i in row.tolist() for k in range(8))


def test_the_last_open_row_is_emitted():
    """huggingface/trl: its batchers never emit the row that is open when samples end."""
    batch = batch_of([{"tokens": [1, 2, 3], "mask": [0, 1, 1]}])
    plan = plan_rows(batch, 1000)
    assert [row.tolist() for row in plan.rows] == [[0]]


def test_a_tail_is_split_evenly_or_dropped_by_name():
    samples = [{"tokens": [i, *[1] * 9], "mask": [0] + [1] * 9} for i in range(10)]
    batch = batch_of(samples)
    kept = plan_rows(batch, 20, 4)
    assert sorted(len(row) for row in kept.rows) == [1, 1, 1, 1, 1, 1, 2, 2]
    assert kept.step_imbalance.tolist() == [4 / 3, 1.0]
    dropped = plan_rows(batch, 20, 4, tail="drop")
    assert [len(row) for row in dropped.rows] == [2] * 4
    assert len(dropped.dropped) == 2


def test_fewer_samples_than_ranks_leave_a_short_step_and_say_so():
    batch = batch_of([{"tokens": [1, i], "mask": [0, 1]} for i in range(3)])
    plan = plan_rows(batch, 100, 8)
    assert sorted(row.tolist() for row in plan.rows) == [[0], [1], [2]]
    assert plan.missing_rows == 5
    assert [len(plan.for_rank(rank)) for rank in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert plan.step_imbalance.tolist() == [8 / 3]


def test_a_tail_that_lacks_samples_takes_them_from_whole_steps():
    # The last window holds one sample; five rows more can only come from earlier steps.
    samples = [{"tokens": [i % 16, i // 16, 1, 2], "mask": [0, 1, 1, 1]} for i in range(13)]
    plan = plan_rows(batch_of(samples), 12, 6, window=1)
    assert plan.missing_rows == 0
    assert sorted(i for row in plan.rows for i in row.tolist()) == list(range(13))


def test_the_emptiest_row_of_a_window_goes_on():
    samples = [{"tokens": [i, 1, 2], "mask": [0, 1, 1]} for i in range(10)]
    plan = plan_rows(batch_of(samples), 9, window=5)
    assert sorted(len(row) for row in plan.rows) == [1, 3, 3, 3]


def test_clusters_nested_as_deep_as_there_are_samples():
    samples = []
    for i in range(1500):
        tokens = [1] * (i // 2) + [2, i % 7, i // 7 % 7]
        samples.append({"tokens": tokens, "mask": [0] + [1] * (len(tokens) - 1)})
    plan = plan_rows(batch_of(samples, schema_of_tokens()), 800, 2)
    assert sorted(i for row in plan.rows for i in row.tolist()) == list(range(1500))
    assert (plan.unique_tokens <= 800).all()


def test_media_and_keys_restrict_sharing_in_plans_too():
    column = rf.Column("images", "record", pa.string(), nullable=True, media=True)
    names = [name for name in SCHEMA.names if name != "sample_id"]
    schema = rf.sample_schema(vocab_size=16, columns=[*names, column])
    samples = [{"tokens": [1, 2, 3, 4], "mask": [0, 0, 0, 1]}] * 3
    batch = batch_of(samples, schema, images=[None, "a.png", None])
    assert plan_rows(batch, 100).unique_tokens.tolist() == [8]


def test_metrics_are_plain_json():
    batch = rollouts(np.random.default_rng(0), num_samples=64, turns=2)
    plan = plan_rows(batch, 2000, 2)
    metrics = plan.metrics()
    assert json.loads(json.dumps(metrics)) == metrics
    assert metrics["samples"] == metrics["planned"] + metrics["oversize"]
    assert metrics["steps"] * 2 == metrics["rows"] + metrics["missing_rows"]
    assert metrics["packing_ratio"] >= 1


def test_an_empty_plan():
    plan = plan_rows(batch_of([]), 10, 4)
    assert isinstance(plan, Plan)
    assert (plan.rows, plan.missing_rows, plan.fill, plan.imbalance) == ([], 0, 0.0, 1.0)
    assert plan.packing_ratio == 0.0
    assert plan.step_imbalance.tolist() == []
    table = pa.Table.from_batches([], schema=SCHEMA)
    assert plan_rows(table, 10).metrics() == plan_rows(batch_of([]), 10).metrics()


@pytest.mark.parametrize("wrong", [{"token_budget": 0}, {"ranks": 0}, {"window": 0},
                                   {"max_repeat": -1.0}, {"max_repeat": float("nan")},
                                   {"tail": "lose"}, {"packing": "x"}, {"fork": "x"}])  # fmt: skip
def test_wrong_options_are_errors(wrong):
    with pytest.raises(rf.PackingError) as caught:
        plan_rows(batch_of([]), **({"token_budget": 10} | wrong))
    assert caught.value.code == "RF-P001"


@given(samples=sharing_samples(max_samples=10), seed=st.integers(0, 99))
def test_the_prefix_that_samples_at_two_places_share(samples, seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    shared = rng.integers(0, 9, size)
    shared[0] = 0
    window = Window(shared + 1, shared)
    left, right = np.sort(rng.integers(0, size, (2, 25)), axis=0)
    expected = [
        0 if a == b else shared[a + 1 : b + 1].min() for a, b in zip(left, right, strict=True)
    ]
    assert window.common(left, right).tolist() == expected
    for a, b in zip(left.tolist(), right.tolist(), strict=True):
        if a < b:
            runs = [(b, b + 1), (a, a + 1)]
            assert window.size(runs) == shared[a] + shared[b] + 2 - shared[a + 1 : b + 1].min()


def test_what_finds_no_room_when_loads_are_spread_gets_a_row_of_its_own():
    window = Window(np.full(5, 4), np.zeros(5, int))
    runs = [(i, i + 1) for i in range(5)]
    rows = spread(window, runs, 2, 8, share=1.0)
    assert sorted(len(row.runs) for row in rows) == [1, 2, 2]
    assert sorted(run for row in rows for run in row.runs) == runs


def test_a_window_of_many_rows():
    samples = [{"tokens": [i % 16, i // 16, 1], "mask": [0, 1, 1]} for i in range(256)]
    plan = plan_rows(batch_of(samples + samples[:44]), 3, 8, packing="sequence")
    assert [len(row) for row in plan.rows] == [1] * 300
    assert plan.imbalance == pytest.approx(304 / 300)
    assert plan.missing_rows == 4


@given(samples=sharing_samples(max_samples=12), seed=st.integers(0, 99))
def test_the_size_of_a_row_stays_exact_when_runs_are_added(samples, seed):
    rng = np.random.default_rng(seed)
    ordered = sorted(s["tokens"] for s in samples)
    shared = [0] + [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairwise(ordered)
    ]
    window = Window(np.array([len(t) for t in ordered]), np.array(shared))
    cuts = np.flatnonzero(rng.random(len(ordered) + 1) < 0.6).tolist()
    runs = list(pairwise(sorted({0, len(ordered), *cuts})))
    row = Row(0)
    for place in rng.permutation(len(runs)).tolist():
        window.insert(row, runs[place])
        assert row.runs == sorted(row.runs)
        held = [tuple(ordered[i]) for run in row.runs for i in range(*run)]
        assert row.size == window.size(row.runs)
        assert row.size == len({tokens[: n + 1] for tokens in held for n in range(len(tokens))})


@pytest.mark.parametrize("kind", ["same", "prefixes of each other"])
def test_many_small_samples_take_steps_in_proportion(kind, monkeypatch):
    """Each look-up of a run's size is counted: once they were as many as pairs of samples."""
    calls = 0

    def counted(self, run):
        nonlocal calls
        calls += 1
        return real(self, run)

    real = Window.unique
    monkeypatch.setattr(Window, "unique", counted)
    count = 1500
    tokens = [[1] * (2 if kind == "same" else number % 90 + 2) for number in range(count)]
    samples = [{"tokens": t, "mask": [0] + [1] * (len(t) - 1)} for t in tokens]
    plan = plan_rows(batch_of(samples), 101)
    assert len(plan.rows) == 1
    assert calls < 40 * count


def test_a_row_of_very_many_samples_does_not_go_on(monkeypatch):
    samples = batch_of([{"tokens": [1, 2], "mask": [0, 1]}] * 60)
    assert len(plan_rows(samples, 9, window=20).rows) == 1
    monkeypatch.setattr(planning, "LEAST_CARRIED", 0)
    plan = plan_rows(samples, 9, window=20)
    assert sorted(len(row) for row in plan.rows) == [20, 40]


@given(
    samples=sharing_samples(max_samples=14), budget=st.integers(1, 20), ranks=st.integers(1, 4),
    options=OPTIONS,
)  # fmt: skip
def test_rows_left_open_are_dealt_later(samples, budget, ranks, options):
    batch = batch_of(samples)
    tail = options["tail"]
    plan = plan_rows(batch, budget, ranks, **options | {"tail": "open"})
    assert len(plan.rows) % ranks == 0
    assert not len(plan.rows) or plan.step_imbalance.max() <= 1.02 + 1e-9
    assert not len(plan.dropped)
    # Of several parts of the data: here the same part twice.
    held = [np.concatenate([np.zeros(0, np.int64), *plan.open_rows])] * 2
    left = pa.Table.from_batches([rf.take(batch, part) for part in held])
    cuts = np.cumsum([0, *(len(row) for row in plan.open_rows * 2)]).tolist()
    rows = [np.arange(*bounds) for bounds in pairwise(cuts)]
    names = ("packing", "fork", "within_group", "max_repeat")
    chosen = {name: options[name] for name in names}
    dealt = deal_rows(left, rows, budget, ranks, tail=tail, **chosen)
    placed = [i for row in dealt.rows for i in row.tolist()]
    assert sorted([*placed, *dealt.dropped.tolist()]) == list(range(len(left)))
    assert (dealt.unique_tokens <= budget).all()
    _check_ranks(dealt, tail, len(left))
