"""Machine instructions that Python has no words for, for code that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

__all__ = [
    "Text",
    "compiled",
    "double_of_bits",
    "high_product",
    "inlined",
    "kept",
    "leading_zeros",
    "load",
    "others_than_digits",
    "trailing_zeros",
]

Text = npt.NDArray[np.uint8]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_WORD, _WIDE, _BYTE = ir.IntType(64), ir.IntType(128), ir.IntType(8)
_BLOCK = ir.VectorType(_BYTE, 64)


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function, compiled when it is first called."""
    return cast("Callable[_P, _R]", numba.njit(nogil=True)(function))


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function, compiled into all callers, which saves counting references to arrays."""
    return cast("Callable[_P, _R]", numba.njit(forceinline=True)(function))


def kept(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function, compiled when it is first called by a user, and kept on disk.

    numba looks at the file of this function only, to see whether what it kept is of the same
    source, so the function must be a closure of something that changes with all other files. It
    keeps code beside the file, else in the user's cache, else nowhere.
    """
    try:
        return cast("Callable[_P, _R]", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder can be written
        return compiled(function)


def instruction(function: Callable[..., Any]) -> Any:
    """Return the function that compiled code calls; numba takes its parameters by their names."""
    return intrinsic(function)


def _pointer(context: Any, builder: Any, signature: Any, args: Any, kind: Any) -> Any:
    text = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.bitcast(builder.gep(text.data, [args[1]]), kind.as_pointer())


@instruction
def load(_context: Any, text: Any, place: Any) -> Any:  # noqa: ARG001
    """Return the 8 bytes of `text` from `place` on as a little-endian uint64, unchecked."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature, args, _WORD), align=1)

    return types.uint64(text, types.int64), emit


@instruction
def others_than_digits(_context: Any, text: Any, place: Any) -> Any:  # noqa: ARG001
    """Return a bit for each of the 64 bytes of `text` from `place` on: 0 for a digit, else 1."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = builder.load(_pointer(context, builder, signature, args, _BLOCK), align=1)
        from_zero = builder.sub(block, ir.Constant(_BLOCK, [ord("0")] * 64))
        found = builder.icmp_unsigned(">", from_zero, ir.Constant(_BLOCK, [9] * 64))
        return builder.bitcast(found, _WORD)

    return types.uint64(text, types.int64), emit


@instruction
def trailing_zeros(_context: Any, _bits: Any) -> Any:
    """Return the number of the lowest bit that is set, 64 for none, as int64."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), emit


@instruction
def leading_zeros(_context: Any, _bits: Any) -> Any:
    """Return how many bits above the highest that is set are not, 64 if none is, as int64."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), emit


@instruction
def high_product(_context: Any, _a: Any, _b: Any) -> Any:
    """Return the upper 64 of the 128 bits of a product."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        product = builder.mul(*[builder.zext(arg, _WIDE) for arg in args])
        return builder.trunc(builder.lshr(product, ir.Constant(_WIDE, 64)), _WORD)

    return types.uint64(types.uint64, types.uint64), emit


@instruction
def double_of_bits(_context: Any, _bits: Any) -> Any:
    """Return the float64 that has these bits."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.uint64), emit
