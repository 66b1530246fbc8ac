"""Samples of trainers as one batch: their tokens, what hangs on the scored ones, what is wanted.

For systems whose payloads are arrays per sample. A reader makes a :class:`Draft` of the tokens,
adds the columns that its payloads give, and the caller's ``columns`` or ``schema`` choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.adapters._arguments import columns_of
from ragged_format.adapters._targets import Targets
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, offsets_of, segment_sums, to_list
from ragged_format.parse import parse_schema
from ragged_format.profiles import REQUIRED, sample_schema, standard_column
from ragged_format.ragged import select, take
from ragged_format.rules import TargetFlag
from ragged_format.schema import RECORD, Column, RaggedSchema

if TYPE_CHECKING:
    from ragged_format.adapters._values import Bools
    from ragged_format.adapters.report import ConversionReport, Ledger

__all__ = ["Columns", "Draft", "Piece", "check_options", "field_of", "is_given", "rows_where"]

Columns = Iterable[str | Column] | None

NOT_WANTED = "not_wanted"
# Columns that may be absent of a sample: none known, no head, no flag.
_EMPTY = frozenset({"topk_counts", "teacher_topk_counts", "candidate_counts", "target_flags"})
_FLAG_NAMES = {
    TargetFlag.SUPPORT_MISSING: "support_missing",
    TargetFlag.SUPPORT_OVERFLOW: "support_overflow",
    TargetFlag.LOG_PROB_MISSING: "log_prob_missing",
    TargetFlag.HEAD_MISSING: "head_missing",
    TargetFlag.TEACHER_MISSING: "teacher_missing",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """The targets of one sample.

    Attributes
    ----------
    token_ids : (t,) int64
        Scored tokens.
    positions : (t,) int64
        Where they are in the sample.
    where : Where
        The sample.
    """

    token_ids: Int64
    positions: Int64
    where: Where

    def place(self, column: str, position: int | None = None) -> Where:
        """Return where the part of a target of a field is: the token's own position."""
        at = None if position is None else int(self.positions[position])
        return Where(self.where.file, row=self.where.row, column=column, position=at)


