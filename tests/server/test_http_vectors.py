"""The conformance vectors through HTTP: what is valid comes back, what is not is refused."""

import json
from pathlib import Path

import pytest
from support.http_server import client, post

import ragged_format as rf

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "v0"
STREAMS = sorted(
    path
    for kind in ("valid", "invalid")
    for path in (VECTORS / kind).iterdir()
    if path.name.endswith((".arrows", ".arrows.zst"))
)


def described(path):
    name = path.name.partition(".arrows")[0]
    return json.loads((path.parent / f"{name}.json").read_text())


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_vectors_are_stored_or_refused(tmp_path, path):
    data = path.read_bytes()
    headers = {"content-encoding": "zstd"} if path.name.endswith(".zst") else {}
    facts = described(path)
    with client(tmp_path) as c:
        answer = post(c, data, **headers)
        if path.parent.name == "valid" and facts["profile"] == "sample":
            assert answer.status_code in (200, 201), answer.text
            assert answer.json()["stored"] == sum(len(b["records"]) for b in facts["batches"])
            stored = list(rf.read_stream(c.get("/v1/samples").content))
            wanted = [b for b in rf.read_stream(data) if b.num_rows]
            if wanted:
                assert rf.digest(rf.concat(stored)) == rf.digest(rf.concat(wanted))
        else:
            assert answer.status_code in (400, 413, 422), answer.text
            assert c.store.rows == []
            if path.parent.name == "invalid":
                # Digests are compared first; a limit has the server's code.
                assert answer.json()["code"] in (facts["code"], "RF-C004", "RF-H008")
