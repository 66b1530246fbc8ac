"""JSON text of engine responses, the big lists as arrays, without an object per number.

Almost all bytes of a response are a few lists: ids of candidate sets, token ids, log-prob entries.
With numba, a compiled scanner takes them out (``_scan``). With pysimdjson alone, the entries are
read with numpy and the rest by simdjson, which hands over number lists as arrays. What is not
exactly of the expected form is read by ``json``: the result is the same for any formatting, and
whatever is installed. ``docs/design`` has the figures.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters import _simd
from ragged_format.adapters._entries import read_entries
from ragged_format.adapters._values import Entries, LogProbs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["read_json", "read_many"]

# The quotation mark before the first name is not escaped, so it opens a key: within strings it is
# escaped. Text mode has no ids, and other entries than read_entries reads are not cut.
_LOG_PROBS = b'"logprobs"'
_ENTRIES = re.compile(rb'(?<!\\)"logprobs"\s*:\s*\{\s*"content"\s*:\s*(\[)\{"token_id"')
_ENTRIES_END = b"}]}]"
_KEY = "content"
_MARK = "~ragged-list~"
_MARK_BYTES = _MARK.encode()
_SPACE_PROBE = 64
# Bytes for which compiled code, half a second to load and more to compile, is loaded.
_WORTH_SCANNING = 1 << 17


def read_json(text: bytes) -> Any:
    """Return the value of JSON text, its big lists as arrays.

    Under the keys ``token_ids``, ``prompt_token_ids`` and ``offsets`` a list of integers is an
    int64 array; under ``token_ids`` and ``sampling_mask`` a list of lists is a :class:`Rows`; the
    ``content`` of ``logprobs`` with token ids is a :class:`LogProbs`. Where a list is of another
    form, and wherever neither numba nor pysimdjson is installed, it may be the list that
    ``json.loads`` gives.

    Raises
    ------
    ValueError
        The text is not JSON.
    """
    value = read_many([text])[0]
    if isinstance(value, ValueError):
        raise value
    return value


def read_many(texts: Sequence[bytes]) -> list[Any]:
    """Return :func:`read_json` of each text, or the ValueError that it raises.

    The arrays of texts that are read together may share memory.
    """
    scan = _scanner() if sum(map(len, texts)) >= _WORTH_SCANNING else None
    return [_read_alone(text) for text in texts] if scan is None else _read_scanned(scan, texts)


def _read_scanned(
    scan: Callable[[Sequence[bytes]], list[Any]], texts: Sequence[bytes]
) -> list[Any]:
    return [
        _read_slow(text) if isinstance(value, ValueError) else value
        for text, value in zip(texts, scan(texts), strict=True)
    ]


@functools.cache
def _scanner() -> Callable[[Sequence[bytes]], list[Any]] | None:
    """Return the compiled scanner; ``None`` where numba is not installed."""
    try:
        from ragged_format.adapters._scan import read_texts
    except ImportError:
        return None
    return read_texts


def _read_slow(text: bytes) -> Any:
    """Return what ``json`` reads, or its ValueError."""
    try:
        return json.loads(text)
    except ValueError as err:
        return err
    except RecursionError:
        return ValueError("nested too deeply")


def _read_alone(text: bytes) -> Any:
    try:
        return _read_fast(text)
    except (ValueError, RecursionError):
        return _read_slow(text)


def _read_fast(text: bytes) -> Any:
    """Return the value of JSON text; ValueError where ``json`` has to decide."""
    parts: list[bytes] = []
    places: list[tuple[int, int]] = []
    pieces: list[bytes] = []
    begin = position = 0
    while (position := text.find(_LOG_PROBS, position)) >= 0:
        match = _ENTRIES.match(text, position)
        position += len(_LOG_PROBS)
        if match is None:
            continue
        start = match.start(1)
        end = text.find(_ENTRIES_END, start) + len(_ENTRIES_END)
        if end < len(_ENTRIES_END):
            break
        part = text[start + 1 : end - 1]
        if b" " in part[:_SPACE_PROBE]:
            # Space after a comma or colon, as json.dumps writes it, is no part of a value.
            part = part.replace(b", ", b",").replace(b": ", b":")
        pieces.append(text[begin:start] + b'"%b%d"' % (_MARK_BYTES, len(parts)))
        parts.append(part)
        places.append((start, end))
        begin = position = end
    rest = b"".join([*pieces, text[begin:]]) if parts else text
    if parts and rest.count(_MARK_BYTES) != len(parts):
        raise ValueError("the mark is part of the data")
    lists = _entry_lists(text, parts, places)

    def replace(key: str, value: Any) -> Any:
        if key == _KEY and value.startswith(_MARK) and lists:
            return lists[int(value.removeprefix(_MARK))]
        return value

    if _simd.is_available():
        return _simd.read_document(rest, replace)

    def hook(value: dict[str, Any]) -> dict[str, Any]:
        if isinstance(mark := value.get(_KEY), str):
            value[_KEY] = replace(_KEY, mark)
        return value

    return json.loads(rest, object_hook=hook)


def _entry_lists(
    text: bytes, parts: Sequence[bytes], places: Sequence[tuple[int, int]]
) -> list[Any]:
    """Return each list of entries as LogProbs, odd ones as lists; ValueError if not JSON."""
    together = _read_entries(parts) if parts else []
    if together is not None:
        return together
    out: list[Any] = []
    for part, (start, end) in zip(parts, places, strict=True):
        alone = _read_entries([part])
        out.append(json.loads(text[start:end]) if alone is None else alone[0])
    return out


def _read_entries(parts: Sequence[bytes]) -> list[LogProbs] | None:
    read = read_entries(b",".join(parts))
    if read is None:
        return None
    ends = np.cumsum([len(part) + 1 for part in parts])
    bounds = np.append(0, read.starts.searchsorted(ends))
    out = []
    for begin, end in itertools.pairwise(bounds.tolist()):
        listed = slice(begin * read.width, end * read.width)
        own = read.entries
        entries = Entries(
            own.ids[listed], own.log_probs[listed], own.null[listed], own.ranks[listed]
        )
        out.append(
            LogProbs(
                read.ids[begin:end],
                read.values[begin:end],
                np.zeros(end - begin, bool),
                np.full(end - begin, read.width),
                entries,
            )
        )
    return out
