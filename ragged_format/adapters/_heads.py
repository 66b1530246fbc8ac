"""Top-K heads from an engine's lists: exact prefixes of the sampler's ranking.

vLLM lists the sampled token first and then the best others, K entries in all. Where the sampled
token is ranked beyond K, its entry has pushed out the K-th candidate: "top K" is the top K - 1 and
the sampled token. A head holds what is certain: the longest run of ranks 1, 2, 3, … that the list
gives. Everything is computed over all entries of a call at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._sentinels import SENTINELS, classify
from ragged_format.adapters._targets import place_of
from ragged_format.adapters._values import UNKNOWN_RANK, Bools, Floats
from ragged_format.errors import ConversionError
from ragged_format.lists import Int64, offsets_of, segment_sums
from ragged_format.rules import LOG_PROB_TOLERANCE, first_with_repeat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragged_format.adapters._choice import Choice

__all__ = ["Heads", "positive_log_prob", "read_heads"]

FIELD = "logprobs"
_FAR = np.iinfo(np.int64).max  # the list has no entry of the sampled token
_UNRANKED = _FAR - 1  # it has one without a rank


@dataclass(slots=True)
class Heads:
    """Heads of all generated tokens of a call.

    Attributes
    ----------
    counts : (g,) int64
    ids : (e,) int32
    log_probs : (e,) float64
        Non-increasing within each head.
    given : (g,) int64
        Entries that the engine gave for each token.
    dropped : Counter
        Entries left out, by reason.
    one_short : int
        Heads that lost their last entry to a sampled token ranked beyond them, which some engines
        count as one of the K.
    """

    counts: Int64
    ids: npt.NDArray[np.int32]
    log_probs: Floats
    given: Int64
    dropped: Counter[str] = field(default_factory=Counter)
    one_short: int = 0


@dataclass(slots=True)
class _List:
    """All entries of a call, end to end, and the target that each belongs to."""

    owner: Int64
    ids: Int64
    log_probs: Floats
    ranks: Int64

    def pick(self, which: npt.NDArray[np.bool_] | Int64) -> _List:
        return _List(self.owner[which], self.ids[which], self.log_probs[which], self.ranks[which])


def read_heads(
    choices: Sequence[Choice], sampled: Int64, vocab_size: int, limit: int | None = None
) -> Heads:
    """Return the heads of all choices; a choice without lists has empty ones.

    Parameters
    ----------
    choices : sequence of Choice
        Their token counts sum to ``len(sampled)``.
    sampled : (g,) int64
        All generated tokens.
    vocab_size : int
        Ids are below it.
    limit : int, optional
        Most entries of a head.

    Raises
    ------
    ConversionError
        An id is outside the vocabulary or twice in a list (``RF-A005``), or ranks and log-probs
        contradict each other (``RF-A007``).
    """
    entries, given, null = _join(choices, len(sampled))
    _check_ids(choices, entries, given, vocab_size)
    _check_sign(choices, entries)
    kinds = classify(entries.log_probs, null)
    dropped: Counter[str] = Counter()
    for kind in np.unique(kinds[kinds != 0]):
        dropped[SENTINELS[kind]] = int(np.count_nonzero(kinds == kind))
    if dropped:
        entries = entries.pick(kinds == 0)
    is_sampled = entries.ids == sampled[entries.owner]
    at = np.flatnonzero(is_sampled)
    again = np.zeros(len(at), bool)
    again[1:] = entries.owner[at[1:]] == entries.owner[at[:-1]]
    if again.any():
        dropped["repeats_sampled"] = int(np.count_nonzero(again))
        at = at[~again]
    own = entries.pick(at)
    others = entries.pick(~is_sampled)
    # Rank and log-prob of the sampled token's entry by target; -inf and far where it has none.
    own_rank = np.full(len(sampled), _FAR)
    own_rank[own.owner] = np.where(own.ranks == UNKNOWN_RANK, _UNRANKED, own.ranks)
    own_log_prob = np.full(len(sampled), -np.inf)
    own_log_prob[own.owner] = own.log_probs
    others = _ranked(others, own_rank, own_log_prob)

    offsets = _offsets(others.owner, len(sampled))
    place = np.arange(len(others.owner)) - offsets[others.owner] + 1
    gap = others.ranks - place
    before = segment_sums(gap == 0, offsets)
    fills, used = _fills(others, own_rank, own_log_prob, offsets, gap, before)
    keep = (gap == 0) | ((gap == 1) & fills[others.owner])
    place += (gap == 1) & keep
    dropped["after_gap"] = int(np.count_nonzero(~keep))
    own_kept = used[own.owner]
    dropped["sampled_beyond_head"] = int(np.count_nonzero(~own_kept))
    # Where the sampled token comes on top of the K best, it pushes none of them out.
    within = np.repeat([c.lists_sampled for c in choices], [len(c.token_ids) for c in choices])
    one_short = int(np.count_nonzero(~own_kept & within[own.owner])) if len(own.owner) else 0
    counts = segment_sums(keep, offsets) + used
    out = _place(others.pick(keep), place[keep], own.pick(own_kept), before, counts)
    _check_order(choices, out)
    heads = Heads(counts, out.ids.astype(np.int32), out.log_probs, given, dropped, one_short)
    if limit is not None and len(counts) and counts.max() > limit:
        _cut(heads, limit)
    heads.dropped = +heads.dropped
    return heads


def _join(choices: Sequence[Choice], size: int) -> tuple[_List, Int64, Bools]:
    given = np.zeros(size, np.int64)
    parts = []
    begin = 0
    for choice in choices:
        end = begin + len(choice.token_ids)
        if choice.log_probs is not None:
            given[begin:end] = choice.log_probs.counts
            parts.append(choice.log_probs.entries)
        begin = end
    if not parts:
        none = given[:0]
        return _List(none, none, none.astype(np.float64), none), given, none.astype(bool)
    ids, log_probs, null, ranks = (
        np.concatenate([part[column] for part in parts]) for column in range(4)
    )
    return _List(np.repeat(np.arange(size), given), ids, log_probs, ranks), given, null


def _check_ids(choices: Sequence[Choice], entries: _List, given: Int64, vocab_size: int) -> None:
    bad = (entries.ids < 0) | (entries.ids >= vocab_size)
    if bad.any():
        first = int(np.argmax(bad))
        raise ConversionError(
            "an id of a top-K list is outside the vocabulary", code="RF-A005",
            where=place_of(choices, int(entries.owner[first]), FIELD), got=int(entries.ids[first]),
            expected=f"0 <= id < {vocab_size}",
            remedy="pass the model's vocab_size, not the tokenizer's",
        )  # fmt: skip
    if not len(given) or given.max() <= 1:
        return
    if first_with_repeat(entries.ids.astype(np.int32), offsets_of(given)) is None:
        return
    key = entries.owner * vocab_size + entries.ids
    key.sort()
    twice = key[1:][key[1:] == key[:-1]]
    # The sampled token may come twice: as itself and within the K best.
    owner, id_ = twice // vocab_size, twice % vocab_size
    own = np.concatenate([choice.token_ids for choice in choices])[owner]
    if (own != id_).any():
        first = int(np.argmax(own != id_))
        raise ConversionError(
            "an id is twice in a top-K list", code="RF-A005",
            where=place_of(choices, int(owner[first]), FIELD), expected="unique ids",
            got=int(id_[first]),
        )  # fmt: skip


def _check_sign(choices: Sequence[Choice], entries: _List) -> None:
    bad = entries.log_probs > LOG_PROB_TOLERANCE
    if bad.any():
        first = int(np.argmax(bad))
        target = int(entries.owner[first])
        raise positive_log_prob(choices, target, float(entries.log_probs[first]))


def positive_log_prob(choices: Sequence[Choice], target: int, value: float) -> ConversionError:
    """Return the error for a log-prob above 0 by more than rounding."""
    return ConversionError(
        "a log-prob is positive", code="RF-A007", where=place_of(choices, target, FIELD),
        expected=f"<= {LOG_PROB_TOLERANCE}", got=value,
        remedy="run the engine with --logprobs-mode processed_logprobs; logits do not convert",
    )  # fmt: skip


def _offsets(owner: Int64, size: int) -> Int64:
    return offsets_of(np.bincount(owner, minlength=size).astype(np.int64))


def _ranked(others: _List, own_rank: Int64, own_log_prob: Floats) -> _List:
    """Return the entries in rank order; ranks that are unknown or repeated come from log-probs."""
    same = others.owner[1:] == others.owner[:-1]
    if (others.ranks[1:] <= others.ranks[:-1])[same].any():
        others = others.pick(np.lexsort((others.ranks, others.owner)))
        same = others.owner[1:] == others.owner[:-1]
    vague = others.ranks < 1
    vague[1:] |= same & (others.ranks[1:] == others.ranks[:-1])
    if not vague.any():
        return others
    rows = np.zeros(len(own_rank), bool)
    rows[others.owner[vague]] = True
    # Stable, so entries of one log-prob stay as the engine listed them.
    others = others.pick(np.lexsort((-others.log_probs, others.owner)))
    redo = rows[others.owner]
    starts = _offsets(others.owner, len(own_rank))[others.owner]
    place = np.arange(len(others.owner)) - starts + 1
    # The sampled token takes its place before the first entry that is less likely.
    after = others.log_probs < own_log_prob[others.owner]
    others.ranks = np.where(redo, place + after, others.ranks)
    return others


def _fills(
    others: _List,
    own_rank: Int64,
    own_log_prob: Floats,
    offsets: Int64,
    gap: Int64,
    before: Int64,
) -> tuple[Bools, Bools]:
    """Return, by target, whether the sampled token closes a gap, and whether the head holds it."""
    size = len(own_rank)
    padded = np.append(others.log_probs, -np.inf)
    counts = np.diff(offsets)
    last = np.where(before > 0, padded[offsets[:-1] + before - 1], np.inf)
    has_next = before < counts
    following = np.where(has_next, padded[np.minimum(offsets[:-1] + before, len(padded) - 1)], 0)
    gap_next = np.zeros(size, bool)
    gap_next[has_next] = gap[(offsets[:-1] + before)[has_next]] == 1
    rank = before + 1
    ordered = (own_log_prob <= last) & (own_log_prob >= following)
    # vLLM ranks the sampled token below all that tie with it, so a tie may close an earlier gap.
    is_tied = (own_rank > rank) & (own_log_prob == following)
    is_unranked = own_rank == _UNRANKED
    fills = gap_next & ((own_rank == rank) | (ordered & (is_tied | is_unranked)))
    return fills, fills | (~gap_next & (own_rank == rank))


def _place(others: _List, place: Int64, own: _List, before: Int64, counts: Int64) -> _List:
    """Return the kept entries at their ranks."""
    starts = offsets_of(counts)
    total = int(starts[-1])
    out = _List(
        np.repeat(np.arange(len(counts)), counts), np.empty(total, np.int64),
        np.empty(total, np.float64), np.zeros(0, np.int64),
    )  # fmt: skip
    for part, slot in ((others, place), (own, before[own.owner] + 1)):
        at = starts[part.owner] + slot - 1
        out.ids[at] = part.ids
        out.log_probs[at] = part.log_probs
    return out


def _check_order(choices: Sequence[Choice], out: _List) -> None:
    rises = (out.log_probs[1:] > out.log_probs[:-1]) & (out.owner[1:] == out.owner[:-1])
    if rises.any():
        first = int(np.argmax(rises)) + 1
        raise ConversionError(
            "ranks and log-probs of a top-K list contradict each other", code="RF-A007",
            where=place_of(choices, int(out.owner[first]), FIELD),
            expected=f"<= {out.log_probs[first - 1]}", got=out.log_probs[first],
        )  # fmt: skip


def _cut(heads: Heads, limit: int) -> None:
    starts = offsets_of(heads.counts)[:-1]
    place = np.arange(len(heads.ids)) - np.repeat(starts, heads.counts)
    keep = place < limit
    heads.dropped["beyond_limit"] = int(np.count_nonzero(~keep))
    heads.ids, heads.log_probs = heads.ids[keep], heads.log_probs[keep]
    heads.counts = np.minimum(heads.counts, limit)
