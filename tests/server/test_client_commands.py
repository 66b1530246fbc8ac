"""``ragged push`` and ``ragged tail`` against a server."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from support.containers import equal, small_batch, stream_bytes, three_batches
from support.fake_server import fake_server
from support.http_server import running
from support.memory_store import MemoryStore
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app
from ragged_format.ragged import concat
from ragged_server.store.store import Store

RAGGED = [sys.executable, "-c", "from ragged_format.cli import main; main()"]


@pytest.fixture
def server(tmp_path):
    from ragged_server.store.records import StoreSettings

    store = Store(tmp_path / "live", StoreSettings())
    store.open()
    with running(tmp_path / "served", store) as server:
        yield server


@pytest.fixture
def invoke():
    def run(*words, status=0):
        done = CliRunner().invoke(app, list(map(str, words)))
        assert done.exit_code == status, f"{done.output}{done.stderr}{done.exception!r}"
        return done

    return run


@pytest.fixture
def data(tmp_path):
    rf.write_stream(tmp_path / "data.arrows", three_batches())
    return tmp_path / "data.arrows"


@pytest.fixture
def start():
    """Start the command; what a failed test leaves running is killed."""
    started = []

    def run(*words, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, **options}
        started.append(subprocess.Popen([*RAGGED, *words], **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_push_then_tail(server, invoke, data, tmp_path):
    done = invoke("push", server.url, data, "--in-flight", 1)
    assert done.stdout.startswith("9 stored, 0 already there, in 3 requests")
    done = json.loads(invoke("push", server.url, data, data, "--json", "--zstd", 1).stdout)
    assert (done["stored"], done["duplicates"], done["records"]) == (0, 18, 18)
    assert done["inputs"] == [str(data), str(data)]
    lines = invoke("tail", server.url).stdout.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("b0--0  5 tokens")
    assert lines[-1] == f"9 records; cursor {done['cursor']}"
    out = tmp_path / "out.arrows"
    told = json.loads(invoke("tail", server.url, "-o", out, "--json").stdout)
    assert (told["records"], told["cursor"], told["after"]) == (9, done["cursor"], None)
    assert equal([concat(list(rf.read_stream(out)))], [concat(three_batches())])


def test_tail_to_stdout(server, invoke, data):
    invoke("push", server.url, data, "--in-flight", 1)
    done = CliRunner().invoke(app, ["tail", server.url, "-o", "-"])
    assert equal([concat(list(rf.read_stream(done.stdout_bytes)))], [concat(three_batches())])
    assert done.stderr.startswith("9 records; cursor")


def test_push_from_stdin(server):
    done = subprocess.run(
        [*RAGGED, "push", server.url, "-", "--json"], input=stream_bytes(three_batches()),
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout)["stored"] == 9


def test_the_cursor_file_is_where_the_next_call_goes_on(server, invoke, tmp_path):
    cursor = tmp_path / "cursor"
    for number, batch in enumerate(three_batches()):
        rf.write_stream(tmp_path / "one", batch)
        invoke("push", server.url, tmp_path / "one")
        out = tmp_path / f"out{number}"
        invoke("tail", server.url, "--cursor-file", cursor, "-o", out)
        assert equal([concat(list(rf.read_stream(out)))], [batch])
    before = cursor.read_text()
    assert "0 records" in invoke("tail", server.url, "--cursor-file", cursor).stdout
    empty = tmp_path / "empty"
    invoke("tail", server.url, "--cursor-file", cursor, "-o", empty)
    assert list(rf.read_stream(empty)) == []
    assert cursor.read_text() == before
    assert list(tmp_path.glob("*.tmp-*")) == []
    done = invoke("tail", server.url, "--cursor-file", cursor, "--after", "x", status=2)
    assert "cursor already" in done.stderr


def test_a_failed_write_leaves_the_cursor(server, invoke, data, tmp_path):
    invoke("push", server.url, data)
    cursor = tmp_path / "cursor"
    invoke("tail", server.url, "--cursor-file", cursor, "-o", tmp_path / "no" / "dir", status=1)
    assert not cursor.exists()


def test_shares_are_the_whole(server, invoke, tmp_path):
    rf.write_stream(tmp_path / "many", small_batch([3] * 40))
    invoke("push", server.url, tmp_path / "many")
    ids = []
    for rank in range(3):
        out = tmp_path / f"share{rank}"
        invoke("tail", server.url, "--rank", rank, "--world-size", 3, "-o", out)
        ids += [name for b in rf.read_stream(out) for name in b.column("sample_id").to_pylist()]
    assert len(ids) == 40
    assert len(set(ids)) == 40
    done = invoke("tail", server.url, "--rank", 3, "--world-size", 3, status=2)
    assert "rank" in done.stderr


def test_an_empty_server(server, invoke, tmp_path):
    assert invoke("tail", server.url).stdout.startswith("0 records; cursor ")
    done = invoke("tail", server.url, "-o", tmp_path / "out", "--json", status=1)
    assert json.loads(done.stdout)["code"] == "RF-C008"
    assert not (tmp_path / "out").exists()


def test_errors_are_those_of_the_server(server, invoke, data, tmp_path):
    done = invoke("tail", server.url, "--after", "nonsense", "--json", status=1)
    assert json.loads(done.stdout)["code"] == "RF-H105"
    invoke("push", server.url, data)
    rf.write_stream(tmp_path / "other", small_batch((1, 1, 1), seed=9, prefix="b0-"))
    done = invoke("push", server.url, tmp_path / "other", status=1)
    assert done.stderr.startswith("error: [RF-H101]")
    done = invoke("push", "http://127.0.0.1:9", data, "--retry-for", 0, "--json", status=1)
    assert json.loads(done.stdout)["code"] == "RF-H201"
    assert "URL of a server" in invoke("push", "nowhere", data, status=2).stderr
    assert "RF-C008" in invoke("push", server.url, tmp_path / "gone", status=1).stderr


def test_keys_come_from_a_file(tmp_path, invoke, data, monkeypatch):
    monkeypatch.setenv("RAGGED_KEYS", "all:admin:a-secret-of-16-letters")
    (tmp_path / "key").write_text("a-secret-of-16-letters\n")
    (tmp_path / "none").write_text("\n")
    with running(tmp_path / "served", MemoryStore()) as server:
        assert "RF-H002" in invoke("push", server.url, data, status=1).stderr
        assert (
            "no key"
            in invoke("push", server.url, data, "--key-file", tmp_path / "none", status=1).stderr
        )
        invoke("push", server.url, data, "--key-file", tmp_path / "key")
        assert "9 records" in invoke("tail", server.url, "--key-file", tmp_path / "key").stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tail_is_complete(server, start, tmp_path, number):
    from ragged_server.client import Client

    out, cursor = tmp_path / "out", tmp_path / "cursor"
    process = start("tail", server.url, "-f", "-o", str(out), "--cursor-file", str(cursor))
    with Client(server.url) as client:
        client.push(three_batches())
        _wait_for_reader(server, client, 9)
        client.push(small_batch((2,), prefix="late"))
        _wait_for_reader(server, client, 10)
    assert not out.exists()
    process.send_signal(number)
    told, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert told.startswith(b"10 records; cursor ")
    assert sum(b.num_rows for b in rf.read_stream(out)) == 10
    assert told.split()[-1].decode() == cursor.read_text().strip()


def test_an_interrupted_push_does_not_go_on(start, data):
    with fake_server() as server:
        server.faults = [(503, {}, {})] * 1000
        process = start("push", server.url, str(data))
        _until(lambda: len(server.requests) > 4)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def _until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _wait_for_reader(server, client, records):
    """Until a reader has got so many records and waits for more."""

    def is_waiting():
        text = server.context.metrics.text().decode()
        read = float(re.search(r"^ragged_read_records_total (\S+)", text, re.MULTILINE)[1])
        return read >= records and client.status()["server"]["waiting"] == 1

    _until(is_waiting)


def test_a_followed_tail_writes_as_samples_come(server, start):
    from ragged_server.client import Client

    process = start("tail", server.url, "-f", "-o", "-")
    with Client(server.url) as client:
        client.push(small_batch((2,), prefix="one"))
        reader = rf.StreamReader(process.stdout)
        assert next(reader).num_rows == 1
        client.push(small_batch((2,), prefix="two"))
        assert next(reader).num_rows == 1
        process.send_signal(signal.SIGTERM)
        assert list(reader) == []
        assert process.wait(30) == 0


def test_open_source_reads_a_server(server, invoke, data):
    invoke("push", server.url, data, "--in-flight", 1)
    for url in (server.url, f"{server.url}/v1/samples", f"{server.url}/?max_bytes=1"):
        source = rf.open_source(url)
        assert isinstance(source, rf.Source)
        assert source.ragged_schema.profile == "sample"
        for _ in range(2):
            assert equal([concat(list(source.batches()))], [concat(three_batches())])
        some = next(source.batches(columns=["reward"]))
        assert some.schema.names == ["reward"]
        source.close()
    assert "9 records" in invoke("validate", server.url).stdout
    for query in ("rank=x", "size=3", "rank=2&world_size=2"):
        with pytest.raises(rf.LimitExceededError, match="RF-L001"):
            rf.open_source(f"{server.url}?{query}")
    cursor = json.loads(invoke("tail", server.url, "--json").stdout)["cursor"]
    assert list(rf.open_source(f"{server.url}?after={cursor}").batches()) == []


def test_open_source_of_an_empty_server(server):
    source = rf.open_source(server.url)
    with pytest.raises(rf.DatasetNotFoundError, match="no samples yet"):
        source.schema  # noqa: B018
    source.close()
