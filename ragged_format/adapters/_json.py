"""JSON text of engine responses, the big lists as arrays, without an object per number.

Almost all bytes of a response are a few lists: ids of candidate sets, token ids, log-prob entries.
:func:`read_json` cuts them out, reads them with numpy and a SIMD parser, and reads the small rest
with ``json``. A list, or a whole document, that is not exactly of the expected form is read by
``json``: the result is the same for any formatting. ``docs/design`` has the figures.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ragged_format.adapters import _numbers
from ragged_format.adapters._entries import read_entries
from ragged_format.adapters._values import Entries, LogProbs, Rows
from ragged_format.lists import Int64, offsets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["read_json", "read_many"]

# A quotation mark that is not escaped can stand before one of these names and after it only where
# it is a key: within strings it is escaped.
_LIST = re.compile(
    rb'(?<!\\)"(?:(token_ids|prompt_token_ids|sampling_mask|offsets)|logprobs"\s*:\s*\{\s*"content)'
    rb'"\s*:\s*\['
)
_KEYS = ("token_ids", "prompt_token_ids", "sampling_mask", "offsets", "content")
_MARK = "~ragged-list~"
_MARK_BYTES = _MARK.encode()
_ENTRY = b'{"token_id"'
_ENTRIES_END = b"}]}]"
_SPACE_PROBE = 64


def read_json(text: bytes) -> Any:
    """Return the value of JSON text, its big lists as arrays.

    Under the keys ``token_ids``, ``prompt_token_ids`` and ``offsets`` a list of integers is an
    int64 array; under ``token_ids`` and ``sampling_mask`` a list of lists is :class:`Rows`; the
    ``content`` of ``logprobs`` with token ids is :class:`LogProbs`. Where a list is short or of
    another form, it is the list that ``json.loads`` gives.

    Raises
    ------
    ValueError
        The text is not JSON.
    """
    try:
        value = _read_fast(text)
        return json.loads(text) if value is None else value
    except RecursionError as err:
        raise ValueError("nested too deeply") from err


def read_many(texts: Sequence[bytes]) -> list[Any]:
    """Return :func:`read_json` of each text, or the ValueError that it raises.

    The lists of all texts are read together, which saves most where responses are short.
    """
    if len(texts) > 1 and all(text[:1] == b"{" and text[-1:] == b"}" for text in texts):
        try:
            values = _read_fast(b"[" + b",".join(texts) + b"]")
        except RecursionError:
            values = None
        if values is not None and len(values) == len(texts):
            return list(values)
    out = []
    for text in texts:
        try:
            out.append(read_json(text))
        except ValueError as err:
            out.append(err)
    return out


class _Part(NamedTuple):
    """A list cut out of a document, without its brackets."""

    text: bytes
    start: int
    end: int


class _Cuts:
    """Lists cut out of a document, by kind, in order."""

    def __init__(self, document: bytes) -> None:
        self.document = document
        self.parts: dict[str, list[_Part]] = {"i": [], "r": [], "e": []}

    def take(self, start: int, key: bytes | None) -> tuple[int, str] | None:
        """Cut the list whose bracket is at `start`; returns its end and mark, or ``None``."""
        text = self.document
        inner = text[start + 1 : start + 2]
        if key is None:
            end = text.find(_ENTRIES_END, start) + len(_ENTRIES_END)
            if not text.startswith(_ENTRY, start + 1) or end < len(_ENTRIES_END):
                return None  # text mode has no ids
            kind = "e"
        elif inner == b"[":
            # No string is in the list, so it ends before the next quotation mark.
            mark = text.find(b'"', start)
            end = text.rfind(b"]]", start, mark if mark >= 0 else len(text)) + 2
            if end < 2:
                return None
            kind = "r"
        else:
            end = text.find(b"]", start) + 1
            if end < 1 or key == b"sampling_mask":
                return None  # an empty list of sets has no numbers
            kind = "i"
        part = text[start + 1 : end - 1]
        if b" " in part[:_SPACE_PROBE]:
            # Space after a comma or colon, as json.dumps writes it, is no part of a value.
            part = part.replace(b", ", b",").replace(b": ", b":")
        self.parts[kind].append(_Part(part, start, end))
        return end, f"{kind}{len(self.parts[kind]) - 1}"

    def read(self) -> dict[str, list[Any]]:
        """Return the lists of each kind as arrays, odd ones as lists; ValueError if not JSON."""
        return {kind: self._read(parts, _READERS[kind]) for kind, parts in self.parts.items()}

    def _read(self, parts: list[_Part], read: Callable[[list[bytes]], Any]) -> list[Any]:
        if not parts:
            return []
        together = read([part.text for part in parts])
        if together is not None:
            return list(together)
        out = []
        for part in parts:
            alone = read([part.text])
            exact = self.document[part.start : part.end]
            out.append(json.loads(exact) if alone is None else alone[0])
        return out


def _read_fast(text: bytes) -> Any:
    cuts = _Cuts(text)
    pieces = []
    begin = position = 0
    while match := _LIST.search(text, position):
        position = match.end()
        cut = cuts.take(position - 1, match.group(1))
        if cut is not None:
            pieces += [text[begin : position - 1], b'"', _MARK_BYTES, cut[1].encode(), b'"']
            begin = position = cut[0]
    if not pieces:
        return None
    pieces.append(text[begin:])
    rest = b"".join(pieces)
    if rest.count(_MARK_BYTES) * 5 != len(pieces) - 1:
        return None  # the mark is part of the data
    try:
        lists = cuts.read()

        def restore(value: dict[str, Any]) -> dict[str, Any]:
            for key in _KEYS:
                mark = value.get(key)
                if isinstance(mark, str) and mark.startswith(_MARK):
                    mark = mark.removeprefix(_MARK)
                    value[key] = lists[mark[0]][int(mark[1:])]
            return value

        return json.loads(rest, object_hook=restore)
    except ValueError:
        return None


def _read_integers(parts: list[bytes]) -> list[Int64] | None:
    counts = [part.count(b",") + 1 if part.strip() else 0 for part in parts]
    values = _numbers.integers(b",".join(part for part, n in zip(parts, counts, strict=True) if n))
    if values is None or len(values) != sum(counts):
        return None
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return [values[begin:end] for begin, end in bounds]


def _read_rows(parts: list[bytes]) -> list[Rows] | None:
    read = _numbers.rows(b",".join(parts))
    if read is None:
        return None
    values, counts, starts = read
    ends = np.cumsum([len(part) + 1 for part in parts])
    bounds = np.append(0, starts.searchsorted(ends))
    offsets = offsets_of(counts)[bounds].tolist()
    pairs = zip(itertools.pairwise(bounds.tolist()), itertools.pairwise(offsets), strict=True)
    return [Rows(values[first:last], counts[begin:end]) for (begin, end), (first, last) in pairs]


def _read_entries(parts: list[bytes]) -> list[LogProbs] | None:
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


_READERS: dict[str, Callable[[list[bytes]], Any]] = {
    "i": _read_integers, "r": _read_rows, "e": _read_entries,
}  # fmt: skip
