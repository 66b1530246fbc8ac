"""How an epoch is dealt: budgets, replicas, empty rows, targets of a step, blocks."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format import LimitExceededError, SchemaMismatchError, StateMismatchError
from ragged_format.packing import pack_row
from ragged_format.torch import RaggedBatch, RaggedLoader, common_state
from ragged_format.torch.empty import empty_row
from ragged_format.torch.order import BlockOrder, EpochOrder
from ragged_format.torch.steps import BudgetDealer


def ids_of(loader):
    return [batch.strings("sample_id") for batch in loader]


def joined(lists):
    return [item for part in lists for item in part]


@given(
    sizes=st.lists(st.integers(0, 9), max_size=60), budget=st.integers(9, 30),
    world_size=st.integers(1, 5), position=st.integers(0, 60),
    tail=st.sampled_from(["keep", "drop", "pad", "empty"]), most=st.none() | st.integers(1, 4),
)  # fmt: skip
def test_batches_by_budget_are_the_order_in_greedy_pieces(
    sizes, budget, world_size, position, tail, most
):
    size = len(sizes)
    position = min(position, size)
    lengths = np.array(sizes, np.int64)

    def read(start, stop):
        return lengths[np.arange(start, stop) % max(size, 1)]

    dealers = [BudgetDealer(size, budget, r, world_size, tail, most) for r in range(world_size)]
    ranks = [list(dealer.steps(position, read)) for dealer in dealers]
    for dealer, steps in zip(dealers, ranks, strict=True):
        assert dealer.count(position, read) == len(steps)
        assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True] * bool(steps)
    counts = {len(steps) for steps in ranks}
    assert len(counts) <= 1 or (tail == "keep" and max(counts) - min(counts) == 1)
    expected = list(greedy(sizes, position, budget, most))
    got = []
    for number in range(max(counts)):
        of_step = [steps[number] for steps in ranks if number < len(steps)]
        got += [(step.start, step.stop) for step in of_step]
        assert {step.begin for step in of_step} == {of_step[0].start}
        assert {step.until for step in of_step} == {max(step.stop for step in of_step)}
        assert {step.end for step in of_step} == {min(size, max(s.stop for s in of_step))}
    if tail == "drop":
        assert got == expected[: len(expected) // world_size * world_size]
        return
    assert got[: len(expected)] == expected
    for start, stop in got[len(expected) :]:
        assert tail == "pad" or (tail == "empty" and start == stop)
        assert sum(sizes[p % size] for p in range(start, stop)) <= budget
        assert stop - start <= size


def greedy(sizes, position, budget, most):
    batch = []
    for at in range(position, len(sizes)):
        if batch and (sum(sizes[p] for p in batch) + sizes[at] > budget or len(batch) == most):
            yield batch[0], at
            batch = []
        batch.append(at)
    if batch:
        yield batch[0], len(sizes)


@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_a_budget_is_kept_and_nothing_is_lost(samples, dataset_path, shuffle):
    whole = max(len(row.as_py()) for row in samples.column("input_ids"))
    options = {"shuffle": shuffle, "block_size": 4, "window": 2, "token_budget": whole * 3}
    seen, counts = [], []
    for rank in range(2):
        loader = RaggedLoader(dataset_path, rank=rank, world_size=2, tail="empty", **options)
        batches = list(loader)
        assert len(loader) > 0
        counts.append(len(batches))
        for batch in batches:
            assert int(batch.lengths("token").sum()) <= whole * 3
            seen += [] if batch.is_filler else batch.strings("sample_id")
    assert sorted(seen) == sorted(samples.column("sample_id").to_pylist())
    assert counts[0] == counts[1]
    assert len(RaggedLoader(dataset_path, token_budget=10**9)) == 1
    assert len(RaggedLoader(dataset_path, 5, token_budget=10**9)) == 8


def test_a_record_beyond_the_budget_is_an_error(samples):
    with pytest.raises(LimitExceededError, match="larger than the token budget"):
        list(RaggedLoader(samples, token_budget=3))
    with pytest.raises(SchemaMismatchError, match="token axis"):
        RaggedLoader(samples, columns=["group_id"], token_budget=30)


def test_replicas_get_the_same_rows(dataset_path):
    options = {"world_size": 6, "replicas": 3, "shuffle": True}
    ranks = [ids_of(RaggedLoader(dataset_path, 4, rank=rank, **options)) for rank in range(6)]
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[3] == ranks[4] == ranks[5]
    plain = [
        ids_of(RaggedLoader(dataset_path, 4, rank=r, world_size=2, shuffle=True)) for r in range(2)
    ]
    assert [ranks[0], ranks[3]] == plain
    with pytest.raises(LimitExceededError, match="divides"):
        RaggedLoader(dataset_path, world_size=4, replicas=3)


@pytest.mark.parametrize("tail", ["keep", "pad", "empty"])
@pytest.mark.parametrize("budget", [None, 60])
def test_the_targets_of_a_step_are_known_on_every_rank(dataset_path, tail, budget):
    options = {"world_size": 6, "replicas": 2, "shuffle": True, "tail": tail}
    size = 3 if budget is None else None
    ranks = [
        list(RaggedLoader(dataset_path, size, token_budget=budget, rank=rank, **options))
        for rank in range(6)
    ]
    for number in range(max(map(len, ranks))):
        step = [batches[number] for batches in ranks if number < len(batches)]
        distinct = [batches[number] for batches in ranks[::2] if number < len(batches)]
        total = sum(int(batch.lengths("target").sum()) for batch in distinct)
        assert {batch.step_targets for batch in step} == {total}


def test_targets_that_are_not_loaded_are_not_known(samples):
    batch = next(iter(RaggedLoader(samples, 4, ["group_id"], prefetch=0)))
    assert batch.step_targets is None


def test_ranks_without_a_record_get_an_empty_row(samples):
    few = samples.slice(0, 5)
    ranks = [list(RaggedLoader(few, 2, rank=rank, world_size=4, tail="empty")) for rank in range(4)]
    assert [[batch.num_rows for batch in batches] for batches in ranks] == [[2], [1], [1], [1]]
    ranks = [list(RaggedLoader(few, 1, rank=rank, world_size=4, tail="empty")) for rank in range(4)]
    assert [[batch.is_filler for batch in batches] for batches in ranks] == [
        [False, False], [False, True], [False, True], [False, True],
    ]  # fmt: skip
    filler = ranks[3][1]
    assert filler.strings("sample_id") == [""]
    assert filler["input_ids"].tolist() == [0]
    assert filler["completion_mask"].tolist() == [0]
    assert len(filler["candidate_ids"]) == 0
    assert filler.padded("candidate_ids").shape == (0, 0)
    assert filler.state == ranks[0][1].state | {"rank": 3}
    assert filler.clone().is_filler


def test_an_empty_row_is_valid_in_both_profiles(samples):
    for schema in (samples.schema, pack_row(samples.slice(0, 3)).schema, rich_schema()):
        row = empty_row(rf.parse_schema(schema))
        batch = RaggedBatch.from_arrow(row)
        assert int(batch.lengths("token").sum()) == 1
        assert int(batch.lengths("target").sum()) == 0
        row.validate(full=True)


def rich_schema():
    columns = [
        rf.standard_column("temperature"),
        rf.Column("routed_experts", "token", pa.int16(), shape=(2, 3), fill=-1),
        rf.Column("votes", "record", pa.float32(), shape=(2,)),
        rf.Column("words", "token", pa.string()),
    ]
    return rf.sample_schema(vocab_size=9, columns=columns)


@given(
    size=st.integers(0, 300), block_size=st.integers(1, 20), blocks=st.integers(1, 5),
    seed=st.integers(0, 9), data=st.data(),
)  # fmt: skip
def test_blocks_are_a_permutation_with_bounded_windows(size, block_size, blocks, seed, data):
    order = BlockOrder(
        size, block_size=block_size, blocks=blocks, fingerprint="f", seed=seed, epoch=1
    )
    whole = order[0:size].tolist()
    assert len(order) == size
    assert sorted(whole) == list(range(size))
    if size:
        positions = data.draw(st.lists(st.integers(0, size - 1), max_size=9))
        assert order.at(np.array(positions, np.int64)).tolist() == [whole[p] for p in positions]
    # A block is in use from its first to its last record; never more than a window of them.
    number = [record // block_size for record in whole]
    for at in range(size):
        using = set(number[: at + 1]) & set(number[at:])
        assert len(using) <= blocks


def test_the_inverse_of_an_order():
    for size in (1, 2, 7, 1000):
        order = EpochOrder(size, shuffle=True, fingerprint="f", seed=1, epoch=2)
        assert order.find(order[0:size]).tolist() == list(range(size))


def test_blocks_differ_by_epoch_and_the_state_names_them(dataset_path):
    options = {"shuffle": "block", "block_size": 5, "window": 2}
    loader = RaggedLoader(dataset_path, 4, **options)
    epochs = [joined(ids_of(loader)) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    with pytest.raises(StateMismatchError, match=r"shuffle='block\(5, 2\)'"):
        RaggedLoader(dataset_path, 4, shuffle=True).load_state_dict(loader.state_dict())
    for other in ({"block_size": 6}, {"window": 3}):
        with pytest.raises(StateMismatchError, match="block"):
            RaggedLoader(dataset_path, 4, **options | other).load_state_dict(loader.state_dict())
    as_global = RaggedLoader(dataset_path, 4, shuffle="global")
    as_global.load_state_dict(RaggedLoader(dataset_path, 4, shuffle=True).state_dict())


def test_states_of_ranks_that_stopped_at_different_steps(samples):
    loaders = [RaggedLoader(samples, 4, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    states = [next(iterator).state for iterator in iterators]
    assert common_state(states)["position"] == 8
    states[1] = next(iterators[1]).state
    with pytest.raises(StateMismatchError) as caught:
        common_state(states)
    assert "position=8, batches=1 (rank 0)" in str(caught.value)
    assert "position=16, batches=2 (rank 1)" in str(caught.value)
    with pytest.raises(StateMismatchError):
        common_state([])
    for loader in loaders:
        loader.close()


def test_the_steady_state_allocates_nothing(dataset_path):
    prefetch = 2
    loader = RaggedLoader(dataset_path, 4, shuffle=True, prefetch=prefetch)
    for _ in range(6):
        for batch in loader:
            batch["candidate_ids"].sum()
    # How many of the planned slots are ever needed depends on the pace of the two threads.
    assert loader.stats.allocations == loader.stats.slots <= prefetch + 2
    assert loader.stats.grown == 0
    assert loader.stats.leases == 6 * len(loader)
    assert torch.is_tensor(batch.arena)
