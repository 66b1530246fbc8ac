"""The parts of a call's choices that policies decide about: sets, log-probs, heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._columns import HEAD, SUPPORT, SUPPORT_LOG_PROBS, Wanted
from ragged_format.adapters._heads import positive_log_prob, read_heads
from ragged_format.adapters._sentinels import SENTINELS, classify
from ragged_format.adapters._support import (
    DUPLICATE,
    EMPTY,
    NO_LOG_PROB,
    NULL,
    OUTSIDE,
    OVERFLOW,
    REASONS,
    Support,
    read_support,
)
from ragged_format.adapters._targets import Targets, place_of
from ragged_format.errors import ConversionError, Where
from ragged_format.rules import LOG_PROB_TOLERANCE, TargetFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragged_format.adapters._choice import Choice
    from ragged_format.adapters._values import Bools, Floats
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.lists import Int64

__all__ = [
    "NOT_WANTED",
    "Arrays",
    "Sampled",
    "check_singletons",
    "read_heads_into",
    "read_log_probs",
    "read_sets",
]

NOT_WANTED = "column_not_wanted"
# The only token of a set has log-prob 0 in processed mode, up to rounding.
_SURE = 1e-3

Arrays = dict[str, npt.NDArray[Any]]


def read_sets(targets: Targets, wanted: Wanted, arrays: Arrays) -> Support | None:
    """Read the candidate sets, and do with faulty ones what the policies say."""
    if SUPPORT[0] not in wanted:
        return None
    options = wanted.options
    support = read_support(
        targets.choices, targets.tokens, options.vocab_size, log_probs=SUPPORT_LOG_PROBS in wanted
    )
    for fault, reason in enumerate(REASONS[1:], 1):
        targets.apply(
            options.on_missing_support if fault == NULL else options.on_invalid_support,
            support.fault == fault,
            f"support_{reason}",
            TargetFlag.SUPPORT_OVERFLOW if fault == OVERFLOW else TargetFlag.SUPPORT_MISSING,
            "sampling_mask",
            partial(_set_error, targets, support, fault),
        )
    good = support.without_faults()
    arrays["candidate_counts"], arrays["candidate_ids"] = good.counts, good.ids
    if good.log_probs is not None:
        arrays[SUPPORT_LOG_PROBS] = good.log_probs
        _check_mass(targets.choices, good.counts, good.log_probs, "sampling_mask_logprobs")
    return support


_SET_RULES = {
    EMPTY: ("a candidate set is empty", "a set with the sampled token"),
    DUPLICATE: ("an id is twice in a candidate set", "unique ids"),
    OUTSIDE: ("the sampled token is not in its candidate set", "a set with the sampled token"),
    OVERFLOW: ("a candidate set was cut at the engine's limit", "a whole set"),
    NO_LOG_PROB: ("a candidate has no log-prob", "a finite log-prob for every candidate"),
}


def _set_error(
    targets: Targets, support: Support, fault: int, where: Where, target: int
) -> ConversionError:
    if fault == NULL:
        return ConversionError(
            "a generated token has no candidate set", code="RF-A004", where=where,
            expected="a list of ids", got="null",
            remedy="ask for sets (vLLM: --return-sampling-mask, vllm-project/vllm#53826; SGLang: "
            "return_sampling_mask), or choose on_missing_support, or leave the candidate columns "
            "out of columns=",
        )  # fmt: skip
    what, expected = _SET_RULES[fault]
    begin = int(support.counts[:target].sum())
    ids = support.ids[begin : begin + int(support.counts[target])].tolist()
    shown = f"{ids[:8]}" if len(ids) <= 8 else f"{ids[:8]} and {len(ids) - 8} more"
    return ConversionError(
        what, code="RF-A005", where=where, expected=expected,
        got=f"{shown} for token {targets.tokens[target]}",
        remedy="choose on_invalid_support to convert the rest; sets are never repaired",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampled:
    """Log-probs of the generated tokens: float64 values, their sentinel class, where given."""

    values: Floats
    kinds: npt.NDArray[np.uint8]
    given: Bools


def read_log_probs(targets: Targets, wanted: Wanted, arrays: Arrays) -> Sampled:
    size = len(targets.tokens)
    values, null = np.full(size, np.nan), np.zeros(size, bool)
    given = np.zeros(size, bool)
    for choice, begin in zip(targets.choices, targets.offsets.tolist(), strict=False):
        if choice.log_probs is not None:
            end = begin + len(choice.token_ids)
            values[begin:end], null[begin:end] = choice.log_probs.values, choice.log_probs.null
            given[begin:end] = True
    sampled = Sampled(values, classify(values, null), given)
    if "rollout_log_probs" not in wanted:
        return sampled
    positive = values > LOG_PROB_TOLERANCE
    if positive.any():
        first = int(np.argmax(positive))
        raise positive_log_prob(targets.choices, first, float(values[first]))
    policy = wanted.options.on_missing_log_prob
    missing = [("not_given", ~given)]
    missing += [(kind, given & (sampled.kinds == number)) for number, kind in enumerate(SENTINELS)][
        1:
    ]
    for reason, bad in missing:
        targets.apply(
            policy, bad, f"log_prob_{reason}", TargetFlag.LOG_PROB_MISSING, "logprobs",
            _log_prob_lost,
        )  # fmt: skip
    arrays["rollout_log_probs"] = np.where(sampled.kinds == 0, values, 0.0)
    return sampled


def _log_prob_lost(where: Where, _: int) -> ConversionError:
    return ConversionError(
        "a generated token has no log-prob", code="RF-A007", where=where,
        expected="a finite number", got="null, NaN or a floor",
        remedy="request logprobs, or choose another on_missing_log_prob",
    )  # fmt: skip


def check_singletons(choices: Sequence[Choice], support: Support, sampled: Sampled) -> None:
    """Raise where log-probs cannot be over the set: vllm-project/vllm#9453."""
    alone = (support.counts == 1) & (support.fault == 0) & (sampled.kinds == 0)
    bad = alone & (sampled.values < -_SURE)
    if bad.any():
        first = int(np.argmax(bad))
        raise ConversionError(
            "the only token of a candidate set has a log-prob other than 0", code="RF-A007",
            where=place_of(choices, first, "logprobs"), expected=0.0,
            got=float(sampled.values[first]),
            remedy="the values look raw: pass logprobs_mode='raw', or run the engine with "
            "--logprobs-mode processed_logprobs",
        )  # fmt: skip


