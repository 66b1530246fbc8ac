"""The Ray engine: the bytes of the local engine, whatever the blocks, and whatever dies."""

import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import resources
from pathlib import Path

import pytest
from support.jobs import DiesOnce, Failing, bytes_of, write_rollouts

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.errors import WorkerError
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.ray_engine import ray_engine
from ragged_pipeline.runner import register_engine, run

pytestmark = [
    pytest.mark.ray,
    # Ray's own: log files left to the collector, and settings of its own that it deprecates.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning",
        r"ignore::DeprecationWarning:ray\..*",
        r"ignore::FutureWarning:ray\..*",
    ),
]
SHARD = 300_000


@pytest.fixture(scope="module", autouse=True)
def cluster():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray") / "in"
    return folder, write_rollouts(folder, rows=700)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("ray") / "local"
    result = run(Merge(shard_bytes=SHARD), source[0], out, workers=1)
    assert result.shards >= 8
    return bytes_of(out)


@pytest.mark.parametrize("tasks_per_block", [1, 3])
def test_ray_makes_the_bytes_of_the_local_engine(source, expected, tmp_path, tasks_per_block):
    register_engine("ray-blocks", lambda: ray_engine(tasks_per_block=tasks_per_block))
    result = run(
        Merge(shard_bytes=SHARD), source[0], tmp_path / "out", engine="ray-blocks", workers=2
    )
    assert result.resumed == 0
    assert bytes_of(tmp_path / "out") == expected


JOBS = {
    "filter": lambda source, out, **on: rp.filter_dataset(source, out, "token_length > 60", **on),
    "advantages": lambda source, out, **on: rp.advantages(source, out, null_reward="skip", **on),
    "dedupe": lambda source, out, **on: rp.dedupe(source, out, by="prompt", **on),
    "split": lambda source, out, **on: rp.split(source, out, {"a": 0.7, "b": 0.3}, **on),
    "sort": lambda source, out, **on: rp.merge(
        [source], out, sort_by="reward", shard_bytes=SHARD, **on
    ),
    "shuffle": lambda source, out, **on: rp.shuffle(source, out, shard_bytes=SHARD, **on),
    "pack": lambda source, out, **on: rp.pack_dataset(
        source, out, token_budget=3000, ranks=2, shard_bytes=SHARD, **on
    ),
    "compact": lambda source, out, **on: rp.compact(source, out, shard_bytes=SHARD, **on),
}


def files_of(folder):
    """Digest of every file below a folder, by its path."""
    folders = sorted({path.parent for path in folder.rglob("manifest.json")})
    return {str(inner.relative_to(folder)): bytes_of(inner) for inner in folders}


@pytest.mark.parametrize("job", JOBS)
def test_every_job_makes_the_same_bytes(source, tmp_path, job):
    for engine in ("local", "ray"):
        JOBS[job](source[0], tmp_path / engine, engine=engine, workers=1)
    made = files_of(tmp_path / "ray")
    assert made
    assert made == files_of(tmp_path / "local")


def test_a_conversion_makes_the_same_bytes(tmp_path):
    shipped = resources.files("ragged_format") / "demo_data" / "rollouts.jsonl.gz"
    source = tmp_path / "rollouts.jsonl"
    source.write_bytes(gzip.decompress(shipped.read_bytes()))
    for engine in ("local", "ray"):
        rp.convert(
            source, tmp_path / engine, adapter="vllm", options={"vocab_size": 49152},
            task_bytes=source.stat().st_size // 3, engine=engine, workers=1,
        )  # fmt: skip
    assert rf.Dataset(tmp_path / "ray").num_rows > 0
    assert bytes_of(tmp_path / "ray") == bytes_of(tmp_path / "local")


def test_the_command_line_runs_jobs_on_ray(source, expected, tmp_path):
    # A process of its own, which starts Ray itself although a cluster was started on this machine.
    argv = ["merge", str(source[0]), str(tmp_path / "out"), "--engine", "ray", "--workers", "2",
            "--shard-bytes", str(SHARD)]  # fmt: skip
    code = f"import sys; from ragged_format.cli import main; sys.argv[1:] = {argv!r}; main()"
    with tempfile.TemporaryDirectory(prefix="ray") as place:  # sockets need a short path
        Path(place, "ray").mkdir()
        Path(place, "ray", "ray_current_cluster").write_text("127.0.0.1:6")
        env = os.environ | {"RAY_TMPDIR": place}
        subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert bytes_of(tmp_path / "out") == expected


def test_a_task_whose_worker_died_is_done_by_another(source, tmp_path):
    job = DiesOnce(shard_bytes=SHARD, mark=str(tmp_path / "mark"))
    run(job, source[0], tmp_path / "local", workers=2)
    (tmp_path / "mark").unlink()
    run(job, source[0], tmp_path / "ray", engine="ray", workers=2)
    assert (tmp_path / "mark").exists()
    assert bytes_of(tmp_path / "ray") == bytes_of(tmp_path / "local")


def workers_at(folder):
    """Processes of Ray that have a file of the work directory open or mapped."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
            if (
                title.startswith(b"ray::")
                and str(folder).encode() in (process / "maps").read_bytes()
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_worker_killed_from_outside_changes_nothing(source, expected, tmp_path):
    stop = threading.Event()
    killed = []

    def kill():
        while not stop.is_set() and len(killed) < 2:
            for pid in workers_at(source[0])[:1]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                killed.append(pid)
                time.sleep(0.5)
            time.sleep(0.002)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        run(Merge(shard_bytes=SHARD), source[0], tmp_path / "out", engine="ray", workers=2)
    finally:
        stop.set()
        thread.join()
    assert killed
    assert bytes_of(tmp_path / "out") == expected


def test_an_error_of_a_task_arrives_as_it_was_raised(source, tmp_path):
    with pytest.raises(rf.InvariantError, match="broken") as caught:
        run(Failing(shard_bytes=SHARD), source[0], tmp_path / "out", engine="ray", workers=2)
    assert caught.value.where == rf.Where(file="f", row=3)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_task_that_kills_every_worker_is_given_up(source, tmp_path):
    with pytest.raises(WorkerError, match="3 deaths at task 1"):
        run(
            Failing(shard_bytes=SHARD, how="die"), source[0], tmp_path / "out", engine="ray",
            workers=2,
        )  # fmt: skip


def test_what_one_engine_finished_the_other_one_keeps(source, tmp_path):
    out = tmp_path / "out"
    job = Failing(shard_bytes=SHARD, at=5, how="os")
    with pytest.raises(OSError, match="No space"):
        run(job, source[0], out, engine="ray", workers=1)
    (work,) = out.glob(".ragged-job-*")
    done = {path.name for path in work.glob("*.json")} - {"plan.json", "inputs.json"}
    assert done
    plan = json.loads((work / "plan.json").read_bytes())
    assert plan["job"] == "failing"
    with pytest.raises(OSError, match="No space"):
        run(job, source[0], out, workers=1)
    assert done <= {path.name for path in work.glob("*.json")}
