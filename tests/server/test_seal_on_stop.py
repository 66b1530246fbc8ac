"""A server that stops seals what is in its log: its directory then is a dataset of all records."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from support.containers import small_batch
from support.http_server import ARROW, running, wait_until
from support.memory_store import MemoryStore
from support.served import Served
from support.store_kit import ids_of, request, samples, stored_ids
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app
from ragged_server.client import Client
from ragged_server.store.records import StoreSettings
from ragged_server.store.store import Store

SMALL = StoreSettings(segment_records=8, grace_s=3600.0, batch_rows=3)


def filled(directory, groups=3):
    """A store with segments that nobody sealed, the last one open, and the ids of its records."""
    store = Store(directory, SMALL)
    store.open()
    store._upkeep.stop()
    for number in range(groups):
        store.append(request(samples(4, prefix=f"g{number}-"))).result()
    return store, stored_ids(store)


def segments(directory):
    return list((directory / "log").glob("segment-*"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_all_records_can_be_packed_after_a_stop(tmp_path, workers):
    live = tmp_path / "live"
    sent = []
    for turn in range(2):
        server = Served(live, "--workers", workers)
        try:
            server.start()
            batch = samples(4, prefix=f"turn{turn}-")
            sent += batch.column("sample_id").to_pylist()
            with Client(server.url) as client:
                assert client.push([batch]).stored == 4
                assert sum(page.records for page in client.tail(follow=False)) == len(sent)
            assert server.stop() == 0
        finally:
            server.end()
        dataset = rf.Dataset(live, verify=True)
        assert ids_of(dataset.batches()) == sent
        assert not segments(live)
    words = ["pack", str(live), str(tmp_path / "rows"), "--token-budget", "64"]
    assert CliRunner().invoke(app, words).exit_code == 0
    members = rf.Dataset(tmp_path / "rows").batches(columns=["member_sample_id"])
    packed = [name for row in members for names in row.column(0).to_pylist() for name in names]
    assert sorted(packed) == sorted(sent)


def test_a_server_may_leave_its_log_as_it_is(tmp_path):
    server = Served(tmp_path / "live", "--seal-on-stop", "false")
    try:
        server.start()
        with Client(server.url) as client:
            client.push([small_batch([3, 4])])
        assert server.stop() == 0
    finally:
        server.end()
    with pytest.raises(rf.DatasetNotFoundError, match="log of a server"):
        rf.Dataset(tmp_path / "live")


def test_no_time_is_left_after_a_request_that_took_it_all(tmp_path):
    live = tmp_path / "live"
    server = Served(live, "--drain-timeout", "0.3s")
    try:
        server.start()
        with Client(server.url) as client:
            client.push([small_batch([3, 4])])
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            head = f"POST /v1/samples HTTP/1.1\r\nhost: localhost\r\ncontent-type: {ARROW}\r\n"
            sock.sendall(head.encode() + b"content-length: 1000\r\n\r\nabc")
            status = f"{server.url}/v1/status"
            wait_until(lambda: httpx2.get(status).json()["server"]["ingesting"] == 1)
            assert server.stop() == 0
    finally:
        server.end()
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line[0] == "{"]
    (said,) = [line for line in lines if line["event"] == "not_sealed_at_stop"]
    assert (said["records"], said["reason"]) == (2, "no time left")
    with Store(live, StoreSettings()) as store:
        assert len(stored_ids(store)) == 2


@pytest.mark.parametrize("batches", range(6))
def test_sealing_that_is_cut_leaves_the_rest_in_the_log(tmp_path, caplog, batches):
    store, expected = filled(tmp_path)
    left = iter(range(batches))
    store.close(seal_while=lambda: next(left, None) is not None)
    # Two segments of two batches and of one, and a look before each commit.
    assert len(list(tmp_path.glob("shard-*"))) == (0 if batches < 3 else 1 if batches < 5 else 2)
    assert not list(tmp_path.glob("writer-*"))
    skipped = [line for line in caplog.records if line.msg == "not_sealed_at_stop"]
    assert [line.reason for line in skipped] == ["no time left"] * (batches < 5)
    store = Store(tmp_path, SMALL)
    store.open()
    assert stored_ids(store) == expected
    store.close(seal_while=lambda: True)
    assert ids_of(rf.Dataset(tmp_path).batches()) == expected


def test_sealing_that_fails_does_not_keep_the_server_from_stopping(tmp_path, caplog, monkeypatch):
    store, expected = filled(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            "ragged_server.store.seal.FileWriter.write",
            lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")),
        )
        store.close(seal_while=lambda: True)
    (line,) = [line for line in caplog.records if line.msg == "not_sealed_at_stop"]
    assert line.levelno == logging.WARNING
    assert "no space left" in line.reason
    with Store(tmp_path, SMALL) as store:  # the directory was let go of
        assert stored_ids(store) == expected


def test_a_log_without_records_makes_no_dataset(tmp_path):
    store = Store(tmp_path, SMALL)
    store.open()
    store.close(seal_while=lambda: True)
    assert not (tmp_path / "manifest.json").exists()


def test_a_second_signal_ends_the_sealing(tmp_path):
    asked = []

    class Sealing(MemoryStore):
        def close(self, *, seal_while=None):
            asked.append(seal_while())
            server.handle_exit(signal.SIGTERM, None)
            asked.append(seal_while())
            super().close()

    with running(tmp_path, Sealing()) as server:
        server.handle_exit(signal.SIGTERM, None)
    assert asked == [True, False]


# Ends a process by SIGKILL before or after one call of a function, in the middle of sealing.
CHILD = """
import importlib, os, signal, sys
from pathlib import Path
from test_seal_on_stop import filled

directory, when, module, *names = sys.argv[1:]
store, _ = filled(Path(directory))
owner = importlib.import_module(module)
for name in names[:-1]:
    owner = getattr(owner, name)
inner = getattr(owner, names[-1])

def killed(*arguments, **options):
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    inner(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, names[-1], killed)
store.close(seal_while=lambda: True)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "step",
    [
        "ragged_server.store.seal:FileWriter.write",
        "ragged_server.store.seal:FileWriter.close",
        "ragged_server.store.seal:write_manifest",
        "ragged_server.store.upkeep:save",
        "ragged_server.store.file_layer:RealFiles.remove",
    ],
)
def test_a_kill_while_a_stopping_server_seals_loses_nothing(tmp_path, step, when):
    here = Path(__file__).parent
    module, _, names = step.partition(":")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), when, module, *names.split(".")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])},
        check=False, timeout=100,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL
    expected = [f"g{number}-{at}" for number in range(3) for at in range(4)]
    store = Store(tmp_path, SMALL)
    store.open()
    names = stored_ids(store)
    assert len(names) == len(expected)
    for number in range(3):
        again = store.append(request(samples(4, prefix=f"g{number}-"))).result()
        assert (again.stored, again.duplicates) == (0, 4)
    store.append(request(samples(4, prefix="more-"))).result()
    names = stored_ids(store)
    store.close(seal_while=lambda: True)
    assert len(set(names)) == len(names) == 16
    assert ids_of(rf.Dataset(tmp_path, verify=True).batches()) == names
    with Store(tmp_path, SMALL) as store:
        assert stored_ids(store) == names
