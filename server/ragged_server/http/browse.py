"""Records as JSON for the page: what a list shows of them, and one record, a window at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from ragged_format.parse import parse_schema
from ragged_format.schema import RECORD, RaggedSchema
from ragged_server.http.problems import shortened
from ragged_server.http.texts import Texts

__all__ = ["SHOWN_ELEMENTS", "record_json", "summaries"]

# Elements of one set or head that are shown.
SHOWN_ELEMENTS = 64
# Tokens before the first scored one that a window begins with.
_CONTEXT = 32
# Record columns that a list of records shows.
_SUMMARY = ("group_id", "policy_version", "reward", "finish_reason", "env_name")
_Array = npt.NDArray[Any]


def summaries(batch: pa.RecordBatch, first_sequence: int) -> list[dict[str, Any]]:
    """Return what a list shows of each record of a batch of profile ``sample``.

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=["reward"])
    >>> row = {"sample_id": "a", "input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}
    >>> row["reward"] = 1.0
    >>> summaries(pa.RecordBatch.from_pylist([row], schema=schema), 7)
    [{'sequence': 7, 'sample_id': 'a', 'tokens': 3, 'targets': 2, 'reward': 1.0}]
    """  # fmt: skip
    names = [name for name in _SUMMARY if name in batch.schema.names]
    rows = batch.select(["sample_id", *names]).to_pylist()
    return [
        {
            "sequence": first_sequence + number,
            "sample_id": shortened(row["sample_id"]),
            "tokens": len(batch.column("input_ids")[number]),
            "targets": int(_flat(batch, number, "completion_mask").sum()),
            **{name: _shown(row[name]) for name in names},
        }
        for number, row in enumerate(rows)
    ]


def record_json(
    batch: pa.RecordBatch, sequence: int, *, start: int | None, count: int, texts: Texts
) -> dict[str, Any]:
    """Return one record: its scalars, and a window of its tokens with all that they have.

    Parameters
    ----------
    batch : RecordBatch
        With one record of profile ``sample``.
    sequence : int
        Of the record in the log.
    start : int, optional
        First token of the window; by default the record's first, or a few before the first that is
        scored where that one would lie outside.
    count : int
        Tokens of the window.
    texts : Texts
        Of token ids.

    Returns
    -------
    dict
        JSON values. ``targets`` are those of the window; of each set or head its first
        :data:`SHOWN_ELEMENTS` elements, and in ``counts`` how many it has.
    """  # fmt: skip
    schema = parse_schema(batch.schema)
    mask = _flat(batch, 0, "completion_mask").astype(bool)
    ids = _flat(batch, 0, "input_ids")
    if start is None:
        start = _first_shown(mask, count)
    end = min(start + count, len(ids))
    first, last = int(mask[:start].sum()), int(mask[:end].sum())
    targets: dict[str, Any] = {
        name: _flat(batch, 0, name)[first:last].tolist()
        for name in _of_axis(schema, "target") if name not in _counts(schema)
    }  # fmt: skip
    axes = {
        axis.name: _elements(batch, schema, axis.name, axis.counts, first, last)
        for axis in schema.axes.values()
        if axis.parent == "target" and axis.counts is not None
    }
    shown = {int(token) for token in ids[start:end]}
    for axis in axes.values():
        for name, lists in axis["columns"].items():
            if name.endswith("_ids"):
                shown.update(token for values in lists for token in values)
    return {
        "sequence": sequence,
        "record": _scalars(batch, schema),
        "lengths": {
            axis.name: int(_flat(batch, 0, axis.counts).sum())
            for axis in schema.axes.values()
            if axis.counts is not None
        }
        | {"token": len(ids), "target": int(mask.sum())},
        "start": start,
        "ids": ids[start:end].tolist(),
        "scored": mask[start:end].astype(int).tolist(),
        "first_target": first,
        "targets": targets,
        "axes": axes,
        "other_columns": sorted(
            column.name for column in schema if column.shape and column.axis != RECORD
        ),
        "texts": texts.of(shown),
    }


def _first_shown(mask: _Array, count: int) -> int:
    first = int(mask.argmax()) if mask.any() else 0
    return 0 if first < count // 2 else first - min(_CONTEXT, count // 4)


def _elements(
    batch: pa.RecordBatch, schema: RaggedSchema, axis: str, counts: str, first: int, last: int
) -> dict[str, Any]:
    """Return the sets or heads of some targets: their counts, and their first elements."""
    numbers = _flat(batch, 0, counts)
    offsets = np.concatenate(([0], np.cumsum(numbers, dtype=np.int64)))[first : last + 1]
    ends = np.minimum(offsets[1:], offsets[:-1] + SHOWN_ELEMENTS)
    bounds = list(zip(offsets[:-1].tolist(), ends.tolist(), strict=True))
    return {
        "counts": numbers[first:last].tolist(),
        "columns": {name: _cut(_flat(batch, 0, name), bounds) for name in _of_axis(schema, axis)},
    }


def _cut(values: _Array, bounds: list[tuple[int, int]]) -> list[list[Any]]:
    return [values[begin:end].tolist() for begin, end in bounds]


def _of_axis(schema: RaggedSchema, axis: str) -> list[str]:
    """Return the columns of one number an element on an axis."""
    return [column.name for column in schema if column.axis == axis and not column.shape]


def _counts(schema: RaggedSchema) -> set[str]:
    return {axis.counts for axis in schema.axes.values() if axis.counts is not None}


def _flat(batch: pa.RecordBatch, row: int, name: str) -> _Array:
    values = batch.column(name)[row].values
    if values is None:
        return np.zeros(0, np.int32)
    out: _Array = values.to_numpy(zero_copy_only=False)
    # JSON has no half floats.
    return out.astype(np.float32) if out.dtype == np.float16 else out


def _scalars(batch: pa.RecordBatch, schema: RaggedSchema) -> dict[str, Any]:
    names = [
        column.name
        for column in schema
        if column.axis == RECORD and not pt.is_binary(batch.schema.field(column.name).type)
    ]
    scalars: dict[str, Any] = batch.select(names).to_pylist()[0]
    return {name: _shown(value) for name, value in scalars.items()}


def _shown(value: Any) -> Any:
    """Return a value, text cut: it may be as long as a request, and a list has a hundred."""
    return shortened(value) if isinstance(value, str) else value
