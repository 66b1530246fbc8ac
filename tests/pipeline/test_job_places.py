"""Where jobs, exports and reports write: places that are none are refused, and nothing is left."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.cli.app import app
from ragged_format.testing import rollouts
from ragged_pipeline.jobs.merge import Merge

BATCH = rollouts(np.random.default_rng(0), num_samples=8, prompt_length=4, response_length=4)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the dataset ``in``."""
    monkeypatch.chdir(tmp_path)
    with rf.Writer("in", BATCH.schema) as writer:
        writer.write(BATCH)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("place", ["", "-"])
@pytest.mark.parametrize("call", [rp.shuffle, rp.compact, rp.expand, rp.to_hf])
def test_places_that_are_none(here, call, place):
    """An unset variable of a shell made the working directory a dataset, and - a directory."""
    with pytest.raises((rf.DatasetNotFoundError, rf.DatasetExistsError)) as refused:
        call("in", place)
    assert refused.value.remedy
    assert names(here) == ["in"]


def test_inputs_that_are_none(here):
    with pytest.raises(rf.DatasetNotFoundError, match="empty"):
        rp.shuffle("", "out")
    with pytest.raises(rf.DatasetNotFoundError, match="empty"):
        rp.convert("", "out", adapter="vllm", options={"vocab_size": 9})
    assert names(here) == ["in"]


@pytest.mark.parametrize("url", ["s3://bucket/demo", "memory://demo"])
def test_the_demo_writes_to_this_machine(here, url):
    found = CliRunner().invoke(app, ["demo", url, "--json"])
    assert found.exit_code == 1
    assert json.loads(found.stdout)["code"] == "RF-V002"
    assert names(here) == ["in"]


def test_file_urls_are_places(here):
    done = rp.export("in", f"file://{here}/out%20of.parquet", to="parquet")
    assert done.rows == 8
    rp.report("in", f"file://{here}/page.html")
    assert names(here) == ["in", "out of.parquet", "page.html"]


def test_an_export_replaces_nothing_and_leaves_nothing(here):
    with pytest.raises(rf.DatasetExistsError, match="something at the place"):
        rp.export("in", "in", to="parquet")
    with pytest.raises(rf.RaggedError):
        rp.export(
            "in", "out.parquet", to="parquet", options={"compression": "none", "file_bytes": 0}
        )
    assert names(here) == ["in"]


def test_numbers_that_no_job_can_hold():
    with pytest.raises(rf.LimitExceededError, match="batch_rows"):
        Merge(batch_rows=1 << 63)
    with pytest.raises(rf.LimitExceededError, match="size in bytes"):
        rp.run(Merge(), "in", "out", memory="9" * 30 + "TB")
    with pytest.raises(rf.LimitExceededError, match="ranks"):
        rp.pack_dataset("in", "out", token_budget=9, ranks=1 << 40)
    with pytest.raises(rf.JobError, match="eps is finite"):
        rp.advantages("in", "out", eps=math.inf)
