"""Log-prob entries in JSON text as arrays: ``{"token_id":1,"logprob":-0.5,"rank":1,…},…``.

Every entry has the same keys in the same order and every list the same length, so the quotation
marks lie in a fixed pattern, and what remains when keys and brackets are deleted is a flat list of
numbers. All marks, brackets, colons and letters are accounted for, so that text of any other form
gives ``None``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ragged_format.adapters import _simd
from ragged_format.adapters._values import Entries

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = ["EntryList", "read_entries"]

_QUOTE = ord('"')
_KEYS = (b"token_id", b"logprob", b"rank")
_LIST_KEY = b"top_logprobs"
# What stands before an entry: another token's list, the beginning of a list, another entry.
_AFTER_TOKEN, _IN_LIST, _AFTER_ENTRY = b"]},{", b'":[{', b"\x00},{"
_BEGIN, _END = b"....}]},", b"}]}"
# What is deleted to leave numbers and commas. Of the letters of the keys, "e" is in exponents too.
_DELETED = b'{}[]":_abcdfghijklmnopqrstuvwxyz'
_EXPONENT = ord("e")
_EXACT = 2**53
# Characters of an entry and of its list that are not numbers or commas; an entry's keys have one e.
_ENTRY_SIZE = len(b'{"token_id":"logprob":"rank":}')
_LIST_SIZE = len(b'"top_logprobs":[]')


class EntryList(NamedTuple):
    """The entries of all tokens of a text.

    Attributes
    ----------
    starts : (n,) int64
        Place in the text of each token's entry.
    ids : (n,) int64
    values : (n,) float64
    width : int
        Entries of each token's top-K list.
    entries : Entries
        Of all lists end to end.
    """

    starts: Int64
    ids: Int64
    values: npt.NDArray[np.float64]
    width: int
    entries: Entries


@functools.lru_cache(maxsize=64)
def _windows(width: int) -> tuple[Int64, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return what stands around the keys of one token: lengths, 8 bytes before and after each."""
    keys = [*_KEYS, _LIST_KEY, *_KEYS * width]
    opening = [(b"{" if key == _KEYS[0] else b",") + b'"' + key + b'":' for key in keys]
    lengths = np.array([len(key) + 1 for key in keys], np.int64)
    heads = np.array([int.from_bytes(text[:8], "little") for text in opening], np.uint64)
    tails = np.array([int.from_bytes(text[-8:], "little") for text in opening], np.uint64)
    return lengths, heads, tails


@functools.lru_cache(maxsize=64)
def _joints(width: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the 4 bytes before each entry of one token, and which of their bits count."""
    before = [_AFTER_TOKEN, _IN_LIST, *[_AFTER_ENTRY] * (width - 1)]
    masks = [0xFFFFFF00 if text == _AFTER_ENTRY else 0xFFFFFFFF for text in before]
    expected = [int.from_bytes(text, "little") for text in before]
    return np.array(expected, np.uint32), np.array(masks, np.uint32)


def read_entries(text: bytes) -> EntryList | None:
    """Return the entries of a content list without its outer brackets, or ``None``."""
    if not text.endswith(_END):
        return None
    # With the end of another token before it, the first token is like all others.
    padded = _BEGIN + text
    source = np.frombuffer(padded, np.uint8)
    quotes = np.flatnonzero(source == _QUOTE)
    if len(quotes) < 14 or len(quotes) % 2:
        return None
    lengths = quotes[1::2] - quotes[0::2]
    tops = np.flatnonzero(lengths == len(_LIST_KEY) + 1)
    tokens = len(tops)
    if not tokens or len(lengths) % tokens or (len(lengths) // tokens) % 3 != 1:
        return None
    width = len(lengths) // tokens // 3 - 1
    entries = tokens * (width + 1)
    if width < 1 or not _has_form(source, quotes.reshape(tokens, -1), width):
        return None
    has_exponent = int(np.count_nonzero(source == _EXPONENT)) != entries
    bare = text.translate(None, _DELETED if has_exponent else _DELETED + b"e")
    deleted = entries * (_ENTRY_SIZE - has_exponent) + tokens * _LIST_SIZE
    if len(text) - len(bare) != deleted:
        return None
    if has_exponent:
        with_e, bare = bare[1:], bare[1:].replace(b",e", b",")
        if len(with_e) - len(bare) != entries - 1:
            return None  # a value begins with e
    numbers = _simd.doubles(bare)
    if numbers is None or len(numbers) != 3 * entries:
        return None
    table = numbers.reshape(tokens, width + 1, 3)
    given = table[:, :, 0::2]
    if given.max() > _EXACT or given.min() < -_EXACT:
        return None
    whole = given.astype(np.int64)
    if (whole != given).any():
        return None
    listed = table[:, 1:, 1].ravel()
    return EntryList(
        quotes[:: 6 * (width + 1) + 2] - len(_BEGIN),
        whole[:, 0, 0],
        table[:, 0, 1],
        width,
        Entries(
            whole[:, 1:, 0].ravel(), listed, np.zeros(len(listed), bool), whole[:, 1:, 1].ravel()
        ),
    )


def _has_form(source: npt.NDArray[np.uint8], quotes: Int64, width: int) -> bool:
    """Return whether the keys, and what stands around them, are those of lists of this width."""
    opens, closes = quotes[:, 0::2], quotes[:, 1::2]
    lengths, heads, tails = _windows(width)
    if (closes - opens != lengths).any():
        return False
    if (_at(source, opens - 1, np.uint64) != heads).any():
        return False
    if (_at(source, closes - 6, np.uint64) != tails).any():
        return False
    # Columns 0, 4, 7, … are the ids, with which entries begin.
    first = np.append(0, np.arange(4, opens.shape[1], 3))
    expected, masks = _joints(width)
    if ((_at(source, opens[:, first] - 4, np.uint32) & masks) != expected).any():
        return False
    return bool((source[opens[:, 0] - 5] == _END[0]).all())


def _at(source: npt.NDArray[np.uint8], places: Int64, kind: type[Any]) -> npt.NDArray[Any]:
    """Return the little-endian integers that begin at these places, aligned or not."""
    dtype = np.dtype(kind).newbyteorder("<")
    size = len(source) - dtype.itemsize + 1
    return np.ndarray((size,), dtype, source, strides=(1,))[places]
