"""Samples of trainers: whole conversations whose scored tokens lie anywhere.

Engines return a prompt and a completion; trainers keep all tokens and a mask. A trajectory is the
trainer's counterpart of a choice, so that both go through the same policies and counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._arguments import columns_of, records_of
from ragged_format.adapters._assemble import assemble
from ragged_format.adapters._choice import Choice
from ragged_format.adapters._columns import make_options
from ragged_format.adapters._sentinels import FLOOR
from ragged_format.adapters._values import Entries, LogProbs, Rows, as_ids
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

    import pyarrow as pa

    from ragged_format.adapters._columns import LogProbMode
    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters._values import Bools, Floats
    from ragged_format.lists import Int64
    from ragged_format.schema import Column

__all__ = [
    "Policies",
    "Trajectory",
    "build",
    "check_lengths",
    "csr_rows",
    "doubles",
    "ids_of",
    "mask_of",
    "per_target",
    "rounded",
    "sampled_only",
    "settle",
]


@dataclass(frozen=True, slots=True)
class Policies:
    """What to do with targets that lack something; values as in ``vllm.to_samples``."""

    on_missing_support: Policy = "error"
    on_invalid_support: Policy = "error"
    on_missing_log_prob: Policy = "flag"


@dataclass(slots=True, kw_only=True)
class Trajectory(Choice):
    """One sample of a trainer.

    ``token_ids`` are the scored tokens, and everything that hangs on generated tokens in a choice
    hangs on them.

    Attributes
    ----------
    input_ids : (n,) int64
        All tokens.
    scored : (n,) bool
        Which of them are targets; the first is none.
    names : mapping of str to str
        The trainer's names of the fields that errors mention.
    """

    input_ids: Int64
    scored: Bools
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        sample_id: str,
        where: Where,
        input_ids: Int64,
        scored: Bools,
        names: Mapping[str, str],
    ) -> Trajectory:
        """Return a sample of these tokens; a scored first token raises ``RF-A006``."""
        if len(scored) and scored[0]:
            raise ConversionError(
                "the first token of a sample is scored, and nothing predicts it", code="RF-A006",
                where=_at(where, names.get("mask", "mask"), 0), expected=0, got=1,
                remedy="give the sample its context, or do not score its first token",
            )  # fmt: skip
        return cls(
            sample_id, 0, where, input_ids[:0], input_ids[scored],
            input_ids=input_ids, scored=scored, names=names,
        )  # fmt: skip

    def runs(self) -> Sequence[Int64]:
        """Return the tokens as runs of context and scored ones by turns."""
        runs = np.split(self.input_ids, np.flatnonzero(np.diff(self.scored)) + 1)
        # An even number, so that the first run of every sample is context.
        return [*runs, self.input_ids[:0]] if len(runs) % 2 else runs

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)

    def place(self, column: str, position: int | None = None) -> Where:
        """Return where a field is, or the part of it that belongs to a target."""
        if position is not None:
            position = int(np.flatnonzero(self.scored)[position])
        return _at(self.where, self.names.get(column, column), position)

    def place_token(self, token: int) -> Where:
        """Return where one of all tokens is."""
        return _at(self.where, self.names.get("tokens", "tokens"), token)


def _at(where: Where, column: str, position: int | None = None) -> Where:
    return Where(where.file, row=where.row, column=column, position=position)


def build(
    payloads: Iterable[Any],
    read: Callable[[Any, int, ConversionReport], Sequence[Trajectory]],
    *,
    vocab_size: int | None,
    columns: Iterable[str | Column] | None,
    schema: pa.Schema | None,
    logprobs_mode: LogProbMode,
    policies: Policies,
    policy_version: Mapping[str, int] | int | None = None,
    given: frozenset[str],
    own: tuple[Column, ...] = (),
    finish: Callable[[Sequence[Trajectory], frozenset[str]], None] | None = None,
    report: ConversionReport | MutableMapping[str, Any] | None,
) -> pa.RecordBatch:
    """Return the samples of all payloads as one batch, counted in `report`.

    Parameters
    ----------
    payloads : iterable
    read : callable
        ``read(payload, number, report)`` returns the trajectories of one payload and counts the
        values that have no place in the batch.
    vocab_size, columns, schema, logprobs_mode, policy_version, report
        As in ``vllm.to_samples``.
    policies : Policies
    given : frozenset of str
        Columns that the trainer can give besides the required ones.
    own : tuple of Column
        Declarations that are not the standard ones.
    finish : callable, optional
        ``finish(trajectories, asked)`` is called before they become a batch, with the names of the
        columns that the caller asked for, if any.
    """
    if columns is not None:
        declared = {column.name: column for column in own}
        columns = [
            declared.get(c, c) if isinstance(c, str) else c for c in columns_of(columns) or ()
        ]
    options = make_options(
        vocab_size=vocab_size, columns=columns, schema=schema, logprobs_mode=logprobs_mode,
        policies={
            "on_missing_support": policies.on_missing_support,
            "on_invalid_support": policies.on_invalid_support,
            "on_missing_log_prob": policies.on_missing_log_prob,
        },
        on_error="raise", heads=None, policy_version=policy_version,
        given=given | {"sample_id", "input_ids", "completion_mask", "target_flags"}, always=(),
        own=own,
    )  # fmt: skip
    counts = ConversionReport()
    found: list[Trajectory] = []
    for number, payload in enumerate(records_of(payloads)):
        counts.responses.taken += 1
        found += read(payload, number, counts)
        counts.responses.stored += 1
    if finish is not None:
        asked = options.schema.columns if options.schema is not None else ()
        finish(found, frozenset(asked))
    batch = assemble(found, options, counts)
    counts.add_to(report)
    return batch


def settle(
    found: Sequence[Trajectory], asked: frozenset[str], name: str, scalar: str, axis: str
) -> None:
    """Make a column of values a record column where every sample has one value throughout.

    Parameters
    ----------
    found : sequence of Trajectory
    asked : frozenset of str
        Columns that the caller asked for; empty where it left the choice.
    name, scalar : str
        The column by token or target, and the record column.
    axis : {"token", "target"}
    """
    parts = [getattr(one, f"{axis}_values") for one in found]
    given = [part[name] for part in parts if name in part]
    uniform = all((values == values[:1]).all() for values in given)
    if asked and scalar in asked and name not in asked and not uniform:
        raise ConversionError(
            "a value differs within a sample", code="RF-A011", where=Where(column=scalar),
            expected=f"one {scalar} for each sample", got="several",
            remedy=f"ask for the column {name!r}",
        )  # fmt: skip
    if not given or name in asked or not (uniform or asked):
        return
    for one, part in zip(found, parts, strict=True):
        values = part.pop(name, None)
        if values is not None:
            # Without an element the value is unknown but there: nothing is scored with it.
            value = float(values[0]) if len(values) else 0.0
            one.record_values = {**one.record_values, scalar: value}


def doubles(values: Any, where: Where) -> tuple[Floats, Bools]:
    """Return a list of numbers and nulls as float64, null as NaN, and which are null."""
    try:
        out = np.array(values, np.float64)
    except (TypeError, ValueError):
        out = np.zeros((0, 0))
    if out.ndim != 1:
        raise ConversionError(
            "the field is a list of numbers", code="RF-A002", where=where,
            expected="a list of numbers or nulls", got=_outline(values),
            remedy="per-candidate values belong to the field of the candidates",
        )  # fmt: skip
    null = np.zeros(len(out), bool)
    if not isinstance(values, np.ndarray) and np.isnan(out).any():
        null[:] = [value is None for value in values]
    return out, null


def _outline(values: Any) -> str:
    text = repr(values)
    return text if len(text) <= 120 else text[:120] + " …"


def ids_of(values: Any, where: Where) -> Int64:
    """Return a list of token ids as int64; anything else raises ``RF-A002``."""
    return as_ids(values, lambda position=None: _at(where, where.column or "", position))


def mask_of(values: Any, where: Where) -> Bools:
    """Return a mask of 0 and 1 or booleans; anything else raises ``RF-A002``."""
    out = np.asarray(values)
    if out.ndim == 1 and out.dtype.kind in "biuf" and bool(((out == 0) | (out == 1)).all()):
        return np.asarray(out != 0)
    if out.ndim == 1 and not len(out):
        return np.zeros(0, bool)
    raise ConversionError(
        "a loss mask is 0 or 1", code="RF-A002", where=where, expected="a list of 0 and 1",
        got=_outline(values),
    )  # fmt: skip


def check_lengths(expected: int, lengths: Mapping[str, int], where: Where, what: str) -> None:
    """Raise ``RF-A006`` unless every field, by name, has the expected length."""
    for name, length in lengths.items():
        if length != expected:
            raise ConversionError(
                f"a field has one entry per {what}", code="RF-A006", where=_at(where, name),
                expected=expected, got=length,
            )  # fmt: skip


def per_target(
    values: npt.NDArray[Any], scored: Bools, name: str, unread: Counter[str], *, rest: float = 0.0
) -> npt.NDArray[Any]:
    """Return the values of scored tokens; those of others that are not `rest` count as unread."""
    lost = int(np.count_nonzero(values[~scored] != rest))
    if lost:
        unread[f"{name} of unscored tokens"] += lost
    return values[scored]


def rounded(values: Floats, report: ConversionReport, count: str = "log_probs_rounded") -> Floats:
    """Return values as the nearest float32, those that change counted; sentinels stay."""
    with np.errstate(over="ignore"):
        out = values.astype(np.float32).astype(np.float64)
    changed = (out != values) & (values > FLOOR)
    report.converted[count] += int(np.count_nonzero(changed))
    return np.where(values > FLOOR, out, values)


def sampled_only(values: Floats, null: Bools | None = None) -> LogProbs:
    """Return the log-probs of sampled tokens without any others."""
    counts = np.zeros(len(values), np.int64)
    none = np.zeros(len(values), bool) if null is None else null
    empty = Entries(counts[:0], values[:0], none[:0], counts[:0])
    return LogProbs(None, values, none, counts, empty)


def csr_rows(
    ids: npt.NDArray[Any], counts: Int64, scored: Bools, log_probs: npt.NDArray[Any] | None
) -> tuple[Rows, Rows | None, int]:
    """Return the rows of scored tokens, their log-probs, and how many ids others have.

    Parameters
    ----------
    ids : (t,) int
        Rows of all tokens end to end.
    counts : (n,) int64
        Ids of each token; sums to t.
    scored : (n,) bool
    log_probs : (t,) float, optional
    """
    kept = np.repeat(scored, counts)
    mine = counts[scored]
    rows = Rows(ids[kept].astype(np.int64, copy=False), mine)
    of_rows = None if log_probs is None else Rows(log_probs[kept].astype(np.float64), mine)
    return rows, of_rows, len(ids) - int(np.count_nonzero(kept))
