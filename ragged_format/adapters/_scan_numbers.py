"""Numbers in JSON text, 8 digits at a step, each exactly as Python reads it; compiled by numba.

Places in the text are addresses, int64, and the text goes up to `stop`; nothing beyond is read.
``BAD`` is the place that is returned where ``json`` has to decide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._machine import (
    byte,
    commas,
    compiled,
    double_of_bits,
    high_product,
    inlined,
    leading_zeros,
    load,
    others_than_digits,
    trailing_zeros,
    zeros,
)

__all__ = ["BAD", "decimal", "integers", "rows", "skip_space", "whole"]

BAD = -1

# The types of numbers in compiled code; to the type checker they are any.
_U: Any = np.uint64
_I: Any = np.int64
_F: Any = np.float64
_ZEROS = _U(0x3030303030303030)
_NIBBLES = _U(0x0F0F0F0F0F0F0F0F)
_ABOVE_9 = _U(0x7676767676767676)
_TOPS = _U(0x8080808080808080)
_ALL = _U(0xFFFFFFFFFFFFFFFF)
_NONE, _ONE, _INT64 = _U(0), _U(1), _U(2**63 - 1)
# Numbers that are made at a time.
_BATCH = 256
_POWERS = np.array([10**n for n in range(20)], np.uint64)
# A number up to this one takes so many further digits.
_ROOM = np.array([(2**64 - 1) // 10**n - 1 for n in range(20)], np.uint64)
_COMMA, _MINUS, _PLUS, _DOT, _ZERO, _OPEN, _CLOSE = (ord(c) for c in ",-+.0[]")
_MOST_DIGITS = 18


def _power_of_five(exponent: int) -> tuple[int, int]:
    """Return the upper 128 bits of 5^exponent as two numbers, cut; rounded up from -27 to -1."""
    if exponent >= 0:
        power = 5**exponent
        bits = power << 128 >> power.bit_length()
    else:
        power = 5**-exponent
        # Rounded up, a product with an exact quotient shows as one.
        bits = (1 << (127 + power.bit_length())) // power + (exponent >= -27)
    return bits >> 64, bits & (2**64 - 1)


_LEAST, _MOST = -342, 308
_FIVES = np.array([_power_of_five(n) for n in range(_LEAST, _MOST + 1)], np.uint64)


@inlined
def _is_space(byte: int) -> bool:
    return byte in (32, 10, 13, 9)


@inlined
def skip_space(at: int, stop: int) -> int:
    """Return the place of the next byte that is no white space, or the end."""
    while at < stop and _is_space(byte(at)):
        at += 1
    return at


@inlined
def _block(at: int, stop: int) -> tuple[Any, Any, Any]:
    """Return which of the next 64 bytes are no digits, commas, and digits 0.

    What lies beyond the end is no digit.
    """
    if at + 64 <= stop:
        return others_than_digits(at), commas(at), zeros(at)
    return _last_block(at, stop)


@compiled
def _last_block(at: int, stop: int) -> tuple[Any, Any, Any]:
    others, ends, nils = _ALL, _NONE, _NONE
    for n in range(stop - at):
        bit = _ONE << _U(n)
        others ^= bit if _is_digit(byte(at + n)) else _NONE
        ends |= bit if byte(at + n) == _COMMA else _NONE
        nils |= bit if byte(at + n) == _ZERO else _NONE
    return others, ends, nils


@inlined
def _marks(at: int, stop: int) -> tuple[Any, Any]:
    """Return of the next 64 bytes those that end a plain number, and those of them that are commas.

    A digit 0 before another digit is no number of JSON: it counts as its end, as what is no digit.
    """
    others, ends, nils = _block(at, stop)
    firsts = others << _ONE
    if not _is_digit(byte(at - 1)):
        firsts |= _ONE
    lasts = others >> _ONE
    if at + 64 >= stop or not _is_digit(byte(at + 64)):
        lasts |= _U(1 << 63)
    return others | (nils & firsts & ~lasts), ends & ~firsts


@inlined
def _is_digit(byte: int) -> bool:
    return 48 <= byte <= 57


@inlined
def _eight(digits: np.uint64) -> Any:
    """Return the number of 8 digits, values 0 to 9 in bytes, the first in the lowest byte."""
    pairs = digits * _U(10) + (digits >> _U(8))
    low = (pairs & _U(0x000000FF000000FF)) * _U(0x000F424000000064)
    high = ((pairs >> _U(16)) & _U(0x000000FF000000FF)) * _U(0x0000271000000001)
    return (low + high) >> _U(32)


@inlined
def _integer(begin: int, end: int) -> Any:
    """Return the integer of the digits between two places, -1 if it is too long or no JSON."""
    size = end - begin
    if size > 1 and byte(begin) == _ZERO:
        return -1
    if size <= 8:
        word = (load(end - 8) ^ _ZEROS) & (_ALL << _U(64 - 8 * size))
        return _I(_eight(word))
    if size > _MOST_DIGITS:
        return -1
    value = _I(0)
    for n in range(begin, end):
        value = value * 10 + _I(byte(n) - np.uint8(_ZERO))
    return value


@compiled
def integers(at: int, stop: int, out: npt.NDArray[np.int64], filled: int) -> tuple[int, int]:
    """Write the list of integers that begins before `at` to `out`, none of them negative.

    Returns the place after the list and how much of `out` is filled.
    """
    begin = skip_space(at, stop)
    if begin < stop and byte(begin) == _CLOSE:
        return begin + 1, filled
    base = begin
    others, _, _ = _block(base, stop)
    while True:
        while others == _NONE:
            base += 64
            others, _, _ = _block(base, stop)
        end = base + trailing_zeros(others)
        if end >= stop:
            return BAD, filled
        others &= others - _ONE
        found = byte(end)
        if begin == end:
            if not _is_space(found):
                return BAD, filled
            begin += 1
            continue
        value = _integer(begin, end)
        if value < 0:
            return BAD, filled
        out[filled] = value
        filled += 1
        begin = end + 1
        if found != _COMMA:
            return begin if found == _CLOSE else BAD, filled


@compiled
def _flush(
    words: npt.NDArray[np.uint64], size: int, out: npt.NDArray[np.int32], filled: int
) -> int:
    """Write the numbers of the first words to `out`: one loop, so that vectors do it."""
    part = out[filled : filled + size]
    for n in range(size):
        part[_U(n)] = np.int32(_eight(words[_U(n)]))
    return filled + size


@compiled
def rows(
    at: int,
    stop: int,
    out: npt.NDArray[np.int32],
    filled: int,
    counts: npt.NDArray[np.int64],
    row: int,
) -> tuple[int, int, int]:
    """Write the lists of integers in the list that begins before `at`, of at most 8 digits each.

    Returns the place after the list, and how much of `out` and `counts` is filled.
    """
    begin = _row(at, stop)
    if begin == BAD:
        return BAD, filled, row
    words = np.empty(_BATCH, np.uint64)
    base = begin
    is_stale = True
    waiting = _I(0)
    before = -filled  # what out and words hold less what they held before this row
    others = plain = _NONE
    while True:
        if is_stale:
            others, plain = _marks(base, stop)
            is_stale = False
        # All numbers up to the first byte that is neither a digit nor a comma behind one.
        odd = others & ~plain
        below = (odd & (~odd + _ONE)) - _ONE
        run = others & below
        others ^= run
        is_long = False
        while run != _NONE:
            end = base + trailing_zeros(run)
            run &= run - _ONE
            size = end - begin
            is_long |= size > 8
            words[_U(waiting)] = load(end - 8) & (_NIBBLES << _U(64 - 8 * size))
            waiting += 1
            begin = end + 1
        if is_long:
            return BAD, filled, row
        if waiting > _BATCH - 64 - 1:
            filled = _flush(words, waiting, out, filled)
            waiting = 0
        if others == _NONE:
            base += 64
            is_stale = True
            continue
        end = base + trailing_zeros(others)
        if end >= stop:
            return BAD, filled, row
        others &= others - _ONE
        found = byte(end)
        size = end - begin
        if size > 0:
            if size > 8 or found != _CLOSE:
                return BAD, filled, row
            words[waiting] = (load(end - 8) ^ _ZEROS) & (_ALL << _U(64 - 8 * size))
            waiting += 1
        elif _is_space(found):
            begin += 1
            continue
        elif found != _CLOSE or filled + waiting + before:  # a comma without a number behind it
            return BAD, filled, row
        counts[row] = filled + waiting + before
        row += 1
        before = -(filled + waiting)
        end += 1
        if end >= stop or byte(end) != _COMMA:
            is_closed = end < stop and byte(end) == _CLOSE
            filled = _flush(words, waiting, out, filled)
            return end + 1 if is_closed else BAD, filled, row
        begin = _row(end + 1, stop)
        if begin == BAD:
            return BAD, filled, row
        if begin < base + 64:
            others &= _ALL << _U(begin - base)
        else:
            base = begin
            is_stale = True


@inlined
def _row(at: int, stop: int) -> int:
    """Return the place after the bracket that opens a list."""
    at = skip_space(at, stop)
    return at + 1 if at < stop and byte(at) == _OPEN else BAD


@inlined
def _digits(at: int, stop: int) -> tuple[int, np.uint64]:
    """Return how many of the next 8 bytes are digits before another byte, and their number."""
    if at + 8 > stop:
        number = _U(0)
        size = 0
        while at + size < stop and _U(byte(at + size) - np.uint8(_ZERO)) <= _U(9):
            number = number * _U(10) + _U(byte(at + size) - np.uint8(_ZERO))
            size += 1
        return size, number
    word = load(at) ^ _ZEROS
    # The lowest mark is right; a carry out of a marked byte may only add marks above it.
    size = trailing_zeros(((word + _ABOVE_9) | word) & _TOPS) >> 3
    if size == 0:
        return 0, _U(0)
    return size, _eight(word << _U(64 - 8 * size))


@inlined
def _digits_on(at: int, stop: int, number: np.uint64) -> tuple[int, np.uint64]:
    """Return the place after digits, and `number` with them behind it; ``BAD`` if over 64 bits."""
    size = 8
    while size == 8:
        size, more = _digits(at, stop)
        if number > _ROOM[size]:
            return BAD, number
        number = number * _POWERS[size] + more
        at += size
    return at, number


@inlined
def whole(at: int, stop: int) -> tuple[int, int]:
    """Return the place after an integer from 0 to 2^63 - 1, and the integer."""
    begin = at
    at, number = _digits_on(at, stop, _NONE)
    if at <= begin or at == stop or (at - begin > 1 and byte(begin) == _ZERO):
        return BAD, 0
    if byte(at) in (46, 69, 101) or number > _INT64:  # a point, an exponent
        return BAD, 0
    return at, _I(number)


@inlined
def decimal(at: int, stop: int) -> tuple[int, float]:
    """Return the place after a number, and the number, correctly rounded to float64."""
    nothing = _F(0.0)
    if at >= stop:
        return BAD, nothing
    negative = byte(at) == _MINUS
    if negative:
        at += 1
    begin = at
    at, number = _digits_on(at, stop, _NONE)
    if at <= begin or at >= stop or (at - begin > 1 and byte(begin) == _ZERO):
        return BAD, nothing
    is_whole = True
    exponent = _I(0)
    if byte(at) == _DOT:
        is_whole = False
        at += 1
        begin = at
        at, number = _digits_on(at, stop, number)
        if at <= begin or at >= stop:
            return BAD, nothing
        exponent = begin - at
    if byte(at) in (69, 101):
        is_whole = False
        at += 1
        down = at < stop and byte(at) == _MINUS
        if down or (at < stop and byte(at) == _PLUS):
            at += 1
        size, more = _digits(at, stop)
        if size == 0 or size > 4:
            return BAD, nothing
        at += size
        exponent += -_I(more) if down else _I(more)
    if number == _U(0):
        # An integer has no sign of its zero.
        return at, -nothing if negative and not is_whole else nothing
    value = _double(number, exponent)
    if value < 0:
        return BAD, nothing
    return at, -value if negative else value


@inlined
def _double(number: np.uint64, exponent: int) -> Any:
    """Return number * 10^exponent rounded to the nearest double, ties to even, or -1.

    As D. Lemire describes in "Number parsing at a gigabyte per second" (2021): the upper 64, where
    these do not decide 128, bits of the power of five give the digits of the result. Numbers that
    are not normal doubles give -1.
    """
    if exponent < _LEAST or exponent > _MOST:
        return -1.0
    shift = leading_zeros(number)
    number <<= _U(shift)
    row = exponent - _LEAST
    low = number * _FIVES[row, 0]
    high = high_product(number, _FIVES[row, 0])
    if high & _U(0x1FF) == _U(0x1FF):
        more = high_product(number, _FIVES[row, 1])
        low += more
        if low < more:
            high += _U(1)
    if low == _ALL:
        return -1.0
    top = _I(high >> _U(63))
    drop = top + 64 - 52 - 3
    mantissa = high >> _U(drop)
    # floor(exponent * log2(10)), exact in the range of the table
    power = ((217706 * exponent) >> 16) + 63 + top - shift + 1023
    # A product without remainder right between two doubles goes to the even one.
    is_tie = low <= _U(1) and -4 <= exponent <= 23 and mantissa & _U(3) == _U(1)
    if is_tie and mantissa << _U(drop) == high:
        mantissa &= ~_U(1)
    mantissa = (mantissa + (mantissa & _U(1))) >> _U(1)
    if mantissa >= _U(2 << 52):
        mantissa = _U(1 << 52)
        power += 1
    if power <= 0 or power >= 0x7FF:
        return -1.0
    bits = (mantissa & ~_U(1 << 52)) | (_U(power) << _U(52))
    return double_of_bits(bits)
