"""Run `ragged` in this process, and data for it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app
from ragged_format.testing import rollouts


@pytest.fixture
def invoke():
    """Return a function that runs `ragged` with these words and returns typer's result."""

    def run(*words, stdin=None):
        done = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return run


@pytest.fixture
def invoke_json(invoke):
    """Return a function that runs `ragged … --json` and returns the one object it prints."""

    def run(*words, stdin=None, exit_code=0):
        done = invoke(*words, "--json", stdin=stdin)
        assert done.exit_code == exit_code, done.output
        assert done.stdout.count("\n") == 1
        data = json.loads(done.stdout)
        assert data["ok"] == (exit_code == 0)
        assert data["command"] == words[0]
        return data

    return run


@pytest.fixture(scope="session")
def samples():
    """24 realistic samples."""
    return rollouts(
        np.random.default_rng(7), num_samples=24, vocab_size=500, prompt_length=12,
        response_length=15, group_size=4, max_candidates=40, top_k=5,
    )  # fmt: skip


@pytest.fixture(scope="session")
def dataset(tmp_path_factory, samples):
    """Path of a dataset of these samples in two shards."""
    path = tmp_path_factory.mktemp("cli") / "samples"
    for mode, part in (("error", samples.slice(0, 10)), ("append", samples.slice(10))):
        with rf.Writer(path, samples.schema, mode=mode, lineage={"made_by": "a test"}) as writer:
            writer.write(part)
    return path
