"""TRL AsyncDistillation: rows with a teacher's top K and the realised token, in and out.

TRL (1.16) keeps a teacher's head per token, own position, in tables of K + 1 columns padded with -1
and -inf; a row holds K entries or, where the realised token is ranked beyond K, K + 1. Context
tokens have none. Here a head is as long as it is, on the scored tokens only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._build import (
    Columns,
    Draft,
    check_options,
    field_of,
    is_given,
    rows_where,
)
from ragged_format.adapters._export import Samples, refuse_loss, values_of
from ragged_format.adapters._fields import Fields
from ragged_format.adapters._npz import write_npz
from ragged_format.adapters._records import to_json
from ragged_format.adapters._tables import pad_rows
from ragged_format.adapters._teacher import (
    add_teacher,
    heads_of_targets,
    stored_heads,
    teacher_mode,
    with_realized,
)
from ragged_format.adapters._values import malformed
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._tables import HeadRows

__all__ = ["ADAPTER", "to_micro_batch", "to_rows", "to_samples", "write"]

Arrays = dict[str, npt.NDArray[Any]]
_CARRIED = {
    "input_ids", "completion_mask", "teacher_topk_counts", "teacher_topk_ids",
    "teacher_topk_log_probs", "teacher_log_probs", "target_flags",
}  # fmt: skip
_CARRIED_RECORDS = {"teacher_id", "group_id", "policy_version", "metrics"}
_READ = frozenset({
    "input_ids", "completion_mask", "teacher_topk_ids", "teacher_topk_logprobs", "prompt_logprobs",
    "response", "teacher_id", "prompt_id", "model_version", "metrics", "sample_id", "source",
})  # fmt: skip


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "processed",
    teacher_temperature: float | None = None,
    id_prefix: str = "trl_distill",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return AsyncDistillation samples, or a teacher's replies, as one batch of samples.

    Guarantees: a copy that keeps every invariant of the format; everything is stored or counted in
    `report`. Entries that TRL lets pass (-inf, -9999) or that stop it (null) are dropped by the
    table of sentinels; a target without entries is flagged ``teacher_missing``.

    Parameters
    ----------
    payloads : iterable of mappings or objects
        With ``input_ids``, ``completion_mask`` and either ``teacher_topk_ids`` and
        ``teacher_topk_logprobs``, (L, K + 1) each, or ``prompt_logprobs`` (per token null or
        ``{id: {logprob, rank}}``), or ``response``, a teacher's ``/v1/completions`` answer with
        them, as JSON text or parsed. Further: ``teacher_id``, ``prompt_id``, ``model_version``,
        ``metrics``, ``sample_id``.
    vocab_size, columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    logprobs_mode : {"processed", "raw"}
        What the teacher's ``--logprobs-mode`` was.
    teacher_temperature : float, optional
        Of the request, for the column's metadata.
    id_prefix : str
        Samples without ``sample_id`` are named ``<prefix>/<number in this call>``.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A005`` ids outside the vocabulary, ``RF-A006`` lengths that
        disagree, ``RF-A007`` impossible log-probs, ``RF-A011`` options that do not fit.

    Examples
    --------
    Of the teacher's top 1, and the realised token where that is another:

    >>> sample = {
    ...     "input_ids": [5, 6, 3],
    ...     "completion_mask": [0, 1, 1],
    ...     "prompt_logprobs": [
    ...         None,
    ...         {"6": {"logprob": -2.0, "rank": 4}, "7": {"logprob": -0.25, "rank": 1}},
    ...         {"3": {"logprob": -0.5, "rank": 1}},
    ...     ],
    ... }
    >>> batch = to_samples([sample], vocab_size=10)
    >>> (
    ...     batch.column("teacher_topk_counts").to_pylist(),
    ...     batch.column("teacher_topk_ids").to_pylist(),
    ... )
    ([[2, 1]], [[7, 6, 3]])
    >>> to_rows(batch)[0]["teacher_topk_ids"].tolist()
    [[-1, -1], [7, 6], [3, -1]]
    """
    vocab_size = check_options(vocab_size, columns, schema)
    mode = teacher_mode(logprobs_mode, teacher_temperature)
    counts = ConversionReport()
    items = [_with_reply(item, row) for row, item in enumerate(records_of(payloads))]
    counts.responses.taken = counts.responses.stored = len(items)
    fields = Fields(items, rows_where(items))
    ids = fields.ids("input_ids")
    lengths = [len(part) for part in ids]
    draft = Draft(ids, fields.masks("completion_mask", lengths), fields.wheres, vocab_size, counts)
    _add_records(draft, items, id_prefix)
    null = None
    field = "teacher_topk_ids"
    if is_given(items, field):
        heads = fields.table_heads(field, "teacher_topk_logprobs", lengths)
    else:
        field = "prompt_logprobs"
        heads, null = fields.ranked_heads(field, lengths)
    heads, null = heads_of_targets(draft, heads, null)
    add_teacher(draft, heads, mode, field, null=null)
    batch = draft.finish(columns, schema)
    counts.add_to(report)
    return batch


