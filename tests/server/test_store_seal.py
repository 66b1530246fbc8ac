"""Sealing, and what stays valid over it."""

from dataclasses import replace

import pyarrow as pa
import pytest
from support.sealing import SMALL, fill, sealed, settled
from support.store_kit import ROOM, everything, ids_of, request, samples, stored_ids

import ragged_format as rf
from ragged_format.errors import BrokenShardError, RaggedError, SchemaMismatchError
from ragged_format.manifest import read_manifest, write_manifest
from ragged_format.testing import assert_ragged_equal
from ragged_server.store.errors import (
    LogDamagedError,
    StorageFailedError,
)
from ragged_server.store.records import StoreSettings
from ragged_server.store.seal import resized
from ragged_server.store.store import Store


def test_a_sealed_log_is_a_dataset(tmp_path):
    with Store(tmp_path, SMALL) as store:
        fill(store, 6)
        sealed(store, 3)
        expected = stored_ids(store)
    dataset = rf.Dataset(tmp_path, verify=True)
    assert ids_of(dataset.batches()) == expected
    assert [batch.num_rows for batch in dataset.batches()] == [5, 3] * 3
    rf.validate(pa.Table.from_batches(dataset.batches()))
    settled_files = list((tmp_path / "log").glob("segment-*"))
    with Store(tmp_path, SMALL) as store:
        assert stored_ids(store) == expected
        assert len(settled_files) <= 3
        settled(store, lambda: not list((tmp_path / "log").glob("segment-*")))
    assert not list(tmp_path.glob("writer-*"))


def test_records_are_the_same_before_and_after_sealing(tmp_path):
    with Store(tmp_path, SMALL) as store:
        store._upkeep.stop()
        fill(store, 7)
        before = everything(store)
        pages = [store.read(None, max_bytes=1)]
        while pages[-1].lag:
            pages.append(store.read(pages[-1].cursor, max_bytes=1))
        store._upkeep._stopped = False
        store._upkeep.round()
        assert len(store._log.shards) == 3
        after = everything(store)
        for page in pages[:-1]:
            # Each cursor means the same record as before.
            following = ids_of(store.read(page.cursor, max_bytes=ROOM).batches)
            assert following == ids_of(before)[-len(following) :]
            assert len(following) == page.lag
    assert_ragged_equal(rf.concat(after), rf.concat(before))


def test_sealing_is_resumed_after_a_kill(tmp_path):
    with Store(tmp_path, SMALL) as store:
        store._upkeep.stop()
        fill(store, 6)
        expected = stored_ids(store)
    with Store(tmp_path, SMALL) as store:
        sealed(store, 2)
        assert stored_ids(store) == expected


def test_a_segment_that_is_sealed_and_still_there_counts_once(tmp_path):
    with Store(tmp_path, StoreSettings(segment_records=8, grace_s=3600)) as store:
        fill(store, 4)
        sealed(store, 2)
        assert len(list((tmp_path / "log").glob("segment-*"))) == 2
        expected = stored_ids(store)
    (tmp_path / "log" / "state.json").unlink()
    with Store(tmp_path, SMALL) as store:
        assert len(store._recovery.removed) == 2
        assert stored_ids(store) == expected
        assert store.append(request(samples(4, prefix="g0-"))).result().duplicates == 4


def test_a_seal_that_fails_after_its_commit_is_not_done_twice(tmp_path, monkeypatch):
    with Store(tmp_path, SMALL) as store:
        store._upkeep.stop()
        store._upkeep._stopped = False
        fill(store, 2)
        monkeypatch.setattr(
            store._log, "seal", lambda *_: (_ for _ in ()).throw(OSError(5, "seal"))
        )
        with pytest.raises(OSError, match="seal"):
            store._upkeep.round()
        monkeypatch.undo()
        store._upkeep.round()
        assert len(rf.Dataset(tmp_path)) == 8
        assert len(stored_ids(store)) == 8


@pytest.mark.parametrize("fault", [OSError(28, "full"), ValueError("odd")], ids=["ENOSPC", "bug"])
def test_sealing_that_fails_is_seen_and_tried_again(tmp_path, monkeypatch, fault):
    def fail(*_):
        raise fault

    with Store(tmp_path, SMALL) as store:
        with monkeypatch.context() as patch:
            patch.setattr("ragged_server.store.seal.FileWriter.write", fail)
            fill(store, 4)
            settled(store, lambda: store.status().upkeep_failure is not None)
            fill(store, 1, start=4)
            assert not list(tmp_path.glob("shard-*"))
        sealed(store, 2)
        settled(store, lambda: store.status().upkeep_failure is None)
        assert len(stored_ids(store)) == 20


