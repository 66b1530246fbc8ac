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
