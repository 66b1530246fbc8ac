"""What a sampler says about the targets of samples: candidate sets, log-probs, heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ragged_format.adapters._sentinels import SENTINELS, classify
from ragged_format.adapters._tables import HeadRows, clean_heads, clean_sets, find_in_rows
from ragged_format.adapters._targets import POLICIES, Policy
from ragged_format.adapters._teacher import heads_of_targets
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import ranges
from ragged_format.profiles import standard_column
from ragged_format.rules import LOG_PROB_TOLERANCE, TargetFlag

if TYPE_CHECKING:
    from ragged_format.adapters._build import Draft
    from ragged_format.adapters._values import Bools, Floats
    from ragged_format.lists import Int64
    from ragged_format.schema import LogProb

__all__ = ["add_heads", "add_log_probs", "add_sets", "check_policies"]


def check_policies(**policies: str) -> None:
    """Raise ``RF-A011`` unless every option names a policy that it can have."""
    for option, policy in policies.items():
        allowed = [p for p in POLICIES if option != "on_missing_log_prob" or p != "full_vocab"]
        if policy not in allowed:
            raise ConversionError(
                f"{option} names a policy", code="RF-A011", expected=", ".join(allowed), got=policy
            )


def add_sets(
    draft: Draft,
    rows_of_tokens: tuple[Int64, Int64, Bools],
    name: str,
    *,
    on_missing: Policy,
    on_invalid: Policy,
) -> None:
    """Add candidate sets to a draft, faults treated by policy, everything counted.

    Parameters
    ----------
    draft : Draft
    rows_of_tokens : (ids, counts, null)
        Of all tokens, by own position, as `Fields.id_rows` returns them.
    name : str
        The payload's field, for errors.
    on_missing, on_invalid : Policy
    """
    all_ids, all_counts, all_null = rows_of_tokens
    rows = draft.positions
    counts, null = all_counts[rows], all_null[rows]
    given = all_ids[ranges((np.cumsum(all_counts) - all_counts)[rows], counts)]
    ledger, targets = draft.report.candidates, draft.targets
    ledger.taken += len(all_ids)
    ledger.drop("context", len(all_ids) - len(given))
    ids, repeated = clean_sets(given, counts, draft.vocab_size, draft.report, draft.place(name))
    _, held = find_in_rows(ids, counts, targets.tokens)
    missing = null | (counts == 0)
    faults = (
        ("support_missing", missing, on_missing, _no_set),
        ("support_duplicate_ids", repeated, on_invalid, _twice),
        ("support_sampled_outside", ~held & ~missing & ~repeated, on_invalid, _outside),
    )
    bad = np.zeros(len(counts), bool)
    for reason, where, policy, fail in faults:
        targets.apply(policy, where, reason, TargetFlag.SUPPORT_MISSING, name, fail)
        ledger.drop(reason, int(counts[where].sum()))
        bad |= where
    ids = ids[np.repeat(~bad, counts)]
    draft.add("candidate_counts", np.where(bad, 0, counts))
    draft.add("candidate_ids", ids)


def _no_set(where: Where, _: int) -> ConversionError:
    return ConversionError(
        "a trained token has no candidate set", code="RF-A004", where=where,
        expected="a list with the sampled token", got="null or an empty list",
        remedy='choose on_missing_support; an empty list does not say "the full vocabulary"',
    )  # fmt: skip


def _twice(where: Where, _: int) -> ConversionError:
    return ConversionError(
        "a candidate set has an id twice", code="RF-A005", where=where, expected="unique ids",
        got="a repeated id", remedy="choose on_invalid_support to convert the rest",
    )  # fmt: skip


def _outside(where: Where, _: int) -> ConversionError:
    return ConversionError(
        "the sampled token is not in its candidate set", code="RF-A005", where=where,
        expected="a set with the sampled token", got="a set without it",
        remedy="choose on_invalid_support to convert the rest; sets are never repaired",
    )  # fmt: skip


def add_log_probs(
    draft: Draft,
    of_tokens: tuple[Floats, Bools],
    name: str,
    mode: LogProb,
    policy: Policy,
) -> None:
    """Add the sampler's log-probs to a draft, faults treated by policy, everything counted.

    Parameters
    ----------
    draft : Draft
    of_tokens : (values, null)
        Of all tokens, by own position; 0 on context.
    name : str
        The payload's field, for errors.
    mode : LogProb
    policy : Policy
        For null, NaN and floors.
    """
    everywhere, null = of_tokens
    values = everywhere[draft.positions]
    ledger = draft.report.log_probs
    on_context = int(np.count_nonzero(everywhere) - np.count_nonzero(values))
    ledger.taken += len(values) + on_context
    ledger.drop("context", on_context)
    kinds = classify(values, null[draft.positions])
    positive = values > LOG_PROB_TOLERANCE
    if positive.any():
        first = int(np.argmax(positive))
        raise ConversionError(
            "a log-prob is positive", code="RF-A007", where=draft.place(name)(first),
            expected=f"<= {LOG_PROB_TOLERANCE}", got=float(values[first]),
        )  # fmt: skip
    for number, kind in enumerate(SENTINELS[1:], 1):
        draft.targets.apply(
            policy, kinds == number, f"log_prob_{kind}", TargetFlag.LOG_PROB_MISSING, name,
            _no_log_prob,
        )  # fmt: skip
        ledger.drop(f"log_prob_{kind}", int(np.count_nonzero(kinds == number)))
    column = replace(standard_column("rollout_log_probs"), log_prob=mode)
    draft.given["rollout_log_probs"] = kinds == 0
    draft.add("rollout_log_probs", np.where(kinds == 0, values, 0.0).astype(np.float32), column)


def _no_log_prob(where: Where, _: int) -> ConversionError:
    return ConversionError(
        "a trained token has no log-prob", code="RF-A007", where=where,
        expected="a finite number", got="null, NaN or a floor",
        remedy="choose another on_missing_log_prob",
    )  # fmt: skip


def add_heads(draft: Draft, heads: HeadRows, null: Bools | None, mode: LogProb, field: str) -> None:
    """Add the sampler's heads, of all tokens by own position, to a draft."""
    heads, null = heads_of_targets(draft, heads, null)
    heads = clean_heads(heads, draft.vocab_size, draft.report, draft.place(field), null=null)
    column = replace(standard_column("topk_log_probs"), log_prob=mode)
    draft.add("topk_counts", heads.counts)
    draft.add("topk_ids", heads.ids)
    draft.add("topk_log_probs", heads.log_probs, column)
    draft.targets.flags[heads.counts == 0] |= TargetFlag.HEAD_MISSING
