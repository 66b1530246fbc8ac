"""``ragged serve`` in a process of its own: signals, exit codes, certificates, logs."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import httpx2
import pytest
from support.http_server import ARROW, batch, stream, wait_until

import ragged_format as rf
from ragged_server.client import Client, UnreachableError


class Process:
    """A running command."""

    def __init__(self, directory, *options, env=None):
        command = [
            sys.executable, "-c", "from ragged_format.cli import main; main()",
            "serve", str(directory), "--port", "0", "--json", *options,
        ]  # fmt: skip
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.lines = []
        self.thread = threading.Thread(target=self._collect)
        self.thread.start()
        self.said = json.loads(self.popen.stdout.readline() or "{}")
        self.url = self.said.get("url")
        self.port = int(self.url.rpartition(":")[2]) if self.url else None

    def _collect(self):
        for line in self.popen.stderr:
            self.lines.append(line)

    def logged(self):
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def wait(self):
        code = self.popen.wait(30)
        self.thread.join(10)
        return code

    def end(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.wait()
        self.popen.stdout.close()
        self.popen.stderr.close()


@contextlib.contextmanager
def process(directory, *options, env=None, ready=True):
    found = Process(directory, *options, env=env)
    try:
        if ready:
            wait_until(lambda: status_of(found.url + "/readyz") == 200)
        yield found
    finally:
        found.end()


def status_of(url, **options):
    try:
        return httpx2.get(url, **options).status_code
    except httpx2.TransportError:
        return None


def post(url, body, **headers):
    return httpx2.post(
        f"{url}/v1/samples", content=body, headers={"content-type": ARROW, **headers}
    )


def test_what_was_acknowledged_is_a_dataset_and_is_there_after_a_restart(tmp_path):
    live = tmp_path / "live"
    with process(live) as server:
        answer = post(server.url, stream(batch("a", "b")))
        assert (answer.status_code, answer.json()["stored"]) == (201, 2)
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        said = [line["event"] for line in server.logged()]
        assert said[-3:] == ["stopping", "segment_sealed", "stopped"]
    assert len(rf.Dataset(live)) == 2
    with process(live) as server:
        answer = httpx2.get(f"{server.url}/v1/samples")
        ids = [b.column("sample_id").to_pylist() for b in rf.read_stream(answer.content)]
        assert ids == [["a", "b"]]
        assert post(server.url, stream(batch("a", "b"))).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_a_signal_lets_running_requests_end(tmp_path, number):
    body = stream(batch("slow"))
    with process(tmp_path / "live") as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        head = f"POST /v1/samples HTTP/1.1\r\nhost: localhost\r\ncontent-type: {ARROW}\r\n"
        sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body[:100])
        waiting = {}

        def read():
            waiting["read"] = httpx2.get(f"{server.url}/v1/samples?wait=60", timeout=30).status_code

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: status(server)["ingesting"] == 1 and status(server)["waiting"] == 1)
        server.popen.send_signal(number)
        # Not ready at once, while the listener is still there for those who ask.
        wait_until(lambda: status_of(server.url + "/readyz") == 503)
        assert status_of(server.url + "/healthz") == 200
        refused = post(server.url, stream(batch("late")))
        assert (refused.status_code, refused.json()["code"]) == (503, "RF-H015")
        thread.join(20)  # a read that waits is answered at once
        assert waiting["read"] == 204
        sock.sendall(body[100:])
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 201 ")
        sock.close()
        assert server.wait() == 0
    with process(tmp_path / "live") as server:
        assert httpx2.get(f"{server.url}/v1/samples").headers["ragged-records"] == "1"


def status(server):
    return httpx2.get(f"{server.url}/v1/status").json()["server"]


def test_a_request_that_never_ends_is_cut_after_the_drain_time(tmp_path):
    with process(tmp_path / "live", "--drain-timeout", "1s") as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        head = f"POST /v1/samples HTTP/1.1\r\nhost: localhost\r\ncontent-type: {ARROW}\r\n"
        sock.sendall(head.encode() + b"content-length: 1000\r\n\r\nabc")
        wait_until(lambda: status(server)["ingesting"] == 1)
        server.popen.send_signal(signal.SIGTERM)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        sock.close()
        assert server.wait() == 0
        assert not any("Exception in ASGI" in line for line in server.lines)


def test_the_second_signal_ends_at_once(tmp_path):
    with process(tmp_path / "live", "--drain-delay", "60s") as server:
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: status_of(server.url + "/readyz") == 503)
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_second_server_on_the_directory_says_so(tmp_path):
    with process(tmp_path / "live"), process(tmp_path / "live", ready=False) as second:
        assert second.wait() == 1
        text = "".join(second.lines)
        assert "RF-H112" in text
        assert "frames" not in text  # of an exception: there is none to look into


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(tmp_path / "live", "--port", str(port), ready=False) as server:
            assert server.wait() == 1
            text = "".join(server.lines)
            assert f"127.0.0.1:{port}" in text
            assert "RF-H016" in text


def test_log_lines_are_json_with_the_request_id(tmp_path):
    with process(tmp_path / "live") as server:
        httpx2.get(f"{server.url}/nowhere", headers={"x-request-id": "mine"})
        httpx2.get(f"{server.url}/healthz")
        wait_until(lambda: any(line.get("request_id") == "mine" for line in server.logged()))
        line = next(line for line in server.logged() if line.get("request_id") == "mine")
        assert (line["event"], line["status"], line["code"]) == ("request", 404, "RF-H004")
        assert not any(line.get("path") == "/healthz" for line in server.logged())
        assert len(server.logged()) == len(server.lines)


def test_keys_of_the_environment_guard_the_server(tmp_path):
    env = {"RAGGED_KEYS": "me:admin:a-secret-of-some-length"}
    with process(tmp_path / "live", env=env) as server:
        assert status_of(f"{server.url}/v1/status") == 401
        headers = {"authorization": "Bearer a-secret-of-some-length"}
        assert status_of(f"{server.url}/v1/status", headers=headers) == 200
        assert "a-secret" not in "".join(server.lines)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def test_https(tmp_path, certificate):
    options = ("--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]))
    with process(tmp_path / "live", *options, ready=False) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate[0]))
        wait_until(lambda: status_of(server.url + "/readyz", verify=context) == 200)
        with httpx2.Client(verify=context, base_url=server.url) as client:
            headers = {"content-type": ARROW}
            for body in (stream(batch("a")), stream(batch("b", tokens=50_000))):
                answer = client.post("/v1/samples", content=body, headers=headers)
                assert answer.status_code == 201
        # A client that sends everything first sees why it was refused.
        asked = urllib.request.Request(f"{server.url}/v1/samples", data=bytes(7 << 20))
        with pytest.raises(urllib.error.HTTPError, match="415") as caught:
            urllib.request.urlopen(asked, context=context, timeout=20)
        caught.value.close()
        with Client(server.url, verify=str(certificate[0])) as trusting:
            assert trusting.push(batch("c")).stored == 1
        # At once, not after Retries.for_s: nothing that passes by itself.
        with Client(server.url) as strict, pytest.raises(UnreachableError, match="not trusted"):
            strict.push(batch("d"))
        assert status_of(server.url.replace("https", "http") + "/readyz") is None


def test_a_certificate_without_its_key_is_refused(tmp_path, certificate):
    options = ("--tls-cert", str(certificate[0]), "--tls-key", str(certificate[0]))
    with process(tmp_path / "live", *options, ready=False) as server:
        assert server.wait() == 1
        assert "RF-H016" in "".join(server.lines)
