"""Stored teacher heads of whole sequences: the common way from a form of them to samples."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters._build import Columns, Draft, check_options, field_of
from ragged_format.adapters._tables import HeadRows
from ragged_format.adapters._teacher import add_teacher, heads_of_targets
from ragged_format.adapters.positions import predictor_to_own
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, offsets_of

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._fields import Fields
    from ragged_format.adapters._values import Bools
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.schema import LogProb

__all__ = ["Position", "Sequences", "own_heads", "sequences_of", "teacher_samples"]

Position = Literal["own", "predictor"]
# Labels of tokens that are not trained.
IGNORED = -100


@dataclass(slots=True)
class Sequences:
    """Tokens of a call, which of them are scored, and their record columns.

    Attributes
    ----------
    ids : list of (l,) int64
    masks : list of (l,) bool
    wheres : list of Where
    records : dict of str to list
    """

    ids: list[Int64]
    masks: list[Bools]
    wheres: Sequence[Where]
    records: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def offsets(self) -> Int64:
        """Tokens of each sequence, (n + 1,) int64."""
        return offsets_of(np.array([len(part) for part in self.ids], np.int64))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(part) for part in self.ids]


def sequences_of(
    fields: Fields,
    id_prefix: str,
    *,
    tokens: str = "input_ids",
    masks: Sequence[str] = ("completion_mask",),
) -> Sequences:
    """Return the tokens of payloads, scored by the first mask that they have.

    A field ``labels`` scores the tokens whose label is not -100. Without any mask all tokens but
    the first are scored.
    """
    ids = fields.ids(tokens)
    lengths = [len(part) for part in ids]
    name = next(
        (m for m in masks if any(field_of(p, m) is not None for p in fields.payloads)), None
    )
    if name is None:
        scored = [np.arange(length) > 0 for length in lengths]
    elif name == "labels":
        scored = [labels != IGNORED for labels in fields.ids(name)]
        for row, (mask, length) in enumerate(zip(scored, lengths, strict=True)):
            if len(mask) != length:
                raise ConversionError(
                    "there is a label per token", code="RF-A006", where=fields.where(row, name),
                    expected=length, got=len(mask),
                )  # fmt: skip
    else:
        scored = fields.masks(name, lengths)
    out = Sequences(ids, scored, fields.wheres)
    out.records["sample_id"] = [
        field_of(payload, "sample_id") or f"{id_prefix}/{number}"
        for number, payload in enumerate(fields.payloads)
    ]
    for column in ("teacher_id", "group_id"):
        values = [field_of(payload, column) for payload in fields.payloads]
        if any(value is not None for value in values):
            out.records[column] = [None if value is None else str(value) for value in values]
    return out


def own_heads(
    heads: HeadRows,
    offsets: Int64,
    position: Position,
    report: ConversionReport,
    null: Bools | None = None,
) -> tuple[HeadRows, Bools | None]:
    """Return heads of all tokens by own position; the row of a last token predicts no token.

    Raises
    ------
    ConversionError
        Another position convention (``RF-A011``).
    """
    if position == "own":
        return heads, null
    if position != "predictor":
        raise ConversionError(
            "a position convention is own or predictor", code="RF-A011",
            expected="own, predictor", got=position,
        )  # fmt: skip
    lasts = offsets[1:][offsets[1:] > offsets[:-1]] - 1
    beyond = np.zeros(len(heads.counts), bool)
    beyond[lasts] = True
    lost = int(heads.counts[lasts].sum())
    if lost:
        report.head_entries.taken += lost
        report.head_entries.drop("beyond_end", lost)
        keep = np.repeat(~beyond, heads.counts)
        heads = heads.pick(keep, np.where(beyond, 0, heads.counts))
        null = None if null is None else null[keep]
    counts = predictor_to_own(heads.counts, offsets, fill=0)
    return HeadRows(counts, heads.ids, heads.log_probs, heads.weights), null


def teacher_samples(
    sequences: Sequences,
    heads: HeadRows,
    mode: LogProb,
    field: str,
    *,
    vocab_size: int | None,
    columns: Columns,
    schema: pa.Schema | None,
    counts: ConversionReport,
    report: ConversionReport | MutableMapping[str, Any] | None,
    null: Bools | None = None,
    approximate: bool = False,
    head_kind: str = "top_k",
    has_log_probs: bool = True,
) -> pa.RecordBatch:
    """Return sequences with a teacher's heads, of all tokens by own position, as samples."""
    size = check_options(vocab_size, columns, schema)
    counts.responses.taken += len(sequences.ids)
    counts.responses.stored += len(sequences.ids)
    draft = Draft(sequences.ids, sequences.masks, sequences.wheres, size, counts)
    draft.records.update(sequences.records)
    heads, null = heads_of_targets(draft, heads, null)
    add_teacher(
        draft, heads, mode, field, null=null, approximate=approximate, head_kind=head_kind,
        has_log_probs=has_log_probs,
    )  # fmt: skip
    batch = draft.finish(columns, schema)
    counts.add_to(report)
    return batch
