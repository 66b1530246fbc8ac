"""The engine: the same bytes however a job runs, and errors as they are."""

import json
from itertools import pairwise

import pytest
from support.jobs import DiesOnce, Failing, bytes_of, write_rollouts

import ragged_format as rf
from ragged_format.arguments import parse_bytes
from ragged_format.testing import assert_ragged_equal
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.runner import run

SHARD = 300_000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs") / "in"
    batch = write_rollouts(folder)
    return folder, batch


def test_a_job_makes_the_same_bytes_with_any_workers_and_memory(source, tmp_path):
    folder, batch = source
    made = []
    for number, options in enumerate(({"workers": 1}, {"workers": 2}, {"memory": "500MB"})):
        result = run(Merge(shard_bytes=SHARD), folder, tmp_path / str(number), **options)
        made.append(bytes_of(tmp_path / str(number)))
        assert (result.rows_in, result.rows, result.resumed) == (400, 400, 0)
        assert result.shards == result.tasks > 4
    assert made[0] == made[1] == made[2]
    dataset = rf.Dataset(tmp_path / "0")
    dataset.validate()
    dataset.verify()
    assert_ragged_equal(dataset[:], batch)


def test_a_copy_of_the_input_elsewhere_gives_the_same_bytes(source, tmp_path):
    import shutil

    folder, _ = source
    shutil.copytree(folder, tmp_path / "copy")
    run(Merge(shard_bytes=SHARD), folder, tmp_path / "a", workers=1)
    run(Merge(shard_bytes=SHARD), tmp_path / "copy", tmp_path / "b", workers=1)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_a_finished_job_is_not_run_again_unless_forced(source, tmp_path):
    folder, _ = source
    job = Merge(shard_bytes=SHARD)
    first = run(job, folder, tmp_path / "out", workers=1)
    before = bytes_of(tmp_path / "out")
    again = run(job, folder, tmp_path / "out", workers=1)
    assert again.unchanged
    assert not first.unchanged
    assert (again.rows, again.shards, again.bytes, again.figures) == (
        first.rows, first.shards, first.bytes, first.figures,
    )  # fmt: skip
    assert bytes_of(tmp_path / "out") == before
    forced = run(job, folder, tmp_path / "out", workers=1, force=True)
    assert not forced.unchanged
    after = bytes_of(tmp_path / "out")
    assert after.pop("manifest.json") != before.pop("manifest.json")  # another generation
    assert after == before
    assert rf.Dataset(tmp_path / "out").generation == 2


def test_what_a_run_left_that_was_killed_after_its_commit_is_removed(source, tmp_path, monkeypatch):
    folder, _ = source
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("ragged_pipeline.outputs.LocalOutput.clear", lambda *_: None)
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        run(Merge(shard_bytes=SHARD), folder, out, workers=1)
    assert list(out.glob(".ragged-job-*"))
    assert list(out.glob("writer-*.lock"))
    assert run(Merge(shard_bytes=SHARD), folder, out, workers=1).unchanged
    assert {path.suffix for path in out.iterdir()} == {".arrow", ".json", ".lock"}
    assert [path.name for path in out.glob("*.lock")] == ["manifest.lock"]


def test_lineage_says_what_made_the_dataset(source, tmp_path):
    folder, _ = source
    result = run(Merge(shard_bytes=SHARD), folder, tmp_path / "out", workers=1)
    (job,) = rf.Dataset(tmp_path / "out").lineage["jobs"]
    assert job["job"] == "merge"
    assert job["options"] == {"batch_rows": 1024, "shard_bytes": SHARD}
    assert job["plan"] == result.plan
    assert job["libraries"] == {"ragged-format": rf.__version__}
    assert [part["fingerprint"] for part in job["inputs"]] == [rf.Dataset(folder).fingerprint]
    assert str(tmp_path) not in json.dumps(job)