class Draft:
    """Samples to be: tokens, targets, and the columns added so far.

    Parameters
    ----------
    ids : sequence of (l,) int64
        Tokens of each sample.
    masks : sequence of (l,) bool
        Which of them are scored. A scored first token is left unscored and counted: nothing
        predicts it.
    wheres : sequence of Where
        Of each sample.
    vocab_size : int
    report : ConversionReport

    Attributes
    ----------
    lengths : (n,) int64
        Tokens of each sample.
    scored : (t,) bool
        Which tokens are targets.
    targets : Targets
        What becomes of them.
    records, values : dict
        Record columns, and all others end to end, by name.
    declared : dict of str to Column
        Declarations that differ from the standard ones.
    given : dict of str to (m,) bool
        Where a log-prob column has a value; its other targets were counted before.

    Raises
    ------
    ConversionError
        A token outside the vocabulary (``RF-A005``).
    """

    def __init__(
        self,
        ids: Sequence[Int64],
        masks: Sequence[Bools],
        wheres: Sequence[Where],
        vocab_size: int,
        report: ConversionReport,
    ) -> None:
        self.vocab_size, self.report = vocab_size, report
        self.lengths = np.array([len(part) for part in ids], np.int64)
        tokens = np.concatenate([*ids, np.zeros(0, np.int64)])
        _check_tokens(tokens, self.lengths, wheres, vocab_size)
        self.scored = np.concatenate([*masks, np.zeros(0, bool)])
        report.targets.taken += int(self.scored.sum())
        starts = (np.cumsum(self.lengths) - self.lengths)[self.lengths > 0]
        report.targets.drop("first_token", int(self.scored[starts].sum()))
        self.scored[starts] = False
        self.positions = np.flatnonzero(self.scored)
        offsets = offsets_of(self.lengths)
        bounds = np.searchsorted(self.positions, offsets).tolist()
        pieces = []
        for begin, end, start, where in zip(
            bounds[:-1], bounds[1:], offsets.tolist(), wheres, strict=False
        ):
            at = self.positions[begin:end]
            pieces.append(Piece(tokens[at], at - start, where))
        # Of a choice, targets use the token ids and the place only.
        self.targets = Targets(cast("Any", pieces))
        self.pieces = pieces
        self.tokens = tokens
        self.records: dict[str, Sequence[Any]] = {}
        self.values: dict[str, npt.NDArray[Any]] = {"input_ids": tokens}
        self.declared: dict[str, Column] = {}
        self.given: dict[str, Bools] = {}

    def place(self, field: str) -> _PlaceOf:
        """Return what tells, for errors, where the part of a target of a payload's field is."""
        return _PlaceOf(self, field)

    def add(self, name: str, values: npt.NDArray[Any], declared: Column | None = None) -> None:
        """Add a column, its values end to end."""
        self.values[name] = values
        if declared is not None:
            self.declared[name] = declared

    def names(self) -> list[str]:
        """Return the optional columns that there are."""
        names = {*self.records, *self.values} - set(REQUIRED["sample"])
        if self.targets.flags[self.targets.kept].any():
            names.add("target_flags")
        return sorted(names)

    def finish(self, columns: Columns, schema: pa.Schema | None) -> pa.RecordBatch:
        """Return the batch, and count what is in it and what was left out.

        Raises
        ------
        ConversionError
            The columns asked for are not there, or lack the flags that a policy sets
            (``RF-A011``).
        """
        self.targets.decide()
        chosen = self._schema(columns, schema)
        batch = self._batch(chosen)
        self._count(chosen)
        if not self.targets.kept.all():
            batch = select(batch, "target", self.targets.kept)
        if not self.targets.choice_kept.all():
            batch = take(batch, np.flatnonzero(self.targets.choice_kept))
        return batch

    def _schema(self, columns: Columns, schema: pa.Schema | None) -> RaggedSchema:
        if schema is not None:
            chosen = parse_schema(schema)
        else:
            given = columns_of(columns)
            asked = self.names() if given is None else given
            declared = [
                self.declared.get(c) or standard_column(c) if isinstance(c, str) else c
                for c in asked
            ]
            chosen = parse_schema(sample_schema(vocab_size=self.vocab_size, columns=declared))
        for name, mine in self.declared.items():
            if name in chosen and chosen[name] != mine:
                raise ConversionError(
                    "a column is declared otherwise than the payloads have it", code="RF-A007",
                    where=Where(column=name), expected=mine, got=chosen[name],
                    remedy="name the column, so that the adapter declares it",
                )  # fmt: skip
        flagged = self.targets.flags[self.targets.kept].any()
        if flagged and "target_flags" not in chosen:
            raise ConversionError(
                "a target must be flagged, and the columns asked for have no place for it",
                code="RF-A011", expected="column 'target_flags'", got=sorted(chosen.columns),
                remedy="add 'target_flags' to the columns, or choose other policies",
            )  # fmt: skip
        return chosen

    def _batch(self, schema: RaggedSchema) -> pa.RecordBatch:
        given = {
            **self.values, "completion_mask": self.scored.astype(np.uint8),
            "target_flags": self.targets.flags,
        }  # fmt: skip
        offsets = {"token": offsets_of(self.lengths), "target": self.targets.offsets}
        arrays = []
        for column in schema:
            if column.axis == RECORD:
                values = self.records.get(column.name, [None] * len(self.lengths))
                arrays.append(_record_array(column, values))
                continue
            bounds = offsets[column.axis]
            flat = given.get(column.name)
            if flat is None:
                flat = _absent(column, int(bounds[-1]))
            dtype = column.type.to_pandas_dtype()
            arrays.append(to_list(flat.astype(dtype, copy=False), bounds, column))
            if column.opens is not None and not column.mask:
                offsets[column.opens] = offsets_of(segment_sums(flat, bounds))
        return pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow())

    def _count(self, schema: RaggedSchema) -> None:
        report, targets = self.report, self.targets
        samples = np.ones(len(self.lengths))
        report.samples.taken += len(samples)
        targets.count_by_choice(report.samples, samples)
        report.tokens.taken += int(self.lengths.sum())
        targets.count_by_choice(report.tokens, self.lengths)
        targets.count(report.targets, np.ones(len(targets.tokens)))
        kept_flags = targets.flags[targets.kept]
        for bit, name in _FLAG_NAMES.items():
            report.flagged[name] += int(np.count_nonzero(kept_flags & bit))
        for name, ledger in (
            ("topk_counts", report.head_entries), ("teacher_topk_counts", report.head_entries),
            ("candidate_counts", report.candidates), ("rollout_log_probs", report.log_probs),
        ):  # fmt: skip
            if name in self.values:
                counts = self.given.get(name, self.values[name])
                self._count_on(schema, name, ledger, counts.astype(np.int64))
        for name in self.names():
            if name not in schema:
                report.unread[name] += len(samples)

    def _count_on(
        self, schema: RaggedSchema, name: str, ledger: Ledger, counts: npt.NDArray[Any]
    ) -> None:
        """Count what hangs on targets, whose sentinels were counted as dropped before."""
        if name not in schema:
            ledger.drop(NOT_WANTED, int(counts.sum()))
        else:
            self.targets.count(ledger, counts)


