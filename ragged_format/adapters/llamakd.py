"""LlamaKD: fixed blocks of tokens with a teacher's top 32 for each.

``inputs`` (L,) and ``targets`` (L, 2, K): one plane holds the ids, the other their values. Row t
describes the token after t.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._build import Columns, field_of, rows_where
from ragged_format.adapters._fields import Fields, as_array
from ragged_format.adapters._offline import Position, own_heads, sequences_of, teacher_samples
from ragged_format.adapters._tables import HeadRows
from ragged_format.adapters._teacher import teacher_mode
from ragged_format.adapters.registry import Adapter, Reader
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ADAPTER", "to_samples"]


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    ids_plane: Literal[0, 1] | None = None,
    values: Literal["log_prob", "logit"] = "log_prob",
    position: Position = "predictor",
    id_prefix: str = "llamakd",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return blocks as one batch of samples.

    Parameters
    ----------
    payloads : iterable of mappings
        With ``inputs`` (L,) and ``targets`` (L, 2, K).
    vocab_size, columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    ids_plane : {0, 1}, optional
        Which plane of ``targets`` holds the ids; ``None``: the one that holds whole numbers >= 0,
        which must be one only.
    values : {"log_prob", "logit"}
        What the other plane holds.
    position : {"predictor", "own"}
        Whether row t is of the token after t, or of token t.
    id_prefix : str
        Samples without ``sample_id`` are named ``<prefix>/<number in this call>``.
    report : ConversionReport or mutable mapping, optional
        Receives the counts; the last row of a block, which predicts no token of it, is dropped.

    Raises
    ------
    ConversionError
        ``RF-A006`` another shape, ``RF-A011`` planes that cannot be told apart, ``RF-A005``,
        ``RF-A007`` impossible ids or values.

    Examples
    --------
    >>> block = {"inputs": [5, 6], "targets": [[[6, 7], [-0.5, -1.5]], [[1, 2], [-0.5, -1.5]]]}
    >>> to_samples([block], vocab_size=10).column("teacher_topk_ids").to_pylist()
    [[6, 7]]
    """
    counts = ConversionReport()
    items = list(records_of(payloads))
    fields = Fields(items, rows_where(items))
    sequences = sequences_of(fields, id_prefix, tokens="inputs")
    parts = []
    for row, length in enumerate(sequences.lengths):
        where = fields.where(row, "targets")
        planes = as_array(field_of(items[row], "targets"), where, "targets are numbers")
        if planes.ndim != 3 or planes.shape[:2] != (length, 2):
            raise ConversionError(
                "targets are (tokens, 2, K)", code="RF-A006", where=where,
                expected=f"({length}, 2, K)", got=planes.shape,
            )  # fmt: skip
        plane = ids_plane
        if plane is None:
            whole = [bool(((p >= 0) & (p == np.floor(p))).all()) for p in planes.swapaxes(0, 1)]
            if whole[0] == whole[1]:
                raise ConversionError(
                    "it is not certain which plane holds the ids", code="RF-A011", where=where,
                    expected="one plane of whole numbers", got="both" if whole[0] else "none",
                    remedy="pass ids_plane=0 or 1",
                )  # fmt: skip
            plane = 0 if whole[0] else 1
        parts.append((planes[:, plane], planes[:, 1 - plane]))
    none = np.zeros(0, np.int64)
    sizes = [np.full(len(ids), ids.shape[1], np.int64) for ids, _ in parts]
    heads = HeadRows(
        np.concatenate([*sizes, none]),
        np.concatenate([*(ids.astype(np.int64).reshape(-1) for ids, _ in parts), none]),
        np.concatenate([*(v.reshape(-1) for _, v in parts), np.zeros(0, np.float32)]),
    )
    heads, _ = own_heads(heads, sequences.offsets, position, counts)
    mode = teacher_mode("raw", logits=values == "logit")
    return teacher_samples(
        sequences, heads, mode, "targets", vocab_size=vocab_size, columns=columns, schema=schema,
        counts=counts, report=report,
    )  # fmt: skip


def _recognizes(payload: Any) -> bool:
    return isinstance(payload, Mapping) and {"inputs", "targets"} <= payload.keys()


ADAPTER = Adapter(
    name="llamakd",
    title="LlamaKD blocks, targets (L, 2, K)",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
)
