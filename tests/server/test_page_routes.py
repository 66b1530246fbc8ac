"""The page's files and JSON."""

import math
import re
import time
from importlib.resources import files

import httpx2
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.containers import small_batch, stream_bytes
from support.http_server import client, post, running

import ragged_format as rf
from ragged_format.testing import fill_batch
from ragged_server.http.browse import SHOWN_ELEMENTS, record_json, summaries
from ragged_server.http.page.routes import _FILES
from ragged_server.http.texts import Texts
from ragged_server.store.records import StoreSettings
from ragged_server.store.store import Store

COLUMNS = (
    "group_id", "policy_version", "reward", "rollout_log_probs", "candidate_counts",
    "candidate_ids", "topk_counts", "topk_ids", "topk_log_probs",
)  # fmt: skip
SCHEMA = rf.sample_schema(vocab_size=1000, columns=COLUMNS)


def records(lengths, seed=0, **options):
    return fill_batch(SCHEMA, np.random.default_rng(seed), lengths, **options)


@pytest.fixture
def page(tmp_path):
    with client(tmp_path / "data") as found:
        yield found


def test_every_file_is_served_and_no_other(page):
    folder = files("ragged_server.http.page")
    there = {
        item.name
        for item in folder.iterdir()
        if item.name.rpartition(".")[2] in ("html", "js", "css", "svg")
    }
    assert there == set(_FILES)
    for name in _FILES:
        answer = page.get("/" if name == "index.html" else f"/page/{name}")
        assert answer.status_code == 200
        assert answer.content == (folder / name).read_bytes()
        assert "charset" in answer.headers["content-type"] or name.endswith("svg")
        again = page.get(answer.request.url, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for name in ("routes.py", "__init__.py", "..%2fapp.py", "none.js", "%00"):
        answer = page.get(f"/page/{name}")
        assert answer.status_code == 404
        assert answer.json()["code"] == "RF-H004"


def test_the_page_brings_nothing_from_elsewhere(page):
    answer = page.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    for name in _FILES:
        text = (files("ragged_server.http.page") / name).read_text()
        assert not re.search(r"(?:src|href|url\(|from|import)\W{1,3}(?:https?:)?//", text), name
        assert not re.search(r"\bon[a-z]+=\"|style=\"|<style|innerHTML|\beval\(", text), name


def test_list_of_records(page):
    assert page.get("/v1/browse").json() == {
        "oldest": 0, "next": 0, "records": [], "has_texts": False,
    }  # fmt: skip
    batch = records([4] * 30)
    assert post(page, stream_bytes([batch])).status_code == 201
    everything = summaries(batch, 0)
    last = page.get("/v1/browse").json()
    assert (last["oldest"], last["next"]) == (0, 30)
    assert last["records"] == everything[5:]
    assert page.get("/v1/browse?sequence=3&count=2").json()["records"] == everything[3:5]
    assert page.get("/v1/browse?sequence=28&count=9").json()["records"] == everything[28:]
    assert page.get("/v1/browse?sequence=30").json()["records"] == []
    assert page.get(f"/v1/browse?sequence={2**63 - 1}").json()["records"] == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/browse?sequence=-1", "/v1/browse?count=0", "/v1/browse?count=101",
        "/v1/browse?sequence=x", "/v1/browse?sequence=9223372036854775808", "/v1/browse/x",
        "/v1/browse/-1", "/v1/browse/0?start=-1", "/v1/browse/0?count=1025", "/v1/shards?count=0",
        "/v1/browse?limit=1", "/v1/browse?count=1&count=2", "/v1/browse/0?x", "/v1/shards?a=1",
        "/v1/status?x=1", "/metrics?a=", "/healthz?q=1", "/readyz?q=1", "/version?q=1",
        "/openapi.json?q=1",
        "/problems/RF-H001?q=1",
    ],
)  # fmt: skip
def test_parameters_are_bounded(page, path):
    answer = page.get(path)
    assert answer.status_code == 400
    assert answer.json()["code"] == "RF-H001"


