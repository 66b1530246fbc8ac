"""Wrong usage is one JSON object too, where scripts ask for JSON."""

import json

import pytest

COMMANDS = [
    "convert", "validate", "inspect", "pack", "compact", "expand", "report", "export", "push",
    "serve", "tail", "bench", "demo", "filter", "merge", "shuffle", "split",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("order", [("--json", "--no-such"), ("--no-such", "--json")])
def test_an_unknown_option_is_an_object(invoke, command, order):
    done = invoke(command, *order)
    assert done.exit_code == 2
    told = json.loads(done.stdout)
    assert (told["command"], told["ok"], told["error"]) == (command, False, "UsageError")
    assert "--no-such" in told["what"]
    assert "--no-such" in done.stderr
    assert told["remedy"] == f"see ragged {command} --help"


def test_its_keys_are_those_of_errors(invoke_json, tmp_path):
    wrong = invoke_json("validate", exit_code=2)
    broken = invoke_json("validate", tmp_path / "nowhere", exit_code=1)
    assert wrong.keys() == broken.keys()
    assert wrong["code"] is None
    assert "PATH" in wrong["what"].upper()


def test_bad_values_are_objects(invoke_json, dataset, tmp_path):
    assert "nope" in invoke_json("pack", dataset, "x", "--packing", "nope", exit_code=2)["what"]
    told = invoke_json("convert", "--from", "nope", dataset, tmp_path / "x", exit_code=2)
    assert "vllm" in told["what"]
    told = invoke_json("export", "--to", "nope", dataset, tmp_path / "x", exit_code=2)
    assert "skyrl" in told["what"]
    assert invoke_json("inspect", dataset, "--head", "-1", exit_code=2)["ok"] is False


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("push", "notaurl", "data"), "RF-V002"),
        (("push", ",", "data"), "RF-L001"),
        (("tail", "notaurl"), "RF-V002"),
        (("tail", "http://127.0.0.1:1", "--rank", "2"), "RF-L001"),
        (("serve", "live", "--port", "some"), "RF-H016"),
        (("serve", "live", "--host", "0.0.0.0"), "RF-H016"),
        (("serve", "live", "--config", "nowhere.toml"), "RF-H016"),
        (("serve", "s3://bucket/live"), "RF-V002"),
    ],
)
def test_arguments_that_commands_check_themselves_are_wrong_usage_with_a_code(
    invoke_json, tmp_path, monkeypatch, words, code
):
    monkeypatch.chdir(tmp_path)
    assert invoke_json(*words, exit_code=2)["code"] == code
    assert list(tmp_path.iterdir()) == []


def test_settings_of_the_environment_are_usage_too(invoke_json, tmp_path, monkeypatch):
    monkeypatch.setenv("RAGGED_MAX_READERS", "many")
    told = invoke_json("serve", tmp_path / "live", exit_code=2)
    assert "max_readers" in told["what"]


def test_what_is_no_usage_ends_with_1(invoke_json, tmp_path):
    missing = tmp_path / "keys.toml"
    assert invoke_json("serve", tmp_path / "live", "--keys-file", missing, exit_code=1)
    assert invoke_json("push", "http://127.0.0.1:1", tmp_path / "none", exit_code=1)


def test_a_command_that_there_is_not(invoke):
    told = json.loads(invoke("unpack", "data", "--json").stdout)
    assert (told["command"], told["error"]) == (None, "UsageError")
    assert "unpack" in told["what"]


def test_without_json_or_behind_the_end_of_options_there_is_text_only(invoke):
    for words in (("validate", "--no-such"), ("inspect", "--", "a", "b", "--json")):
        done = invoke(*words)
        assert done.exit_code == 2
        assert done.stdout == ""
        assert "Usage: " in done.stderr


def test_where_stdout_carries_data_the_object_goes_to_stderr(invoke, dataset):
    done = invoke("convert", "--from", "vllm", "-o", "nope=1", dataset, "-", "--json")
    assert done.exit_code == 2
    assert done.stdout == ""
    objects = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert len(objects) == 1
    assert json.loads(objects[0])["error"] == "UsageError"
