"""Run a job in a process of its own and kill it, or one of its workers, at a random moment."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

RUN = """
import json, sys
from importlib import import_module
from ragged_pipeline.runner import run
module, name, options, inputs, out, workers = json.loads(sys.argv[1])
job = getattr(import_module(module), name)(**options)
print("ready", flush=True)
run(job, inputs, out, workers=workers)
print("done", flush=True)
"""


def started(order):
    """Return a process that has everything imported and begins to run the job."""
    import json

    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(order)],
        bufsize=0,  # what comes after the first line stays for `communicate`
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    first = process.stdout.readline()
    assert first == b"ready\n", process.stderr.read().decode()
    return process


def duration(order):
    """Seconds that the undisturbed run takes."""
    process = started(order)
    begin = time.monotonic()
    out, err = process.communicate()
    assert out == b"done\n", err.decode()
    return time.monotonic() - begin


def killed_until_done(order, seconds, rng: random.Random, *, kills, whom="parent"):
    """Run a job, killed so many times at random moments, to its end."""
    for _ in range(kills):
        process = started(order)
        time.sleep(rng.uniform(0, seconds))
        target = process.pid
        if whom == "worker" and (found := children_of(process.pid)):
            target = rng.choice(found)
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
        process.communicate(timeout=60)
    process = started(order)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (0, b"done\n"), err.decode()


def children_of(pid):
    """Return the processes that a process started and that live."""
    # Workers are started by threads of the parent, each with a list of its own.
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return found


def orphans(pids, within_s=10.0):
    """Return those of the processes that still run after a while."""
    end = time.monotonic() + within_s
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return alive


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