def _with_reply(item: Any, row: int) -> Any:
    """Return the payload with the ``prompt_logprobs`` of its reply, if it holds one."""
    reply = field_of(item, "response")
    if reply is None:
        return item
    where = Where(row=row, column="response")
    if isinstance(reply, str | bytes):  # as it came over HTTP
        try:
            reply = json.loads(reply)
        except (ValueError, RecursionError) as err:
            malformed("a response is JSON", where, "JSON of /v1/completions", str(err))
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    first = choices[0] if isinstance(choices, Sequence) and choices else None
    found = first.get("prompt_logprobs") if isinstance(first, Mapping) else None
    if found is None:
        raise ConversionError(
            "a teacher's reply has no prompt_logprobs", code="RF-A009", where=where,
            expected="choices[0].prompt_logprobs of /v1/completions", got=reply,
            remedy="request prompt_logprobs=K with max_tokens=1",
        )  # fmt: skip
    return {**item, "prompt_logprobs": found, "response": None}


def _add_records(draft: Draft, items: Sequence[Any], id_prefix: str) -> None:
    records = draft.records
    records["sample_id"] = [
        field_of(item, "sample_id") or f"{id_prefix}/{number}" for number, item in enumerate(items)
    ]
    for name, source in (
        ("teacher_id", "teacher_id"), ("group_id", "prompt_id"), ("policy_version", "model_version")
    ):  # fmt: skip
        values = [field_of(item, source) for item in items]
        if any(value is not None for value in values):
            kind = int if name == "policy_version" else str
            records[name] = [None if value is None else kind(value) for value in values]
    metrics = [field_of(item, "metrics") for item in items]
    if any(value is not None for value in metrics):
        records["metrics"] = [
            None if value is None else to_json(value, piece.where, "metrics")
            for value, piece in zip(metrics, draft.pieces, strict=True)
        ]
    for item in items:
        if isinstance(item, Mapping):
            draft.report.unread.update(
                key for key in item.keys() - _READ if item[key] is not None
            )  # fmt: skip


