import gc
import threading
import tracemalloc

import pyarrow as pa
import pytest
from starlette.testclient import TestClient
from support.http_server import (
    ARROW,
    SCHEMA,
    batch,
    client,
    post,
    settings,
    stream,
    wait_until,
)
from support.memory_store import MemoryStore

import ragged_format as rf
from ragged_server.http.app import create_app
from ragged_server.http.codes import CODES
from ragged_server.store import errors

MEMBERS = {"type", "title", "status", "detail", "instance", "code", "errors", "request_id"}


def check(answer, status, code):
    """An answer is a whole problem document; returns it."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert set(problem) >= MEMBERS
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert problem["errors"][0]["code"] == code
    return problem


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (errors.ConflictError("x"), 409, None),
        (errors.RepeatedIdError("x"), 422, None),
        (errors.IdempotencyMismatchError("x"), 422, None),
        (errors.IdempotencyBusyError("x"), 409, None),
        (errors.StorageFullError("x"), 507, None),
        (errors.StorageFailedError("x"), 503, "1"),
        (errors.QuotaExceededError("x", retry_after_s=17.2), 429, "18"),
        (errors.QueueFullError("x", retry_after_s=0.01), 503, "1"),
        (errors.ClosedStoreError("x"), 503, "1"),
        (rf.SchemaMismatchError("x"), 422, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_the_store_have_their_status(tmp_path, error, status, retry):
    with client(tmp_path) as c:
        c.store.fail = error
        answer = post(c, stream(batch("a")))
        check(answer, status, error.code)
        assert answer.headers.get("retry-after") == retry


def test_a_fault_is_500_and_tells_nothing_of_the_inside(tmp_path):
    with client(tmp_path) as c:
        c.store.fail = KeyError("a-secret-of-the-server")
        answer = post(c, stream(batch("a")))
        check(answer, 500, "RF-H012")
        assert "a-secret" not in answer.text


def test_a_fault_in_another_route_is_a_problem_as_well(tmp_path):
    class Broken(MemoryStore):
        def status(self):
            if self.rows:
                raise KeyError("a-secret-of-the-server")
            return super().status()

    with client(tmp_path, Broken()) as c:
        post(c, stream(batch("a")))
        answer = c.get("/v1/status")
        check(answer, 500, "RF-H012")
        assert "a-secret" not in answer.text


def test_an_expired_cursor_names_the_oldest(tmp_path):
    class Expired(MemoryStore):
        def read(self, after, **_):
            raise errors.CursorExpiredError("the cursor has expired", oldest="abc")

    with client(tmp_path, Expired()) as c:
        problem = check(c.get("/v1/samples?after=x"), 410, "RF-H106")
        assert problem["oldest"] == "abc"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "RF-H004"),
        ("GET", "/v1/samples/", 404, "RF-H004"),
        ("GET", "/problems/RF-X999", 404, "RF-H004"),
        ("PUT", "/v1/samples", 405, "RF-H005"),
        ("HEAD", "/v1/samples", 405, "RF-H005"),
        ("DELETE", "/v1/status", 405, "RF-H005"),
        ("GET", "/v1/samples?rank=1", 400, "RF-H001"),
        ("GET", "/v1/samples?rank=-1", 400, "RF-H001"),
        ("GET", "/v1/samples?rank=x", 400, "RF-H001"),
        ("GET", "/v1/samples?rank=0&rank=0", 400, "RF-H001"),
        ("GET", "/v1/samples?world_size=0", 400, "RF-H001"),
        ("GET", "/v1/samples?wait=-1", 400, "RF-H001"),
        ("GET", "/v1/samples?wait=nan", 400, "RF-H001"),
        ("GET", "/v1/samples?wait=1e3", 400, "RF-H001"),
        ("GET", "/v1/samples?max_bytes=0", 400, "RF-H001"),
        ("GET", "/v1/samples?max_bytes=99999999999999999999", 400, "RF-H001"),
        ("GET", "/v1/samples?min_policy_version=a", 400, "RF-H001"),
        ("GET", "/v1/samples?color=blue", 400, "RF-H001"),
        ("GET", "/v1/samples?after=%FF", 400, "RF-H001"),
        ("GET", "/v1/samples?after=" + "a" * 600, 400, "RF-H001"),
        ("GET", "/v1/samples?after=abc", 400, "RF-H105"),
        ("POST", "/v1/samples?source=vllm", 400, "RF-H001"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_requests_are_refused(tmp_path, method, path, status, code):
    with client(tmp_path) as c:
        post(c, stream(batch("a")))
        headers = {"content-type": ARROW}
        answer = c.request(method, path, headers=headers)
        if method == "HEAD":
            assert answer.status_code == status
            return
        check(answer, status, code)
        if status == 405:
            assert answer.headers["allow"]


@pytest.mark.parametrize(
    ("content_type", "coding", "status"),
    [
        ("text/plain", None, 415), ("", None, 415), (ARROW, "gzip", 415),
        (ARROW, "zstd, zstd", 415), ("application/octet-stream", None, 415),
        (ARROW + "; charset=utf-8", None, 201), (ARROW.upper(), "identity", 201),
    ],
)  # fmt: skip
def test_media_types_and_codings(tmp_path, content_type, coding, status):
    with client(tmp_path) as c:
        headers = {} if coding is None else {"content-encoding": coding}
        answer = post(c, stream(batch("a")), content_type=content_type, **headers)
        assert answer.status_code == status
        if status == 415:
            check(answer, 415, "RF-H009")
            named = "accept-post" if coding is None else "accept-encoding"
            assert answer.headers[named]


@pytest.mark.parametrize(
    ("accept", "status"),
    [("*/*", 200), ("application/*", 200), (ARROW, 200), ("text/html", 406),
     (ARROW + ";q=0, */*", 406), ("text/html, */*;q=0.1", 200)],
)  # fmt: skip
def test_accept(tmp_path, accept, status):
    with client(tmp_path) as c:
        post(c, stream(batch("a")))
        answer = c.get("/v1/samples", headers={"accept": accept})
        assert answer.status_code == status
        if status == 406:
            check(answer, 406, "RF-H006")


@pytest.mark.parametrize("key", ["", '""', "x" * 256, "\xe9", "a\tb"])
def test_malformed_idempotency_keys(tmp_path, key):
    with client(tmp_path) as c:
        headers = {"idempotency-key": key.encode("latin-1")}
        check(post(c, stream(batch("a")), **headers), 400, "RF-H001")


@pytest.mark.parametrize("key", ["abc", '"abc"', "a" * 255])
def test_idempotency_keys_reach_the_store(tmp_path, key):
    class Listening(MemoryStore):
        def append(self, request):
            self.last = request
            return super().append(request)

    with client(tmp_path, Listening()) as c:
        assert post(c, stream(batch("a")), idempotency_key=key).status_code == 201
        assert c.store.last.idempotency_key == key.strip('"')


def test_an_invalid_record_is_named(tmp_path):
    with client(tmp_path) as c:
        rows = batch("c", "d").to_pylist()
        rows[1]["input_ids"] = [7, 7, 100]
        record = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
        problem = check(post(c, stream(batch("a"), record)), 422, "RF-I007")
        where = problem["errors"][0]["where"]
        assert where == {"batch": 1, "row": 1, "column": "input_ids", "position": 2}
        assert c.store.rows == []


@pytest.mark.parametrize("given", ["abc-123", "a.b:c_d", None, "x" * 81, "a b", 'a"b'])
def test_request_ids_are_taken_over_if_they_are_harmless(tmp_path, given):
    with client(tmp_path) as c:
        headers = {} if given is None else {"x-request-id": given}
        got = c.get("/healthz", headers=headers).headers["x-request-id"]
        assert (got == given) == (given in ("abc-123", "a.b:c_d"))
        assert got


def test_problem_types_lead_to_what_they_mean(tmp_path):
    with client(tmp_path) as c:
        problem = c.get("/nowhere").json()
        page = c.get(problem["type"])
        assert page.status_code == 200
        assert page.json()["rule"] == CODES["RF-H004"].rule
        assert c.get("/problems/RF-I007").json()["rule"]


def test_while_the_store_opens_only_probes_answer(tmp_path):
    opening = threading.Event()

    def open_store():
        opening.wait(20)
        return MemoryStore()

    app = create_app(settings(tmp_path), open_store)
    with TestClient(app, base_url="http://localhost") as c:
        assert c.get("/healthz").status_code == 200
        assert c.get("/readyz").status_code == 503
        assert c.get("/v1/status").json()["store"] is None
        for answer in (post(c, stream(batch("a"))), c.get("/v1/samples")):
            assert check(answer, 503, "RF-H015")
            assert answer.headers["retry-after"] == "1"
        opening.set()
        wait_until(lambda: app.context.is_open)
        assert c.get("/readyz").status_code == 200
        assert post(c, stream(batch("a"))).status_code == 201


def test_a_store_that_cannot_be_opened_is_reported(tmp_path):
    def open_store():
        raise errors.StoreBusyError("another server has the directory")

    failures = []
    app = create_app(settings(tmp_path), open_store, on_failure=failures.append)
    with TestClient(app, base_url="http://localhost") as c:
        wait_until(lambda: failures)
        assert isinstance(failures[0], errors.StoreBusyError)
        assert c.get("/readyz").status_code == 503
        assert c.get("/healthz").status_code == 200


def test_a_problem_quotes_only_the_begin_of_what_is_long(tmp_path):
    name = "x" * 100_000
    with client(tmp_path) as c:
        answer = post(c, stream(batch(name), batch(name)))
    assert answer.status_code == 422
    assert len(answer.content) < 6_000
    assert name[:500] in answer.text


def test_a_refused_request_leaves_nothing_behind(tmp_path):
    """A traceback would hold the body until the collector comes by."""
    broken = bytearray(stream(batch("a", tokens=100_000)))
    broken[len(broken) // 2] ^= 1
    with client(tmp_path) as c:
        post(c, stream(batch("first")))
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(3):
                assert post(c, bytes(broken)).status_code == 400
            bodies = tracemalloc.take_snapshot().filter_traces(
                [
                    tracemalloc.Filter(
                        inclusive=True, filename_pattern="*/ragged_server/http/body.py"
                    )
                ]
            )
        finally:
            tracemalloc.stop()
            gc.enable()
    assert sum(trace.size for trace in bodies.traces) < len(broken) // 10
