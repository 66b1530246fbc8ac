"""Two processes run all jobs in one start, which costs seconds each time."""

import pytest
from support import rank_jobs
from support.ranks import run_ranks

STEPS = 3
STOP_AT = 3
SEEDS = range(3)


@pytest.fixture(scope="session")
def pair():
    """Results of two ranks by job: a pair of what each rank returned."""
    jobs = [
        ("scattered", rank_jobs.scattered, (STEPS, None)),
        ("streamed", rank_jobs.streamed, (STEPS,)),
        ("one by one", rank_jobs.one_by_one, (STEPS,)),
        ("broadcast", rank_jobs.broadcast, ()),
        ("online", rank_jobs.online, (STOP_AT,)),
        ("failing", rank_jobs.failing, ()),
        ("overlap", rank_jobs.overlap, ()),
        ("head over support", rank_jobs.sharded_head, (SEEDS, "support")),
        ("head over vocabulary", rank_jobs.sharded_head, (SEEDS, "vocabulary")),
    ]
    first, second = run_ranks(2, rank_jobs.in_turn, jobs)
    return {name: (first[name], second[name]) for name in first}
