"""From flat values and counts to padded tables: one table, width buckets, or chunks of rows.

Row i of a table holds the ``counts[i]`` values that follow those of row i - 1, then the fill. All
index arithmetic is int64, so that neither counts of a narrow type nor a table of more than 2^31
slots overflow (pytorch/pytorch#129191). Widths come from counts on the host: give ``host_counts``
along with counts on an accelerator, and nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ragged_format.arguments import check_integer, check_number, check_size
from ragged_format.errors import InvariantError, LimitExceededError, SchemaMismatchError, Where
from ragged_format.torch.arguments import check_tensors, counts_array
from ragged_format.torch.transfer import to_device

__all__ = ["pad_buckets", "pad_chunks", "pad_ragged", "round_up", "width_buckets"]

Counts = Tensor | npt.NDArray[Any] | Sequence[int]
HostCounts = npt.NDArray[np.int64]

# torch moves these but has no indexed writes for them; their bits are padded as a signed type.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def pad_ragged(
    values: Tensor,
    counts: Counts,
    width: int | None = None,
    fill: float = -1,
    *,
    multiple_of: int | None = None,
    truncate: bool = False,
    host_counts: Counts | None = None,
) -> Tensor:
    """Return the table whose row i holds ``counts[i]`` values, then `fill`.

    Guarantees: a new tensor of the dtype and on the device of `values`; differentiable in floating
    `values`; no host-device synchronisation unless `width` and `host_counts` are both absent and
    `counts` lies on an accelerator. Works under ``torch.compile`` when `width` is given.

    Parameters
    ----------
    values : (t, …) Tensor
        All rows end to end; trailing dimensions are kept.
    counts : (m,) int Tensor, ndarray or sequence
        Values in each row, 0 included; they sum to t.
    width : int, optional
        Slots in a row. Default: the largest count.
    fill : int or float
        Value of the other slots; exact in the dtype of `values`.
    multiple_of : int, optional
        Round the width up to a multiple.
    truncate : bool
        Drop the values of a row beyond `width`. Without it they are an error.
    host_counts : (m,) int ndarray or CPU tensor, optional
        The same counts on the host, where `counts` lies on an accelerator.

    Returns
    -------
    (m, width, …) Tensor

    Raises
    ------
    LimitExceededError
        A count exceeds `width` (``RF-L001``), or the dtype cannot hold `fill`. For counts that lie
        on an accelerator only, the first is a device-side assertion.
    InvariantError
        A count is negative (``RF-I004``), or the counts do not sum to t (``RF-I005``).

    Examples
    --------
    >>> pad_ragged(torch.tensor([5, 6, 7]), [1, 0, 2])
    tensor([[ 5, -1],
            [-1, -1],
            [ 6,  7]])
    >>> pad_ragged(torch.tensor([5, 6, 7]), [1, 0, 2], width=1)
    Traceback (most recent call last):
    ...
    ragged_format.errors.LimitExceededError: [RF-L001] a row has more values than the width
      where:    position 2
      expected: <= 1
      got:      2
      remedy:   pass a larger width, or truncate=True to drop the rest of such rows
    """
    _check_kinds(values, fill)
    on_device = _device_counts(counts, values.device)
    host = _host(counts if host_counts is None else host_counts)
    if width is None:
        if host is None:
            host = _checked_host(on_device)
        width = _largest(host)
    elif not torch.compiler.is_compiling():
        check_integer("width", width, 0)
    width = round_up(width, multiple_of)
    if host is None:
        _assert_on_device(on_device, width, truncate=truncate)
    else:
        _check_counts(host, len(values), None if truncate else width)
    return scatter_rows(values, on_device, width, fill, truncate=truncate)


def pad_buckets(
    values: Tensor, counts: Counts, fill: float = -1, *, host_counts: Counts | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return tables in widths of powers of two, each with the rows that need that width.

    Together they hold at most twice the values, however wide the widest row. Rows without values
    are in no bucket.

    Parameters
    ----------
    values, counts, fill, host_counts
        As for :func:`pad_ragged`.

    Returns
    -------
    list of (row_index, table)
        By ascending width; ``row_index`` is (k,) int64, ascending, and ``table`` (k, width, …).

    Raises
    ------
    InvariantError, LimitExceededError
        As :func:`pad_ragged`.

    Examples
    --------
    >>> for rows, table in pad_buckets(torch.tensor([5, 6, 7, 8]), [1, 0, 3]):
    ...     print(rows.tolist(), table.tolist())
    [0] [[5]]
    [2] [[6, 7, 8, -1]]
    """
    _check_kinds(values, fill)
    on_device = _device_counts(counts, values.device)
    host = _host(counts if host_counts is None else host_counts)
    if host is None:
        host = _checked_host(on_device)
    _check_counts(host, len(values), None)
    exponents = _exponents(host)
    sizes = np.bincount(exponents[host > 0], minlength=1)
    starts = torch.cumsum(on_device, 0) - on_device
    if values.device.type == "cpu":
        # numpy's stable sort of bytes is a radix sort, many times faster than torch's.
        order = torch.from_numpy(np.argsort(_sort_keys(host), kind="stable"))
    else:
        order = device_order(on_device, len(sizes))
    out = []
    first = 0
    for exponent, size in enumerate(sizes.tolist()):
        if size:
            rows = order[first : first + size]
            first += size
            out.append((rows, _gather_rows(values, starts[rows], on_device[rows], 1 << exponent,
                                           fill)))  # fmt: skip
    return out


