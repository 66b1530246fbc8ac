"""The map-style dataset, by itself and under a plain DataLoader."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import ragged_format as rf
from ragged_format import OutOfRangeError, StateMismatchError
from ragged_format.torch import RaggedBatch, RaggedDataset, RaggedLoader


def flat(record_batch, name):
    return [item for record in record_batch.column(name).to_pylist() for item in record]


def test_records_by_index(samples, dataset_path):
    dataset = RaggedDataset(dataset_path)
    assert len(dataset) == 37
    names = samples.column("sample_id").to_pylist()
    for index in (0, 19, 20, 36, -1, -37):
        record = dataset[index]
        assert type(record) is RaggedBatch
        assert record.strings("sample_id") == [names[index]]
        assert record["candidate_ids"].tolist() == samples.column("candidate_ids")[index].as_py()
    many = dataset.__getitems__([5, 5, 36, 0])
    assert many.strings("sample_id") == [names[5], names[5], names[36], names[0]]
    assert dataset.__getitems__([]).num_rows == 0


@pytest.mark.parametrize("index", [37, -38, 1000])
def test_indices_outside(dataset_path, index):
    with pytest.raises(OutOfRangeError):
        RaggedDataset(dataset_path)[index]
    with pytest.raises(IndexError):
        RaggedDataset(dataset_path).__getitems__([0, index])


def test_columns_are_projected(dataset_path):
    dataset = RaggedDataset(dataset_path, columns=["topk_ids"], verify=True)
    assert dataset[0].keys() == ["completion_mask", "topk_counts", "topk_ids"]
    assert list(dataset.schema.columns) == dataset[0].keys()


def test_it_pickles_as_its_place(samples, dataset_path):
    for source in (dataset_path, samples, rf.Dataset(dataset_path)):
        dataset = RaggedDataset(source, columns=["input_ids", "sample_id"])
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy.fingerprint == dataset.fingerprint
        assert copy[8]["input_ids"].tolist() == dataset[8]["input_ids"].tolist()
        assert copy[8].keys() == dataset[8].keys()
    assert len(pickle.dumps(RaggedDataset(dataset_path))) < 1000


def test_a_dataset_that_changed_between_processes_is_an_error(samples, dataset_path):
    sent = pickle.dumps(RaggedDataset(dataset_path))
    with rf.Writer(dataset_path, samples.schema, mode="overwrite") as writer:
        writer.write(samples.slice(0, 5))
    with pytest.raises(StateMismatchError, match="changed between processes"):
        pickle.loads(sent)


def test_a_plain_dataloader_gives_whole_batches(samples, dataset_path):
    dataset = RaggedDataset(dataset_path)
    loader = DataLoader(dataset, batch_size=8, collate_fn=dataset.collate)
    batches = list(loader)
    assert [batch.num_rows for batch in batches] == [8, 8, 8, 8, 5]
    assert [token for batch in batches for token in batch["input_ids"].tolist()] == flat(
        samples, "input_ids"
    )


def test_datasets_without_batched_access_are_collated(samples, dataset_path):
    dataset = RaggedDataset(dataset_path)
    records = [dataset[index] for index in range(3)]
    joined = dataset.collate(records)
    assert joined["candidate_ids"].tolist() == flat(samples.slice(0, 3), "candidate_ids")
    assert joined.strings("group_id") == samples.column("group_id").to_pylist()[:3]


def test_batches_of_a_loader_can_be_collated(samples):
    with RaggedLoader(samples, 10, prefetch=0) as loader:
        joined = RaggedBatch.collate(list(loader))
    assert joined["topk_ids"].tolist() == flat(samples, "topk_ids")


def test_spawned_workers_send_batches_through_shared_memory(samples, dataset_path):
    dataset = RaggedDataset(dataset_path)
    loader = DataLoader(
        dataset, batch_size=10, num_workers=2, multiprocessing_context="spawn",
        collate_fn=dataset.collate,
    )  # fmt: skip
    batches = list(loader)
    assert [type(batch) for batch in batches] == [RaggedBatch] * 4
    assert all(batch.arena.is_shared() for batch in batches)
    assert all(batch["input_ids"].data_ptr() % 64 == 0 for batch in batches)
    assert torch.cat([batch["candidate_ids"] for batch in batches]).tolist() == flat(
        samples, "candidate_ids"
    )
    assert [name for batch in batches for name in batch.strings("sample_id")] == samples.column(
        "sample_id"
    ).to_pylist()
    assert batches[0].padded("candidate_ids").shape[0] == batches[0].lengths("target").sum()
