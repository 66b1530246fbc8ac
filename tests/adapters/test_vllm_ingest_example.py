"""examples/vllm_ingest against a server that gives recorded answers of vLLM."""

import json
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

import pytest
from support.vllm_rollouts import VOCAB_SIZE, recorded

import ragged_format as rf
from ragged_format.adapters import vllm
from ragged_format.testing import assert_ragged_equal
from ragged_format.validate import validate

SCRIPT = Path(__file__).parents[2] / "examples" / "vllm_ingest" / "ingest.py"
MODEL = "smollm2-135m-instruct"


def answers():
    """Recorded requests that differ, with one that the engine refuses."""
    chosen = {}
    for record in recorded("grpo_groups", "multi_turn", "variants"):
        request = record["request"]
        is_plain = not request.get("stream") and isinstance(record["response"], dict)
        if is_plain and request.get("output_mode") is None:
            chosen.setdefault(json.dumps(request["token_ids"]), record)
    return list(chosen.values())


class Server(ThreadingHTTPServer):
    """Renders by the recorded messages, generates by the recorded prompt."""

    daemon_threads = True

    def __init__(self, records):
        self.by_messages = {json.dumps(r["messages"]): r for r in records if r.get("messages")}
        self.by_prompt = {json.dumps(r["request"]["token_ids"]): r for r in records}
        self.busy = 2
        super().__init__(("127.0.0.1", 0), Handler)

    def server_bind(self):
        """Bind without looking up the name of this machine, which can take long."""
        TCPServer.server_bind(self)
        self.server_port = self.server_address[1]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/render"):
            found = self.server.by_messages[json.dumps(body["messages"])]
            return self.answer(200, {"token_ids": found["request"]["token_ids"]})
        if self.server.busy:
            self.server.busy -= 1
            return self.answer(503, {"error": {"message": "busy", "code": 503}})
        found = self.server.by_prompt[json.dumps(body["token_ids"])]
        assert body["sampling_params"].items() >= found["request"]["sampling_params"].items()
        return self.answer(found["http_status"], found["response"])

    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def served():
    records = answers()
    server = Server(records)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield records, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_recorded_run_becomes_a_dataset(served, tmp_path, capsys, monkeypatch):
    records, url = served
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert len(records) > 3
    with (tmp_path / "prompts.jsonl").open("w") as lines:
        for number, record in enumerate(records):
            prompt = {"sampling_params": record["request"]["sampling_params"], "reward": 0.5}
            if record.get("messages"):
                prompt["messages"] = record["messages"]
            else:
                prompt["token_ids"] = record["request"]["token_ids"]
            lines.write(json.dumps(prompt | {"group_id": f"g{number}"}) + "\n")
    main = runpy.run_path(str(SCRIPT))["main"]
    out = tmp_path / "samples"
    words = ["--url", url, "--model", MODEL, "--vocab-size", str(VOCAB_SIZE), "--parallel", "3"]
    report = main([*words, str(tmp_path / "prompts.jsonl"), str(out)])

    assert report.unbalanced() == []
    assert report.responses.taken == len(records)
    dataset = rf.Dataset(out)
    whole = dataset[:]
    validate(whole)
    good = [r for r in records if r["http_status"] == 200]
    assert report.responses.stored == len(good)
    own = [r | {"group_id": f"g{records.index(r)}"} for r in good]
    expected = vllm.to_samples(own, schema=dataset.schema)
    for name in expected.schema.names:
        if name != "provenance":  # the defaults of the script are in it
            assert whole.column(name).equals(expected.column(name)), name
    assert_ragged_equal(whole.slice(0, 0), expected.slice(0, 0))
    assert f"{whole.num_rows} samples of {len(records)} requests" in capsys.readouterr().out
