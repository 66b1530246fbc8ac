"""Public reports about servers that take uploads: what is read, and when."""

import json
import threading
import tracemalloc

import pytest
import zstandard
from support.http_server import ARROW, batch, client, connect, post, running, stream

HEAD = "POST /v1/samples HTTP/1.1\r\nhost: localhost\r\ncontent-type: " + ARROW + "\r\n"
KEYS = """
[[keys]]
name = "writer"
secret = "secret-of-the-writer"
scopes = ["ingest"]
"""


def answer(sock):
    """Status and problem of an answer; what follows is not read."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        part = sock.recv(1 << 16)
        assert part, raw
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    (length,) = [int(f.split(b":")[1]) for f in head.lower().split(b"\r\n")
                 if f.startswith(b"content-length")]  # fmt: skip
    while len(body) < length:
        body += sock.recv(1 << 16)
    return int(head.split(b" ")[1]), json.loads(body)


@pytest.mark.parametrize("framing", ["content-length: 60000000", "transfer-encoding: chunked"])
def test_a_request_without_a_key_is_refused_before_its_body(tmp_path, framing):
    """Mr-DooSun/fastapi-agent-blueprint#344: 64 MB were read and parsed before the 401."""
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    with running(tmp_path / "live", keys_file=file) as server, connect(server) as sock:
        sock.sendall(f"{HEAD}{framing}\r\n\r\n".encode())  # and not a byte of the body
        status, problem = answer(sock)
        assert (status, problem["code"]) == (401, "RF-H002")
        assert server.context.budget.used == 0


def test_a_body_without_a_length_is_cut_where_it_grows_too_large(tmp_path):
    """Kludex/starlette#2155, Kludex/starlette#3431, streamlit/streamlit#16207: a cap by
    Content-Length alone, which chunked bodies do not have.
    """
    sent = 0
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    with running(tmp_path, max_request_bytes="1MiB") as server, connect(server) as sock:
        sock.sendall(f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode())
        answers = []
        reader = threading.Thread(target=lambda: answers.append(answer(sock)))
        reader.start()
        try:
            while reader.is_alive() and sent < 1 << 30:
                sock.sendall(chunk)
                sent += 1 << 16
        except (BrokenPipeError, ConnectionResetError):
            pass
        reader.join(20)
        ((status, problem),) = answers
        assert (status, problem["code"]) == (413, "RF-H008")
        assert problem["limits"] == {"max_request_bytes": 1 << 20}
        assert sent < 64 << 20
        assert server.store.rows == []


def test_what_decompresses_to_too_much_is_not_held_first(tmp_path):
    """lightspeed-core/lightspeed-service#3064: the cap was applied to what had been read."""
    data = stream(batch("a", tokens=400_000))
    body = zstandard.ZstdCompressor().compress(data)
    limits = {"max_request_bytes": "128KiB", "max_json_bytes": "128KiB"}
    with client(tmp_path, max_decoded_bytes="256KiB", **limits) as c:
        post(c, stream(batch("b")))  # what is done once
        tracemalloc.start()
        try:
            refused = post(c, body, content_encoding="zstd")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert refused.status_code == 413
        assert len(data) > 4 << 20
        assert peak < 2 << 20
