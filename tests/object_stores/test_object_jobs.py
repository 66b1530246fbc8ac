"""Jobs and commands that read from a store and write into one."""

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app
from ragged_format.testing import assert_ragged_equal
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.runner import run
from ragged_pipeline.stores.copies import local_copy

DATA = Path(__file__).parents[1] / "data" / "vllm"
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


def ragged(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


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


def test_ids_of_a_dataset_in_a_store_are_not_appended_again(stored, samples, tmp_path):
    with rf.Writer(tmp_path / "near", samples.schema) as writer:
        writer.write(samples[30:])
    with pytest.raises(rf.InvariantError) as caught:
        run(Merge(), tmp_path / "near", IN, workers=1, mode="append")
    assert IN in caught.value.got
    with (
        pytest.raises(rf.InvariantError),
        rf.Writer(IN, samples.schema, mode="append", on_duplicate="error") as writer,
    ):
        writer.write(samples[3:5])
    assert rf.Dataset(IN).num_rows == 37


def test_the_work_of_an_abandoned_job_is_swept_on_this_machine(s3, stored):
    with s3.fault("deny", "PUT", r"out/.*\.arrow", times=9), pytest.raises(rf.StorageError):
        run(Merge(), stored, OUT, workers=1)
    assert rf.sweep(IN, grace_s=0) == []
    (name,) = rf.sweep(OUT, grace_s=0, dry_run=True)
    assert name.startswith(".ragged-job-")
    assert rf.sweep(OUT, grace_s=0) == [name]
    assert run(Merge(), stored, OUT, workers=1).resumed == 0


def test_outputs_that_can_only_be_read_are_refused(stored, tmp_path):
    with pytest.raises(rf.UnsupportedFeatureError, match="only be read"):
        run(Merge(), stored, f"local://{tmp_path}/out", workers=1)


def test_commands_take_urls(s3, stored, samples, environment):
    done = ragged("validate", stored)
    assert done.exit_code == 0, done.stderr
    done = ragged("inspect", stored, "--json")
    assert json.loads(done.stdout)["records"] == 37, done.stderr
    done = ragged("pack", stored, OUT, "--token-budget", "200", "--json")
    assert done.exit_code == 0, done.stderr
    rows = rf.Dataset(OUT)
    rows.validate()
    assert rows.ragged_schema.profile == "packed"
    done = ragged("validate", "s3://rollouts/none")
    assert done.exit_code != 0
    assert "RF-C008" in done.stderr


def test_dumps_in_a_store_are_converted(s3, environment, tmp_path):
    lines = gzip.decompress((DATA / "rollouts.jsonl.gz").read_bytes()).splitlines(keepends=True)
    dump = tmp_path / "a.jsonl.gz"
    dump.write_bytes(gzip.compress(b"".join(lines[:14])))
    s3.put("dumps/a.jsonl.gz", dump.read_bytes())
    words = ["convert", "--from", "vllm", "--vocab-size", "49152", "--json"]
    near = ragged(*words, dump, tmp_path / "near")
    assert near.exit_code == 0, near.stderr
    for place in ("s3://rollouts/dumps", "s3://rollouts/dumps/a.jsonl.gz"):
        far = ragged(*words, "--mode", "overwrite", "--force", place, "s3://rollouts/out")
        assert far.exit_code == 0, far.stderr
        assert json.loads(far.stdout)["inputs"] == ["s3://rollouts/dumps/a.jsonl.gz"]
        assert rf.Dataset("s3://rollouts/out").num_rows == rf.Dataset(tmp_path / "near").num_rows
    done = ragged(*words, "s3://rollouts/nothing", "s3://rollouts/other")
    assert done.exit_code != 0
    assert "RF-C008" in done.stderr


@pytest.mark.parametrize("place", ["dumps", "dumps/a.jsonl.gz"])
def test_the_form_of_a_dump_in_a_store_is_recognized(s3, environment, tmp_path, place):
    lines = gzip.decompress((DATA / "rollouts.jsonl.gz").read_bytes()).splitlines(keepends=True)
    s3.put("dumps/a.jsonl.gz", gzip.compress(b"".join(lines[:14])))
    words = ["convert", "--vocab-size", "49152", "--json"]
    done = ragged(*words, f"s3://rollouts/{place}", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["records"] > 0


def test_a_dump_in_a_store_that_nobody_recognizes_is_named_by_its_url(s3, environment, tmp_path):
    s3.put("dumps/a.jsonl", b'{"unknown": 1}')
    done = ragged("convert", "--vocab-size", "10", "s3://rollouts/dumps", tmp_path / "out")
    assert done.exit_code == 1
    assert "RF-A001" in done.stderr
    assert "file 's3://rollouts/dumps'" in done.stderr


COPY = """
import sys
from ragged_pipeline.stores.copies import local_copy
print(local_copy("s3://rollouts/dumps").joinpath("a", "b.jsonl").read_text())
"""


def test_copies_of_dumps_go_with_their_process(s3, environment, tmp_path):
    s3.put("dumps/a/b.jsonl", b"{}")
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", COPY], capture_output=True, text=True)
        assert done.stdout == "{}\n", done.stderr
    assert not [path for path in (tmp_path / "cache" / "copies").rglob("*") if path.is_file()]


def test_copies_follow_what_is_there(s3, environment):
    for name in "abc":
        s3.put(f"more/{name}.jsonl", name.encode())
    root = local_copy("s3://rollouts/more")
    s3.put("more/b.jsonl", b"new")
    s3.client.delete_object(Bucket="rollouts", Key="more/c.jsonl")
    before = s3.requests["GET"]
    assert local_copy("s3://rollouts/more") == root
    assert s3.requests["GET"] - before == 2  # the listing and what changed
    assert {path.name: path.read_text() for path in root.iterdir()} == {
        "a.jsonl": "a", "b.jsonl": "new",
    }  # fmt: skip


def test_names_of_objects_do_not_lead_out_of_the_copies(s3, environment):
    s3.put("dumps/../../evil.jsonl", b"{}")
    with pytest.raises(rf.RaggedError):
        local_copy("s3://rollouts/dumps")


def test_pages_and_exports_go_into_a_store(s3, stored, environment, tmp_path):
    page = "s3://rollouts/pages/report.html"
    for _ in range(2):  # a report replaces a report
        done = ragged("report", stored, page, "--json")
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["html"] == page
    assert s3.read("pages/report.html").startswith(b"<!doctype html>")
    s3.put("pages/other.html", b"a page of somebody else")
    done = ragged("report", stored, "s3://rollouts/pages/other.html")
    assert done.exit_code != 0
    assert s3.read("pages/other.html") == b"a page of somebody else"
    for form, place in (("parquet", "s3://rollouts/table.parquet"), ("hf", "s3://rollouts/hf")):
        done = ragged("export", "--to", form, stored, place)
        assert done.exit_code == 0, done.stderr
        assert ragged("export", "--to", form, stored, place).exit_code != 0
    (tmp_path / "t.parquet").write_bytes(s3.read("table.parquet"))
    assert pq.read_table(tmp_path / "t.parquet").num_rows == 37
    assert "hf/state.json" in s3.names()
    assert not [p for p in (tmp_path / "cache" / "files").rglob("*") if p.is_file()]


def test_an_export_of_files_that_fails_leaves_none(s3, stored, environment):
    with s3.fault("deny", "PUT", "state.json", times=9):
        assert ragged("export", "--to", "hf", stored, "s3://rollouts/hf").exit_code != 0
    assert s3.names("hf") == []


def test_urls_are_not_taken_for_names_of_files(tmp_path, monkeypatch, samples):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rf.UnsupportedFeatureError):
        rf.write_file("s3://rollouts/a.arrow", samples)
    with pytest.raises(rf.UnsupportedFeatureError):
        rf.write_stream("s3://rollouts/a.arrows", samples)
    with pytest.raises(rf.UnsupportedFeatureError):
        rf.read_stream("s3://rollouts/a.arrows")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.runner import run
from ragged_pipeline.stores.objects import Objects

kind, name, when = sys.argv[1:]
original = getattr(Objects, kind)

def deadly(self, *arguments):
    hit = any(name in str(word) for word in arguments)
    if hit and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, *arguments)
    if hit:
        os.kill(os.getpid(), signal.SIGKILL)

setattr(Objects, kind, deadly)
run(Merge(shard_bytes=20_000), "s3://rollouts/in", "s3://rollouts/out", workers=1)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("upload", "-00001.arrow"), ("put", "manifest.json")],
    ids=["shard", "commit"],
)
def test_a_job_that_is_killed_on_its_way_up_ends_as_if_it_were_not(
    s3, stored, environment, tmp_path, kind, name, when
):
    run(Merge(shard_bytes=20_000), stored, tmp_path / "near", workers=1)
    made = (path for path in (tmp_path / "near").iterdir() if path.suffix != ".lock")
    near = {path.name: path.read_bytes() for path in made}
    assert len(near) >= 3
    killed = subprocess.run([sys.executable, "-c", KILLED, kind, name, when])
    assert killed.returncode == -signal.SIGKILL
    committed = (kind, when) == ("put", "after")
    assert ("out/manifest.json" in s3.names()) == committed
    again = run(Merge(shard_bytes=20_000), stored, OUT, workers=1)
    assert again.unchanged == committed
    far = {key.removeprefix("out/"): s3.read(key) for key in s3.names("out/")}
    assert far == near
    assert not list((tmp_path / "cache" / "jobs").rglob("*.arrow"))
