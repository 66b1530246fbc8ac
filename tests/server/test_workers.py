"""``ragged serve --workers N``: one log, several processes; any of them may be killed."""

import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from support.containers import small_batch, stream_bytes
from support.kill_trials import ARROW, run_trials
from support.served import Served

from ragged_server.client import Client
from ragged_server.process.workers import share_of_worker
from ragged_server.settings import load_settings

OPTIONS = ("--workers", "2", "--segment-bytes", "60000", "--segment-age", "0.5s")
# Each start is that of three processes, which takes long on a busy machine.
slow = pytest.mark.timeout(300)


def workers_of(server):
    """Return the process ids of the workers, by number, the latest ones."""
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line[0] == "{"]
    return {line["worker"]: line["pid"] for line in lines if line["event"] == "worker_started"}


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@slow
def test_workers_serve_one_log_and_end_with_the_process_that_has_it(tmp_path):
    with Served(tmp_path / "live", *OPTIONS) as server:
        wait_for(lambda: len(workers_of(server)) == 2)
        # A connection each: the kernel deals them among the workers.
        for number in range(24):
            body = stream_bytes([small_batch([3, 4], prefix=f"b{number % 12}-")])
            answer = httpx2.post(f"{server.url}/v1/samples", content=body, headers=ARROW)
            assert answer.status_code == (201 if number < 12 else 200), answer.text
        with Client(server.url) as client:
            assert sum(page.records for page in client.tail(follow=False)) == 24
        # Whichever worker answers, the figures are those of all.
        text = httpx2.get(f"{server.url}/metrics").text
        start = 'ragged_http_requests_total{method="POST"'
        counts = [line.split()[1] for line in text.splitlines() if line.startswith(start)]
        assert sum(map(float, counts)) == 24
        assert "ragged_stored_records_total 24.0" in text
        assert "ragged_ready 1.0" in text
        pids = workers_of(server).values()
        server.kill()
        wait_for(lambda: not any(map(is_running, pids)))
        # The address is free for the successor.
        pids = workers_of(server.start()).values()
        assert server.stop() == 0
        assert not any(map(is_running, pids))


def kill_any(server, chance):
    """Kill a worker, or now and then the process with the store."""
    if chance.random() < 0.3:
        return True
    os.kill(chance.choice(sorted(workers_of(server).values())), signal.SIGKILL)
    return False


@pytest.mark.parametrize(
    ("trials", "seed"),
    [
        pytest.param(2, 3, marks=slow),
        pytest.param(100, 2, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
    ids=["2", "100"],
)
def test_killed_workers_lose_nothing_and_store_nothing_twice(tmp_path, trials, seed):
    server = Served(tmp_path / "live", *OPTIONS)
    with ExitStack() as stack:
        stack.callback(server.end)
        acknowledged, lost, twice = run_trials(server, trials, seed=seed, kill=kill_any)
        assert server.stop() == 0
    assert (lost, twice) == (0, 0)
    assert acknowledged > 5 * trials


@slow
def test_workers_that_cannot_start_end_the_server(tmp_path):
    server = Served(tmp_path / "live", *OPTIONS, "--tls-cert", "none", "--tls-key", "none")
    with ExitStack() as stack:
        stack.callback(server.end)
        with pytest.raises(KeyError, match="url"):
            server.start()
        assert server.process.wait(60) == 1
        server.process.stdout.close()
    assert "RF-H016" in server.log.read_text()


def test_limits_of_the_server_are_shared_out():
    settings = load_settings(Path("live"), workers=3, max_connections=100, decode_threads=2)
    share = share_of_worker(settings)
    assert (share["max_connections"], share["decode_threads"]) == (34, 1)
    assert share["max_in_flight_bytes"] == settings.max_decoded_bytes
    assert share["max_request_bytes"] == settings.max_request_bytes
