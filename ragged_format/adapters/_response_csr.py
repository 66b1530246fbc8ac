"""Samples of the miles and slime family: tokens, and response-long columns with sets as CSR.

A sample has all its tokens and the length of its response; the loss mask, log-probs and sets cover
the response. The systems differ in what a token that is not scored (an observation) has for a set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.adapters._choice import VersionSpan
from ragged_format.adapters._outgoing import Outgoing
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
)
from ragged_format.adapters._values import Entries, LogProbs, Rows, as_rows, malformed
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, offsets_of, ranges
from ragged_format.schema import RECORD, Column

if TYPE_CHECKING:
    from ragged_format.adapters._values import Bools, Floats
    from ragged_format.adapters.report import ConversionReport

__all__ = ["GIVEN", "HOLDS", "OWN", "Dialect", "read_sample", "response_begins", "write_samples"]

RESPONSE_LENGTH = Column("response_length", RECORD, pa.int64(), nullable=True)
OWN = (RESPONSE_LENGTH,)
HOLDS = frozenset({
    "rollout_log_probs", "teacher_log_probs", "candidate_counts", "candidate_ids",
    "candidate_log_probs", "topk_counts", "topk_ids", "topk_log_probs",
})  # fmt: skip
GIVEN = HOLDS | {"response_length", "reward", "group_id", "finish_reason", "policy_version"}
_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}
_STATUSES = {reason: status for status, reason in _REASONS.items()}
_TOPK = ("rollout_topk_token_ids", "rollout_topk_log_probs")
_READ = frozenset({
    "tokens", "response_length", "loss_mask", "rollout_log_probs", "teacher_log_probs", "reward",
    "index", "group_index", "status", "weight_versions", "sample_id", "nulls", *_TOPK,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one system of the family names and fills its fields.

    Attributes
    ----------
    system : str
    ids, offsets, log_probs : str
        Fields of the sets.
    nested : tuple of str
        Fields of older builds that hold the sets as lists of lists.
    observation : {"singleton", "empty"}
        The set of a token that is not scored: the token itself, or none.
    """

    system: str
    ids: str
    offsets: str
    log_probs: str
    nested: tuple[str, ...]
    observation: Literal["singleton", "empty"]

    @property
    def names(self) -> dict[str, str]:
        """Fields that errors mention."""
        return {
            "sampling_mask": self.ids, "sampling_mask_logprobs": self.log_probs,
            "logprobs": "rollout_log_probs", "mask": "loss_mask", "token_ids": "tokens",
        }  # fmt: skip

    @property
    def own_fields(self) -> frozenset[str]:
        """The fields that are read."""
        return _READ | {self.ids, self.offsets, self.log_probs, *self.nested}


def plain(value: Any) -> Any:
    """Return a torch tensor as an array; other values as they are."""
    return value.numpy() if hasattr(value, "detach") else value


def read_sample(
    sample: Mapping[str, Any], dialect: Dialect, name: str, where: Where, report: ConversionReport
) -> Trajectory:
    """Return one sample.

    Raises
    ------
    ConversionError
        Fields that are missing or malformed (``RF-A002``), or whose lengths disagree (``RF-A006``).
    """
    fields = {key: plain(value) for key, value in sample.items()}

    def at(column: str) -> Where:
        return Where(where.file, row=where.row, column=column)

    if fields.get("tokens") is None:
        malformed("a sample has tokens", at("tokens"), "a list of token ids", None)
    tokens = ids_of(fields["tokens"], at("tokens"))
    length = _length(fields.get("response_length"), len(tokens), at("response_length"))
    given = fields.get("loss_mask")
    mask = np.ones(length, bool) if given is None else mask_of(given, at("loss_mask"))
    check_lengths(length, {"loss_mask": len(mask)}, where, "response token")
    scored = np.concatenate([np.zeros(len(tokens) - length, bool), mask])
    out = Trajectory.of(name, where, tokens, scored, dialect.names)
    if fields.get("rollout_log_probs") is not None or _has_head(fields):
        out.log_probs = _log_probs(fields, mask, length, at, report)
        out.lists_sampled = False
    if fields.get("teacher_log_probs") is not None:
        values, _ = doubles(fields["teacher_log_probs"], at("teacher_log_probs"))
        check_lengths(length, {"teacher_log_probs": len(values)}, where, "response token")
        kept = per_target(values, mask, "teacher_log_probs", report.unread)
        out.target_values = {"teacher_log_probs": rounded(kept, report)}
    rows = _sets(fields, dialect, length, at)
    if rows is not None:
        _place_sets(out, rows, tokens[len(tokens) - length :], mask, dialect, report)
    out.record_values = _record_values(fields, length)
    out.versions = _versions(fields.get("weight_versions"), len(out.token_ids), report)
    report.unread.update(
        key for key, value in fields.items()
        if key not in dialect.own_fields and not _is_empty(value)
    )  # fmt: skip
    return out


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_empty(inner) for inner in value.values())
    return value is None or (isinstance(value, str | int | float | Sequence) and not value)


