"""Jobs and commands that read from a store and write into one."""

import json
import subprocess
import sys

import pytest

import ragged_format as rf
from ragged_format.testing import assert_ragged_equal
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.runner import run

IN, OUT = "s3://rollouts/in", "s3://rollouts/out"


@pytest.fixture
def environment(s3, tmp_path, monkeypatch):
    values = {**s3.environment, "RAGGED_CACHE_DIR": str(tmp_path / "cache")}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def stored(environment, samples):
    with rf.Writer(IN, samples.schema, batch_rows=5, max_shard_bytes=1) as writer:
        writer.write(samples)
    return IN


def ragged(*arguments, **options):
    command = [
        sys.executable,
        "-c",
        "from ragged_format.cli import main; main()",
        *map(str, arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **options)


def test_a_job_from_store_to_store_writes_what_it_writes_locally(s3, stored, samples, tmp_path):
    near = run(Merge(), stored, str(tmp_path / "near"), workers=1)
    far = run(Merge(), stored, OUT, workers=1)
    assert far.rows == near.rows == 37
    assert_ragged_equal(rf.concat(list(rf.Dataset(OUT).batches())), samples)
    for shard in rf.Dataset(OUT).shards:
        assert s3.read(f"out/{shard.name}") == (tmp_path / "near" / shard.name).read_bytes()
    assert s3.read("out/manifest.json") == (tmp_path / "near" / "manifest.json").read_bytes()
    assert [name for name in s3.names("out/") if ".lock" in name] == []
    assert not list((tmp_path / "cache" / "jobs").rglob("*.arrow"))
    assert run(Merge(), stored, OUT, workers=1).tasks == 0
    with pytest.raises(rf.DatasetExistsError):
        run(Merge(), OUT, stored, workers=1)


def test_a_job_that_fails_on_its_way_up_goes_on_where_it_was(s3, stored, samples, monkeypatch):
    with (
        s3.fault("deny", "PUT", r"out/.*\.arrow", times=9),
        pytest.raises(rf.StorageError, match="denies"),
    ):
        run(Merge(), stored, OUT, workers=1)
    assert s3.names("out/") == []
    assert run(Merge(), stored, OUT, workers=1).resumed > 0
    rf.Dataset(OUT).validate()


def test_outputs_that_can_only_be_read_are_refused(stored, tmp_path):
    with pytest.raises(rf.UnsupportedFeatureError, match="only be read"):
        run(Merge(), stored, f"local://{tmp_path}/out", workers=1)


def test_commands_take_urls(s3, stored, samples, environment):
    done = ragged("validate", stored)
    assert done.returncode == 0, done.stderr
    done = ragged("inspect", stored, "--json")
    assert json.loads(done.stdout)["records"] == 37, done.stderr
    done = ragged("pack", stored, OUT, "--token-budget", "200", "--json")
    assert done.returncode == 0, done.stderr
    rows = rf.Dataset(OUT)
    rows.validate()
    assert rows.ragged_schema.profile == "packed"
    done = ragged("validate", "s3://rollouts/none")
    assert done.returncode != 0
    assert "RF-C008" in done.stderr
