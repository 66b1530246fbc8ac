"""Pushing: what is sent, how it is cut, what is retried, what is reported."""

import asyncio
import io
import time

import numpy as np
import pyarrow as pa
import pytest
from support.containers import equal, small_batch, small_schema, stream_bytes, three_batches
from support.fake_server import fake_server

import ragged_format as rf
from ragged_format.ragged import concat
from ragged_server.client import AsyncClient, Client, RefusedError, Retries, UnreachableError
from ragged_server.client._batches import (
    Batches,
    encode,
    opened_batches,
    parcels,
    record_bytes,
)
from ragged_server.store.errors import ConflictError, CursorExpiredError

QUICK = Retries(for_s=5, first_s=0.001, most_s=0.005)


@pytest.fixture
def server():
    with fake_server() as server:
        yield server


@pytest.fixture(params=["blocking", "async"])
def push(request, server):
    """Push to the server, by either client."""

    def run(source, url=None, retries=QUICK, zstd_level=None, key=None, **options):
        made = {"retries": retries, "zstd_level": zstd_level, "key": key}
        if request.param == "blocking":
            with Client(url or server.url, **made) as client:
                return client.push(source, **options)

        async def go():
            async with AsyncClient(url or server.url, **made) as client:
                return await client.push(source, **options)

        return asyncio.run(go())

    return run


def problem_of(error, code):
    return {"code": code, "errors": [{"error": error, "code": code, "what": "no", "where": {}}]}


def stored(server):
    return concat(server.batches)


def test_batches_arrive_whole_and_are_counted(server, push):
    seen = []
    pushed = push(three_batches(), progress=seen.append)
    assert (pushed.records, pushed.stored, pushed.duplicates, pushed.requests) == (9, 9, 0, 1)
    assert pushed.cursor == "9"
    assert pushed.bytes == len(server.requests[0][4])
    assert seen == [pushed]
    assert equal([stored(server)], [concat(three_batches())])
    again = push(three_batches())
    assert (again.stored, again.duplicates) == (0, 9)


def test_headers(server, push):
    push(three_batches()[0], zstd_level=3, key="secret")
    method, path, params, headers, body = server.requests[0]
    assert (method, path, params) == ("POST", "/v1/samples", {})
    assert headers["content-type"] == "application/vnd.apache.arrow.stream"
    assert headers["content-encoding"] == "zstd"
    assert headers["authorization"] == "Bearer secret"
    assert len(headers["idempotency-key"]) == 32
    assert body.startswith(b"\x28\xb5\x2f\xfd")


def test_the_key_of_the_environment(server, push, monkeypatch):
    monkeypatch.setenv("RAGGED_API_KEY", "from outside")
    push(three_batches()[0])
    assert server.requests[0][3]["authorization"] == "Bearer from outside"


def test_every_source(server, push, tmp_path):
    batches = three_batches()
    with rf.Writer(tmp_path / "data", batches[0].schema) as writer:
        writer.write(batches)
    rf.write_stream(tmp_path / "stream", batches)
    sources = [
        tmp_path / "data", str(tmp_path / "stream"), io.BytesIO(stream_bytes(batches)),
        rf.Dataset(tmp_path / "data"), iter(batches), rf.Dataset(tmp_path / "data").take(range(9)),
    ]  # fmt: skip
    for source in sources:
        assert push(source).records == 9
    assert len(server.batches) == 9


def test_streams_are_forwarded_as_they_come(server, push):
    assert push(iter(three_batches())).requests == 3
    assert push(three_batches()).requests == 1


def test_nothing_to_push(server, push):
    assert push([]).records == 0
    assert push(small_batch(())).requests == 0
    with pytest.raises(rf.SchemaMismatchError, match="cannot be pushed"):
        push(7)


@pytest.mark.parametrize("kind", [list, iter])
def test_paths_in_a_list_are_refused(push, kind):
    with pytest.raises(rf.SchemaMismatchError, match="one by one"):
        push(kind(["samples"]))


@pytest.mark.parametrize("name", ["max_records", "max_bytes", "in_flight"])
def test_limits_are_checked(push, name):
    with pytest.raises(rf.LimitExceededError, match=name):
        push([], **{name: 0})


def test_requests_are_bounded(server, push):
    batch = concat([small_batch(range(40), seed=n, prefix=f"x{n}-") for n in range(3)])
    pushed = push(batch, max_records=25, max_bytes=4000)
    assert pushed.stored == 120
    for *_, body in server.requests:
        records = sum(b.num_rows for b in rf.read_stream(body))
        assert records <= 25
        assert len(body) < 4000 + 4500 or records == 1  # besides schema, trailer and padding


