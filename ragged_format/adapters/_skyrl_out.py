"""Samples as the columns of SkyRL's training batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._outgoing import Outgoing
from ragged_format.adapters._response_csr import response_begins
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, offsets_of, ranges, segment_sums

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    import pyarrow as pa

    from ragged_format.adapters._values import Bools

__all__ = ["HOLDS", "SUPPORT", "training_batch"]

HOLDS = frozenset({"rollout_log_probs", "candidate_counts", "candidate_ids", "token_rewards"})
SUPPORT = "rollout_sample_support"


def training_batch(
    samples: pa.RecordBatch,
    top_k: int,
    pad_token_id: int,
    report: ConversionReport | MutableMapping[str, Any] | None,
    *,
    lossy: bool,
) -> dict[str, Any]:
    """Return the columns; parameters as ``skyrl.to_training_batch``."""
    holds = HOLDS | {"candidate_log_probs"} if lossy else HOLDS
    source = Outgoing(samples, "SkyRL", holds)
    begins = response_begins(source)
    ends = source.offsets[1:]
    counts = ConversionReport()
    lengths, responses = np.diff(source.offsets), ends - begins
    left = _Table(lengths, ranges(source.offsets[:-1], lengths))
    right = _Table(responses, ranges(begins, responses))
    out: dict[str, Any] = {
        "sequences": left.aligned(source.tokens, pad_token_id, np.int64),
        "attention_mask": left.aligned(np.ones(len(source.tokens)), 0, np.int64),
        "response_mask": right.aligned(np.ones(len(source.tokens)), 0, np.int64),
        "loss_masks": right.aligned(source.scored, 0, np.float32),
    }
    rewards = _rewards(source, ends, responses, counts)
    if rewards is not None:
        out["rewards"] = right.aligned(rewards, 0, np.float32)
    log_probs = source.values("rollout_log_probs")
    if log_probs is not None:
        out["rollout_logprobs"] = right.aligned(source.spread(log_probs), 0, np.float32)
    sets = source.sets()
    if sets is not None:
        # Every target is a token of a response.
        rows = np.searchsorted(right.index, source.positions)
        table = np.full((len(right.index), top_k), -1, np.int32)
        _fill(table, rows, source, sets, counts, lossy=lossy)
        out[SUPPORT] = {"values": table, "cu_seqlens": offsets_of(responses).astype(np.int32)}
    counts.add_to(report)
    return out


class _Table:
    """Rows of different lengths as a table whose rows end at its right edge."""

    def __init__(self, lengths: Int64, index: Int64) -> None:
        self.index = index
        self.shape = len(lengths), int(lengths.max(initial=0))
        self.used = np.arange(self.shape[1]) >= self.shape[1] - lengths[:, None]

    def aligned(
        self, values: npt.NDArray[Any], fill: float, dtype: npt.DTypeLike
    ) -> npt.NDArray[Any]:
        out = np.full(self.shape, fill, dtype)
        out[self.used] = values[self.index]
        return out


def _rewards(
    source: Outgoing, ends: Int64, responses: Int64, report: ConversionReport
) -> npt.NDArray[Any] | None:
    values = source.values("token_rewards")
    if values is not None:
        return values
    scalars = source.record("reward")
    if None in scalars:
        if any(value is not None for value in scalars):
            raise ConversionError(
                "some samples have a reward and others none",
                where=Where(row=scalars.index(None), column="reward"), expected="a number",
                got=None,
            )  # fmt: skip
        return None
    out = np.zeros(len(source.tokens), np.float32)
    some = responses > 0
    exact = np.array(scalars, np.float64)[some]
    out[ends[some] - 1] = exact
    report.converted["rewards_rounded"] += int(np.count_nonzero(out[ends[some] - 1] != exact))
    return out


def _fill(
    table: npt.NDArray[np.int32],
    rows: Int64,
    source: Outgoing,
    sets: tuple[Int64, npt.NDArray[np.int32], npt.NDArray[np.float32] | None],
    report: ConversionReport,
    *,
    lossy: bool,
) -> None:
    """Put the set of each target into its row of the support."""
    top_k = table.shape[1]
    counts, ids, log_probs = sets
    report.candidates.taken += len(ids)
    wide = counts > top_k
    if wide.any():
        if not lossy:
            target = int(np.argmax(wide))
            raise ConversionError(
                "a candidate set is wider than SkyRL's support, which would lose ids",
                where=source.place("candidate_counts", target), expected=f"<= {top_k} ids",
                got=int(counts[target]),
                remedy="pass a larger top_k=, or lossy=True to leave the others out, counted",
            )  # fmt: skip
        keep = _likeliest(source, counts, ids, log_probs, top_k)
        report.converted["sets_cut"] += int(np.count_nonzero(wide))
        report.candidates.drop("beyond_top_k", int(np.count_nonzero(~keep)))
        counts, ids = segment_sums(keep, offsets_of(counts)), ids[keep]
    report.candidates.stored += len(ids)
    slots = ranges(np.zeros(len(counts), np.int64), counts)
    table[np.repeat(rows, counts), slots] = ids


def _likeliest(
    source: Outgoing,
    counts: Int64,
    ids: npt.NDArray[np.int32],
    log_probs: npt.NDArray[np.float32] | None,
    top_k: int,
) -> Bools:
    """Return which ids stay: the sampled one and the best others, ties by id."""
    owner = np.repeat(np.arange(len(counts)), counts)
    is_sampled = ids == source.tokens[source.positions][owner]
    value = np.zeros(len(ids)) if log_probs is None else -log_probs
    order = np.lexsort((ids, value, ~is_sampled, owner))
    keep = np.zeros(len(ids), bool)
    keep[order[ranges(np.zeros(len(counts), np.int64), counts) < top_k]] = True
    return keep
