"""The on-line loader on a running server."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from support.http_server import running
from support.memory_store import MemoryStore

import ragged_format as rf
from ragged_format.testing import fill_batch
from ragged_server.client import Client
from ragged_server.client.source import ServerTail

pytest.importorskip("torch")
from ragged_format.torch import OnlineLoader
from ragged_format.torch.tail import Tail

SCHEMA = rf.sample_schema(
    vocab_size=1000, columns=["group_id", "candidate_counts", "candidate_ids"]
)


def samples(count, prefix):
    return fill_batch(SCHEMA, np.random.default_rng(len(prefix)), [9] * count, prefix=prefix)


@pytest.fixture
def server(tmp_path):
    with running(tmp_path / "served", MemoryStore()) as server:
        yield server


def ids_of(rows):
    return [name for row in rows for name in row.strings("member_sample_id")]


def test_a_tail_is_one_for_the_loader():
    tail = ServerTail("http://host:1/v1/samples", rank=1, world_size=2)
    assert isinstance(tail, Tail)
    assert tail.identity == "http://host:1 1/2"
    assert ServerTail(["http://a", "http://b"]).identity == "http://a,http://b"
    assert ServerTail("http://a", identity="the log").identity == "the log"
    tail.close()


def test_a_tail_needs_no_torch():
    code = "import sys, ragged_server.client.source; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_connections_left_open_are_closed_before_the_interpreter_ends(server):
    """Later, what closes them may be gone, and a program ends with a traceback."""
    code = f"""
import atexit
atexit.register(print, "ends")  # what is registered first runs last
import builtins
import httpx2
import ragged_format as rf
from ragged_server.client.source import ServerTail
close = httpx2.Client.close
httpx2.Client.close = lambda client: (print("closed"), close(client))
builtins.tail = ServerTail({server.url!r})
builtins.source = rf.open_source({server.url!r})
builtins.tail.read(None, wait_s=0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("closed\nclosed\nends\n", "")


@pytest.mark.parametrize("form", ["url", "tail"])
def test_a_loader_follows_a_server_and_resumes(server, form):
    def loader():
        source = server.url if form == "url" else ServerTail(server.url)
        return OnlineLoader(source, 40, max_wait_s=0.2, window=1, null_advantage="keep")

    with Client(server.url) as client:
        client.push(samples(20, "early"))
        got = []
        first = loader()
        steps = iter(first)
        for _ in range(3):
            got += ids_of(next(steps))
        state = first.state_dict()
        first.close()
        client.push(samples(10, "then"))
        second = loader()
        second.load_state_dict(state)
        timer = threading.Timer(0.3, client.push, [samples(5, "later")])
        timer.start()
        steps = iter(second)
        while len(got) < 35:
            got += ids_of(next(steps))
        second.close()
        timer.join()
    assert len(set(got)) == len(got) == 35


def test_a_loader_follows_replicas(server, tmp_path):
    with running(tmp_path / "other", MemoryStore()) as other:
        urls = [server.url, other.url]
        with Client(urls) as client:
            client.push(samples(40, "both"))
        assert min(len(server.store.rows), len(other.store.rows)) > 5
        loader = OnlineLoader(
            ServerTail(urls), 40, max_wait_s=0.2, window=1, null_advantage="keep"
        )  # fmt: skip
        got = []
        steps = iter(loader)
        while len(got) < 40:
            got += ids_of(next(steps))
        assert loader.state_dict()["cursor"].count("~") == 1
        loader.close()
    assert len(set(got)) == 40
