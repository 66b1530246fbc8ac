"""A store in another process behaves like one in this."""

import multiprocessing
import pickle
import threading

import numpy as np
import pytest
from support.store_kit import ROOM, everything, ids_of, request, samples, stored_ids

from ragged_format.errors import SchemaMismatchError, Where
from ragged_format.testing import assert_ragged_equal
from ragged_server.process.remote_protocol import error_from_json, error_to_json
from ragged_server.process.remote_store import RemoteStore, StoreServer
from ragged_server.store.errors import (
    ClosedStoreError,
    ConflictError,
    CursorExpiredError,
    StorageFailedError,
    StorageFullError,
)
from ragged_server.store.records import StoreSettings
from ragged_server.store.store import Store


@pytest.fixture
def pair(tmp_path):
    with (
        Store(tmp_path / "live", StoreSettings()) as store,
        StoreServer(store, tmp_path / "s") as server,
        RemoteStore(server.path) as remote,
    ):
        yield store, remote


def test_appends_and_reads_are_those_of_the_store(pair):
    store, remote = pair
    batch = samples(9)
    assert remote.schema is None
    answer = remote.append(request(batch, account="a", idempotency_key="k")).result(30)
    assert (answer.stored, answer.replayed) == (9, False)
    again = remote.append(request(batch, account="a", idempotency_key="k")).result(30)
    assert again.replayed
    assert store.read(None, max_bytes=ROOM).cursor == answer.cursor
    for options in ({}, {"rank": 1, "world_size": 2}, {"min_policy_version": 3}):
        mine = remote.read(None, max_bytes=4_000, **options)
        own = store.read(None, max_bytes=4_000, **options)
        assert (mine.cursor, mine.cursors, mine.lag) == (own.cursor, own.cursors, own.lag)
        for left, right in zip(mine.batches, own.batches, strict=True):
            assert_ragged_equal(left, right, check_schema=True)
    assert remote.status() == store.status()
    assert remote.status().recovery == store.status().recovery
    assert remote.schema.equals(store.schema, check_metadata=True)


def test_duplicates_in_part_are_taken_out(pair):
    _, remote = pair
    batch = samples(8)
    remote.append(request(batch.slice(2, 3))).result(30)
    answer = remote.append(request(batch)).result(30)
    assert (answer.stored, answer.duplicates) == (5, 3)
    assert sorted(stored_ids(remote)) == sorted(ids_of([batch]))


def test_errors_keep_their_class(pair):
    _, remote = pair
    remote.append(request(samples(3))).result(30)
    with pytest.raises(ConflictError, match="other content") as caught:
        remote.append(request(samples(3, seed=1))).result(30)
    assert caught.value.where == Where(row=0, column="sample_id")
    with pytest.raises(SchemaMismatchError):
        remote.append(request(samples(1, columns=[]))).result(30)


@pytest.mark.parametrize(
    "error",
    [
        StorageFullError("full", retry_after_s=3.0, got="x"),
        CursorExpiredError("old", oldest="abc"),
        SchemaMismatchError("odd", code="RF-S010", where=Where(column="c"), expected=[1]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes_whole(error):
    for other in (error_from_json(error_to_json(error)), pickle.loads(pickle.dumps(error))):
        assert (type(other), str(other)) == (type(error), str(error))
        for name in ("retry_after_s", "oldest"):
            assert getattr(other, name, None) == getattr(error, name, None)
    assert isinstance(error_from_json(error_to_json(ValueError("x"))), StorageFailedError)


def test_waiting_and_subscribing(pair):
    store, remote = pair
    start = remote.read(None, max_bytes=1).cursor
    assert not remote.wait(start, 0.01)
    called = threading.Event()
    end = remote.subscribe(called.set)
    store.append(request(samples(1))).result(30)
    assert remote.wait(start, 30)
    assert remote.wait(None, 30)
    assert called.wait(30)
    assert remote.schema is not None
    end()


def test_a_subscriber_that_fails_hurts_nobody(pair, caplog):
    store, remote = pair
    failed, called = threading.Event(), threading.Event()

    def faulty():
        failed.set()
        raise ZeroDivisionError

    remote.subscribe(faulty)
    remote.subscribe(called.set)
    store.append(request(samples(1))).result(30)
    assert failed.wait(30)
    assert called.wait(30)
    assert remote.append(request(samples(1, prefix="b"))).result(30).stored == 1
    assert "a subscriber failed" in caplog.text


def push(path, worker, results):
    with RemoteStore(path) as remote:
        futures = [
            remote.append(request(samples(3, prefix=f"w{worker}-{number}-", seed=worker)))
            for number in range(20)
        ]
        stored = sum(future.result(60).stored for future in futures)
        results.put((worker, stored, len(stored_ids(remote)) >= stored))


def test_workers_in_processes_share_one_log(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with Store(tmp_path / "live", StoreSettings(segment_records=50)) as store:
        with StoreServer(store, tmp_path / "s") as server:
            workers = [
                context.Process(target=push, args=(server.path, number, results))
                for number in range(2)
            ]
            for worker in workers:
                worker.start()
            answers = sorted(results.get(timeout=100) for _ in workers)
            for worker in workers:
                worker.join()
        assert answers == [(0, 60, True), (1, 60, True)]
        found = stored_ids(store)
        assert len(found) == len(set(found)) == 120


def test_a_server_that_is_gone_fails_all_calls(tmp_path):
    with Store(tmp_path / "live", StoreSettings()) as store:
        server = StoreServer(store, tmp_path / "s")
        remote = RemoteStore(server.path)
        remote.open()
        assert remote.append(request(samples(1))).result(30).stored == 1
        server.close()
        with pytest.raises(ClosedStoreError):
            remote.append(request(samples(1, prefix="b"))).result(30)
        with pytest.raises(ClosedStoreError):
            remote.read(None, max_bytes=1)
        assert not remote.wait(store.read(None, max_bytes=ROOM).cursor, 30)
        remote.close()
        assert not server.path.exists()
    with pytest.raises(ClosedStoreError, match="no connection"):
        RemoteStore(tmp_path / "s", timeout_s=0).open()


def test_a_worker_that_dies_hurts_nobody(pair, tmp_path):
    store, remote = pair
    other = RemoteStore(remote._path)
    other.open()
    future = other.append(request(samples(2)))
    other._sock.shutdown(2)
    other.close()
    assert future.done()
    assert remote.append(request(samples(2, prefix="b"))).result(30).stored == 2
    assert set(stored_ids(store)) >= set(ids_of([samples(2, prefix="b")]))


def test_a_frame_that_is_none_of_ours_is_answered(pair):
    _, remote = pair
    for head in ({"op": "append"}, {"op": "append", "messages": [99], "rows": 1}):
        with pytest.raises(StorageFailedError, match="the store failed"):
            remote._call(head).result(30)
    assert remote.append(request(samples(1))).result(30).stored == 1


def test_only_the_user_may_connect(tmp_path):
    with Store(tmp_path / "live", StoreSettings()) as store:
        with StoreServer(store, tmp_path / "s") as server:
            assert server.path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(StorageFailedError, match="cannot be made"):
            StoreServer(store, tmp_path / ("long" * 40))


def test_large_requests_cross_whole(pair):
    _, remote = pair
    batch = samples(64, length=2000)
    assert batch.nbytes > 4 << 20
    assert remote.append(request(batch)).result(30).stored == 64
    found = everything(remote)
    assert sum(part.num_rows for part in found) == 64
    assert np.array_equal(request(found[0]).record_digests[:5], request(batch).record_digests[:5])
