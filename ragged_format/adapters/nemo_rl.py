"""NeMo-RL's distillation batches: a teacher's top-k as dense (B, S, k) tensors, in and out.

Row t of a sample holds the teacher's logits at position t, which predict token t + 1. Positions
without a head are zeros, ids and logits; every value is finite, masked ones too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._batches import rows_of, same_lengths
from ragged_format.adapters._build import Columns, field_of
from ragged_format.adapters._export import Samples, refuse_loss
from ragged_format.adapters._fields import as_array
from ragged_format.adapters._offline import Position, Sequences, own_heads, teacher_samples
from ragged_format.adapters._tables import HeadRows, pad_rows
from ragged_format.adapters._teacher import shorter_heads, stored_heads, teacher_mode
from ragged_format.adapters._values import malformed
from ragged_format.adapters.positions import own_to_predictor
from ragged_format.adapters.registry import Adapter, Reader
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where
from ragged_format.log_prob import LOG_PROB_FILL

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ADAPTER", "to_batch", "to_samples"]


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    values: Literal["logit", "log_prob"] = "logit",
    position: Position = "predictor",
    id_prefix: str = "nemo_rl",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return NeMo-RL batches as one batch of samples.

    Parameters
    ----------
    payloads : iterable of mappings
        Each a batch: ``input_ids`` (B, S), ``input_lengths`` (B,), ``token_mask`` (B, S),
        ``teacher_topk_indices`` and ``teacher_topk_logits`` (B, S, k). Rows of zeros only are no
        heads; slots that :func:`to_batch` filled (-30000.0) are padding.
    vocab_size, columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    values : {"logit", "log_prob"}
        What ``teacher_topk_logits`` holds, for the column's metadata.
    position : {"predictor", "own"}
        Whether row t predicts token t + 1, or is of token t.
    id_prefix : str
        Samples are named ``<prefix>/<number in this call>`` unless the batch has ``sample_id``.
    report : ConversionReport or mutable mapping, optional
        Receives the counts. Values of -inf (a filter of the trainer's own) are dropped and counted.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A005`` ids, ``RF-A006`` shapes that disagree.

    Examples
    --------
    >>> batch = {
    ...     "input_ids": [[5, 6, 0]],
    ...     "input_lengths": [2],
    ...     "token_mask": [[0, 1, 0]],
    ...     "teacher_topk_indices": [[[6, 7], [0, 0], [0, 0]]],
    ...     "teacher_topk_logits": [[[3.5, 1.25], [0.0, 0.0], [0.0, 0.0]]],
    ... }
    >>> got = to_samples([batch], vocab_size=10)
    >>> got.column("input_ids").to_pylist(), got.column("teacher_topk_ids").to_pylist()
    ([[5, 6]], [[6, 7]])
    """
    counts = ConversionReport()
    mode = teacher_mode("raw", logits=values == "logit")
    sequences = Sequences([], [], [], {"sample_id": []})
    parts: list[HeadRows] = []
    for number, payload in enumerate(records_of(payloads)):
        parts += _batch(payload, number, sequences, id_prefix)
    sequences.wheres = [Where(row=row) for row in range(len(sequences.ids))]
    none = np.zeros(0, np.int64)
    joined = HeadRows(
        np.concatenate([*(part.counts for part in parts), none]),
        np.concatenate([*(part.ids for part in parts), none]),
        np.concatenate([*(part.log_probs for part in parts), np.zeros(0, np.float32)]),
    )
    heads, _ = own_heads(joined, sequences.offsets, position, counts)
    return teacher_samples(
        sequences, heads, mode, "teacher_topk_indices", vocab_size=vocab_size, columns=columns,
        schema=schema, counts=counts, report=report,
    )  # fmt: skip


