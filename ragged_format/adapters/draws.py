"""Sparse random draws of a teacher's distribution with weights, in and out.

Truncated heads are biased; ids that are drawn from the teacher and kept with their counts or
importance weights are not (Sparse Logit Sampling, arXiv 2503.16870). Such heads are of kind
``draws``: ids in the order drawn, repeats allowed, each with a positive weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._build import Columns, is_given, rows_where
from ragged_format.adapters._export import Samples, head_of, refuse_loss
from ragged_format.adapters._fields import Fields
from ragged_format.adapters._npz import write_npz
from ragged_format.adapters._offline import Position, own_heads, sequences_of, teacher_samples
from ragged_format.adapters._tables import HeadRows, check_ids, pad_rows
from ragged_format.adapters._teacher import teacher_mode
from ragged_format.adapters.positions import own_to_predictor
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ADAPTER", "to_rows", "to_samples", "write"]


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "raw",
    position: Position = "own",
    id_prefix: str = "draws",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return sequences with draws as one batch of samples.

    Parameters
    ----------
    payloads : iterable of mappings or objects
        With ``input_ids``; ``draw_ids`` and ``draw_weights`` (or ``draw_counts``), each (L, S) with
        ids padded by -1, or lists per token; ``draw_log_probs`` likewise where known; and, unless
        all tokens but the first are scored, ``completion_mask`` or ``labels``.
    vocab_size, columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    logprobs_mode : {"raw", "processed"}
        Of ``draw_log_probs``.
    position : {"own", "predictor"}
        Whether row t is of token t, or of the token after it.
    id_prefix : str
        Samples without ``sample_id`` are named ``<prefix>/<number in this call>``.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        ``RF-A002`` a weight that is not positive and finite, ``RF-A005`` ids, ``RF-A006`` lengths.

    Examples
    --------
    >>> one = {"input_ids": [5, 6], "draw_ids": [[], [6, 7, 6]], "draw_counts": [[], [2, 1, 1]]}
    >>> batch = to_samples([one], vocab_size=10)
    >>> batch.column("teacher_topk_ids").to_pylist()
    [[6, 7, 6]]
    >>> batch.column("teacher_topk_weights").to_pylist()
    [[2.0, 1.0, 1.0]]
    """
    counts = ConversionReport()
    items = list(records_of(payloads))
    fields = Fields(items, rows_where(items))
    sequences = sequences_of(fields, id_prefix, masks=("completion_mask", "labels"))
    lengths = sequences.lengths
    ids, sizes, _ = fields.id_rows("draw_ids", lengths, "draw_sizes")
    weights_name = "draw_weights" if is_given(items, "draw_weights") else "draw_counts"
    weights = fields.parallel(weights_name, lengths, sizes)
    bad = ~(np.isfinite(weights) & (weights > 0))
    if bad.any():
        raise ConversionError(
            "a draw has a positive weight", code="RF-A002", where=Where(column=weights_name),
            expected="> 0, finite", got=float(weights[int(np.argmax(bad))]),
        )  # fmt: skip
    log_probs = np.zeros(0, np.float32)
    if is_given(items, "draw_log_probs"):
        log_probs = fields.parallel("draw_log_probs", lengths, sizes).astype(np.float32)
        if not np.isfinite(log_probs).all():
            raise ConversionError(
                "a draw has a finite log-prob: it was drawn", code="RF-A007",
                where=Where(column="draw_log_probs"), expected="finite", got="NaN or infinite",
            )  # fmt: skip
    heads = HeadRows(sizes, ids, log_probs if len(log_probs) else weights, weights)
    heads, _ = own_heads(heads, sequences.offsets, position, counts)
    if vocab_size is not None:
        check_ids(heads.ids, heads.counts, vocab_size, lambda _: Where(column="draw_ids"))
    return teacher_samples(
        sequences, heads, teacher_mode(logprobs_mode), "draw_ids", vocab_size=vocab_size,
        columns=columns, schema=schema, counts=counts, report=report, head_kind="draws",
        has_log_probs=bool(len(log_probs)),
    )  # fmt: skip


def to_rows(
    samples: pa.RecordBatch,
    *,
    position: Position = "own",
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> list[dict[str, npt.NDArray[Any]]]:
    """Return samples with draws as arrays, one mapping per sample, the inverse of `to_samples`.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample`` whose ``teacher_topk`` heads are draws.
    position : {"own", "predictor"}
    lossy : bool
        Leave out columns without a place instead of refusing.
    counts : Counter, optional
        Receives what was left out.

    Returns
    -------
    list of dict
        ``input_ids``, ``completion_mask`` (L,) int64; ``draw_ids`` (L, S) int64 padded with -1;
        ``draw_weights`` (L, S) float32 padded with 0; ``draw_log_probs`` where known, padded with
        -inf.

    Raises
    ------
    ConversionError
        The heads are no draws (``RF-A001``), or something would be lost.
    """
    carried = {
        "input_ids", "completion_mask", "teacher_topk_counts", "teacher_topk_ids",
        "teacher_topk_log_probs", "teacher_topk_weights", "target_flags",
    }  # fmt: skip
    refuse_loss(samples, carried, to="a row of draws", lossy=lossy, counts=counts)
    parts = Samples(samples)
    heads = head_of(samples, "teacher_topk")
    if heads is None or heads.weights is None:
        raise ConversionError(
            "the teacher's heads are no draws", where=Where(column="teacher_topk_weights"),
            expected="heads of kind 'draws' with weights", got=", ".join(samples.schema.names),
        )  # fmt: skip
    width = int(heads.counts.max(initial=0))
    per_token = parts.token_counts(heads.counts)
    if position == "predictor":
        per_token = own_to_predictor(per_token, parts.offsets, fill=0)
    tables = {
        "draw_ids": pad_rows(heads.ids, per_token, width, -1, np.int64),
        "draw_weights": pad_rows(heads.weights, per_token, width, 0, np.float32),
    }
    if len(heads.log_probs) == len(heads.ids):
        tables["draw_log_probs"] = pad_rows(
            heads.log_probs, per_token, width, -np.inf, np.float32
        )  # fmt: skip
    out = []
    for row in range(len(parts)):
        span = slice(int(parts.offsets[row]), int(parts.offsets[row + 1]))
        out.append({
            "input_ids": parts.ids[span].astype(np.int64),
            "completion_mask": parts.mask[span].astype(np.int64),
            **{name: table[span] for name, table in tables.items()},
        })  # fmt: skip
    return out


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    position: Position = "own",
    lossy: bool = False,
) -> dict[str, int]:
    """Write samples as one ``.npz`` file each, with the keys of :func:`to_rows`.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        Directory to make.
    position, lossy
        As in :func:`to_rows`.
    """
    counts: Counter[str] = Counter()
    parts = (
        row
        for batch in batches
        for row in to_rows(batch, position=position, lossy=lossy, counts=counts)
    )
    return {"samples": write_npz(path, "sample", parts), **counts}


def _recognizes(payload: Any) -> bool:
    return isinstance(payload, Mapping) and "draw_ids" in payload


ADAPTER = Adapter(
    name="draws",
    title="Random draws of a teacher with weights",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
    writes=Writer(write=write, profile="sample", makes="a directory of one .npz per sample"),
)
