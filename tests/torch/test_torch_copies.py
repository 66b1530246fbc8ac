"""Loaders and batches that are pickled, copied, saved, pinned or given to torch's own tools."""

import copy
import functools
import io
import pickle
import shutil

import pytest
import torch
from torch.utils.data import DataLoader

import ragged_format as rf
from ragged_format.torch import (
    CachedDataset,
    RaggedBatch,
    RaggedDataset,
    RaggedIterable,
    RaggedLoader,
)


def ids(batches):
    return [name for batch in batches for name in batch.strings("sample_id")]


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [through_pickle, copy.deepcopy, copy.copy])
def test_a_copy_of_a_loader_goes_on_by_itself(dataset_path, duplicate):
    with RaggedLoader(dataset_path, batch_size=4, shuffle=True, seed=2) as loader:
        whole = ids(loader)
        loader.set_epoch(0)
        batches = iter(loader)
        first = ids([next(batches), next(batches)])
        with duplicate(loader) as other:
            assert ids(other) == whole[len(first) :]
            assert other.state_dict()["epoch"] == 1
        assert first + ids(batches) == whole


def test_a_copy_keeps_what_was_set_or_loaded(dataset_path):
    loader = RaggedLoader(dataset_path, batch_size=4, shuffle=True)
    loader.set_epoch(7)
    assert through_pickle(loader).state_dict() == loader.state_dict()
    with RaggedLoader(dataset_path, batch_size=4, shuffle=True) as other:
        state = next(iter(other)).state
    loader.load_state_dict(state)
    assert through_pickle(loader).state_dict() == state


def test_a_copy_of_a_dataset_that_changed_is_refused(samples, dataset_path):
    pickled = pickle.dumps(RaggedLoader(dataset_path))
    with rf.Writer(dataset_path, samples.schema, mode="append") as writer:
        writer.write(samples.slice(0, 1))
    with pytest.raises(rf.StateMismatchError, match="changed between processes"):
        pickle.loads(pickled)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy, copy.copy])
def test_an_iterator_is_not_copied(dataset_path, duplicate):
    with RaggedLoader(dataset_path) as loader:
        batches = iter(loader)
        with pytest.raises(rf.UnsupportedFeatureError, match="copy the loader"):
            duplicate(batches)


def fetch(far, name, path):
    shutil.copyfile(far / name, path)


def test_workers_share_the_directory_of_a_cache(dataset_path, samples, tmp_path):
    far = CachedDataset(
        functools.partial(fetch, dataset_path), tmp_path / "near", max_bytes=1 << 20
    )
    dataset = RaggedIterable(far, batch_size=5)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert ids(loader) == samples.column("sample_id").to_pylist()


def test_what_a_cache_cannot_use(dataset_path, tmp_path):
    with pytest.raises(rf.DatasetNotFoundError, match="fetch made no file"):
        CachedDataset(lambda name, path: None, tmp_path / "near", max_bytes=1 << 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(rf.StorageError, match="cannot be made"):
        CachedDataset(functools.partial(fetch, dataset_path), tmp_path / "file", max_bytes=1 << 20)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_batch_that_torch_saved_is_loaded(dataset_path, weights_only):
    with RaggedLoader(dataset_path, batch_size=3) as loader:
        batch = next(iter(loader))
    file = io.BytesIO()
    torch.save({"step": 1, "batch": batch}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)["batch"]
    assert loaded.strings("sample_id") == batch.strings("sample_id")
    assert loaded.state == batch.state
    assert all(torch.equal(loaded[name], batch[name]) for name in ("input_ids", "candidate_ids"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be locked")
def test_pinning_without_an_accelerator_is_a_typed_error(samples):
    with pytest.raises(rf.UnsupportedFeatureError, match="page-locked"):
        RaggedBatch.from_arrow(samples).pin_memory()


def test_a_plain_data_loader_needs_no_collate_fn(samples, dataset_path):
    names = samples.column("sample_id").to_pylist()
    iterable = DataLoader(RaggedIterable(dataset_path, batch_size=4))
    batches = list(iterable)
    assert ids(batches) == names
    assert batches[0].state["position"] == 4
    joined = list(DataLoader(RaggedIterable(dataset_path, batch_size=4), batch_size=2))
    assert ids(joined) == names
    assert joined[0].num_rows == 8
    assert joined[0].state is None


def test_a_map_dataset_names_its_collate_fn(dataset_path):
    with pytest.raises(rf.SchemaMismatchError, match="collate_fn="):
        next(iter(DataLoader(RaggedDataset(dataset_path), batch_size=2)))


def test_a_loader_in_a_data_loader_names_what_fits(dataset_path):
    with pytest.raises(rf.UnsupportedFeatureError, match="RaggedIterable"):
        next(iter(DataLoader(RaggedLoader(dataset_path), batch_size=None)))
