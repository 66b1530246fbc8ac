"""Applications and servers for tests of the HTTP side."""

import contextlib
import socket
import threading
import time

import pyarrow as pa
import structlog
from starlette.testclient import TestClient
from support.memory_store import MemoryStore

import ragged_format as rf
from ragged_server.http.app import create_app
from ragged_server.process.serve import DrainingServer
from ragged_server.settings import load_settings

# As `ragged serve` has it: the default renders every local variable of a traceback.
structlog.configure(
    processors=[
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ),
        structlog.processors.JSONRenderer(default=str),
    ]
)

ARROW = "application/vnd.apache.arrow.stream"
SCHEMA = rf.sample_schema(vocab_size=100, columns=["candidate_counts", "candidate_ids", "group_id"])


def batch(*ids, schema=SCHEMA, reward=None, tokens=3):
    """Records of these ids: `tokens` tokens, all but the first scored, sets of width 2."""
    rows = [
        {
            "sample_id": name,
            "group_id": f"g-{name}",
            "input_ids": [7] * tokens,
            "completion_mask": [0] + [1] * (tokens - 1),
            "candidate_counts": [2] * (tokens - 1),
            "candidate_ids": [7, 9] * (tokens - 1),
        }
        for name in ids
    ]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def stream(*batches, schema=None):
    """Batches as the bytes of a whole stream."""
    sink = pa.BufferOutputStream()
    rf.write_stream(sink, list(batches), schema or (batches[0].schema if batches else SCHEMA))
    return sink.getvalue().to_pybytes()


def settings(directory, **options):
    return load_settings(directory, None, **{"log_requests": "none", **options})


@contextlib.contextmanager
def client(directory, store=None, base_url="http://localhost", **options):
    """A client of an application in this process; its store is `client.store`."""
    store = store or MemoryStore()
    app = create_app(settings(directory, **options), lambda: store)
    with TestClient(app, base_url=base_url, raise_server_exceptions=False) as found:
        wait_until(lambda: app.context.is_open or app.context.failure is not None)
        found.store, found.context = store, app.context
        yield found


def post(client, body, content_type=ARROW, **headers):
    fields = {"content-type": content_type, **{k.replace("_", "-"): v for k, v in headers.items()}}
    return client.post("/v1/samples", content=body, headers=fields)


def wait_until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


@contextlib.contextmanager
def running(directory, store=None, **options):
    """A server on a socket, in a thread of this process."""
    store = store or MemoryStore()
    chosen = settings(directory, port=0, **options)
    app = create_app(chosen, lambda: store)
    server = DrainingServer(chosen, app)
    listener = socket.create_server(("127.0.0.1", 0))
    server.port = listener.getsockname()[1]
    server.url = f"http://127.0.0.1:{server.port}"
    server.store, server.context = store, app.context
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started and app.context.is_open)
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


def connect(server, timeout_s=20.0):
    return socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s)


def receive_all(sock):
    """Bytes until the server closes; a reset ends them too."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
