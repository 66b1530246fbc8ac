"""Batches of tensors as trainers hand them over: nested, dense with lengths, or lists of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._fields import as_array
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["rows_of", "same_lengths"]

Array = npt.NDArray[Any]


def rows_of(value: Any, where: Where, lengths: Sequence[int] | None = None) -> list[Array]:
    """Return one array per sample: (s,), or (s, k) where there is a further axis.

    Parameters
    ----------
    value : nested tensor, (B, S, ...) array or tensor, or list of (s, ...) arrays
        Of a nested tensor the ragged axis must be the first after the batch. Batches of one sample
        and of samples of equal length may come dense: they are the same rows.
    where : Where
    lengths : sequence of int, optional
        Of each sample, where `value` is dense and padded on the right.

    Raises
    ------
    ConversionError
        Another axis is ragged, or lengths do not fit (``RF-A006``).
    """
    ragged = getattr(value, "_ragged_idx", None)
    if callable(getattr(value, "offsets", None)) and ragged is not None:
        if ragged != 1:
            raise ConversionError(
                "the ragged axis of a nested tensor is the sequence", code="RF-A006", where=where,
                expected="_ragged_idx 1", got=ragged,
                remedy="build it with jagged_dim=1; the last axis is K",
            )  # fmt: skip
        values = as_array(value.values(), where, "numbers")
        offsets = as_array(value.offsets(), where, "offsets")
        given = value.lengths() if callable(getattr(value, "lengths", None)) else None
        sizes = np.diff(offsets) if given is None else as_array(given, where, "lengths")
        return [values[a : a + n] for a, n in zip(offsets[:-1], sizes, strict=True)]
    if isinstance(value, list | tuple):
        return [as_array(part, where, "a row of numbers") for part in value]
    dense = as_array(value, where, "numbers")
    if dense.ndim < 2:
        raise ConversionError(
            "a batch has an axis of samples and one of tokens", code="RF-A006", where=where,
            expected="(B, S) or (B, S, K)", got=dense.shape,
        )  # fmt: skip
    if lengths is None:
        return list(dense)
    if len(lengths) != len(dense) or max(lengths, default=0) > dense.shape[1]:
        raise ConversionError(
            "a dense batch holds its samples", code="RF-A006", where=where,
            expected=f"({len(lengths)}, >= {max(lengths, default=0)}, ...)", got=dense.shape,
        )  # fmt: skip
    return [row[:length] for row, length in zip(dense, lengths, strict=True)]


def same_lengths(rows: Sequence[Array], lengths: Sequence[int], where: Where) -> None:
    """Raise ``RF-A006`` unless there is one row per token of every sample."""
    got = [len(row) for row in rows]
    if got != list(lengths):
        number = next(
            (i for i, (a, b) in enumerate(zip(got, lengths, strict=False)) if a != b), len(got)
        )
        raise ConversionError(
            "a field has one row per token", code="RF-A006",
            where=Where(where.file, row=number, column=where.column),
            expected=list(lengths)[:8], got=got[:8],
            remedy="the fields of this batch are not aligned; do not cut or pad them",
        )  # fmt: skip
