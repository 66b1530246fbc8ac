"""Long-polling reads."""

import threading
import time

import pyarrow as pa
import pytest
import zstandard
from support.http_server import SCHEMA, batch, client, connect, post, running, stream, wait_until
from support.memory_store import MemoryStore

import ragged_format as rf


def ids_of(content):
    return [name for b in rf.read_stream(content) for name in b.column("sample_id").to_pylist()]


def in_thread(work):
    out = {}
    thread = threading.Thread(target=lambda: out.update(result=work()))
    thread.start()

    def join():
        thread.join(20)
        assert not thread.is_alive()
        return out["result"]

    return join


def test_a_read_waits_for_the_next_commit(tmp_path):
    with client(tmp_path) as c:
        cursor = post(c, stream(batch("a"))).json()["cursor"]
        read = in_thread(lambda: c.get("/v1/samples", params={"after": cursor, "wait": 30}))
        wait_until(lambda: len(c.context.wakeups) == 1)
        post(c, stream(batch("b")))
        assert ids_of(read().content) == ["b"]
        assert len(c.context.wakeups) == 0


def test_a_read_of_a_new_log_waits_for_its_schema(tmp_path):
    with client(tmp_path) as c:
        read = in_thread(lambda: c.get("/v1/samples", params={"wait": 30}))
        wait_until(lambda: len(c.context.wakeups) == 1)
        post(c, stream(batch("a")))
        assert ids_of(read().content) == ["a"]


def test_when_the_time_is_up_the_page_is_empty(tmp_path):
    with client(tmp_path, max_wait_s="50ms") as c:
        cursor = post(c, stream(batch("a"))).json()["cursor"]
        begin = time.monotonic()
        answer = c.get("/v1/samples", params={"after": cursor, "wait": 600})
        assert time.monotonic() - begin >= 0.05
        assert ids_of(answer.content) == []
        assert answer.headers["ragged-cursor"] == cursor


def test_many_readers_wait_at_once(tmp_path):
    with client(tmp_path, max_readers=2) as c:
        reads = [in_thread(lambda: c.get("/v1/samples", params={"wait": 30})) for _ in range(12)]
        wait_until(lambda: len(c.context.wakeups) == 12)
        post(c, stream(batch("a")))
        assert [ids_of(read().content) for read in reads] == [["a"]] * 12


def test_more_may_not_wait_than_the_limit(tmp_path):
    with client(tmp_path, max_waiting=1) as c:
        first = in_thread(lambda: c.get("/v1/samples", params={"wait": 30}))
        wait_until(lambda: len(c.context.wakeups) == 1)
        refused = c.get("/v1/samples", params={"wait": 30})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        post(c, stream(batch("a")))
        assert first().status_code == 200


class Sharing(MemoryStore):
    """Gives what was asked for back, and nothing for any rank but 1."""

    def read(self, after, **options):
        self.asked = {"after": after, **options}
        page = super().read(after, max_bytes=options["max_bytes"])
        if options["rank"] == 1 or not page.records:
            return page
        return type(page)((), page.cursor, (), 0, page.lag)


def test_parameters_reach_the_store(tmp_path):
    with client(tmp_path, Sharing(), max_page_bytes=5000, page_bytes=300) as c:
        post(c, stream(batch("a")))
        c.get("/v1/samples")
        assert c.store.asked == {
            "after": None, "max_bytes": 300, "rank": 0, "world_size": 1, "min_policy_version": None,
        }  # fmt: skip
        c.get("/v1/samples?rank=1&world_size=4&max_bytes=9000&min_policy_version=-3")
        assert c.store.asked == {
            "after": None, "max_bytes": 5000, "rank": 1, "world_size": 4, "min_policy_version": -3,
        }  # fmt: skip


def test_a_page_without_records_of_this_rank_moves_the_cursor(tmp_path):
    with client(tmp_path, Sharing()) as c:
        cursor = post(c, stream(batch("a"))).json()["cursor"]
        answer = c.get("/v1/samples?rank=0&world_size=2")
        assert ids_of(answer.content) == []
        assert answer.headers["ragged-cursor"] == cursor


def test_a_rank_reads_on_behind_records_of_others(tmp_path):
    with client(tmp_path, Sharing()) as c:
        cursor = post(c, stream(batch("a", "b", "c"))).json()["cursor"]
        # One byte holds no record of others either, so that it takes several reads.
        answer = c.get("/v1/samples?rank=0&world_size=2&max_bytes=1&wait=0.2")
        assert answer.headers["ragged-cursor"] == cursor


