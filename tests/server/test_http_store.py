"""The HTTP side with the real store behind it."""

import contextlib

import pyarrow as pa
import pytest
from support.http_server import batch, client, post, settings, stream

import ragged_format as rf
from ragged_server.process.opening import opener

SCHEMA = rf.sample_schema(vocab_size=100, columns=["group_id", "policy_version"])


@contextlib.contextmanager
def serving(tmp_path, **options):
    chosen = settings(tmp_path / "live", **options)
    with client(tmp_path / "live", opener(chosen)(), **options) as c:
        yield c


def versioned(*rows):
    """Records of (sample_id, group_id, policy_version)."""
    names = ("sample_id", "group_id", "policy_version")
    data = [
        dict(zip(names, row, strict=True), input_ids=[1, 2], completion_mask=[0, 1]) for row in rows
    ]
    return pa.RecordBatch.from_pylist(data, schema=SCHEMA)


def ids_of(answer):
    assert answer.status_code == 200, answer.text
    return [n for b in rf.read_stream(answer.content) for n in b.column("sample_id").to_pylist()]


def test_a_conflict_names_the_sample_and_stores_nothing(tmp_path):
    with serving(tmp_path) as c:
        assert post(c, stream(batch("a", tokens=3))).status_code == 201
        answer = post(c, stream(batch("b", tokens=3), batch("a", tokens=4)))
        assert (answer.status_code, answer.json()["code"]) == (409, "RF-H101")
        assert "'a'" in answer.text
        assert ids_of(c.get("/v1/samples")) == ["a"]


def test_an_id_twice_in_a_request_is_422(tmp_path):
    with serving(tmp_path) as c:
        answer = post(c, stream(batch("a"), batch("b", "a")))
        assert (answer.status_code, answer.json()["code"]) == (422, "RF-H102")
        assert c.get("/v1/samples").status_code == 204


def test_an_idempotency_key_gives_the_first_answer_again(tmp_path):
    with serving(tmp_path) as c:
        first = post(c, stream(batch("a", "b")), idempotency_key="k1")
        again = post(c, stream(batch("a", "b")), idempotency_key="k1")
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json() == {**first.json(), "replayed": True}
        other = post(c, stream(batch("c")), idempotency_key="k1")
        assert (other.status_code, other.json()["code"]) == (422, "RF-H103")
    with serving(tmp_path) as c:  # remembered on disk
        again = post(c, stream(batch("a", "b")), idempotency_key="k1")
        assert again.json() == {**first.json(), "replayed": True}


def test_other_columns_than_those_of_the_log_are_422(tmp_path):
    with serving(tmp_path) as c:
        post(c, stream(batch("a")))
        answer = post(c, stream(versioned(("b", "g", 1))))
        assert (answer.status_code, answer.json()["code"]) == (422, "RF-S010")


def test_the_schema_can_be_given(tmp_path):
    sample = tmp_path / "one.arrows"
    rf.write_stream(sample, [batch("x")])
    with serving(tmp_path, schema_file=sample) as c:
        assert ids_of(c.get("/v1/samples")) == []
        assert post(c, stream(versioned(("a", "g", 1)))).status_code == 422
        assert post(c, stream(batch("a"))).status_code == 201


def test_shares_are_disjoint_whole_groups_and_all_records(tmp_path):
    rows = [(f"s{n}", f"g{n // 4}", n) for n in range(80)]
    with serving(tmp_path) as c:
        post(c, stream(versioned(*rows)))
        shares = [ids_of(c.get(f"/v1/samples?rank={rank}&world_size=3")) for rank in range(3)]
        assert sorted([*shares[0], *shares[1], *shares[2]]) == sorted(row[0] for row in rows)
        groups = [{int(name[1:]) // 4 for name in share} for share in shares]
        assert not groups[0] & groups[1] | groups[0] & groups[2] | groups[1] & groups[2]


def test_older_policy_versions_are_left_out(tmp_path):
    with serving(tmp_path) as c:
        end = post(c, stream(versioned(("a", "g", 1), ("b", "g", 5), ("c", "g", None)))).json()
        answer = c.get("/v1/samples?min_policy_version=3")
        assert ids_of(answer) == ["b", "c"]
        assert answer.headers["ragged-cursor"] == end["cursor"]


def test_pages_of_any_size_give_every_record_once(tmp_path):
    names = [f"s{n}" for n in range(50)]
    with serving(tmp_path) as c:
        for at in range(0, 50, 10):
            post(c, stream(batch(*names[at : at + 10])))
        for size in (1, 1000, 5000):
            got, cursor = [], ""
            while len(got) < 50:
                answer = c.get("/v1/samples", params={"after": cursor, "max_bytes": size})
                got += ids_of(answer)
                cursor = answer.headers["ragged-cursor"]
            assert got == names


def test_a_cursor_of_another_log_is_refused(tmp_path):
    with serving(tmp_path / "one") as c:
        cursor = post(c, stream(batch("a"))).json()["cursor"]
    with serving(tmp_path / "two") as c:
        post(c, stream(batch("a")))
        answer = c.get("/v1/samples", params={"after": cursor})
        assert (answer.status_code, answer.json()["code"]) == (400, "RF-H105")


def test_a_quota_is_429_with_the_time_of_its_renewal(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGGED_KEYS", "me:admin:a-secret-of-some-length")
    headers = {"authorization": "Bearer a-secret-of-some-length"}
    with serving(tmp_path, quota_records=2) as c:
        assert post(c, stream(batch("a", "b")), **headers).status_code == 201
        answer = post(c, stream(batch("c")), **headers)
        assert (answer.status_code, answer.json()["code"]) == (429, "RF-H109")
        assert 1 <= int(answer.headers["retry-after"]) <= 86400
        assert post(c, stream(batch("a", "b")), **headers).status_code == 200


def test_status_and_metrics_agree_with_what_was_stored(tmp_path):
    with serving(tmp_path) as c:
        post(c, stream(batch("a", "b")))
        post(c, stream(batch("b")))
        status = c.get("/v1/status").json()
        assert (status["store"]["records"], status["store"]["duplicates"]) == (2, 1)
        assert status["server"]["not_ready"] is None
        assert status["limits"]["max_request_bytes"] == 64 << 20
        assert status["limits"]["header_timeout_s"] == 10
        assert status["limits"]["body_timeout_s"] == 600
        lines = c.get("/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert float(values["ragged_log_records"]) == 2
        assert float(values["ragged_duplicate_records_total"]) == 1
        assert float(values["ragged_ready"]) == 1
        assert float(values["ragged_upkeep_failed"]) == 0
        label = '{method="POST",route="/v1/samples",status="201"}'
        assert float(values[f"ragged_http_requests_total{label}"]) == 1


def test_a_failure_of_upkeep_is_in_the_metrics(tmp_path):
    with serving(tmp_path) as c:
        c.context.store._upkeep.stop()
        c.context.store._upkeep.failure = "no space left"
        assert "\nragged_upkeep_failed 1.0\n" in c.get("/metrics").text
        assert c.get("/v1/status").json()["store"]["upkeep_failure"] == "no space left"


@pytest.mark.parametrize("path", ["/v1/samples", "/v1/status", "/metrics"])
def test_paths_of_strangers_make_no_labels(tmp_path, path):
    with serving(tmp_path) as c:
        c.get(f"/{'x' * 50}")
        c.request("BREW", path)
        text = c.get("/metrics").text
        assert "xxx" not in text
        assert "BREW" not in text
