"""Hypothesis strategies: schemas with any optional and own columns, and valid batches of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from ragged_format.errors import MissingDependencyError
from ragged_format.profiles import SAMPLE_COLUMNS, sample_schema, standard_column
from ragged_format.schema import HEAD_KINDS, PRIMITIVES, RECORD, Column, LogProb
from ragged_format.testing.generate import fill_batch
from ragged_format.testing.sequences import in_sequence

try:
    from hypothesis import strategies as st
except ImportError as err:
    raise MissingDependencyError(
        "the strategies need hypothesis", expected="hypothesis", got="not installed",
        remedy="pip install hypothesis",
    ) from err  # fmt: skip

__all__ = ["packed_batches", "sample_batches", "schemas"]

_RECORD_NAMES = [c.name for c in SAMPLE_COLUMNS if c.axis == RECORD and c.name != "sample_id"]
_TARGET_NAMES = [c.name for c in SAMPLE_COLUMNS if c.axis == "target" and c.opens is None]
# The columns of an axis that are there together, in growing sets; counts never stand alone.
_COUNTED = (
    (("candidate_counts", "candidate_ids"), "candidate_log_probs", None),
    (("topk_counts", "topk_ids"), "topk_log_probs", "topk_weights"),
    (
        ("teacher_topk_counts", "teacher_topk_ids"),
        "teacher_topk_log_probs",
        "teacher_topk_weights",
    ),
)
_ALTERNATIVES = {
    "advantages": pa.float64(),
    "topk_log_probs": pa.float16(),
    "teacher_topk_log_probs": pa.float16(),
}
_INTEGERS = [t for t in PRIMITIVES.values() if pa.types.is_integer(t)]
_SHAPES = [(), (), (2,), (2, 3)]


@st.composite
def schemas(draw: st.DrawFn, *, own_columns: int = 3) -> pa.Schema:
    """Draw an Arrow schema of profile ``sample``.

    Any subset of the optional standard columns, with their alternative types, log-prob modes and
    head kinds, a set or head of its own, and up to `own_columns` own columns of any type on any
    axis: fixed shapes, counts that open further axes, masks, a root axis. Shrinks to the three
    required columns.

    Parameters
    ----------
    own_columns : int
        Largest number of own declarations; 0 gives standard columns only.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(schemas(), lambda schema: True).names
    ['sample_id', 'input_ids', 'completion_mask']
    """
    columns = [
        _standard(draw, name)
        for name in draw(st.lists(st.sampled_from(_RECORD_NAMES + _TARGET_NAMES), unique=True))
    ]
    for base, values, weights in _COUNTED:
        have = draw(st.integers(0, 2 if weights is None else 3))
        names = [*base, values, weights][: have + 1] if have else []
        for name in names:
            column = _standard(draw, str(name))
            if have == 3 and column.head_kind == "top_k":
                column = replace(column, head_kind="draws")
            columns.append(column)
    if own_columns and draw(st.booleans()):
        columns += _own_head(draw)
    axes = ["token", "target", *[str(c.opens) for c in columns if c.opens]]
    root_axes: list[str] = []
    for number in range(draw(st.integers(0, own_columns)) if own_columns else 0):
        if draw(st.booleans()) and not root_axes:
            root_axes.append("frame")
            axes.append("frame")
            columns.append(_own(draw, f"own_{number}", "frame", axes))
        else:
            axis = draw(st.sampled_from([RECORD, *axes]))
            columns.append(_own(draw, f"own_{number}", axis, axes))
    vocab_size = draw(st.sampled_from([64, 1, 2, 8, 200_000]))
    schema = sample_schema(vocab_size=vocab_size, columns=columns, root_axes=root_axes)
    if draw(st.booleans()):
        schema = schema.with_metadata({**schema.metadata, b"pipeline:run": b"7"})
    return schema


def _standard(draw: st.DrawFn, name: str) -> Column:
    column = standard_column(name)
    if name in _ALTERNATIVES and draw(st.booleans()):
        column = replace(column, type=_ALTERNATIVES[name])
    if column.log_prob is not None:
        mode = draw(st.sampled_from(_MODES))
        column = replace(column, log_prob=mode, approximate=draw(st.booleans()))
    return column


_MODES = (
    LogProb(),
    LogProb("raw", "vocabulary"),
    LogProb("processed", "vocabulary", temperature=0.7),
)


def _own_head(draw: st.DrawFn) -> list[Column]:
    """Draw the columns of a further set or head, as a second sampler or verifier gives them."""
    kind = draw(st.sampled_from(HEAD_KINDS))
    integers, floats = [pa.int32(), pa.int64()], [pa.float32(), pa.float16(), pa.float64()]
    counts = Column(
        "draft_counts", "target", draw(st.sampled_from(integers)), opens="draft", head_kind=kind
    )
    ids = Column("draft_ids", "draft", draw(st.sampled_from(integers)), fill=-1)
    values = Column(
        "draft_log_probs", "draft", draw(st.sampled_from(floats)), log_prob=LogProb("raw")
    )
    weights = Column("draft_weights", "draft", pa.float32())
    return [counts, ids, values, *[weights] * (kind == "draws")]


def _own(draw: st.DrawFn, name: str, axis: str, axes: list[str]) -> Column:
    """Draw an own column, and add the axis that it opens to `axes`."""
    if axis != RECORD and draw(st.booleans()):
        opens = f"{name}_axis"
        axes.append(opens)
        type_ = draw(st.sampled_from(_INTEGERS))
        return Column(name, axis, type_, opens=opens, mask=draw(st.booleans()))
    type_ = draw(st.sampled_from(list(PRIMITIVES.values())))
    numeric = pa.types.is_integer(type_) or pa.types.is_floating(type_)
    shape = draw(st.sampled_from(_SHAPES)) if numeric else ()
    nullable = axis == RECORD and not shape and draw(st.booleans())
    return Column(name, axis, type_, shape, nullable=nullable)


@st.composite
def sample_batches(
    draw: st.DrawFn,
    schema: pa.Schema | st.SearchStrategy[pa.Schema] | None = None,
    *,
    min_rows: int = 0,
    max_rows: int = 5,
    max_length: int = 8,
    max_width: int = 5,
    prefix: str | None = None,
) -> pa.RecordBatch:
    """Draw a valid batch of profile ``sample``.

    Lengths are drawn one by one, so that failures shrink to few and short records; values come
    from one drawn seed. Empty batches, empty records, records without targets, single records and
    equal lengths all occur.

    Parameters
    ----------
    schema : pyarrow.Schema or strategy of these, optional
        Any of :func:`schemas` where it is not given.
    min_rows, max_rows : int
        Bounds on the records.
    max_length : int
        Largest number of tokens of a record.
    max_width : int
        Largest candidate set, head and own count.
    prefix : str, optional
        Start of the sample ids. Default: one that differs between draws.
    """
    if schema is None:
        schema = schemas()
    # A duck type: the strategy class is not public enough for isinstance.
    wanted = schema if isinstance(schema, pa.Schema) else draw(schema)
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, max_length), min_size=min_rows, max_size=max_rows))
    else:
        rows = draw(st.integers(min_rows, max_rows))
        lengths = [draw(st.integers(0, max_length))] * rows
    seed = draw(st.integers(0, 2**32 - 1))
    options: dict[str, Any] = {
        "scored": draw(st.sampled_from([0.5, 0.0, 1.0])),
        "max_width": draw(st.integers(0, max_width)),
        "flagged": draw(st.sampled_from([0.0, 0.2])),
        "nulls": draw(st.sampled_from([0.0, 0.3, 1.0])),
    }
    prefix = f"s{seed}" if prefix is None else prefix
    return fill_batch(wanted, np.random.default_rng(seed), lengths, prefix=prefix, **options)


@st.composite
def packed_batches(
    draw: st.DrawFn,
    samples: st.SearchStrategy[pa.RecordBatch] | None = None,
) -> pa.RecordBatch:
    """Draw a valid batch of profile ``packed`` in which no prefix is shared.

    Parameters
    ----------
    samples : strategy of RecordBatch, optional
        What is packed; any of :func:`sample_batches` where it is not given.
    """
    batch = draw(sample_batches() if samples is None else samples)
    members = sum(any(mask) for mask in batch.column("completion_mask").to_pylist())
    ends = draw(st.sets(st.integers(1, members - 1))) if members > 1 else set()
    bounds = [0, *sorted(ends), members] if members else []
    return in_sequence(batch, np.diff(bounds))
