"""Filter: the records for which conditions hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.arguments import check_integer, names_of
from ragged_format.errors import JobError
from ragged_format.schema import RECORD
from ragged_pipeline.optional import require_polars
from ragged_pipeline.rows import Mask, RowJob, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl
    import pyarrow as pa

    from ragged_pipeline.inputs import RecordInputs
    from ragged_pipeline.job import Context

__all__ = ["Filter"]


class Filter(RowJob):
    """The records for which all conditions hold.

    Parameters
    ----------
    where : str, optional
        SQL over record columns and lengths: ``"reward > 0 and token_length < 4096"``. A record for
        which it is null is dropped, as in SQL.
    expression : str, optional
        A polars expression as ``expr.meta.serialize(format="json")`` gives it.
    min_policy_version : int, optional
        Records of older policies, or of unknown ones, are stale.
    finish_reasons : list of str, optional
        The reasons to keep.
    """

    name = "filter"
    version = 1

    def __init__(
        self,
        *,
        where: str | None = None,
        expression: str | None = None,
        min_policy_version: int | None = None,
        finish_reasons: Sequence[str] | None = None,
    ) -> None:
        if min_policy_version is not None:
            check_integer("min_policy_version", min_policy_version, -(1 << 63), 1 << 63)
        if finish_reasons is not None:
            finish_reasons = names_of("finish_reasons", finish_reasons)
        self.where = where
        self.expression = expression
        self.min_policy_version = min_policy_version
        self.finish_reasons = None if finish_reasons is None else sorted(set(finish_reasons))
        if all(value is None for value in self.options().values()):
            raise JobError(
                "a filter has at least one condition", expected="where, or another", got="none",
                remedy="pass a condition",
            )  # fmt: skip
        require_polars("filters")
        self._conditions = [
            *([] if where is None else [("where", _from_sql(where))]),
            *([] if expression is None else [("expression", _from_json(expression))]),
        ]

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {
            "where": self.where, "expression": self.expression,
            "min_policy_version": self.min_policy_version, "finish_reasons": self.finish_reasons,
        }  # fmt: skip

    def prepare(self, inputs: RecordInputs) -> None:
        """Raise if a condition names what the input has not, or is none."""
        from ragged_pipeline.frames import frame_schema

        known = frame_schema(inputs.ragged)
        for name, expression in self._conditions:
            _check(name, expression, known)
            _check_alone(name, expression, inputs)
        for option, column in (("min_policy_version", "policy_version"),
                               ("finish_reasons", "finish_reason")):  # fmt: skip
            if getattr(self, option) is not None and (
                column not in inputs.ragged or inputs.ragged[column].axis != RECORD
            ):
                raise JobError(
                    f"the input has no column that {option} is about", expected=column,
                    got=", ".join(known),
                )  # fmt: skip

    def keep(self, batch: pa.RecordBatch, context: Context) -> Mask:
        """Return which records to keep; a dropped one counts for the first reason."""
        keep = np.ones(batch.num_rows, np.bool_)
        if self.min_policy_version is not None:
            versions = batch.column("policy_version")
            known = np.asarray(versions.is_valid())
            recent = np.asarray(versions.fill_null(0)) >= self.min_policy_version
            _drop(keep, known, "policy_version unknown", context)
            _drop(keep, recent, "stale", context)
        if self.finish_reasons is not None:
            reasons = batch.column("finish_reason").to_pylist()
            for row, reason in enumerate(reasons):
                if reason not in self.finish_reasons and keep[row]:
                    keep[row] = False
                    count(context.figures, f"finish_reason {reason}", 1)
        for name, expression in self._conditions:
            values = _evaluated(name, expression, batch, context.inputs.ragged)
            known = np.asarray(values.is_not_null().to_numpy())
            _drop(keep, known, f"{name} is null", context)
            _drop(keep, np.asarray(values.fill_null(value=False).to_numpy()), name, context)
        return keep


def _drop(keep: Mask, condition: Mask, reason: str, context: Context) -> None:
    count(context.figures, reason, int((keep & ~condition).sum()))
    keep &= condition


def _evaluated(name: str, expression: pl.Expr, batch: pa.RecordBatch, schema: Any) -> pl.Series:
    import polars as pl

    from ragged_pipeline.frames import to_frame

    frame = to_frame(batch, schema, expression.meta.root_names())
    try:
        values = frame.select(expression.alias("keep")).to_series()
    except pl.exceptions.PolarsError as err:
        raise JobError(
            f"{name} has no value for some records", expected="true, false or null for each record",
            got=str(err), remedy="use what gives null instead, as try_cast does",
        ) from err  # fmt: skip
    # A condition that names no column has one value.
    return values.new_from_index(0, frame.height) if len(values) == 1 else values


def _from_sql(text: str) -> pl.Expr:
    import polars as pl

    try:
        return pl.sql_expr(text)
    except pl.exceptions.PolarsError as err:
        raise JobError(
            "the condition is not SQL", expected="as 'reward > 0 and token_length < 4096'",
            got=f"{text!r}: {err}", remedy="compare record columns and lengths, as there",
        ) from err  # fmt: skip


def _from_json(text: str) -> pl.Expr:
    import polars as pl

    if "AnonymousFunction" in text or "PythonUdf" in text:
        raise JobError(
            "a filter runs in other processes, and a Python function is not data",
            expected="polars' own expressions", got="a Python function in the expression",
            remedy="write it with expressions",
        )  # fmt: skip
    try:
        return pl.Expr.deserialize(text.encode(), format="json")
    except (pl.exceptions.PolarsError, ValueError) as err:
        raise JobError(
            "the expression is not what polars serializes",
            expected='expr.meta.serialize(format="json")', got=str(err),
        ) from err  # fmt: skip


def _check(name: str, expression: pl.Expr, known: dict[str, Any]) -> None:
    import polars as pl

    if lacking := [column for column in expression.meta.root_names() if column not in known]:
        raise JobError(
            f"{name} names what the input has not", expected=", ".join(known),
            got=", ".join(dict.fromkeys(lacking)), remedy="name record columns and lengths",
        )  # fmt: skip
    try:
        kind = pl.DataFrame(schema=known).select(expression).to_series().dtype
    except pl.exceptions.PolarsError as err:
        raise JobError(
            f"{name} does not fit the types of the columns", got=str(err),
            expected=", ".join(f"{column} {kind}" for column, kind in known.items()),
        ) from err  # fmt: skip
    if kind != pl.Boolean:
        raise JobError(
            f"{name} is no condition", expected="true, false or null", got=str(kind),
            remedy="compare the value with something",
        )  # fmt: skip


def _check_alone(name: str, expression: pl.Expr, inputs: RecordInputs) -> None:
    """Raise if the value for a record depends on the records around it.

    Aggregates and windows are found in the expression; all else that looks at neighbours gives
    itself away on the first records of the input, taken in parts and in another order.
    """
    import polars as pl

    text = expression.meta.serialize(format="json")
    alone = not any(f'"{kind}":' in text for kind in ("Agg", "Window", "Over"))
    runs, _ = inputs.tasks()
    if alone and runs:
        batch = next(inputs.batches([runs[0][0].to_json()])).slice(0, 256)
        values = _evaluated(name, expression, batch, inputs.ragged)
        parts = [
            _evaluated(name, expression, batch.slice(start, 3), inputs.ragged)
            for start in range(0, batch.num_rows, 3)
        ]
        alone = len(values) == batch.num_rows and pl.concat(parts).equals(values)
    if not alone:
        raise JobError(
            f"{name} depends on other records than its own, and these differ from batch to batch",
            expected="a condition on one record", got=str(expression),
            remedy="compute such values first, with ragged_pipeline.scan",
        )  # fmt: skip
