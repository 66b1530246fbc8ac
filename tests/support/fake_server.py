"""A small server that keeps samples in a list, and fails as it is told."""

import io
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import zstandard

import ragged_format as rf

STREAM = "application/vnd.apache.arrow.stream"


class FakeServer:
    """Samples by id; `faults` are taken one for each request, in order.

    A fault is (status, header fields, problem), "cut" (the connection ends in the answer's middle)
    or "drop" (the request is stored, and nothing is answered).
    """

    def __init__(self):
        self.faults = []
        self.requests = []  # (method, path, params, header fields, body)
        self.batches = []  # one record each
        self.ids = {}
        self.schema = None
        self.lock = threading.Lock()
        self.active = self.most_active = 0
        self.delay_s = 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                server.handle(self, body)

            def do_GET(self):
                server.handle(self, b"")

            def log_message(self, *_):
                pass

            def setup(self):
                super().setup()
                server.connections.add(self.connection)

        self.connections = set()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def handle(self, handler, body):
        parts = urlsplit(handler.path)
        params = {name: values[0] for name, values in parse_qs(parts.query).items()}
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self.lock:
            self.active += 1
            self.most_active = max(self.most_active, self.active)
            self.requests.append((handler.command, parts.path, params, headers, body))
            fault = self.faults.pop(0) if self.faults else None
        try:
            time.sleep(self.delay_s)
            if isinstance(fault, tuple):
                status, fields, problem = fault
                return self.answer(
                    handler, status, json.dumps(problem).encode(), "application/problem+json",
                    **fields,
                )  # fmt: skip
            with self.lock:
                if handler.command == "POST":
                    answer = json.dumps(self.store(body)).encode(), "application/json", {}, 201
                elif parts.path == "/v1/status":
                    answer = b'{"records": 7}', "application/json", {}, 200
                else:
                    answer = *self.page(params, headers), 200 if self.schema else 204
            if fault == "drop":
                handler.close_connection = True
                return None
            content, kind, fields, status = answer
            return self.answer(handler, status, content, kind, cut=fault == "cut", **fields)
        finally:
            with self.lock:
                self.active -= 1

    def answer(self, handler, status, content, kind, *, cut=False, **fields):
        handler.send_response(status)
        handler.send_header("content-type", kind)
        handler.send_header("content-length", str(len(content)))
        for name, value in fields.items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        if cut:
            content = content[: len(content) // 2]
            handler.close_connection = True
        handler.wfile.write(content)

    def store(self, body):
        stored = duplicates = 0
        for batch in rf.read_stream(body):
            self.schema = batch.schema
            for row, name in enumerate(batch.column("sample_id").to_pylist()):
                if name in self.ids:
                    duplicates += 1
                else:
                    stored += 1
                    self.ids[name] = len(self.batches)
                    self.batches.append(batch.slice(row, 1))
        return {
            "first_sequence": len(self.batches) - stored, "stored": stored,
            "duplicates": duplicates, "cursor": str(len(self.batches)),
        }  # fmt: skip

    def page(self, params, headers):
        start = int(params.get("after", 0))
        if self.schema is None:
            return b"", STREAM, {"ragged_cursor": 0}
        end = min(len(self.batches), start + int(params.get("max_bytes", 1 << 30)) // 1000 + 1)
        sink = io.BytesIO()
        with rf.StreamWriter(sink, self.schema) as writer:
            for number in range(start, end):
                cursor = {"ragged_server:cursor": str(number + 1)}
                writer.write(self.batches[number], cursor)
        content, fields = sink.getvalue(), {"ragged_cursor": end}
        if headers["accept-encoding"] == "zstd":
            content, fields["content_encoding"] = zstandard.compress(content), "zstd"
        return content, STREAM, fields


@contextmanager
def fake_server():
    server = FakeServer()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()
