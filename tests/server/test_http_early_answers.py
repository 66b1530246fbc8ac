"""Requests that are refused before their body is read: clients that send first see the answer."""

import http.client
import json
import time
import urllib.error
import urllib.request

import pytest
from support.http_server import ARROW, batch, connect, receive_all, running, stream, wait_until

from ragged_server.http import protocol

SECRET = "a-secret-of-sixteen-bytes"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    keys = folder.with_suffix(".toml")
    keys.write_text(f'[[keys]]\nname = "a"\nsecret = "{SECRET}"\nscopes = ["ingest", "read"]\n')
    with running(folder, keys_file=keys, max_request_bytes="8MiB") as found:
        yield found


CASES = {
    "content-type": (7 << 20, {"Content-Type": "text/plain"}, 415, "RF-H009"),
    "no-key": (7 << 20, {"Content-Type": ARROW, "Authorization": ""}, 401, "RF-H002"),
    "too-large": (20 << 20, {"Content-Type": ARROW}, 413, "RF-H008"),
}


@pytest.mark.parametrize("case", CASES)
def test_urllib_gets_the_problem(server, case):
    size, fields, status, code = CASES[case]
    for _ in range(5):  # a reset does not come in each
        asked = urllib.request.Request(
            f"{server.url}/v1/samples", data=bytes(size),
            headers={"Authorization": f"Bearer {SECRET}", **fields},
        )  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(asked, timeout=20)
        with caught.value as answer:
            assert answer.code == status
            assert answer.headers["content-type"] == "application/problem+json"
            assert json.load(answer)["code"] == code


@pytest.mark.parametrize("case", CASES)
def test_a_connection_that_is_kept_serves_the_next_request(server, case):
    size, fields, status, _ = CASES[case]
    key = {"Authorization": f"Bearer {SECRET}"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for _ in range(3):
        connection.request("POST", "/v1/samples", bytes(size), {**key, **fields})
        answer = connection.getresponse()
        assert (answer.status, bool(answer.read())) == (status, True)
        connection.request("POST", "/v1/samples", stream(batch("kept")), {
            **key, "Content-Type": ARROW
        })  # fmt: skip
        assert connection.getresponse().read()
    connection.close()


def head(length, *fields):
    lines = [
        "POST /v1/samples HTTP/1.1", "host: localhost", "content-type: text/plain",
        f"authorization: Bearer {SECRET}", f"content-length: {length}", *fields,
    ]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_a_client_that_reads_last_gets_answer_and_end(server):
    body = bytes(7 << 20)
    with connect(server) as sock:
        sock.sendall(head(len(body), "connection: close") + body)
        time.sleep(0.1)
        raw = receive_all(sock)  # ends, though this side is open
    answer, _, text = raw.partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert b"connection: close" in answer.lower()
    assert json.loads(text)["code"] == "RF-H009"


def test_what_follows_the_last_answer_is_no_request(server):
    before = server.context.metrics.requests.labels("/healthz", "GET", "200")._value.get()
    with connect(server) as sock:
        sock.sendall(head(10, "connection: close") + bytes(5))
        assert receive_all(sock).count(b"HTTP/1.1") == 1
        sock.sendall(bytes(5) + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert sock.recv(100) == b""
    after = server.context.metrics.requests.labels("/healthz", "GET", "200")._value.get()
    assert after == before


def send_until_closed(sock, piece, most):
    sent = 0
    while sent < most:
        try:
            sent += sock.send(piece)
        except OSError:
            break
    return sent


@pytest.mark.parametrize("fields", [(), ("connection: close",)], ids=["keep", "close"])
def test_what_is_dropped_is_limited(server, fields):
    most = (8 << 20) + protocol._LINGER_BYTES
    with connect(server) as sock:
        sock.sendall(head(1 << 40, *fields))
        # Besides what lies in the buffers of both sides.
        assert send_until_closed(sock, bytes(1 << 16), 1 << 30) < most + (32 << 20)


@pytest.mark.parametrize("fields", [(), ("connection: close",)], ids=["keep", "close"])
def test_a_client_that_stops_sending_is_cut_off(server, monkeypatch, fields):
    monkeypatch.setattr(protocol, "_LINGER_S", 0.3)
    connections = server.server_state.connections
    wait_until(lambda: not connections)
    with connect(server) as sock:
        sock.sendall(head(1000, *fields) + b"abc")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 415 ")
        assert len(connections) == 1
        wait_until(lambda: not connections)


def test_a_server_that_stops_does_not_wait_for_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "_LINGER_S", 1000.0)
    with running(tmp_path) as server:
        sock = connect(server)
        sock.sendall(head(1000, "connection: close") + b"abc")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 415 ")
    sock.close()


def test_chunks_that_are_no_chunks_leave_nothing_behind(server):
    """The answer comes from the connection, while the route still waits for the body."""
    with connect(server) as sock:
        lines = head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
        lines = lines.replace(b"text/plain", ARROW.encode())
        sock.sendall(lines + b"5\r\nabcde\r\n")
        wait_until(lambda: server.context.ingesting == 1)
        sock.sendall(b"no size\r\n" + bytes(1 << 20))
        assert receive_all(sock).startswith(b"HTTP/1.1 400 ")
        wait_until(lambda: server.context.ingesting == 0)
        assert server.context.budget.used == 0
