import pytest
from support.http_server import ARROW, SCHEMA, batch, client, post, stream

import ragged_format as rf


def test_samples_that_were_posted_are_read(tmp_path):
    with client(tmp_path) as c:
        answer = post(c, stream(batch("a", "b"), batch("c")))
        assert answer.status_code == 201
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() | {"cursor": ""} == {
            "first_sequence": 0, "stored": 3, "duplicates": 0, "cursor": "", "replayed": False,
        }  # fmt: skip
        assert answer.headers["ragged-cursor"] == answer.json()["cursor"]
        read = c.get("/v1/samples")
        assert read.status_code == 200
        assert read.headers["content-type"] == ARROW
        ids = [b.column("sample_id").to_pylist() for b in rf.read_stream(read.content)]
        assert ids == [["a"], ["b"], ["c"]]
        assert read.headers["ragged-cursor"] == answer.json()["cursor"]
        assert (read.headers["ragged-records"], read.headers["ragged-lag"]) == ("3", "0")


def test_every_batch_has_the_cursor_after_it(tmp_path):
    with client(tmp_path) as c:
        post(c, stream(batch("a", "b", "c")))
        reader = rf.read_stream(c.get("/v1/samples").content)
        cursors = [reader.metadata[b"ragged_server:cursor"].decode() for _ in reader]
        assert len(set(cursors)) == 3
        rest = c.get("/v1/samples", params={"after": cursors[0]})
        ids = [b.column("sample_id").to_pylist() for b in rf.read_stream(rest.content)]
        assert ids == [["b"], ["c"]]
        assert rest.headers["ragged-cursor"] == cursors[-1]


def test_an_empty_page_is_a_valid_stream(tmp_path):
    with client(tmp_path) as c:
        cursor = post(c, stream(batch("a"))).json()["cursor"]
        read = c.get("/v1/samples", params={"after": cursor})
        reader = rf.read_stream(read.content)
        assert list(reader) == []
        assert reader.trailer.batches == 0
        assert reader.schema.equals(SCHEMA, check_metadata=True)
        assert read.headers["ragged-cursor"] == cursor


def test_a_log_without_schema_has_no_content(tmp_path):
    with client(tmp_path) as c:
        read = c.get("/v1/samples")
        assert (read.status_code, read.content) == (204, b"")
        assert read.headers["ragged-cursor"]


def test_duplicates_are_acknowledged_with_200(tmp_path):
    with client(tmp_path) as c:
        post(c, stream(batch("a")))
        again = post(c, stream(batch("a")))
        assert again.status_code == 200
        assert (again.json()["stored"], again.json()["duplicates"]) == (0, 1)
        both = post(c, stream(batch("a", "b")))
        assert both.status_code == 201
        assert (both.json()["stored"], both.json()["duplicates"]) == (1, 1)


def test_a_stream_without_batches_stores_nothing(tmp_path):
    with client(tmp_path) as c:
        answer = post(c, stream(schema=SCHEMA))
        assert (answer.status_code, answer.json()["stored"]) == (200, 0)


@pytest.mark.parametrize("coding", ["zstd", "identity"])
def test_answers_are_compressed_if_the_client_takes_it(tmp_path, coding):
    with client(tmp_path) as c:
        post(c, stream(batch("a", tokens=500)))
        headers = {"accept-encoding": coding}
        with c.stream("GET", "/v1/samples", headers=headers) as read:
            raw = b"".join(read.iter_raw())
        assert read.headers.get("content-encoding", "identity") == coding
        assert raw.startswith(b"\x28\xb5\x2f\xfd") == (coding == "zstd")
        assert [b.num_rows for b in rf.read_stream(raw)] == [1]
