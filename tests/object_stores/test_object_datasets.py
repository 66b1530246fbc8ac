"""Datasets in a real S3 server: written, read, swept, and never in the way of each other."""

import pickle

import pytest

import ragged_format as rf
from ragged_format.storage import open_storage
from ragged_format.testing import assert_ragged_equal

URL = "s3://rollouts/runs/one"


def write(samples, options, url=URL, **kwargs):
    with rf.Writer(url, samples.schema, storage_options=options, **kwargs) as writer:
        writer.write(samples)
    return rf.Dataset(url, storage_options=options)


def ids(source):
    return [i for batch in source.batches() for i in batch.column("sample_id").to_pylist()]


@pytest.mark.parametrize("encoding", ["hot", "compact"])
def test_a_dataset_comes_back_as_it_was_written(s3, options, samples, encoding):
    dataset = write(samples, options, encoding=encoding, batch_rows=5, max_shard_bytes=1)
    assert len(dataset.shards) == 8
    assert_ragged_equal(rf.concat(list(dataset.batches())), samples)
    assert_ragged_equal(dataset.take([30, 2, -1]), rf.take(samples, [30, 2, 36]))
    dataset.verify()
    dataset.validate()
    assert dataset.path == URL
    names = [name.removeprefix("runs/one/") for name in s3.names()]
    assert sorted(names) == sorted(["manifest.json", *(s.name for s in dataset.shards)])


def test_nothing_is_seen_before_the_commit_and_nothing_left_after_an_exception(
    s3, options, samples
):
    writer = rf.Writer(
        URL, samples.schema, batch_rows=5, max_shard_bytes=1, storage_options=options
    )  # fmt: skip
    with pytest.raises(KeyError), writer:
        write_and_fail(writer, samples, s3, options)
    assert s3.names() == []
    assert s3.uploads() == []


def write_and_fail(writer, samples, s3, options):
    writer.write(samples)
    assert [name for name in s3.names() if name.endswith(".arrow")]
    with pytest.raises(rf.DatasetNotFoundError, match="no dataset here"):
        rf.Dataset(URL, storage_options=options)
    raise KeyError


def test_modes_are_those_of_a_directory(s3, options, samples):
    first = write(samples, options)
    with pytest.raises(rf.DatasetExistsError) as caught:
        rf.Writer(URL, samples.schema, storage_options=options)
    assert caught.value.where.file == f"{URL}/manifest.json"
    write(samples.slice(0, 3), options, mode="append")
    assert first.num_rows == 37
    assert first.refresh()
    assert (first.num_rows, first.generation) == (40, 2)
    second = write(samples.slice(5, 2), options, mode="overwrite")
    assert (second.num_rows, second.generation) == (2, 3)
    assert ids(first) == [*ids_of(samples), *ids_of(samples.slice(0, 3))]


def ids_of(batch):
    return batch.column("sample_id").to_pylist()


def test_an_empty_dataset(s3, options, samples):
    dataset = write(samples.slice(0, 0), options)
    assert dataset.num_rows == 0
    assert list(dataset.batches()) == []
    assert s3.names() == ["runs/one/manifest.json"]


def test_large_shards_go_up_and_come_down_in_parts(s3, options, samples, monkeypatch):
    monkeypatch.setattr("ragged_pipeline.stores.objects.PART_BYTES", 5 << 20)
    many = rf.concat([samples] * 400)
    with rf.Writer(URL, many.schema, storage_options=options, validate="off") as writer:
        writer.write(many)
    dataset = rf.Dataset(URL, storage_options=options)
    assert dataset.shards[0].bytes > 11 << 20
    assert s3.requests["POST"] >= 2  # a multipart upload
    before = s3.requests["GET"]
    dataset.verify()
    assert s3.requests["GET"] - before >= 3
    assert s3.uploads() == []


def test_shards_are_fetched_once_and_the_cache_is_bounded(s3, options, samples, tmp_path):
    write(samples, options, batch_rows=5, max_shard_bytes=1)
    before = s3.requests["GET"]
    dataset = rf.Dataset(URL, storage_options=options)
    ids(dataset)
    ids(rf.Dataset(URL, storage_options=options))
    assert s3.requests["GET"] - before == 8 + 2
    largest = max(shard.bytes for shard in dataset.shards)
    bounded = {**options, "cache_dir": str(tmp_path / "small"), "cache_bytes": 3 * largest}
    small = rf.Dataset(URL, storage_options=bounded)
    assert ids(small) == ids_of(samples)
    assert small.take(range(36, -1, -1)).column("sample_id").to_pylist() == ids_of(samples)[::-1]
    kept = list((tmp_path / "small").rglob("*.arrow"))
    assert sum(path.stat().st_size for path in kept) <= 3 * largest
    with pytest.raises(rf.LimitExceededError, match="does not fit"):
        ids(rf.Dataset(URL, storage_options={**options, "cache_bytes": 10}))


def test_objects_pickle_with_their_place(s3, options, samples):
    dataset = write(samples, options)
    assert ids(pickle.loads(pickle.dumps(dataset))) == ids(dataset)


