"""Structs of prime-rl as samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.adapters._trajectory import (
    Trajectory,
    check_lengths,
    csr_rows,
    doubles,
    ids_of,
    mask_of,
    per_target,
    rounded,
    sampled_only,
    settle,
)
from ragged_format.adapters._values import Rows, malformed
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import offsets_of
from ragged_format.profiles import standard_column
from ragged_format.schema import Column

if TYPE_CHECKING:
    from ragged_format.adapters._prime_rl_structs import (
        MicroBatch,
        RoutedExperts,
        SamplingMask,
        TrainingSample,
    )
    from ragged_format.adapters._values import Bools, Floats
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.lists import Int64

__all__ = ["GIVEN", "HOLDS", "OWN", "WEIGHTS", "Payload", "finish", "read"]

_NAMES = {
    "sampling_mask": "sampling_mask", "sampling_mask_logprobs": "sampling_mask.logprobs",
    "tokens": "token_ids", "token_ids": "token_ids",
}  # fmt: skip
_TEMPERATURES = Column("temperatures", "token", pa.float64())
WEIGHTS = ("ce_weights", "ref_kl_weights")
OWN = (
    replace(standard_column("advantages"), type=pa.float64()),
    _TEMPERATURES,
    *(Column(name, "token", pa.float64()) for name in WEIGHTS),
)
HOLDS = frozenset({
    "advantages", "rollout_log_probs", "ref_log_probs", "loss_weights", "candidate_counts",
    "candidate_ids", "candidate_log_probs", "routed_experts", "temperatures", *WEIGHTS,
})  # fmt: skip
GIVEN = HOLDS | {"advantage", "temperature", "env_name", "rollout_id", "branch_index"}


@dataclass(frozen=True, slots=True)
class Payload:
    """A struct and where it stands.

    Attributes
    ----------
    name : str
        Of its file; the sample ids begin with it.
    index : int
        In the file.
    value : TrainingSample or MicroBatch
    """

    name: str
    index: int
    value: TrainingSample | MicroBatch


def finish(found: Sequence[Trajectory], asked: frozenset[str]) -> None:
    """Make advantages and temperatures record columns where each sample has one."""
    settle(found, asked, "advantages", "advantage", "target")
    settle(found, asked, "temperatures", "temperature", "token")


def read(payload: Any, number: int, report: ConversionReport) -> list[Trajectory]:
    """Return the samples of a struct."""
    from ragged_format.adapters._prime_rl_structs import MicroBatch, TrainingSample

    if not isinstance(payload, Payload):
        payload = Payload("prime_rl", number, payload)
    value, where = payload.value, Where(payload.name, row=payload.index)
    name = f"{payload.name}/{payload.index}"
    if isinstance(value, MicroBatch):
        return _micro_batch(value, name, where, report)
    if not isinstance(value, TrainingSample):
        malformed("a payload is a struct of prime-rl", where, "TrainingSample, MicroBatch", value)
    for lost in ("mm_kwargs", "mm_token_type_ids"):
        report.unread[lost] += getattr(value, lost) is not None
    fields = _Fields.of(value, value.token_ids, value.mask, value.logprobs, where)
    if value.trace_id is not None:
        name = f"{value.trace_id}/{value.branch_index or 0}"
    out = fields.trajectory(name, where, slice(0, len(fields.tokens)), value.env_name, report)
    if value.trace_id is not None:
        identity = {"rollout_id": value.trace_id, "branch_index": value.branch_index}
        out.record_values = {**out.record_values, **identity}
    return [out]


class _Mask(NamedTuple):
    """Sets of all tokens of a struct: ids, the count of each token, log-probs."""

    ids: npt.NDArray[np.int32]
    counts: Int64
    log_probs: npt.NDArray[np.float32] | None


@dataclass(slots=True)
class _Fields:
    """The fields of a struct as arrays of one entry per token."""

    tokens: Int64
    scored: Bools
    log_probs: Floats
    null: Bools
    by_token: dict[str, Floats]
    mask: _Mask | None
    experts: npt.NDArray[Any] | None

    @classmethod
    def of(
        cls,
        value: TrainingSample | MicroBatch,
        tokens: list[int],
        mask: list[bool],
        log_probs: list[float | None],
        where: Where,
    ) -> _Fields:
        size = len(tokens)
        values, null = doubles(log_probs, where)
        named = ("temperatures", "advantages", "ref_logprobs", "rl_weights", *WEIGHTS)
        given = {name: getattr(value, name) for name in named}
        by_token = {name: doubles(v, where)[0] for name, v in given.items() if v is not None}
        lengths = {"mask": len(mask), "logprobs": len(values)}
        check_lengths(size, lengths | {k: len(v) for k, v in by_token.items()}, where, "token")
        sets = None
        if value.sampling_mask is not None:
            at = Where(where.file, row=where.row, column="sampling_mask")
            sets = _mask(value.sampling_mask, size, at)
        experts = value.routed_experts
        return cls(
            ids_of(tokens, Where(where.file, row=where.row, column="token_ids")),
            mask_of(mask, where), values, null, by_token, sets,
            None if experts is None else _experts(experts, size, where),
        )  # fmt: skip

    def trajectory(
        self, name: str, where: Where, part: slice, env_name: str, report: ConversionReport
    ) -> Trajectory:
        """Return the sample of some consecutive tokens."""
        scored, unread = self.scored[part], report.unread
        out = Trajectory.of(name, where, self.tokens[part], scored, _NAMES)
        log_probs, null = self.log_probs[part], self.null[part]
        values = per_target(np.where(null, 0.0, log_probs), scored, "logprobs", unread)
        values[null[scored]] = np.nan
        out.log_probs = sampled_only(rounded(values, report), null[scored])
        out.record_values = {"env_name": env_name}
        targets, tokens = {}, {}
        for field, ours in (
            ("advantages", "advantages"), ("ref_logprobs", "ref_log_probs"),
            ("rl_weights", "loss_weights"),
        ):  # fmt: skip
            if field in self.by_token:
                kept = per_target(self.by_token[field][part], scored, field, unread)
                exact = ours == "advantages"  # stored as float64
                targets[ours] = kept if exact else rounded(kept, report, f"{field}_rounded")
        for field in ("temperatures", *WEIGHTS):
            if field in self.by_token:
                tokens[field] = self.by_token[field][part]
        out.target_values, out.token_values = targets, tokens
        if self.mask is not None:
            _place_sets(out, self.mask, part, report)
        if self.experts is not None:
            out.routed_experts = self.experts[part]
        return out


def _place_sets(
    out: Trajectory,
    mask: _Mask,
    part: slice,
    report: ConversionReport,
) -> None:
    ids, counts, log_probs = mask
    begin, end = int(counts[: part.start].sum()), int(counts[: part.stop].sum())
    given = None if log_probs is None else log_probs[begin:end]
    rows, of_rows, beside = csr_rows(ids[begin:end], counts[part], out.scored, given)
    out.support = Rows(rows.values, rows.counts, rows.counts == 0)
    out.support_log_probs = of_rows
    report.candidates.taken += beside
    report.candidates.drop("token_not_scored", beside)


def _experts(value: RoutedExperts, tokens: int, where: Where) -> npt.NDArray[np.int16]:
    at = Where(where.file, row=where.row, column="routed_experts")
    try:
        experts = np.frombuffer(value.data, np.dtype(value.dtype).newbyteorder("<"))
        experts = experts.reshape(value.shape)
    except (TypeError, ValueError) as err:
        raise ConversionError(
            "routed experts are raw bytes of the shape and type stated", code="RF-A002",
            where=at, expected=f"{value.shape} {value.dtype}", got=str(err),
        ) from err  # fmt: skip
    if experts.ndim != 3 or len(experts) != tokens or 0 in experts.shape[1:]:
        raise ConversionError(
            "routed experts have a row for every token", code="RF-A006", where=at,
            expected=f"shape ({tokens}, layers, k)", got=experts.shape,
        )  # fmt: skip
    narrow = experts.astype(np.int16)
    if experts.dtype.kind not in "iu" or (narrow != experts).any():
        malformed("an expert number fits int16", at, "integers below 2^15", value.dtype)
    return narrow


def _micro_batch(
    value: MicroBatch, name: str, where: Where, report: ConversionReport
) -> list[Trajectory]:
    fields = _Fields.of(value, value.input_ids, value.loss_mask, value.inference_logprobs, where)
    size = len(fields.tokens)
    bounds = offsets_of(np.array(value.sequence_lengths, np.int64))
    if bounds[-1] != size:
        raise ConversionError(
            "the samples of a row fill it", code="RF-A006",
            where=Where(where.file, row=where.row, column="sequence_lengths"),
            expected=size, got=int(bounds[-1]),
        )  # fmt: skip
    check_lengths(
        size, {"position_ids": len(value.position_ids), "env_names": len(value.env_names)}, where,
        "token",
    )  # fmt: skip
    for lost in ("mm_kwargs", "mm_token_type_ids", "trace_ids", "branch_indices"):
        report.unread[lost] += getattr(value, lost) is not None
    report.tokens.taken += size
    if not fields.scored.any() and value.sampling_mask is None:
        # A repeat of another batch without a loss, which gives every rank equally many.
        report.samples.taken += len(bounds) - 1
        report.samples.drop("dummy_batch", len(bounds) - 1)
        report.tokens.drop("dummy_batch", size)
        return []
    out = []
    ends = _ends(value, bounds, where)
    report.tokens.drop("padding", int((bounds[1:] - ends).sum()))
    # The samples count their own tokens.
    report.tokens.taken -= int((ends - bounds[:-1]).sum())
    for number, (begin, end) in enumerate(zip(bounds[:-1].tolist(), ends.tolist(), strict=True)):
        names = set(value.env_names[begin:end])
        if len(names) > 1:
            malformed("a sample is of one environment", where, "one name", sorted(names))
        env_name = min(names, default="")
        part = slice(begin, end)
        out.append(fields.trajectory(f"{name}/{number}", where, part, env_name, report))
    return out


def _ends(value: MicroBatch, bounds: Int64, where: Where) -> Int64:
    """Return where each sample ends, the padding of the last one left out."""
    ends = bounds[1:].copy()
    positions = np.asarray(value.position_ids, np.int64)
    expected = np.arange(len(positions)) - np.repeat(bounds[:-1], np.diff(bounds))
    wrong = np.flatnonzero(positions != expected)
    if len(wrong):
        first, last = int(wrong[0]), int(bounds[-2])
        tail = positions[first:]
        if first < last or (tail != np.arange(len(tail))).any() or any(value.loss_mask[first:]):
            at = Where(where.file, row=where.row, column="position_ids", position=first)
            malformed(
                "positions count the tokens of each sample, then those of the padding", at,
                int(expected[first]), int(positions[first]),
            )  # fmt: skip
        ends[-1] = first
    return ends


def _mask(mask: SamplingMask, tokens: int, where: Where) -> _Mask:
    """Return the ids, the counts of all tokens and the log-probs of a mask.

    Raises
    ------
    ConversionError
        Bytes of another length than the counts say (``RF-A006``), or negative counts
        (``RF-A002``).
    """
    _check_size(mask.counts, 4 * tokens, "counts", where)
    counts = np.frombuffer(mask.counts, "<i4").astype(np.int64)
    if len(counts) and counts.min() < 0:
        malformed("a count is not negative", where, ">= 0", int(counts.min()))
    size = 4 * int(counts.sum())
    _check_size(mask.ids, size, "ids", where)
    if mask.logprobs is None:
        return _Mask(np.frombuffer(mask.ids, "<i4"), counts, None)
    _check_size(mask.logprobs, size, "logprobs", where)
    return _Mask(np.frombuffer(mask.ids, "<i4"), counts, np.frombuffer(mask.logprobs, "<f4"))


def _check_size(data: bytes, expected: int, name: str, where: Where) -> None:
    if len(data) != expected:
        raise ConversionError(
            "the bytes of a mask agree with the tokens and the counts", code="RF-A006",
            where=Where(where.file, row=where.row, column=f"{where.column}.{name}"),
            expected=f"{expected} bytes", got=f"{len(data)} bytes",
            remedy="the row was cut or padded without its mask",
        )  # fmt: skip
