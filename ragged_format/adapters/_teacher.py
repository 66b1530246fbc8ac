"""A teacher's heads on the targets of samples: columns, flags, and what trainers need of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._export import Samples, head_of
from ragged_format.adapters._tables import HeadRows, clean_heads, find_in_rows
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import ranges
from ragged_format.profiles import standard_column
from ragged_format.rules import TargetFlag
from ragged_format.schema import LogProb

if TYPE_CHECKING:
    from collections import Counter

    from ragged_format.adapters._build import Draft
    from ragged_format.adapters._values import Bools

__all__ = [
    "add_teacher",
    "heads_of_targets",
    "shorter_heads",
    "stored_heads",
    "teacher_mode",
    "with_realized",
]

MODES = ("processed", "raw")


def teacher_mode(
    logprobs_mode: str, temperature: float | None = None, *, logits: bool = False
) -> LogProb:
    """Return the log-prob mode of a teacher, which scores over the whole vocabulary.

    Raises
    ------
    ConversionError
        Another mode than processed or raw (``RF-A011``).
    """
    if logprobs_mode not in MODES:
        raise ConversionError(
            "log-probs are processed or raw", code="RF-A011", expected=" or ".join(MODES),
            got=logprobs_mode,
        )  # fmt: skip
    return LogProb(
        "raw" if logprobs_mode == "raw" else "processed", "vocabulary",
        "logit" if logits else "log_prob", temperature,
    )  # fmt: skip


def heads_of_targets(
    draft: Draft, heads: HeadRows, null: Bools | None = None
) -> tuple[HeadRows, Bools | None]:
    """Return the heads of the targets, of heads of all tokens by own position.

    The entries of other tokens are counted as dropped.
    """
    rows = draft.positions
    counts = heads.counts[rows]
    entries = ranges((np.cumsum(heads.counts) - heads.counts)[rows], counts)
    left_out = len(heads.ids) - len(entries)
    draft.report.head_entries.taken += left_out
    draft.report.head_entries.drop("context", left_out)
    if not left_out:
        return replace(heads, counts=counts), null
    return heads.pick(entries, counts), None if null is None else null[entries]


def add_teacher(
    draft: Draft,
    heads: HeadRows,
    mode: LogProb,
    field: str,
    *,
    null: Bools | None = None,
    approximate: bool = False,
    head_kind: str = "top_k",
    has_log_probs: bool = True,
) -> HeadRows:
    """Add a teacher's heads to a draft, and its log-prob of the realised token where known.

    Parameters
    ----------
    draft : Draft
    heads : HeadRows
        Of each target, by own position; cleaned here (draws excepted, which stay as drawn).
    mode : LogProb
    field : str
        Of the payload, for errors.
    null : (t,) bool, optional
        Entries whose log-prob is null.
    approximate : bool
        From a lossy source.
    head_kind : {"top_k", "draws"}
    has_log_probs : bool
        False for draws of which only the weights are known.
    """
    place = draft.place(field)
    if head_kind == "draws":
        draft.report.head_entries.taken += len(heads.ids)
    else:
        heads = clean_heads(
            heads, draft.vocab_size, draft.report, place, null=null, exact=not approximate,
            logits=mode.value == "logit", kind="teacher_head",
        )  # fmt: skip
    counts = replace(standard_column("teacher_topk_counts"), head_kind=head_kind)
    draft.add("teacher_topk_counts", heads.counts, counts)
    draft.add("teacher_topk_ids", heads.ids)
    if has_log_probs:
        column = replace(
            standard_column("teacher_topk_log_probs"), log_prob=mode, approximate=approximate
        )
        draft.add("teacher_topk_log_probs", heads.log_probs, column)
    if heads.weights is not None:
        draft.add("teacher_topk_weights", heads.weights)
    missing = heads.counts == 0
    draft.targets.flags[missing] |= TargetFlag.TEACHER_MISSING
    if head_kind != "draws":
        _add_realized(draft, heads, mode, approximate=approximate)
    return heads


def _add_realized(draft: Draft, heads: HeadRows, mode: LogProb, *, approximate: bool) -> None:
    at, held = find_in_rows(heads.ids, heads.counts, draft.targets.tokens)
    lacking = int(np.count_nonzero(~held & (heads.counts > 0)))
    if lacking:
        # A column holds the log-prob of every target, or says that the teacher is missing.
        draft.report.noted["heads_without_realized_token"] += lacking
        return
    values = np.zeros(len(held), np.float32)
    values[held] = heads.log_probs[at[held]]
    column = replace(standard_column("teacher_log_probs"), log_prob=mode, approximate=approximate)
    draft.add("teacher_log_probs", values, column)


def with_realized(
    heads: HeadRows,
    tokens: npt.NDArray[Any],
    log_probs: npt.NDArray[Any] | None,
    place: Any,
    *,
    lossy: bool = False,
) -> tuple[HeadRows, int, int]:
    """Return the heads with the realised token in each that is not empty.

    Parameters
    ----------
    heads : HeadRows
        Log-probs not increasing.
    tokens : (m,) int
        Realised token of each target.
    log_probs : (m,) float, optional
        The teacher's log-prob of it.
    place : PlaceOf
    lossy : bool
        Leave out the heads of targets whose realised token has no log-prob, instead of refusing.

    Returns
    -------
    heads : HeadRows
    inserted, left_out : int
        Heads that got their token, and heads that were left out.

    Raises
    ------
    ConversionError
        A head lacks the token and there is no log-prob of it (``RF-A001``).
    """
    _, held = find_in_rows(heads.ids, heads.counts, tokens)
    lacking = np.flatnonzero(~held & (heads.counts > 0))
    if not len(lacking):
        return heads, 0, 0
    if log_probs is None:
        if not lossy:
            raise ConversionError(
                "the target form needs the realised token in every head", where=place(lacking[0]),
                expected=f"token {int(tokens[lacking[0]])} in the head", got="a head without it",
                remedy="add teacher_log_probs, or pass lossy=True to leave such heads out",
            )  # fmt: skip
        gone = np.zeros(len(held), bool)
        gone[lacking] = True
        return heads.keep(~np.repeat(gone, heads.counts)), 0, len(lacking)
    owner = np.concatenate([np.repeat(np.arange(len(heads.counts)), heads.counts), lacking])
    ids = np.concatenate([heads.ids, tokens[lacking].astype(heads.ids.dtype)])
    values = np.concatenate([heads.log_probs, log_probs[lacking].astype(heads.log_probs.dtype)])
    order = np.lexsort((-values, owner))
    counts = heads.counts.copy()
    counts[lacking] += 1
    return HeadRows(counts, ids[order], values[order]), len(lacking), 0


def stored_heads(parts: Samples) -> HeadRows:
    """Return the teacher's heads of samples.

    Raises
    ------
    ConversionError
        There are none, or none with log-probs (``RF-A001``).
    """
    heads = head_of(parts.batch, "teacher_topk")
    if heads is None or len(heads.log_probs) != len(heads.ids):
        raise ConversionError(
            "this form holds a teacher's heads with log-probs",
            where=Where(column="teacher_topk_ids"), expected="teacher_topk_*",
            got=", ".join(parts.batch.schema.names),
        )  # fmt: skip
    return heads


def shorter_heads(
    heads: HeadRows,
    k: int | None,
    parts: Samples,
    *,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> tuple[HeadRows, int]:
    """Return heads of at most `k` entries, and the width of a table of them.

    Raises
    ------
    ConversionError
        A head is longer and the caller did not ask to cut it (``RF-A001``).
    """
    widest = int(heads.counts.max(initial=0))
    if k is None or widest <= k:
        return heads, widest if k is None else k
    if not lossy:
        first = int(np.argmax(heads.counts > k))
        raise ConversionError(
            "a head is longer than k", where=parts.place("teacher_topk_ids")(first),
            expected=f"at most {k} entries", got=int(heads.counts[first]),
            remedy="raise k, or pass lossy=True to cut heads to their first entries",
        )  # fmt: skip
    begins = np.repeat(np.cumsum(heads.counts) - heads.counts, heads.counts)
    cut = heads.keep(np.arange(len(heads.ids)) - begins < k)
    if counts is not None:
        counts["head_entries_cut"] += len(heads.ids) - len(cut.ids)
    return cut, k
