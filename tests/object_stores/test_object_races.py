"""Writers that compete, stores that fail at the worst moment, and what is left afterwards."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from moto.s3.models import s3_backends

import ragged_format as rf
from ragged_format.storage import open_storage

URL = "s3://rollouts/live"
# Answers of errors are repeated by obstore as well: once, and soon.
ONCE = {"max_retries": 1, "backoff": {"init_backoff": timedelta(milliseconds=1)}}
NEVER = {"max_retries": 0}


def writer(samples, options, mode="append", **kwargs):
    return rf.Writer(URL, samples.schema, mode=mode, storage_options=options, **kwargs)


def append(samples, options, start, stop, mode="append"):
    with writer(samples, options, mode) as out:
        out.write(samples.slice(start, stop - start))


def ids_of(batch):
    return batch.column("sample_id").to_pylist()


def stored(options):
    dataset = rf.Dataset(URL, storage_options=options)
    return [i for batch in dataset.batches() for i in ids_of(batch)], dataset.generation


def test_appenders_at_the_same_time_lose_nothing(s3, options, samples):
    threads = [
        threading.Thread(target=append, args=(samples, options, n, n + 1)) for n in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, generation = stored(options)
    assert sorted(found) == sorted(ids_of(samples)[:10])
    assert generation == 10


APPEND = """
import sys, json
import ragged_format as rf
samples, = rf.read_file(sys.argv[1]).batches()
options = json.loads(sys.argv[2])
url = "s3://rollouts/live"
for n in range(int(sys.argv[3]), int(sys.argv[4])):
    with rf.Writer(url, samples.schema, mode="append", storage_options=options) as w:
        w.write(samples.slice(n, 1))