def to_rows(
    samples: pa.RecordBatch,
    *,
    width: int | None = None,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> list[Arrays]:
    """Return the arrays of AsyncDistillation samples, one mapping per sample.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample`` with ``teacher_topk_*``, validated.
    width : int, optional
        Columns of the tables, K + 1; ``None``: the longest head of the batch.
    lossy : bool
        Leave out heads without the realised token and columns without a place, instead of refusing.
        Heads are never cut.
    counts : Counter, optional
        Receives what was put in or left out.

    Returns
    -------
    list of dict
        ``input_ids``, ``completion_mask`` (L,) int64; ``teacher_topk_ids`` (L, width) int64 padded
        with -1; ``teacher_topk_logprobs`` (L, width) float32 padded with -inf. The realised token
        is in every row that is not empty: it is put in where a head lacks it and
        ``teacher_log_probs`` has its value.

    Raises
    ------
    ConversionError
        Something would be lost, or a head does not fit (``RF-A001``).
    """
    refuse_loss(
        samples, _CARRIED | _CARRIED_RECORDS, to="TRL's distillation row", lossy=lossy,
        counts=counts,
    )  # fmt: skip
    parts = Samples(samples)
    ids, log_probs = _tables(parts, width, lossy=lossy, counts=counts)
    out: list[Arrays] = []
    for row in range(len(parts)):
        span = slice(int(parts.offsets[row]), int(parts.offsets[row + 1]))
        out.append({
            "input_ids": parts.ids[span].astype(np.int64),
            "completion_mask": parts.mask[span].astype(np.int64),
            "teacher_topk_ids": ids[span], "teacher_topk_logprobs": log_probs[span],
        })  # fmt: skip
    return out


def _tables(
    parts: Samples, width: int | None, *, lossy: bool, counts: Counter[str] | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    place = parts.place("teacher_topk_ids")
    heads, inserted, left_out = with_realized(
        stored_heads(parts),
        parts.tokens,
        values_of(parts.batch, "teacher_log_probs"),
        place,
        lossy=lossy,
    )
    if counts is not None:
        counts["realized_inserted"] += inserted
        counts["heads_left_out"] += left_out
    width = _checked_width(heads, width, place)
    per_token = parts.token_counts(heads.counts)
    ids = pad_rows(heads.ids, per_token, width, -1, np.int64)
    return ids, pad_rows(heads.log_probs, per_token, width, -np.inf, np.float32)


def _checked_width(heads: HeadRows, width: int | None, place: Any) -> int:
    widest = int(heads.counts.max(initial=0))
    if width is None:
        return widest
    if widest > width:
        first = int(np.argmax(heads.counts > width))
        raise ConversionError(
            "a head is longer than the table is wide", where=place(first),
            expected=f"at most {width} entries", got=int(heads.counts[first]),
            remedy="raise width: K + 1, for the realised token beyond the top K",
        )  # fmt: skip
    return width


def to_micro_batch(
    samples: pa.RecordBatch,
    rows: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    teachers: Sequence[str] = (),
    width: int | None = None,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> Arrays:
    """Return the padded batch of TRL's distillation collator.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
    rows : sequence of sequences of int
        Which samples make up each row, in order.
    pad_token_id : int
    teachers : sequence of str
        Names of the teachers, in the order of their numbers; with them the batch has
        ``teacher_id_idx``.
    width, lossy, counts
        As in :func:`to_rows`.

    Returns
    -------
    dict of str to ndarray
        ``input_ids``, ``attention_mask``, ``completion_mask``, ``position_ids`` (R, N) int64;
        ``teacher_topk_ids`` (R, N, width) int64; ``teacher_topk_logprobs`` (R, N, width) float32;
        ``teacher_id_idx`` (R, N) int64 padded with -1; ``global_n_tokens``,
        ``global_n_forward_tokens``, ``mean_seq_len`` (R,) float32.
    """
    refuse_loss(
        samples, _CARRIED | _CARRIED_RECORDS, to="TRL's distillation row", lossy=lossy,
        counts=counts,
    )  # fmt: skip
    parts = Samples(samples)
    ids, log_probs = _tables(parts, width, lossy=lossy, counts=counts)
    lengths = np.diff(parts.offsets)
    sizes = [int(lengths[list(row)].sum()) for row in rows]
    longest = max(sizes, default=0)
    shape = (len(rows), longest)
    out: Arrays = {
        "input_ids": np.full(shape, pad_token_id, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        "completion_mask": np.zeros(shape, np.int64),
        "position_ids": np.zeros(shape, np.int64),
        "teacher_topk_ids": np.full((*shape, ids.shape[1]), -1, np.int64),
        "teacher_topk_logprobs": np.full((*shape, ids.shape[1]), -np.inf, np.float32),
    }
    numbers = _teacher_numbers(parts, teachers)
    if numbers is not None:
        out["teacher_id_idx"] = np.full(shape, -1, np.int64)
    used = 0
    for number, row in enumerate(rows):
        begin = 0
        for sample in row:
            source = slice(int(parts.offsets[sample]), int(parts.offsets[sample + 1]))
            into = (number, slice(begin, begin + int(lengths[sample])))
            out["input_ids"][into] = parts.ids[source]
            out["attention_mask"][into] = 1
            out["completion_mask"][into] = parts.mask[source]
            out["position_ids"][into] = np.arange(int(lengths[sample]))
            out["teacher_topk_ids"][into] = ids[source]
            out["teacher_topk_logprobs"][into] = log_probs[source]
            if numbers is not None:
                out["teacher_id_idx"][into] = numbers[sample]
            begin += int(lengths[sample])
        used += len(row)
    for name, value in (
        ("global_n_tokens", int(out["completion_mask"].sum())),
        ("global_n_forward_tokens", sum(sizes)), ("mean_seq_len", sum(sizes) / max(used, 1)),
    ):  # fmt: skip
        out[name] = np.full(len(rows), value, np.float32)
    return out


def _teacher_numbers(parts: Samples, teachers: Sequence[str]) -> list[int] | None:
    if not teachers:
        return None
    by_name = {name: number for number, name in enumerate(teachers)}
    names = parts.record("teacher_id")
    for row, name in enumerate(names):
        if name not in by_name:
            raise ConversionError(
                "a sample's teacher is not among those named",
                where=Where(row=row, column="teacher_id"), expected=", ".join(teachers), got=name,
            )  # fmt: skip
    return [by_name[name] for name in names]


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    width: int | None = None,
    lossy: bool = False,
) -> dict[str, int]:
    """Write samples as one ``.npz`` file each, with the keys of :func:`to_rows`.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        Directory to make.
    width, lossy
        As in :func:`to_rows`; without `width`, tables of one batch have one width.
    """
    counts: Counter[str] = Counter()
    parts = (
        row for batch in batches for row in to_rows(batch, width=width, lossy=lossy, counts=counts)
    )
    return {"samples": write_npz(path, "sample", parts), **counts}


def _recognizes(payload: Any) -> bool:
    return isinstance(payload, Mapping) and (
        {"input_ids", "completion_mask"} <= payload.keys()
        and bool({"teacher_topk_ids", "prompt_logprobs"} & payload.keys())
    )


ADAPTER = Adapter(
    name="trl_distill",
    title="TRL AsyncDistillation, rows and teachers' replies",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
    writes=Writer(write=write, profile="sample", makes="a directory of one .npz per sample"),
)