def _batch(payload: Any, number: int, sequences: Sequences, id_prefix: str) -> list[HeadRows]:
    def field(name: str) -> Any:
        value = field_of(payload, name)
        where = Where(row=number, column=name)
        if value is None:
            malformed("a batch has this field", where, name, None)
        return as_array(value, where, f"{name} is a tensor of numbers")

    lengths = field("input_lengths").tolist()
    ids = rows_of(field("input_ids"), Where(row=number, column="input_ids"), lengths)
    masks = rows_of(field("token_mask"), Where(row=number, column="token_mask"), lengths)
    same_lengths(ids, lengths, Where(row=number, column="input_ids"))
    where = Where(row=number, column="teacher_topk_indices")
    indices, logits = field("teacher_topk_indices"), field("teacher_topk_logits")
    if indices.ndim != 3 or indices.shape != logits.shape:
        raise ConversionError(
            "indices and logits are (B, S, k)", code="RF-A006", where=where,
            expected="three axes, both alike", got=f"{indices.shape} and {logits.shape}",
        )  # fmt: skip
    out = []
    for tokens, values in zip(
        rows_of(indices, where, lengths), rows_of(logits, where, lengths), strict=True
    ):
        filled = values != LOG_PROB_FILL
        # One entry alone may be id 0 at logit 0; k ids are different ones.
        if tokens.shape[1] > 1:
            filled &= ((tokens != 0) | (values != 0)).any(axis=1, keepdims=True)
        counts = filled.sum(axis=1, dtype=np.int64)
        out.append(HeadRows(counts, tokens[filled].astype(np.int64), values[filled]))
    first = len(sequences.ids)
    names = field_of(payload, "sample_id")
    sequences.records["sample_id"] += list(
        [f"{id_prefix}/{first + i}" for i in range(len(ids))] if names is None else names
    )
    sequences.ids += [row.astype(np.int64) for row in ids]
    sequences.masks += [row != 0 for row in masks]
    return out


def to_batch(
    samples: pa.RecordBatch,
    *,
    k: int | None = None,
    position: Position = "predictor",
    pad_token_id: int = 0,
    multiple_of: int = 1,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Return samples as one dense batch, padded on the right, every value finite.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample`` with ``teacher_topk_*``, validated.
    k : int, optional
        ``None``: the longest head of the batch.
    position : {"predictor", "own"}
    pad_token_id : int
    multiple_of : int
        The length is rounded up to a multiple of it; all tensors have the same.
    lossy : bool
        Cut longer heads and leave out columns without a place, instead of refusing.
    counts : Counter, optional
        Receives what was left out.

    Returns
    -------
    dict of str to ndarray
        ``input_ids``, ``token_mask`` (B, S) int64, ``input_lengths`` (B,) int64,
        ``teacher_topk_indices`` (B, S, k) int64 and ``teacher_topk_logits`` (B, S, k) float32:
        zeros where there is no head, and -30000.0 in unused slots of one.

    Raises
    ------
    ConversionError
        Something would be lost (``RF-A001``).
    """
    carried = {
        "input_ids", "completion_mask", "teacher_topk_counts", "teacher_topk_ids",
        "teacher_topk_log_probs", "teacher_log_probs", "target_flags",
    }  # fmt: skip
    refuse_loss(samples, carried, to="NeMo-RL", lossy=lossy, counts=counts)
    parts = Samples(samples)
    heads, width = shorter_heads(stored_heads(parts), k, parts, lossy=lossy, counts=counts)
    per_token = parts.token_counts(heads.counts)
    if position == "predictor":
        per_token = own_to_predictor(per_token, parts.offsets, fill=0)
    lengths = np.diff(parts.offsets)
    longest = -(-int(lengths.max(initial=0)) // multiple_of) * multiple_of
    inside = np.arange(longest) < lengths[:, None]
    out: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.full(inside.shape, pad_token_id, np.int64),
        "token_mask": np.zeros(inside.shape, np.int64),
        "input_lengths": lengths,
        "teacher_topk_indices": np.zeros((*inside.shape, width), np.int64),
        "teacher_topk_logits": np.zeros((*inside.shape, width), np.float32),
    }
    out["input_ids"][inside] = parts.ids
    out["token_mask"][inside] = parts.mask
    out["teacher_topk_indices"][inside] = pad_rows(heads.ids, per_token, width, 0, np.int64)
    values = pad_rows(heads.log_probs, per_token, width, LOG_PROB_FILL, np.float32)
    values[per_token == 0] = 0
    out["teacher_topk_logits"][inside] = values
    return out


ADAPTER = Adapter(
    name="nemo_rl",
    title="NeMo-RL distillation, dense (B, S, k)",
    reads=Reader(to_samples=to_samples),
)
