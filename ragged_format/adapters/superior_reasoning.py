"""Superior-Reasoning sets: a teacher's log-probs of the tokens of its own answers.

A row has ``sample_uuid``, ``token_ids`` and ``logprobs``, one number per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._build import (
    Columns,
    Draft,
    check_options,
    field_of,
    rows_where,
)
from ragged_format.adapters._fields import Fields
from ragged_format.adapters._sentinels import SENTINELS, classify
from ragged_format.adapters._teacher import teacher_mode
from ragged_format.adapters._values import malformed
from ragged_format.adapters.registry import Adapter, Reader
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.profiles import standard_column
from ragged_format.rules import LOG_PROB_TOLERANCE, TargetFlag

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
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return rows as one batch of samples with ``teacher_log_probs``.

    Parameters
    ----------
    payloads : iterable of mappings
        With ``sample_uuid``, ``token_ids`` and ``logprobs``, one per token, and the context before
        them as ``prompt_token_ids`` where it is known. Without it the first token is no target
        (nothing here predicts it) and is counted.
    vocab_size, columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    logprobs_mode : {"raw", "processed"}
    report : ConversionReport or mutable mapping, optional
        Receives the counts; null, NaN and floors are dropped and the target is flagged.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A005`` ids, ``RF-A006`` lengths, ``RF-A007`` a positive value.

    Examples
    --------
    >>> row = {"sample_uuid": "u", "token_ids": [5, 6], "logprobs": [-0.25, -0.5]}
    >>> to_samples([row], vocab_size=10).column("teacher_log_probs").to_pylist()
    [[-0.5]]
    """
    size = check_options(vocab_size, columns, schema)
    counts = ConversionReport()
    items = list(records_of(payloads))
    counts.responses.taken = counts.responses.stored = len(items)
    fields = Fields(items, rows_where(items))
    answers = fields.ids("token_ids")
    prompts = [np.zeros(0, np.int64)] * len(items)
    if any(field_of(item, "prompt_token_ids") is not None for item in items):
        prompts = fields.ids("prompt_token_ids")
    ids = [np.concatenate(pair) for pair in zip(prompts, answers, strict=True)]
    masks = [
        np.arange(len(whole)) >= len(prompt) for whole, prompt in zip(ids, prompts, strict=True)
    ]
    values, null = fields.floats("logprobs", [len(part) for part in answers])
    draft = Draft(ids, masks, fields.wheres, size, counts)
    names = [field_of(item, "sample_uuid") for item in items]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name:
            malformed("a row has its id", fields.where(number, "sample_uuid"), "a text", name)
    draft.records["sample_id"] = names
    # The first token of an answer without context is no target.
    kept = draft.scored[np.concatenate([*masks, np.zeros(0, bool)])]
    ledger = counts.log_probs
    ledger.taken += len(values)
    ledger.drop("first_token", int(np.count_nonzero(~kept)))
    values, kinds = values[kept], classify(values, null)[kept]
    if (values > LOG_PROB_TOLERANCE).any():
        first = int(np.argmax(values > LOG_PROB_TOLERANCE))
        raise ConversionError(
            "a log-prob is positive", code="RF-A007", where=draft.place("logprobs")(first),
            expected=f"<= {LOG_PROB_TOLERANCE}", got=float(values[first]),
        )  # fmt: skip
    for number, kind in enumerate(SENTINELS[1:], 1):
        ledger.drop(f"log_prob_{kind}", int(np.count_nonzero(kinds == number)))
    ledger.stored += int(np.count_nonzero(kinds == 0))
    draft.targets.flags[kinds != 0] |= TargetFlag.TEACHER_MISSING
    column = replace(standard_column("teacher_log_probs"), log_prob=teacher_mode(logprobs_mode))
    stored = np.where(kinds == 0, values, 0.0).astype(np.float32)
    draft.add("teacher_log_probs", stored, column)
    batch = draft.finish(columns, schema)
    counts.add_to(report)
    return batch


def _recognizes(payload: Any) -> bool:
    return (
        isinstance(payload, Mapping) and {"sample_uuid", "token_ids", "logprobs"} <= payload.keys()
    )


ADAPTER = Adapter(
    name="superior_reasoning",
    title="Superior-Reasoning rows, a teacher's log-probs of its answers",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
)
