"""Reading and tailing: pages, cursors, shares, and what happens when a read fails."""

import asyncio
import itertools
import threading
import time

import pytest
from support.containers import equal, small_batch, small_schema, stream_bytes, three_batches
from support.fake_server import fake_server

import ragged_format as rf
from ragged_format.ragged import concat
from ragged_server.client import AsyncClient, Client, RefusedError, Retries, Share

QUICK = Retries(for_s=5, first_s=0.001, most_s=0.005)


@pytest.fixture
def server():
    with fake_server() as server:
        server.schema = small_schema()
        for batch in three_batches():
            server.store(_bytes(batch))
        yield server


def _bytes(batch):
    return stream_bytes([batch])


@pytest.fixture(params=["blocking", "async"])
def pages(request, server):
    """The pages that a tail gives until it ends or `most` are there."""

    def run(after=None, *, url=None, most=None, zstd_level=None, **options):
        made = {"retries": QUICK, "zstd_level": zstd_level}
        if request.param == "blocking":
            with Client(url or server.url, **made) as client:
                return list(itertools.islice(client.tail(after, **options), most))

        async def go():
            out = []
            async with AsyncClient(url or server.url, **made) as client:
                async for page in client.tail(after, **options):
                    out.append(page)
                    if len(out) == most:
                        break
            return out

        return asyncio.run(go())

    return run


@pytest.mark.parametrize("zstd_level", [None, 3], ids=["plain", "zstd"])
@pytest.mark.parametrize("max_bytes", [None, 1, 3500])
def test_a_tail_gives_everything_once(server, pages, zstd_level, max_bytes):
    got = pages(follow=False, max_bytes=max_bytes, zstd_level=zstd_level)
    assert equal([concat([b for page in got for b in page.batches])], [concat(three_batches())])
    assert [c for page in got for c in page.cursors] == [str(n) for n in range(1, 10)]
    assert all(page.cursor == page.cursors[-1] for page in got)
    assert all(page.records == len(page.batches) for page in got)
    assert all(page.schema.equals(small_schema(), check_metadata=True) for page in got)


def test_it_goes_on_from_every_cursor(server, pages):
    for start in range(10):
        got = pages(str(start), follow=False)
        assert sum(page.records for page in got) == 9 - start


@pytest.mark.parametrize("fault", ["cut", "drop", (503, {}, {}), (429, {"Retry_After": 0}, {})])
def test_a_read_that_fails_is_repeated(server, pages, fault):
    server.faults = [fault, None, fault]
    got = pages(follow=False, max_bytes=3500)
    assert sum(page.records for page in got) == 9


def test_what_is_asked_for(server, pages):
    pages("3", most=1, wait_s=2.5, max_bytes=10, share=Share(1, 4, min_policy_version=7))
    method, path, params, headers, _ = server.requests[0]
    assert (method, path) == ("GET", "/v1/samples")
    assert params == {
        "after": "3", "wait": "2.5", "max_bytes": "10", "rank": "1", "world_size": "4",
        "min_policy_version": "7",
    }  # fmt: skip
    assert headers["accept"] == "application/vnd.apache.arrow.stream"


def test_following_waits_for_what_comes(server, pages):
    def later():
        while len(server.requests) < 3:  # the first page, and nothing more twice
            time.sleep(0.001)
        server.store(_bytes(small_batch((4,), prefix="late")))

    thread = threading.Thread(target=later)
    thread.start()
    got = pages(most=2, wait_s=0.01)
    thread.join()
    assert [page.records for page in got] == [9, 1]


def test_a_share_must_lie_in_the_world():
    with pytest.raises(rf.LimitExceededError, match="rank"):
        Share(2, 2)
    with pytest.raises(rf.LimitExceededError, match="rank"):
        Share(-1, 2)


def test_a_page_may_be_read_by_itself(server):
    with Client(server.url, retries=QUICK) as client:
        page = client.read("7")
        assert (page.records, page.cursor) == (2, "9")
        page = client.read("9")
        assert (page.records, page.cursor, page.batches) == (0, "9", ())


def test_a_log_without_samples_has_no_schema(pages):
    with fake_server() as empty:
        assert pages(url=empty.url, follow=False) == []
        with Client(empty.url, retries=QUICK) as client:
            page = client.read()
            assert (page.batches, page.cursor, page.schema) == ((), "0", None)


def test_another_server_is_told(server):
    """Anything may answer 200."""
    server.page = lambda params, headers: (b"<html>", "text/html", {})
    with (
        Client(server.url, retries=QUICK) as client,
        pytest.raises(RefusedError, match="text/html"),
    ):
        client.read()


def test_several_servers_are_one_log(server, pages):
    with fake_server() as other:
        other.schema = small_schema()
        other.store(_bytes(small_batch([2] * 5, prefix="other")))
        url = [server.url, other.url]
        got = pages(url=url, follow=False, max_bytes=2500)
        ids = [n for page in got for b in page.batches for n in b.column("sample_id").to_pylist()]
        assert sorted(ids) == sorted([*server.ids, *other.ids])
        assert got[-1].cursor == "9~5"
        middle = got[1].cursor
        rest = pages(middle, url=url, follow=False)
        assert sum(page.records for page in rest) == 14 - sum(page.records for page in got[:2])
        with pytest.raises(rf.LimitExceededError, match="another number of servers"):
            pages("9", url=url, follow=False)


def test_an_answer_is_bounded(server, monkeypatch):
    monkeypatch.setattr("ragged_server.client._io.Call.__init__", _small_calls)
    with (
        Client(server.url, retries=QUICK) as client,
        pytest.raises(rf.LimitExceededError, match="answer"),
    ):
        client.read()


def _small_calls(self, method, url, params=None, headers=None, content=None, **_):
    for name, value in {
        "method": method, "url": url, "params": params or {}, "headers": headers or {},
        "content": content, "wait_s": 0.0, "max_bytes": 100,
    }.items():  # fmt: skip
        object.__setattr__(self, name, value)
