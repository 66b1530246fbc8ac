"""Random runs that stop and continue with other ranks, workers and batch sizes."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ragged_format.testing import rollouts
from ragged_format.torch import Mixture, RaggedIterable, RaggedLoader, common_state
from ragged_format.torch.state import parse

LONGEST = 40


@pytest.fixture(scope="module")
def sources():
    batch = rollouts(
        np.random.default_rng(8), num_samples=61, prompt_length=5, response_length=6,
        vocab_size=300, max_candidates=5, top_k=2,
    )  # fmt: skip
    lengths = [len(ids.as_py()) for ids in batch.column("input_ids")]
    short = [row for row, length in enumerate(lengths) if length <= LONGEST]
    batch = batch.take(short)
    mixture = Mixture([batch.slice(0, 10), batch.slice(10)], weights=[1, 2], num_rows=50)
    return [batch, [batch.slice(0, 20), batch.slice(20, 0), batch.slice(20)], mixture]


def batches_of(source, workers, state, options):
    """Return an iterator over the batches of one rank, by threads, in line, or by workers."""
    if workers < 0:
        loader = RaggedLoader(source, prefetch=-1 - workers, **options)
        if state is not None:
            loader.load_state_dict(state)
        return loader
    dataset = RaggedIterable(source, **options)
    if state is not None:
        dataset.load_state_dict(state)
    if workers < 2:
        return DataLoader(dataset, batch_size=None)
    return in_turn(dataset, state, workers)


def in_turn(dataset, state, workers):
    """What a DataLoader does with the batches of its workers, in this process."""
    producer = dataset._open()
    point = parse(state or dataset.state_dict(), producer.identity)
    iterators = [producer.share(point, worker, workers) for worker in range(workers)]
    while iterators:
        for iterator in list(iterators):
            batch = next(iterator, None)
            if batch is None:
                iterators.remove(iterator)
            else:
                yield batch


def read(source, deal, state, most):
    """Read up to `most` steps on every rank; return the ids by step and rank, and the state."""
    ranks, states = [], []
    for rank in range(deal["world_size"]):
        options = {key: value for key, value in deal.items() if key != "workers"}
        batches = iter(batches_of(source, deal["workers"], state, {**options, "rank": rank}))
        got = []
        while len(got) < most and (batch := next(batches, None)) is not None:
            got.append(batch)
        del batches
        ranks.append([
            [] if batch.is_filler
            else batch.strings("sample_id")[: batch.num_rows - batch.num_repeated]
            for batch in got
        ])  # fmt: skip
        states.append(json.loads(json.dumps(got[-1].state)) if got else state)
    steps = [
        [ranks[rank][step] for rank in range(len(ranks)) if step < len(ranks[rank])]
        for step in range(max(map(len, ranks)))
    ]
    even = len({len(batches) for batches in ranks}) == 1
    return steps, common_state(states) if even and states[0] else None


def deal_of(rng, by_budget):
    return {
        "world_size": rng.randint(1, 4),
        "workers": rng.choice([-1, -3, 1, 2, 3]),
        "batch_size": None if by_budget else rng.randint(1, 7),
        "token_budget": rng.randint(LONGEST, 4 * LONGEST) if by_budget else None,
    }


def trial(rng, sources):
    source = rng.choice(sources)
    by_budget = rng.random() < 0.4
    order = {
        "shuffle": rng.choice([False, True, "block"]), "block_size": rng.randint(1, 9),
        "window": rng.randint(1, 4), "seed": rng.randint(0, 99),
        "tail": rng.choice(["pad", "empty"]),
    }  # fmt: skip
    whole, _ = read(source, {**order, "world_size": 1, "workers": -1, "batch_size": 1}, None, 999)
    expected = flat(whole)
    deal = {**order, **deal_of(rng, by_budget)}
    steady, _ = read(source, deal, None, 999)
    state, seen, is_same = None, [], True
    for _ in range(rng.randint(1, 4)):
        steps, state = read(source, deal, state, rng.randint(1, 8))
        seen += steps
        if state["epoch"] == 1:
            break
        if rng.random() < 0.5:
            deal = {**order, **deal_of(rng, by_budget)}
            is_same = False
        else:
            deal = {**deal, "workers": rng.choice([-1, -2, 1, 2, 5])}
    if state["epoch"] == 0:
        steps, state = read(source, deal, state, 999)
        seen += steps
    assert (state["epoch"], state["position"]) == (1, 0)
    assert flat(seen) == expected
    assert Counter(flat(seen)) == Counter(expected)
    if is_same:
        assert seen == steady
    following, _ = read(source, deal, state, 999)
    if not isinstance(source, Mixture):
        assert Counter(flat(following)) == Counter(expected)
    elif order["shuffle"]:
        assert flat(following) != expected


def flat(steps):
    return [name for step in steps for batch in step for name in batch]


@pytest.mark.parametrize("seed", range(40))
def test_resuming_with_other_ranks_workers_and_batches(sources, seed):
    """meta-pytorch/data#1251, mosaicml/streaming#880: samples lost or repeated after a resume."""
    trial(random.Random(seed), sources)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_resumes(sources):
    for seed in range(1000):
        trial(random.Random(f"soak {seed}"), sources)
