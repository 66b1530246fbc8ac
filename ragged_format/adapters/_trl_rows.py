"""TRL AsyncGRPO: what its trainer takes, made of samples and of packed rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._export import Samples, head_of, refuse_loss, values_of
from ragged_format.adapters._tables import HeadRows, merge_equal, pad_rows, pick_rows
from ragged_format.errors import ConversionError, SchemaMismatchError, Where
from ragged_format.lists import Int64, flat, offsets_of
from ragged_format.packing.attention import label_ids, varlen_index
from ragged_format.parse import parse_schema
from ragged_format.rules import TargetFlag

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["to_micro_batch", "to_queue_samples", "to_row"]

Arrays = dict[str, npt.NDArray[Any]]

# Fill of each key where rows of a batch are padded to one length; all others 0.
_PADS: dict[str, float] = {
    "shift_labels": -100, "token_index": -1, "tree_kv_index": -1, "tree_cu_seqlens_q": -1,
    "tree_cu_seqlens_k": -1, "sampling_mask": -1, "topk_ids": -1, "topk_log_probs": -np.inf,
}  # fmt: skip
_CARRIED = {
    "input_ids", "completion_mask", "rollout_log_probs", "old_log_probs", "candidate_counts",
    "candidate_ids", "topk_counts", "topk_ids", "topk_log_probs",
}  # fmt: skip
_CARRIED_RECORDS = {"advantage", "policy_version", "group_id", "metrics"}


def to_queue_samples(
    samples: pa.RecordBatch,
    *,
    form: Literal["arrays", "lists"] = "arrays",
    top_k: int | None = None,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> list[dict[str, Any]]:
    """Return samples as AsyncGRPO queue samples, one mapping of ``RolloutSample`` fields each.

    ``old_log_probs`` are the batch's ``rollout_log_probs`` (where it has none, its
    ``old_log_probs``), 0.0 on context.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample``, validated.
    form : {"arrays", "lists"}
        Of the sets and heads: ``sampling_mask`` flat with ``sampling_mask_counts``, and
        ``top_k_ids`` and ``top_k_log_probs`` (L, K) int64 and float32, padded with -1 and -inf; or
        ``sampling_mask`` as a list of lists and ``top_k`` as a list of dicts.
    top_k : int, optional
        K of the tables; ``None``: the longest head of the batch.
    lossy : bool
        Leave out what TRL has no place for, instead of refusing.
    counts : Counter, optional
        Receives what was left out.

    Raises
    ------
    ConversionError
        Something would be lost (``RF-A001``): columns without a place, a head longer than `top_k`,
        a null advantage or version, a group that is no integer.
    """
    parts = Samples(samples)
    log_probs = "rollout_log_probs"
    if log_probs not in parts.schema and "old_log_probs" in parts.schema:
        log_probs = "old_log_probs"
    carried = (_CARRIED - {"rollout_log_probs", "old_log_probs"}) | {log_probs} | _CARRIED_RECORDS
    refuse_loss(samples, carried, to="TRL's queue", lossy=lossy, counts=counts)
    token_log_probs = np.zeros(len(parts.ids), np.float32)
    values = values_of(samples, log_probs)
    if values is not None:
        token_log_probs[parts.positions] = values
    out = _queue_records(parts)
    sets, heads = head_of(samples, "candidate"), head_of(samples, "topk")
    width = 0
    if heads is not None:
        heads, width = _cut(heads, top_k, parts.place("topk_ids"), lossy=lossy, counts=counts)
    bounds = parts.offsets.tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        span = slice(begin, end)
        out[number]["input_ids"] = parts.ids[span].astype(np.int64)
        out[number]["completion_mask"] = parts.mask[span].astype(np.int64)
        out[number]["old_log_probs"] = token_log_probs[span]
        targets = slice(int(parts.bounds[number]), int(parts.bounds[number + 1]))
        at = parts.positions[targets] - begin
        if sets is not None:
            _put_sets(out[number], _part(sets, targets), at, end - begin, form)
        if heads is not None:
            _put_heads(out[number], _part(heads, targets), at, end - begin, width, form)
    return out


def _queue_records(parts: Samples) -> list[dict[str, Any]]:
    advantages, versions = parts.record("advantage"), parts.record("policy_version")
    groups, metrics = parts.record("group_id"), parts.record("metrics")
    provenance = parts.record("provenance")
    out = []
    for row in range(len(parts)):
        known = json.loads(provenance[row] or "{}")
        for name, value in (("advantage", advantages[row]), ("policy_version", versions[row])):
            if value is None:
                raise ConversionError(
                    "TRL has no null here", where=Where(row=row, column=name),
                    expected="a number", got=None, remedy="fill the column before the export",
                )  # fmt: skip
        named = json.loads(metrics[row] or "{}")
        out.append({
            "prompt": known.get("prompt", []), "completion": known.get("completion", []),
            "advantage": advantages[row], "model_version": versions[row],
            "group_id": _group(groups[row], row),
            "metrics": {key: float("nan") if v is None else v for key, v in named.items()},
            "enqueued_at": known.get("enqueued_at", 0.0),
        })  # fmt: skip
    return out


def _group(value: str | None, row: int) -> int:
    try:
        return int(value or "")
    except ValueError:
        raise ConversionError(
            "TRL numbers its groups", where=Where(row=row, column="group_id"),
            expected="an integer as text", got=value, remedy="number the groups before the export",
        ) from None  # fmt: skip


def _part(rows: HeadRows, targets: slice) -> HeadRows:
    bounds = offsets_of(rows.counts)
    span = slice(int(bounds[targets.start]), int(bounds[targets.stop]))
    return HeadRows(rows.counts[targets], rows.ids[span], rows.log_probs[span])


def _put_sets(out: dict[str, Any], sets: HeadRows, at: Int64, length: int, form: str) -> None:
    counts = np.zeros(length, np.int64)
    counts[at] = sets.counts
    ids = sets.ids.astype(np.int64)
    if form == "arrays":
        out["sampling_mask"], out["sampling_mask_counts"] = ids, counts
    else:
        out["sampling_mask"] = [part.tolist() for part in np.split(ids, np.cumsum(counts)[:-1])]


def _put_heads(
    out: dict[str, Any], heads: HeadRows, at: Int64, length: int, width: int, form: str
) -> None:
    counts = np.zeros(length, np.int64)
    counts[at] = heads.counts
    if form == "arrays":
        out["top_k_ids"] = pad_rows(heads.ids, counts, width, -1, np.int64)
        out["top_k_log_probs"] = pad_rows(heads.log_probs, counts, width, -np.inf, np.float32)
        return
    cuts = np.cumsum(counts)[:-1]
    parts = zip(np.split(heads.ids, cuts), np.split(heads.log_probs, cuts), strict=True)
    out["top_k"] = [dict(zip(i.tolist(), v.tolist(), strict=True)) for i, v in parts]


def _cut(
    heads: HeadRows,
    top_k: int | None,
    place: Any,
    *,
    lossy: bool,
    counts: Counter[str] | None,
) -> tuple[HeadRows, int]:
    """Return heads of at most `top_k` entries, and the width of their table."""
    widest = int(heads.counts.max(initial=0))
    if top_k is None or widest <= top_k:
        return heads, widest if top_k is None else top_k
    longer = heads.counts > top_k
    if not lossy:
        first = int(np.argmax(longer))
        raise ConversionError(
            "a head is longer than the table is wide", where=place(first),
            expected=f"at most {top_k} entries", got=int(heads.counts[first]),
            remedy="raise top_k, or pass lossy=True to cut heads",
        )  # fmt: skip
    rank = np.arange(len(heads.ids)) - np.repeat(np.cumsum(heads.counts) - heads.counts,
                                                 heads.counts)  # fmt: skip
    cut = heads.keep(rank < top_k)
    if counts is not None:
        counts["head_entries_cut"] += len(heads.ids) - len(cut.ids)
    return cut, top_k


def to_row(
    row: pa.RecordBatch,
    *,
    top_k: int | None = None,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> Arrays:
    """Return a packed row as TRL's tree packing makes it.

    Parameters
    ----------
    row : pyarrow.RecordBatch
        One record of profile ``packed``, packed with ``fork="transition"``.
    top_k : int, optional
        K of the top-K tables; ``None``: the longest head of the row.
    lossy : bool
        Where samples share a position and differ in candidate set or head there, keep the last
        one's (as TRL does) instead of refusing; leave out columns that have no place.
    counts : Counter, optional
        Receives what was left out.

    Returns
    -------
    dict of str to ndarray
        ``input_ids``, ``position_ids``, ``shift_labels`` (N,) int64; ``tree_kv_index`` (Kv,) int64;
        ``tree_cu_seqlens_q``, ``tree_cu_seqlens_k`` (S + 1,) int32; ``tree_max_seqlens`` (2,)
        int64; ``token_index``, ``segment_id`` (M,) int64; ``old_log_probs``, ``advantages`` (M,)
        float32. With candidate sets: ``sampling_mask`` (T,) int64, ids end to end by packed
        position, and ``sampling_mask_counts`` (N,) int64, both at the position that predicts; 0
        stands for the full vocabulary. With heads: ``topk_ids`` (N, K) int64 padded with -1 and
        ``topk_log_probs`` (N, K) float32 padded with -inf, at the same positions.

    Raises
    ------
    ConversionError
        Something would be lost (``RF-A001``).
    PackingError
        A position predicts different tokens (``RF-P001``).
    SchemaMismatchError
        The batch is not packed (``RF-S002``).
    """
    schema = parse_schema(row.schema)
    if schema.profile != "packed":
        raise SchemaMismatchError(
            "this is written from packed rows", code="RF-S002", expected="profile 'packed'",
            got=schema.profile, remedy='pack samples with pack_row(..., fork="transition")',
        )  # fmt: skip
    structure = {
        "position_ids", "node_lengths", "node_parents", "pred_index", "target_ids", "member_index",
        "advantages",
    }  # fmt: skip
    log_probs = "rollout_log_probs" if "rollout_log_probs" in schema else "old_log_probs"
    carried = (_CARRIED - {"rollout_log_probs", "old_log_probs"}) | {log_probs} | structure
    refuse_loss(row, carried, to="TRL's packed row", lossy=lossy, counts=counts)
    index = varlen_index(row)
    labels = label_ids(row)
    members = _required(row, "member_index").astype(np.int64)
    positions = _required(row, "pred_index").astype(np.int64)
    out: Arrays = {
        "input_ids": _required(row, "input_ids").astype(np.int64),
        "position_ids": _required(row, "position_ids").astype(np.int64),
        "shift_labels": labels,
        "tree_kv_index": index.kv_index,
        "tree_cu_seqlens_q": index.cu_seqlens_q,
        "tree_cu_seqlens_k": index.cu_seqlens_k,
        "tree_max_seqlens": np.array([index.max_seqlen_q, index.max_seqlen_k], np.int64),
        "token_index": positions,
        "old_log_probs": _required(row, log_probs).astype(np.float32),
        "advantages": _advantages(row, members),
        "segment_id": members,
    }
    sets, heads = head_of(row, "candidate"), head_of(row, "topk")
    if sets is not None:
        _refuse_missing(row)
        at, ids = _at_positions(positions, sets, "candidate_ids", lossy=lossy, counts=counts)
        per_position = np.zeros(len(labels), np.int64)
        per_position[at] = ids.counts
        out["sampling_mask"] = ids.ids.astype(np.int64)
        out["sampling_mask_counts"] = per_position
    if heads is not None:
        place = _row_place("topk_ids", positions)
        heads, width = _cut(heads, top_k, place, lossy=lossy, counts=counts)
        at, kept = _at_positions(positions, heads, "topk_ids", lossy=lossy, counts=counts)
        per_position = np.zeros(len(labels), np.int64)
        per_position[at] = kept.counts
        out["topk_ids"] = pad_rows(kept.ids, per_position, width, -1, np.int64)
        out["topk_log_probs"] = pad_rows(
            kept.log_probs, per_position, width, -np.inf, np.float32
        )  # fmt: skip
    return out


def _required(row: pa.RecordBatch, name: str) -> npt.NDArray[Any]:
    values = values_of(row, name)
    if values is None:
        raise ConversionError(
            "TRL needs this column", where=Where(column=name), expected=name,
            got=", ".join(row.schema.names),
        )  # fmt: skip
    return values


def _advantages(row: pa.RecordBatch, members: Int64) -> npt.NDArray[np.float32]:
    values = values_of(row, "advantages")
    if values is not None:
        return values.astype(np.float32)
    if "member_advantage" not in row.schema.names:
        _required(row, "advantages")
    of_member = flat(row.column("member_advantage")).values
    if of_member.null_count:
        raise ConversionError(
            "TRL has no null advantage", where=Where(column="member_advantage"),
            expected="a number", got=None, remedy="fill the column before packing",
        )  # fmt: skip
    found: npt.NDArray[np.float32] = of_member.to_numpy().astype(np.float32)[members]
    return found


def _refuse_missing(row: pa.RecordBatch) -> None:
    flags = values_of(row, "target_flags")
    bits = TargetFlag.SUPPORT_MISSING | TargetFlag.SUPPORT_OVERFLOW
    if flags is not None and (flags & bits).any():
        raise ConversionError(
            "TRL scores a position without candidates over the full vocabulary",
            where=Where(column="target_flags", position=int(np.argmax((flags & bits) != 0))),
            expected="a candidate set, or the full vocabulary", got="a set that is missing",
            remedy='drop these targets, or convert with on_missing_support="full_vocab"',
        )  # fmt: skip


def _row_place(field: str, positions: Int64) -> Any:
    def at(target: int, /) -> Where:
        return Where(row=0, column=field, position=int(positions[target]))

    return at


def _at_positions(
    positions: Int64,
    rows: HeadRows,
    field: str,
    *,
    lossy: bool,
    counts: Counter[str] | None,
) -> tuple[Int64, HeadRows]:
    """Return one set or head per predicting position, ordered by position."""
    values = [rows.ids] if field == "candidate_ids" else [rows.ids, rows.log_probs]
    at, stay, torn = merge_equal(positions, rows.counts, *values)
    if len(torn):
        if not lossy:
            raise ConversionError(
                "samples share a position and differ in what hangs on it, of which TRL keeps one",
                where=_row_place(field, positions)(int(torn[0])),
                expected="equal candidate sets and heads at shared positions", got="others",
                remedy='pack with packing="sequence", or pass lossy=True to keep the last one',
            )  # fmt: skip
        if counts is not None:
            counts[f"{field}_of_shared_positions"] += len(torn)
    picked = [pick_rows(part, rows.counts, stay) for part in values]
    return at, HeadRows(rows.counts[stay], picked[0], picked[-1])


def to_micro_batch(
    rows: Sequence[pa.RecordBatch],
    *,
    pad_token_id: int,
    top_k: int | None = None,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> Arrays:
    """Return the padded batch of TRL's collator, one packed row per rank.

    Parameters
    ----------
    rows : sequence of pyarrow.RecordBatch
        One packed row per rank, as in :func:`to_row`.
    pad_token_id : int
        Of the tokenizer; pads ``input_ids``.
    top_k, lossy, counts
        As in :func:`to_row`.

    Returns
    -------
    dict of str to ndarray
        Every key of :func:`to_row`, stacked on a first axis of ranks and padded on the right to the
        longest row; ``attention_mask`` (R, N) int64; ``global_n_tokens`` (targets of all rows),
        ``global_n_forward_tokens`` and ``mean_seq_len`` (R,) float32, one value repeated.

    Raises
    ------
    ConversionError
        There is no row, or something would be lost (``RF-A001``).
    """
    if not rows:
        raise ConversionError("a batch has at least one row", expected=">= 1 row", got=0)
    parts = [to_row(row, top_k=top_k, lossy=lossy, counts=counts) for row in rows]
    out = stack(parts, {**_PADS, "input_ids": pad_token_id})
    lengths = np.array([len(part["input_ids"]) for part in parts])
    out["attention_mask"] = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    targets = sum(len(part["token_index"]) for part in parts)
    members = sum(len(flat(row.column("member_leaf")).values) for row in rows)
    for name, value in (
        ("global_n_tokens", targets), ("global_n_forward_tokens", int(lengths.sum())),
        ("mean_seq_len", int(lengths.sum()) / max(members, 1)),
    ):  # fmt: skip
        out[name] = np.full(len(rows), value, np.float32)
    return out


def stack(parts: Sequence[Arrays], pads: dict[str, float]) -> Arrays:
    """Return arrays of several rows stacked on a new first axis, padded to the largest."""
    out: Arrays = {}
    for name in parts[0]:
        arrays = [part[name] for part in parts]
        shape = tuple(np.max([array.shape for array in arrays], axis=0).tolist())
        table = np.full((len(parts), *shape), pads.get(name, 0), arrays[0].dtype)
        for number, array in enumerate(arrays):
            table[number][tuple(map(slice, array.shape))] = array
        out[name] = table
    return out