def test_a_damaged_segment_is_not_sealed(tmp_path):
    with Store(tmp_path, SMALL) as store:
        store._upkeep.stop()
        store._upkeep._stopped = False
        fill(store, 2)
        segment = store._log.segments[0]
        with segment.path.open("r+b") as file:
            file.seek(segment.batches[1].offset + segment.batches[1].size - 40)
            file.write(b"\xff" * 40)
        with pytest.raises(RaggedError):
            store._upkeep.round()
        assert not list(tmp_path.glob("shard-*"))
        store._upkeep._stopped = True


def test_somebody_elses_manifest_is_not_touched(tmp_path):
    with Store(tmp_path, SMALL) as store:
        fill(store, 2)
        sealed(store, 1)
        other = samples(3, prefix="other")
        with rf.Writer(tmp_path, other.schema, mode="overwrite") as writer:
            writer.write(other)
        fill(store, 2, start=2)
        settled(store, lambda: store.status().upkeep_failure is not None)
        assert "not that of the log" in store.status().upkeep_failure
        # Ingestion goes on.
        fill(store, 1, start=4)
    assert ids_of(rf.Dataset(tmp_path).batches()) == ids_of([other])


def test_shards_that_others_append_are_no_part_of_the_log(tmp_path):
    with Store(tmp_path, SMALL) as store:
        fill(store, 2)
        sealed(store, 1)
        other = samples(3, prefix="other")
        with rf.Writer(tmp_path, other.schema, mode="append") as writer:
            writer.write(other)
        fill(store, 2, start=2)
        sealed(store, 2)
        expected = stored_ids(store)
        assert len(expected) == 16
    with Store(tmp_path, SMALL) as store:
        assert stored_ids(store) == expected
    assert len(rf.Dataset(tmp_path)) == 19


def test_a_dataset_becomes_the_start_of_a_log(tmp_path):
    batch = samples(20)
    with rf.Writer(tmp_path, batch.schema, max_shard_bytes=1, batch_rows=7) as writer:
        writer.write(batch)
    with Store(tmp_path, SMALL) as store:
        assert stored_ids(store) == ids_of([batch])
        assert store.append(request(batch.slice(3, 2))).result().duplicates == 2
        fill(store, 1)
        expected = stored_ids(store)
    with Store(tmp_path, SMALL) as store:
        assert stored_ids(store) == expected


def test_a_copied_dataset_with_another_log_is_refused(tmp_path):
    with Store(tmp_path / "a", SMALL) as store:
        fill(store, 2)
        sealed(store, 1)
    with Store(tmp_path / "b", SMALL) as store:
        fill(store, 2)
        sealed(store, 1)
    (tmp_path / "a/manifest.json").replace(tmp_path / "b/manifest.json")
    with pytest.raises(LogDamagedError, match="not of one server"):
        Store(tmp_path / "b", SMALL).open()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["oldest", "middle", "newest"])
def test_a_shard_that_is_not_listed_any_more(tmp_path, which):
    with Store(tmp_path, SMALL) as store:
        fill(store, 7)
        sealed(store, 3)
    manifest = read_manifest(tmp_path)
    kept = tuple(shard for at, shard in enumerate(manifest.shards) if at != which)
    write_manifest(tmp_path, replace(manifest, shards=kept))
    if which:
        with pytest.raises(LogDamagedError, match="not listed any more"):
            Store(tmp_path, SMALL).open()
    else:
        # That is what retention does.
        with Store(tmp_path, SMALL) as store:
            assert store.status().oldest_sequence == 8
            assert len(stored_ids(store)) == 20