@dataclass(frozen=True, slots=True)
class _PlaceOf:
    draft: Draft
    field: str

    def __call__(self, target: int, /) -> Where:
        offsets = self.draft.targets.offsets
        sample = int(np.searchsorted(offsets, target, side="right")) - 1
        return self.draft.pieces[sample].place(self.field, target - int(offsets[sample]))


def _check_tokens(tokens: Int64, lengths: Int64, wheres: Sequence[Where], vocab_size: int) -> None:
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        first = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
        offsets = offsets_of(lengths)
        sample = int(np.searchsorted(offsets, first, side="right")) - 1
        where = Where(wheres[sample].file, row=wheres[sample].row, column="input_ids",
                      position=first - int(offsets[sample]))  # fmt: skip
        raise ConversionError(
            "a token id is outside the vocabulary", code="RF-A005", where=where,
            expected=f"0 <= id < {vocab_size}", got=int(tokens[first]),
            remedy="pass the model's vocab_size, not the tokenizer's",
        )  # fmt: skip


def _absent(column: Column, size: int) -> npt.NDArray[Any]:
    if size and column.name not in _EMPTY:
        raise ConversionError(
            "the payloads do not give this column", code="RF-A011",
            where=Where(column=column.name), expected="a column that they give", got=column.name,
            remedy="leave it out of the columns, and add it to the converted samples later",
        )  # fmt: skip
    return np.zeros(size, column.type.to_pandas_dtype())


def _record_array(column: Column, values: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(values, column.type)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError) as err:
        raise ConversionError(
            "a value is not of its column's type", code="RF-A002",
            where=Where(column=column.name), expected=column.type, got=str(err),
        ) from None  # fmt: skip


def check_options(vocab_size: int | None, columns: Columns, schema: pa.Schema | None) -> int:
    """Return the size of the vocabulary that the options name.

    Raises
    ------
    ConversionError
        ``columns`` and ``schema`` together, another profile or size, or no size (``RF-A011``).
    """
    if schema is not None and columns is not None:
        raise ConversionError(
            "columns and schema say the same thing twice", code="RF-A011",
            expected="one of columns=, schema=", got="both",
        )  # fmt: skip
    if schema is None:
        if vocab_size is None:
            raise ConversionError(
                "the size of the vocabulary must be known", code="RF-A011",
                expected="vocab_size= or schema=", got=None,
                remedy="pass the model's vocab_size (config.json)",
            )  # fmt: skip
        return vocab_size
    parsed = parse_schema(schema)
    if parsed.profile != "sample" or vocab_size not in (None, parsed.vocab_size):
        raise ConversionError(
            "the schema is of samples with this vocabulary", code="RF-A011",
            expected=f"profile 'sample', vocab_size {vocab_size}",
            got=f"profile {parsed.profile!r}, vocab_size {parsed.vocab_size}",
        )  # fmt: skip
    return parsed.vocab_size


def field_of(payload: Any, name: str) -> Any:
    """Return a key of a mapping or an attribute of an object; ``None`` if it is not there."""
    return payload.get(name) if isinstance(payload, Mapping) else getattr(payload, name, None)


def is_given(payloads: Sequence[Any], name: str) -> bool:
    """Return whether all payloads have a field; raises if only some have it.

    Raises
    ------
    ConversionError
        Some have it and some not (``RF-A006``).
    """
    has = [field_of(payload, name) is not None for payload in payloads]
    if any(has) and not all(has):
        raise ConversionError(
            "a field is there in all samples of a call or in none", code="RF-A006",
            where=Where(row=has.index(False), column=name), expected=f"a value of {name}", got=None,
            remedy="convert samples with and without it in separate calls",
        )  # fmt: skip
    return any(has)


def rows_where(payloads: Sequence[Any]) -> list[Where]:
    """Return the places of payloads: their number, and file where they say it."""
    out = []
    for number, payload in enumerate(payloads):
        source = field_of(payload, "source")
        out.append(Where(file=source if isinstance(source, str) else None, row=number))
    return out