def test_the_last_batch_leads_behind_what_was_left_out(tmp_path):
    class Filtering(MemoryStore):
        def read(self, after, **options):
            page = super().read(after, max_bytes=options["max_bytes"])
            if not page.records:
                return page
            return type(page)(page.batches[:1], page.cursor, page.cursors[:1], 1, 0)

    with client(tmp_path, Filtering()) as c:
        end = post(c, stream(batch("a", "b"))).json()["cursor"]
        reader = rf.read_stream(c.get("/v1/samples").content)
        next(reader)
        assert reader.metadata[b"ragged_server:cursor"].decode() == end


def large_log(store, records=40, tokens=20_000):
    """A log whose pages are larger than what a socket holds."""
    width = tokens - 1
    row = batch("x", tokens=tokens)
    store.schema = SCHEMA
    position = SCHEMA.get_field_index("sample_id")
    for number in range(records):
        name = pa.array([f"r{number}"], pa.string())
        store.rows.append(row.set_column(position, SCHEMA.field(position), name))
    return width


def test_a_large_page_comes_in_pieces(tmp_path):
    with running(tmp_path) as server:
        large_log(server.store)
        with connect(server) as sock:
            sock.sendall(
                b"GET /v1/samples HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )
            raw = b""
            while part := sock.recv(1 << 20):
                raw += part
        head, _, body = raw.partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        content = unchunked(body)
        assert ids_of(content) == [f"r{n}" for n in range(len(ids_of(content)))]
        assert len(content) > 5 << 20


def unchunked(body):
    out = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16) == 0:
            return out
        out += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


@pytest.mark.parametrize("coding", [b"zstd", b"identity"])
def test_a_failure_midway_breaks_the_connection_off(tmp_path, coding, monkeypatch):
    monkeypatch.setattr("ragged_server.http.tail._PIECE", 1000)  # compressed, the page is small

    class Failing(MemoryStore):
        def read(self, after, **options):
            page = super().read(after, max_bytes=1 << 30)
            other = page.batches[-1].replace_schema_metadata({})
            rest = page.cursor, page.cursors, page.records, page.lag
            return type(page)((*page.batches[:-1], other), *rest)

    with running(tmp_path, Failing()) as server:
        large_log(server.store)
        with connect(server) as sock:
            sock.sendall(
                b"GET /v1/samples HTTP/1.1\r\nhost: localhost\r\naccept-encoding: %b\r\n\r\n"
                % coding
            )
            raw = b""
            while part := sock.recv(1 << 20):
                raw += part
        head, _, body = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert not body.endswith(b"0\r\n\r\n")
        assert b"ragged_format:trailer" not in body


def test_a_reader_that_takes_nothing_is_broken_off(tmp_path):
    with running(tmp_path, send_timeout_s="300ms") as server:
        large_log(server.store)
        with connect(server) as sock:
            sock.sendall(b"GET /v1/samples HTTP/1.1\r\nhost: localhost\r\n\r\n")
            wait_until(lambda: server.context.reading == 1)
            wait_until(lambda: server.context.reading == 0)
            raw = b""
            while part := receive(sock):
                raw += part
        assert not raw.endswith(b"0\r\n\r\n")


def receive(sock):
    try:
        return sock.recv(1 << 20)
    except ConnectionResetError:
        return b""


def test_a_client_that_goes_away_frees_its_place(tmp_path):
    with running(tmp_path) as server:
        sock = connect(server)
        sock.sendall(b"GET /v1/samples?wait=50 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_until(lambda: len(server.context.wakeups) == 1)
        sock.close()
        wait_until(lambda: len(server.context.wakeups) == 0)


def test_compressed_answers_are_whole_frames(tmp_path):
    with client(tmp_path) as c:
        post(c, stream(batch("a", tokens=2000)))
        with c.stream(
            "GET", "/v1/samples", headers={"accept-encoding": "gzip, zstd;q=0.5"}
        ) as read:
            raw = b"".join(read.iter_raw())
        plain = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
        assert ids_of(plain) == ["a"]
        for refused in ("zstd;q=0", "gzip", ""):
            answer = c.get("/v1/samples", headers={"accept-encoding": refused})
            assert "content-encoding" not in answer.headers
