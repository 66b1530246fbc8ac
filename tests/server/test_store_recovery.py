"""Recovery: whatever the end of a segment looks like, what was committed is there, once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from support.store_kit import ids_of, request, samples, stored_ids

import ragged_format as rf
from ragged_format.digest import text_digest
from ragged_format.errors import TruncatedError
from ragged_server.store.errors import LogDamagedError
from ragged_server.store.records import StoreSettings
from ragged_server.store.segments import scan_segment
from ragged_server.store.store import Store


def filled(folder, groups=3, settings=None, rows=2):
    with Store(folder, settings or StoreSettings()) as store:
        for number in range(groups):
            store.append(request(samples(rows, prefix=f"g{number}-", columns=[]))).result()
        return stored_ids(store)


def only_segment(folder):
    (path,) = (folder / "log").glob("segment-*.arrows")
    return path


def test_every_truncation_point_keeps_whole_commits(tmp_path):
    ids = filled(tmp_path / "live", 2)
    path = only_segment(tmp_path / "live")
    data = path.read_bytes()
    ends = [0, *scan_segment(path, None).ends]
    cut = tmp_path / path.name
    cut.write_bytes(data)
    copy = tmp_path / "copy"
    for size in range(len(data), -1, -1):
        os.truncate(cut, size)
        scan = scan_segment(cut, None)
        whole = sum(end <= size for end in ends[1:])
        assert len(scan.commits) == whole
        assert scan.end_bytes == ends[whole]
        assert scan.later is None
        # Opening costs more, and does nothing else with what the scan found.
        if size % 499 and size not in ends:
            continue
        shutil.copytree(tmp_path / "live", copy)
        os.truncate(only_segment(copy), size)
        with Store(copy, StoreSettings()) as store:
            assert stored_ids(store) == ids[: 2 * whole]
            assert store._recovery.cut_bytes == size - ends[whole]
            again = store.append(request(samples(2, prefix="g0-", columns=[]))).result()
            assert again.duplicates == (2 if whole else 0)
        shutil.rmtree(copy)


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xff" * 64, b"garbage"], ids=["0", "ff", "text"])
def test_garbage_behind_the_last_commit_is_cut(tmp_path, tail):
    ids = filled(tmp_path)
    path = only_segment(tmp_path)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(tail)
    with Store(tmp_path, StoreSettings()) as store:
        assert store._recovery.cut_bytes == len(tail)
        assert stored_ids(store) == ids
        assert path.stat().st_size == size


def test_damage_before_acknowledged_records_is_an_error(tmp_path):
    filled(tmp_path)
    path = only_segment(tmp_path)
    scan = scan_segment(path, None)
    data = bytearray(path.read_bytes())
    for place in (0, 8, scan.ends[0] - 4, scan.batches[1].offset + 300, scan.ends[1] - 200):
        broken = data.copy()
        broken[place] ^= 0xFF
        path.write_bytes(broken)
        found = scan_segment(path, None)
        if len(found.commits) == 3:
            continue  # padding, which holds nothing
        with pytest.raises(LogDamagedError, match="damaged before records"):
            Store(tmp_path, StoreSettings()).open()
    path.write_bytes(data)
    with Store(tmp_path, StoreSettings()) as store:
        assert store.status().records == 6


def test_senders_of_records_cannot_make_recovery_slow(tmp_path, monkeypatch):
    """What was being written when the machine stopped may hold beginnings of commits only."""
    filled(tmp_path)
    path = only_segment(tmp_path)
    begin = (64 << 20).to_bytes(4, "little") + b'{"accounts":'
    path.write_bytes(path.read_bytes() + begin * 10_000)
    digested = []
    monkeypatch.setattr(
        "ragged_server.store.segments.text_digest",
        lambda text: digested.append(1) or text_digest(text),
    )
    scan = scan_segment(path, None)
    assert (len(scan.commits), scan.later, scan.fault is None) == (3, None, False)
    assert len(digested) < 100


@pytest.mark.parametrize("account", [None, "batches", "accounts", "log"])
def test_damage_is_told_whatever_accounts_are_named(tmp_path, account):
    with Store(tmp_path, StoreSettings()) as store:
        for number in range(3):
            options = {} if account is None else {"account": account}
            store.append(request(samples(1, prefix=f"r{number}-"), **options)).result()
    path = only_segment(tmp_path)
    data = bytearray(path.read_bytes())
    first = data.index(b"r0-")
    data[first] ^= 1
    path.write_bytes(data)
    assert scan_segment(path, None).later is not None
    with pytest.raises(LogDamagedError, match="damaged before records"):
        Store(tmp_path, StoreSettings()).open()


def test_a_missing_segment_is_an_error(tmp_path):
    settings = StoreSettings(segment_records=2)
    with Store(tmp_path, settings) as store:
        store._upkeep.stop()
        for number in range(3):
            store.append(request(samples(2, prefix=f"g{number}-"))).result()
    paths = sorted((tmp_path / "log").glob("segment-*"))
    assert len(paths) == 3
    paths[1].unlink()
    with pytest.raises(LogDamagedError, match="missing between"):
        Store(tmp_path, settings).open()


def test_a_segment_is_a_stream_for_other_readers(tmp_path):
    ids = filled(tmp_path)
    reader = rf.read_stream(only_segment(tmp_path))
    # Three batches, each followed by a commit, which has no rows.
    assert ids_of([next(reader) for _ in range(6)]) == ids
    with pytest.raises(TruncatedError, match="without its trailer"):
        next(reader)


def test_appending_goes_on_in_the_same_segment(tmp_path):
    ids = filled(tmp_path)
    with Store(tmp_path, StoreSettings()) as store:
        store.append(request(samples(2, prefix="later-", columns=[]))).result()
        assert len(stored_ids(store)) == len(ids) + 2
        assert only_segment(tmp_path)
        assert store.status().commits == 4


@pytest.mark.parametrize("name", ["server.json", "state.json"])
def test_lost_files_beside_the_log_cost_no_record(tmp_path, name):
    settings = StoreSettings(segment_records=2, grace_s=0)
    filled(tmp_path, settings=settings)
    with Store(tmp_path, settings) as store:
        ids = stored_ids(store)
        cursor = store.read(None, max_bytes=1).cursor
    (tmp_path / "log" / name).unlink(missing_ok=True)
    with Store(tmp_path, settings) as store:
        assert stored_ids(store) == ids
        # The manifest's lineage has the id of the log as well.
        assert store.read(cursor, max_bytes=1 << 20).records


def test_a_damaged_identity_is_an_error(tmp_path):
    filled(tmp_path)
    path = tmp_path / "log" / "server.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id": "00"}))
    with pytest.raises(LogDamagedError, match="identity"):
        Store(tmp_path, StoreSettings()).open()


CHILD = textwrap.dedent(
    """
    import sys, threading
    from pathlib import Path
    from ragged_server.store.records import StoreSettings
    from ragged_server.store.store import Store
    from support.store_kit import request, samples

    folder, life = Path(sys.argv[1]), sys.argv[2]
    store = Store(folder, StoreSettings(segment_bytes=150_000, grace_s=0.0))
    store.open()
    lock = threading.Lock()

    def send(worker):
        number = 0
        while True:
            prefix = f"{life}-{worker}-{number}-"
            store.append(request(samples(4, prefix=prefix))).result()
            with lock:
                sys.stdout.write(prefix + "\\n")
                sys.stdout.flush()
            number += 1

    for worker in range(4):
        threading.Thread(target=send, args=(worker,), daemon=True).start()
    threading.Event().wait()
    """
)


def kill_and_check(folder, lives, delays):
    """Let children append until they are killed; return (acknowledged, lost, stored twice)."""
    acknowledged = []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for life, delay in zip(range(lives), delays, strict=True):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), str(life)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        lines = [child.stdout.readline() for _ in range(delay)]
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
        # A line without its end was cut off by the kill.
        lines += rest.splitlines(keepends=True)
        acknowledged += [line.strip() for line in lines if line.endswith("\n")]
    with Store(folder, StoreSettings()) as store:
        found = stored_ids(store)
    prefixes = {name.rpartition("-")[0] for name in found}
    lost = [prefix for prefix in acknowledged if prefix not in prefixes]
    return len(acknowledged), len(lost), len(found) - len(set(found))


def test_killed_servers_lose_nothing(tmp_path):
    count, lost, twice = kill_and_check(tmp_path / "live", 3, [1, 25, 60])
    assert count >= 86
    assert (lost, twice) == (0, 0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_killed_servers_lose_nothing(tmp_path):
    delays = [1 + 7 * number % 60 for number in range(100)]
    count, lost, twice = kill_and_check(tmp_path / "live", 100, delays)
    assert count > 2000
    assert (lost, twice) == (0, 0)
