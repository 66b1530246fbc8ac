"""verl's on-policy distillation batches: a teacher's heads as nested tensors, in and out.

``teacher_ids`` and ``teacher_logprobs`` are jagged ``(B, [S], K)`` over prompt and response, the
ragged axis first. A batch of one sample, or of samples of equal length, is the same as any other:
it is read dense or nested, and always written nested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._batches import rows_of, same_lengths
from ragged_format.adapters._build import Columns, field_of
from ragged_format.adapters._export import Samples, refuse_loss
from ragged_format.adapters._offline import Position, Sequences, own_heads, teacher_samples
from ragged_format.adapters._tables import HeadRows, pad_rows
from ragged_format.adapters._teacher import shorter_heads, stored_heads, teacher_mode
from ragged_format.adapters._values import malformed
from ragged_format.adapters.positions import own_to_predictor
from ragged_format.adapters.registry import Adapter, Reader
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, MissingDependencyError, Where
from ragged_format.log_prob import LOG_PROB_FILL

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

__all__ = ["ADAPTER", "to_nested", "to_samples"]

_MASKS = ("loss_mask", "completion_mask", "response_mask")


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "raw",
    teacher_temperature: float | None = None,
    position: Position = "own",
    id_prefix: str = "verl",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return verl batches as one batch of samples.

    Guarantees: every entry is stored or counted in `report`; slots that :func:`to_nested` filled
    (log-prob -30000.0) are padding.

    Parameters
    ----------
    payloads : iterable of mappings
        Each a batch: ``input_ids`` (B, [S]), ``teacher_ids`` and ``teacher_logprobs`` (B, [S], K),
        and ``loss_mask``, ``completion_mask`` or ``response_mask`` (B, [S]), 1 on scored tokens.
        Nested tensors, dense ones, arrays, or lists of rows.
    vocab_size, columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    logprobs_mode, teacher_temperature
        Of the teacher.
    position : {"own", "predictor"}
        Whether row p is of token p (a teacher's ``prompt_logprobs``), or of the token after it.
    id_prefix : str
        Samples are named ``<prefix>/<number in this call>`` unless the batch has ``sample_id``.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A006`` another ragged axis or lengths that disagree,
        ``RF-A005``, ``RF-A007`` impossible ids or log-probs.

    Examples
    --------
    >>> batch = {
    ...     "input_ids": [[5, 6]],
    ...     "loss_mask": [[0, 1]],
    ...     "teacher_ids": [[[0, 0], [6, 7]]],
    ...     "teacher_logprobs": [[[-30000.0, -30000.0], [-0.5, -1.5]]],
    ... }
    >>> to_samples([batch], vocab_size=10).column("teacher_topk_ids").to_pylist()
    [[6, 7]]
    """
    counts = ConversionReport()
    mode = teacher_mode(logprobs_mode, teacher_temperature)
    sequences = Sequences([], [], [], {"sample_id": []})
    wheres: list[Where] = []
    parts = []
    for number, payload in enumerate(records_of(payloads)):
        parts += _batch(payload, Where(row=number), sequences, wheres, id_prefix)
    sequences.wheres = wheres
    heads, _ = own_heads(_joined(parts), sequences.offsets, position, counts)
    return teacher_samples(
        sequences, heads, mode, "teacher_ids", vocab_size=vocab_size, columns=columns,
        schema=schema, counts=counts, report=report,
    )  # fmt: skip


