"""Single files and streams in stores, and what fsspec knows, through the one door."""

import pickle
import random

import fsspec
import pytest
import zstandard

import ragged_format as rf
from ragged_format.testing import assert_ragged_equal
from ragged_format.torch import RaggedLoader

URL = "s3://rollouts/files/one"


def all_of(source):
    return rf.concat(list(source.batches()))


@pytest.fixture
def local(samples, tmp_path):
    """The samples as a file, a stream, a compressed stream and a dataset in a directory."""
    place = tmp_path / "local"
    place.mkdir()
    parts = [samples.slice(start, 5) for start in range(0, 37, 5)]
    rf.write_file(place / "one.arrow", parts)
    rf.write_stream(place / "one.arrows", parts)
    plain = (place / "one.arrows").read_bytes()
    (place / "one.zst").write_bytes(zstandard.compress(plain))
    with rf.Writer(place / "set", samples.schema, batch_rows=5, max_shard_bytes=1) as writer:
        writer.write(samples)
    return place


@pytest.mark.parametrize("name", ["one.arrow", "one.arrows", "one.zst"])
def test_a_file_or_stream_in_a_store(s3, options, samples, local, name):
    s3.put(f"files/{name}", (local / name).read_bytes())
    source = rf.open_source(f"s3://rollouts/files/{name}", storage_options=options)
    assert source.is_random_access == (name == "one.arrow")
    assert_ragged_equal(all_of(source), samples)


def test_a_long_stream_is_read_by_ranges(s3, options, samples, monkeypatch, tmp_path):
    monkeypatch.setattr("ragged_pipeline.stores.object_storage.PART_BYTES", 10_000)
    rf.write_stream(tmp_path / "long", [samples] * 5)
    s3.put("files/long", (tmp_path / "long").read_bytes())
    source = rf.open_source("s3://rollouts/files/long", storage_options=options)
    first = next(source)
    assert_ragged_equal(first, samples)
    assert sum(batch.num_rows for batch in source) == 4 * 37
    assert s3.requests["GET"] > 5


def test_a_stream_that_is_replaced_while_it_is_read_is_an_error(
    s3, options, samples, monkeypatch, tmp_path
):
    monkeypatch.setattr("ragged_pipeline.stores.object_storage.PART_BYTES", 10_000)
    rf.write_stream(tmp_path / "long", [samples] * 50)
    content = (tmp_path / "long").read_bytes()
    s3.put("files/long", content)
    source = rf.open_source("s3://rollouts/files/long", storage_options=options)
    next(source)
    s3.put("files/long", content + b"x")
    with pytest.raises(rf.CorruptError, match="replaced while"):
        list(source)


def test_a_file_that_was_replaced_is_fetched_again(s3, options, samples, tmp_path):
    for part in (samples.slice(0, 4), samples.slice(4, 4)):
        rf.write_file(tmp_path / "part", part)
        s3.put("files/one", (tmp_path / "part").read_bytes())
        assert_ragged_equal(all_of(rf.open_source(URL, storage_options=options)), part)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", rf.TruncatedError),
        (b"hello world", rf.NotRaggedError),
        (None, rf.DatasetNotFoundError),
    ],
    ids=["empty", "text", "nothing"],
)
def test_what_is_no_data_is_named(s3, options, content, error):
    if content is not None:
        s3.put("files/one", content)
    with pytest.raises(error):
        rf.open_source(URL, storage_options=options)


def test_a_dataset_behind_the_one_door(s3, options, samples):
    with rf.Writer(URL, samples.schema, storage_options=options) as writer:
        writer.write(samples)
    source = rf.open_source(URL, storage_options=options)
    assert isinstance(source, rf.Dataset)
    assert_ragged_equal(all_of(source), samples)


@pytest.mark.parametrize("shuffle", ["block", True, False])
def test_the_loader_reads_from_a_store_within_the_bound_of_its_cache(
    s3, options, samples, local, monkeypatch, tmp_path, shuffle
):
    with rf.Writer(
        URL, samples.schema, storage_options=options, batch_rows=5, max_shard_bytes=1
    ) as writer:
        writer.write(samples)
    largest = max(shard.bytes for shard in rf.Dataset(URL, storage_options=options).shards)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAGGED_CACHE_DIR", str(tmp_path / "near"))
    monkeypatch.setenv("RAGGED_CACHE_BYTES", str(4 * largest))
    order = {"shuffle": shuffle}
    if shuffle == "block":
        order.update(block_size=5, window=2)
    before = s3.requests["GET"]
    loaded = [batch.strings("sample_id") for batch in RaggedLoader(URL, 3, **order)]
    gets = s3.requests["GET"] - before
    expected = [b.strings("sample_id") for b in RaggedLoader(local / "set", 3, **order)]
    assert loaded == expected
    kept = (tmp_path / "near" / "shards").rglob("*.arrow")
    assert sum(path.stat().st_size for path in kept) <= 4 * largest
    if shuffle is not True:
        assert gets <= 8 + 3  # each shard about once


@pytest.mark.parametrize("name", ["one.arrow", "one.arrows", "one.zst", "set"])
@pytest.mark.parametrize("form", ["url", "chain", "object"])
def test_what_fsspec_knows_can_be_read(samples, local, tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("RAGGED_CACHE_DIR", str(tmp_path / "near"))
    box = f"memory-{random.Random(form + name).random()}"
    memory = fsspec.filesystem("memory")
    memory.put(str(local), f"/{box}", recursive=True)
    far = f"memory://{box}/{name}"
    if form == "object":
        place = memory.get_mapper(far) if name == "set" else fsspec.open(far)
    else:
        place = f"local://{local}/{name}" if form == "url" else f"simplecache::{far}"
    source = rf.open_source(place)
    assert_ragged_equal(all_of(source), samples)
    if name == "set":
        assert source.num_rows == 37
        assert_ragged_equal(all_of(pickle.loads(pickle.dumps(source))), samples)
        with pytest.raises(rf.UnsupportedFeatureError, match="only be read"):
            rf.Writer(place, samples.schema, mode="append")
    memory.rm(f"/{box}", recursive=True)


def test_a_scheme_that_nobody_knows_is_refused(samples):
    for action in (
        lambda: rf.open_source("gopher://host/data"),
        lambda: rf.Dataset("gopher://host/data"),
        lambda: rf.Writer("gopher://host/data", samples.schema),
        lambda: rf.sweep("gopher://host/data"),
    ):
        with pytest.raises(rf.UnsupportedFeatureError, match="URLs of this scheme") as caught:
            action()
        assert "s3://" in caught.value.expected
        assert caught.value.got == "gopher://host/data"
