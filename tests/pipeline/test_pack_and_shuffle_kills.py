"""kill -9 while a job of several stages runs: the next run ends with the same bytes."""

import gzip
import random
import shutil
from importlib import resources
from itertools import cycle

import pytest
from support.job_kills import duration, killed_until_done
from support.jobs import bytes_of, write_rollouts

JOBS = {
    "pack": ("ragged_pipeline.jobs.pack", "Pack",
             {"token_budget": 3000, "ranks": 4, "shard_bytes": 500_000}),
    "shuffle": ("ragged_pipeline.jobs.shuffle", "Shuffle", {"shard_bytes": 500_000}),
    "compact": ("ragged_pipeline.jobs.recode", "Compact", {"shard_bytes": 500_000}),
}  # fmt: skip
# Of the other jobs, those that do not take long tests of their own.
SOAKED = JOBS | {
    "filter": ("ragged_pipeline.jobs.filter", "Filter", {"where": "token_length > 60"}),
    "advantages": ("ragged_pipeline.jobs.advantages", "Advantages", {"null_reward": "skip"}),
    "dedupe": ("ragged_pipeline.jobs.dedupe", "Dedupe", {"by": "prompt"}),
    "split": ("ragged_pipeline.jobs.split", "SplitPart",
              {"parts": {"a": 0.7, "b": 0.3}, "part": "a"}),
    "merge": ("ragged_pipeline.jobs.merge", "Merge", {"shard_bytes": 500_000}),
    "sort": ("ragged_pipeline.jobs.sort", "Sort", {"by": ["reward"], "shard_bytes": 500_000}),
    "expand": ("ragged_pipeline.jobs.recode", "Expand", {"shard_bytes": 500_000}),
    "convert": ("ragged_pipeline.jobs.convert", "Convert",
                {"adapter": "vllm", "options": {"vocab_size": 49152}, "task_bytes": 500_000}),
}  # fmt: skip
KILLS = 200


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage-kills")
    write_rollouts(folder / "in", rows=600)
    return folder


def order(folder, job, out):
    source = {"convert": "rollouts.jsonl", "expand": "compact-whole"}.get(job, "in")
    return [*SOAKED[job], str(folder / source), str(folder / out), 2]


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


def test_a_manifest_half_written_by_a_killed_run_does_not_stay(source):
    killed_until_done(order(source, "merge", "left-whole"), 1, random.Random(0), kills=0)
    left = source / "left" / "manifest.json.tmp-0123456789abcdef"
    left.parent.mkdir()
    left.write_bytes(b"{")
    killed_until_done(order(source, "merge", "left"), 1, random.Random(0), kills=0)
    assert bytes_of(source / "left") == bytes_of(source / "left-whole")


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_all_jobs_resume_after_200_kills(source):
    shipped = resources.files("ragged_format") / "demo_data" / "rollouts.jsonl.gz"
    (source / "rollouts.jsonl").write_bytes(gzip.decompress(shipped.read_bytes()))
    seconds, expected = {}, {}
    for job in SOAKED:
        seconds[job] = duration(order(source, job, f"{job}-whole"))
        expected[job] = bytes_of(source / f"{job}-whole")
        assert expected[job]
    rng = random.Random(0)
    kills = 0
    for number, job in enumerate(cycle(SOAKED)):
        if kills >= KILLS:
            break
        out, times = f"{job}-soak-{number}", rng.randint(1, 4)
        whom = rng.choice(["parent", "worker"])
        killed_until_done(order(source, job, out), seconds[job], rng, kills=times, whom=whom)
        assert bytes_of(source / out) == expected[job], (job, number)
        shutil.rmtree(source / out)
        kills += times
