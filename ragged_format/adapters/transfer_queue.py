"""TransferQueue: samples as columns of its messages, in both directions.

A jagged tensor has one ragged dimension, so that candidate sets travel as two columns, ids and
counts of all tokens. A message is a sample (a mapping of arrays) or a batch of them (a TensorDict,
or a mapping of nested tensors). Columns that are read: ``input_ids``, ``response_mask``,
``rollout_log_probs``, ``sampling_mask_ids``, ``sampling_mask_counts``, ``teacher_topk_ids`` and
``teacher_topk_logprobs`` (tokens, k), ``advantage``, ``group_id`` and ``uid``; values lie at the
token's own position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._arguments import columns_of
from ragged_format.adapters._outgoing import Outgoing
from ragged_format.adapters._tables import HeadRows, clean_heads, pad_rows, unpad_rows
from ragged_format.adapters._tq_codec import Jagged, decode, encode, split
from ragged_format.adapters._trajectory import (
    Policies,
    Trajectory,
    build,
    check_lengths,
    csr_rows,
    doubles,
    ids_of,
    mask_of,
    per_target,
    rounded,
    sampled_only,
)
from ragged_format.adapters._values import Rows, malformed
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import flat
from ragged_format.parse import parse_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._columns import LogProbMode
    from ragged_format.adapters._targets import Policy
    from ragged_format.schema import Column

__all__ = [
    "ADAPTER",
    "Jagged",
    "decode",
    "encode",
    "from_samples",
    "payloads",
    "to_samples",
    "write",
]

_NAMES = {
    "sampling_mask": "sampling_mask_counts", "logprobs": "rollout_log_probs",
    "mask": "response_mask", "tokens": "input_ids", "token_ids": "input_ids",
}  # fmt: skip
_IDS, _COUNTS = "sampling_mask_ids", "sampling_mask_counts"
_TEACHER = ("teacher_topk_ids", "teacher_topk_logprobs")
_HEAD = ("teacher_topk_counts", "teacher_topk_ids", "teacher_topk_log_probs")
_READ = frozenset({
    "input_ids", "response_mask", "rollout_log_probs", _IDS, _COUNTS, *_TEACHER, "advantage",
    "group_id", "uid",
})  # fmt: skip
_HOLDS = frozenset({"rollout_log_probs", "candidate_counts", "candidate_ids", *_HEAD})
_GIVEN = _HOLDS | {"advantage", "group_id"}
_MARK = "__tq_tensordict__"


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Iterable[str | Column] | None = None,
    schema: pa.Schema | None = None,
    logprobs_mode: LogProbMode = "processed",
    on_missing_support: Policy = "error",
    on_invalid_support: Policy = "error",
    on_missing_log_prob: Literal["error", "flag", "drop_target", "drop_sample"] = "flag",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return the samples of messages as one batch.

    Guarantees: a copy that keeps every invariant of the format; a call that raises leaves `report`
    as it was.

    Parameters
    ----------
    payloads : iterable
        Packed messages (bytes), or what they hold: mappings of arrays or tensors, of one sample or
        of a batch (nested tensors, :class:`Jagged` or lists of arrays by column).
    vocab_size, columns, schema, logprobs_mode, report
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    on_missing_support, on_invalid_support, on_missing_log_prob
        As there; a scored token with count 0 is a missing set.

    Raises
    ------
    ConversionError
        As there; teacher heads that are no distribution (``RF-A007``).

    Examples
    --------
    >>> sample = {
    ...     "uid": "u0",
    ...     "input_ids": np.array([5, 6, 7]),
    ...     "response_mask": np.array([0, 1, 1]),
    ...     "sampling_mask_ids": np.array([2, 6, 7], np.int32),
    ...     "sampling_mask_counts": np.array([0, 2, 1], np.int32),
    ... }
    >>> batch = to_samples([sample], vocab_size=10)
    >>> batch.column("candidate_counts").to_pylist(), batch.column("candidate_ids").to_pylist()
    ([[2, 1]], [[2, 6, 7]])
    """
    columns = columns_of(columns)
    asked = columns if schema is None else tuple(parse_schema(schema).columns)
    names = [c if isinstance(c, str) else c.name for c in asked or ()]
    heads = asked is None or _HEAD[0] in names
    size = (vocab_size or 0) if schema is None else parse_schema(schema).vocab_size
    counts = ConversionReport()
    batch = build(
        payloads, partial(_read, size, heads=heads), vocab_size=vocab_size, columns=columns,
        schema=schema, logprobs_mode=logprobs_mode,
        policies=Policies(on_missing_support, on_invalid_support, on_missing_log_prob),
        given=_GIVEN, report=counts,
    )  # fmt: skip
    ledger = counts.head_entries
    if _HEAD[1] in batch.schema.names:
        ledger.stored += len(flat(batch.column(_HEAD[1])).values)
    ledger.drop("target_dropped", ledger.taken - ledger.stored - ledger.dropped.total())
    counts.add_to(report)
    return batch


