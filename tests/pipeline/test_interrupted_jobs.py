"""Ctrl-C in a job: one line that says what is kept, exit code 130, no worker left, and resume."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.job_kills import children_of, orphans
from support.jobs import bytes_of, write_rollouts

import ragged_pipeline as rp
from ragged_pipeline.jobs.merge import Merge

RAGGED = Path(sys.executable).parent / "ragged"
SMALL = "10kB"  # many tasks


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted") / "in"
    write_rollouts(folder, rows=120)
    return folder


def interrupted(words, ready):
    """Start a command, send Ctrl-C to its whole group when it is ready; what became of it."""
    process = subprocess.Popen(
        [RAGGED, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not ready(process) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    children = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert orphans(children) == []
    return process.returncode, out.decode(), err.decode()


def has_finished(out, tasks=3):
    return lambda _: len(list(out.glob(".ragged-job-*/0*.json"))) >= tasks


@pytest.mark.parametrize("workers", [1, 2])
def test_it_says_what_is_kept_and_the_same_command_goes_on(source, tmp_path, workers):
    out = tmp_path / "out"
    words = ["reshard", source, out, "--shard-bytes", SMALL, "--workers", workers]
    code, stdout, stderr = interrupted(words, has_finished(out))
    assert (code, stdout) == (130, "")
    (line,) = stderr.splitlines()
    assert line.startswith("interrupted: ")
    assert line.endswith("tasks are finished and kept; to go on, run the same again")
    kept = int(line.split()[1])
    assert kept >= 3
    done = subprocess.run([RAGGED, *map(str, words), "--json"], capture_output=True, check=True)
    assert json.loads(done.stdout)["resumed"] == kept
    rp.reshard(source, tmp_path / "whole", shard_bytes=SMALL, workers=1)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_it_is_an_object_with_json(source, tmp_path):
    out = tmp_path / "out"
    words = ["reshard", source, out, "--shard-bytes", SMALL, "--json"]
    code, stdout, stderr = interrupted(words, has_finished(out))
    data = json.loads(stdout)
    assert (code, data["command"], data["ok"]) == (130, "reshard", False)
    assert (data["error"], data["what"]) == ("KeyboardInterrupt", "interrupted")
    assert "run the same again" in data["remedy"]
    assert stderr.startswith("interrupted: ")


def test_workers_that_are_starting_end_without_a_word(source, tmp_path):
    words = ["reshard", source, tmp_path / "out", "--shard-bytes", SMALL, "--workers", "2"]
    code, stdout, stderr = interrupted(words, lambda process: children_of(process.pid))
    assert (code, stdout) == (130, "")
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("interrupted: ")


def test_it_may_come_before_all_threads_are_started(source, tmp_path, monkeypatch):
    start, started = threading.Thread.start, []

    def interrupted_start(thread):
        if "_serve" in thread.name:
            if started:
                raise KeyboardInterrupt
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        rp.reshard(source, tmp_path / "out", shard_bytes=SMALL, workers=2)
    assert not started[0].is_alive()


def test_what_goes_to_standard_output_is_not_kept(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    place = lambda _: list(tmp_path.glob("ragged-*/out/.ragged-job-*/0*.json"))  # noqa: E731
    words = ["reshard", source, "-", "--shard-bytes", SMALL]
    code, _, stderr = interrupted(words, place)
    assert (code, stderr) == (130, "interrupted: what is to go to standard output is not kept\n")
    assert list(tmp_path.iterdir()) == []


def test_the_note_is_part_of_the_exception(source, tmp_path, monkeypatch):
    def refused(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Merge, "produce", refused)
    with pytest.raises(KeyboardInterrupt) as caught:
        rp.reshard(source, tmp_path / "out", workers=1)
    assert caught.value.__notes__ == ["no task was finished, and nothing is kept"]
    assert not (tmp_path / "out").exists()
