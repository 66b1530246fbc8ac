"""What other processes do, or do not live to do, never shows as half a job."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.containers import equal, small_batch, small_schema

import ragged_format as rf

APPEND = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.containers import small_batch, small_schema
import ragged_format as rf
path, name, commits = sys.argv[2], sys.argv[3], int(sys.argv[4])
for number in range(commits):
    with rf.Writer(path, small_schema(), mode="append", batch_rows=2, max_shard_bytes=1) as writer:
        for part in range(3):
            writer.write(small_batch((2, 1), seed=number, prefix=f"{name}-{number}-{part}-"))
    print("done", number, flush=True)
"""
TESTS = str(Path(__file__).parents[1])


def appender(path, name, commits):
    return subprocess.Popen(
        [sys.executable, "-c", APPEND, TESTS, str(path), name, str(commits)],
        stdout=subprocess.PIPE,
    )


def finish(process):
    process.communicate(timeout=60)
    return process.returncode


def test_concurrent_appenders_lose_nothing(tmp_path):
    processes = [appender(tmp_path / "x", name, 8) for name in "abc"]
    assert [finish(process) for process in processes] == [0, 0, 0]
    dataset = rf.Dataset(tmp_path / "x")
    assert dataset.generation == 24
    assert dataset.num_rows == 3 * 8 * 3 * 2
    dataset.verify()
    dataset.validate()
    assert rf.sweep(tmp_path / "x", grace_s=0) == []


def test_a_killed_writer_leaves_whole_commits_only(tmp_path):
    """bespokelabsai/curator#51, Parcels-code/Parcels#2713."""
    path = tmp_path / "x"
    rng = random.Random(3)
    seen = 0
    for attempt in range(5):
        process = appender(path, f"k{attempt}", 10_000)
        for _ in range(rng.randint(1, 3)):
            process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.02))
        process.kill()
        finish(process)
        dataset = rf.Dataset(path)
        dataset.verify()
        dataset.validate()
        assert dataset.num_rows % 6 == 0
        assert dataset.num_rows > seen
        seen = dataset.num_rows
    left = rf.sweep(path, grace_s=0)
    assert not {shard.name for shard in rf.Dataset(path).shards} & set(left)
    listed = {shard.name for shard in rf.Dataset(path).shards}
    assert {entry.name for entry in path.iterdir()} == listed | {"manifest.json", "manifest.lock"}
    rf.Dataset(path).verify()
    with rf.Writer(path, small_schema(), mode="append") as writer:
        writer.write(small_batch())
    assert rf.Dataset(path).num_rows == seen + 3


OVERWRITE = APPEND.replace('mode="append"', 'mode="overwrite"')


def test_readers_live_through_overwrites(tmp_path):
    """apache/arrow#39642: each snapshot stays readable while writers replace the dataset."""
    path = tmp_path / "x"
    with rf.Writer(path, small_schema()) as writer:
        writer.write(small_batch((2, 1)))
    process = subprocess.Popen(
        [sys.executable, "-c", OVERWRITE, TESTS, str(path), "o", "15"], stdout=subprocess.PIPE
    )
    dataset = rf.Dataset(path)
    first = dataset.take([0, 1])
    generations = set()
    while process.poll() is None:
        current = rf.Dataset(path)
        current.verify()
        assert current.num_rows in (2, 6)
        generations.add(current.generation)
        assert equal([dataset.take([0, 1])], [first])
    assert finish(process) == 0
    assert len(generations) > 1
    assert rf.Dataset(path).generation == 16


DIE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from support.containers import small_batch, small_schema
import ragged_format as rf
moment = sys.argv[3]
real = os.replace if moment == "rename" else os.fsync
calls = 0
def die(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(sys.argv[4]):
        os._exit(9)
    return real(*args, **kwargs)
os.fsync = die
writer = rf.Writer(sys.argv[2], small_schema(), mode="append", batch_rows=2, max_shard_bytes=1)
writer.write(small_batch((2, 1, 3), prefix=sys.argv[4]))
writer.close()
"""


@pytest.mark.parametrize("call", range(1, 8))
def test_death_at_any_step_of_a_commit(tmp_path, call):
    """Two shards and the manifest: each has its content, then its name, made durable."""
    path = tmp_path / "x"
    with rf.Writer(path, small_schema()) as writer:
        writer.write(small_batch((2, 1)))
    code = subprocess.run(
        [sys.executable, "-c", DIE, TESTS, str(path), "fsync", str(call)], check=False
    ).returncode
    dataset = rf.Dataset(path)
    dataset.verify()
    assert code == (0 if call == 7 else 9)
    # After the rename of the manifest, its third file, the commit is there.
    assert dataset.num_rows == (5 if call >= 6 else 2)
    rf.sweep(path, grace_s=0)
    rf.Dataset(path).verify()


def test_a_stream_of_a_killed_writer_is_truncated(tmp_path):
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from support.containers import small_batch, small_schema
import ragged_format as rf, os
with open(sys.argv[2], "wb") as sink:
    writer = rf.StreamWriter(sink, small_schema())
    writer.write(small_batch())
    sink.flush()
    os._exit(9)
"""
    path = tmp_path / "log.arrows"
    subprocess.run([sys.executable, "-c", program, TESTS, str(path)], check=False)
    reader = rf.read_stream(path)
    assert equal([next(reader)], [small_batch()])
    with pytest.raises(rf.TruncatedError):
        next(reader)