def test_long_text_is_cut(page):
    """Ids may be as long as a request, and a list has a hundred records."""
    batch = records([4] * 3)
    name = "n" * 100_000
    at = batch.schema.get_field_index("sample_id")
    long = batch.set_column(at, batch.schema.field(at), pa.array([name, f"a{name}", f"b{name}"]))
    assert post(page, stream_bytes([long])).status_code == 201
    listed = page.get("/v1/browse")
    assert len(listed.content) < 10_000
    assert listed.json()["records"][0]["sample_id"].startswith("nnn")
    assert len(page.get("/v1/browse/1").content) < 10_000


def test_a_record_that_is_not_there(page):
    assert page.get("/v1/browse/0").status_code == 404
    post(page, stream_bytes([records([3])]))
    assert page.get("/v1/browse/0").status_code == 200
    answer = page.get("/v1/browse/1")
    assert answer.json()["errors"][0]["expected"] == "0 <= sequence < 1"


def test_one_record_among_many(page):
    batch = records(range(20))
    post(page, stream_bytes([batch]))
    for row in range(20):
        found = page.get(f"/v1/browse/{row}").json()
        assert found["record"]["sample_id"] == batch.column("sample_id")[row].as_py()
        assert found["ids"] == batch.column("input_ids")[row].as_py()


def same(left, right):
    if isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif isinstance(left, float):
        assert math.isclose(left, right, rel_tol=1e-6) or (math.isnan(left) and math.isnan(right))
    else:
        assert left == right


@given(
    seed=st.integers(0, 2**32 - 1), length=st.integers(0, 60), start=st.integers(0, 70),
    count=st.integers(1, 70), width=st.sampled_from([3, SHOWN_ELEMENTS * 2]),
)  # fmt: skip
def test_a_window_has_the_values_of_the_record(seed, length, start, count, width):
    batch = records([length], seed, max_width=width)
    row = batch.to_pylist()[0]
    found = record_json(batch, 5, start=start, count=count, texts=Texts(None))
    mask = row["completion_mask"]
    end = min(start + count, length)
    first, last = sum(mask[:start]), sum(mask[:end])
    assert found["ids"] == row["input_ids"][start:end]
    assert found["scored"] == mask[start:end]
    assert found["first_target"] == first
    same(found["targets"]["rollout_log_probs"], row["rollout_log_probs"][first:last])
    for axis, counts, columns in (
        ("candidate", "candidate_counts", ["candidate_ids"]),
        ("topk", "topk_counts", ["topk_ids", "topk_log_probs"]),
    ):
        offsets = np.concatenate(([0], np.cumsum(row[counts]))).astype(int)
        assert found["axes"][axis]["counts"] == row[counts][first:last]
        assert list(found["axes"][axis]["columns"]) == columns
        for name in columns:
            lists = [
                row[name][offsets[t] : offsets[t + 1]][:SHOWN_ELEMENTS] for t in range(first, last)
            ]
            same(found["axes"][axis]["columns"][name], lists)
    assert found["lengths"]["token"] == length
    assert found["lengths"]["candidate"] == len(row["candidate_ids"])
    assert "candidate_counts" not in found["targets"]


def test_a_window_begins_where_tokens_are_scored():
    row = {"sample_id": "a", "input_ids": [1] * 900, "completion_mask": [0] * 900}
    schema = rf.sample_schema(vocab_size=10, columns=[])
    starts = []
    for scored in (None, 5, 127, 128, 899):
        if scored is not None:
            row["completion_mask"] = [int(n == scored) for n in range(900)]
        batch = pa.RecordBatch.from_pylist([row], schema=schema)
        found = record_json(batch, 0, start=None, count=256, texts=Texts(None))
        starts.append(found["start"])
    assert starts == [0, 0, 0, 96, 867]


