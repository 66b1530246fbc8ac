"""kill -9 of a server under load, by a ledger of its clients: nothing lost, nothing twice."""

from contextlib import ExitStack

import pytest
from support.kill_trials import run_trials
from support.served import Served

import ragged_format as rf

# Small segments: kills hit sealing, merging and retention's bookkeeping as well.
OPTIONS = ("--segment-bytes", "60000", "--segment-age", "0.5s")


# Each trial starts a server, which takes long on a busy machine.
@pytest.mark.parametrize(
    ("trials", "seed"),
    [
        pytest.param(2, 1, marks=pytest.mark.timeout(300)),
        pytest.param(100, 2, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
    ids=["2", "100"],
)
def test_killed_servers_lose_nothing_and_store_nothing_twice(tmp_path, trials, seed):
    server = Served(tmp_path / "live", *OPTIONS)
    with ExitStack() as stack:
        stack.callback(server.end)
        acknowledged, lost, twice = run_trials(server, trials, seed=seed)
        assert server.stop() == 0
    assert (lost, twice) == (0, 0)
    assert acknowledged > 10 * trials
    # What is sealed is a dataset like any other.
    names = [
        name
        for batch in rf.Dataset(tmp_path / "live").batches()
        for name in batch.column("sample_id").to_pylist()
    ]
    assert 0 < len(names) == len(set(names))
