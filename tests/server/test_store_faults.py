"""What is acknowledged survives any fault of the disk and any loss of power, once."""

import errno
import random
import shutil
import time
from contextlib import suppress

import pytest
from support.faulty_files import FaultyFiles, PowerLost
from support.store_kit import everything, ids_of, request, samples, stored_ids

from ragged_server.store.errors import (
    ClosedStoreError,
    ConflictError,
    LogDamagedError,
    StorageFailedError,
    StorageFullError,
)
from ragged_server.store.records import StoreSettings
from ragged_server.store.store import Store

SETTINGS = StoreSettings(segment_bytes=15_000, grace_s=0.0, batch_rows=16)


class Ledger:
    """What a client knows: what it sent, and what was acknowledged."""

    def __init__(self):
        self.sent = {}
        self.acknowledged = set()

    def check(self, store):
        """Return (acknowledged records lost, records stored twice)."""
        found = ids_of(everything(store))
        lost = self.acknowledged - set(found)
        assert set(found) <= set(self.sent)
        return len(lost), len(found) - len(set(found))


def run_schedule(folder, seed, *, syncs=True):
    """Send, fail, lose power and recover, as the seed wants; return what the ledger misses."""
    rng = random.Random(seed)
    ledger = Ledger()
    lost = twice = 0
    for life in range(4):
        layer = FaultyFiles(rng, syncs=syncs)
        layer.short = 0.2
        store = Store(folder, SETTINGS, layer=layer)
        store.open()
        missing, again = ledger.check(store)
        lost, twice = lost + missing, twice + again
        # The upkeep would race with the loss of power.
        store._upkeep.stop()
        layer.odds = rng.choice([0.0, 0.02, 0.2])
        sent = list(ledger.sent.values())
        for step in range(rng.randrange(2, 8)):
            if layer.lost:
                break
            batch = samples(3, seed=life * 100 + step, prefix=f"l{life}-{step}-")
            parts = [batch, *rng.sample(sent, min(len(sent), 2))]
            with store._changed:
                futures = [store.append(request(part)) for part in parts]
            ledger.sent.update((name, batch) for name in ids_of([batch]))
            for part, future in zip(parts, futures, strict=True):
                if answered(future, layer):
                    ledger.acknowledged.update(ids_of([part]))
            sent.append(batch)
            if rng.random() < 0.4:
                # Seal here and now: its thread would race with the loss of power.
                store._upkeep._stopped = False
                with suppress(OSError, PowerLost):
                    store._upkeep.round()
        abandon(store)
        layer.lose_power()
    with Store(folder, SETTINGS) as store:
        missing, again = ledger.check(store)
    return lost + missing, twice + again


def answered(future, layer):
    """Return whether a request was acknowledged; not if it was refused or the power went."""
    while True:
        try:
            future.result(0.01)
        except TimeoutError:
            if layer.lost and not future.done():
                return False
        except OSError:
            return False
        else:
            return True


def abandon(store):
    """Leave a store as if its process had died."""
    with store._changed:
        store._state = "closing"
        store._changed.notify_all()
    store._writer.join()
    store._upkeep.stop()
    store._log.close_segment()
    store._lock.release()


# A writer whose power goes ends with an exception that nobody is there to hear.
power_goes = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@power_goes
@pytest.mark.parametrize("seed", range(25))
def test_random_faults_lose_nothing_that_was_acknowledged(tmp_path, seed):
    assert run_schedule(tmp_path / "live", seed) == (0, 0)


@power_goes
def test_the_same_schedules_find_a_missing_sync(tmp_path):
    # Were the sync taken out, the test above would fail: the schedules do find it.
    lost = 0
    for seed in range(8):
        try:
            lost += run_schedule(tmp_path / str(seed), seed, syncs=False)[0]
        except OSError:
            lost += 1  # damage that recovery refuses
    assert lost > 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, StorageFullError), (errno.EIO, StorageFailedError),
     (errno.EROFS, StorageFailedError), (errno.EDQUOT, StorageFullError)],
    ids=["ENOSPC", "EIO", "EROFS", "EDQUOT"],
)  # fmt: skip
@pytest.mark.parametrize("operation", ["create", "write", "sync", "truncate", "sync_directory"])
def test_a_fault_refuses_the_request_and_no_other(tmp_path, operation, code, kind):
    layer = FaultyFiles(random.Random(0))
    with Store(tmp_path, StoreSettings(), layer=layer) as store:
        if operation not in {"create", "sync_directory"}:
            store.append(request(samples(2, prefix="before"))).result(30)
        layer.faults = (
            {operation: code, "write": code} if operation == "truncate" else {operation: code}
        )
        batch = samples(3)
        with pytest.raises(kind) as caught:
            store.append(request(batch)).result(30)
        assert caught.value.retry_after_s > 0
        assert store.status().failure is not None
        before = stored_ids(store)
        assert not set(before) & set(ids_of([batch]))
        # What is on disk already is still acknowledged.
        if before:
            again = store.append(request(samples(2, prefix="before"))).result(30)
            assert again.duplicates == 2
        layer.faults = {}
        assert store.append(request(batch)).result(30).stored == 3
        assert store.status().failure is None
        poisoned = operation in {"sync", "truncate"}
        assert store.status().poisoned_segments == poisoned
        found = stored_ids(store)
    with Store(tmp_path, StoreSettings()) as store:
        assert stored_ids(store) == found == [*before, *ids_of([batch])]