def _length(value: Any, tokens: int, where: Where) -> int:
    if isinstance(value, np.integer | np.ndarray):
        value = value.item()
    if not isinstance(value, int) or isinstance(value, bool):
        malformed("a sample has the length of its response", where, "an integer", value)
    if not 0 <= value <= tokens:
        raise ConversionError(
            "the response is part of the tokens", code="RF-A006", where=where,
            expected=f"0 to {tokens}", got=value,
        )  # fmt: skip
    return value


def _record_values(fields: Mapping[str, Any], length: int) -> dict[str, Any]:
    status = fields.get("status")
    status = getattr(status, "value", status)
    out: dict[str, Any] = {"response_length": length, "policy_version": None}
    if status is not None:
        out["finish_reason"] = _REASONS.get(status, status)
    if fields.get("group_index") is not None:
        out["group_id"] = str(fields["group_index"])
    if isinstance(fields.get("reward"), int | float):
        out["reward"] = float(fields["reward"])
    return out


def _versions(value: Any, size: int, report: ConversionReport) -> list[VersionSpan]:
    """Return the oldest version for all tokens; where each begins is not known."""
    versions = {str(version) for version in value or ()}
    if len(versions) > 1 and all(v.isascii() and v.isdigit() for v in versions):
        report.noted["samples_over_weight_updates"] += 1
        versions = {min(versions, key=int)}
    if len(versions) != 1:
        report.unread["weight_versions"] += len(versions)
        return []
    return [VersionSpan(versions.pop(), 0, size)]


def _has_head(fields: Mapping[str, Any]) -> bool:
    return all(fields.get(name) is not None for name in _TOPK)


def _log_probs(
    fields: Mapping[str, Any], mask: npt.NDArray[np.bool_], length: int, at: Any,
    report: ConversionReport,
) -> LogProbs:  # fmt: skip
    given = fields.get("rollout_log_probs")
    if given is None:
        values, null = np.full(length, np.nan), np.ones(length, bool)
    else:
        values, null = doubles(given, at("rollout_log_probs"))
    check_lengths(length, {"rollout_log_probs": len(values)}, at(""), "response token")
    clean = per_target(np.where(null, 0.0, values), mask, "rollout_log_probs", report.unread)
    clean = rounded(clean, report)
    clean[null[mask]] = np.nan
    out = sampled_only(clean, null[mask])
    return out._replace(**_head(fields, mask, length, at, report)) if _has_head(fields) else out


def _head(
    fields: Mapping[str, Any], mask: npt.NDArray[np.bool_], length: int, at: Any,
    report: ConversionReport,
) -> dict[str, Any]:  # fmt: skip
    """Return the heads of scored tokens: dense rows whose unused slots have id -1."""
    ids, values = (np.asarray(fields[name]) for name in _TOPK)
    if ids.ndim != 2 or ids.shape != values.shape or ids.dtype.kind not in "iu":
        malformed(
            "a head is a table of ids and one of log-probs", at(_TOPK[0]),
            f"shape ({length}, k) each", f"{ids.shape} {ids.dtype}, {values.shape}",
        )  # fmt: skip
    check_lengths(length, {_TOPK[0]: len(ids)}, at(""), "response token")
    used = ids >= 0
    beside = int(np.count_nonzero(used[~mask]))
    report.head_entries.taken += beside
    report.head_entries.drop("token_not_scored", beside)
    used &= mask[:, None]
    counts = np.count_nonzero(used, axis=1).astype(np.int64)[mask]
    picked = values[used].astype(np.float64)
    ranks = ranges(np.ones(len(counts), np.int64), counts)
    entries = Entries(ids[used].astype(np.int64), picked, np.zeros(len(picked), bool), ranks)
    return {"counts": counts, "entries": entries}


