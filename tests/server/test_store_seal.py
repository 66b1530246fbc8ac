"""Sealing, retention and what stays valid over both."""

import errno
import logging
import threading
import time
from dataclasses import replace

import pyarrow as pa
import pytest
from support.store_kit import ROOM, everything, ids_of, request, samples, stored_ids

import ragged_format as rf
from ragged_format.errors import BrokenShardError, RaggedError, SchemaMismatchError
from ragged_format.manifest import read_manifest, write_manifest
from ragged_format.testing import assert_ragged_equal
from ragged_server.store.errors import (
    ConflictError,
    CursorExpiredError,
    LogDamagedError,
    StorageFailedError,
)
from ragged_server.store.ledger import save
from ragged_server.store.records import StoreSettings
from ragged_server.store.seal import resized, seal_segment
from ragged_server.store.store import Store

SMALL = StoreSettings(segment_records=8, grace_s=0.0, batch_rows=5)


def settled(store, condition, timeout_s=30):
    """Wait for the upkeep until something holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, store.status()
        store._upkeep.wake()
        time.sleep(0.005)


def fill(store, groups=6, size=4, start=0, **options):
    for number in range(start, start + groups):
        store.append(request(samples(size, prefix=f"g{number}-", **options))).result()


def sealed(store, shards):
    settled(store, lambda: len(store._log.shards) >= shards)


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


def retained(tmp_path, now, **limits):
    return Store(
        tmp_path, StoreSettings(segment_records=8, grace_s=0.0, **limits), clock=lambda: now[0]
    )


def test_retention_by_age_expires_cursors(tmp_path):
    now = [1000.0]
    with retained(tmp_path, now, retain_s=100.0) as store:
        start = store.read(None, max_bytes=1).cursor
        fill(store, 2)
        sealed(store, 1)
        now[0] += 60
        fill(store, 2, start=2)
        sealed(store, 2)
        assert store.read(start, max_bytes=ROOM).records == 16
        now[0] += 60
        settled(store, lambda: store.status().oldest_sequence == 8)
        with pytest.raises(CursorExpiredError) as caught:
            store.read(start, max_bytes=ROOM)
        oldest = store.read(caught.value.oldest, max_bytes=ROOM)
        assert oldest.records == store.status().records == 8
        assert store.read(None, max_bytes=ROOM).cursor == oldest.cursor
        settled(store, lambda: len(list(tmp_path.glob("shard-*"))) == 1)
    assert len(rf.Dataset(tmp_path)) == 8
    with retained(tmp_path, now, retain_s=100.0) as store:
        assert store.status().oldest_sequence == 8
        now[0] += 1000
        settled(store, lambda: store.status().records == 0)
        end = store.read(None, max_bytes=1).cursor
        fill(store, 1, start=4)
        assert store.read(end, max_bytes=ROOM).records == 4
    # The numbers go on where they stopped, though nothing was left.
    with retained(tmp_path, now) as store:
        assert store.status().next_sequence == 20


def test_what_upkeep_does_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ragged_server.store.upkeep")
    with retained(tmp_path, [0.0], retain_bytes=1) as store:
        fill(store, 5)
        settled(store, lambda: store.status().oldest_sequence == 16)
    lines = [record for record in caplog.records if record.name == "ragged_server.store.upkeep"]
    sealed_records = [line.records for line in lines if line.msg == "segment_sealed"]
    assert sum(sealed_records) >= 16
    assert [line.oldest_sequence for line in lines if line.msg == "shards_removed"][-1] == 16


def test_retention_by_bytes_keeps_the_newest(tmp_path):
    with retained(tmp_path, [0.0], retain_bytes=1) as store:
        fill(store, 5)
        settled(store, lambda: store.status().oldest_sequence == 16)
        # What is not sealed stays.
        assert len(stored_ids(store)) == 4


def test_retention_by_policy_version(tmp_path):
    with retained(tmp_path, [0.0]) as store:
        fill(store, 4)
        sealed(store, 2)
        newest = store.status().policy_version
    with retained(tmp_path, [0.0], retain_policy_version=newest) as store:
        store._upkeep.round()
        assert store.status().records == 16
    with retained(tmp_path, [0.0], retain_policy_version=newest + 1) as store:
        settled(store, lambda: store.status().records == 0)


def test_readers_keep_what_they_have_when_it_is_removed(tmp_path):
    now = [0.0]
    with retained(tmp_path, now, retain_s=10.0) as store:
        fill(store, 2)
        sealed(store, 1)
        page = store.read(None, max_bytes=ROOM)
        now[0] = 100.0
        settled(store, lambda: not list(tmp_path.glob("shard-*")))
        assert len(ids_of(page.batches)) == 8


def test_files_stay_for_a_time_of_grace(tmp_path):
    settings = StoreSettings(segment_records=8, grace_s=3600.0, retain_bytes=1)
    with Store(tmp_path, settings) as store:
        fill(store, 2)
        settled(store, lambda: store.status().oldest_sequence == 8)
        assert len(list(tmp_path.glob("shard-*"))) == 1
        assert not read_manifest(tmp_path).shards


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


@pytest.mark.parametrize("window", [0.0, 50.0], ids=["none", "50 s"])
def test_ids_outlive_their_samples_by_the_window(tmp_path, window):
    now = [1000.0]
    limits = {"retain_s": 10.0, "dedupe_window_s": window}
    with retained(tmp_path, now, **limits) as store:
        fill(store, 2)
        sealed(store, 1)
        now[0] += 20
        settled(store, lambda: store.status().records == 0)
        answer = store.append(request(samples(4, prefix="g0-"))).result()
        assert answer.duplicates == (4 if window else 0)
    with retained(tmp_path, now, **limits) as store:
        answer = store.append(request(samples(4, prefix="g1-"))).result()
        assert answer.duplicates == (4 if window else 0)
        with pytest.raises(ConflictError):
            store.append(request(samples(4, prefix="g1-", seed=1))).result()
        now[0] += 60
        settled(store, lambda: store._index.floor >= 8)
        answer = (
            store.append(request(samples(3, prefix="g1-", seed=2))).result() if window else None
        )
        assert answer is None or answer.stored == 3


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


def test_a_full_disk_does_not_keep_what_can_be_removed(tmp_path, monkeypatch):
    """Sealing needs room, and removing what is sealed makes it."""
    left = [2]

    def seal_while_there_is_room(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "no space left")
        return seal_segment(*arguments, **options)

    monkeypatch.setattr("ragged_server.store.upkeep.seal_segment", seal_while_there_is_room)
    with Store(tmp_path, replace(SMALL, retain_bytes=0)) as store:
        fill(store, 8)
        settled(store, lambda: not store._log.shards and not list(tmp_path.glob("shard-*")))
        settled(store, lambda: len(list((tmp_path / "log").glob("segment-*"))) == 2)
        settled(store, lambda: "no space" in (store.status().upkeep_failure or ""))
        assert store.status().records == 16
        left[0] = 100
        settled(store, lambda: store.status().records == 0)


def test_a_segment_goes_when_its_keys_are_saved_later(tmp_path, monkeypatch):
    failing = threading.Event()
    failing.set()

    def save_if_there_is_room(folder, text):
        if failing.is_set():
            raise OSError(errno.ENOSPC, "no space left")
        save(folder, text)

    monkeypatch.setattr("ragged_server.store.upkeep.save", save_if_there_is_room)
    with Store(tmp_path, SMALL) as store:
        fill(store, 4)
        settled(store, lambda: store.status().upkeep_failure)
        sealed(store, 1)
        assert len(list((tmp_path / "log").glob("segment-*"))) == 2
        failing.clear()
        settled(store, lambda: not list((tmp_path / "log").glob("segment-*")))


def test_ids_are_forgotten_although_the_server_ended_while_it_removed(tmp_path, monkeypatch):
    """Else they were duplicates for ever, of records that are not there."""
    batch = samples(8, prefix="gone-")
    with Store(tmp_path, SMALL) as store:
        store.append(request(batch)).result()
        sealed(store, 1)
    with monkeypatch.context() as patch, Store(tmp_path, replace(SMALL, retain_bytes=0)) as store:
        patch.setattr("ragged_server.store.ledger.Ledger.removed", lambda *_: None)
        settled(store, lambda: not store._log.shards)
    with Store(tmp_path, SMALL) as store:
        settled(store, lambda: store._index.floor == 8)
        assert store.append(request(batch)).result().stored == 8


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
