"""Pages: bounded, complete, in order, whatever the share and whatever was sealed meanwhile."""

import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.store_kit import ROOM, everything, ids_of, request, samples, stored_ids

import ragged_format as rf
from ragged_format.errors import LimitExceededError
from ragged_format.testing import assert_ragged_equal, sample_batches
from ragged_server.store.cursors import decode_cursor
from ragged_server.store.prepare import prepare
from ragged_server.store.reading import find_part, record_sizes
from ragged_server.store.records import StoreSettings
from ragged_server.store.share import in_share, share_hashes
from ragged_server.store.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A log whose first half is sealed, in requests of several sizes."""
    folder = tmp_path_factory.mktemp("read")
    settings = StoreSettings(segment_records=40, batch_rows=16)
    with Store(folder, settings) as opened:
        opened._upkeep.stop()
        opened._upkeep._stopped = False
        for number, size in enumerate([1, 7, 40, 3, 30, 12]):
            batch = samples(size, prefix=f"g{number}-", seed=number)
            opened.append(request(batch)).result()
            if number == 3:
                opened._upkeep.round()
        assert opened._log.shards
        assert opened._log.segments
        yield opened


@pytest.fixture(scope="module")
def whole(store):
    return rf.concat(everything(store))


def pages(store, max_bytes, **options):
    out, cursor = [], None
    while True:
        page = store.read(cursor, max_bytes=max_bytes, **options)
        out.append(page)
        if not page.lag:
            return out
        assert page.cursor != cursor
        cursor = page.cursor


@pytest.mark.parametrize("max_bytes", [1, 2_000, 20_000, ROOM], ids=["1", "2 KB", "20 KB", "all"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_pages_are_bounded_and_complete(store, whole, max_bytes, world_size):
    sizes = dict(zip(ids_of([whole]), record_sizes(whole).tolist(), strict=True))
    seen = []
    for rank in range(world_size):
        for page in pages(store, max_bytes, rank=rank, world_size=world_size):
            names = ids_of(page.batches)
            assert page.records == len(names)
            assert len(names) <= 1 or sum(sizes[name] for name in names) <= max_bytes
            assert page.cursors[-1:] == ((page.cursor,) if names else ())
            seen += names
    assert sorted(seen) == sorted(sizes)
    if world_size == 1:
        assert seen == ids_of([whole])


def test_shares_keep_groups_whole(store, whole):
    groups = dict(zip(ids_of([whole]), whole.column("group_id").to_pylist(), strict=True))
    ranks = [{groups[name] for name in stored_ids(store, rank=r, world_size=4)} for r in range(4)]
    assert sum(map(len, ranks)) == len(set.union(*ranks)) == len(set(groups.values()))


def test_records_of_a_share_are_those_that_were_sent(store, whole):
    for rank in range(2):
        mine = rf.concat(everything(store, rank=rank, world_size=2))
        keep = np.flatnonzero(in_share(share_hashes(whole), rank, 2))
        assert_ragged_equal(mine, rf.take(whole, keep))


def test_records_without_group_are_shared_by_their_id():
    batch = samples(64, columns=[])
    hashes = share_hashes(batch)
    assert len(set(hashes.tolist())) == 64
    parts = [in_share(hashes, rank, 3) for rank in range(3)]
    assert np.array_equal(sum(part.astype(int) for part in parts), np.ones(64))


def test_a_cursor_of_each_batch_leads_to_the_next(store):
    page = store.read(None, max_bytes=ROOM)
    assert len(page.cursors) == len(page.batches) > 3
    following = ids_of(page.batches)
    for batch, cursor in zip(page.batches, page.cursors, strict=True):
        following = following[batch.num_rows :]
        assert ids_of(store.read(cursor, max_bytes=ROOM).batches) == following


def test_stale_records_are_left_out_and_unknown_versions_are_not(store, whole):
    versions = whole.column("policy_version").to_pylist()
    assert None in versions
    least = sorted(version for version in versions if version is not None)[len(versions) // 2]
    got = stored_ids(store, min_policy_version=least)
    wanted = [
        name for name, version in zip(ids_of([whole]), versions, strict=True)
        if version is None or version >= least
    ]  # fmt: skip
    assert got == wanted
    nothing = store.read(None, max_bytes=ROOM, rank=0, world_size=1, min_policy_version=1 << 60)
    assert nothing.lag == 0


def test_a_page_that_finds_nothing_still_moves_on(tmp_path):
    batch = samples(6, columns=["policy_version"])
    old = batch.set_column(
        batch.schema.get_field_index("policy_version"), batch.schema.field("policy_version"),
        pa.array([1] * 6, pa.int64()),
    )  # fmt: skip
    with Store(tmp_path, StoreSettings()) as opened:
        end = opened.append(request(old)).result().cursor
        page = opened.read(None, max_bytes=1, min_policy_version=2)
        assert (page.batches, page.cursors, page.cursor) == ((), (), end)


@pytest.mark.parametrize(
    ("rank", "world_size"), [(1, 1), (-1, 2), (0, 0), (0, -1), (True, 2), (0, 1.0)], ids=repr
)
def test_impossible_shares_are_refused(store, rank, world_size):
    with pytest.raises(LimitExceededError):
        store.read(None, max_bytes=1, rank=rank, world_size=world_size)


@given(batch=sample_batches())
def test_record_sizes_are_those_of_their_buffers(batch):
    assert int(record_sizes(batch).sum()) <= batch.nbytes + 16 * (len(batch.schema) + 1)
    parts = [int(record_sizes(batch.slice(row, 1))[0]) for row in range(batch.num_rows)]
    assert parts == record_sizes(batch).tolist()


def test_find_part():
    class Some:
        def __init__(self, first):
            self.first_sequence = first

    parts = [Some(0), Some(5), Some(9), Some(9)]
    assert [find_part(parts, at) for at in (0, 4, 5, 8, 9, 100)] == [0, 0, 1, 1, 3, 3]


@given(data=st.data())
def test_any_requests_are_stored_once_in_order(tmp_path_factory, data):
    """Random requests of known and new records, restarts and sealing, against a plain list."""
    folder = tmp_path_factory.mktemp("any")
    pool = samples(24, columns=["group_id"])
    settings = StoreSettings(
        segment_records=data.draw(st.integers(1, 12)), batch_rows=4, grace_s=0.0
    )
    expected = []
    store = Store(folder, settings)
    store.open()
    try:
        for _ in range(data.draw(st.integers(1, 8))):
            start = data.draw(st.integers(0, 23))
            part = pool.slice(start, data.draw(st.integers(0, 6)))
            names = ids_of([part])
            new = [name for name in names if name not in expected]
            answer = store.append(prepare(pool.schema, [part])).result()
            assert (answer.stored, answer.duplicates) == (len(new), len(names) - len(new))
            assert answer.first_sequence == len(expected) or not new
            expected += new
            assert decode_cursor(answer.cursor, store.log_id) == len(expected)
            if data.draw(st.booleans()):
                store.close()
                store = Store(folder, settings)
                store.open()
        assert stored_ids(store) == expected
    finally:
        store.close()


def test_readers_and_the_upkeep_do_not_disturb_each_other(tmp_path):
    settings = StoreSettings(segment_records=20, grace_s=0.0, batch_rows=8)
    with Store(tmp_path, settings) as opened:
        seen, failures = [[] for _ in range(3)], []
        done = threading.Event()

        def tail(out):
            cursor = None
            try:
                while True:
                    finished = done.is_set()
                    page = opened.read(cursor, max_bytes=20_000)
                    out += ids_of(page.batches)
                    cursor = page.cursor
                    if finished and not page.lag:
                        return
                    opened.wait(cursor, 0.01)
            except BaseException as err:  # noqa: BLE001 - the test wants to see it
                failures.append(err)

        readers = [threading.Thread(target=tail, args=(out,)) for out in seen]
        for reader in readers:
            reader.start()
        for number in range(60):
            opened.append(request(samples(4, prefix=f"g{number}-"))).result()
        done.set()
        for reader in readers:
            reader.join()
        assert failures == []
        expected = stored_ids(opened)
        assert len(expected) == 240
        assert seen == [expected] * 3
