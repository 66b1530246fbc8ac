"""The flat way of the head as Triton kernels: no row of hidden states or weight is gathered.

Opt-in (``kernel="triton"``) for CUDA, whose builds of PyTorch bring Triton. Set before the import,
``TRITON_INTERPRET=1`` runs the same kernels on the CPU, slowly, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ragged_format.errors import MissingDependencyError, UnsupportedFeatureError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["add_hidden", "add_weight", "dots"]

_ENTRIES = 32
_WIDTH = 64

# In kernels, annotations name only what `tl` has: Triton's compiler looks them up as it does any
# global of a kernel, and refuses others. Its interpreter does not.


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


def _check_usable(out: Tensor) -> None:
    if triton is None:
        raise MissingDependencyError(
            "Triton is not installed", expected="triton", got="no such module",
            remedy='pip install triton, or use kernel="auto"',
        )  # fmt: skip
    if out.device.type == "cpu" and isinstance(_dots_kernel, triton.JITFunction):
        raise UnsupportedFeatureError(
            "Triton has no kernels for CPUs", expected="tensors on CUDA", got=out.device,
            remedy='use kernel="auto", or set TRITON_INTERPRET=1 before Triton is imported',
        )  # fmt: skip


@_jit
def _dots_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    double: tl.constexpr,
    entries: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * entries + tl.arange(0, entries)
    held = entry < total
    position = tl.load(positions + entry, mask=held, other=0)
    row = tl.load(rows + entry, mask=held, other=0)
    kind = tl.float64 if double else tl.float32
    sums = tl.zeros([entries], dtype=kind)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        inside = held[:, None] & (column < width)[None, :]
        left = tl.load(hidden + position[:, None] * width + column[None, :], mask=inside, other=0.0)
        right = tl.load(weight + row[:, None] * width + column[None, :], mask=inside, other=0.0)
        sums += tl.sum(left.to(kind) * right.to(kind), axis=1)
    tl.store(out + entry, sums, mask=held)


@_jit
def _bags_kernel(
    weight: tl.tensor,
    positions: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    double: tl.constexpr,
    entries: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    target = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    first = tl.load(offsets + target)
    last = tl.load(offsets + target + 1)
    kind = tl.float64 if double else tl.float32
    sums = tl.zeros([columns], dtype=kind)
    for start in range(first, last, entries):
        entry = start + tl.arange(0, entries)
        held = entry < last
        row = tl.load(rows + entry, mask=held, other=0)
        scale = tl.load(grad + entry, mask=held, other=0.0)
        inside = held[:, None] & (column < width)[None, :]
        part = tl.load(weight + row[:, None] * width + column[None, :], mask=inside, other=0.0)
        sums += tl.sum(part.to(kind) * scale[:, None], axis=0)
    position = tl.load(positions + target)
    # Several targets may share a position.
    tl.atomic_add(out + position * width + column, sums, mask=column < width, sem="relaxed")


@_jit
def _rows_kernel(
    hidden: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    double: tl.constexpr,
    entries: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * entries + tl.arange(0, entries)
    held = entry < total
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = held[:, None] & (column < width)[None, :]
    position = tl.load(positions + entry, mask=held, other=0)
    row = tl.load(rows + entry, mask=held, other=0)
    scale = tl.load(grad + entry, mask=held, other=0.0)
    kind = tl.float64 if double else tl.float32
    part = tl.load(hidden + position[:, None] * width + column[None, :], mask=inside, other=0.0)
    at = out + row[:, None] * width + column[None, :]
    tl.atomic_add(at, part.to(kind) * scale[:, None], mask=inside, sem="relaxed")


def dots(hidden: Tensor, weight: Tensor, positions: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write the dot product of hidden row ``positions[i]`` and weight row ``rows[i]`` to `out`.

    Parameters
    ----------
    hidden, weight : (n, h), (v, h) Tensor
    positions, rows : (t,) int64 Tensor
    out : (t,) Tensor
        float32, or float64, in which products are summed.
    """
    _check_usable(out)
    if len(rows):
        with torch.cuda.device(out.get_device()):  # Triton launches on the current device
            _dots_kernel[_blocks(len(rows)),](
                hidden.contiguous(), weight.contiguous(), positions, rows, out, len(rows),
                hidden.shape[1], **_constants(out),
            )  # fmt: skip


def add_hidden(
    weight: Tensor, positions: Tensor, offsets: Tensor, rows: Tensor, grad: Tensor, out: Tensor
) -> None:
    """Add ``grad[i] * weight[rows[i]]``, summed over each target's entries, to its row of `out`.

    Parameters
    ----------
    weight : (v, h) Tensor
    positions : (m,) int64 Tensor
        Row of `out` of each target.
    offsets : (m + 1,) int64 Tensor
        Bounds of the targets' entries.
    rows, grad : (t,) Tensor
    out : (n, h) Tensor
    """
    _check_usable(out)
    if len(positions):
        with torch.cuda.device(out.get_device()):
            _bags_kernel[len(positions), -(-out.shape[1] // _WIDTH)](
                weight.contiguous(), positions, offsets, rows, grad, out, out.shape[1],
                **_constants(out),
            )  # fmt: skip


def add_weight(hidden: Tensor, positions: Tensor, rows: Tensor, grad: Tensor, out: Tensor) -> None:
    """Add ``grad[i] * hidden[positions[i]]`` to row ``rows[i]`` of `out`, (v, h)."""
    _check_usable(out)
    if len(rows):
        with torch.cuda.device(out.get_device()):
            _rows_kernel[_blocks(len(rows)), -(-out.shape[1] // _WIDTH)](
                hidden.contiguous(), positions, rows, grad, out, len(rows), out.shape[1],
                **_constants(out),
            )  # fmt: skip


def _blocks(total: int) -> int:
    return -(-total // _ENTRIES)


def _constants(out: Tensor) -> dict[str, Any]:
    return {"double": out.dtype == torch.float64, "entries": _ENTRIES, "columns": _WIDTH}
