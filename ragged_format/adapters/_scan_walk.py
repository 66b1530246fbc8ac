"""One pass over JSON text that takes the big lists out as flat arrays; compiled by numba.

What is left, the text with a mark in the place of each list, is for ``json``: it decides about all
that is not a list of the expected form. Places are int64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._machine import byte, compiled, inlined, load
from ragged_format.adapters._scan_numbers import BAD, decimal, integers, rows, skip_space, whole

__all__ = ["CONTENT", "FLAT", "MARK", "MARK_SIZE", "ROWS", "Longs", "Room", "Text", "walk"]

# The types of numbers in compiled code; to the type checker they are any.
_I: Any = np.int64
_F: Any = np.float64

Text = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]

# Kinds of lists. Each span is a kind, the end of the list in the arrays of its values, and the end
# in the array of its counts.
FLAT, ROWS, CONTENT = range(3)
# A control character, which strings of JSON cannot hold, then the number of the list.
MARK = 1
_DIGITS = 8
MARK_SIZE = _DIGITS + 3

_SPACE, _QUOTE, _COMMA, _COLON, _ZERO = (ord(c) for c in ' ",:0')
_OPEN, _CLOSE, _BEGIN, _END, _ESCAPE = (ord(c) for c in "[]{}\\")


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text[:8], "little"))


def _pair(text: bytes) -> tuple[np.uint64, np.uint64, int]:
    """Return the first and the last 8 bytes, and the length, of 8 to 16 bytes."""
    return _word(text), _word(text[-8:]), len(text)


_CONTENT, _OFFSETS = _word(b'content"'), _word(b'offsets"')
_LOG_PROBS, _TOKEN_IDS = _word(b"logprobs"), _word(b"token_ids")
_SAMPLING_MASK = _pair(b"sampling_mask")[:2]
_PROMPT = _pair(b"prompt_token_ids")[:2]
_ID = _pair(b'{"token_id":')
_LOG_PROB = _pair(b',"logprob":')
_RANK = _pair(b',"rank":')
_TOP = _pair(b',"top_logprobs":')
# The same with space after commas and colons, as json.dumps writes it by default.
_ID_QUOTED = np.frombuffer(b'"token_id"', np.uint8)
_LOG_PROB_QUOTED = np.frombuffer(b'"logprob"', np.uint8)
_RANK_QUOTED = np.frombuffer(b'"rank"', np.uint8)
_TOP_QUOTED = np.frombuffer(b'"top_logprobs"', np.uint8)


class Room(NamedTuple):
    """Arrays that a walk fills from the beginning.

    Attributes
    ----------
    rest : uint8
        Text with marks.
    spans : (n, 3) int64
        The lists.
    longs : int64
        Values of flat lists and counts of rows.
    ids : int32
        Values of rows.
    tokens : (n, 2) int64
        Id and entries of each token of a content list.
    token_values : float64
    entries : (n, 2) int64
        Id and rank of each entry.
    entry_values : float64
    """

    rest: Text
    spans: Longs
    longs: Longs
    ids: npt.NDArray[np.int32]
    tokens: Longs
    token_values: npt.NDArray[np.float64]
    entries: Longs
    entry_values: npt.NDArray[np.float64]


@compiled
def _spaced(at: int, stop: int, first: int, quoted: Text) -> int:
    """Return the place of the value where a byte, a quoted key and a colon come, space between."""
    if at >= stop or byte(at) != first:
        return BAD
    at = skip_space(at + 1, stop)
    if at + len(quoted) > stop:
        return BAD
    for n in range(len(quoted)):
        if byte(at + n) != quoted[n]:
            return BAD
    at = skip_space(at + len(quoted), stop)
    if at >= stop or byte(at) != _COLON:
        return BAD
    return skip_space(at + 1, stop)


@inlined
def _after(
    at: int, stop: int, key: tuple[np.uint64, np.uint64, int], first: int, quoted: Text
) -> int:
    """Return the place of the value of a key, ``BAD`` where another text comes."""
    size = key[2]
    fits = at + size <= stop
    if fits and load(at) == key[0] and load(at + size - 8) == key[1]:
        at += size
        if at < stop and byte(at) > _SPACE:
            return at
        return skip_space(at, stop)
    return _spaced(at, stop, first, quoted)


@inlined
def _entry(at: int, stop: int) -> tuple[int, int, float, int]:
    """Return the place after id, log-prob and rank of an entry, and these three."""
    rank, id_ = _I(0), _I(0)
    value = _F(0.0)
    at = _after(at, stop, _ID, _BEGIN, _ID_QUOTED)
    if at != BAD:
        at, id_ = whole(at, stop)
    if at != BAD:
        at = _after(at, stop, _LOG_PROB, _COMMA, _LOG_PROB_QUOTED)
    if at != BAD:
        at, value = decimal(at, stop)
    if at != BAD:
        at = _after(at, stop, _RANK, _COMMA, _RANK_QUOTED)
    if at != BAD:
        at, rank = whole(at, stop)
    return at, id_, value, rank


@compiled
def _content(at: int, stop: int, room: Room, token: int, entry: int) -> tuple[int, int, int]:
    """Read the content list that begins before `at`.

    Returns the place after it, and how many tokens and entries there are now.
    """
    while True:
        at, room.tokens[token, 0], room.token_values[token], _ = _entry(at, stop)
        if at != BAD:
            at = _after(at, stop, _TOP, _COMMA, _TOP_QUOTED)
        if at == BAD or at + 1 >= stop or byte(at) != _OPEN:
            return BAD, token, entry
        at += 1
        first = entry
        if byte(at) == _CLOSE:
            at += 1
        else:
            while True:
                at, id_, value, rank = _entry(at, stop)
                if at == BAD or at + 1 >= stop or byte(at) != _END:
                    return BAD, token, entry
                room.entries[entry, 0] = id_
                room.entries[entry, 1] = rank
                room.entry_values[entry] = value
                entry += 1
                found = byte(at + 1)
                at += 2
                if found == _CLOSE:
                    break
                if found != _COMMA:
                    return BAD, token, entry
                at = skip_space(at, stop)
        room.tokens[token, 1] = entry - first
        token += 1
        if at + 1 >= stop or byte(at) != _END:
            return BAD, token, entry
        found = byte(at + 1)
        at += 2
        if found == _CLOSE:
            return at, token, entry
        if found != _COMMA:
            return BAD, token, entry
        at = skip_space(at, stop)


@inlined
def _string_end(at: int, stop: int) -> int:
    """Return the place of the mark that closes a string; ``BAD``: none, or a control character."""
    while at < stop:
        found = byte(at)
        if found == _QUOTE:
            return at
        if found < _SPACE:
            return BAD
        at += 2 if found == _ESCAPE else 1
    return BAD


@inlined
def _kind(begin: int, end: int) -> int:
    """Return the length of a key, or 0 where it is none whose lists are read here."""
    size = end - begin
    if size == 7:
        found = load(begin) in (_CONTENT, _OFFSETS)
    elif size == 8:
        found = load(begin) == _LOG_PROBS
    elif size == 9:
        found = load(begin) == _TOKEN_IDS and byte(begin + 8) == 115
    elif size == 13:
        found = (load(begin), load(end - 8)) == _SAMPLING_MASK
    else:
        found = size == 16 and (load(begin), load(end - 8)) == _PROMPT
    return size if found else 0


@inlined
def _copy(begin: int, end: int, out: Text, filled: int) -> int:
    for n in range(end - begin):
        out[filled + n] = byte(begin + n)
    return filled + end - begin


@compiled
def walk(at: int, stop: int, room: Room, filled: Longs) -> bool:
    """Take the lists out of one text.

    Parameters
    ----------
    at, stop : int
        Addresses of its first byte and of the byte after its last.
    room : Room
    filled : (6,) int64
        How much of `room` is filled: rest, spans, longs, ids, tokens, entries. Grows, if the text
        could be read.

    Returns
    -------
    bool
        Whether it could; if not, ``json`` must read the text.
    """
    rest, spans, longs, ids = filled[0], filled[1], filled[2], filled[3]
    tokens, entries = filled[4], filled[5]
    begin = at
    inside = _I(BAD)  # where the first key of an object of log-probs is
    while at < stop:
        if byte(at) != _QUOTE:
            at += 1
            continue
        opening = at
        end = _string_end(at + 1, stop)
        if end == BAD:
            return False
        at = end + 1
        size = _kind(opening + 1, end)
        if size == 0:
            continue
        value = skip_space(at, stop)
        if value >= stop or byte(value) != _COLON:
            continue
        value = skip_space(value + 1, stop)
        if value + 1 >= stop:
            continue
        if size == 8:
            inside = skip_space(value + 1, stop) if byte(value) == _BEGIN else _I(BAD)
            continue
        if byte(value) != _OPEN:
            continue
        inner = skip_space(value + 1, stop)
        is_nested = inner < stop and byte(inner) == _OPEN
        after = _I(BAD)
        kind = FLAT
        if size == 13 or (size == 9 and is_nested):
            kind = ROWS
            after, new, row = rows(value + 1, stop, room.ids, ids, room.longs, longs)
            if after != BAD:
                ids, longs = new, row
        elif size != 7 or load(opening + 1) == _OFFSETS:
            after, new = integers(value + 1, stop, room.longs, longs)
            if after != BAD:
                longs = new
        elif opening == inside:
            kind = CONTENT
            after, token, entry = _content(inner, stop, room, tokens, entries)
            if after != BAD:
                tokens, entries = token, entry
        if after == BAD:
            continue
        rest = _copy(begin, value, room.rest, rest)
        room.rest[rest] = room.rest[rest + MARK_SIZE - 1] = _QUOTE
        room.rest[rest + 1] = MARK
        number = spans
        for n in range(_DIGITS):
            room.rest[rest + _DIGITS + 1 - n] = _ZERO + number % 10
            number //= 10
        rest += MARK_SIZE
        room.spans[spans, 0] = kind
        room.spans[spans, 1] = tokens if kind == CONTENT else ids if kind == ROWS else longs
        room.spans[spans, 2] = entries if kind == CONTENT else longs
        spans += 1
        begin = at = after
    rest = _copy(begin, stop, room.rest, rest)
    filled[0], filled[1], filled[2], filled[3] = rest, spans, longs, ids
    filled[4], filled[5] = tokens, entries
    return True
