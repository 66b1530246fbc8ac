"""Ctrl-C in commands that are no jobs: one line, exit code 130."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ragged_format.cli import app
from ragged_server.client import Client, Pushed


def invoke(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 130, done.output
    return done


@pytest.fixture
def pushing(monkeypatch):
    """A push that is interrupted after seven records."""

    def push(self, path, *, progress, **_):
        progress(Pushed(records=3, stored=3))
        progress(Pushed(records=7, stored=7))
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "push", push)


def test_push_says_how_much_has_arrived(pushing):
    done = invoke("push", "http://127.0.0.1:1", "somewhere")
    assert done.stdout == ""
    assert done.stderr == (
        "interrupted: 7 records are stored; to go on, run the same again: none is stored twice\n"
    )


@pytest.mark.parametrize("to_file", [False, True])
def test_tail_says_from_where_to_go_on(monkeypatch, tmp_path, to_file):
    def pages(*_, **__):
        yield SimpleNamespace(batches=[], cursor="c7", records=7)
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "tail", pages)
    words = ["-o", tmp_path / "out.arrows"] if to_file else []
    done = invoke("tail", "http://127.0.0.1:1", *words)
    if to_file:
        assert done.stderr == f"interrupted: {tmp_path}/out.arrows is not written\n"
        assert list(tmp_path.iterdir()) == []
    else:
        assert done.stderr == "interrupted: 7 records came; to go on, pass --after c7\n"


def test_with_json_it_is_an_object(pushing):
    data = json.loads(invoke("push", "http://127.0.0.1:1", "somewhere", "--json").stdout)
    assert data.pop("remedy").startswith("7 records are stored")
    assert data == {
        "command": "push", "ok": False, "error": "KeyboardInterrupt", "code": None,
        "what": "interrupted", "where": {}, "expected": None, "got": None,
    }  # fmt: skip


def test_a_command_that_keeps_nothing_says_so_briefly(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ragged_format.cli.validate.opened", interrupted)
    assert invoke("validate", "somewhere").stderr == "interrupted\n"