def test_a_manifest_that_cannot_be_read(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(StorageFailedError, match="cannot be used"):
        Store(tmp_path, SMALL).open()


def test_what_an_interrupted_server_left_is_removed(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with Store(tmp_path, SMALL) as store:
        store._upkeep.stop()
        fill(store, 2)
        # As if the process had died before the manifest was replaced, and nobody could clean up.
        monkeypatch.setattr("ragged_server.store.seal.write_manifest", killed)
        monkeypatch.setattr("ragged_server.store.seal._is_listed", lambda *_: True)
        with pytest.raises(KeyboardInterrupt):
            store._upkeep._seal(store._log.segments[0])
        monkeypatch.undo()
    (left,) = tmp_path.glob("shard-*")
    foreign = tmp_path / "shard-0000000000000000-00000.arrow"
    foreign.write_bytes(b"somebody else's")
    with Store(tmp_path, SMALL) as store:
        sealed(store, 1)
        settled(store, lambda: not left.exists())
        assert foreign.exists()
        assert len(stored_ids(store)) == 8


def test_a_missing_shard_is_an_error_of_the_reader_only(tmp_path):
    with Store(tmp_path, SMALL) as store:
        fill(store, 2)
        sealed(store, 1)
        (shard,) = tmp_path.glob("shard-*")
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(LogDamagedError) as caught:
            store.read(None, max_bytes=ROOM)
        assert isinstance(caught.value.__cause__, BrokenShardError)
        fill(store, 1, start=2)


def test_batches_are_cut_to_rows_and_bytes():
    batch = samples(40)
    by_rows = list(resized(iter([batch.slice(0, 13), batch.slice(13)]), 8, 1 << 30))
    assert [part.num_rows for part in by_rows] == [8] * 5
    limit = batch.nbytes // 8
    by_bytes = list(resized(iter([batch]), 1000, limit))
    assert all(part.nbytes <= limit + 256 for part in by_bytes)
    assert len(by_bytes) <= 20
    for parts in (by_rows, by_bytes):
        assert_ragged_equal(rf.concat(parts), batch)


def write_beside(directory, batch):
    with rf.Writer(directory, batch.schema, mode="append") as writer:
        writer.write(batch)


@pytest.mark.parametrize("restart", ["before sealing", "after sealing"])
def test_a_dataset_that_others_wrote_beside_a_young_log_is_kept(tmp_path, restart):
    """Before the first segment is sealed there is no manifest that says whose directory it is."""
    foreign = samples(3, prefix="foreign-")
    with Store(tmp_path, SMALL) as store:
        fill(store, 1)
        write_beside(tmp_path, foreign)
        if restart == "after sealing":
            fill(store, 1, start=1)
            sealed(store, 1)
    with Store(tmp_path, SMALL) as store:
        fill(store, 3)
        sealed(store, 1)
        ids = stored_ids(store)
        assert len(ids) == len(set(ids)) == 12
        settled(store, lambda: store.status().upkeep_failure is None)
        more = samples(2, prefix="more-")
        write_beside(tmp_path, more)
        fill(store, 2, start=3)
        sealed(store, 2)
        in_log = stored_ids(store)
    listed = ids_of(rf.Dataset(tmp_path).batches())
    assert {name for name in listed if name.startswith(("foreign-", "more-"))} == {
        *ids_of([foreign]), *ids_of([more])
    }  # fmt: skip
    assert [name for name in listed if name.startswith("g")] == in_log[: len(listed) - 5]
    assert len(in_log) == 20


def test_a_dataset_of_other_columns_beside_a_young_log_is_refused(tmp_path):
    other = rf.sample_schema(vocab_size=7, columns=[])
    row = {"sample_id": "a", "input_ids": [1], "completion_mask": [0]}
    with Store(tmp_path, SMALL) as store:
        fill(store, 1)
        write_beside(tmp_path, pa.RecordBatch.from_pylist([row], schema=other))
        fill(store, 1, start=1)
        settled(store, lambda: "other columns" in (store.status().upkeep_failure or ""))
        assert len(stored_ids(store)) == 8
    with pytest.raises(SchemaMismatchError, match="other columns beside the log"):
        Store(tmp_path, SMALL).open()
    (tmp_path / "manifest.json").unlink()
    with Store(tmp_path, SMALL) as store:
        sealed(store, 1)
        assert len(stored_ids(store)) == 8


def test_a_segment_is_sealed_although_the_clock_was_put_back(tmp_path):
    now = [1e9]
    settings = replace(SMALL, segment_age_s=60)
    with Store(tmp_path, settings, clock=lambda: now[0]) as store:
        fill(store, 1)
        now[0] -= 86_400
        fill(store, 1, start=1)
        sealed(store, 1)
        assert len(stored_ids(store)) == 8


def test_a_shard_that_was_changed_on_disk_is_not_served(tmp_path):
    with Store(tmp_path, SMALL) as store:
        fill(store, 2)
        sealed(store, 1)
    (shard,) = tmp_path.glob("shard-*")
    data = bytearray(shard.read_bytes())
    tokens = rf.Dataset(tmp_path).batches()
    values = next(iter(tokens)).column("input_ids").flatten()
    at = data.index(values.buffers()[1].slice(values.offset * 4, 16).to_pybytes())
    data[at] ^= 1
    shard.write_bytes(data)
    with Store(tmp_path, SMALL) as store:
        with pytest.raises(LogDamagedError, match="gone or damaged"):
            store.read(None, max_bytes=ROOM)
        store.append(request(samples(2, prefix="more"))).result()
