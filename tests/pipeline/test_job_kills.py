"""kill -9 at random moments: the next run ends with the bytes of an undisturbed one."""

import os
import random
import signal
import time

import pytest
from support.job_kills import children_of, duration, killed_until_done, orphans, started
from support.jobs import bytes_of, write_rollouts

SHARD = 300_000


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    write_rollouts(folder / "in", rows=600)
    seconds = duration(order(folder, "whole"))
    return folder, seconds, bytes_of(folder / "whole")


def order(folder, out, *, workers=2):
    job = ("ragged_pipeline.jobs.merge", "Merge", {"shard_bytes": SHARD})
    return [*job, str(folder / "in"), str(folder / out), workers]


@pytest.mark.parametrize("whom", ["parent", "worker"])
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_job_resumes_to_the_same_bytes(undisturbed, whom, seed):
    folder, seconds, expected = undisturbed
    out = f"{whom}-{seed}"
    rng = random.Random(seed)
    killed_until_done(order(folder, out), seconds, rng, kills=1, whom=whom)
    assert bytes_of(folder / out) == expected


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("whom", ["parent", "worker"])
def test_200_kills(undisturbed, whom):
    folder, seconds, expected = undisturbed
    rng = random.Random(whom)
    kills = 0
    while kills < 100:
        number = rng.randint(1, 4)
        out = f"soak-{whom}-{kills}"
        killed_until_done(order(folder, out), seconds, rng, kills=number, whom=whom)
        assert bytes_of(folder / out) == expected
        kills += number


def test_workers_of_a_killed_job_end_by_themselves(undisturbed):
    folder, _, _ = undisturbed
    process = started(order(folder, "orphans"))
    children = []
    end = time.monotonic() + 30
    while len(children) < 2 and process.poll() is None and time.monotonic() < end:
        children = children_of(process.pid)
    assert len(children) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert orphans(children) == []