def _plain(value: Any) -> Any:
    """Return torch tensors as arrays, nested ones as their rows."""
    if not hasattr(value, "detach"):
        return value
    return Jagged(row.numpy() for row in value.unbind()) if value.is_nested else value.numpy()


def _read(
    vocab_size: int, payload: Any, number: int, report: ConversionReport, *, heads: bool
) -> list[Trajectory]:
    where = Where(row=number)
    if isinstance(payload, bytes | bytearray | memoryview):
        payload = decode(payload, where)
    if hasattr(payload, "batch_size") and hasattr(payload, "items"):
        payload = dict(payload.items())  # a TensorDict
    if isinstance(payload, Mapping) and payload.get(_MARK):
        payload = payload["data"]
    if not isinstance(payload, Mapping) or payload.get("input_ids") is None:
        malformed("a message has the tokens of samples", where, "input_ids", payload)
    fields = {name: _plain(value) for name, value in payload.items()}
    out = []
    for row, sample in enumerate(_rows(fields, where)):
        name = str(sample.get("uid") or f"transfer_queue/{number}/{row}")
        out.append(_sample(sample, name, where, vocab_size, report, heads=heads))
    return out


def _rows(fields: Mapping[str, Any], where: Where) -> Iterator[Mapping[str, Any]]:
    """Yield the samples of a message."""
    tokens = fields["input_ids"]
    rows = isinstance(tokens, Jagged) or (
        isinstance(tokens, list) and len(tokens) > 0 and isinstance(tokens[0], list | np.ndarray)
    )
    if not rows:
        yield fields
        return
    columns = {name: value for name, value in fields.items() if value is not None}
    check_lengths(len(tokens), {n: len(v) for n, v in columns.items()}, where, "sample")
    for row in range(len(tokens)):
        yield {name: value[row] for name, value in columns.items()}


def _sample(
    sample: Mapping[str, Any],
    name: str,
    where: Where,
    vocab_size: int,
    report: ConversionReport,
    *,
    heads: bool,
) -> Trajectory:
    def at(column: str) -> Where:
        return Where(row=where.row, column=column)

    tokens = ids_of(sample["input_ids"], at("input_ids"))
    if sample.get("response_mask") is None:
        malformed("a sample says which tokens are scored", where, "response_mask", None)
    scored = mask_of(sample["response_mask"], at("response_mask"))
    check_lengths(len(tokens), {"response_mask": len(scored)}, where, "token")
    out = Trajectory.of(name, where, tokens, scored, _NAMES)
    values: dict[str, Any] = {}
    if sample.get("advantage") is not None:
        values["advantage"] = float(sample["advantage"])
    if sample.get("group_id") is not None:
        values["group_id"] = str(sample["group_id"])
    out.record_values = values
    if sample.get("rollout_log_probs") is not None:
        given, null = doubles(sample["rollout_log_probs"], at("rollout_log_probs"))
        check_lengths(len(tokens), {"rollout_log_probs": len(given)}, where, "token")
        clean = np.where(null, 0.0, given)
        kept = rounded(per_target(clean, scored, "rollout_log_probs", report.unread), report)
        kept[null[scored]] = np.nan
        out.log_probs = sampled_only(kept, null[scored])
    _place_sets(out, sample, where, report)
    if sample.get(_TEACHER[0]) is not None and sample.get(_TEACHER[1]) is not None:
        table, log_probs = (np.asarray(sample[key]) for key in _TEACHER)
        if table.ndim != 2 or table.shape != log_probs.shape or len(table) != len(tokens):
            raise ConversionError(
                "a teacher's head has k ids and log-probs for every token", code="RF-A006",
                where=at(_TEACHER[0]), expected=f"({len(tokens)}, k) each",
                got=f"{table.shape}, {log_probs.shape}",
            )  # fmt: skip
        _place_teacher(out, table, log_probs, vocab_size, report, wanted=heads)
    report.unread.update(k for k, v in sample.items() if k not in _READ and v is not None)
    return out


def _place_sets(
    out: Trajectory, sample: Mapping[str, Any], where: Where, report: ConversionReport
) -> None:
    ids, counts = sample.get(_IDS), sample.get(_COUNTS)
    if ids is None and counts is None:
        return
    if ids is None or counts is None:
        missing = _COUNTS if counts is None else _IDS
        malformed("sets are two columns", Where(row=where.row, column=missing), missing, None)
    ids = ids_of(ids, Where(row=where.row, column=_IDS))
    counts = ids_of(counts, Where(row=where.row, column=_COUNTS))
    check_lengths(out.num_tokens, {_COUNTS: len(counts)}, where, "token")
    if len(counts) and counts.min() < 0:
        at = Where(row=where.row, column=_COUNTS)
        malformed("a count is not negative", at, ">= 0", int(counts.min()))
    check_lengths(int(counts.sum()), {_IDS: len(ids)}, where, "candidate")
    rows, _, beside = csr_rows(ids, counts, out.scored, None)
    out.support = Rows(rows.values, rows.counts, rows.counts == 0)
    report.candidates.taken += beside
    report.candidates.drop("token_not_scored", beside)


