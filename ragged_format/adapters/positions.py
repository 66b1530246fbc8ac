"""Position conventions: which entry of a per-token column describes which token.

* **own**: entry p describes the distribution from which token p was drawn (this format, prime-rl,
  TRL, miles). The first token of a record has none.
* **predictor**: entry p describes the distribution that predicts token p + 1 (DistillKit, Axolotl
  after its shift). The last token of a record has none.
* **generated**: entry j describes generated token j (responses of engines).

A column is converted by moving its entries; where its elements are ragged rows, their *counts* are
the column to move, and the values stay as they are, since no row with values is ever dropped. An
entry that has no place in the other convention must be the fill: nothing is lost silently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, offsets_of, ranges

__all__ = ["generated_to_own", "own_to_generated", "own_to_predictor", "predictor_to_own"]

Values = npt.NDArray[Any]


def own_to_predictor(
    values: Values, offsets: Int64, *, fill: float, column: str | None = None
) -> Values:
    """Return a column by own position as one by predictor position.

    Guarantees: a copy; :func:`predictor_to_own` gives `values` back.

    Parameters
    ----------
    values : (n, ...) ndarray
        Entry of each token, the records end to end.
    offsets : (r + 1,) int64
        Tokens of each record.
    fill : float
        What an entry without meaning holds: 0 for counts.
    column : str, optional
        For errors.

    Raises
    ------
    ConversionError
        The first entry of a record is not the fill: nothing predicts that token (``RF-A006``).

    Examples
    --------
    >>> counts, offsets = np.array([0, 2, 1, 0, 3]), np.array([0, 3, 5])
    >>> own_to_predictor(counts, offsets, fill=0).tolist()
    [2, 1, 0, 3, 0]
    >>> own_to_predictor(counts + 1, offsets, fill=0)
    Traceback (most recent call last):
    ...
    ragged_format.errors.ConversionError: [RF-A006] an entry has no place in the other convention
      where:    row 0, position 0
      expected: 0 for a token that nothing predicts
      got:      1
      remedy:   clear the entry, or check which convention the data follows
    """
    firsts, lasts = _ends(offsets)
    _require_fill(values, offsets, firsts, fill, column, "a token that nothing predicts")
    return _moved(values, -1, lasts, fill)


def predictor_to_own(
    values: Values, offsets: Int64, *, fill: float, column: str | None = None
) -> Values:
    """Return a column by predictor position as one by own position.

    The inverse of :func:`own_to_predictor`; parameters as there.

    Raises
    ------
    ConversionError
        The last entry of a record is not the fill: it predicts no token (``RF-A006``).

    Examples
    --------
    >>> predictor_to_own(np.array([2, 1, 0, 3, 0]), np.array([0, 3, 5]), fill=0).tolist()
    [0, 2, 1, 0, 3]
    """
    firsts, lasts = _ends(offsets)
    _require_fill(values, offsets, lasts, fill, column, "an entry that predicts no token")
    return _moved(values, 1, firsts, fill)


def own_to_generated(
    values: Values, offsets: Int64, prompts: Int64, *, fill: float, column: str | None = None
) -> tuple[Values, Int64]:
    """Return the generated tokens' entries of a column by own position, and their offsets.

    Guarantees: a copy; :func:`generated_to_own` gives `values` back.

    Parameters
    ----------
    values, offsets, fill, column
        As in :func:`own_to_predictor`.
    prompts : (r,) int64
        Tokens of each record before the first generated one.

    Raises
    ------
    ConversionError
        The entry of a prompt token is not the fill (``RF-A006``).

    Examples
    --------
    >>> own_to_generated(np.array([0, 2, 1]), np.array([0, 3]), np.array([1]), fill=0)
    (array([2, 1]), array([0, 2]))
    """
    lengths = np.diff(offsets)
    _check_prompts(prompts, lengths, column)
    before = ranges(offsets[:-1], prompts)
    _require_fill(values, offsets, before, fill, column, "a prompt token")
    kept = ranges(offsets[:-1] + prompts, lengths - prompts)
    return values[kept], offsets_of(lengths - prompts)


def generated_to_own(
    values: Values, offsets: Int64, prompts: Int64, *, fill: float
) -> tuple[Values, Int64]:
    """Return a column of generated tokens as one by own position, and its offsets.

    The inverse of :func:`own_to_generated`: `offsets` are those of the generated tokens, and the
    prompts' entries are the fill.

    Examples
    --------
    >>> generated_to_own(np.array([2, 1]), np.array([0, 2]), np.array([1]), fill=0)
    (array([0, 2, 1]), array([0, 3]))
    """
    generated = np.diff(offsets)
    bounds = offsets_of(generated + prompts)
    out = np.full((int(bounds[-1]), *values.shape[1:]), fill, values.dtype)
    out[ranges(bounds[:-1] + prompts, generated)] = values[: int(offsets[-1])]
    return out, bounds


def _ends(offsets: Int64) -> tuple[Int64, Int64]:
    """Return the first and the last index of every record that is not empty."""
    some = offsets[1:] > offsets[:-1]
    return offsets[:-1][some], offsets[1:][some] - 1


def _moved(values: Values, step: int, emptied: Int64, fill: float) -> Values:
    out = np.roll(values, step, axis=0)
    out[emptied] = fill
    return out


def _require_fill(
    values: Values, offsets: Int64, indices: Int64, fill: float, column: str | None, what: str
) -> None:
    picked = values[indices]
    wrong = ~np.isnan(picked) if np.isnan(fill) else picked != fill
    bad = np.asarray(wrong).any(axis=tuple(range(1, np.ndim(wrong))))
    if bad.any():
        index = int(indices[np.argmax(bad)])
        row = int(np.searchsorted(offsets, index, side="right")) - 1
        raise ConversionError(
            "an entry has no place in the other convention", code="RF-A006",
            where=Where(row=row, column=column, position=index - int(offsets[row])),
            expected=f"{fill} for {what}", got=values[index],
            remedy="clear the entry, or check which convention the data follows",
        )  # fmt: skip


def _check_prompts(prompts: Int64, lengths: Int64, column: str | None) -> None:
    bad = (prompts < 0) | (prompts > lengths)
    if bad.any():
        row = int(np.argmax(bad))
        raise ConversionError(
            "a prompt is part of its record", code="RF-A006", where=Where(row=row, column=column),
            expected=f"0 to {lengths[row]} tokens", got=int(prompts[row]),
        )  # fmt: skip
