"""What is damaged or changed while a job is interrupted or running is found, never written on."""

import json
import os

import pytest
from support.jobs import bytes_of, write_rollouts

import ragged_format as rf
import ragged_pipeline as rp
from ragged_format.files import write_file
from ragged_format.testing import assert_ragged_equal
from ragged_pipeline.foreign import ForeignFile, ForeignInputs
from ragged_pipeline.inputs import open_inputs, require_planned
from ragged_pipeline.jobs.merge import Merge

JOBS = {
    "advantages": rp.advantages,
    "dedupe": rp.dedupe,
    "shuffle": lambda *places, **given: rp.shuffle(*places, shard_bytes=200_000, **given),
    "sort": lambda *places, **given: rp.merge(
        *places, sort_by="token_length", shard_bytes=200_000, **given
    ),
    "pack": lambda *places, **given: rp.pack_dataset(
        *places, token_budget=2048, ranks=2, shard_bytes=200_000, **given
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "in"
    write_rollouts(folder, rows=120)
    return folder


def cut_off(monkeypatch, job, *places):
    """Run a job up to its commit."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "ragged_pipeline.runner._publish", lambda *_: (_ for _ in ()).throw(OSError(5))
        )
        with pytest.raises(OSError, match="5"):
            job(*places, workers=1)


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "byte") for name in JOBS), *(("advantages", how) for how in ("cut", "gone", "more"))],
)
def test_damaged_spills_are_made_again(source, tmp_path, monkeypatch, name, how):
    job, out = JOBS[name], tmp_path / "out"
    expected = job(source, tmp_path / "expected", workers=1)
    cut_off(monkeypatch, job, source, out)
    (work,) = out.glob(".ragged-job-*")
    for path in [path for path in work.rglob("*.d/**/*") if path.is_file()]:
        data = bytearray(path.read_bytes())
        if how == "byte" and data:
            data[len(data) // 2] ^= 4
        path.write_bytes(data[: len(data) // 2] if how == "cut" else data + b"x" * (how == "more"))
        if how == "gone":
            path.unlink()
    last = max(path.name[:2] for path in work.glob("*.arrow"))
    for path in work.glob(f"{last}-*"):
        path.unlink()
    done = job(source, out, workers=1)
    assert done.resumed < expected.tasks
    assert bytes_of(out) == bytes_of(tmp_path / "expected")


def test_whole_spills_are_kept(source, tmp_path, monkeypatch):
    cut_off(monkeypatch, rp.advantages, source, tmp_path / "out")
    assert rp.advantages(source, tmp_path / "out", workers=1).resumed == 3


def test_an_input_file_that_was_replaced_is_found_by_workers(source, tmp_path):
    data = rf.Dataset(source)[:]
    path = tmp_path / "in.arrow"
    write_file(path, data)
    inputs = open_inputs([str(path)])
    plan = Merge().plan(inputs)
    require_planned(type(inputs).from_refs(inputs.refs()), plan)
    write_file(path, data.slice(1))
    with pytest.raises(rf.JobError, match="replaced while") as found:
        require_planned(type(inputs).from_refs(inputs.refs()), plan)
    assert found.value.where.file == str(path)
    assert_ragged_equal(rf.concat(list(inputs.batches([[0, 0, 0, 120]]))), data)  # still mapped


@pytest.mark.parametrize("kind", ["lines", "whole"])
def test_a_foreign_file_that_changes_is_found(tmp_path, kind):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n')
    opened = ForeignInputs([ForeignFile(str(path), "shown", "a", kind)], task_bytes=99)
    inputs = ForeignInputs.from_refs(json.loads(json.dumps(opened.refs())))
    (run,), _ = opened.tasks(99)

    def read():
        return [line.record for line in inputs.read(run, None, lambda _: None)]

    assert read() == [b'{"a":1}', b'{"a":2}']
    path.write_bytes(path.read_bytes() + b'{"a":3}\n')
    if kind == "lines":  # a log that grows: the range is as it was
        assert read() == [b'{"a":1}', b'{"a":2}']
    for text in (b'{"a":1}\n', b'{"a":1}\n{"a":9}\n'):
        path.write_bytes(text)
        os.utime(path, ns=(0, 1))
        with pytest.raises(rf.JobError, match="changed while") as found:
            read()
        assert found.value.where.file == "shown"


@pytest.mark.parametrize("name", ["shuffle", "export"])
def test_a_full_disk_is_reported_with_its_place(source, tmp_path, monkeypatch, name):
    """Arrow raises OSError without a file name."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ragged_pipeline.jobs.shuffle.scatter", full)
    monkeypatch.setattr("ragged_pipeline.exporting._under", full)
    calls = {
        "shuffle": lambda: JOBS["shuffle"](source, tmp_path / "out", workers=1),
        "export": lambda: rp.to_hf(source, tmp_path / "out"),
    }
    with pytest.raises(OSError, match="No space") as found:
        calls[name]()
    assert str(found.value.filename).startswith(str(tmp_path / "out"))