def _place_teacher(
    out: Trajectory,
    table: npt.NDArray[Any],
    log_probs: npt.NDArray[Any],
    vocab_size: int,
    report: ConversionReport,
    *,
    wanted: bool,
) -> None:
    used = table >= 0
    ledger = report.head_entries
    beside = int(np.count_nonzero(used[~out.scored]))
    ledger.taken += beside
    ledger.drop("token_not_scored", beside)
    ids, counts, slots = unpad_rows(table[out.scored])
    if not wanted:
        ledger.taken += len(ids)
        ledger.drop("column_not_wanted", len(ids))
        return
    heads = clean_heads(
        HeadRows(counts, ids, log_probs[out.scored][slots]), vocab_size, report,
        lambda target: out.place(_TEACHER[0], target), kind="teacher_head",
    )  # fmt: skip
    found = (heads.counts, heads.ids, heads.log_probs)
    out.target_values = dict(zip(_HEAD, found, strict=True))


def from_samples(samples: pa.RecordBatch, *, top_k: int | None = None) -> list[dict[str, Any]]:
    """Return samples as mappings of columns, one for each.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample``, valid.
    top_k : int, optional
        Width of the teacher's tables, unused slots -1 and -inf; ``None``: that of the largest head.

    Raises
    ------
    ConversionError
        Columns or flags that the columns cannot hold, heads beyond `top_k` (``RF-A001``).
    """
    source = Outgoing(samples, "TransferQueue", _HOLDS)
    by_token: dict[str, npt.NDArray[Any]] = {
        "input_ids": source.tokens.astype(np.int64),
        "response_mask": source.scored.astype(np.int64),
    }
    log_probs = source.values("rollout_log_probs")
    if log_probs is not None:
        by_token["rollout_log_probs"] = source.spread(log_probs, 0, np.float32)
    sets = source.sets()
    if sets is not None:
        counts, ids, _ = sets
        by_token[_COUNTS] = source.spread(counts, 0, np.int32)
        bounds = source.candidate_bounds(counts)
    by_token.update(_teacher(source, top_k))
    names, groups = source.record("sample_id"), source.record("group_id")
    advantages = source.record("advantage")
    out = []
    for row, (begin, end) in enumerate(pairwise(source.offsets.tolist())):
        sample: dict[str, Any] = {key: values[begin:end] for key, values in by_token.items()}
        if sets is not None:
            sample[_IDS] = ids[int(bounds[row]) : int(bounds[row + 1])]
        if advantages[row] is not None:
            sample["advantage"] = np.array(advantages[row], np.float64)
        if (group := groups[row]) is not None:
            digits = group.isascii() and group.isdigit()
            sample["group_id"] = np.array(int(group), np.int64) if digits else group
        out.append(sample | {"uid": names[row]})
    return out


def _teacher(source: Outgoing, top_k: int | None) -> dict[str, npt.NDArray[Any]]:
    parts = [source.values(name) for name in _HEAD]
    counts, ids, log_probs = parts
    if counts is None or ids is None or log_probs is None:
        return {}
    widest = int(counts.max(initial=0))
    width = widest if top_k is None else top_k
    if widest > width:
        target = int(np.argmax(counts > width))
        raise ConversionError(
            "a head is wider than the table", where=source.place(_HEAD[0], target),
            expected=f"<= {width} entries", got=int(counts[target]), remedy="pass a larger top_k=",
        )  # fmt: skip
    tables = (
        (pad_rows(ids, counts, width, -1, np.int64), -1, np.int64),
        (pad_rows(log_probs, counts, width, -np.inf, np.float32), -np.inf, np.float32),
    )
    return {
        name: source.spread(table, fill, dtype)
        for name, (table, fill, dtype) in zip(_TEACHER, tables, strict=True)
    }


def payloads(path: str) -> Iterator[memoryview]:
    """Yield the packed messages that a file holds end to end."""
    return split(Path(path).read_bytes(), Where(file=path))


def write(
    batches: Iterable[pa.RecordBatch], path: str, *, top_k: int | None = None
) -> Mapping[str, int]:
    """Write one packed message for each sample, end to end in one file.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        File to write.
    top_k
        As in :func:`from_samples`.

    Returns
    -------
    mapping of str to int
        Samples and bytes written.
    """
    counts = {"samples": 0, "bytes": 0}
    with Path(path).open("wb") as sink:
        for batch in batches:
            for sample in from_samples(batch, top_k=top_k):
                counts["samples"] += 1
                counts["bytes"] += sink.write(encode(sample))
    return counts


ADAPTER = Adapter(
    name="transfer_queue",
    title="TransferQueue, packed messages of samples or TensorDicts",
    reads=Reader(to_samples=to_samples, payloads=payloads, suffixes=(".bin",)),
    writes=Writer(write=write, profile="sample", makes="one file of packed messages"),
)
