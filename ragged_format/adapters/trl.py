"""TRL AsyncGRPO: queue samples in and out, packed rows and collator batches out.

TRL (1.16) hands its trainer one sample per training row, with one entry per token, context
included; entry p describes the token at position p, as here. A packed row has one label per
position, so it is made of rows packed with ``fork="transition"``. Objects and mappings are read by
the names of their fields; trl is not imported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters._arguments import records_of, wrong_option
from ragged_format.adapters._build import (
    Columns,
    Draft,
    check_options,
    field_of,
    is_given,
    rows_where,
)
from ragged_format.adapters._fields import Fields
from ragged_format.adapters._npz import write_npz
from ragged_format.adapters._records import to_json
from ragged_format.adapters._sampler import add_heads, add_log_probs, add_sets, check_policies
from ragged_format.adapters._trl_rows import to_micro_batch, to_queue_samples, to_row
from ragged_format.adapters._values import malformed
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.schema import LogProb

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._targets import Policy
    from ragged_format.errors import Where

__all__ = ["ADAPTER", "to_micro_batch", "to_queue_samples", "to_row", "to_samples", "write"]

_READ = frozenset({
    "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id",
    "metrics", "enqueued_at", "sampling_mask", "sampling_mask_counts", "top_k", "top_k_ids",
    "top_k_log_probs", "sample_id", "source", "prompt", "completion",
})  # fmt: skip


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "processed",
    on_missing_support: Policy = "error",
    on_invalid_support: Policy = "error",
    on_missing_log_prob: Literal["error", "flag", "drop_target", "drop_sample"] = "flag",
    id_prefix: str = "trl",
    keep_messages: bool = False,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return AsyncGRPO queue samples as one batch of samples.

    Guarantees: a copy that keeps every invariant of the format; everything is stored or counted in
    `report`. :func:`to_queue_samples` gives the samples back.

    Parameters
    ----------
    payloads : iterable of mappings or objects
        With the fields of TRL's ``RolloutSample``: ``input_ids``, ``completion_mask``,
        ``old_log_probs`` (the sampler's), ``advantage``, ``model_version``, ``group_id``,
        ``metrics``, ``enqueued_at``; and where there are any ``sampling_mask`` (a list of ids per
        token, a table padded with -1, or flat ids with ``sampling_mask_counts``), ``top_k`` (a dict
        ``{id: log-prob}`` per token) or ``top_k_ids`` and ``top_k_log_probs`` (tables padded with
        -1 and -inf). Further: ``sample_id``.
    vocab_size, columns, schema, logprobs_mode, on_missing_support, on_invalid_support
        As in :func:`ragged_format.adapters.vllm.to_samples`. A trained token with an empty list has
        no candidate set.
    on_missing_log_prob : {"flag", "error", "drop_target", "drop_sample"}
        What to do where ``old_log_probs`` of a trained token is NaN, null or a floor.
    id_prefix : str
        Samples without ``sample_id`` are named ``<prefix>/<number in this call>``.
    keep_messages : bool
        Whether ``prompt`` and ``completion``, which TRL keeps for its log only, go into the
        provenance.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A004`` no candidate set, ``RF-A005`` ids that contradict each
        other, ``RF-A006`` lengths that disagree, ``RF-A007`` impossible log-probs, ``RF-A011``
        options that do not fit.

    Examples
    --------
    >>> sample = {
    ...     "input_ids": [5, 6, 3, 4],
    ...     "completion_mask": [0, 0, 1, 1],
    ...     "old_log_probs": [0.0, 0.0, -0.5, -0.25],
    ...     "sampling_mask": [[], [], [3, 7], [4]],
    ... }
    >>> batch = to_samples([sample], vocab_size=10)
    >>> batch.column("candidate_counts").to_pylist(), batch.column("candidate_ids").to_pylist()
    ([[2, 1]], [[3, 7, 4]])
    >>> sample["sampling_mask"][3] = []
    >>> to_samples([sample], vocab_size=10)
    Traceback (most recent call last):
    ...
    ragged_format.errors.ConversionError: [RF-A004] a trained token has no candidate set
      where:    row 0, column 'sampling_mask', position 3
      expected: a list with the sampled token
      got:      null or an empty list
      remedy:   choose on_missing_support; an empty list does not say "the full vocabulary"
    """
    vocab_size = check_options(vocab_size, columns, schema)
    check_policies(
        on_missing_support=on_missing_support, on_invalid_support=on_invalid_support,
        on_missing_log_prob=on_missing_log_prob,
    )  # fmt: skip
    if logprobs_mode not in ("processed", "raw"):
        raise wrong_option("logprobs_mode", "'processed' or 'raw'", logprobs_mode)
    counts = ConversionReport()
    items = list(records_of(payloads))
    counts.responses.taken = counts.responses.stored = len(items)
    fields = Fields(items, rows_where(items))
    ids = fields.ids("input_ids")
    lengths = [len(part) for part in ids]
    draft = Draft(ids, fields.masks("completion_mask", lengths), fields.wheres, vocab_size, counts)
    _add_records(draft, items, id_prefix, keep_messages=keep_messages)
    processed = logprobs_mode == "processed"
    mode = LogProb("processed", "support") if processed else LogProb("raw", "vocabulary")
    if is_given(items, "sampling_mask"):
        rows = fields.id_rows("sampling_mask", lengths, "sampling_mask_counts")
        add_sets(
            draft, rows, "sampling_mask", on_missing=on_missing_support,
            on_invalid=on_invalid_support,
        )  # fmt: skip
    if is_given(items, "old_log_probs"):
        given = fields.floats("old_log_probs", lengths)
        add_log_probs(draft, given, "old_log_probs", mode, on_missing_log_prob)
    if is_given(items, "top_k"):
        add_heads(draft, *fields.dict_heads("top_k", lengths), mode, "top_k")
    elif is_given(items, "top_k_ids"):
        heads = fields.table_heads("top_k_ids", "top_k_log_probs", lengths)
        add_heads(draft, heads, None, mode, "top_k_ids")
    batch = draft.finish(columns, schema)
    counts.add_to(report)
    return batch