@pytest.mark.parametrize("max_bytes", [1, 700, 3000, 1 << 30])
@pytest.mark.parametrize("max_records", [1, 7, 1000])
@pytest.mark.parametrize("joins", [True, False], ids=["joined", "apart"])
def test_parcels_keep_order_and_bounds(max_bytes, max_records, joins):
    lengths = np.random.default_rng(1).integers(0, 60, 50)
    batches = [small_batch(lengths[i : i + 9], seed=i, prefix=f"b{i}-") for i in range(0, 50, 9)]
    out = [
        parcel.batch
        for parcel in parcels(
            Batches(batches, joins), replicas=1, max_records=max_records, max_bytes=max_bytes
        )
    ]
    assert equal([concat(out)], [concat(batches)])
    for batch in out:
        assert batch.num_rows <= max_records
        assert batch.num_rows == 1 or record_bytes(batch).sum() <= max_bytes


def test_sizes_of_records_are_those_of_their_stream():
    batch = small_batch(range(1, 30))
    sizes = [len(encode(batch.slice(0, rows), None)) for rows in range(1, 30)]
    # Arrow fills each buffer up to 8 bytes, twice for a list.
    assert np.abs(np.diff(sizes) - record_bytes(batch)[1:]).max() <= 16 * batch.num_columns
    assert sizes[-1] - sizes[0] == pytest.approx(record_bytes(batch)[1:].sum(), rel=0.05)
    assert record_bytes(batch).tolist() == [
        int(record_bytes(batch.slice(row, 1))[0]) for row in range(batch.num_rows)
    ]


def test_order_is_kept_one_at_a_time(server, push):
    server.delay_s = 0.002
    push(iter([small_batch((4,), prefix=f"n{i}-") for i in range(8)]), in_flight=1)
    assert list(server.ids) == [f"n{i}--0" for i in range(8)]
    assert server.most_active == 1


def test_several_requests_are_under_way(server, push):
    server.delay_s = 0.05
    push(iter([small_batch((4,), prefix=f"n{i}-") for i in range(12)]), in_flight=3)
    assert 2 <= server.most_active <= 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_busy_servers_are_asked_again(server, push, status):
    server.faults = [(status, {"Retry_After": 0}, {}), (status, {}, {"title": "busy"})]
    pushed = push(three_batches()[0])
    assert (pushed.stored, pushed.retries) == (3, 2)
    keys = {headers["idempotency-key"] for _, _, _, headers, _ in server.requests}
    assert len(keys) == 1


def test_retry_after_is_honoured(server, push):
    server.faults = [(503, {"Retry_After": "1"}, {})]
    since = time.monotonic()
    assert push(three_batches()[0]).stored == 3
    assert time.monotonic() - since >= 1


@pytest.mark.parametrize("fault", ["cut", "drop"])
def test_a_request_whose_answer_was_lost_is_sent_again(server, push, fault):
    server.faults = [fault]
    pushed = push(three_batches()[0])
    assert (pushed.stored, pushed.duplicates, pushed.retries) == (0, 3, 1)
    assert len(server.batches) == 3


def test_a_key_that_is_still_running_is_asked_for_again(server, push):
    """A connection that broke leaves its request running at the server."""
    server.faults = [(409, {}, problem_of("IdempotencyBusyError", "RF-H104"))]
    assert push(three_batches()[0]).retries == 1


REFUSALS = [400, 401, 403, 404, 409, 413, 415, 422, 500, 501, 507]


@pytest.mark.parametrize("status", REFUSALS)
def test_refusals_are_final(server, push, status):
    server.faults = [(status, {}, {"title": "no", "detail": "because"})]
    with pytest.raises(RefusedError, match=f"{status} because"):
        push(three_batches()[0])
    assert len(server.requests) == 1


def test_a_problem_becomes_the_exception_of_its_code(server, push):
    said = {
        "error": "ConflictError", "code": "RF-H101", "what": "the sample has other content",
        "expected": "the same", "got": "sample 'a'", "remedy": "use new ids",
        "where": {"batch": 0, "row": 1, "column": "sample_id"},
    }  # fmt: skip
    problem = {"code": "RF-H101", "title": "conflict", "errors": [said], "request_id": "r"}
    server.faults = [(409, {}, problem)]
    with pytest.raises(ConflictError, match="RF-H101") as caught:
        push(three_batches()[0])
    error = caught.value
    assert (error.got, error.remedy) == ("sample 'a'", "use new ids")
    assert (error.where.row, error.where.file) == (1, f"{server.url}/v1/samples")


def test_other_servers_are_named(server, push):
    server.faults = [(404, {}, ["not", "a", "problem"])]
    with pytest.raises(RefusedError, match="RF-H202") as caught:
        push(three_batches()[0])
    assert "404" in caught.value.got


