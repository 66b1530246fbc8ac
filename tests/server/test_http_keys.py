import hashlib

import pytest
from support.http_server import ARROW, batch, client, post, settings, stream

from ragged_server.http.auth import load_keys
from ragged_server.http.errors import SettingsError
from ragged_server.store.records import Quota

WRITER, READER, ADMIN, OTHER = (
    "secret-of-the-" + name for name in ("writer", "reader", "admin", "other")
)
FILE = f"""
[[keys]]
name = "writer"
secret = "{WRITER}"
scopes = ["ingest"]
max_records = 10
window_s = 60

[[keys]]
name = "reader"
sha256 = "{hashlib.sha256(READER.encode()).hexdigest()}"
scopes = ["read"]

[[keys]]
name = "admin"
secret = "{ADMIN}"
scopes = ["admin"]

[[keys]]
name = "elsewhere"
secret = "{OTHER}"
scopes = ["ingest", "read"]
dataset = "another"
"""


@pytest.fixture
def keyed(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    with client(tmp_path / "live", keys_file=file, base_url="http://server.example") as c:
        yield c


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    ("path", "writer", "reader", "admin"),
    [
        ("/v1/samples", 403, 204, 204),
        ("/v1/status", 403, 200, 200),
        ("/metrics", 403, 200, 200),
        ("/healthz", 200, 200, 200),
        ("/readyz", 200, 200, 200),
        ("/version", 200, 200, 200),
        ("/openapi.json", 200, 200, 200),
    ],
)
def test_scopes_decide_what_a_key_reads(keyed, path, writer, reader, admin):
    got = [keyed.get(path, headers=bearer(key)).status_code for key in (WRITER, READER, ADMIN)]
    assert got == [writer, reader, admin]


def test_scopes_decide_who_writes(keyed):
    body = stream(batch("a"))
    got = {key: post(keyed, body, **bearer(key)).status_code for key in (WRITER, READER, ADMIN)}
    assert got == {WRITER: 201, READER: 403, ADMIN: 200}


@pytest.mark.parametrize("path", ["/v1/samples", "/v1/status", "/metrics"])
@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer wrong", "Bearer secret-of-the-write",
     "Bearer \xe9\xe9\xe9"],
    ids=["absent", "empty", "scheme", "blank", "basic", "unknown", "prefix", "latin"],
)  # fmt: skip
def test_without_a_known_key_there_is_no_answer(keyed, path, value):
    headers = {} if value is None else {"authorization": value.encode("latin-1")}
    answer = keyed.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer ")
    assert answer.json()["code"] == "RF-H002"


def test_a_key_of_another_dataset_is_refused(keyed):
    answer = keyed.get("/v1/samples", headers=bearer(OTHER))
    assert answer.status_code == 403
    assert answer.json()["code"] == "RF-H003"


@pytest.mark.parametrize(("secret", "status"), [(None, 401), (READER, 403), (WRITER, 200)])
def test_keys_are_checked_before_the_body_is_read(keyed, secret, status):
    asked, sent = [], []

    async def receive():
        asked.append(True)
        return {"type": "http.request", "body": stream(), "more_body": False}

    async def send(message):
        sent.append(message)

    fields = {"host": "server.example", "content-type": ARROW, **(bearer(secret) if secret else {})}
    scope = {
        "type": "http", "method": "POST", "path": "/v1/samples", "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
    }  # fmt: skip
    keyed.portal.call(keyed.app, scope, receive, send)
    assert sent[0]["status"] == status
    assert bool(asked) == (status == 200)


def test_problems_and_logs_never_have_a_secret(keyed, capsys):
    answer = keyed.get("/v1/samples", headers=bearer("a-secret-that-is-wrong"))
    assert "a-secret" not in answer.text
    assert "a-secret" not in "".join(capsys.readouterr())


def test_quotas_and_names_of_keys_reach_the_store(tmp_path):
    from ragged_server.process.opening import store_settings

    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    found = store_settings(settings(tmp_path, keys_file=file, quota_bytes="1MiB"))
    assert found.quotas["writer"] == Quota(records=10, bytes=None, window_s=60.0)
    assert found.quotas["*"] == Quota(records=None, bytes=1 << 20, window_s=86400.0)


def test_keys_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGGED_KEYS", f"a:ingest+read:{WRITER}  b:admin:{ADMIN}")
    keys = load_keys(settings(tmp_path))
    assert [(key.name, sorted(key.scopes)) for key in keys.keys] == [
        ("a", ["ingest", "read"]), ("b", ["admin"]),
    ]  # fmt: skip
    assert keys.check(f"bearer {WRITER}", "read").name == "a"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "another form"),
        ("keys = 1", "another form"),
        ("[[keys]]", "either secret"),
        ('[[keys]]\nname="a"\nscopes=["ingest"]', "either secret"),
        ('[[keys]]\nname="a"\nsecret="short"\nscopes=["ingest"]', "at least 16"),
        (f'[[keys]]\nname="a"\nsecret="{WRITER}"\nscopes=["write"]', "scopes out of"),
        (f'[[keys]]\nname="a"\nsecret="{WRITER}"\nscopes=[]', "scopes out of"),
        (f'[[keys]]\nname="a"\nsecret="{WRITER}"\nscopes=["read"]\nsha256="00"', "either secret"),
        (f'[[keys]]\nname="a"\nsecret="{WRITER}"\nscope=["read"]', "scope"),
        (f'[[keys]]\nname="a"\nsecret="{WRITER}"\nscopes=["read"]\nmax_bytes=-1', "positive"),
        (f'[[keys]]\nname="*"\nsecret="{WRITER}"\nscopes=["read"]', "a name"),
        (f'[[keys]]\nname="a"\nsecret="{WRITER}"\nscopes=["read"]\ndataset=1', "dataset is text"),
        ("[[keys", "cannot be read"),
        (FILE + f'[[keys]]\nname="writer"\nsecret="{WRITER}2"\nscopes=["read"]', "the same name"),
        (FILE + f'[[keys]]\nname="w2"\nsecret="{WRITER}"\nscopes=["read"]', "the same secret"),
    ],
    ids=str,
)  # fmt: skip
def test_malformed_keys_say_what_is_wrong(tmp_path, text, said):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        load_keys(settings(tmp_path, keys_file=file))
    assert said in str(error.value)
    assert WRITER not in str(error.value)


@pytest.mark.parametrize("words", ["a", "a:read", "a:write:secret-of-the-writer", "a:read:short"])
def test_malformed_keys_of_the_environment(tmp_path, monkeypatch, words):
    monkeypatch.setenv("RAGGED_KEYS", words)
    with pytest.raises(SettingsError):
        load_keys(settings(tmp_path))


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 204), ("127.0.0.1", 204), ("localhost:8080", 204), ("[::1]:8080", 204),
     ("[::1]", 204), ("friend.example", 204), ("evil.example", 421),
     ("127.0.0.1.evil.example", 421), ("localhost.evil.example:80", 421)],
)  # fmt: skip
def test_without_keys_only_names_of_this_machine_are_served(tmp_path, host, status):
    """A page of a stranger may let its own name point at this machine (DNS rebinding)."""
    with client(tmp_path, allowed_hosts="friend.example") as c:
        answer = c.get("/v1/samples", headers={"host": host})
        assert answer.status_code == status
        assert answer.status_code == 204 or answer.json()["code"] == "RF-H010"
