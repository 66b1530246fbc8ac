"""Ragged batches through accelerate and the Hugging Face Trainer."""

import logging

import numpy as np
import pytest
import torch
from support import hf_jobs
from support.ranks import run_ranks

import ragged_format as rf
from ragged_format.torch import RaggedDataset, RaggedLoader
from ragged_format.torch.glue.hf import (
    RaggedCollator,
    RaggedTrainerMixin,
    check_arguments,
    training_arguments,
)

# Libraries that these tests only pass through warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity(logging.ERROR)
    return module


@pytest.fixture(scope="module")
def two_ranks(transformers, tmp_path_factory):
    return run_ranks(2, hf_jobs.both, str(tmp_path_factory.mktemp("trainer")))


def test_every_rank_of_accelerate_reads_its_own_batches(two_ranks):
    """huggingface/accelerate#2023, #348, #4111: batches of unequal widths break dispatching."""
    seen = [[ids for ids, _ in rank[0][1]] for rank in two_ranks]
    assert [len(batches) for batches in seen] == [4, 4]
    ids = [name for batches in seen for batch in batches for name in batch]
    assert sorted(ids) == sorted(f"s-{n}" for n in range(16))
    assert len({width for rank in two_ranks for _, width in rank[0][1]}) > 1
    np.testing.assert_array_equal(two_ranks[0][0][2], two_ranks[1][0][2])


def test_dispatching_is_refused_with_its_remedy(two_ranks):
    """huggingface/transformers#26548: an iterable dataset is dispatched unless told otherwise."""
    for (refused, _, _), _ in two_ranks:
        assert "dispatch_batches=None" in refused
        assert "DataLoaderConfiguration(dispatch_batches=False)" in refused


def test_the_trainer_runs_on_two_ranks(two_ranks):
    """huggingface/transformers#26548: ragged columns with a Trainer on several processes."""
    first, second = (rank[1] for rank in two_ranks)
    assert len(first[0]) == len(second[0]) == 6
    epoch = [name for step in zip(first[0][:4], second[0][:4], strict=True) for batch in step
             for name in batch]  # fmt: skip
    assert sorted(epoch) == sorted(f"s-{n}" for n in range(16))
    np.testing.assert_array_equal(first[1], second[1])


def arguments(transformers, path, **changes):
    return transformers.TrainingArguments(
        output_dir=str(path), max_steps=2, per_device_train_batch_size=4, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", **changes,
    )  # fmt: skip


def test_a_map_dataset_goes_through_the_trainer(transformers, tmp_path):
    widths = []

    class Ours(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            widths.append(inputs.width("candidate"))
            return model(inputs["input_ids"].long()).square().mean()

    Ours(
        model=hf_jobs.Model(), args=arguments(transformers, tmp_path, **training_arguments()),
        train_dataset=RaggedDataset(hf_jobs.samples()),
        data_collator=RaggedCollator(columns=["candidate_ids"]),
    ).train()  # fmt: skip
    assert len(widths) == 2


def test_dropped_columns_are_named_with_the_option_that_drops_them(transformers, tmp_path):
    """huggingface/transformers#19599, #7823, #43598, huggingface/trl#3349, #1186: no columns."""
    plain = arguments(transformers, tmp_path)
    with pytest.raises(rf.SchemaMismatchError, match="remove_unused_columns=False"):
        transformers.Trainer(
            model=hf_jobs.Model(), args=plain, train_dataset=RaggedDataset(hf_jobs.samples()),
            data_collator=RaggedCollator(),
        ).train()  # fmt: skip

    class Ours(RaggedTrainerMixin, transformers.Trainer):
        pass

    for changes in ({}, {"remove_unused_columns": False}):
        wrong = arguments(transformers, tmp_path, **changes)
        with pytest.raises(rf.SchemaMismatchError):
            check_arguments(wrong)
        with pytest.raises(rf.SchemaMismatchError):
            Ours(model=hf_jobs.Model(), args=wrong, train_dataset=RaggedLoader(hf_jobs.samples()))\
                .train()  # fmt: skip
    check_arguments(arguments(transformers, tmp_path, **training_arguments()))


def test_rows_of_a_foreign_dataset_are_joined_by_the_schema():
    data = hf_jobs.samples(3)
    collate = RaggedCollator(data.schema)
    batch = collate(data.to_pylist())
    same = RaggedCollator()([data.slice(0, 1), data.slice(1)])
    for name in batch:
        torch.testing.assert_close(batch[name], same[name], equal_nan=True)
    rows = data.to_pylist()
    del rows[1]["candidate_ids"]
    with pytest.raises(rf.SchemaMismatchError) as caught:
        collate(rows)
    assert (caught.value.code, caught.value.where.row) == ("RF-S003", 1)
    assert caught.value.where.column == "candidate_ids"
    assert "remove_unused_columns" in caught.value.remedy


@pytest.mark.parametrize("features", [[{"a": 1}], [1, 2], [], ["input_ids"]])
def test_what_cannot_be_joined_is_a_typed_error(features):
    with pytest.raises(rf.RaggedError):
        RaggedCollator()(features)
    with pytest.raises(rf.SchemaMismatchError):
        RaggedCollator(columns=["rewards"])(RaggedDataset(hf_jobs.samples(1))[0])


def test_a_lightning_style_loop_moves_pins_and_resumes():
    """What Lightning asks of a batch and of a loader: `to`, `state_dict`, `load_state_dict`."""
    data = hf_jobs.samples()
    with RaggedLoader(data, batch_size=4, shuffle=True) as loader:
        everything = [batch.strings("sample_id") for batch in loader]
    with RaggedLoader(data, batch_size=4, shuffle=True) as loader:
        seen, checkpoint = [], {}
        for number, batch in enumerate(loader):
            moved = batch.to(torch.device("cpu"), non_blocking=True)
            seen.append(moved.strings("sample_id"))
            if number == 1:
                checkpoint = {"loops": {"loader": loader.state_dict()}}
                break
    with RaggedLoader(data, batch_size=4, shuffle=True) as loader:
        loader.load_state_dict(checkpoint["loops"]["loader"])
        seen += [batch.strings("sample_id") for batch in loader]
    assert seen == everything
