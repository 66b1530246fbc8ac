"""Collators and mixins given rows, arguments and loaders that do not fit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ragged_format as rf
from ragged_format.packing import pack_row
from ragged_format.testing import rollouts
from ragged_format.torch import RaggedDataset, RaggedIterable, RaggedLoader
from ragged_format.torch.glue.hf import (
    RaggedCollator,
    RaggedTrainerMixin,
    check_accelerator,
    check_arguments,
)
from ragged_format.torch.glue.trl import RolloutCollator

SCHEMA = rf.sample_schema(vocab_size=9, columns=["candidate_counts", "candidate_ids"])
ROW = {
    "sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1], "candidate_counts": [1],
    "candidate_ids": [2],
}  # fmt: skip
SAMPLES = rollouts(np.random.default_rng(0), num_samples=8, prompt_length=4, response_length=4)


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": "x"}, {"input_ids": [1.5, 2]}, {"input_ids": [2**40, 2]},
        {"input_ids": [-5, 2]}, {"input_ids": None}, {"input_ids": [None, 2]},
        {"input_ids": [1, "a"]}, {"input_ids": object()}, {"completion_mask": [0]},
        {"completion_mask": [1, 1], "candidate_counts": [1, 0]}, {"candidate_counts": [5]},
        {"candidate_ids": [3]},
    ],
)  # fmt: skip
def test_rows_of_a_foreign_dataset_are_checked_where_they_enter(change):
    with pytest.raises(rf.RaggedError) as caught:
        RaggedCollator(SCHEMA)([ROW, ROW | change])
    assert caught.value.remedy


def test_rows_may_be_repeated_and_of_tensors():
    tensors = ROW | {"input_ids": torch.tensor([1, 2]), "completion_mask": np.array([0, 1])}
    batch = RaggedCollator(SCHEMA)([ROW, tensors])
    assert batch["input_ids"].tolist() == [1, 2, 1, 2]
    assert batch.strings("sample_id") == ["a", "a"]


@pytest.mark.parametrize("features", [None, 5, "abc", {"a": 1}])
def test_what_is_no_list_of_records(features):
    with pytest.raises(rf.SchemaMismatchError):
        RaggedCollator(SCHEMA)(features)


@pytest.mark.parametrize("columns", ["candidate_ids", 5, [5], []])
def test_columns_are_a_list_of_names(columns):
    with pytest.raises(rf.SchemaMismatchError):
        RaggedCollator(SCHEMA, columns=columns)


def arguments(**changes):
    fit = {
        "remove_unused_columns": False, "accelerator_config": {"dispatch_batches": False},
        "world_size": 2, "process_index": 1,
    }  # fmt: skip
    return SimpleNamespace(**fit | changes)


def test_arguments_that_say_nothing_are_refused():
    check_arguments(arguments())
    for wrong in (None, {}, SimpleNamespace(), arguments(accelerator_config=None)):
        with pytest.raises(rf.SchemaMismatchError):
            check_arguments(wrong)
    with pytest.raises(rf.SchemaMismatchError):
        check_accelerator(None)


def loader_of(dataset, **changes):
    trainer = RaggedTrainerMixin()
    trainer.args, trainer.train_dataset = arguments(**changes), dataset
    return trainer.get_train_dataloader()


def test_a_loader_of_other_ranks_is_refused():
    """A loader for one rank on several would train all of them on the same rows."""
    fits = {"rank": 1, "world_size": 2, "tail": "pad"}
    loader = RaggedLoader(SAMPLES, **fits)
    assert loader_of(loader) is loader
    loader_of(RaggedIterable(SAMPLES, **fits))
    loader_of(RaggedLoader(SAMPLES), world_size=1, process_index=0)
    for change in ({"rank": 0}, {"world_size": 3}, {"rank": 0, "world_size": 1}):
        with pytest.raises(rf.SchemaMismatchError, match="other ranks"):
            loader_of(RaggedLoader(SAMPLES, **fits | change))
    with pytest.raises(rf.SchemaMismatchError, match="tail='keep'"):
        loader_of(RaggedLoader(SAMPLES, **fits | {"tail": "keep"}))


@pytest.mark.parametrize("dataset", [None, [1], RaggedDataset(SAMPLES)])
def test_the_mixin_takes_loaders_only(dataset):
    with pytest.raises(rf.SchemaMismatchError, match="is a loader"):
        loader_of(dataset)


def test_rollout_collators_take_one_micro_batch_of_packed_rows():
    row = pack_row(SAMPLES, fork="transition", null_advantage="keep")
    for examples in (None, 5, [], [5], [[5]], [[None]], [[row, row]], [row], [[row], [row]]):
        with pytest.raises(rf.SchemaMismatchError, match="one micro-batch"):
            RolloutCollator(pad_token_id=0)(examples)
    with pytest.raises(rf.SchemaMismatchError):
        RolloutCollator(pad_token_id=0)([[SAMPLES]])
    for wrong in ({"pad_token_id": None}, {"num_processes": 0}, {"top_k": -1}):
        with pytest.raises(rf.LimitExceededError):
            RolloutCollator(**{"pad_token_id": 0} | wrong)