def _batch(
    payload: Any, where: Where, sequences: Sequences, wheres: list[Where], id_prefix: str
) -> list[HeadRows]:
    def field(name: str) -> list[Any]:
        value = field_of(payload, name)
        if value is None:
            malformed("a batch has this field", Where(row=where.row, column=name), name, None)
        return rows_of(value, Where(row=where.row, column=name))

    ids = field("input_ids")
    lengths = [len(row) for row in ids]
    mask_name = next((m for m in _MASKS if field_of(payload, m) is not None), _MASKS[0])
    fields = {name: field(name) for name in (mask_name, "teacher_ids", "teacher_logprobs")}
    for name, rows in fields.items():
        same_lengths(rows, lengths, Where(row=where.row, column=name))
    out = []
    for tokens, values in zip(fields["teacher_ids"], fields["teacher_logprobs"], strict=True):
        if tokens.ndim != 2 or tokens.shape != values.shape:
            raise ConversionError(
                "a teacher's rows are (S, K)", code="RF-A006",
                where=Where(row=where.row, column="teacher_ids"), expected="two axes, both alike",
                got=f"{tokens.shape} and {values.shape}",
            )  # fmt: skip
        filled = values != LOG_PROB_FILL
        out.append(HeadRows(filled.sum(axis=1, dtype=np.int64), tokens[filled], values[filled]))
    names = field_of(payload, "sample_id")
    first = len(sequences.ids)
    sequences.records["sample_id"] += list(
        [f"{id_prefix}/{first + i}" for i in range(len(ids))] if names is None else names
    )
    sequences.ids += [row.astype(np.int64) for row in ids]
    sequences.masks += [row != 0 for row in fields[mask_name]]
    wheres += [Where(row=first + i) for i in range(len(ids))]
    return out


def _joined(parts: list[HeadRows]) -> HeadRows:
    none = np.zeros(0, np.int64)
    return HeadRows(
        np.concatenate([*(part.counts for part in parts), none]),
        np.concatenate([*(part.ids.astype(np.int64) for part in parts), none]),
        np.concatenate([*(part.log_probs for part in parts), np.zeros(0, np.float32)]),
    )


def to_nested(
    samples: pa.RecordBatch,
    *,
    k: int | None = None,
    position: Position = "own",
    fill_id: int = 0,
    fill_log_prob: float = LOG_PROB_FILL,
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return samples as jagged nested tensors, whatever their number and lengths.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample`` with ``teacher_topk_*``, validated.
    k : int, optional
        K; ``None``: the longest head of the batch.
    position : {"own", "predictor"}
        Where a head stands: at its token, or at the one before.
    fill_id : int
        Id of unused slots; trainers gather logits with it, so that it must be one.
    fill_log_prob : float
        Finite, so that masked positions cannot spoil a sum or a gradient.
    lossy : bool
        Cut longer heads and leave out columns without a place, instead of refusing.
    counts : Counter, optional
        Receives what was left out.

    Returns
    -------
    dict of str to torch.Tensor
        ``input_ids``, ``loss_mask`` (B, [S]) int64; ``teacher_ids`` (B, [S], K) int64;
        ``teacher_logprobs`` (B, [S], K) float32. The ragged axis is 1 in all of them.

    Raises
    ------
    ConversionError
        Something would be lost (``RF-A001``).
    MissingDependencyError
        PyTorch is not installed.
    """
    try:
        import torch
    except ImportError as err:
        raise MissingDependencyError(
            "nested tensors need PyTorch", expected="torch", got=str(err),
            remedy="pip install ragged-format[torch]",
        ) from err  # fmt: skip
    carried = {
        "input_ids", "completion_mask", "teacher_topk_counts", "teacher_topk_ids",
        "teacher_topk_log_probs", "teacher_log_probs", "target_flags",
    }  # fmt: skip
    refuse_loss(samples, carried, to="verl", lossy=lossy, counts=counts)
    parts = Samples(samples)
    heads, width = shorter_heads(stored_heads(parts), k, parts, lossy=lossy, counts=counts)
    per_token = parts.token_counts(heads.counts)
    if position == "predictor":
        per_token = own_to_predictor(per_token, parts.offsets, fill=0)
    ids = pad_rows(heads.ids, per_token, width, fill_id, np.int64)
    log_probs = pad_rows(heads.log_probs, per_token, width, fill_log_prob, np.float32)
    offsets = torch.from_numpy(parts.offsets.copy())
    flat = {
        "input_ids": parts.ids.astype(np.int64), "loss_mask": parts.mask.astype(np.int64),
        "teacher_ids": ids, "teacher_logprobs": log_probs,
    }  # fmt: skip
    return {
        name: torch.nested.nested_tensor_from_jagged(
            torch.from_numpy(values), offsets, jagged_dim=1
        )
        for name, values in flat.items()
    }


ADAPTER = Adapter(
    name="verl",
    title="verl on-policy distillation, jagged (B, [S], K)",
    reads=Reader(to_samples=to_samples),
)