def _check_mass(
    choices: Sequence[Choice], counts: Int64, log_probs: npt.NDArray[Any], field: str
) -> None:
    """Raise where the probabilities of one set or head sum to more than 1."""
    starts = (np.cumsum(counts) - counts)[counts > 0]
    if not len(starts):
        return
    totals = np.add.reduceat(np.exp(log_probs.astype(np.float32), dtype=np.float64), starts)
    bad = totals > 1 + LOG_PROB_TOLERANCE
    if bad.any():
        first = int(np.argmax(bad))
        target = int(np.flatnonzero(counts)[first])
        raise ConversionError(
            "the probabilities of one set or head sum to more than 1", code="RF-A007",
            where=place_of(choices, target, field), expected=f"<= {1 + LOG_PROB_TOLERANCE}",
            got=float(totals[first]), remedy="check the engine's --logprobs-mode",
        )  # fmt: skip


def read_heads_into(
    targets: Targets, wanted: Wanted, arrays: Arrays, report: ConversionReport
) -> None:
    ledger = report.head_entries
    given = [choice.log_probs for choice in targets.choices if choice.log_probs is not None]
    entries = sum(len(part.entries.ids) for part in given)
    by_text = sum(part.text_entries for part in given)
    ledger.taken += entries + by_text
    ledger.drop("text_only", by_text)
    if HEAD[0] not in wanted:
        ledger.drop(NOT_WANTED, entries)
        return
    heads = read_heads(
        targets.choices, targets.tokens, wanted.options.vocab_size, wanted.options.heads
    )
    _check_mass(targets.choices, heads.counts, heads.log_probs, "logprobs")
    arrays.update(zip(HEAD, (heads.counts, heads.ids, heads.log_probs), strict=True))
    for reason, count in heads.dropped.items():
        ledger.drop(reason, count)
    report.noted["heads_one_short"] += heads.one_short
    missing = heads.counts == 0
    if wanted.can_flag:
        targets.flags[missing] |= TargetFlag.HEAD_MISSING
    else:
        report.noted["head_missing"] += int(np.count_nonzero(missing))
