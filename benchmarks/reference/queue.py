"""One training row as the reference's rollout worker sends it through a queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.shapes import HEAD_SIZE, VOCAB_SIZE, Rollouts
from ragged_format.lists import offsets_of

__all__ = ["FLOOR", "QueueSample", "queue_samples"]

# What an engine reports for an id to which truncation left no probability.
FLOOR = -9999.0

Heads = Literal["dicts", "arrays"]


@dataclass(slots=True)
class QueueSample:
    """One row; every list and array has one entry per token, context included.

    Entry p describes the token at position p. The message texts that the reference keeps for its
    trace log are left empty: ours carries none either.

    Attributes
    ----------
    sampling_mask : list of list of int
        The candidate ids of each trained token, empty on context.
    top_k : list of dict, optional
        Log-prob by id; the form before. `HEAD_SIZE` entries on trained tokens, none on context.
    top_k_ids, top_k_log_probs : (L, K) int64 and float32, optional
        The form after; rows of context are all padding (-1, -inf).
    """

    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    sampling_mask: list[list[int]]
    top_k: list[dict[int, float]] | None = None
    top_k_ids: npt.NDArray[np.int64] | None = None
    top_k_log_probs: npt.NDArray[np.float32] | None = None
    prompt: list[dict[str, str]] = field(default_factory=list)
    completion: list[dict[str, str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=lambda: {"reward": 1.0, "reward_std": 0.5})
    enqueued_at: float = 1_000.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that the trainer's tree packing reads."""
        return {
            "input_ids": self.input_ids,
            "completion_mask": self.completion_mask,
            "old_log_probs": self.old_log_probs,
            "advantage": self.advantage,
            "group_id": self.group_id,
            "metrics": self.metrics,
        }


def queue_samples(rollouts: Rollouts, heads: Heads) -> list[QueueSample]:
    """Return the samples in one of the two published forms of the top-K table."""
    tokens = offsets_of(rollouts.token_counts)
    sets = offsets_of(rollouts.candidate_counts)
    entries = offsets_of(rollouts.topk_counts)
    out: list[QueueSample] = []
    target = 0
    for i in range(len(rollouts.token_counts)):
        span = slice(tokens[i], tokens[i + 1])
        mask = rollouts.completion_mask[span].astype(np.int64)
        length = len(mask)
        trained = np.flatnonzero(mask)
        old = np.zeros(length, np.float32)
        old[trained] = rollouts.rollout_log_probs[target : target + len(trained)]
        masks: list[list[int]] = [[] for _ in range(length)]
        dicts: list[dict[int, float]] = [{} for _ in range(length)]
        for position in trained.tolist():
            ids = rollouts.candidate_ids[sets[target] : sets[target + 1]].tolist()
            head = slice(entries[target], entries[target + 1])
            masks[position] = ids
            dicts[position] = _full_head(
                rollouts.topk_ids[head].tolist(), rollouts.topk_log_probs[head].tolist()
            )
            target += 1
        sample = QueueSample(
            rollouts.input_ids[span].astype(np.int64),
            mask,
            old,
            float(rollouts.advantages[i]),
            int(rollouts.versions[i]),
            int(rollouts.groups[i]),
            masks,
        )
        if heads == "dicts":
            sample.top_k = dicts
        else:
            sample.top_k_ids, sample.top_k_log_probs = _arrays(dicts)
        out.append(sample)
    return out


def _full_head(ids: list[int], log_probs: list[float]) -> dict[int, float]:
    """Return a head of `HEAD_SIZE` entries: an engine fills it up with ids at the floor."""
    head = dict(zip(ids, log_probs, strict=True))
    other = VOCAB_SIZE - 1
    while len(head) < HEAD_SIZE:
        head.setdefault(other, FLOOR)
        other -= 1
    return head


def _arrays(
    dicts: list[dict[int, float]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    ids = np.full((len(dicts), HEAD_SIZE), -1, np.int64)
    log_probs = np.full((len(dicts), HEAD_SIZE), -np.inf, np.float32)
    for position, head in enumerate(dicts):
        if head:
            ids[position] = list(head)
            log_probs[position] = list(head.values())
    return ids, log_probs