def test_another_dataset_in_the_place_is_refused_replaced_or_extended(source, tmp_path):
    folder, _ = source
    out = tmp_path / "out"
    run(Merge(shard_bytes=SHARD), folder, out, workers=1)
    other = Merge(shard_bytes=2 * SHARD)
    with pytest.raises(rf.DatasetExistsError, match="mode='append'"):
        run(other, folder, out, workers=1)
    append = {"mode": "append", "on_duplicate": "keep"}
    assert run(other, folder, out, workers=1, **append).rows == 400
    dataset = rf.Dataset(out)
    assert dataset.num_rows == 800
    assert [job["options"]["shard_bytes"] for job in dataset.lineage["jobs"]] == [SHARD, 2 * SHARD]
    assert run(other, folder, out, workers=1, **append).unchanged
    third = Merge(shard_bytes=3 * SHARD)
    run(third, folder, out, workers=1, mode="overwrite")
    assert rf.Dataset(out).num_rows == 400
    assert len(rf.Dataset(out).lineage["jobs"]) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_a_task_arrives_as_it_was_raised(source, tmp_path, workers):
    folder, _ = source
    with pytest.raises(rf.InvariantError, match="broken") as caught:
        run(Failing(shard_bytes=SHARD), folder, tmp_path / "out", workers=workers)
    assert caught.value.where == rf.Where(file="f", row=3)
    with pytest.raises(OSError, match="No space left") as full:
        run(Failing(shard_bytes=SHARD, how="os"), folder, tmp_path / "b", workers=workers)
    assert full.value.errno == 28
    with pytest.raises((KeyError, RuntimeError), match="surprise"):
        run(Failing(shard_bytes=SHARD, how="other"), folder, tmp_path / "c", workers=workers)
    for name in ("out", "b", "c"):
        with pytest.raises(rf.DatasetNotFoundError):
            rf.Dataset(tmp_path / name)


def test_what_was_finished_before_an_error_is_kept(source, tmp_path):
    folder, _ = source
    out = tmp_path / "out"
    with pytest.raises(rf.InvariantError):
        run(Failing(shard_bytes=SHARD, at=3), folder, out, workers=1)
    (work,) = out.glob(".ragged-job-*")
    assert sorted(path.name for path in work.glob("*.arrow")) == [
        "00-000000.arrow", "00-000001.arrow", "00-000002.arrow",
    ]  # fmt: skip
    assert not list(work.glob("*.tmp-*"))


