"""Saved states: continue anywhere, or say why not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format import StateMismatchError
from ragged_format.torch import RaggedLoader

OPTIONS = {"shuffle": True, "seed": 11, "prefetch": 0}


def ids_of(loader):
    return [batch.strings("sample_id") for batch in loader]


def saved(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_at_every_position(dataset_path, tail, world_size):
    for rank in range(world_size):
        options = {**OPTIONS, "rank": rank, "world_size": world_size, "tail": tail}
        whole = RaggedLoader(dataset_path, 5, **options)
        states, epochs = [saved(whole.state_dict())], []
        for _ in range(2):
            epochs.append([])
            for batch in whole:
                epochs[-1].append(batch.strings("sample_id"))
                assert batch.state == whole.state_dict()
                states.append(saved(whole.state_dict()))
        expected = epochs[0] + epochs[1]
        for delivered, state in enumerate(states[: len(epochs[0]) + 1]):
            loader = RaggedLoader(dataset_path, 5, **options)
            loader.load_state_dict(state)
            rest = ids_of(loader)
            if delivered < len(epochs[0]):
                rest += ids_of(loader)
            assert rest == expected[delivered:]
        assert states[len(epochs[0])]["epoch"] == 1
        assert states[len(epochs[0])]["position"] == 0


def test_the_state_counts_delivered_batches_not_those_made_ahead(dataset_path):
    """meta-pytorch/data#1251: what was prefetched got lost."""
    loader = RaggedLoader(dataset_path, 4, shuffle=True, prefetch=5)
    iterator = iter(loader)
    for delivered in range(1, 4):
        batch = next(iterator)
        state = loader.state_dict()
        assert (state["batches"], state["position"]) == (delivered, 4 * delivered)
        assert batch.state == state
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loading_after_iteration_began_jumps_there(dataset_path, prefetch):
    """PrimeIntellect-ai/prime-rl#3332: a state loaded after iter() was ignored."""
    options = {**OPTIONS, "prefetch": prefetch}
    reference = RaggedLoader(dataset_path, 4, **options)
    epoch = []
    for batch in reference:
        epoch.append(batch.strings("sample_id"))
        if len(epoch) == 3:
            state = saved(batch.state)
    iterator = iter(loader := RaggedLoader(dataset_path, 4, **options))
    loader.load_state_dict(state)
    assert [batch.strings("sample_id") for batch in iterator] == epoch[3:]

    loader = RaggedLoader(dataset_path, 4, **options)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert next(iterator).strings("sample_id") == epoch[3]
    assert loader.state_dict()["batches"] == 4
    loader.load_state_dict(state)
    assert ids_of(loader) == epoch[3:], "a new iteration begins there as well"
    loader.close()


def test_loading_its_own_state_changes_nothing(dataset_path):
    """Lightning-AI/litData#316: failed, or began anew."""
    reference = RaggedLoader(dataset_path, 4, **OPTIONS)
    expected = ids_of(reference) + ids_of(reference)
    loader = RaggedLoader(dataset_path, 4, **OPTIONS)
    got = []
    for _ in range(2):
        for batch in loader:
            got.append(batch.strings("sample_id"))
            loader.load_state_dict(saved(loader.state_dict()))
            if batch.state["position"] == 0:
                break  # the epoch ended, and loading its end begins the next
    assert got == expected


def test_set_epoch_after_loading_keeps_a_point_in_that_epoch(dataset_path):
    loader = RaggedLoader(dataset_path, 4, **OPTIONS)
    epoch = ids_of(loader)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 8, "batches": 2})
    loader.set_epoch(0)
    assert ids_of(loader) == epoch[2:]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 8, "batches": 2})
    loader.set_epoch(3)
    assert loader.state_dict()["epoch"] == 3
    assert len(ids_of(loader)) == len(epoch)
    assert loader.state_dict()["epoch"] == 4


def test_set_epoch_while_an_iteration_runs_is_for_the_next(dataset_path):
    loader = RaggedLoader(dataset_path, 4, **OPTIONS)
    epochs = [ids_of(loader) for _ in range(6)]
    loader = RaggedLoader(dataset_path, 4, **OPTIONS)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(5)
    assert loader.state_dict()["batches"] == 1
    assert [batch.strings("sample_id") for batch in iterator] == epochs[0][1:]
    assert ids_of(loader) == epochs[5]
    state = {**loader.state_dict(), "epoch": 2, "position": 8, "batches": 2}
    iterator = iter(loader)
    loader.load_state_dict(state)
    loader.set_epoch(4)
    assert [batch.strings("sample_id") for batch in iterator] == epochs[2][2:]
    assert ids_of(loader) == epochs[4]
    assert ids_of(loader) == epochs[5]
    iterator = iter(loader)
    loader.load_state_dict(state)
    assert [batch.strings("sample_id") for batch in iterator] == epochs[2][2:]
    assert ids_of(loader) == epochs[3]