"""


def test_appending_processes_lose_nothing(s3, options, samples, tmp_path):
    rf.write_file(tmp_path / "samples.arrow", samples)
    command = [sys.executable, "-c", APPEND, str(tmp_path / "samples.arrow"), json.dumps(options)]
    workers = [subprocess.Popen([*command, str(n), str(n + 4)]) for n in (0, 4, 8)]
    assert [worker.wait(100) for worker in workers] == [0, 0, 0]
    found, generation = stored(options)
    assert sorted(found) == sorted(ids_of(samples)[:12])
    assert generation == 12


def test_both_of_two_commits_on_one_generation_count(s3, options, samples):
    append(samples, options, 0, 1)
    first, second = writer(samples, options), writer(samples, options)
    first.write(samples.slice(1, 1))
    second.write(samples.slice(2, 1))
    second.close()
    first.close()
    assert stored(options) == ([ids_of(samples)[n] for n in (0, 2, 1)], 3)


def test_of_two_creators_one_wins_and_the_other_leaves_nothing(s3, options, samples):
    first = writer(samples, options, "error")
    second = writer(samples, options, "error")
    first.write(samples.slice(0, 1))
    second.write(samples.slice(1, 1))
    second.close()
    with pytest.raises(rf.DatasetExistsError, match="already"):
        first.close()
    assert stored(options) == ([ids_of(samples)[1]], 1)
    assert len(s3.names()) == 2


@pytest.mark.parametrize("mode", ["error", "append", "overwrite"])
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("retry", [NEVER, ONCE], ids=["never", "once"])
def test_a_commit_whose_answer_is_lost_counts_once(s3, options, samples, mode, rows, retry):
    if mode != "error":
        append(samples, options, 30, 31)
    flaky = {**options, "retry_config": retry}
    with s3.fault("forget", "PUT", "manifest.json") as fault:
        append(samples, flaky, 0, rows, mode)
    assert fault.hits == 1
    kept = ids_of(samples)[30:31] if mode == "append" else []
    assert stored(options) == ([*kept, *ids_of(samples)[:rows]], 1 if mode == "error" else 2)


def test_a_lost_answer_and_a_faster_writer_do_not_confuse_each_other(s3, options, samples):
    append(samples, options, 0, 1)
    slow = writer(samples, {**options, "retry_config": NEVER})
    slow.write(samples.slice(1, 1))
    seen = []
    original = s3.fault

    with original("forget", "PUT", "manifest.json"):
        # The commit happens, its answer is lost, and another one follows before it is looked up.
        state = slow._session._storage
        read = state.tagged_manifest

        def raced():
            seen.append(None)
            if len(seen) == 2:
                append(samples, options, 2, 3)
            return read()

        state.tagged_manifest = raced
        slow.close()
    assert len(seen) == 2
    assert stored(options) == (ids_of(samples)[:3], 3)


@pytest.mark.parametrize("kind", ["refuse", "forget"])
@pytest.mark.parametrize("key", [r"\.arrow", r"\.lock", "manifest.json"])
def test_single_failures_do_not_matter(s3, options, samples, kind, key):
    append(samples, options, 0, 1)
    with s3.fault(kind, "PUT", key), s3.fault(kind, "GET", key), s3.fault(kind, "HEAD", key):
        append(samples, {**options, "retry_config": ONCE}, 1, 5)
        rf.Dataset(URL, storage_options={**options, "retry_config": ONCE}).verify()
    assert stored(options) == (ids_of(samples)[:5], 2)


def test_a_body_that_breaks_off_is_fetched_again(s3, options, samples):
    append(samples, options, 0, 20)
    with s3.fault("cut", "GET", r"\.arrow", times=2) as fault:
        assert stored(options)[0] == ids_of(samples)[:20]
    assert fault.hits == 2


def test_a_store_that_stays_away_ends_in_an_error_that_says_so(s3, options, samples):
    append(samples, options, 0, 1)
    away = {**options, "retry_config": NEVER}
    with s3.fault("refuse", "GET", "live", times=99), pytest.raises(rf.StorageError) as caught:
        rf.Dataset(URL, storage_options=away)
    assert caught.value.where.file == f"{URL}/manifest.json"
    assert "503" in caught.value.got
    out = writer(samples, away)
    out.write(samples.slice(1, 2))
    with (
        s3.fault("refuse", "PUT", "manifest.json", times=99),
        pytest.raises(rf.StorageError, match="look whether the commit took place"),
    ):
        out.close()
    assert stored(options) == (ids_of(samples)[:1], 1)
    # Nobody knows whether the manifest lists it, so that the shard stays until it is swept.
    assert len(s3.names()) == 3
    assert len(rf.sweep(URL, grace_s=0, storage_options=options)) == 1


def test_a_denied_upload_leaves_nothing_and_names_the_remedy(s3, options, samples):
    out = writer(samples, {**options, "retry_config": NEVER})
    out.write(samples)
    with (
        s3.fault("deny", "PUT", r"\.arrow", times=9),
        pytest.raises(rf.StorageError, match="denies") as caught,
    ):
        out.close()
    assert "AWS_ACCESS_KEY_ID" in caught.value.remedy
    assert s3.names() == []


def test_an_upload_in_parts_that_fails_leaves_no_parts(s3, options, samples, monkeypatch):
    monkeypatch.setattr("ragged_pipeline.stores.objects.PART_BYTES", 5 << 20)
    many = rf.concat([samples] * 400)
    out = writer(samples, {**options, "retry_config": NEVER}, validate="off")
    out.write(many)
    with s3.fault("deny", "PUT", r"\.arrow", times=99), pytest.raises(rf.StorageError):
        out.close()
    assert s3.names() == []
    assert s3.uploads() == []


def test_a_store_that_ignores_conditions_is_refused(s3, options, samples):
    with (
        s3.fault("ignore", "PUT", "live", times=99),
        pytest.raises(rf.UnsupportedFeatureError, match="ignores the conditions"),
    ):
        writer(samples, options)
    assert s3.names() == []


def age(names, seconds):
    """Have objects of the server look as if they were written some time ago."""
    for name in names:
        for account in s3_backends.values():
            bucket = account["aws"].buckets.get("rollouts")
            if bucket is not None and name in bucket.keys:
                bucket.keys[name].last_modified = datetime.now(UTC).replace(
                    tzinfo=None
                ) - timedelta(seconds=seconds)


def test_shards_that_an_overwrite_replaced_are_swept_after_the_grace_period(s3, options, samples):
    append(samples, options, 0, 2)
    reader = rf.Dataset(URL, storage_options=options)
    old = reader.shards[0].name
    age(s3.names(), 10_000)
    append(samples, options, 2, 4, "overwrite")
    assert rf.sweep(URL, grace_s=5_000, storage_options=options) == []
    assert [i for b in reader.batches() for i in ids_of(b)] == ids_of(samples)[:2]
    age([name for name in s3.names() if "replaced-" in name], 6_000)
    swept = rf.sweep(URL, grace_s=5_000, storage_options=options)
    assert [name for name in swept if name.endswith(".arrow")] == [old]
    assert stored(options)[0] == ids_of(samples)[2:4]
    assert len(s3.names()) == 2


def test_shards_of_a_living_writer_are_not_swept(s3, options, samples):
    append(samples, options, 0, 1)
    out = writer(samples, options, batch_rows=1, max_shard_bytes=1)
    out.write(samples.slice(1, 2))
    shards = [name for name in s3.names() if name.endswith(".arrow")]
    age(shards, 10_000)
    assert rf.sweep(URL, grace_s=5_000, storage_options=options) == []
    out.close()
    assert stored(options)[0] == ids_of(samples)[:3]


def test_a_writer_whose_shards_vanished_commits_nothing(s3, options, samples):
    append(samples, options, 0, 1)
    out = writer(samples, options, batch_rows=1, max_shard_bytes=1)
    out.write(samples.slice(1, 2))
    age(s3.names(), 10_000)
    assert len(rf.sweep(URL, grace_s=5_000, storage_options=options)) == 3
    with pytest.raises(rf.MissingShardError, match="vanished"):
        out.close()
    assert stored(options) == (ids_of(samples)[:1], 1)
    assert len(s3.names()) == 2


def test_files_of_others_are_not_swept(s3, options, samples):
    append(samples, options, 0, 1)
    for name in ("README.md", "shard-mine.arrow", "more/shard-0123456789abcdef-00000.arrow"):
        s3.put(f"live/{name}", b"x")
    before = s3.names()
    assert rf.sweep(URL, grace_s=0, storage_options=options) == []
    assert s3.names() == before
    with pytest.raises(rf.DatasetNotFoundError):
        rf.sweep("s3://rollouts/none", storage_options=options)


STALL = """
import sys, json, time
import ragged_format as rf
samples, = rf.read_file(sys.argv[1]).batches()
options = json.loads(sys.argv[2])
w = rf.Writer("s3://rollouts/live", samples.schema, mode="append", storage_options=options,
              batch_rows=1, max_shard_bytes=1)