def test_every_standard_column_can_be_shown(page):
    schema = rf.sample_schema(vocab_size=1000)
    batch = fill_batch(schema, np.random.default_rng(3), [40])
    post(page, stream_bytes([batch]))
    found = page.get("/v1/browse/0").json()
    scalars = {c.name for c in rf.parse_schema(schema) if c.axis == "record"}
    assert set(found["record"]) == scalars
    assert set(found["axes"]) == {"candidate", "topk", "teacher_topk"}


def test_sealed_shards_are_listed(tmp_path):
    store = Store(tmp_path / "live", StoreSettings(segment_records=1))
    store.open()
    with running(tmp_path / "live", store) as server, rf_client(server) as http:
        assert http.get("/v1/shards").json() == {"total": 0, "generation": None, "shards": []}
        for number in range(3):
            body = stream_bytes([small_batch((4,), prefix=f"b{number}-")])
            http.post(
                "/v1/samples",
                content=body,
                headers={"content-type": "application/vnd.apache.arrow.stream"},
            )
            until(lambda number=number: http.get("/v1/shards").json()["total"] > number)
        found = http.get("/v1/shards?count=2").json()
        assert found["total"] == 3
        assert [shard["first_sequence"] for shard in found["shards"]] == [2, 1]
        assert all(0 <= shard["age_s"] < 60 and shard["rows"] == 1 for shard in found["shards"])
        assert http.get("/v1/browse?sequence=0").json()["records"][2]["sample_id"] == "b2--0"


def rf_client(server):
    return httpx2.Client(base_url=server.url, trust_env=False)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_keys_guard_the_json_and_not_the_page(tmp_path, monkeypatch):
    secrets = {"read": "a-secret-for-readers", "ingest": "a-secret-for-workers"}
    monkeypatch.setenv(
        "RAGGED_KEYS", " ".join(f"{s}:{s}:{secret}" for s, secret in secrets.items())
    )
    with client(tmp_path / "data") as page:
        assert page.get("/").status_code == 200
        assert page.get("/page/app.js").status_code == 200
        for path in ("/v1/browse", "/v1/browse/0", "/v1/shards"):
            assert page.get(path).status_code == 401
            bearer = {"authorization": f"Bearer {secrets['ingest']}"}
            assert page.get(path, headers=bearer).status_code == 403
            bearer = {"authorization": f"Bearer {secrets['read']}"}
            assert page.get(path, headers=bearer).status_code in (200, 404)


@pytest.fixture
def tokenizer(tmp_path):
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"one": 1, "two": 2, "[UNK]": 0}, "[UNK]"))
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_texts_of_tokens(tmp_path, tokenizer):
    row = {"sample_id": "a", "input_ids": [1, 2, 900], "completion_mask": [0, 0, 1]}
    batch = pa.RecordBatch.from_pylist([row], schema=rf.sample_schema(vocab_size=1000, columns=[]))
    with client(tmp_path / "data", tokenizer=str(tokenizer)) as page:
        post(page, stream_bytes([batch]))
        assert page.get("/v1/browse").json()["has_texts"] is True
        found = page.get("/v1/browse/0").json()
        assert found["texts"] == {"1": "one", "2": "two"}
        assert found["ids"] == [1, 2, 900]


def test_a_tokenizer_that_cannot_be_read(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(rf.RaggedError, match="RF-H016"):
        Texts(tmp_path / "tokenizer.json")
    with (
        pytest.raises(rf.RaggedError, match="RF-H016"),
        client(tmp_path / "data", tokenizer=str(tmp_path / "none.json")),
    ):
        pass


def test_the_json_is_in_the_openapi_document(page):
    paths = page.get("/openapi.json").json()["paths"]
    assert {"/v1/browse", "/v1/browse/{sequence}", "/v1/shards"} <= set(paths)
    assert "/" not in paths