def test_an_error_ends_the_retries_of_other_requests(server, push):
    busy = (503, {}, problem_of("QueueFullError", "RF-H110"))
    server.faults = [busy, (409, {}, problem_of("ConflictError", "RF-H101")), *[busy] * 1000]
    since = time.monotonic()
    with pytest.raises(ConflictError):
        push(iter(three_batches()), in_flight=2, retries=Retries(for_s=60, first_s=1))
    assert time.monotonic() - since < 20


def test_a_push_that_is_cancelled(server):
    server.delay_s = 0.3

    async def go():
        async with AsyncClient(server.url, retries=QUICK) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.push(iter(three_batches() * 4)), 0.1)
            server.delay_s = 0
            return await client.push(three_batches())

    assert asyncio.run(go()).records == 9


def test_it_gives_up(server, push):
    server.faults = [(503, {}, problem_of("QueueFullError", "RF-H110"))] * 1000
    with pytest.raises(rf.RaggedError, match="RF-H110"):
        push(three_batches()[0], retries=Retries(for_s=0.1, first_s=0.01))
    assert 1 < len(server.requests) < 60


def test_nobody_answers(push):
    with pytest.raises(UnreachableError, match="RF-H201") as caught:
        push(three_batches()[0], url="http://127.0.0.1:9", retries=Retries(for_s=0))
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize(("quiet_s", "warnings"), [(0.0, 1), (60.0, 0)])
def test_a_server_that_stays_away_is_a_warning(push, monkeypatch, caplog, quiet_s, warnings):
    monkeypatch.setattr("ragged_server.client._retry._QUIET_S", quiet_s)
    with pytest.raises(UnreachableError):
        push(
            three_batches()[0], url="http://127.0.0.1:9", in_flight=1,
            retries=Retries(for_s=0.3, first_s=0.01),
        )  # fmt: skip
    told = [r for r in caplog.records if r.name == "ragged_server.client"]
    assert len(told) == warnings
    assert all("trying again" in record.getMessage() for record in told)


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://", ""])
def test_not_a_url(url):
    with pytest.raises(rf.UnsupportedFeatureError, match="URL of a server"):
        Client(url)
    with pytest.raises(rf.LimitExceededError):
        Client([])


def test_replicas_get_each_record_at_one_place(push):
    with fake_server() as one, fake_server() as two:
        urls = [one.url, two.url + "/v1/samples"]
        batch = small_batch([3] * 60)
        pushed = push(batch, url=urls, max_records=7, in_flight=1)
        assert pushed.stored == 60
        assert pushed.cursor == f"{len(one.batches)}~{len(two.batches)}"
        assert len(one.batches) > 10
        assert len(two.batches) > 10
        again = push(rf.take(batch, list(range(59, -1, -1))), url=urls)
        assert again.duplicates == 60
        assert not set(one.ids) & set(two.ids)


def test_only_samples_are_dealt():
    other = pa.RecordBatch.from_pylist([{"a": 1}])
    with (
        Client(["http://127.0.0.1:9", "http://127.0.0.1:9"]) as client,
        pytest.raises(rf.SchemaMismatchError, match="without sample_id"),
    ):
        client.push(other)


def test_a_failing_source_is_an_error_of_its_own(server, push):
    def batches():
        yield three_batches()[0]
        raise rf.TruncatedError("the source ends early")

    with pytest.raises(rf.TruncatedError, match="ends early"):
        push(batches())


def test_pauses_grow_within_bounds():
    retries = Retries(first_s=1, most_s=8, most_retry_after_s=60)
    assert [retries.pause_s(n, None, 0.0) for n in range(5)] == [1, 2, 4, 8, 8]
    assert [retries.pause_s(n, None, 0.999) for n in range(5)] == pytest.approx(
        [0.5, 1, 2, 4, 4], rel=0.01
    )
    assert retries.pause_s(0, 30, 0.0) == 30
    assert 30 < retries.pause_s(0, 30, 0.5) < 31
    assert retries.pause_s(0, 3600, 0.0) == 60


def test_an_expired_cursor_carries_the_oldest(server):
    server.schema = small_schema()
    server.faults = [(410, {}, {**problem_of("CursorExpiredError", "RF-H106"), "oldest": "77"})]
    with Client(server.url, retries=QUICK) as client:
        with pytest.raises(CursorExpiredError) as caught:
            client.read("1")
        assert caught.value.oldest == "77"
        assert client.status() == {"records": 7}


def test_opened_batches_takes_arrow_streams():
    duck = pytest.importorskip("duckdb")
    relation = duck.connect().sql("select 1 as a")
    assert sum(b.num_rows for b in opened_batches(relation).parts) == 1
