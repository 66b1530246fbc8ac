"""Prompts that a teacher scored: their tokens are the targets, its heads the teacher's columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from ragged_format.adapters._choice import Choice
from ragged_format.adapters._dicts import as_flat_log_probs, read_dicts, with_own
from ragged_format.adapters._records import in_record, whole
from ragged_format.adapters._values import Entries, LogProbs
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, flat, to_list
from ragged_format.log_prob import LogProb
from ragged_format.parse import parse_schema
from ragged_format.profiles import sample_schema, standard_column
from ragged_format.rules import TargetFlag

if TYPE_CHECKING:
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.schema import Column

__all__ = [
    "START", "TARGETS", "Targeted", "check_targets", "inner_columns", "inner_schema",
    "prompt_choice", "read_prompt", "scored_modes", "to_teacher",
]  # fmt: skip

Targeted = Literal["generated", "prompt"]
TARGETS = ("generated", "prompt")

START = "completion_start"
_OUTER = {
    "topk_counts": "teacher_topk_counts",
    "topk_ids": "teacher_topk_ids",
    "topk_log_probs": "teacher_topk_log_probs",
    "rollout_log_probs": "teacher_log_probs",
}
_INNER = {outer: inner for inner, outer in _OUTER.items()}
_MISSING = int(TargetFlag.HEAD_MISSING | TargetFlag.LOG_PROB_MISSING)


def check_targets(targets: str) -> bool:
    """Return whether the targets are the tokens of a scored prompt; raises for another word."""
    if targets not in TARGETS:
        raise ConversionError(
            "targets names what the targets are", code="RF-A011", expected=", ".join(TARGETS),
            got=targets,
        )  # fmt: skip
    return targets == "prompt"


def scored_modes(mode: str) -> dict[str, LogProb]:
    """Return the modes of a prompt's log-probs: no set bounds them, so over the vocabulary."""
    own = LogProb("raw" if mode == "raw" else "processed", "vocabulary")
    return {"rollout_log_probs": own, "topk_log_probs": own}


def inner_columns(columns: Iterable[str | Column] | None) -> list[str | Column] | None:
    """Return columns asked for, those of the teacher under the names of the sampler's."""
    return None if columns is None else [_renamed(column, _INNER) for column in columns]


def inner_schema(schema: pa.Schema | None) -> pa.Schema | None:
    """Return a schema with the teacher's columns under the names of the sampler's."""
    return None if schema is None else _rename(schema, _INNER)


def _renamed(column: str | Column, names: Mapping[str, str]) -> str | Column:
    if isinstance(column, str):
        return names.get(column, column)
    if column.name not in names:
        return column
    own = standard_column(names[column.name])
    return replace(
        own, type=column.type, log_prob=column.log_prob, head_kind=column.head_kind,
        approximate=column.approximate,
    )  # fmt: skip


def _rename(schema: pa.Schema, names: Mapping[str, str]) -> pa.Schema:
    parsed = parse_schema(schema)
    columns = [_renamed(column, names) for column in parsed]
    return sample_schema(vocab_size=parsed.vocab_size, columns=columns)


def to_teacher(batch: pa.RecordBatch, schema: pa.Schema | None) -> pa.RecordBatch:
    """Return a batch with the sampler's columns as the teacher's; lists are not copied.

    Parameters
    ----------
    batch : RecordBatch
    schema : pyarrow.Schema, optional
        That was asked for. ``None``: the columns of `batch`.
    """
    wanted = _rename(batch.schema, _OUTER) if schema is None else schema
    parsed = parse_schema(wanted)
    arrays = []
    for name in wanted.names:
        array = batch.column(_INNER.get(name, name))
        if name == "target_flags":
            values, offsets = flat(array)
            flags = np.asarray(values).astype(np.int64)
            teacher = np.where((flags & _MISSING) != 0, int(TargetFlag.TEACHER_MISSING), 0)
            bits = (flags & ~_MISSING) | teacher
            array = to_list(bits.astype(np.uint8), offsets, parsed[name])
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def read_prompt(
    sample_id: str,
    where: Where,
    record: Mapping[str, Any],
    ids: Int64,
    rows: Any,
    counts: ConversionReport,
) -> Choice:
    """Return a prompt as one choice, scored by vLLM's ``prompt_logprobs``.

    Parameters
    ----------
    sample_id, where, record, ids, counts : see :func:`prompt_choice`
    rows : list or object
        A mapping from ids per token, null for the first one; or a ``FlatLogprobs``.

    Raises
    ------
    ConversionError
        The prompt was not scored (``RF-A007``); as :func:`prompt_choice`.
    """
    place = partial(in_record, where, "prompt_logprobs")
    if rows is None:
        raise ConversionError(
            "the prompt was not scored", code="RF-A007", where=place(),
            expected="a list per prompt token", got=None,
            remedy="set prompt_logprobs in the request (and max_tokens 1)",
        )  # fmt: skip
    if hasattr(rows, "start_indices"):
        scored = as_flat_log_probs(ids, rows, place)
    else:
        lengths, entries = read_dicts(rows, place)
        if len(lengths) != len(ids):
            raise _other_length(place(), len(ids), len(lengths))
        scored = with_own(ids, lengths, entries)
    return prompt_choice(sample_id, where, record, ids, scored, counts)


def _other_length(where: Where, expected: int, got: int) -> ConversionError:
    return ConversionError(
        "a scored prompt has a list per token, its first one null", code="RF-A006", where=where,
        expected=expected, got=got,
    )  # fmt: skip


def prompt_choice(
    sample_id: str,
    where: Where,
    record: Mapping[str, Any],
    ids: Int64,
    scored: LogProbs,
    counts: ConversionReport,
) -> Choice:
    """Return a scored prompt: context up to the record's ``completion_start``, targets after it.

    Parameters
    ----------
    sample_id : str
    where : Where
    record : mapping
        ``completion_start`` is the position of the first target; 1 without it.
    ids : (l,) int64
        Tokens of the prompt.
    scored : LogProbs
        Of the same tokens, by own position.
    counts : ConversionReport
        Counts the lists of context tokens as dropped.

    Raises
    ------
    ConversionError
        There is no log-prob list for each token (``RF-A006``), or the start is outside
        (``RF-A002``).
    """
    if len(scored.values) != len(ids):
        raise _other_length(in_record(where, "prompt_logprobs"), len(ids), len(scored.values))
    start = whole(record.get(START, 1))
    if start is None or not 1 <= start <= max(len(ids), 1):
        raise ConversionError(
            "completion_start is a position after the first", code="RF-A002",
            where=in_record(where, START), expected=f"1 <= start <= {len(ids)}",
            got=record.get(START),
        )  # fmt: skip
    out = Choice(sample_id, 0, where, ids[:start], ids[start:])
    first, own = int(scored.counts[:start].sum()), scored.entries
    counts.head_entries.taken += first
    counts.head_entries.drop("context", first)
    given = int(np.count_nonzero(~scored.null[:start]))
    counts.log_probs.taken += given
    counts.log_probs.drop("context", given)
    out.log_probs = LogProbs(
        ids[start:], scored.values[start:], scored.null[start:], scored.counts[start:],
        Entries(own.ids[first:], own.log_probs[first:], own.null[first:], own.ranks[first:]),
        scored.text_entries,
    )  # fmt: skip
    out.log_probs_expected = True
    out.lists_sampled = False
    out.prefix, out.names = "", {"logprobs": "prompt_logprobs"}
    return out
