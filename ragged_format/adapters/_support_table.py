"""SkyRL's sample support: an int32 table of the ids that the sampler kept, -1 behind them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._sentinels import FLOOR
from ragged_format.adapters._values import Rows, malformed
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.adapters._values import Bools
    from ragged_format.lists import Int64

__all__ = ["Table", "decode_support", "encode_support", "rows_of", "support_from_flat"]

Table = npt.NDArray[np.int32]
_WIRE_TYPE = "int32"


def decode_support(value: Any, where: Where | None = None) -> Table:
    """Return the table of the wire form ``{data, shape, dtype}``, a read-only view.

    Raises
    ------
    ConversionError
        Another form or type (``RF-A002``), or bytes that do not fill the shape (``RF-A006``).
    """
    where = where or Where()
    if not isinstance(value, Mapping) or value.get("dtype") != _WIRE_TYPE:
        malformed(
            "a support on the wire is base64 of int32", where, "data, shape, dtype 'int32'", value
        )
    try:
        data = base64.b64decode(value["data"], validate=True)
        rows, width = (int(n) for n in value["shape"])
    except (binascii.Error, KeyError, TypeError, ValueError) as err:
        raise ConversionError(
            "a support on the wire has data and a shape", code="RF-A002", where=where,
            expected="base64, and [tokens, top_k]", got=str(err),
        ) from err  # fmt: skip
    if min(rows, width) < 0 or len(data) != 4 * rows * width:
        raise ConversionError(
            "the bytes of a support fill its shape", code="RF-A006", where=where,
            expected=f"{4 * rows * width} bytes for [{rows}, {width}]", got=len(data),
        )  # fmt: skip
    return np.frombuffer(data, "<i4").reshape(rows, width)


def encode_support(table: Table) -> dict[str, Any]:
    """Return a table, (tokens, top_k) int32, in its wire form."""
    data = base64.b64encode(np.ascontiguousarray(table, "<i4").tobytes()).decode()
    return {"data": data, "shape": list(table.shape), "dtype": _WIRE_TYPE}


def rows_of(table: npt.NDArray[Any], where: Where) -> Rows:
    """Return the ids of a table row by row; a row of -1 alone is null.

    Raises
    ------
    ConversionError
        Not a table of integers, -1 before an id, or another negative (``RF-A002``).
    """
    if table.ndim != 2 or table.dtype.kind not in "iu":
        malformed(
            "a support is a table of ids", where, "(tokens, top_k) integers",
            f"{table.shape} {table.dtype}",
        )  # fmt: skip
    used = table >= 0
    counts = np.count_nonzero(used, axis=1).astype(np.int64)
    wrong = ((table < -1) | (used != (np.arange(table.shape[1]) < counts[:, None]))).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        malformed(
            "the ids of a support stand before its padding, which is -1",
            Where(where.file, row=where.row, column=where.column, position=row),
            "ids >= 0, then -1", table[row].tolist(),
        )  # fmt: skip
    return Rows(table[used].astype(np.int64), counts, counts == 0)


def support_from_flat(
    token_ids: npt.NDArray[Any], log_probs: npt.NDArray[Any], top_k: int
) -> tuple[Table, Bools]:
    """Return the table that SkyRL makes of an engine's flat log-probs, and the rows it repairs.

    Where the sampled token is not among the best `top_k`, because others tie with it, SkyRL puts it
    in place of the last of them. Such a row is not the sampler's set: do not take it for one.

    Parameters
    ----------
    token_ids : (t * (top_k + 1),) int
        Of each token the sampled id, then the best `top_k` in order.
    log_probs : (t * (top_k + 1),) float
        Parallel; -inf (or a floor) outside the set.
    top_k : int

    Returns
    -------
    table : (t, top_k) int32
    repaired : (t,) bool

    Raises
    ------
    ConversionError
        The lengths are no multiple of ``top_k + 1`` (``RF-A006``).

    Examples
    --------
    >>> ids = np.array([7, 5, 9, 5, 5, 9])
    >>> values = np.array([-3.0, -0.1, -2.5, -0.2, -0.2, -np.inf])
    >>> table, repaired = support_from_flat(ids, values, 2)
    >>> table.tolist(), repaired.tolist()
    ([[5, 7], [5, -1]], [True, False])
    """
    if top_k < 1 or len(token_ids) % (top_k + 1) or len(token_ids) != len(log_probs):
        raise ConversionError(
            "flat log-probs have the sampled token and top_k others for every token",
            code="RF-A006", expected=f"a multiple of {top_k + 1}",
            got=f"{len(token_ids)} ids, {len(log_probs)} log-probs",
        )  # fmt: skip
    ids = token_ids.reshape(-1, top_k + 1).astype(np.int32)
    inside = log_probs.reshape(-1, top_k + 1)[:, 1:] > FLOOR
    sampled = ids[:, :1]
    kept = np.where(inside, ids[:, 1:], -1)
    # Stable: ids stay in their order, padding moves behind them.
    order = np.argsort(~inside, axis=1, kind="stable")
    table = np.take_along_axis(kept, order, axis=1)
    repaired: Bools = ~((table == sampled).any(axis=1))
    counts: Int64 = np.count_nonzero(inside, axis=1)
    at = np.flatnonzero(repaired)
    table[at, np.maximum(counts[at] - 1, 0)] = sampled[at, 0]
    return table, repaired
