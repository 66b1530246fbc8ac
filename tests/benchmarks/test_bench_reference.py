"""The reference's formats, re-made for the baselines, hold what their description says."""

import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from benchmarks import shapes
from benchmarks.reference import queue, tables


@pytest.fixture(scope="module")
def rollouts():
    return shapes.one_sample()


@pytest.mark.parametrize(("form", "size"), [("dicts", 471_519), ("arrays", 1_158_650)])
def test_queue_samples_have_the_published_pickle_size(rollouts, form, size):
    sample = queue.queue_samples(rollouts, form)[0]
    assert len(ForkingPickler.dumps(sample)) == pytest.approx(size, rel=0.03)


def test_queue_samples_hold_the_rollouts(rollouts):
    dicts, arrays = (queue.queue_samples(rollouts, form)[0] for form in ("dicts", "arrays"))
    restored = pickle.loads(ForkingPickler.dumps(arrays))
    assert restored.sampling_mask == dicts.sampling_mask
    record = shapes.to_arrow(rollouts).to_pylist()[0]
    candidate = head = target = 0
    for p, scored in enumerate(record["completion_mask"]):
        assert dicts.input_ids[p] == record["input_ids"][p]
        if not scored:
            assert dicts.sampling_mask[p] == []
            assert dicts.top_k[p] == {}
            assert (restored.top_k_ids[p] == -1).all()
            assert (restored.top_k_log_probs[p] == -np.inf).all()
            assert dicts.old_log_probs[p] == 0
            continue
        width, size = record["candidate_counts"][target], record["topk_counts"][target]
        ids = record["topk_ids"][head : head + size]
        assert dicts.sampling_mask[p] == record["candidate_ids"][candidate : candidate + width]
        assert list(dicts.top_k[p])[:size] == ids
        assert list(dicts.top_k[p].values())[size:] == [queue.FLOOR] * (shapes.HEAD_SIZE - size)
        assert restored.top_k_ids[p].tolist() == list(dicts.top_k[p])
        assert restored.top_k_log_probs[p].tolist() == list(dicts.top_k[p].values())
        assert dicts.old_log_probs[p] == np.float32(record["rollout_log_probs"][target])
        candidate, head, target = candidate + width, head + size, target + 1


def two_samples(rollouts):
    """Return samples and made-up positions of their targets, in a row of 4,000 positions."""
    dicts, arrays = (queue.queue_samples(rollouts, form) * 2 for form in ("dicts", "arrays"))
    count = sum(len(tables.trained_positions(sample)) for sample in dicts)
    index = torch.from_numpy(np.random.default_rng(0).permutation(4_000)[:count])
    return dicts, arrays, index


def test_dense_mask_and_flat_mask_hold_each_target_s_set(rollouts):
    dicts, _, index = two_samples(rollouts)
    dense = tables.dense_mask(dicts, index, 4_000)["sampling_mask"]
    flat = tables.flat_mask(dicts, index, 4_000)
    expected = [[] for _ in range(4_000)]
    target = 0
    for sample in dicts:
        for p, scored in enumerate(sample.completion_mask):
            if scored:
                expected[index[target]] = sample.sampling_mask[p]
                target += 1
    assert dense.dtype == flat["sampling_mask"].dtype == torch.int64
    assert dense.shape == (4_000, max(map(len, expected)))
    assert [row[row >= 0].tolist() for row in dense] == expected
    pieces = torch.split(flat["sampling_mask"], flat["sampling_mask_counts"].tolist())
    assert [piece.tolist() for piece in pieces] == expected


def test_both_top_k_forms_give_the_same_tables(rollouts):
    dicts, arrays, index = two_samples(rollouts)
    before = tables.dict_tables(dicts, index, 4_000)
    after = tables.array_tables(arrays, index, 4_000)
    for name, table in before.items():
        assert table.shape == (4_000, shapes.HEAD_SIZE)
        assert table.dtype == after[name].dtype
        assert torch.equal(table, after[name])
    first = tables.trained_positions(dicts[0])[0]
    assert before["topk_ids"][index[0]].tolist() == list(dicts[0].top_k[first])
