"""Retention: what is removed, when, and what outlives it."""

import errno
import logging
import threading
from dataclasses import replace

import pytest
from support.sealing import SMALL, fill, sealed, settled
from support.store_kit import ROOM, ids_of, request, samples, stored_ids

import ragged_format as rf
from ragged_format.manifest import read_manifest
from ragged_server.store.errors import (
    ConflictError,
    CursorExpiredError,
)
from ragged_server.store.ledger import save
from ragged_server.store.records import StoreSettings
from ragged_server.store.seal import seal_segment
from ragged_server.store.store import Store


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