def _add_records(
    draft: Draft, items: Sequence[Any], id_prefix: str, *, keep_messages: bool
) -> None:
    report, records = draft.report, draft.records
    records["sample_id"] = [
        field_of(item, "sample_id") or f"{id_prefix}/{number}" for number, item in enumerate(items)
    ]
    for name, source, kind in (
        ("group_id", "group_id", str), ("policy_version", "model_version", int),
        ("advantage", "advantage", float),
    ):  # fmt: skip
        values = [field_of(item, source) for item in items]
        if any(value is not None for value in values):
            records[name] = [None if value is None else kind(value) for value in values]
    metrics = [field_of(item, "metrics") for item in items]
    if any(value is not None for value in metrics):
        places = draft.pieces
        records["metrics"] = [
            None if value is None else _metrics(value, place.where, report)
            for value, place in zip(metrics, places, strict=True)
        ]
    provenance = []
    for item, piece in zip(items, draft.pieces, strict=True):
        kept = {"source": "trl"}
        if (enqueued := field_of(item, "enqueued_at")) is not None:
            kept["enqueued_at"] = enqueued
        for name in ("prompt", "completion"):
            if messages := field_of(item, name):
                if keep_messages:
                    kept[name] = messages
                else:
                    report.unread[name] += 1
        provenance.append(to_json(kept, piece.where, "provenance"))
        if isinstance(item, Mapping):
            report.unread.update(key for key in item.keys() - _READ if item[key] is not None)
    records["provenance"] = provenance


def _metrics(value: Any, where: Where, report: ConversionReport) -> str:
    if not isinstance(value, Mapping):
        malformed("metrics are an object", where, "numbers by name", value)
    plain = {}
    for key, number in value.items():
        # A reward of nobody is NaN in TRL; JSON has no NaN.
        nan = isinstance(number, float | np.floating) and math.isnan(number)
        report.converted["nan_metrics"] += nan
        plain[str(key)] = None if nan else number
    return to_json(plain, where, "metrics")


def _recognizes(payload: Any) -> bool:
    return (
        isinstance(payload, Mapping)
        and {"input_ids", "completion_mask", "old_log_probs", "advantage"} <= payload.keys()
        and "teacher_topk_ids" not in payload
    )


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    top_k: int | None = None,
    lossy: bool = False,
) -> dict[str, int]:
    """Write packed rows as one ``.npz`` file each, with the keys of :func:`to_row`.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``packed``, packed with ``fork="transition"``.
    path : str
        Directory to make.
    top_k, lossy
        As in :func:`to_row`.

    Returns
    -------
    dict of str to int
        Rows written, and what was left out.
    """
    counts: Counter[str] = Counter()
    rows = (batch.slice(number, 1) for batch in batches for number in range(batch.num_rows))
    parts = (to_row(row, top_k=top_k, lossy=lossy, counts=counts) for row in rows)
    return {"rows": write_npz(path, "row", parts), **counts}


ADAPTER = Adapter(
    name="trl",
    title="TRL AsyncGRPO, queue samples and packed rows",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
    writes=Writer(write=write, profile="packed", makes="a directory of one .npz per packed row"),
)
