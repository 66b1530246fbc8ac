"""Bounds of rows and imbalance hold for the best plan that there is, and prefixes are counted."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefix_trie import batch_of, sharing_samples

from benchmarks.pack_job import unique_tokens
from benchmarks.row_bounds import (
    bins_bound,
    imbalance_bound,
    rows_bound,
    tree_imbalance_bound,
)
from ragged_format.packing import plan_rows


def best_bins(sizes, budget):
    """The fewest bins, by trying all assignments."""
    for count in range(1, len(sizes) + 1):
        for owner in product(range(count), repeat=len(sizes)):
            held = np.bincount(owner, weights=sizes, minlength=count)
            if (held <= budget).all():
                return count
    return 0


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6), budget=st.integers(12, 16))
def test_no_assignment_needs_fewer_bins(sizes, budget):
    assert bins_bound(np.array(sizes), budget) <= best_bins(sizes, budget)


def test_equal_items_are_counted_by_how_many_fit():
    assert bins_bound(np.full(512, 4463), 65_536) == 37
    assert bins_bound(np.full(512, 6400), 65_536) == 52


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6), ranks=st.integers(1, 3))
def test_no_plan_is_more_even_than_the_bound(sizes, ranks):
    budget, lengths = 9, np.array(sizes)
    loads = lengths * (lengths + 1) // 2
    count = -(-len(sizes) // ranks) * ranks
    best = np.inf
    for owner in product(range(min(count, 4)), repeat=len(sizes)):
        if (np.bincount(owner, weights=lengths, minlength=count) > budget).any():
            continue
        held = -np.sort(-np.bincount(owner, weights=loads, minlength=count))
        slowest = held.reshape(-1, ranks).max(axis=1).sum()
        best = min(best, slowest * ranks / loads.sum())
    if np.isfinite(best):
        assert imbalance_bound(lengths, budget, ranks) <= best + 1e-9


def prefixes(samples):
    return {tuple(tokens[: n + 1]) for tokens in samples for n in range(len(tokens))}


@given(
    samples=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=2, max_size=6),
    ranks=st.integers(1, 3), budget=st.integers(7, 9),
)  # fmt: skip
def test_no_tree_plan_is_more_even_than_the_bound(samples, ranks, budget):
    lengths = np.array([len(tokens) for tokens in samples])
    count = -(-len(samples) // ranks) * ranks
    best = np.inf
    for owner in product(range(min(count, 4)), repeat=len(samples)):
        rows = [
            prefixes([s for s, o in zip(samples, owner, strict=True) if o == row])
            for row in range(count)
        ]
        if max(map(len, rows)) > budget:
            continue
        held = -np.sort([-sum(map(len, row)) for row in rows])
        slowest = held.reshape(-1, ranks).max(axis=1).sum()
        best = min(best, slowest * ranks / held.sum())
    whole = prefixes(samples)
    bound = tree_imbalance_bound(lengths, len(whole), sum(map(len, whole)), budget, ranks)
    assert 1 <= bound <= best + 1e-9


@given(samples=sharing_samples(max_samples=10))
def test_prefixes_are_counted_without_a_forest(samples):
    batch = batch_of(samples)
    distinct = {tuple(s["tokens"][: n + 1]) for s in samples for n in range(len(s["tokens"]))}
    assert unique_tokens(batch) == len(distinct)


@pytest.mark.parametrize("packing", ["tree", "sequence"])
def test_plans_keep_the_bound_of_rows(packing):
    rng = np.random.default_rng(0)
    samples = [
        {"tokens": [n, *rng.integers(0, 15, 9).tolist()], "mask": [0] + [1] * 9} for n in range(15)
    ]
    batch = batch_of(samples)
    lengths = np.full(15, 10)
    for budget in (10, 25, 40):
        plan = plan_rows(batch, budget, packing=packing)
        assert rows_bound(batch, lengths, budget, packing) <= len(plan.rows)
