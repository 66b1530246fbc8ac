"""Deterministic rollouts of the shapes that the benchmarks use.

``agent`` is a long shared prompt with one short response per sample. ``multi_turn`` is
conversations of several turns whose earlier thinking is dropped, so that each gives two rows that
share their first turn. Both are one prompt group of 8 samples, packed into one row. Token ids are
synthetic; the sizes of the candidate sets follow what top-p 0.95 and top-k 512 give: two thirds
hold one id, the mean is about 3.3, and one in two thousand comes near the cap.

Every generator returns :class:`Rollouts`, plain arrays, from which :func:`to_arrow` makes this
format's record batch and :mod:`benchmarks.reference` the reference trainer's objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import ragged_format as rf
from ragged_format.lists import offsets_of, to_list
from ragged_format.schema import RECORD

__all__ = [
    "COLUMNS",
    "Rollouts",
    "agent",
    "all_trained",
    "many",
    "multi_turn",
    "one_sample",
    "schema",
    "to_arrow",
]

VOCAB_SIZE = 151_936
# Of the first seeds, the one whose sums come nearest to the published shapes.
SEED = 4
HEAD_SIZE = 20
TOP_K = 512
COLUMNS = (
    "group_id", "policy_version", "advantage", "rollout_log_probs", "candidate_counts",
    "candidate_ids", "topk_counts", "topk_ids", "topk_log_probs",
)  # fmt: skip

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples as flat arrays: n samples, t tokens, m targets, c candidates, h head entries.

    Attributes
    ----------
    token_counts : (n,) int64
    input_ids : (t,) int32
    completion_mask : (t,) uint8
        1 where the token is trained; 0 on the first token of a sample.
    rollout_log_probs : (m,) float32
    candidate_counts, topk_counts : (m,) int32
    candidate_ids : (c,) int32
        Ascending within a set; contains the target.
    topk_ids, topk_log_probs : (h,) int32, (h,) float32
        The most probable ids of the set, at most 20, by descending log-prob: a processed head
        without the ids to which truncation left no probability.
    advantages : (n,) float64
    groups, versions : (n,) int64
    """

    token_counts: Array
    input_ids: Array
    completion_mask: Array
    rollout_log_probs: Array
    candidate_counts: Array
    candidate_ids: Array
    topk_counts: Array
    topk_ids: Array
    topk_log_probs: Array
    advantages: Array
    groups: Array
    versions: Array

    @property
    def target_counts(self) -> Array:
        """Targets of each sample, (n,) int64."""
        bounds = offsets_of(self.token_counts)
        return np.add.reduceat(self.completion_mask, bounds[:-1], dtype=np.int64)


Segment = tuple[Array, bool]


def agent(seed: int = SEED) -> Rollouts:
    """Return 8 samples of 400 trained tokens after one shared prompt of 6,000."""
    rng = np.random.default_rng([seed, 1])
    prompt = _tokens(rng, 6_000)
    samples: list[list[Segment]] = [[(prompt, False), (_tokens(rng, 400), True)] for _ in range(8)]
    return _rollouts(rng, samples, np.zeros(8, np.int64))


def multi_turn(seed: int = SEED) -> Rollouts:
    """Return 4 conversations of 6 turns with two rows each, one group.

    The first row trains turns 1 and 2 with their thinking. After turn 2 the chat template drops
    thinking, so turns 3 to 6 are trained in a second row, in which what came before is context.
    Rows have 4,463 tokens, 1,296 of them trained; the group shares 500 tokens and a conversation's
    rows 1,000 more.
    """
    rng = np.random.default_rng([seed, 2])
    prompt = _tokens(rng, 500)
    samples: list[list[Segment]] = []
    for _ in range(4):
        question, answer = _tokens(rng, 600), _tokens(rng, 400)
        first: list[Segment] = [(prompt, False), (question, False), (answer, True)]
        second: list[Segment] = [(prompt, False), (question, False), (answer, False)]
        first += _turns(rng, 1, context=2_067, trained=896)
        second += _turns(rng, 4, context=1_667, trained=1_296)
        samples += [first, second]
    return _rollouts(rng, samples, np.zeros(8, np.int64))


def one_sample(seed: int = SEED) -> Rollouts:
    """Return one multi-turn sample of 4,278 tokens, 1,251 of them trained."""
    rng = np.random.default_rng([seed, 3])
    sample = [(_tokens(rng, 500), False), *_turns(rng, 4, context=2_527, trained=1_251)]
    return _rollouts(rng, [sample], np.zeros(1, np.int64))


