"""Whole batches for a plain DataLoader: workers, epochs, states, processes that die."""

import json
import re
import subprocess
import sys
import threading
import warnings

import pytest
from torch.utils.data import DataLoader

from ragged_format import LimitExceededError, StateMismatchError, UnsupportedFeatureError
from ragged_format.torch import RaggedIterable, RaggedLoader

OPTIONS = {"shuffle": True, "seed": 4}


def loader_of(dataset, workers=0, **options):
    if workers:
        options = {"multiprocessing_context": "spawn", **options}
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def ids_of(batches):
    return [batch.strings("sample_id") for batch in batches]


def saved(state):
    return json.loads(json.dumps(state))


def test_batches_epochs_and_states_are_those_of_the_loader(dataset_path):
    reference = RaggedLoader(dataset_path, 5, **OPTIONS)
    plain = loader_of(RaggedIterable(dataset_path, 5, **OPTIONS))
    for _ in range(2):
        for ours, other in zip(plain, reference, strict=True):
            assert ours.strings("sample_id") == other.strings("sample_id")
            assert ours.state == other.state
            assert ours["candidate_ids"].equal(other["candidate_ids"])
    assert len(plain) == len(reference) == 8


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_workers_in_turn_deliver_the_order(samples, workers):
    whole = RaggedIterable(samples, 4, **OPTIONS)
    expected = [(b.strings("sample_id"), b.state) for b in whole]
    iterators = [whole._open().share(whole_point(), worker, workers) for worker in range(workers)]
    got = []
    while iterators:
        for iterator in list(iterators):
            batch = next(iterator, None)
            if batch is None:
                iterators.remove(iterator)
            else:
                got.append((batch.strings("sample_id"), batch.state))
    assert got == expected


def whole_point():
    from ragged_format.torch.state import Point

    return Point(0)


def test_workers_that_persist_see_every_epoch_and_state(dataset_path):
    """huggingface/datasets#6673, webdataset/webdataset#172: workers kept the first epoch."""
    reference = RaggedLoader(dataset_path, 5, **OPTIONS)
    epochs = [ids_of(reference) for _ in range(6)]
    dataset = RaggedIterable(dataset_path, 5, **OPTIONS)
    loader = loader_of(dataset, 2, persistent_workers=True)
    states = []
    for epoch in range(2):
        batches = list(loader)
        assert ids_of(batches) == epochs[epoch]
        states.append([saved(batch.state) for batch in batches])
        assert all(batch.arena.is_shared() for batch in batches)
        assert len({batch.arena.untyped_storage().data_ptr() for batch in batches}) == 8
    dataset.set_epoch(4)
    assert ids_of(loader) == epochs[4]
    assert ids_of(loader) == epochs[5]
    dataset.load_state_dict(states[1][2])
    assert dataset.state_dict() == states[1][2]
    assert ids_of(loader) == epochs[1][3:]
    assert ids_of(loader) == epochs[2]
    dataset.load_state_dict(states[0][-1])
    iterator = iter(loader)
    assert next(iterator).strings("sample_id") == epochs[1][0]
    dataset.load_state_dict(states[0][1])
    with pytest.raises(StateMismatchError, match="while the iteration was under way"):
        list(iterator)


def test_a_worker_of_a_forkserver_and_then_none(samples):
    dataset = RaggedIterable(samples, 5, **OPTIONS)
    reference = RaggedLoader(samples, 5, **OPTIONS)
    epochs = [ids_of(reference) for _ in range(2)]
    assert ids_of(loader_of(dataset, 1, multiprocessing_context="forkserver")) == epochs[0]
    assert ids_of(loader_of(dataset)) == epochs[1], "the worker's epoch counts here too"


def test_set_epoch_and_states_without_workers(samples):
    dataset = RaggedIterable(samples, 5, **OPTIONS)
    batches = list(dataset)
    epochs = [ids_of(batches), ids_of(dataset)]
    dataset.load_state_dict(saved(batches[2].state))
    dataset.set_epoch(0)
    assert ids_of(dataset) == epochs[0][3:], "a point inside that epoch is kept"
    assert ids_of(dataset) == epochs[1]
    dataset.set_epoch(0)
    assert ids_of(dataset) == epochs[0]
    dataset.load_state_dict(saved(batches[-1].state))
    assert ids_of(dataset) == epochs[1]
    with pytest.raises(StateMismatchError):
        RaggedIterable(samples, 5).load_state_dict(batches[0].state)
    with pytest.raises(LimitExceededError):
        dataset.set_epoch(-1)


KILLS_ITS_WORKER = """
import os, signal, sys
from torch.utils.data import DataLoader
from ragged_format.torch import RaggedIterable

if __name__ == "__main__":
    loader = DataLoader(
        RaggedIterable(sys.argv[1], 1), batch_size=None, num_workers=1, prefetch_factor=1,
        multiprocessing_context="spawn",
    )
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    list(iterator)
"""


def test_a_killed_worker_is_an_error_not_a_hang(dataset_path, tmp_path):
    # In a process of its own: torch raises from a signal handler, wherever that may be.
    script = tmp_path / "kills.py"
    script.write_text(KILLS_ITS_WORKER)
    run = subprocess.run(
        [sys.executable, script, dataset_path], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert run.returncode == 1
    # Torch looks after its workers now and then; until it does, the pipe of a dead one is broken.
    assert re.search("RuntimeError: DataLoader worker|ConnectionResetError|EOFError", run.stderr)


def test_an_error_in_a_worker_reaches_the_consumer(dataset_path):
    from ragged_format import MissingShardError

    dataset = RaggedIterable(dataset_path, 5)
    next(dataset_path.glob("*.arrow")).unlink()
    with pytest.raises(MissingShardError):
        list(dataset)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_forked_beside_threads_raise(samples):
    """pola-rs/polars#24162, #17526, #14219, Lightning-AI/litData#823: a forked worker hung."""
    dataset = RaggedIterable(samples, 5)
    release = threading.Event()
    beside = threading.Thread(target=release.wait, name="busy", daemon=True)
    beside.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = loader_of(dataset, 1, multiprocessing_context="fork")
            with pytest.raises(UnsupportedFeatureError, match="'busy'"):
                list(loader)
    finally:
        release.set()
        beside.join()