@pytest.mark.parametrize("operation", ["write", "sync", "create"])
def test_a_store_finds_out_itself_that_the_disk_is_well_again(tmp_path, operation):
    # Nobody sends anything to a server that says it is not ready.
    layer = FaultyFiles(random.Random(0))
    with Store(tmp_path, StoreSettings(), layer=layer) as store:
        layer.faults = {operation: errno.ENOSPC}
        with pytest.raises(StorageFullError):
            store.append(request(samples(2))).result(30)
        assert not store._log.probe()
        assert store.status().failure is not None
        layer.faults = {}
        deadline = time.monotonic() + 30
        while store.status().failure is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not list((tmp_path / "log").glob("probe*"))
        assert store.append(request(samples(2))).result(30).stored == 2


def test_what_a_failed_sync_left_on_disk_does_not_count_twice(tmp_path):
    # The sync fails and so does the cut, and yet all the bytes are on disk after a restart.
    layer = FaultyFiles(random.Random(0))
    batch, other = samples(3), samples(3, prefix="other")
    with Store(tmp_path, StoreSettings(), layer=layer) as store:
        store.append(request(samples(2, prefix="before"))).result(30)
        layer.faults = {"sync": errno.EIO, "truncate": errno.EIO}
        with pytest.raises(StorageFailedError):
            store.append(request(batch)).result(30)
        layer.faults = {}
        store.append(request(other)).result(30)
        store.append(request(batch)).result(30)
        found = stored_ids(store)
    with Store(tmp_path, StoreSettings()) as store:
        assert store._recovery.cut_bytes > 0
        assert stored_ids(store) == found
        assert len(found) == len(set(found)) == 8


def test_what_depends_on_a_failed_group_fails_with_it(tmp_path):
    layer = FaultyFiles(random.Random(0))
    batch, other = samples(3), samples(3, seed=1)
    with Store(tmp_path, StoreSettings(), layer=layer) as store:
        store.append(request(samples(2, prefix="before"))).result(30)
        layer.faults = {"sync": errno.EIO}
        clash = request(samples(2, prefix="before", seed=1))
        with store._changed:
            futures = [store.append(request(part)) for part in (batch, batch, other)]
            early = store.append(clash)
        # The third is a conflict with what was not stored in the end.
        for future in futures:
            with pytest.raises(StorageFailedError):
                future.result(30)
        with pytest.raises(OSError):
            early.result(30)
        layer.faults = {}
        assert store.append(request(other)).result(30).stored == 3
        with pytest.raises(ConflictError):
            store.append(clash).result(30)


def test_a_subscriber_that_fails_hurts_nobody(tmp_path):
    with Store(tmp_path, StoreSettings()) as store:
        store.subscribe(lambda: 1 / 0)
        assert store.append(request(samples(1))).result(30).stored == 1
        assert store.status().failure is None


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFailedError, match="cannot be used"):
        Store(tmp_path / "file", StoreSettings()).open()


def test_a_fault_of_the_writer_itself_is_heard(tmp_path):
    with Store(tmp_path, StoreSettings()) as store:
        store._log.append = None
        with pytest.raises(StorageFailedError, match="TypeError"):
            store.append(request(samples(1))).result(30)
        assert store.status().failure
    with pytest.raises(ClosedStoreError):
        store.append(request(samples(1)))


def test_nothing_is_acknowledged_into_a_file_that_was_removed(tmp_path):
    with Store(tmp_path, StoreSettings()) as store:
        store.append(request(samples(2, prefix="a"))).result()
        (path,) = (tmp_path / "log").glob("segment-*")
        path.unlink()
        with pytest.raises(StorageFailedError, match="sync of a segment failed"):
            store.append(request(samples(2, prefix="b"))).result()
        store.append(request(samples(2, prefix="b"))).result()
    # What is lost is told, and no sequence is used twice.
    with pytest.raises(LogDamagedError, match="missing between"):
        Store(tmp_path, StoreSettings()).open()


def test_reading_what_is_gone_is_damage_of_the_log(tmp_path):
    with Store(tmp_path, StoreSettings()) as store:
        store.append(request(samples(2))).result()
        shutil.rmtree(tmp_path / "log")
        with pytest.raises(LogDamagedError, match="gone or damaged"):
            store.read(None, max_bytes=1)
