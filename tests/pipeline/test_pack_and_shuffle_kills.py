"""kill -9 while a job of several stages runs: the next run ends with the same bytes."""

import random

import pytest
from support.job_kills import duration, killed_until_done
from support.jobs import bytes_of, write_rollouts

JOBS = {
    "pack": ("ragged_pipeline.jobs.pack", "Pack",
             {"token_budget": 3000, "ranks": 4, "shard_bytes": 500_000}),
    "shuffle": ("ragged_pipeline.jobs.shuffle", "Shuffle", {"shard_bytes": 500_000}),
    "compact": ("ragged_pipeline.jobs.recode", "Compact", {"shard_bytes": 500_000}),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage-kills")
    write_rollouts(folder / "in", rows=600)
    return folder


def order(folder, job, out):
    return [*JOBS[job], str(folder / "in"), str(folder / out), 2]


@pytest.mark.parametrize("job", JOBS)
def test_stages_resume_to_the_same_bytes(source, job):
    seconds = duration(order(source, job, f"{job}-whole"))
    expected = bytes_of(source / f"{job}-whole")
    assert len(expected) > 4
    for number, whom in enumerate(("parent", "worker")):
        out = f"{job}-{whom}"
        rng = random.Random(f"{job}{whom}")
        killed_until_done(order(source, job, out), seconds, rng, kills=2 - number, whom=whom)
        assert bytes_of(source / out) == expected


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("job", JOBS)
def test_stages_resume_after_many_kills(source, job):
    seconds = duration(order(source, job, f"{job}-long"))
    expected = bytes_of(source / f"{job}-long")
    rng = random.Random(job)
    for number in range(20):
        out = f"{job}-soak-{number}"
        killed_until_done(order(source, job, out), seconds, rng, kills=rng.randint(1, 4))
        assert bytes_of(source / out) == expected
