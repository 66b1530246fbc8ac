"""Outputs of commands at places where nothing can be written."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app
from ragged_format.testing import rollouts


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("unusable") / "data"
    batch = rollouts(np.random.default_rng(0), num_samples=3)
    with rf.Writer(path, batch.schema) as writer:
        writer.write(batch)
    return path


FILES = [("export", "--to", "parquet"), ("export", "--to", "hf"), ("report",)]
DATASETS = [("pack", "--token-budget", "9000"), ("compact",), ("shuffle",)]


def told(words, data, place):
    done = CliRunner().invoke(app, [*words, str(data), str(place), "--json"])
    assert done.exit_code == 1, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", FILES, ids=" ".join)
def test_the_directory_of_a_file_is_missing(data, tmp_path, words):
    error = told(words, data, tmp_path / "missing" / "out.html")
    assert (error["error"], error["code"]) == ("DatasetNotFoundError", "RF-C008")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [*FILES[:2], *DATASETS], ids=" ".join)
def test_a_file_lies_where_a_directory_is_to_be(data, tmp_path, words):
    (tmp_path / "file").write_text("mine")
    error = told(words, data, tmp_path / "file" / "out")
    assert error["code"] == "RF-C009"
    assert (tmp_path / "file").read_text() == "mine"
