"""Steps are evened out: every sample once, within the budget, never slower, the same each time."""

from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefix_trie import batch_of

import ragged_format as rf
from ragged_format.adapters.conversion import Conversion
from ragged_format.adapters.registry import choose_reader
from ragged_format.packing import plan_rows
from ragged_format.packing.bins import Window
from ragged_format.packing.deal import PlannedRow, grouped
from ragged_format.packing.steps import even_steps, level_step, slowest


class Forest:
    """Samples by their tokens."""

    def __init__(self, samples):
        self.samples = samples
        self.lengths = np.array([len(tokens) for tokens in samples])

    def shared(self, order):
        out = np.zeros(len(order), np.int64)
        for place in range(1, len(order)):
            pair = zip(self.samples[order[place - 1]], self.samples[order[place]], strict=False)
            same = [a == b for a, b in pair]
            out[place] = same.index(False) if False in same else len(same)
        return out

    def window(self, samples):
        order = np.array(sorted(samples.tolist(), key=lambda i: (self.samples[i], i)))
        return order, Window(self.lengths[order], self.shared(order))

    def row(self, samples):
        order, window = self.window(np.array(sorted(samples)))
        return PlannedRow(order, self.lengths[order], window.shared)


def dealt(rng, ranks, tokens):
    """Return a forest, and steps of its samples."""
    count = int(rng.integers(2, 6)) * ranks
    lengths = np.clip(rng.lognormal(2, 0.9, int(rng.integers(count, 6 * count))), 1, 60)
    forest = Forest([rng.integers(0, tokens, int(n)).tolist() for n in lengths])
    owner = np.append(np.arange(count), rng.integers(0, count, len(lengths) - count))
    rows = [forest.row(np.flatnonzero(owner == row).tolist()) for row in range(count)]
    return forest, grouped(rows, ranks)[0]


@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 5), tokens=st.sampled_from([1, 2, 50]))
def test_exchanges_lose_nothing_and_cost_no_time(seed, ranks, tokens):
    forest, steps = dealt(np.random.default_rng(seed), ranks, tokens)
    rows = [row for step in steps for row in step]
    budget = max(row.unique_tokens for row in rows) + seed % 3
    after = even_steps(steps, forest.window, budget)
    assert [len(step) for step in after] == [ranks] * len(steps)
    made = [row for step in after for row in step]
    held = sorted(np.concatenate([row.samples for row in made]).tolist())
    assert held == list(range(len(forest.samples)))
    for row in made:
        own = forest.row(row.samples.tolist())
        assert (row.unique_tokens, row.load) == (own.unique_tokens, own.load)
        assert row.unique_tokens <= budget
    assert sum(map(slowest, after)) <= sum(map(slowest, steps))
    again = even_steps(steps, forest.window, budget)
    assert [r.samples.tolist() for s in again for r in s] == [r.samples.tolist() for r in made]


@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 5), tokens=st.sampled_from([1, 2, 50]))
def test_a_step_by_itself_does_not_get_slower(seed, ranks, tokens):
    forest, steps = dealt(np.random.default_rng(seed), ranks, tokens)
    budget = max(row.unique_tokens for step in steps for row in step)
    for step in steps:
        after = level_step(step, forest.window, budget)
        held = [np.sort(np.concatenate([row.samples for row in rows])) for rows in (step, after)]
        assert held[0].tolist() == held[1].tolist()
        assert slowest(after) <= slowest(step)
        assert max(row.unique_tokens for row in after) <= budget


def test_clusters_are_parted_where_a_step_is_else_uneven():
    """Recorded rollouts: what rows hold of whole clusters makes no step better than 1.046."""
    shipped = resources.files("ragged_format") / "demo_data" / "rollouts.jsonl.gz"
    with resources.as_file(shipped) as path:
        conversion = Conversion(choose_reader("vllm"), [str(path)], {"vocab_size": 49152})
        samples = rf.concat(list(conversion.batches(lambda _: None)))
    plan = plan_rows(samples, 4096, 8)
    assert plan.imbalance <= 1.02
    whole = plan_rows(samples, 1 << 20)
    assert plan.unique_tokens.sum() <= 1.06 * whole.unique_tokens.sum()


@pytest.mark.parametrize("packing", ["tree", "sequence"])
def test_rows_of_a_few_very_long_samples_are_made_as_heavy_as_they_can_be(packing):
    rng = np.random.default_rng(4)
    lengths = np.clip(rng.lognormal(np.log(125), 0.7, 800), 8, 1024).astype(int)
    schema = rf.sample_schema(vocab_size=1 << 16, columns=[])
    samples = [
        {"tokens": rng.integers(0, 1 << 16, n).tolist(), "mask": [0] + [1] * (n - 1)}
        for n in lengths.tolist()
    ]
    plan = plan_rows(batch_of(samples, schema), 1024, 8, packing=packing)
    fewest = -(-int(lengths.sum()) // 1024)
    assert len(plan.rows) == -(-fewest // 8) * 8
    assert sorted(i for row in plan.rows for i in row.tolist()) == list(range(800))
    # But for the first step, which holds the longest samples, none waits for long.
    loads = -np.sort(-plan.load.reshape(-1, 8), axis=1)
    lost = loads[:, 0] - loads.mean(axis=1)
    order = np.argsort(-loads[:, 0])
    assert lost[order[1:]].sum() <= 0.01 * loads[:, 0].sum()