def many(samples: int, seed: int = SEED, *, median: int = 4_000) -> Rollouts:
    """Return `samples` multi-turn samples of varied length in groups of 8.

    Lengths are log-normal about the median, of at least 256 tokens and at most about 8 times the
    median; three in ten tokens are trained.
    """
    rng = np.random.default_rng([seed, 4])
    most = median * 32_768 // 4_000
    lengths = np.clip(rng.lognormal(np.log(median), 0.7, samples), 256, most).astype(np.int64)
    out: list[list[Segment]] = []
    for length in lengths.tolist():
        trained = int(length * 0.3)
        turns = int(rng.integers(1, 7))
        prompt = _tokens(rng, length // 8)
        rest = length - len(prompt) - trained
        out.append([(prompt, False), *_turns(rng, turns, context=rest, trained=trained)])
    return _rollouts(rng, out, np.arange(samples) // 8)


def all_trained(lengths: Sequence[int], seed: int = SEED) -> Rollouts:
    """Return samples of these numbers of tokens, all trained but the first."""
    rng = np.random.default_rng([seed, 5])
    samples: list[list[Segment]] = [
        [(_tokens(rng, 1), False), (_tokens(rng, length - 1), True)] for length in lengths
    ]
    return _rollouts(rng, samples, np.arange(len(lengths)) // 8)


def _turns(rng: np.random.Generator, turns: int, *, context: int, trained: int) -> list[Segment]:
    """Return `turns` pairs of context and trained tokens with these sums."""
    asked = np.diff(np.linspace(0, context, turns + 1).astype(int))
    answered = np.diff(np.linspace(0, trained, turns + 1).astype(int))
    out: list[Segment] = []
    for a, b in zip(asked.tolist(), answered.tolist(), strict=True):
        out += [(_tokens(rng, a), False), (_tokens(rng, b), True)]
    return out


def _tokens(rng: np.random.Generator, count: int) -> Array:
    # Frequent tokens have small ids in a BPE vocabulary.
    return (VOCAB_SIZE * rng.random(count) ** 3).astype(np.int32)


def _rollouts(
    rng: np.random.Generator, samples: Sequence[Sequence[Segment]], groups: Array
) -> Rollouts:
    segments = [segment for sample in samples for segment in sample]
    ids = np.concatenate([tokens for tokens, _ in segments])
    mask = np.repeat(
        np.array([trained for _, trained in segments], np.uint8), [len(t) for t, _ in segments]
    )
    counts, candidates, log_probs, sampled = _candidate_sets(rng, ids[mask == 1])
    head_counts, heads = _heads(counts, log_probs)
    return Rollouts(
        token_counts=np.array([sum(len(t) for t, _ in sample) for sample in samples], np.int64),
        input_ids=ids,
        completion_mask=mask,
        rollout_log_probs=log_probs[sampled],
        candidate_counts=counts,
        candidate_ids=candidates,
        topk_counts=head_counts,
        topk_ids=candidates[heads],
        topk_log_probs=log_probs[heads],
        advantages=rng.standard_normal(len(samples)),
        groups=groups.astype(np.int64),
        versions=rng.integers(7, 12, len(samples)),
    )


def _candidate_sets(
    rng: np.random.Generator, targets: Array
) -> tuple[Array, Array, Array, npt.NDArray[np.bool_]]:
    """Return counts, ids ascending in each set, their log-probs, and which is the sampled one."""
    draws = rng.random(len(targets))
    counts = np.clip(2 * (1 - draws) ** (-1 / 1.25), 2, TOP_K).astype(np.int64)
    counts[rng.random(len(targets)) < 0.65] = 1
    starts = offsets_of(counts)[:-1]
    owner = np.repeat(np.arange(len(counts)), counts)
    rank = np.arange(len(owner)) - starts[owner]
    sampled = np.zeros(len(owner), bool)
    sampled[starts + np.minimum(rng.geometric(0.7, len(counts)) - 1, counts - 1)] = True
    ids = np.where(sampled, targets[owner], _tokens(rng, len(owner)))
    while True:  # replace ids that a set holds twice, the sampled one excepted
        key = owner * VOCAB_SIZE + ids
        order = np.argsort(key)
        key = key[order]
        twice = np.flatnonzero(key[1:] == key[:-1])
        if not len(twice):
            break
        again = order[np.union1d(twice, twice + 1)]
        again = again[~sampled[again]]
        ids[again] = _tokens(rng, len(again))
    weights = (rank + 1.0) ** -1.5 * np.exp(0.3 * rng.standard_normal(len(owner)))
    log_probs = np.log(weights / np.add.reduceat(weights, starts)[owner]).astype(np.float32)
    return counts.astype(np.int32), ids[order].astype(np.int32), log_probs[order], sampled[order]


def _heads(counts: Array, log_probs: Array) -> tuple[Array, Array]:
    """Return the head counts and the positions of the candidates that the heads hold, in order."""
    owner = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((-log_probs, owner))
    rank = np.arange(len(owner)) - offsets_of(counts)[owner]
    return np.minimum(counts, HEAD_SIZE).astype(np.int32), order[rank < HEAD_SIZE]


def schema() -> pa.Schema:
    """Return the sample schema of the batches that :func:`to_arrow` makes."""
    return rf.sample_schema(vocab_size=VOCAB_SIZE, columns=COLUMNS)


def to_arrow(rollouts: Rollouts, *, first_id: int = 0) -> pa.RecordBatch:
    """Return the samples as one record batch; sample ids count up from `first_id`."""
    samples = len(rollouts.token_counts)
    tokens = offsets_of(rollouts.token_counts)
    targets = offsets_of(rollouts.target_counts)
    record: dict[str, Any] = {
        "sample_id": [f"{first_id + i:08d}/0" for i in range(samples)],
        "group_id": [f"group-{group}" for group in rollouts.groups.tolist()],
        "policy_version": rollouts.versions,
        "advantage": rollouts.advantages,
    }
    offsets = {
        "token": tokens,
        "target": targets,
        "candidate": offsets_of(rollouts.candidate_counts)[targets],
        "topk": offsets_of(rollouts.topk_counts)[targets],
    }
    arrow_schema = schema()
    arrays = []
    for column in rf.parse_schema(arrow_schema):
        if column.axis == RECORD:
            arrays.append(pa.array(record[column.name], column.arrow_type))
        else:
            values = getattr(rollouts, column.name)
            arrays.append(to_list(values, offsets[column.axis], column))
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema)
