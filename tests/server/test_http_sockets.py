"""What only sockets show: headers and bodies that come slowly, or never, or are much too large."""

import json
import socket
import struct
import threading
import time

import pytest
from support.http_server import ARROW, batch, connect, receive_all, running, stream, wait_until

POST = "POST /v1/samples HTTP/1.1\r\nhost: localhost\r\ncontent-type: " + ARROW + "\r\n"


def answer_of(raw):
    """Status and problem of the first answer in these bytes."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    length = [
        int(f.split(b":")[1])
        for f in head.lower().split(b"\r\n")
        if f.startswith(b"content-length")
    ]
    return status, json.loads(body[: length[0]]), head.lower()


def read_answer(sock):
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += sock.recv(1 << 16)
    head, _, body = raw.partition(b"\r\n\r\n")
    fields = dict(f.split(b": ", 1) for f in head.lower().split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += sock.recv(1 << 16)
    return int(head.split(b" ")[1]), json.loads(body), fields


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = {
        "header_timeout_s": "400ms", "body_idle_timeout_s": "400ms", "max_header_bytes": "16KiB",
        "body_timeout_s": "3s", "max_request_bytes": "1MiB",
    }  # fmt: skip
    with running(tmp_path_factory.mktemp("live"), **options) as found:
        yield found


GET = b"GET /healthz HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", GET + b"host: loc", GET + b"host: localhost\r\n"],
    ids=["nothing", "a-letter", "part-of-a-field", "no-empty-line"],
)
def test_a_stalled_header_ends_the_connection(server, sent):
    with connect(server) as sock:
        sock.sendall(sent)
        status, problem, head = answer_of(receive_all(sock))
    assert (status, problem["code"]) == (408, "RF-H007")
    assert b"connection: close" in head


def send_until_closed(sock, piece, pause_s=0.0, most=1 << 30):
    """Send until the server closes the connection; returns how much went out."""
    sent = 0
    while sent < most:
        try:
            sent += sock.send(piece)
        except OSError:
            return sent
        time.sleep(pause_s)
    return sent


def test_a_header_that_trickles_ends_as_well(server):
    begin = time.monotonic()
    with connect(server) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nx: ")
        assert send_until_closed(sock, b"a", pause_s=0.02, most=1000) < 1000
    assert time.monotonic() - begin < 10


def test_a_stalled_second_header_ends_the_connection(server):
    with connect(server) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_answer(sock)[0] == 200
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost:")
        assert answer_of(receive_all(sock))[0] == 408


@pytest.mark.parametrize("kind", ["one-field", "many-fields", "request-line", "no-newline"])
def test_a_header_of_32_mib_is_refused(server, kind):
    piece = b"a" * (1 << 16)
    start = {
        "one-field": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: ",
        "many-fields": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n",
        "request-line": b"GET /healthz?",
        "no-newline": b"G",
    }[kind]
    if kind == "many-fields":
        piece = b"".join(b"x-%05d: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" % n for n in range(1500))
    with connect(server) as sock:
        sock.sendall(start)
        sent = send_until_closed(sock, piece, most=32 << 20)
        raw = receive_all(sock)
    assert sent < 8 << 20
    if raw:  # the answer may be lost in the reset
        assert raw.split(b" ")[1] in (b"431", b"400")


def test_a_header_that_is_a_little_too_large_is_refused_by_name(server):
    with connect(server) as sock:
        sock.sendall(
            b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 17000 + b"\r\n\r\n"
        )
        status, problem, _ = answer_of(receive_all(sock))
    assert (status, problem["code"], list(problem["limits"])) == (
        431,
        "RF-H011",
        ["max_header_bytes"],
    )


def test_too_many_fields_are_refused(server):
    fields = b"".join(b"x%d: a\r\n" % n for n in range(120))
    with connect(server) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n")
        assert answer_of(receive_all(sock))[0] == 431


def test_bytes_that_are_not_http_are_refused(server):
    with connect(server) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        status, problem, head = answer_of(receive_all(sock))
    assert (status, problem["code"]) == (400, "RF-H001")
    assert f"x-request-id: {problem['request_id']}".encode() in head


def test_a_body_that_stalls_is_408(server):
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"content-length: 1000\r\n\r\nabc")
        status, problem, head = answer_of(receive_all(sock))
    assert (status, problem["code"]) == (408, "RF-H007")
    assert list(problem["limits"]) == ["body_idle_timeout_s"]
    assert b"connection: close" in head
    wait_until(lambda: server.context.budget.used == 0)


def test_a_body_that_trickles_is_408_in_the_end(server):
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"content-length: 1000\r\n\r\n")
        stop = threading.Event()

        def trickle():
            while not stop.wait(0.1):
                try:
                    sock.sendall(b"a")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        raw = receive_all(sock)
        stop.set()
        thread.join()
    status, problem, _ = answer_of(raw)
    assert (status, list(problem["limits"])) == (408, ["body_timeout_s"])


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server):
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"content-length: 5000000\r\nexpect: 100-continue\r\n\r\n")
        status, problem, _ = read_answer(sock)
    assert (status, problem["code"]) == (413, "RF-H008")


def test_a_body_that_is_expected_is_asked_for(server):
    body = stream(batch("expected"))
    with connect(server) as sock:
        sock.sendall(
            POST.encode() + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(body)
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(body)
        assert read_answer(sock)[0] == 201


def test_a_small_rest_of_a_refused_body_keeps_the_connection(server):
    body = bytes(1 << 20) + b"."
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"content-length: %d\r\n\r\n" % len(body))
        assert read_answer(sock)[0] == 413
        sock.sendall(body)
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_answer(sock)[0] == 200


def test_a_large_rest_of_a_refused_body_ends_the_connection(server):
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"content-length: 999999999999\r\n\r\n")
        assert read_answer(sock)[0] == 413
        assert send_until_closed(sock, bytes(1 << 20)) < 100 << 20


def chunked(*pieces, extension=b"", trailer=b""):
    out = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces)
    return out + b"0\r\n" + trailer + b"\r\n"


def test_a_chunked_body_is_taken(server):
    body = stream(batch("chunked"))
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"transfer-encoding: chunked\r\n\r\n")
        sock.sendall(chunked(*(body[at : at + 7] for at in range(0, len(body), 7))))
        assert read_answer(sock)[0] == 201


@pytest.mark.parametrize("where", ["extension", "trailer"])
def test_bytes_around_chunks_are_limited(server, where):
    big = b"a" * (1 << 20)
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"transfer-encoding: chunked\r\n\r\n")
        try:
            if where == "extension":
                sock.sendall(b"5;x=" + big)
            else:
                sock.sendall(b"5\r\nhello\r\n0\r\nx: " + big)
        except OSError:
            pass
        raw = receive_all(sock)
    assert not raw or raw.split(b" ")[1] == b"400"
    wait_until(lambda: server.context.budget.used == 0)


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: \x0bchunked\r\n",
        b"content-length: +5\r\n",
    ],
    ids=["two-lengths", "both", "identity", "hidden", "sign"],
)
def test_ambiguous_framing_is_refused(server, fields):
    """Two parsers that disagree about where a request ends let requests be smuggled."""
    smuggled = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(POST.encode() + fields + b"\r\n0\r\n\r\n" + smuggled)
        sock.shutdown(socket.SHUT_WR)
        raw = receive_all(sock)
    assert b'"api"' not in raw
    assert int(raw.split(b" ")[1]) in (400, 408, 501)


def test_requests_that_follow_each_other_at_once_are_answered_in_order(server):
    request = b"GET /%b HTTP/1.1\r\nhost: localhost\r\n%b\r\n"
    with connect(server) as sock:
        sock.sendall(
            request % (b"version", b"") + request % (b"nowhere", b"")
            + request % (b"healthz", b"connection: close\r\n")
        )  # fmt: skip
        raw = receive_all(sock)
    assert [part.split(b" ")[0] for part in raw.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


def large(name):
    """A request with a body of about half a megabyte."""
    body = stream(batch(name, tokens=25_000))
    assert 400_000 < len(body) < 1 << 20
    return POST.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def test_large_bodies_follow_each_other_on_one_connection(server):
    with connect(server) as sock:
        for name in ("large-1", "large-2", "large-3"):
            sock.sendall(large(name))
            assert read_answer(sock)[0] == 201
        sock.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_answer(sock)[0] == 200


def test_requests_that_follow_a_large_body_at_once_are_answered(server):
    follow = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(large("followed-1") + large("followed-2") + follow)
        raw = receive_all(sock)
    assert [part.split(b" ")[0] for part in raw.split(b"HTTP/1.1 ")[1:]] == [b"201", b"201", b"200"]


def test_a_large_body_may_come_in_small_pieces(server):
    request = large("pieces")
    with connect(server) as sock:
        for at in range(0, len(request), 10_007):
            sock.sendall(request[at : at + 10_007])
        assert read_answer(sock)[0] == 201


@pytest.mark.parametrize("how", ["close", "shutdown", "reset"])
def test_a_client_that_goes_away_in_its_body_leaves_nothing(server, how):
    before = len(server.store.rows)
    sock = connect(server)
    sock.sendall(large(f"gone-{how}")[:300_000])
    wait_until(lambda: server.context.ingesting == 1)
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "shutdown":
        sock.shutdown(socket.SHUT_WR)
        assert receive_all(sock) == b""
    sock.close()
    wait_until(lambda: server.context.ingesting == 0)
    assert server.context.budget.used == 0
    assert len(server.store.rows) == before


def test_a_request_without_body_or_length_is_refused(server):
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"\r\n")
        assert read_answer(sock)[0] == 400


def test_an_upgrade_is_not_made(server):
    with connect(server) as sock:
        sock.sendall(
            b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n"
            b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n"
        )
        assert read_answer(sock)[0] == 200


@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("pieces", [1, 7])
def test_a_request_that_asks_for_h2c_is_taken_as_it_is(server, framing, size, pieces):
    """Java's client asks so with its first request, whatever its method."""
    name = f"{framing}-{size}-{pieces}"
    body = stream(batch(name, tokens=size))
    upgrade = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    if framing == "length":
        sent = f"{POST}{upgrade}content-length: {len(body)}\r\n\r\n".encode() + body
    else:
        sent = f"{POST}{upgrade}transfer-encoding: chunked\r\n\r\n{len(body):x}\r\n".encode()
        sent += body + b"\r\n0\r\n\r\n"
    plain = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
    asking = plain + upgrade.encode() + b"\r\n"
    with connect(server) as sock:
        step = -(-len(sent) // pieces)
        for start in range(0, len(sent), step):
            sock.sendall(sent[start : start + step])
        status, answer, _ = read_answer(sock)
        assert (status, answer["stored"]) == (201, 1)
        for following in (asking, plain + b"\r\n"):
            sock.sendall(following)
            assert read_answer(sock)[0] == 200


def test_a_trailer_that_is_refused_is_answered(server):
    body = stream(batch("trailer"))
    head = f"{POST}transfer-encoding: chunked\r\n\r\n{len(body):x}\r\n".encode()
    with connect(server) as sock:
        sock.sendall(head + body + b"\r\n0\r\ncontent-length: 5\r\n\r\n")
        status, problem, _ = answer_of(receive_all(sock))
    assert (status, problem["code"]) == (400, "RF-H001")


def test_connections_are_limited(tmp_path):
    with running(tmp_path, max_connections=3) as server:
        open_ones = [connect(server) for _ in range(3)]
        wait_until(lambda: len(server.server_state.connections) == 3)
        with connect(server) as sock:
            status, problem, _ = answer_of(receive_all(sock))
        assert (status, problem["code"]) == (503, "RF-H014")
        for sock in open_ones:
            sock.close()
        wait_until(lambda: not server.server_state.connections)
        with connect(server) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert read_answer(sock)[0] == 200


def test_stalled_bodies_cannot_lock_others_out(tmp_path):
    """Bodies that never come hold their budget for the idle time only, and nobody waits for it."""
    body = stream(batch("late"))
    options = {
        "max_request_bytes": "1MiB", "max_decoded_bytes": "1MiB", "max_json_bytes": "1MiB",
        "max_in_flight_bytes": "2MiB", "body_idle_timeout_s": "500ms",
    }  # fmt: skip
    with running(tmp_path, **options) as server:
        stalled = [connect(server) for _ in range(2)]
        for sock in stalled:
            sock.sendall(POST.encode() + b"content-length: 1048576\r\n\r\nabc")
        wait_until(lambda: server.context.budget.used == 2 << 20)
        with connect(server) as sock:
            request = POST.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
            sock.sendall(request)
            status, problem, fields = read_answer(sock)
            assert (status, problem["code"], fields[b"retry-after"]) == (503, "RF-H014", b"1")
            wait_until(lambda: server.context.budget.used == 0)
            sock.sendall(request)
            assert read_answer(sock)[0] == 201
        for sock in stalled:
            assert answer_of(receive_all(sock))[0] == 408
            sock.close()