class _Sets(NamedTuple):
    """Sets of all response tokens, end to end, and which of them are null."""

    ids: Int64
    counts: Int64
    log_probs: Floats | None = None
    null: Bools | None = None


def _sets(fields: Mapping[str, Any], dialect: Dialect, length: int, at: Any) -> _Sets | None:
    for name in dialect.nested:
        if fields.get(name) is not None:
            rows = as_rows(fields[name], lambda p=None, n=name: _placed(at(n), p))
            check_lengths(length, {name: len(rows.counts)}, at(""), "response token")
            return _Sets(rows.values, rows.counts, null=rows.null)
    ids, offsets = fields.get(dialect.ids), fields.get(dialect.offsets)
    if ids is None and offsets is None:
        return None
    if ids is None or offsets is None:
        malformed(
            "sets have both ids and offsets", at(dialect.ids), f"{dialect.ids}, {dialect.offsets}",
            dialect.offsets if ids is None else dialect.ids,
        )  # fmt: skip
    ids, bounds = ids_of(ids, at(dialect.ids)), ids_of(offsets, at(dialect.offsets))
    counts = np.diff(bounds)
    if len(bounds) != length + 1 or bounds[0] != 0 or bounds[-1] != len(ids) or (counts < 0).any():
        raise ConversionError(
            "offsets rise from 0 to the number of ids, with one set per response token",
            code="RF-A006", where=at(dialect.offsets),
            expected=f"{length + 1} offsets from 0 to {len(ids)}",
            got=f"{len(bounds)}: {bounds[:4].tolist()} … {bounds[-2:].tolist()}",
            remedy="an observation before the first sets leaves the offsets too short",
        )  # fmt: skip
    values = fields.get(dialect.log_probs)
    if values is None:
        return _Sets(ids, counts)
    log_probs, _ = doubles(values, at(dialect.log_probs))
    check_lengths(len(ids), {dialect.log_probs: len(log_probs)}, at(""), "candidate")
    return _Sets(ids, counts, log_probs)


def _placed(where: Where, position: int | None) -> Where:
    return Where(where.file, row=where.row, column=where.column, position=position)


def _place_sets(
    out: Trajectory, sets: _Sets, response: Int64, mask: npt.NDArray[np.bool_], dialect: Dialect,
    report: ConversionReport,
) -> None:  # fmt: skip
    rows, of_rows, beside = csr_rows(sets.ids, sets.counts, mask, sets.log_probs)
    # An empty set of a trained token is a set that is missing where observations have none either.
    null = None if sets.null is None else sets.null[mask]
    if dialect.observation == "empty":
        null = rows.counts == 0
    out.support, out.support_log_probs = Rows(rows.values, rows.counts, null), of_rows
    starts = offsets_of(sets.counts)[:-1]
    alone = ~mask & (sets.counts == 1)
    own = int(np.count_nonzero(sets.ids[starts[alone]] == response[alone]))
    report.candidates.taken += beside
    report.candidates.drop("observation_token", own)
    report.candidates.drop("token_not_scored", beside - own)


