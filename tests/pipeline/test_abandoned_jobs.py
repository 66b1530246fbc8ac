"""Work directories of jobs that nobody takes up again: listed and removed, those in use spared."""

import json
import os
import threading
import time

import pytest
from support.jobs import Failing, bytes_of, write_rollouts
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.runner import run

SHARD = 300_000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("abandoned") / "in"
    write_rollouts(folder, rows=200)
    return folder


def abandoned(source, out):
    """A job that failed after some tasks; its work directory, and the lock of a killed process."""
    with pytest.raises(rf.InvariantError):
        run(Failing(shard_bytes=SHARD, at=2), source, out, workers=1)
    (work,) = out.glob(".ragged-job-*")
    lock = out / f"writer-{work.name[12:28]}.lock"
    lock.touch()
    return work, lock


def age(folder, seconds=3600.0):
    then = time.time() - seconds
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then))


def test_a_work_directory_goes_when_it_is_old(source, tmp_path):
    out = tmp_path / "out"
    work, lock = abandoned(source, out)
    others = [out / ".ragged-job-mine", out / f"shard-{16 * '0'}-00000.arrow"]
    for folder in others:
        folder.mkdir()
    assert rf.sweep(out) == rf.sweep(out, grace_s=60) == []
    age(out)
    assert rf.sweep(out, grace_s=7200) == []
    assert rf.sweep(out, grace_s=60, dry_run=True) == [work.name, lock.name]
    assert work.exists()
    assert rf.sweep(out, grace_s=60) == [work.name, lock.name]
    assert sorted(out.iterdir()) == sorted([*others, out / "manifest.lock"])


def test_a_task_that_finished_lately_keeps_it(source, tmp_path):
    out = tmp_path / "out"
    work, _ = abandoned(source, out)
    age(out)
    os.utime(work / "00-000000.json")
    assert work.name not in rf.sweep(out, grace_s=60)


def test_a_job_that_runs_is_spared_however_old_its_files_are(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    abandoned(source, out)
    reached, go = threading.Event(), threading.Event()
    produce = Merge.produce

    def waiting(self, *arguments):
        reached.set()
        go.wait(30)
        return produce(self, *arguments)

    monkeypatch.setattr(Merge, "produce", waiting)
    job = Failing(shard_bytes=SHARD, at=1000)
    thread = threading.Thread(target=run, args=(job, source, out), kwargs={"workers": 1})
    thread.start()
    assert reached.wait(30)
    (mine,) = [
        path for path in out.glob(".ragged-job-*")
        if json.loads((path / "plan.json").read_bytes())["options"]["at"] == 1000
    ]  # fmt: skip
    age(out)
    swept = rf.sweep(out, grace_s=0)
    go.set()
    thread.join()
    assert mine.name not in swept
    assert len([name for name in swept if name.startswith(".ragged-job-")]) == 1
    assert rf.Dataset(out).num_rows == 200


def test_a_job_whose_work_was_swept_begins_anew(source, tmp_path):
    out = tmp_path / "out"
    abandoned(source, out)
    rf.sweep(out, grace_s=0)
    run(Merge(shard_bytes=SHARD), source, out, workers=1)
    run(Merge(shard_bytes=SHARD), source, tmp_path / "whole", workers=1)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_the_command_lists_and_removes(source, tmp_path):
    out = tmp_path / "out"
    work, lock = abandoned(source, out)
    age(out)

    def found(*words):
        done = CliRunner().invoke(app, ["sweep", str(out), "--json", *words])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["removed"]

    assert found() == []
    assert found("--older-than", "2h") == []
    assert found("--older-than", "30m", "--dry-run") == [work.name, lock.name]
    assert found("--older-than", "30m") == [work.name, lock.name]
    assert found("--older-than", "0") == []
    said = CliRunner().invoke(app, ["sweep", str(out), "--older-than", "30m", "--dry-run"]).stdout
    assert said == "0 entries to remove, older than 0.5 h\n"
    assert CliRunner().invoke(app, ["sweep", str(out), "--older-than", "soon"]).exit_code == 2
    assert CliRunner().invoke(app, ["sweep", str(tmp_path / "no")]).exit_code == 1


@pytest.mark.parametrize("meanwhile", ["a lock is taken", "a lock is replaced", "a task is done"])
def test_a_job_that_is_taken_up_just_now_is_spared(source, tmp_path, monkeypatch, meanwhile):
    import fcntl

    from ragged_format import local_storage

    out = tmp_path / "out"
    work, lock = abandoned(source, out)
    age(out)
    held = []

    def lives(directory, token):
        """Looks, and something happens right after it has looked."""
        if token in work.name:
            if meanwhile == "a lock is taken":
                held.append(os.open(lock, os.O_RDWR))
                fcntl.flock(held[0], fcntl.LOCK_EX)
            elif meanwhile == "a task is done":
                os.utime(work / "00-000000.json")
        return False

    flock = fcntl.flock

    def replaced(descriptor, operation):
        flock(descriptor, operation)
        if meanwhile == "a lock is replaced" and os.path.samestat(
            os.fstat(descriptor), lock.stat()
        ):
            lock.unlink()
            lock.touch()

    monkeypatch.setattr(local_storage, "lives", lives)
    monkeypatch.setattr(local_storage.fcntl, "flock", replaced)
    assert work.name not in rf.sweep(out, grace_s=60)
    assert work.exists()
    for descriptor in held:
        os.close(descriptor)
