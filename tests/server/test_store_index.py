"""The id index: every id is found, whichever file or table holds it; damage is mended."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.store_kit import request, samples

from ragged_format.errors import RaggedError
from ragged_server.store.index import IdIndex, Table, _size_class
from ragged_server.store.records import StoreSettings
from ragged_server.store.runs import Entries, Run, merge_runs, run_range, write_run
from ragged_server.store.store import Store

SMALL = StoreSettings(segment_records=8, grace_s=0.0)


def keys(raw):
    data = raw.tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def entries(rng, count, first):
    ids = rng.integers(0, 256, (count, 16), dtype=np.uint8)
    digests = rng.integers(0, 256, (count, 16), dtype=np.uint8)
    return ids, digests, Entries.of(ids, digests, np.arange(first, first + count))


def found(index, ids):
    return index.look_up(keys(ids), ids)


def test_all_of_a_million_ids_are_found_and_no_other(tmp_path):
    rng = np.random.default_rng(0)
    index = IdIndex(tmp_path)
    parts, first = [], 0
    for count in [200_000] * 5 + [1, 0, 7]:
        ids, digests, sorted_entries = entries(rng, count, first)
        index.add_run(sorted_entries, first, first + count)
        parts.append((ids, digests))
        first += count
    while index.merge():
        pass
    assert index.num_ids == first
    assert len(index.runs) <= 5
    tracemalloc.start()
    for ids, digests in parts:
        some = rng.permutation(len(ids))[:500]
        assert found(index, ids[some]) == dict(
            zip(keys(ids[some]), keys(digests[some]), strict=True)
        )
    absent = rng.integers(0, 256, (500, 16), dtype=np.uint8)
    assert found(index, absent) == {}
    # Files are mapped: looking up needs little memory of its own.
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_ids_that_share_their_first_half_are_told_apart(tmp_path):
    ids = np.zeros((5, 16), np.uint8)
    ids[:, 15] = np.arange(5)
    digests = np.arange(80, dtype=np.uint8).reshape(5, 16)
    index = IdIndex(tmp_path)
    index.add_run(Entries.of(ids[:4], digests[:4], np.arange(4)), 0, 4)
    assert found(index, ids) == dict(zip(keys(ids[:4]), keys(digests[:4]), strict=True))


def test_a_merge_leaves_out_what_is_past_its_time(tmp_path):
    rng = np.random.default_rng(1)
    index = IdIndex(tmp_path)
    all_ids = []
    for number in range(4):
        ids, _, some = entries(rng, 100, 100 * number)
        index.add_run(some, 100 * number, 100 * number + 100)
        all_ids.append(ids)
    index.floor = 150
    assert len(found(index, np.concatenate(all_ids))) == 250
    assert index.merge()
    assert (len(index.runs), index.num_ids) == (1, 250)
    assert len(found(index, np.concatenate(all_ids))) == 250
    assert index.gaps(0, 400) == []
    index.floor = 400
    index.drop_expired()
    assert (index.num_ids, list(tmp_path.iterdir())) == (0, [])


def test_merging_is_bounded_in_memory(tmp_path):
    rng = np.random.default_rng(2)
    runs = []
    for number in range(4):
        count = 400_000
        _, _, some = entries(rng, count, count * number)
        runs.append(write_run(tmp_path, some, count * number, count * (number + 1)))
        del some
    tracemalloc.start()
    merged = merge_runs(tmp_path, runs, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(merged) == 1_600_000
    assert peak < 48 << 20 < merged.nbytes
    high = merged.entries.high
    assert (high[1:] >= high[:-1]).all()
    Run(merged.path)  # its checksum holds


def test_a_merge_that_is_stopped_changes_nothing(tmp_path):
    rng = np.random.default_rng(2)
    index = IdIndex(tmp_path)
    for number in range(4):
        index.add_run(entries(rng, 10, 10 * number)[2], 10 * number, 10 * number + 10)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert not index.merge(lambda: True)
    assert (len(index.runs), index.num_ids) == (4, 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert index.merge()


def test_sizes_grow_by_the_fan_in():
    class Sized:
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

    assert [_size_class(Sized(n)) for n in (0, 1 << 16, (1 << 16) + 1, 1 << 20)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:20]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-8] + bytes(8)),
        lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_name(f"index-{0:020d}-{999:020d}.ids")),
    ],
    ids=["cut", "head", "empty", "values", "magic", "gone", "renamed"],
)
def test_a_damaged_or_missing_run_is_made_anew(tmp_path, harm):
    with Store(tmp_path, SMALL) as store:
        for number in range(4):
            store.append(request(samples(4, prefix=f"g{number}-"))).result()
        store._upkeep.stop()
        store._upkeep._stopped = False
        store._upkeep.round()
        assert len(store._index.runs) == 2
    runs = sorted((tmp_path / "log").glob("index-*"))
    assert [run_range(path.name) for path in runs] == [(0, 8), (8, 16)]
    harm(runs[0])
    with Store(tmp_path, SMALL) as store:
        assert store._recovery.rebuilt_index
        assert store._index.gaps(0, 16) == []
        for number in range(4):
            batch = samples(4, prefix=f"g{number}-")
            assert store.append(request(batch)).result().duplicates == 4
    with Store(tmp_path, SMALL) as store:
        assert not store._recovery.rebuilt_index


def test_an_interrupted_merge_leaves_one_answer(tmp_path):
    rng = np.random.default_rng(3)
    index = IdIndex(tmp_path)
    for number in range(4):
        index.add_run(entries(rng, 10, 10 * number)[2], 10 * number, 10 * number + 10)
    saved = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert index.merge()
    for path, data in saved.items():
        path.write_bytes(data)
    again = IdIndex(tmp_path)
    assert again.load(40) == []
    assert (len(again.runs), again.num_ids) == (1, 40)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_table_becomes_a_run(tmp_path):
    index = IdIndex(tmp_path)
    table = Table(5)
    index.add_table(table)
    rng = np.random.default_rng(4)
    ids, digests, _ = entries(rng, 6, 5)
    table.ids.update(zip(keys(ids), keys(digests), strict=True))
    before = found(index, ids)
    index.flush(table)
    assert (index.tables, index.runs[0].first, index.runs[0].end) == ((), 5, 11)
    assert found(index, ids) == before == table.ids
    empty = Table(11)
    index.add_table(empty)
    index.flush(empty)
    assert len(index.runs) == 1


def test_a_run_of_another_name_is_refused(tmp_path):
    run = write_run(tmp_path, entries(np.random.default_rng(5), 3, 0)[2], 0, 3)
    other = run.path.with_name(f"index-{0:020d}-{4:020d}.ids")
    run.path.rename(other)
    with pytest.raises(RaggedError):
        Run(other)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_million_ids_stay_bounded(tmp_path):
    rng = np.random.default_rng(6)
    index = IdIndex(tmp_path)
    count, first, kept = 1 << 18, 0, []
    resident = []
    while first < 100_000_000:
        ids, digests, some = entries(rng, count, first)
        index.add_run(some, first, first + count)
        first += count
        kept.append((ids[:3].copy(), digests[:3].copy()))
        while index.merge():
            pass
        if len(kept) % 64 == 0:
            text = Path("/proc/self/status").read_text()
            resident.append(int(text.split("RssAnon:")[1].split()[0]))
    assert index.num_ids == first
    assert len(index.runs) <= 24
    for ids, digests in kept:
        assert found(index, ids) == dict(zip(keys(ids), keys(digests), strict=True))
    # In kilobytes, from the second sample on: flat, whatever the number of ids.
    assert max(resident[1:]) - min(resident[1:]) < 100_000