def test_the_state_before_during_and_after(dataset_path):
    loader = RaggedLoader(dataset_path, 20, **OPTIONS)

    def at():
        return tuple(loader.state_dict()[key] for key in ("epoch", "position", "batches"))

    assert at() == (0, 0, 0)
    iterator = iter(loader)
    assert at() == (0, 0, 0)
    next(iterator)
    assert at() == (0, 20, 1)
    next(iterator)
    assert at() == (1, 0, 0)
    assert list(iterator) == []
    assert at() == (1, 0, 0)
    iter(loader)
    assert at() == (1, 0, 0)
    loader.set_epoch(7)
    assert at() == (7, 0, 0)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_other_ranks_and_sizes_deliver_the_rest(samples, data):
    """By count: the steps, concatenated over ranks, equal the rest of the order."""
    tail = data.draw(st.sampled_from(["keep", "pad"]))
    options = {**OPTIONS, "tail": tail}
    order = [names[0] for names in ids_of(RaggedLoader(samples, 1, **options))]
    world, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    first = RaggedLoader(samples, size, world_size=world, **options)
    steps = data.draw(st.integers(0, len(first)))
    state = first.state_dict()
    for _, batch in zip(range(steps), first, strict=False):
        state = saved(batch.state)
    world, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    ranks = []
    for rank in range(world):
        loader = RaggedLoader(samples, size, rank=rank, world_size=world, **options)
        loader.load_state_dict(state)
        ranks.append([
            batch.strings("sample_id")[: batch.num_rows - batch.num_repeated] for batch in loader
        ])  # fmt: skip
    rest = []
    for step in range(max(map(len, ranks))):
        for batches in ranks:
            rest += batches[step] if step < len(batches) else []
    if state["epoch"] == 0:
        assert rest == order[state["position"] :]
    else:
        assert sorted(rest) == sorted(order)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("seed", {"seed": 12}),
        ("shuffle", {"shuffle": False}),
        ("tail", {"tail": "drop"}),
    ],
)
def test_other_options_print_both_sides(samples, change, options):
    state = RaggedLoader(samples, 4, **OPTIONS).state_dict()
    loader = RaggedLoader(samples, 4, **{**OPTIONS, **options})
    with pytest.raises(StateMismatchError) as caught:
        loader.load_state_dict(state)
    assert caught.value.code == "RF-T001"
    assert f"{change}={state[change]!r} (the state)" in str(caught.value)
    assert f"{change}={options[change]!r} (this loader)" in str(caught.value)


def test_another_dataset_prints_both_fingerprints(samples):
    state = RaggedLoader(samples, 4).state_dict()
    other = rf.take(samples, list(range(36, -1, -1)))
    with pytest.raises(StateMismatchError) as caught:
        RaggedLoader(other, 4).load_state_dict(state)
    assert state["fingerprint"] in str(caught.value)
    assert RaggedLoader(other, 4).state_dict()["fingerprint"] in str(caught.value)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda state: None, "not the state"),
        (lambda state: {}, "not the state"),
        (lambda state: {**state, "kind": "other"}, "not the state"),
        (lambda state: {**state, "version": 2}, "another version"),
        (lambda state: {k: v for k, v in state.items() if k != "version"}, "another version"),
        (lambda state: {**state, "position": 38}, "malformed"),
        (lambda state: {**state, "position": -1}, "malformed"),
        (lambda state: {**state, "epoch": "1"}, "malformed"),
        (lambda state: {**state, "epoch": True}, "malformed"),
        (lambda state: {k: v for k, v in state.items() if k != "batches"}, "malformed"),
    ],
)
def test_what_is_not_a_state(samples, broken, what):
    loader = RaggedLoader(samples, 4)
    with pytest.raises(StateMismatchError, match=what):
        loader.load_state_dict(broken(loader.state_dict()))
    assert loader.state_dict()["position"] == 0
    assert len(list(loader)) == 10
