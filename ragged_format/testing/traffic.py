"""Realistic rollouts of any size: shared prompts, turns that fork, heavy-tailed candidate sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import LimitExceededError
from ragged_format.lists import Int64, offsets_of, segment_sums
from ragged_format.profiles import sample_schema
from ragged_format.testing.generate import distinct_ids, fill_batch, log_probs

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.schema import Column

__all__ = ["ROLLOUT_COLUMNS", "rollouts"]

Values = npt.NDArray[Any]

ROLLOUT_COLUMNS = (
    "group_id", "rollout_id", "branch_index", "policy_version", "temperature", "reward",
    "advantage", "finish_reason", "provenance", "rollout_log_probs", "candidate_counts",
    "candidate_ids", "candidate_log_probs", "topk_counts", "topk_ids", "topk_log_probs",
)  # fmt: skip


def rollouts(
    rng: np.random.Generator,
    *,
    num_samples: int = 32,
    vocab_size: int = 151_936,
    columns: Iterable[str | Column] | None = ROLLOUT_COLUMNS,
    prompt_length: int = 120,
    response_length: int = 200,
    group_size: int = 8,
    turns: int = 1,
    fork_rate: float = 0.5,
    mean_candidates: float = 3.0,
    max_candidates: int = 512,
    top_k: int = 20,
    prefix: str = "s",
) -> pa.RecordBatch:
    """Return realistic samples, the same for equal arguments and generator states.

    Lengths are ragged. The samples of a group share their prompt. With several turns a sample is a
    prompt, then responses (scored) with tool outputs (not scored) between them, and a sample may
    fork from an earlier one of its group at a turn: it begins with the same tokens. The size of a
    candidate set follows a power law, so that most sets hold one id and a few hold hundreds; ids
    are skewed to small values, as those of a byte-pair vocabulary are. A head holds the `top_k`
    likeliest of the set: 12 % of its slots at the defaults.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of all values.
    num_samples : int
        Records.
    vocab_size : int
        Ids are below it.
    columns : iterable of str or Column, optional
        Optional columns, as in :func:`ragged_format.sample_schema`.
    prompt_length, response_length : int
        Mean tokens of a prompt and of one response (gamma distributed); tool outputs are half as
        long as responses.
    group_size : int
        Samples of one prompt.
    turns : int
        Responses of a sample.
    fork_rate : float
        Share of the samples, beyond the first of a group, that fork from an earlier one where
        ``turns > 1``.
    mean_candidates, max_candidates : float, int
        Mean, about, and largest size of the candidate sets, the sampled token included.
    top_k : int
        Largest head.
    prefix : str
        Start of the sample ids.

    Examples
    --------
    >>> batch = rollouts(np.random.default_rng(0), num_samples=16, turns=2)
    >>> batch.num_rows, len(set(batch.column("group_id").to_pylist()))
    (16, 2)
    """
    if num_samples < 0 or group_size < 1 or turns < 1 or min(prompt_length, response_length) < 1:
        raise LimitExceededError(
            "sizes of generated data are positive", code="RF-L002", expected=">= 1",
            got=(num_samples, group_size, turns, prompt_length, response_length),
        )  # fmt: skip
    schema = sample_schema(vocab_size=vocab_size, columns=columns)
    chat = _Chat(rng, vocab_size, prompt_length, response_length, turns, fork_rate)
    samples = chat.samples(num_samples, group_size)
    lengths = np.array([len(tokens) for tokens, _, _ in samples], np.int64)
    tokens = np.concatenate([np.zeros(0, np.int32), *[tokens for tokens, _, _ in samples]])
    mask = np.concatenate([np.zeros(0, np.uint8), *[scored for _, scored, _ in samples]])
    given: dict[str, Any] = {"input_ids": tokens, "completion_mask": mask}
    given |= _sets(rng, tokens[mask != 0], vocab_size, mean_candidates, max_candidates, top_k)
    if "target_flags" in schema.names:
        given["target_flags"] = np.zeros(int(mask.sum()), np.uint8)
    given |= _records(rng, samples, group_size, mask, offsets_of(lengths))
    return fill_batch(schema, rng, lengths, given=given, max_width=top_k, prefix=prefix)


class _Chat:
    """Draws conversations as (tokens, mask, (conversation, branch)) with shared prefixes."""

    def __init__(
        self, rng: np.random.Generator, vocab_size: int, prompt_length: int, response_length: int,
        turns: int, fork_rate: float,
    ) -> None:  # fmt: skip
        self.rng = rng
        self.vocab_size = vocab_size
        self.prompt_length = prompt_length
        self.response_length = response_length
        self.turns = turns
        self.fork_rate = fork_rate

    def samples(self, num_samples: int, group_size: int) -> list[tuple[Values, Values, Any]]:
        out = []
        group: list[tuple[list[Values], int]] = []
        branches: dict[int, int] = {}
        for number in range(num_samples):
            if number % group_size == 0:
                group = []
                branches = {}
            if not group:
                parts, conversation = [self.text(self.prompt_length)], number
            elif self.turns > 1 and self.rng.random() < self.fork_rate:
                parent, conversation = group[self.rng.integers(len(group))]
                # Whole turns are shared: an odd number of parts ends in a prompt or tool output.
                parts = parent[: 2 * int(self.rng.integers(1, self.turns)) + 1]
            else:
                parts, conversation = group[0][0][:1], number
            parts = self.finish(parts)
            group.append((parts, conversation))
            branch = branches[conversation] = branches.get(conversation, -1) + 1
            scored = [np.full(len(part), i % 2, np.uint8) for i, part in enumerate(parts)]
            out.append((np.concatenate(parts), np.concatenate(scored), (conversation, branch)))
        return out

    def finish(self, parts: list[Values]) -> list[Values]:
        parts = list(parts)
        while len(parts) < 2 * self.turns:
            response = len(parts) % 2 == 1
            parts.append(self.text(self.response_length if response else self.response_length / 2))
        return parts

    def text(self, mean: float) -> Values:
        size = max(1, round(self.rng.gamma(3.0, mean / 3.0)))
        return skewed_ids(self.rng, size, self.vocab_size).astype(np.int32)


def skewed_ids(rng: np.random.Generator, size: int, vocab_size: int) -> Int64:
    """Draw ids whose logarithms are uniform: small ones are common, all occur."""
    drawn: Int64 = np.expm1(rng.random(size) * np.log(vocab_size + 1)).astype(np.int64)
    return np.minimum(drawn, vocab_size - 1)


def _set_sizes(rng: np.random.Generator, size: int, mean: float, largest: int) -> Int64:
    """Draw from a power law on ``1..largest`` whose mean is `mean`, by bisecting its exponent."""
    sizes = np.arange(1, largest + 1)
    low, high = 0.0, 20.0
    for _ in range(60):
        power = (low + high) / 2
        weights = sizes**-power
        if (sizes * weights).sum() / weights.sum() > mean:
            low = power
        else:
            high = power
    return np.asarray(rng.choice(sizes, size, p=weights / weights.sum()), np.int64)


def _sets(
    rng: np.random.Generator, sampled: Values, vocab_size: int, mean: float, largest: int,
    top_k: int,
) -> dict[str, Values]:  # fmt: skip
    """Return candidate sets with log-probs, the sampled token drawn from them, and their heads."""
    size = len(sampled)
    drawn = _set_sizes(rng, size, mean, min(largest, vocab_size))
    proposal = skewed_ids(rng, int(drawn.sum()), vocab_size)
    counts, ids = distinct_ids(rng, drawn, vocab_size, include=sampled, ids=proposal)
    owner = np.repeat(np.arange(size), counts)
    values = log_probs(rng, counts, mass=1.0 - 1e-6)
    # The sampled token takes the log-prob of a draw from the set (the largest with Gumbel noise).
    noisy = values - np.log(rng.exponential(1.0, len(values)))
    winner = np.lexsort((noisy, owner))[np.cumsum(counts) - 1]
    chosen = np.flatnonzero(ids == np.repeat(sampled, counts))
    values[chosen], values[winner] = values[winner], values[chosen]
    order = np.lexsort((-values, owner))
    rank = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    head = order[rank < top_k]
    return {
        "candidate_counts": counts,
        "candidate_ids": ids,
        "candidate_log_probs": values,
        "rollout_log_probs": values[chosen],
        "topk_counts": np.minimum(counts, top_k),
        "topk_ids": ids[head],
        "topk_log_probs": values[head],
    }


def _records(
    rng: np.random.Generator, samples: list[tuple[Values, Values, Any]], group_size: int,
    mask: Values, offsets: Int64,
) -> dict[str, Any]:  # fmt: skip
    size = len(samples)
    groups = np.arange(size) // group_size
    reward = (rng.random(size) < 0.4).astype(np.float64)
    sums = np.bincount(groups, reward, minlength=1) / np.bincount(groups, minlength=1).clip(1)
    scored = segment_sums(mask, offsets)
    reasons = np.where(scored > 2 * scored.mean() if size else scored > 0, "length", "stop")
    return {
        "group_id": [f"g-{g}" for g in groups],
        "rollout_id": [f"r-{conversation}" for _, _, (conversation, _) in samples],
        "branch_index": np.array([branch for _, _, (_, branch) in samples], np.int32),
        "temperature": np.ones(size),
        "reward": reward,
        "advantage": reward - sums[groups],
        "finish_reason": reasons.tolist(),
        "provenance": ['{"engine": "generated", "top_p": 0.95}'] * size,
    }
