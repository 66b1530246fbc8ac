"""Engine JSON over HTTP."""

import json

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.http_server import SCHEMA, batch, client, post, stream
from support.vllm_rollouts import VOCAB_SIZE, recorded

import ragged_format as rf
from ragged_format.adapters import vllm
from ragged_server.http.ingest import sources

QUERY = f"/v1/samples?source=vllm&vocab_size={VOCAB_SIZE}"


def records(count=6):
    found = [r for r in recorded() if r["http_status"] == 200 and isinstance(r["response"], dict)]
    usable = [r for r in found if r["path"].endswith("generate")]
    return usable[:count]


def lines(some):
    return b"\n".join(json.dumps(record).encode() for record in some)


def send(c, body, content_type="application/x-ndjson", url=QUERY, **headers):
    fields = {"content-type": content_type, **headers}
    return c.post(url, content=body, headers=fields)


def stored(c):
    content = c.get("/v1/samples").content
    return [row for b in rf.read_stream(content) for row in b.to_pylist()]


@pytest.mark.parametrize("form", ["lines", "list", "zstd"])
def test_recorded_responses_are_stored_as_the_adapter_reads_them(tmp_path, form):
    some = records()
    expected = vllm.to_samples(some, vocab_size=VOCAB_SIZE)
    with client(tmp_path) as c:
        if form == "lines":
            answer = send(c, lines(some))
        elif form == "list":
            answer = send(c, json.dumps(some).encode(), "application/json")
        else:
            body = zstandard.compress(lines(some))
            answer = send(c, body, **{"content-encoding": "zstd"})
        assert answer.status_code == 201, answer.text
        data = answer.json()
        assert data["stored"] == expected.num_rows
        assert data["conversion"]["samples"]["stored"] == expected.num_rows
        assert stored(c) == expected.to_pylist()


def test_one_record_is_a_document(tmp_path):
    with client(tmp_path) as c:
        answer = send(c, json.dumps(records(1)[0]).encode(), "application/json")
        assert (answer.status_code, answer.json()["stored"] >= 1) == (201, True)


@pytest.mark.parametrize("empty", [[], None])
def test_a_response_without_choices_is_not_taken_for_one_that_is_stored(tmp_path, empty):
    good, bad = records(2)
    bad = {**bad, "response": {**bad["response"], "choices": empty}}
    with client(tmp_path) as c:
        for some in ([bad], [good, bad]):
            answer = send(c, lines(some))
            assert (answer.status_code, answer.json()["code"]) == (422, "RF-A002")
            assert "choices" in answer.json()["detail"]
        assert c.get("/v1/status").json()["store"]["records"] == 0


def test_later_requests_take_the_schema_of_the_log(tmp_path):
    some = records(4)
    with client(tmp_path) as c:
        assert send(c, lines(some[:2])).status_code == 201
        answer = send(c, lines(some[2:]), url="/v1/samples?source=vllm")
        assert answer.status_code == 201, answer.text


def test_the_vocabulary_must_be_known(tmp_path):
    with client(tmp_path) as c:
        answer = send(c, lines(records(1)), url="/v1/samples?source=vllm")
        assert (answer.status_code, answer.json()["code"]) == (400, "RF-H001")
        assert "vocab_size" in answer.json()["detail"]
    with client(tmp_path, vocab_size=VOCAB_SIZE) as c:
        assert send(c, lines(records(1)), url="/v1/samples?source=vllm").status_code == 201


def test_records_of_another_vocabulary_are_refused(tmp_path):
    with client(tmp_path) as c:
        post(c, stream(batch("a")))
        assert rf.parse_schema(SCHEMA).vocab_size == 100
        answer = send(c, lines(records(1)), url="/v1/samples?source=vllm")
        assert answer.status_code == 422
        assert len(c.store.rows) == 1


def test_error_answers_of_engines_are_422(tmp_path):
    failed = next(r for r in recorded() if r["http_status"] >= 400)
    with client(tmp_path) as c:
        answer = send(c, lines([records(1)[0], failed]))
        assert (answer.status_code, answer.json()["code"]) == (422, "RF-A003")
        assert answer.json()["errors"][0]["where"]["row"] == 1
        assert c.store.rows == []


@pytest.mark.parametrize("url", ["/v1/samples", "/v1/samples?source=", "/v1/samples?source=nobody",
                                 "/v1/samples?source=distillkit"])  # fmt: skip
def test_a_source_that_is_unknown_lists_those_there_are(tmp_path, url):
    with client(tmp_path) as c:
        answer = send(c, lines(records(1)), url=url)
        assert (answer.status_code, answer.json()["code"]) == (400, "RF-H001")
        assert "vllm" in answer.json()["detail"]


def test_sources_are_the_adapters_that_read_json():
    found = sources()
    assert {"vllm", "sglang"} <= set(found)
    assert not {"distillkit", "slime", "prime_rl"} & set(found)


@pytest.mark.parametrize(
    "body",
    [b"", b"\n \n", b"{", b"[]", b"null", b"1", b'"x"', b"[[]]", b"[null]", b"{}",
     b'{"response": 1}', b'{"request": {}, "response": {}}', b"\xff\xfe", b"[" * 10_000,
     b'{"a":' * 5_000, b"NaN", b'{"response": {"choices": [{}]}}', b"1e999",
     b'{"response": {"choices": "x"}}'],
    ids=lambda body: body[:24].decode("latin-1"),
)  # fmt: skip
@pytest.mark.parametrize("content_type", ["application/json", "application/x-ndjson"])
def test_other_json_is_refused(tmp_path, body, content_type):
    with client(tmp_path) as c:
        answer = send(c, body, content_type)
        assert answer.status_code in (400, 422), answer.text
        assert c.store.rows == []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with client(tmp_path_factory.mktemp("live")) as c:
        yield c


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=5),
    st.just([]), st.just({}), st.lists(st.integers(-5, 5), max_size=3),
    st.lists(st.lists(st.integers(-5, 60000), max_size=3), max_size=3),
)  # fmt: skip


@given(data=st.data(), source=st.sampled_from(sources()))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_records_are_refused_or_stored_but_no_fault(server, data, source):
    """Any value anywhere in a record."""
    record = json.loads(json.dumps(records(1)[0]))
    for _ in range(data.draw(st.integers(1, 3))):
        place = record
        while isinstance(place, dict | list) and place:
            keys = sorted(place) if isinstance(place, dict) else list(range(min(len(place), 4)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
                place[key] = data.draw(VALUES)
                break
            place = place[key]
    url = f"/v1/samples?source={source}&vocab_size={VOCAB_SIZE}"
    try:
        body = json.dumps(record).encode()
    except UnicodeEncodeError:
        return
    answer = send(server, body, url=url)
    assert answer.status_code in (200, 201, 400, 409, 413, 422), (record, answer.text)