w.write(samples.slice(0, 2))
w._flush()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_writer_leaves_what_a_sweep_and_the_next_writer_remove(
    s3, options, samples, tmp_path
):
    rf.write_file(tmp_path / "samples.arrow", samples)
    child = subprocess.Popen(
        [sys.executable, "-c", STALL, str(tmp_path / "samples.arrow"), json.dumps(options)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child.stdout:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert len(s3.names()) == 3  # two shards and a lease
    with pytest.raises(rf.DatasetNotFoundError):
        rf.Dataset(URL, storage_options=options)
    append(samples, options, 0, 1)
    assert list((tmp_path / "cache" / "staging").iterdir()) == []
    time.sleep(1.1)  # the server tells times in seconds
    assert len(rf.sweep(URL, grace_s=0, storage_options=options)) == 3
    assert stored(options)[0] == ids_of(samples)[:1]


def in_child(storage, results):
    try:
        storage.read_manifest()
    except rf.StorageError as err:
        results.put((err.code, err.remedy))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_does_not_hang(s3, options, samples):
    append(samples, options, 0, 1)
    storage = open_storage(URL, options)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=in_child, args=(storage, results))
    child.start()
    code, remedy = results.get(timeout=20)
    child.join(20)
    assert code == "RF-C010"
    assert "forkserver" in remedy
    assert os.getpid() != child.pid
