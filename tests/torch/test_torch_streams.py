"""Loaders on what is not mapped: streams, read in order, and compact shards, decoded by batch."""

import io
import json
import os
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from torch.utils.data import DataLoader

import ragged_format as rf
from ragged_format.testing import rollouts
from ragged_format.torch import Mixture, OnlineLoader, RaggedDataset, RaggedIterable, RaggedLoader
from ragged_format.torch.source import Records, open_random_access
from ragged_format.torch.stream_source import StreamShard

ROWS = 60


@pytest.fixture(scope="module")
def samples():
    return rollouts(np.random.default_rng(1), num_samples=ROWS, prompt_length=9, response_length=7)


@pytest.fixture(scope="module", params=["plain", "zstd"])
def stream(request, samples, tmp_path_factory):
    """Seven batches, one of them empty."""
    path = tmp_path_factory.mktemp("streams") / "data.arrows"
    cuts = [0, 10, 11, 30, 30, 41, 59, ROWS]
    parts = [samples.slice(start, stop - start) for start, stop in pairwise(cuts)]
    rf.write_stream(path, parts)
    if request.param == "zstd":
        path.write_bytes(zstandard.compress(path.read_bytes()))
    return path


@pytest.fixture(scope="module")
def compact(samples, tmp_path_factory):
    """Twelve batches of five records in several shards."""
    path = tmp_path_factory.mktemp("compact") / "data"
    options = {"batch_rows": 5, "max_shard_bytes": 1 << 12, "encoding": "compact"}
    with rf.Writer(path, samples.schema, **options) as writer:
        writer.write(samples)
    assert len(rf.Dataset(path).shards) > 2
    return path


def content(batches):
    return [
        (batch.strings("sample_id"), batch["input_ids"].tolist(), batch["candidate_ids"].tolist())
        for batch in batches
    ]


