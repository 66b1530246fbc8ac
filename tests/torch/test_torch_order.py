"""The order of an epoch, and how steps deal it to ranks."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_format.torch.order import EpochOrder
from ragged_format.torch.steps import Dealer


def order_of(size, *, shuffle=True, fingerprint="f", seed=0, epoch=0):
    return EpochOrder(size, shuffle=shuffle, fingerprint=fingerprint, seed=seed, epoch=epoch)


@given(size=st.integers(0, 3000), seed=st.integers(), epoch=st.integers(0, 9))
def test_an_order_is_a_permutation(size, seed, epoch):
    order = order_of(size, seed=seed, epoch=epoch)
    assert len(order) == size
    assert sorted(order[0:size].tolist()) == list(range(size))


@given(size=st.integers(1, 3000), data=st.data())
def test_any_part_is_computed_on_its_own(size, data):
    order = order_of(size)
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    whole = order[0:size].tolist()
    assert order.at(np.array(positions, np.int64)).tolist() == [whole[p] for p in positions]


def test_a_large_order_needs_no_table():
    size = 10**15
    order = order_of(size)
    part = order[size - 100 : size]
    assert len(np.unique(part)) == 100
    assert part.min() >= 0
    assert part.max() < size


def test_without_shuffle_the_order_is_that_of_the_dataset():
    assert order_of(6, shuffle=False)[2:5].tolist() == [2, 3, 4]


def test_the_order_depends_on_fingerprint_seed_and_epoch():
    orders = [order_of(50), order_of(50, fingerprint="g"), order_of(50, seed=1),
              order_of(50, epoch=1), order_of(50, seed=-1)]  # fmt: skip
    assert len({tuple(order[0:50].tolist()) for order in orders}) == 5


def test_the_order_is_the_same_in_every_release():
    """Part of what a saved state means: a change needs another name of the algorithm."""
    assert order_of(10)[0:10].tolist() == [3, 5, 4, 1, 0, 8, 2, 6, 7, 9]
    large = order_of(10**9, seed=7, epoch=2)[0:3].tolist()
    assert large == [612235756, 415419589, 103356061]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_permutations_are_about_equally_frequent(size):
    seeds = 1500
    seen = Counter(tuple(order_of(size, seed=seed)[0:size].tolist()) for seed in range(seeds))
    every = list(permutations(range(size)))
    assert set(seen) == set(every)
    expected = seeds / len(every)
    chi2 = sum((seen[p] - expected) ** 2 / expected for p in every)
    assert chi2 < len(every) + 6 * (2 * len(every)) ** 0.5


def test_every_record_reaches_every_position_about_equally():
    size, seeds = 100, 1000
    table = np.zeros((size, size))
    for seed in range(seeds):
        table[np.arange(size), order_of(size, seed=seed)[0:size]] += 1
    chi2 = ((table - seeds / size) ** 2 / (seeds / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi2 - freedom) < 6 * (2 * freedom) ** 0.5


dealers = {
    "num_rows": st.integers(0, 60), "batch_size": st.integers(1, 9),
    "world_size": st.integers(1, 5), "tail": st.sampled_from(["keep", "drop", "pad"]),
    "position": st.integers(0, 60),
}  # fmt: skip


@given(**dealers)
def test_ranks_share_the_order_without_overlap(num_rows, batch_size, world_size, tail, position):
    """huggingface/datasets#7868: every record once, on one rank."""
    position = min(position, num_rows)
    ranks = [
        list(Dealer(num_rows, batch_size, rank, world_size, tail).steps(position))
        for rank in range(world_size)
    ]
    for rank, steps in enumerate(ranks):
        assert len(steps) == Dealer(num_rows, batch_size, rank, world_size, tail).count(position)
        assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True] * bool(steps)
        assert all(0 < step.stop - step.start <= batch_size for step in steps)
    if tail != "keep":
        assert len({len(steps) for steps in ranks}) == 1
    else:
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    joined, end = [], position
    for number in range(max(map(len, ranks))):
        for steps in ranks:
            if number < len(steps):
                joined.extend(range(steps[number].start, steps[number].stop))
                end = steps[number].end
        # What the ranks took so far is the order itself, cut where the step ends.
        assert sorted(p for p in joined if p < num_rows) == list(range(position, end))
    assert joined == list(range(position, position + len(joined)))
    missing = num_rows - position - len(joined)
    stride = batch_size * world_size
    allowed = {"keep": range(1), "drop": range(stride), "pad": range(1 - stride, 1)}
    assert missing in allowed[tail]