def pad_chunks(
    values: Tensor,
    counts: Counts,
    rows: int,
    fill: float = -1,
    *,
    multiple_of: int | None = None,
    host_counts: Counts | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the table in chunks of consecutive rows, each only as wide as its own widest row.

    The whole table never exists, and one wide row widens one chunk only.

    Parameters
    ----------
    values, counts, fill, multiple_of, host_counts
        As for :func:`pad_ragged`.
    rows : int
        Rows in a chunk, >= 1; the last chunk may have fewer.

    Yields
    ------
    (start, stop, table)
        ``table`` is (stop - start, width, …) for the rows ``[start, stop)``.

    Raises
    ------
    InvariantError, LimitExceededError
        As :func:`pad_ragged`.

    Examples
    --------
    >>> for start, stop, table in pad_chunks(torch.tensor([5, 6, 7, 8]), [1, 0, 3], rows=2):
    ...     print(start, stop, table.tolist())
    0 2 [[5], [-1]]
    2 3 [[6, 7, 8]]
    """
    check_integer("rows", rows, 1)
    _check_kinds(values, fill)
    on_device = _device_counts(counts, values.device)
    host = _host(counts if host_counts is None else host_counts)
    if host is None:
        host = _checked_host(on_device)
    _check_counts(host, len(values), None)
    return _chunks(values, on_device, host, rows, fill, multiple_of)


def _chunks(
    values: Tensor,
    counts: Tensor,
    host: HostCounts,
    rows: int,
    fill: float,
    multiple_of: int | None,
) -> Iterator[tuple[int, int, Tensor]]:
    first = 0
    for start in range(0, len(host), rows):
        part = host[start : start + rows]
        last = first + int(part.sum())
        width = round_up(_largest(part), multiple_of)
        stop = start + len(part)
        yield start, stop, scatter_rows(values[first:last], counts[start:stop], width, fill)
        first = last


def width_buckets(counts: Counts) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return the rows of each power-of-two width, (width, row indices), ascending in both.

    Rows with count 0 are in no bucket.

    Parameters
    ----------
    counts : (m,) int ndarray, sequence or CPU tensor
        Values in each row.

    Raises
    ------
    InvariantError
        A count is negative (``RF-I004``).

    Examples
    --------
    >>> [(width, rows.tolist()) for width, rows in width_buckets([1, 5, 0, 2, 8])]
    [(1, [0]), (2, [3]), (8, [1, 4])]
    """
    host = _host(counts)
    if host is None:
        raise SchemaMismatchError(
            "widths are found on the host", expected="counts on the host",
            got=f"counts on {getattr(counts, 'device', '?')}", remedy="pass the host's counts",
        )  # fmt: skip
    _check_counts(host, None, None)
    order = np.argsort(_sort_keys(host), kind="stable")
    sizes = np.bincount(_exponents(host)[host > 0], minlength=1)
    bounds = np.cumsum(sizes)
    return [
        (1 << exponent, order[bound - size : bound])
        for exponent, (bound, size) in enumerate(zip(bounds.tolist(), sizes.tolist(), strict=True))
        if size
    ]


def round_up(width: int, multiple_of: int | None) -> int:
    """Return `width` rounded up to a multiple; 0 stays 0.

    Raises
    ------
    LimitExceededError
        `multiple_of` is not positive.
    """
    if multiple_of is None:
        return width
    if not torch.compiler.is_compiling():
        check_size("multiple_of", multiple_of)
    return -(-width // multiple_of) * multiple_of


def scatter_rows(
    values: Tensor, counts: Tensor, width: int, fill: float, *, truncate: bool = False
) -> Tensor:
    """Return the (m, width, …) table of checked counts that lie on the device of `values`.

    One write of the fill, one indexed write of the values: time follows the table's size.
    """
    number = len(counts)
    slots = number * width
    index = slot_index(counts, width, len(values))
    if truncate:
        # Values beyond the width go to one slot behind the table: dropping them by a boolean index
        # would wait for the device to count them.
        row = torch.repeat_interleave(
            torch.arange(number, device=counts.device), counts, output_size=len(values)
        )
        index = torch.where(index - row * width < width, index, slots)
    shape = (slots + 1 if truncate else slots, *values.shape[1:])
    signed = _SIGNED.get(values.dtype)
    table = torch.full(shape, _exact(fill, values.dtype), dtype=values.dtype, device=values.device)
    if signed is None:
        table.index_copy_(0, index, values)
    else:
        table.view(signed).index_copy_(0, index, values.view(signed))
    return table[:slots].view(number, width, *values.shape[1:])


def slot_index(counts: Tensor, width: int, total: int) -> Tensor:
    """Return the slot, (total,) int64, of each value in a table of rows of `width` slots."""
    wide = counts.to(torch.int64)
    # From value to value one slot further, at the first of a row over what the rows before left
    # empty: a third of the bytes of repeating each row's shift.
    steps = torch.ones(total + 1, dtype=torch.int64, device=counts.device)
    steps[:1].zero_()
    steps.index_add_(0, torch.cumsum(wide, 0)[:-1], width - wide[:-1])
    return torch.cumsum(steps, 0)[:total]


def device_order(counts: Tensor, buckets: int) -> Tensor:
    """Return the rows sorted by power-of-two width, those without values last, on the device."""
    powers = 2 ** torch.arange(buckets, device=counts.device)
    keys = torch.where(counts > 0, torch.searchsorted(powers, counts), buckets)
    return torch.argsort(keys, stable=True)


def _gather_rows(values: Tensor, starts: Tensor, counts: Tensor, width: int, fill: float) -> Tensor:
    """Return the (k, width, …) table of any rows; cheap where most slots hold a value."""
    columns = torch.arange(width, dtype=torch.int64, device=values.device)
    held = columns < counts[:, None]
    index = torch.where(held, starts[:, None] + columns, 0)
    signed = _SIGNED.get(values.dtype)
    source = values if signed is None else values.view(signed)
    table = source[index]
    value = torch.full((), _exact(fill, values.dtype), dtype=values.dtype, device=values.device)
    value = value if signed is None else value.view(signed)
    table = torch.where(held.view(*held.shape, *(1,) * (values.dim() - 1)), table, value)
    return table if signed is None else table.view(values.dtype)


def _exact(fill: float, dtype: torch.dtype) -> float:
    """Return the fill as the dtype holds it; raises ``RF-L001`` where it cannot."""
    if dtype.is_floating_point:
        low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
        fits = not math.isfinite(fill) or low <= fill <= high
    else:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min,
                                                        torch.iinfo(dtype).max)  # fmt: skip
        fits = math.isfinite(fill) and fill == int(fill) and low <= fill <= high
        fill = int(fill) if fits else fill
    if not fits:
        raise LimitExceededError(
            "the dtype of the values cannot hold the fill",
            expected=f"a value of {dtype} in [{low}, {high}]", got=fill,
            remedy="pass another fill",
        )  # fmt: skip
    return fill


def _check_kinds(values: Tensor, fill: float) -> None:
    if not torch.compiler.is_compiling():
        check_tensors(values=values)
        check_number("fill", fill)


def _device_counts(counts: Counts, device: torch.device) -> Tensor:
    if isinstance(counts, Tensor):
        if counts.device == device or counts.device.type != "cpu" or torch.compiler.is_compiling():
            return counts.to(device, torch.int64, non_blocking=True)
        counts = counts.detach().numpy()
    # A copy: torch wants memory that it may write, and the caller may write to its own.
    return to_device(counts_array(counts).copy(), device)


def _host(counts: Counts) -> HostCounts | None:
    """Return counts that lie on the host as int64, or None; also None while a graph is traced."""
    if isinstance(counts, Tensor):
        if counts.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        counts = counts.detach().numpy()
    return counts_array(counts)


def _checked_host(counts: Tensor) -> HostCounts:
    host: HostCounts = counts.cpu().numpy()
    return host


def _largest(counts: HostCounts) -> int:
    return int(counts.max()) if len(counts) else 0


def _check_counts(counts: HostCounts, total: int | None, width: int | None) -> None:
    if len(counts) and counts.min() < 0:
        first = int(np.argmax(counts < 0))
        raise InvariantError(
            "a count is negative", code="RF-I004", where=Where(position=first),
            expected=">= 0", got=int(counts[first]),
            remedy="check what made them",
        )  # fmt: skip
    if total is not None and (got := int(counts.sum())) != total:
        raise InvariantError(
            "the counts do not sum to the number of values",
            code="RF-I005", expected=f"{total} values", got=f"counts that sum to {got}",
            remedy="pass the counts of these values",
        )  # fmt: skip
    if width is not None and _largest(counts) > width:
        first = int(np.argmax(counts > width))
        raise LimitExceededError(
            "a row has more values than the width", where=Where(position=first),
            expected=f"<= {width}", got=int(counts[first]),
            remedy="pass a larger width, or truncate=True to drop the rest of such rows",
        )  # fmt: skip


def _assert_on_device(counts: Tensor, width: int, *, truncate: bool) -> None:
    """Check counts that only the device knows, without waiting for it."""
    good = (counts >= 0).all()
    if not truncate:
        good = good & (counts <= width).all()
    torch._assert_async(good, "a count is negative or exceeds the width")  # noqa: SLF001


def _exponents(counts: HostCounts) -> npt.NDArray[np.uint8]:
    """Return e with 2^(e-1) < count <= 2^e; 0 for counts 0 and 1. Exact below 2^53."""
    return np.frexp(np.maximum(counts - 1, 0).astype(np.float64))[1].astype(np.uint8)


def _sort_keys(counts: HostCounts) -> npt.NDArray[np.uint8]:
    """Return keys that sort rows by width, those without values last."""
    return np.where(counts > 0, _exponents(counts), np.uint8(255))