def write_samples(
    batch: pa.RecordBatch, dialect: Dialect, *, partial: bool = False, top_k: int | None = None
) -> list[dict[str, Any]]:
    """Return samples as mappings of the family's fields, big ones as arrays.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Profile ``sample``.
    dialect : Dialect
    partial : bool
        A trained token may have no set; where observations are singletons only.
    top_k : int, optional
        Width of the head tables; ``None``: that of the largest head.
    """
    source = Outgoing(batch, dialect.system, HOLDS)
    begins = response_begins(source)
    columns: dict[str, npt.NDArray[Any]] = {"loss_mask": source.scored.astype(np.int32)}
    for name in ("rollout_log_probs", "teacher_log_probs"):
        values = source.values(name)
        if values is not None:
            columns[name] = source.spread(values)
    columns.update(_dense_heads(source, top_k))
    sets = _csr(source, dialect, begins, partial=partial)
    out = []
    names = ("reward", "group_id", "finish_reason", "policy_version", "sample_id")
    records = {name: source.record(name) for name in names}
    for row, (begin, end) in enumerate(pairwise(source.offsets.tolist())):
        first = int(begins[row])
        item: dict[str, Any] = {
            "sample_id": records["sample_id"][row],
            "tokens": source.tokens[begin:end].astype(np.int64), "response_length": end - first,
        }  # fmt: skip
        item.update({name: values[first:end] for name, values in columns.items()})
        if sets is not None:
            ids, offsets, log_probs = sets
            part = slice(int(offsets[first]), int(offsets[end]))
            item[dialect.ids] = ids[part]
            item[dialect.offsets] = (offsets[first : end + 1] - part.start).astype(np.int32)
            if log_probs is not None:
                item[dialect.log_probs] = log_probs[part]
        version, reason = records["policy_version"][row], records["finish_reason"][row]
        item["reward"] = records["reward"][row]
        item["group_index"] = _number(records["group_id"][row])
        item["status"] = _STATUSES.get(reason, reason)
        item["weight_versions"] = [] if version is None else [str(version)]
        out.append(item)
    return out


def _number(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


def response_begins(source: Outgoing) -> Int64:
    """Return the first token of each response: as stated, else the first scored one."""
    stated = source.record("response_length")
    ends = source.offsets[1:]
    firsts = np.append(source.positions, len(source.tokens))[source.targets[:-1]]
    found: Int64 = np.minimum(firsts, ends)
    for row, length in enumerate(stated):
        if length is None:
            continue
        begin = int(ends[row]) - length
        if not source.offsets[row] <= begin <= found[row]:
            raise ConversionError(
                "the response holds every scored token",
                where=Where(row=row, column="response_length"),
                expected=f"{ends[row] - found[row]} to {ends[row] - source.offsets[row]}",
                got=length,
            )  # fmt: skip
        found[row] = begin
    return found


def _csr(
    source: Outgoing, dialect: Dialect, begins: Int64, *, partial: bool
) -> tuple[npt.NDArray[np.int32], Int64, npt.NDArray[np.float32] | None] | None:
    found = source.sets()
    if found is None:
        return None
    counts, ids, log_probs = found
    all_counts = source.spread(counts, 0, np.int64)
    alone = np.zeros(0, np.int64)
    if dialect.observation == "singleton":
        if not partial and (counts == 0).any():
            target = int(np.argmax(counts == 0))
            raise ConversionError(
                f"{dialect.system} needs a set for every trained token",
                where=source.place("candidate_counts", target), expected="a set", got="none",
                remedy="write partial=True, or do not score the token",
            )  # fmt: skip
        responses = ranges(begins, source.offsets[1:] - begins)
        alone = responses[~source.scored[responses]]
        all_counts[alone] = 1
    offsets = offsets_of(all_counts)
    out = np.zeros(int(offsets[-1]), np.int32)
    where = ranges(offsets[source.positions], counts)
    out[where] = ids
    out[offsets[alone]] = source.tokens[alone]
    if log_probs is None:
        return out, offsets, None
    values = np.zeros(len(out), np.float32)
    values[where] = log_probs
    return out, offsets, values


def _dense_heads(source: Outgoing, top_k: int | None) -> dict[str, npt.NDArray[Any]]:
    counts, ids = source.values("topk_counts"), source.values("topk_ids")
    values = source.values("topk_log_probs")
    if counts is None or ids is None or values is None:
        return {}
    width = int(counts.max(initial=0)) if top_k is None else top_k
    if counts.max(initial=0) > width:
        target = int(np.argmax(counts > width))
        raise ConversionError(
            "a head is wider than the table", where=source.place("topk_counts", target),
            expected=f"<= {width} entries", got=int(counts[target]), remedy="pass a larger top_k=",
        )  # fmt: skip
    out_ids = np.full((len(source.tokens), width), -1, np.int32)
    out_values = np.full((len(source.tokens), width), -np.inf, np.float32)
    slots = ranges(np.zeros(len(counts), np.int64), counts.astype(np.int64))
    at = np.repeat(source.positions, counts), slots
    out_ids[at], out_values[at] = ids, values
    return dict(zip(_TOPK, (out_ids, out_values), strict=True))
