"""Several datasets as one, and datasets that are elsewhere."""

import json
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format import BrokenShardError, LimitExceededError, SchemaMismatchError
from ragged_format.torch import CachedDataset, Mixture, RaggedLoader
from ragged_format.torch.mixing import quotas, spread


def named(samples, prefix, size):
    part = samples.slice(0, size)
    ids = pa.array([f"{prefix}{n}" for n in range(size)])
    return part.set_column(0, part.field(0), ids)


def ids_of(loader):
    return [name for batch in loader for name in batch.strings("sample_id")]


@given(weights=st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_a_period_has_the_weights_evenly_spread(weights):
    counts = quotas(weights)
    pattern = spread(counts).tolist()
    share = np.array(weights) / sum(weights)
    assert np.abs(counts / counts.sum() - share).max() <= 1 / 4096
    assert Counter(pattern) == {n: c for n, c in enumerate(counts.tolist()) if c}
    for number, count in enumerate(counts.tolist()):
        seen = np.cumsum(np.array(pattern) == number)
        assert np.abs(seen - np.arange(1, len(pattern) + 1) * count / len(pattern)).max() <= len(
            weights
        )


@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_every_dataset_is_a_sequence_of_its_own_epochs(samples, shuffle):
    sizes = {"a": 11, "b": 4, "c": 7}
    parts = [named(samples, name, size) for name, size in sizes.items()]
    mixture = Mixture(parts, weights=[2, 1, 1], num_rows=30)
    loader = RaggedLoader(mixture, 4, shuffle=shuffle, block_size=3, window=2)
    names = [name for _ in range(4) for name in ids_of(loader)]
    assert len(names) == 120
    assert Counter(name[0] for name in names) == {"a": 60, "b": 30, "c": 30}
    for prefix, size in sizes.items():
        own = [name for name in names if name[0] == prefix]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size


def test_by_size_an_epoch_has_every_record_once(samples):
    parts = [named(samples, "a", 11), named(samples, "b", 21)]
    loader = RaggedLoader(Mixture(parts), 3, shuffle=True)
    assert loader.num_rows == 32
    for _ in range(3):
        assert len(set(ids_of(loader))) == 32


def test_a_mixture_resumes_with_other_ranks(samples, dataset_path):
    mixture = Mixture([dataset_path, named(samples, "b", 9)], weights=[1, 2])
    options = {"shuffle": True, "seed": 3}
    order = ids_of(RaggedLoader(mixture, 1, **options))
    iterator = iter(loader := RaggedLoader(mixture, 3, world_size=2, **options))
    for _ in range(3):
        state = json.loads(json.dumps(next(iterator).state))
    loader.close()
    ranks = []
    for rank in range(3):
        loader = RaggedLoader(mixture, 2, rank=rank, world_size=3, **options)
        loader.load_state_dict(state)
        ranks.append([batch.strings("sample_id") for batch in loader])
    rest = [
        name for step in range(max(map(len, ranks))) for rank in ranks if step < len(rank)
        for name in rank[step]
    ]  # fmt: skip
    assert rest == order[18:]


def test_mixtures_that_are_none(samples):
    parts = [samples, samples]
    for wrong in ({"weights": [1]}, {"weights": [0, 0]}, {"weights": [1, -1]}, {"num_rows": -1}):
        with pytest.raises(LimitExceededError):
            Mixture(parts, **wrong)
    with pytest.raises(LimitExceededError):
        Mixture([])
    with pytest.raises(LimitExceededError, match="too small"):
        RaggedLoader(Mixture(parts, weights=[1, 1e-9]))
    with pytest.raises(LimitExceededError, match="no records"):
        RaggedLoader(Mixture([samples, samples.slice(0, 0)], weights=[1, 1]))
    with pytest.raises(SchemaMismatchError):
        RaggedLoader(Mixture([samples, samples.drop_columns(["group_id"])]))
    one = RaggedLoader(Mixture([samples, samples], weights=[1, 0], num_rows=5), 9)
    assert ids_of(one) == samples.column("sample_id").to_pylist()[:5]


@pytest.fixture
def far(samples, tmp_path):
    """The samples in ten shards."""
    for start in range(0, 37, 4):
        mode = "append" if start else "error"
        with rf.Writer(tmp_path / "far", samples.schema, mode=mode) as writer:
            writer.write(samples.slice(start, 4))
    return tmp_path / "far"


def cached(far, tmp_path, shards, fetched):
    def fetch(name, path):
        fetched.append(name)
        shutil.copyfile(far / name, path)

    largest = max(shard.bytes for shard in rf.Dataset(far).shards)
    return CachedDataset(fetch, tmp_path / "near", max_bytes=max(1, shards * largest))


def test_blocks_of_a_dataset_elsewhere_are_fetched_once_an_epoch(samples, far, tmp_path):
    fetched = []
    dataset = cached(far, tmp_path, 5, fetched)
    loader = RaggedLoader(dataset, 3, shuffle="block", block_size=4, window=2)
    for _ in range(2):
        fetched.clear()
        assert sorted(ids_of(loader)) == sorted(samples.column("sample_id").to_pylist())
        assert len(fetched) <= 10
        kept = [p for p in (tmp_path / "near").iterdir() if p.suffix == ".arrow"]
        assert sum(path.stat().st_size for path in kept) <= dataset.max_bytes
    local = RaggedLoader(far, 3, shuffle="block", block_size=4, window=2)
    remote = RaggedLoader(dataset, 3, shuffle="block", block_size=4, window=2)
    assert ids_of(remote) == ids_of(local)
    assert not list((tmp_path / "near").glob("*.part"))


def test_a_mixture_of_datasets_elsewhere(samples, far, tmp_path):
    fetched = []
    parts = [cached(far, tmp_path, 4, fetched), named(samples, "b", 9)]
    options = {"shuffle": "block", "block_size": 4, "window": 2}
    loader = RaggedLoader(Mixture(parts), 3, **options)
    for _ in range(2):
        expected = samples.column("sample_id").to_pylist() + [f"b{n}" for n in range(9)]
        assert sorted(ids_of(loader)) == sorted(expected)
    assert len(fetched) < 40


def test_a_small_cache_serves_any_order(samples, far, tmp_path):
    fetched = []
    loader = RaggedLoader(cached(far, tmp_path, 1, fetched), 3, shuffle=True)
    assert ids_of(loader) == ids_of(RaggedLoader(far, 3, shuffle=True))
    assert len(fetched) > 10


def test_what_is_fetched_is_checked(far, tmp_path):
    dataset = cached(far, tmp_path, 5, [])
    shard = next(far.glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(BrokenShardError):
        list(RaggedLoader(dataset, 3))
    with pytest.raises(LimitExceededError, match="alone"):
        CachedDataset(lambda name, path: shutil.copyfile(far / name, path), tmp_path, max_bytes=9)
