"""JSON texts, their big lists scanned into arrays; importing this needs numba (extra ``adapters``).

A compiled pass takes the lists out of each text and ``json`` reads the rest, so that ``json`` is
the judge of everything else.
"""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from ragged_format.adapters import _machine, _scan_numbers, _scan_walk
from ragged_format.adapters._machine import kept
from ragged_format.adapters._scan_walk import (
    CONTENT,
    FLAT,
    MARK,
    MARK_SIZE,
    Longs,
    Room,
    Text,
    walk,
)
from ragged_format.adapters._values import Entries, LogProbs, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["read_texts"]

_KEYS = ("token_ids", "sampling_mask", "prompt_token_ids", "content", "offsets")
_MARK = chr(MARK)
# Least bytes of text for a list, a number, a token or entry of log-probs.
_LIST, _NUMBER, _ENTRY = len('"offsets":[]'), len("1,"), len('{"token_id":1,"logprob":1,"rank":1},')


# Texts of a call whose room is kept, about as many bytes as are read at a time, and rooms kept.
_KEPT_BYTES = 3 << 19
_KEPT_ROOMS = 4


def _stamp() -> int:
    """Return a checksum of the source of all that is compiled."""
    sum_ = 1
    for module in (_machine, _scan_numbers, _scan_walk):
        sum_ = crc32(Path(str(module.__file__)).read_bytes(), sum_)
    return sum_


def _compile(stamp: int) -> Callable[[Text, Room, Longs], bool]:
    @kept
    def scan(text: Text, room: Room, filled: Longs) -> bool:
        at = int(np.int64(text.ctypes.data))
        return stamp >= 0 and walk(at, at + len(text), room, filled)

    return scan


_scan = _compile(_stamp())


def _room(size: int) -> Room:
    """Return arrays long enough for any text of this size; what is not touched costs nothing."""
    lists, numbers, entries = (size // least + 2 for least in (_LIST, _NUMBER, _ENTRY))
    return Room(
        np.empty(size + lists * MARK_SIZE, np.uint8),
        np.empty((lists, 3), np.int64),
        np.empty(numbers, np.int64),
        np.empty(numbers, np.int32),
        np.empty((entries, 2), np.int64),
        np.empty(entries, np.float64),
        np.empty((entries, 2), np.int64),
        np.empty(entries, np.float64),
    )


class _Rooms(threading.local):
    """Rooms of earlier calls of a thread, used again when none of their arrays is in use.

    New memory costs more than scanning: the system clears each page when it is first touched.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[int, Room]] = []

    def take(self, size: int) -> Room:
        """Return a free room for texts of `size` bytes in all."""
        for most, room in self.kept:
            # The room itself and the argument hold each array; a view would be a third.
            is_free = all(sys.getrefcount(room[n]) == 2 for n in range(len(room)))
            if size <= most and is_free:
                return room
        most = max(size, _KEPT_BYTES) if size <= 2 * _KEPT_BYTES else size
        room = _room(most)
        if size <= 2 * _KEPT_BYTES and len(self.kept) < _KEPT_ROOMS:
            self.kept.append((most, room))
        return room


_rooms = _Rooms()


def read_texts(texts: Sequence[bytes]) -> list[Any]:
    """Return the value of each JSON text, its big lists as arrays; a ValueError: ``json`` decides.

    The lists are views of arrays that all values share, and that later calls use again when none
    of the views is alive.
    """
    room = _rooms.take(sum(map(len, texts)))
    filled = np.zeros(6, np.int64)
    parts = []
    for text in texts:
        is_read = _scan(np.frombuffer(text, np.uint8), room, filled)
        parts.append((is_read, int(filled[0]), int(filled[1])))
    lists = _lists(room, filled)
    with_hook = _decoder(object_hook=partial(_replace, lists=lists))
    rest = room.rest[: filled[0]].tobytes()
    out: list[Any] = []
    begin = first = 0
    for is_read, end, last in parts:
        if not is_read:
            out.append(ValueError("a string does not end, or holds a control character"))
            continue
        try:
            # As json.loads reads bytes that begin as JSON in UTF-8 does.
            marked = rest[begin:end].decode(errors="surrogatepass")
            value = _DECODE(marked)
            if _place(value, lists) < last - first:
                value = with_hook(marked)
            out.append(value)
        except ValueError as err:
            out.append(err)
        except RecursionError:
            out.append(ValueError("nested too deeply"))
        begin, first = end, last
    return out


def _decoder(object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Callable[[str], Any]:
    # Not strict: marks are control characters. The scanner lets no others pass.
    return json.JSONDecoder(object_hook=object_hook, strict=False).decode


_DECODE = _decoder()


def _place(response: Any, lists: Sequence[Any]) -> int:
    """Put lists where the answers of engines have them, which spares a hook; return how many."""
    if type(response) is not dict:
        return 0
    count = _replace_in(response, ("prompt_token_ids",), lists)
    choices = response.get("choices")
    for choice in choices if type(choices) is list else ():
        if type(choice) is dict:
            count += _replace_in(choice, ("token_ids", "sampling_mask"), lists)
            log_probs = choice.get("logprobs")
            if type(log_probs) is dict:
                count += _replace_in(log_probs, ("content",), lists)
    return count


def _replace(value: dict[str, Any], lists: Sequence[Any]) -> dict[str, Any]:
    _replace_in(value, _KEYS, lists)
    return value


def _replace_in(value: dict[str, Any], keys: Sequence[str], lists: Sequence[Any]) -> int:
    """Put lists in the place of their marks; return how many."""
    count = 0
    for key in keys:
        mark = value.get(key)
        if type(mark) is str and mark[:1] == _MARK:
            value[key] = lists[int(mark[1:])]
            count += 1
    return count


def _lists(room: Room, filled: Longs) -> list[Any]:
    spans, tokens, entries = filled[[1, 4, 5]].tolist()
    null = np.zeros(max(tokens, entries), bool)
    row = id_ = token = entry = 0
    out: list[Any] = []
    for kind, end, until in room.spans[:spans].tolist():
        if kind == FLAT:
            out.append(room.longs[row:end])
            row = end
        elif kind == CONTENT:
            listed = Entries(
                room.entries[entry:until, 0],
                room.entry_values[entry:until],
                null[entry:until],
                room.entries[entry:until, 1],
            )
            own = room.tokens[token:end]
            values = room.token_values[token:end]
            out.append(LogProbs(own[:, 0], values, null[token:end], own[:, 1], listed))
            token, entry = end, until
        else:
            out.append(Rows(room.ids[id_:end], room.longs[row:until]))
            id_, row = end, until
    return out