def test_damage_is_found_and_named_by_its_url(s3, options, samples):
    shard = write(samples, options).shards[0].name
    content = bytearray(s3.read(f"runs/one/{shard}"))
    content[len(content) // 2] ^= 1
    s3.put(f"runs/one/{shard}", bytes(content))
    with pytest.raises(rf.CorruptError) as caught:
        ids(rf.Dataset(URL, storage_options=options))
    assert caught.value.where.file == f"{URL}/{shard}"
    s3.put(f"runs/one/{shard}", bytes(content[:-1]))
    with pytest.raises(rf.RaggedError):
        ids(rf.Dataset(URL, storage_options=options))
    s3.client.delete_object(Bucket="rollouts", Key=f"runs/one/{shard}")
    with pytest.raises(rf.MissingShardError, match=shard) as caught:
        ids(rf.Dataset(URL, storage_options=options))
    assert caught.value.where.file == f"{URL}/{shard}"
    s3.put("runs/one/manifest.json", b"{}")
    with pytest.raises(rf.ManifestError):
        rf.Dataset(URL, storage_options=options)


def test_the_environment_names_credentials_and_endpoint(s3, samples, tmp_path, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAGGED_CACHE_DIR", str(tmp_path / "near"))
    dataset = write(samples, None)
    assert ids(dataset) == ids_of(samples)
    assert list((tmp_path / "near" / "shards").rglob("*.arrow"))


def test_a_bucket_alone_is_a_place(s3, options, samples):
    assert ids(write(samples, options, url="s3://rollouts")) == ids_of(samples)
    assert "manifest.json" in s3.names()


def test_prefixes_that_begin_alike_are_different_datasets(s3, options, samples):
    write(samples, options, url="s3://rollouts/a")
    write(samples.slice(0, 2), options, url="s3://rollouts/ab")
    rf.sweep("s3://rollouts/a", grace_s=0, storage_options=options)
    assert rf.Dataset("s3://rollouts/ab/", storage_options=options).take([1]).num_rows == 1


def test_memory_urls_live_as_long_as_the_process(samples, tmp_path):
    options = {"cache_dir": str(tmp_path)}
    assert ids(write(samples, options, url="memory://box/one")) == ids_of(samples)
    with pytest.raises(rf.DatasetExistsError):
        rf.Writer("memory://box/one", samples.schema, storage_options=options)
    rf.sweep("memory://box/one", storage_options=options)


@pytest.mark.parametrize(
    ("url", "more", "error", "text"),
    [
        ("s3://", {}, rf.UnsupportedFeatureError, "names no bucket"),
        ("s3://rollouts/a//b", {}, rf.UnsupportedFeatureError, "empty or relative"),
        ("s3://rollouts/../b", {}, rf.UnsupportedFeatureError, "empty or relative"),
        ("s3://rollouts/a", {"colour": "red"}, rf.UnsupportedFeatureError, "set up"),
        ("s3://elsewhere/a", {}, rf.DatasetNotFoundError, "no dataset"),
        ("s3://rollouts/a", {"cache_bytes": 0}, rf.LimitExceededError, "cache_bytes"),
    ],
    ids=["bucket", "empty", "relative", "option", "missing", "cache"],
)
def test_bad_places_and_options_are_refused(s3, options, url, more, error, text):
    with pytest.raises(error, match=text):
        rf.Dataset(url, storage_options={**options, **more})


@pytest.mark.parametrize(
    ("url", "settings", "place", "prefix"),
    [
        ("s3a://b/p/q/", {"region": "x", "skip_signature": True}, "s3://b/p/q", "p/q"),
        ("gs://b/a%20b", {"skip_signature": True}, "gs://b/a b", "a b"),
        ("gcs://b", {"skip_signature": True}, "gs://b", ""),
        ("az://c/p", {"account_name": "a", "account_key": "Zm9v"}, "az://c/p", "p"),
        ("abfss://c@a.dfs.core.windows.net/p", {"account_key": "Zm9v"},
         "abfss://c@a.dfs.core.windows.net/p", "p"),
    ],
    ids=["s3a", "gs", "gcs", "az", "abfss"],
)  # fmt: skip
def test_urls_of_all_stores_are_understood(url, settings, place, prefix, tmp_path):
    storage = open_storage(url, {**settings, "cache_dir": str(tmp_path)})
    assert storage.place == place
    assert storage.location.prefix == prefix
    assert pickle.loads(pickle.dumps(storage)).location.key == storage.location.key


def test_secrets_in_urls_are_not_shown(options):
    with pytest.raises(rf.RaggedError) as caught:
        rf.Dataset("s3://key:SESAME@rollouts/a//b", storage_options=options)
    assert "SESAME" not in str(caught.value)
    found = open_storage("s3://key:SESAME@rollouts/a", options)
    assert "SESAME" not in f"{found!r} {found.place}"


def test_secrets_are_not_shown(s3, options, samples):
    dataset = write(samples, options)
    secret = {**options, "secret_access_key": "SESAME", "colour": "SESAME"}
    with pytest.raises(rf.RaggedError) as caught:
        rf.Dataset(URL, storage_options=secret)
    assert "SESAME" not in str(caught.value)
    assert "colour" in str(caught.value)
    assert "test" not in repr(dataset)
