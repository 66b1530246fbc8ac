"""Choices of a call as one record batch: policies applied, everything counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.adapters._columns import (
    ALWAYS,
    FROM_RECORD,
    HEAD,
    ROUTED_EXPERTS,
    Options,
)
from ragged_format.adapters._experts import experts_shape, place_experts
from ragged_format.adapters._readings import (
    NOT_WANTED,
    Arrays,
    Sampled,
    check_singletons,
    read_heads_into,
    read_log_probs,
    read_sets,
)
from ragged_format.adapters._sentinels import SENTINELS
from ragged_format.adapters._support import (
    REASONS,
    Support,
)
from ragged_format.adapters._targets import Targets, place_of
from ragged_format.adapters._values import malformed
from ragged_format.adapters._versions import UNKNOWN_VERSION, read_versions
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, offsets_of, segment_sums, to_list
from ragged_format.ragged import select, take
from ragged_format.rules import TargetFlag
from ragged_format.schema import RECORD, Column, RaggedSchema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragged_format.adapters._choice import Choice
    from ragged_format.adapters._columns import Wanted
    from ragged_format.adapters.report import ConversionReport, Ledger

__all__ = ["assemble"]

_FLAG_NAMES = {
    TargetFlag.SUPPORT_MISSING: "support_missing",
    TargetFlag.SUPPORT_OVERFLOW: "support_overflow",
    TargetFlag.LOG_PROB_MISSING: "log_prob_missing",
    TargetFlag.HEAD_MISSING: "head_missing",
}
_NO_SUPPORT = int(TargetFlag.SUPPORT_MISSING | TargetFlag.SUPPORT_OVERFLOW)


def assemble(
    choices: Sequence[Choice], options: Options, report: ConversionReport
) -> pa.RecordBatch:
    """Return one record per choice, counted in `report`.

    Parameters
    ----------
    choices : sequence of Choice
        Lengths of their fields agree (the reader of the response checked).
    options : Options
        Of the call.
    report : ConversionReport
        Its ledgers grow.

    Raises
    ------
    ConversionError
        Values contradict each other, or a policy says ``error``.
    """
    _check_unique(choices)
    wanted = options.wanted(choices)
    targets = Targets(choices)
    arrays: Arrays = {}
    _place_tokens(choices, options.vocab_size, arrays)
    support = read_sets(targets, wanted, arrays)
    sampled = read_log_probs(targets, wanted, arrays)
    if support is not None and options.mode.mode == "processed":
        check_singletons(choices, support, sampled)
    read_heads_into(targets, wanted, arrays, report)
    targets.decide()
    versions = read_versions(choices, options.policy_version, report)
    shape = experts_shape(choices) if ROUTED_EXPERTS in wanted else None
    schema = wanted.schema(
        flagged=bool(targets.flags[targets.kept].any()),
        mixed_versions=versions.is_mixed,
        experts=shape,
    )
    _place_further(choices, wanted, arrays)
    arrays["target_flags"] = targets.flags
    arrays["policy_versions"] = _target_versions(choices, schema, versions.by_target)
    if ROUTED_EXPERTS in schema:
        arrays[ROUTED_EXPERTS] = _experts(choices, schema, shape, report)
    batch = _batch(choices, schema, arrays, targets, versions.oldest)

    for name in ALWAYS:
        if name in schema and name in options.always:
            report.noted[f"{name}_unknown"] += batch.column(name).null_count
    _count(targets, choices, schema, report)
    _count_sets(targets, support, report)
    _count_log_probs(targets, sampled, schema, report)
    if HEAD[0] in arrays:
        targets.count(report.head_entries, arrays[HEAD[0]])
    if not targets.kept.all():
        batch = select(batch, "target", targets.kept)
    if not targets.choice_kept.all():
        batch = take(batch, np.flatnonzero(targets.choice_kept))
    return batch


def _check_unique(choices: Sequence[Choice]) -> None:
    seen: dict[str, Choice] = {}
    for choice in choices:
        first = seen.setdefault(choice.sample_id, choice)
        if first is not choice:
            raise ConversionError(
                "two choices have the same request id and index", code="RF-A010",
                where=choice.where, expected="unique request ids",
                got=f"{choice.sample_id!r}, also in {first.where}",
                remedy="convert each response once, and send distinct request ids to the engine",
            )  # fmt: skip


def _target_versions(choices: Sequence[Choice], schema: RaggedSchema, by_target: Int64) -> Int64:
    if "policy_versions" in schema and (by_target == UNKNOWN_VERSION).any():
        first = int(np.argmax(by_target == UNKNOWN_VERSION))
        raise ConversionError(
            "the weight version of a token is unknown", code="RF-A011",
            where=place_of(choices, first, "weight_versions"), expected="an integer version",
            got=None, remedy="map the engine's version strings with policy_version=",
        )  # fmt: skip
    return by_target


def _place_tokens(choices: Sequence[Choice], vocab_size: int, arrays: Arrays) -> None:
    parts = [part for choice in choices for part in choice.runs()]
    ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    lengths = np.array([len(part) for part in parts], np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        first = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        offsets = offsets_of(np.array([choice.num_tokens for choice in choices], np.int64))
        number = int(offsets.searchsorted(first, side="right")) - 1
        where = choices[number].place_token(first - int(offsets[number]))
        raise ConversionError(
            "a token id is outside the vocabulary", code="RF-A005", where=where,
            expected=f"0 <= id < {vocab_size}", got=int(ids[first]),
            remedy="pass the model's vocab_size, not the tokenizer's",
        )  # fmt: skip
    arrays["input_ids"] = ids
    arrays["completion_mask"] = np.repeat(np.arange(len(parts)) % 2, lengths).astype(np.uint8)


def _place_further(choices: Sequence[Choice], wanted: Wanted, arrays: Arrays) -> None:
    for parts in ("token_values", "target_values"):
        names = {name for choice in choices for name in getattr(choice, parts)}
        for name in sorted(names):
            if name not in wanted:
                continue
            for choice in choices:
                if name not in getattr(choice, parts):
                    raise ConversionError(
                        "a field is given for all samples of a call or for none", code="RF-A006",
                        where=replace(choice.where, column=name), expected="values", got=None,
                        remedy="convert samples with and without it apart, or leave it out of "
                        "columns=",
                    )  # fmt: skip
            arrays[name] = np.concatenate([getattr(choice, parts)[name] for choice in choices])


def _experts(
    choices: Sequence[Choice],
    schema: RaggedSchema,
    shape: tuple[int, int] | None,
    report: ConversionReport,
) -> npt.NDArray[np.int16]:
    layers, k = schema[ROUTED_EXPERTS].shape
    if shape not in (None, (layers, k)):
        raise ConversionError(
            "routed experts have the shape that the schema declares", code="RF-A006",
            where=Where(column=ROUTED_EXPERTS), expected=(layers, k), got=shape,
        )  # fmt: skip
    return place_experts(choices, (layers, k), report)


def _batch(
    choices: Sequence[Choice],
    schema: RaggedSchema,
    arrays: Arrays,
    targets: Targets,
    oldest: Sequence[int | None],
) -> pa.RecordBatch:
    lengths = np.array([choice.num_tokens for choice in choices], np.int64)
    offsets = {"token": offsets_of(lengths), "target": targets.offsets}
    records: dict[str, Sequence[Any]] = {
        "sample_id": [choice.sample_id for choice in choices],
        "policy_version": oldest,
    }
    columns = []
    for column in schema:
        if column.axis == RECORD:
            values = records.get(column.name)
            if values is None:
                values = [choice.record_values.get(column.name) for choice in choices]
            columns.append(_record_column(choices, column, values))
            continue
        array = _given(arrays, column).astype(column.type.to_pandas_dtype(), copy=False)
        if column.opens is not None and not column.mask:
            sums = segment_sums(arrays[column.name], offsets[column.axis])
            offsets[column.opens] = offsets_of(sums)
        columns.append(to_list(array, offsets[column.axis], column))
    return pa.RecordBatch.from_arrays(columns, schema=schema.to_arrow())


def _given(arrays: Arrays, column: Column) -> npt.NDArray[Any]:
    if column.name not in arrays:
        raise ConversionError(
            "the payloads do not give this column", code="RF-A011",
            where=Where(column=column.name), expected="a column that they give", got=column.name,
            remedy="leave it out of the columns, and add it to the converted samples later",
        )  # fmt: skip
    return arrays[column.name]


def _record_column(choices: Sequence[Choice], column: Column, values: Sequence[Any]) -> pa.Array:
    try:
        if column.name not in _ALLOWED or all(_fits(column.name, value) for value in values):
            return pa.array(values, column.type)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError):
        pass
    first = next(i for i, value in enumerate(values) if not _is_storable(column, value))
    return malformed(
        f"a value of {column.name} is of its type",
        replace(choices[first].where, column=column.name),
        f"{column.type}{_ALLOWED.get(column.name, '')}", values[first],
    )  # fmt: skip


def _is_storable(column: Column, value: Any) -> bool:
    try:
        pa.array([value], column.type)
        return _fits(column.name, value)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError):
        return False


_ALLOWED = {
    "temperature": ", finite and >= 0", "reward": ", finite", "advantage": ", finite",
    "branch_index": ", >= 0", "metrics": ", a JSON object",
}  # fmt: skip


def _fits(name: str, value: Any) -> bool:
    """Return whether the format allows a value, its type aside."""
    if value is None or name not in _ALLOWED:
        return True
    if name == "metrics":
        try:
            return isinstance(json.loads(value, parse_constant=_no_constant), dict)
        except (ValueError, RecursionError):
            return False
    return math.isfinite(value) and (value >= 0 or name in ("reward", "advantage"))


def _no_constant(name: str) -> None:
    msg = f"{name} is not JSON"
    raise ValueError(msg)


def _count(
    targets: Targets, choices: Sequence[Choice], schema: RaggedSchema, report: ConversionReport
) -> None:
    """Count samples, tokens, targets and flags."""
    tokens = np.array([choice.num_tokens for choice in choices], np.int64)
    report.samples.taken += len(choices)
    targets.count_by_choice(report.samples, np.ones(len(choices)))
    report.tokens.taken += int(tokens.sum())
    targets.count_by_choice(report.tokens, tokens)
    report.targets.taken += len(targets.tokens)
    targets.count(report.targets, np.ones(len(targets.tokens)))
    flags = targets.flags[targets.kept]
    for bit, name in _FLAG_NAMES.items() if flags.any() else ():
        report.flagged[name] += int(np.count_nonzero(flags & bit))
    columns = set(schema.columns)
    known: set[str] = set().union(*(choice.record_values for choice in choices))
    for name in known & {*ALWAYS, *FROM_RECORD} - columns:
        given = sum(choice.record_values.get(name) is not None for choice in choices)
        report.unread[name] += given
    for choice in choices:
        if choice.token_values or choice.target_values:
            report.unread.update({*choice.token_values, *choice.target_values} - columns)


def _count_sets(targets: Targets, support: Support | None, report: ConversionReport) -> None:
    ledger = report.candidates
    if support is None:
        rows = [choice.support for choice in targets.choices if choice.support is not None]
        count = sum(len(part.values) for part in rows)
        ledger.taken += count
        ledger.drop(NOT_WANTED, count)
        return
    names = [f"support_{reason}" for reason in REASONS]
    _count_faults(targets, ledger, support.counts, support.fault, names)
    report.converted["sets_sorted"] += support.sorted_sets
    top_k = np.repeat([choice.top_k or 0 for choice in targets.choices], targets.lengths)
    wider = (top_k > 0) & (support.counts > top_k)
    report.noted["sets_wider_than_top_k"] += int(np.count_nonzero(wider))
    kept = targets.kept
    report.noted["full_vocabulary_targets"] += int(
        np.count_nonzero(kept & (support.fault != 0) & (targets.flags & _NO_SUPPORT == 0))
    )


def _count_faults(
    targets: Targets,
    ledger: Ledger,
    weights: npt.NDArray[Any],
    faults: npt.NDArray[np.uint8],
    names: Sequence[str],
) -> None:
    """Count weights of kept targets under their fault, and of the others under their reason."""
    ledger.taken += int(weights.sum())
    targets.count(ledger, weights)
    for number, name in enumerate(names[1:], 1) if faults.any() else ():
        lost = int(weights[targets.kept & (faults == number)].sum())
        ledger.stored -= lost
        ledger.drop(name, lost)


def _count_log_probs(
    targets: Targets, sampled: Sampled, schema: RaggedSchema, report: ConversionReport
) -> None:
    ledger = report.log_probs
    given = sampled.given.astype(np.int64)
    if "rollout_log_probs" in schema:
        names = [f"log_prob_{kind}" for kind in SENTINELS]
        _count_faults(targets, ledger, given, sampled.kinds, names)
    else:
        ledger.taken += int(given.sum())
        ledger.drop(NOT_WANTED, int(given.sum()))
