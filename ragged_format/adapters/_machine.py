"""Machine instructions that Python has no words for, for code that numba compiles.

Text is read by address, as an array would cost a count of references in every call. The caller
holds the memory and checks the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

__all__ = [
    "byte",
    "commas",
    "compiled",
    "double_of_bits",
    "high_product",
    "inlined",
    "kept",
    "leading_zeros",
    "load",
    "others_than_digits",
    "trailing_zeros",
    "zeros",
]

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


def _loaded(builder: Any, place: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _all(byte: int) -> Any:
    return ir.Constant(_BLOCK, [byte] * 64)


@instruction
def byte(_context: Any, _place: Any) -> Any:
    """Return the byte at an address."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _loaded(builder, args[0], _BYTE)

    return types.uint8(types.int64), emit


@instruction
def load(_context: Any, _place: Any) -> Any:
    """Return the 8 bytes from an address on as a little-endian uint64."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _loaded(builder, args[0], _WORD)

    return types.uint64(types.int64), emit


@instruction
def others_than_digits(_context: Any, _place: Any) -> Any:
    """Return a bit for each of the 64 bytes from an address on: 0 for a digit, else 1."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        from_zero = builder.sub(_loaded(builder, args[0], _BLOCK), _all(ord("0")))
        return builder.bitcast(builder.icmp_unsigned(">", from_zero, _all(9)), _WORD)

    return types.uint64(types.int64), emit


@instruction
def commas(_context: Any, _place: Any) -> Any:
    """Return a bit for each of the 64 bytes from an address on: 1 for a comma."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        found = builder.icmp_unsigned("==", _loaded(builder, args[0], _BLOCK), _all(ord(",")))
        return builder.bitcast(found, _WORD)

    return types.uint64(types.int64), emit


@instruction
def zeros(_context: Any, _place: Any) -> Any:
    """Return a bit for each of the 64 bytes from an address on: 1 for a digit 0."""

    def emit(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        found = builder.icmp_unsigned("==", _loaded(builder, args[0], _BLOCK), _all(ord("0")))
        return builder.bitcast(found, _WORD)

    return types.uint64(types.int64), emit


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