@pytest.mark.parametrize(
    "options", [{"batch_size": 7}, {"token_budget": 60}], ids=["count", "budget"]
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stream_is_loaded_as_the_batches_in_it(stream, samples, options, prefetch):
    options = options | {"prefetch": prefetch}
    loader, plain = RaggedLoader(stream, **options), RaggedLoader(samples, **options)
    assert (len(loader), loader.num_rows) == (len(plain), ROWS)
    for _ in range(2):  # a second epoch reads it anew
        assert content(loader) == content(plain)


def test_ranks_share_a_stream(stream, samples):
    for rank in range(3):
        options = {"batch_size": 4, "rank": rank, "world_size": 3, "tail": "empty"}
        assert content(RaggedLoader(stream, **options)) == content(RaggedLoader(samples, **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_in_a_plain_data_loader(stream, samples, workers):
    context = "spawn" if workers else None
    dataset = RaggedIterable(stream, batch_size=7)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    assert content(loader) == content(RaggedLoader(samples, 7))


@pytest.mark.parametrize("stop_at", [1, 4, 9])
def test_a_state_in_a_stream_is_a_number_of_records(stream, stop_at):
    whole = content(RaggedLoader(stream, 7))
    first = RaggedLoader(stream, 7)
    batches = iter(first)
    states = [next(batches).state for _ in range(stop_at)]
    assert states[-1]["position"] == (7 * stop_at if stop_at < 9 else 0)
    first.close()
    again = RaggedLoader(stream, 7)
    again.load_state_dict(json.loads(json.dumps(states[-1])))
    assert content(again) == (whole[stop_at:] or whole)
    # Back to a place before: the stream is read anew.
    again.load_state_dict(states[0])
    assert content(again) == whole[1:]


def test_a_stream_is_read_forward_once(stream, monkeypatch):
    shard = StreamShard(stream, verify=True)
    opened = []

    class Counted(rf.StreamReader):
        def __init__(self, *args, **options):
            opened.append(args)
            super().__init__(*args, **options)

    monkeypatch.setattr("ragged_format.torch.stream_source.StreamReader", Counted)
    for number in (0, 1, 2, 5):
        shard.batch(number)
    assert len(opened) == 1
    shard.batch(5)
    shard.batch(6)
    assert len(opened) == 2
    shard.close()


def test_a_cut_or_changed_stream(samples, tmp_path):
    path = tmp_path / "data.arrows"
    rf.write_stream(path, [samples.slice(0, 20), samples.slice(20)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(rf.TruncatedError):
        RaggedLoader(path)
    path.write_bytes(whole)
    loader = RaggedLoader(path, 4, prefetch=0)
    rf.write_stream(path, [samples.slice(0, 20), samples.slice(21)])
    with pytest.raises(rf.ChecksumError, match="changed while"):
        list(loader)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: RaggedLoader(path, shuffle=True),
        lambda path: RaggedLoader(path, shuffle="block"),
        lambda path: RaggedLoader(Mixture([path, path])),
        RaggedDataset,
        lambda path: RaggedLoader(rf.StreamReader(path)),
        lambda path: RaggedLoader(io.BytesIO(path.read_bytes())),
    ],
    ids=["shuffled", "blocks", "mixture", "by index", "reader", "file object"],
)
def test_what_a_stream_cannot_do(stream, make):
    with pytest.raises(rf.UnsupportedFeatureError) as caught:
        make(stream)
    assert caught.value.remedy


def test_a_pipe_is_not_read_twice(samples, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(rf.UnsupportedFeatureError, match="more than once"):
        StreamShard(path, verify=False)


def test_streams_are_logs_too(stream, samples):
    rows = [row for step in OnlineLoader(stream, 200, prefetch=0) for row in step]
    assert sum(row.num_rows for row in rows) == len(rows) > 1


@pytest.mark.filterwarnings("ignore::ragged_format.RaggedWarning")  # its test is elsewhere
@pytest.mark.parametrize("max_bytes", [0, 1 << 30], ids=["one batch", "all"])
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_compact_datasets_are_loaded_within_a_bound(compact, samples, shuffle, max_bytes):
    options = {"shuffle": shuffle, "seed": 3, "block_size": 10, "window": 2}
    loader = RaggedLoader(compact, 7, max_decoded_bytes=max_bytes, prefetch=0, **options)
    kept = loader._producer.records.kept
    largest = max(batch.nbytes for batch in rf.Dataset(compact).batches())
    seen = []
    for batch in loader:
        seen += content([batch])
        assert kept.decoded_bytes <= max(max_bytes, largest)
    dataset = rf.Dataset(compact)
    ids = [name for names, _, _ in seen for name in names]
    positions = {
        name: n for n, name in enumerate(dataset.take(range(ROWS))["sample_id"].to_pylist())
    }
    assert sorted(ids) == sorted(positions)
    expected = samples.take([positions[name] for name in ids])
    assert [t for _, tokens, _ in seen for t in tokens] == expected[
        "input_ids"
    ].flatten().to_pylist()
    if max_bytes or not shuffle:
        assert kept.decoded == 12  # each once


def test_readers_of_compact_shards_keep_nothing_for_a_loader(compact):
    opened = open_random_access(compact, verify=False)
    records = Records(opened, max_decoded_bytes=0)
    for record in range(ROWS):
        records.singles(records.locate(np.array([record])))
    assert records.kept.decoded == 12
    for number in range(len(opened.shards.bounds) - 1):
        assert not opened.shards.reader(number)._file._kept


def test_a_compact_file_is_loaded(compact):
    path = next(compact.glob("*.arrow"))
    stored = [name for batch in rf.open_source(path).batches() for name in batch["sample_id"]]
    loader = RaggedLoader(path, 3, shuffle=True)
    ids = [name for batch in loader for name in batch.strings("sample_id")]
    assert sorted(ids) == sorted(name.as_py() for name in stored)
    assert len(RaggedDataset(path)) == len(ids)
