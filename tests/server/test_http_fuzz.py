"""Broken bodies: only documented answers, never a fault, nothing stored, nothing kept."""

import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.http_server import SCHEMA, batch, client, post, stream

import ragged_format as rf
from ragged_format.testing import sample_batches

BODY = stream(batch("a", "b"), batch("c"))
SMALL = stream(
    pa.RecordBatch.from_pylist(
        [{"sample_id": "a", "input_ids": [1], "completion_mask": [0]}],
        schema=rf.sample_schema(vocab_size=100, columns=[]),
    )
)
REFUSED = {400, 413, 422}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = {
        "max_request_bytes": "4MiB", "max_decoded_bytes": "4MiB", "max_json_bytes": "1MiB",
        "max_in_flight_bytes": "16MiB",
    }  # fmt: skip
    with client(tmp_path_factory.mktemp("live"), **options) as c:
        post(c, stream(batch("first")))
        yield c


def refused(server, body, **headers):
    """Check that a body is refused with a problem and leaves nothing behind."""
    before = len(server.store.rows)
    answer = post(server, body, **headers)
    assert answer.status_code in REFUSED, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(server.store.rows) == before
    assert server.context.budget.used == 0


@pytest.mark.parametrize("coding", ["identity", "zstd"])
def test_every_truncation_is_refused(server, coding):
    whole = SMALL if coding == "identity" else zstandard.compress(SMALL)
    for size in range(len(whole)):
        refused(server, whole[:size], content_encoding=coding)


@pytest.mark.parametrize("rest", [b"\0", b"a", BODY, b"\xff\xff\xff\xff\0\0\0\0"],
                         ids=["nul", "letter", "stream", "mark"])  # fmt: skip
@pytest.mark.parametrize("coding", ["identity", "zstd"])
def test_bytes_after_the_end_are_refused(server, rest, coding):
    body = BODY + rest
    refused(server, zstandard.compress(body) if coding == "zstd" else body, content_encoding=coding)


def test_every_flipped_bit_is_refused_or_changes_nothing(server):
    """A flip in padding may leave the content as it is; then it is a duplicate."""
    post(server, BODY)
    before = len(server.store.rows)
    for at in range(0, len(BODY), 7):
        body = bytearray(BODY)
        body[at] ^= 1 << (at % 8)
        answer = post(server, bytes(body))
        assert answer.status_code in REFUSED | {200}, (at, answer.text)
        assert len(server.store.rows) == before


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutations_are_refused_or_stored_but_no_fault(server, data):
    """Pieces replaced, inserted, removed, doubled and moved; in the clear and inside zstd."""
    body = bytearray(BODY)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        size = data.draw(st.sampled_from([0, 1, 4, 8, 64, 500]))
        piece = data.draw(
            st.one_of(
                st.binary(max_size=12),
                st.just(bytes(body[at : at + size])),
                st.sampled_from([b"\xff" * 4, b"\xff" * 8, bytes(8), b"\xff\xff\xff\x7f",
                                 b"\0\0\0\0\0\x20\0\0"]),
            )
        )  # fmt: skip
        if data.draw(st.booleans()):
            body[at : at + size] = piece
        else:
            body[at : at + len(piece)] = piece
    coding = data.draw(st.sampled_from(["identity", "zstd"]))
    sent = bytes(body) if coding == "identity" else zstandard.compress(bytes(body))
    answer = post(server, sent, content_encoding=coding)
    assert answer.status_code in REFUSED | {200, 201}, answer.text
    assert server.context.budget.used == 0


@given(data=st.binary(max_size=300), coding=st.sampled_from(["identity", "zstd"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(server, data, coding):
    refused(server, data, content_encoding=coding)


@given(record=sample_batches())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_valid_samples_of_other_columns_are_422(server, record):
    answer = post(server, stream(record))
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] in ("RF-S010", "RF-S003")


@given(record=sample_batches(min_rows=1))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_valid_samples_of_any_columns_come_back_as_they_were(tmp_path_factory, record):
    with client(tmp_path_factory.mktemp("live")) as c:
        assert post(c, stream(record)).status_code == 201
        got = list(rf.read_stream(c.get("/v1/samples").content))
        assert rf.digest(rf.concat(got)) == rf.digest(record)


@pytest.mark.parametrize("name", ["no-digest", "packed", "dictionary", "no-metadata", "file"])
def test_other_arrow_data_is_refused(server, name):
    sink = pa.BufferOutputStream()
    if name == "no-digest":
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_batch(batch("x"))
    elif name == "packed":
        rf.write_stream(sink, [], rf.packed_schema(vocab_size=100))
    elif name == "dictionary":
        table = pa.table({"a": pa.array(["x", "y"]).dictionary_encode()})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif name == "no-metadata":
        with pa.ipc.new_stream(sink, SCHEMA.remove_metadata()) as writer:
            writer.write_batch(batch("x").replace_schema_metadata({}))
    else:
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_batch(batch("x"))
    refused(server, sink.getvalue().to_pybytes())
