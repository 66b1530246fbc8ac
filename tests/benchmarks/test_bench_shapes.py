"""The rollouts that the benchmarks use are valid and have the published sizes."""

import numpy as np
import pytest

import ragged_format as rf
from benchmarks import shapes

GENERATORS = [shapes.agent, shapes.multi_turn, shapes.one_sample, lambda: shapes.many(24)]


@pytest.mark.parametrize("generate", GENERATORS)
def test_generated_rollouts_are_valid(generate):
    batch = shapes.to_arrow(generate())
    batch.validate(full=True)
    rf.validate(batch)


@pytest.mark.parametrize("generate", GENERATORS)
def test_generators_are_deterministic(generate):
    assert shapes.to_arrow(generate()).equals(shapes.to_arrow(generate()))


@pytest.mark.parametrize(
    ("generate", "tokens", "targets", "candidates"),
    [
        (shapes.agent, 8 * 6_400, 3_200, 10_600),
        (shapes.multi_turn, 8 * 4_463, 10_368, 35_700),
        (shapes.one_sample, 4_278, 1_251, 4_200),
    ],
)
def test_shapes_have_the_published_sizes(generate, tokens, targets, candidates):
    rollouts = generate()
    assert rollouts.token_counts.sum() == tokens
    assert len(rollouts.candidate_counts) == targets == rollouts.completion_mask.sum()
    assert rollouts.candidate_counts.sum() == pytest.approx(candidates, rel=0.05)
    assert rollouts.topk_counts.mean() / shapes.HEAD_SIZE == pytest.approx(0.12, abs=0.015)


def test_candidate_sets_are_heavy_tailed():
    counts = shapes.many(256).candidate_counts
    assert (counts == 1).mean() == pytest.approx(0.65, abs=0.02)
    assert counts.mean() == pytest.approx(3.3, abs=0.3)
    assert counts.max() == shapes.TOP_K


def test_heads_hold_the_most_probable_candidates():
    record = shapes.to_arrow(shapes.one_sample()).to_pylist()[0]
    candidate = head = target = 0
    tokens = [t for t, m in zip(record["input_ids"], record["completion_mask"], strict=True) if m]
    for width, size, log_prob in zip(
        record["candidate_counts"],
        record["topk_counts"],
        record["rollout_log_probs"],
        strict=True,
    ):
        ids = record["candidate_ids"][candidate : candidate + width]
        top = record["topk_ids"][head : head + size]
        log_probs = record["topk_log_probs"][head : head + size]
        assert ids == sorted(set(ids))
        assert tokens[target] in ids
        assert size == min(width, shapes.HEAD_SIZE) == len(set(top))
        assert set(top) <= set(ids)
        assert log_probs == sorted(log_probs, reverse=True)
        if width <= shapes.HEAD_SIZE:
            assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-4)
            assert log_prob == log_probs[top.index(tokens[target])]
        candidate, head, target = candidate + width, head + size, target + 1
    assert target == len(tokens)