def test_finished_tasks_of_an_interrupted_run_are_used(source, tmp_path, monkeypatch):
    folder, _ = source
    run(Merge(shard_bytes=SHARD), folder, tmp_path / "whole", workers=1)
    out = tmp_path / "out"
    produce = Merge.produce

    def interrupted(self, plan, stage, task, context):
        if task.index == 3:
            raise KeyboardInterrupt
        return produce(self, plan, stage, task, context)

    monkeypatch.setattr(Merge, "produce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Merge(shard_bytes=SHARD), folder, out, workers=1)
    monkeypatch.undo()
    # One of the finished ones is harmed meanwhile.
    (work,) = out.glob(".ragged-job-*")
    harmed = work / "00-000001.arrow"
    data = bytearray(harmed.read_bytes())
    data[len(data) // 2] ^= 1
    harmed.write_bytes(data)
    assert run(Merge(shard_bytes=SHARD), folder, out, workers=1).resumed == 2
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_a_task_whose_worker_dies_is_given_to_another(source, tmp_path):
    folder, _ = source
    job = DiesOnce(mark=str(tmp_path / "mark"), shard_bytes=SHARD)
    assert run(job, folder, tmp_path / "out", workers=2).rows == 400
    assert (tmp_path / "mark").exists()


def test_workers_that_die_again_and_again_are_an_error(source, tmp_path):
    folder, _ = source
    with pytest.raises(rf.WorkerError, match="-9"):
        run(Failing(shard_bytes=SHARD, how="die"), folder, tmp_path / "out", workers=2)


def test_a_job_that_cannot_be_imported_is_refused(source, tmp_path):
    class Local(Merge):
        name = "local"

    folder, _ = source
    with pytest.raises(rf.JobError, match="import"):
        run(Local(shard_bytes=SHARD), folder, tmp_path / "out", workers=2)
    assert run(Local(shard_bytes=SHARD), folder, tmp_path / "out", workers=1).rows == 400


def test_the_same_job_twice_at_once_is_refused(source, tmp_path, monkeypatch):
    folder, _ = source
    errors = []
    produce = Merge.produce

    def nested(self, plan, stage, task, context):
        if task.index == 0:
            with pytest.raises(rf.DatasetExistsError) as caught:
                run(Merge(shard_bytes=SHARD), folder, tmp_path / "out", workers=1)
            errors.append(caught.value)
        return produce(self, plan, stage, task, context)

    monkeypatch.setattr(Merge, "produce", nested)
    run(Merge(shard_bytes=SHARD), folder, tmp_path / "out", workers=1)
    assert "another process runs this job" in str(errors[0])


def test_progress_ends_at_the_total(source, tmp_path):
    folder, _ = source
    seen = []
    run(Merge(shard_bytes=SHARD), folder, tmp_path / "out", workers=1, progress=seen.append)
    assert seen[0].done == 0
    assert seen[-1].stage == "write"
    assert all(a.done <= b.done for a, b in pairwise(seen))
    assert seen[-1].done == pytest.approx(seen[-1].total, rel=0.01)
    assert seen[-1].rate > 0


def test_inputs_follow_each_other_and_share_one_identity(source, tmp_path):
    folder, batch = source
    write_rollouts(tmp_path / "more", rows=20, seed=1, prefix="t")
    result = run(Merge(), [folder, tmp_path / "more"], tmp_path / "out", workers=1)
    assert (result.rows_in, result.rows) == (420, 420)
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:400], batch)
    write_rollouts(tmp_path / "other", rows=20, vocab_size=500)
    with pytest.raises(rf.SchemaMismatchError):
        run(Merge(), [folder, tmp_path / "other"], tmp_path / "no", workers=1)
    with pytest.raises(rf.JobError):
        run(Merge(), [], tmp_path / "no", workers=1)


@pytest.mark.parametrize("encoding", ["hot", "compact"])
def test_files_and_compact_datasets_are_inputs(source, tmp_path, encoding):
    _, batch = source
    with rf.Writer(tmp_path / "in", batch.schema, encoding=encoding, batch_rows=50) as writer:
        writer.write(batch)
    (shard,) = rf.Dataset(tmp_path / "in").shards
    for place in (tmp_path / "in", tmp_path / "in" / shard.name):
        out = tmp_path / f"out-{place.name}"
        run(Merge(shard_bytes=SHARD), place, out, workers=1)
        assert_ragged_equal(rf.Dataset(out)[:], batch)


def test_an_empty_dataset_stays_one(tmp_path):
    schema = rf.sample_schema(vocab_size=10, columns=[])
    with rf.Writer(tmp_path / "in", schema):
        pass
    result = run(Merge(), tmp_path / "in", tmp_path / "out")
    assert (result.rows, result.shards) == (0, 0)
    assert rf.Dataset(tmp_path / "out").schema == schema
    assert run(Merge(), tmp_path / "in", tmp_path / "out").unchanged


@pytest.mark.parametrize("size", ["", "2XB", "-1", 0, True, "1.5.2GB", "1.5", "2iB", "0MB", "٣MB"])
def test_sizes_that_are_none_are_refused(size):
    with pytest.raises(rf.LimitExceededError):
        parse_bytes(size)


def test_too_little_memory_for_one_task_is_said_beforehand(source, tmp_path):
    with pytest.raises(rf.JobError, match="too little"):
        run(Merge(), source[0], tmp_path / "out", memory="1MiB")
