"""tinker's prompt log-probs: a teacher's ``topk_prompt_logprobs`` as heads.

Per token null or a list of (token id, log-prob), own position, the first one null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._build import Columns, field_of, rows_where
from ragged_format.adapters._fields import Fields
from ragged_format.adapters._offline import sequences_of, teacher_samples
from ragged_format.adapters._teacher import teacher_mode
from ragged_format.adapters.registry import Adapter, Reader
from ragged_format.adapters.report import ConversionReport

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ADAPTER", "to_samples"]


def to_samples(
    payloads: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "raw",
    id_prefix: str = "tinker",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return scored sequences as one batch of samples.

    Parameters
    ----------
    payloads : iterable of mappings or objects
        With ``tokens`` or ``input_ids``, ``topk_prompt_logprobs``, and, unless all tokens but the
        first are scored, ``completion_mask`` or ``weights`` of 0 and 1.
    vocab_size, columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    logprobs_mode : {"raw", "processed"}
    id_prefix : str
        Samples without ``sample_id`` are named ``<prefix>/<number in this call>``.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A005`` ids, ``RF-A006`` lengths, ``RF-A007`` log-probs.

    Examples
    --------
    >>> one = {"tokens": [5, 6], "topk_prompt_logprobs": [None, [(6, -0.5), (7, -1.5)]]}
    >>> to_samples([one], vocab_size=10).column("teacher_topk_ids").to_pylist()
    [[6, 7]]
    """
    counts = ConversionReport()
    items = list(records_of(payloads))
    fields = Fields(items, rows_where(items))
    name = "tokens" if any(field_of(item, "tokens") is not None for item in items) else "input_ids"
    sequences = sequences_of(fields, id_prefix, tokens=name, masks=("completion_mask", "weights"))
    heads, null = fields.pair_heads("topk_prompt_logprobs", sequences.lengths)
    return teacher_samples(
        sequences, heads, teacher_mode(logprobs_mode), "topk_prompt_logprobs",
        vocab_size=vocab_size, columns=columns, schema=schema, counts=counts, report=report,
        null=null,
    )  # fmt: skip


def _recognizes(payload: Any) -> bool:
    return isinstance(payload, Mapping) and "topk_prompt_logprobs" in payload


ADAPTER = Adapter(
    name="tinker",
    title="tinker, topk_prompt_logprobs",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
)
