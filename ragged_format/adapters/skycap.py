"""skycap traces: candidate sets as ids with offsets over the whole sequence, in and out.

``sampling_mask`` is ``{"ids": [...], "offsets": [...]}`` with one row per token, own position,
empty where ``loss_mask`` is 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._build import (
    Columns,
    Draft,
    check_options,
    field_of,
    is_given,
    rows_where,
)
from ragged_format.adapters._export import Samples, head_of, refuse_loss, values_of
from ragged_format.adapters._fields import Fields
from ragged_format.adapters._offline import sequences_of
from ragged_format.adapters._sampler import add_log_probs, add_sets, check_policies
from ragged_format.adapters._values import as_rows, malformed
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import Where
from ragged_format.lists import offsets_of
from ragged_format.schema import LogProb

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._targets import Policy

__all__ = ["ADAPTER", "to_samples", "to_traces", "write"]


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    on_missing_support: Policy = "error",
    on_invalid_support: Policy = "error",
    on_missing_log_prob: Policy = "flag",
    id_prefix: str = "skycap",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return traces as one batch of samples.

    Parameters
    ----------
    payloads : iterable of mappings
        With ``token_ids``, ``loss_mask``, and as far as there are ``logprobs`` (per token) and
        ``sampling_mask``.
    vocab_size, columns, schema, on_missing_support, on_invalid_support, on_missing_log_prob
        As in :func:`ragged_format.adapters.trl.to_samples`.
    id_prefix : str
        Samples without ``sample_id`` are named ``<prefix>/<number in this call>``.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A004`` no candidate set, ``RF-A005`` ids, ``RF-A006`` lengths.

    Examples
    --------
    >>> trace = {
    ...     "token_ids": [5, 6, 3],
    ...     "loss_mask": [0, 1, 1],
    ...     "sampling_mask": {"ids": [6, 9, 3], "offsets": [0, 0, 2, 3]},
    ... }
    >>> to_samples([trace], vocab_size=10).column("candidate_counts").to_pylist()
    [[2, 1]]
    """
    size = check_options(vocab_size, columns, schema)
    check_policies(
        on_missing_support=on_missing_support, on_invalid_support=on_invalid_support,
        on_missing_log_prob=on_missing_log_prob,
    )  # fmt: skip
    counts = ConversionReport()
    items = list(records_of(payloads))
    counts.responses.taken = counts.responses.stored = len(items)
    fields = Fields(items, rows_where(items))
    sequences = sequences_of(fields, id_prefix, tokens="token_ids", masks=("loss_mask",))
    draft = Draft(sequences.ids, sequences.masks, sequences.wheres, size, counts)
    draft.records.update(sequences.records)
    if is_given(items, "sampling_mask"):
        rows = [_rows(field_of(item, "sampling_mask"), fields.where(number, "sampling_mask"))
                for number, item in enumerate(items)]  # fmt: skip
        fields.check_lengths("sampling_mask", [len(row.counts) for row in rows], sequences.lengths)
        none = np.zeros(0, np.int64)
        flat = np.concatenate([*(row.values for row in rows), none])
        sizes = np.concatenate([*(row.counts for row in rows), none])
        add_sets(
            draft, (flat, sizes, np.zeros(len(sizes), bool)), "sampling_mask",
            on_missing=on_missing_support, on_invalid=on_invalid_support,
        )  # fmt: skip
    if is_given(items, "logprobs"):
        mode = LogProb("processed", "support")
        given = fields.floats("logprobs", sequences.lengths)
        add_log_probs(draft, given, "logprobs", mode, on_missing_log_prob)
    batch = draft.finish(columns, schema)
    counts.add_to(report)
    return batch


def _rows(value: Any, where: Where) -> Any:
    if not isinstance(value, Mapping) or not {"ids", "offsets"} <= value.keys():
        malformed("a sampling mask has ids and offsets", where, "ids, offsets", value)
    return as_rows(
        {"token_ids": value["ids"], "offsets": value["offsets"]},
        lambda p=None: Where(where.file, row=where.row, column=where.column, position=p),
    )


def to_traces(
    samples: pa.RecordBatch, *, lossy: bool = False, counts: Counter[str] | None = None
) -> list[dict[str, Any]]:
    """Return samples as traces, plain JSON values.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample``, validated.
    lossy : bool
        Leave out columns without a place instead of refusing.
    counts : Counter, optional
        Receives what was left out.

    Raises
    ------
    ConversionError
        Something would be lost (``RF-A001``).
    """
    carried = {
        "sample_id", "input_ids", "completion_mask", "rollout_log_probs", "candidate_counts",
        "candidate_ids",
    }  # fmt: skip
    refuse_loss(samples, carried, to="a skycap trace", lossy=lossy, counts=counts)
    parts = Samples(samples)
    sets = head_of(samples, "candidate")
    log_probs = values_of(samples, "rollout_log_probs")
    on_tokens = None if log_probs is None else parts.on_tokens(log_probs, 0.0, np.float32)
    per_token = None if sets is None else parts.token_counts(sets.counts)
    names = parts.record("sample_id")
    out = []
    for row in range(len(parts)):
        span = slice(int(parts.offsets[row]), int(parts.offsets[row + 1]))
        trace: dict[str, Any] = {
            "sample_id": names[row], "token_ids": parts.ids[span].tolist(),
            "loss_mask": parts.mask[span].tolist(),
        }  # fmt: skip
        if on_tokens is not None:
            trace["logprobs"] = on_tokens[span].tolist()
        if sets is not None and per_token is not None:
            entries = parts.entry_bounds(sets.counts)
            ids = sets.ids[int(entries[row]) : int(entries[row + 1])]
            trace["sampling_mask"] = {
                "ids": ids.tolist(), "offsets": offsets_of(per_token[span]).tolist()
            }  # fmt: skip
        out.append(trace)
    return out


def write(batches: Iterable[pa.RecordBatch], path: str, *, lossy: bool = False) -> dict[str, int]:
    """Write samples as JSON lines of traces.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        File to make.
    lossy : bool
        As in :func:`to_traces`.
    """
    counts: Counter[str] = Counter()
    with Path(path).open("w") as out:
        for batch in batches:
            for trace in to_traces(batch, lossy=lossy, counts=counts):
                out.write(json.dumps(trace) + "\n")
                counts["traces"] += 1
    return dict(counts)


def _recognizes(payload: Any) -> bool:
    mask = payload.get("sampling_mask") if isinstance(payload, Mapping) else None
    return (
        isinstance(mask, Mapping) and {"ids", "offsets"} <= mask.keys() and ("loss_mask" in payload)
    )


ADAPTER = Adapter(
    name="skycap",
    title="skycap traces, JSON",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
    writes=Writer(write=write, profile="sample", makes="JSON lines"),
)
