"""The reference's candidate-set and top-K steps of packing a row, in both published forms.

All of them take, besides the samples, the packed position that predicts each target: the samples'
trained tokens in order, as the tree packing gives them. Where samples share a position, the last
one's values stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.shapes import HEAD_SIZE

if TYPE_CHECKING:
    from benchmarks.reference.queue import QueueSample

__all__ = ["array_tables", "dense_mask", "dict_tables", "flat_mask", "trained_positions"]

Tensors = dict[str, torch.Tensor]


def trained_positions(sample: QueueSample) -> list[int]:
    """Return the positions of the trained tokens that have a predecessor."""
    positions: list[int] = np.flatnonzero(sample.completion_mask).tolist()
    return positions[1:] if positions and positions[0] == 0 else positions


def _lists(
    samples: Sequence[QueueSample], token_index: torch.Tensor, packed: int
) -> list[list[int]]:
    sets: list[list[int]] = [[]] * packed
    drawn = (s.sampling_mask[p] for s in samples for p in trained_positions(s))
    for position, ids in zip(token_index.tolist(), drawn, strict=True):
        sets[position] = ids
    return sets


def dense_mask(samples: Sequence[QueueSample], token_index: torch.Tensor, packed: int) -> Tensors:
    """Return the candidate ids as one (N, width) int64 table, padded with -1 to the widest set."""
    sets = _lists(samples, token_index, packed)
    width = max(map(len, sets))
    padded = [ids + [-1] * (width - len(ids)) for ids in sets]
    return {"sampling_mask": torch.tensor(padded, dtype=torch.long)}


def dict_tables(samples: Sequence[QueueSample], token_index: torch.Tensor, packed: int) -> Tensors:
    """Return (N, K) int64 ids and float32 log-probs, made of one dict per token."""
    heads: list[dict[int, float]] = [{}] * packed
    drawn = (s.top_k[p] for s in samples if s.top_k is not None for p in trained_positions(s))
    for position, head in zip(token_index.tolist(), drawn, strict=True):
        heads[position] = head
    ids = [list(head) + [-1] * (HEAD_SIZE - len(head)) for head in heads]
    log_probs = [list(head.values()) + [-np.inf] * (HEAD_SIZE - len(head)) for head in heads]
    return {
        "topk_ids": torch.tensor(ids, dtype=torch.long),
        "topk_log_probs": torch.tensor(log_probs, dtype=torch.float32),
    }


def flat_mask(samples: Sequence[QueueSample], token_index: torch.Tensor, packed: int) -> Tensors:
    """Return the candidate ids end to end in packed order, and (N,) counts, both int64."""
    sets = _lists(samples, token_index, packed)
    return {
        "sampling_mask": torch.tensor(list(chain.from_iterable(sets)), dtype=torch.long),
        "sampling_mask_counts": torch.tensor(list(map(len, sets)), dtype=torch.long),
    }


def array_tables(samples: Sequence[QueueSample], token_index: torch.Tensor, packed: int) -> Tensors:
    """Return (N, K) int64 ids and float32 log-probs, gathered from each sample's arrays."""
    ids = np.full((packed, HEAD_SIZE), -1, np.int64)
    log_probs = np.full((packed, HEAD_SIZE), -np.inf, np.float32)
    positions = token_index.numpy()
    start = 0
    for sample in samples:
        trained = trained_positions(sample)
        into = positions[start : start + len(trained)]
        if sample.top_k_ids is not None and sample.top_k_log_probs is not None:
            ids[into] = sample.top_k_ids[trained]
            log_probs[into] = sample.top_k_log_probs[trained]
        start += len(trained)
    return {"topk_ids": torch.from_numpy(ids), "topk_log_probs": torch.from_numpy(log_probs)}
