"""Log-probs by id in mappings: of prompts, of OpenAI endpoints, of vLLM in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ragged_format.adapters._values import (
    UNKNOWN_RANK,
    Entries,
    LogProbs,
    Place,
    as_floats,
    as_ids,
    malformed,
)
from ragged_format.lists import Int64, offsets_of

__all__ = ["ID_TEXT", "as_flat_log_probs", "ids_of_texts", "read_dicts", "with_own"]

ID_TEXT = "token_id:"


def read_dicts(rows: Any, place: Place) -> tuple[Int64, Entries]:
    """Return counts and entries of mappings from ids to log-probs, one a position, null for none.

    Keys are ids or their digits; values are numbers, or have ``logprob`` and ``rank`` as items or
    as attributes. Entries stay in the order of the mapping.

    Raises
    ------
    ConversionError
        Something else (``RF-A002``).
    """
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        malformed("log-probs by id are a list", place(), "a mapping or null a token", rows)
    for position, row in enumerate(rows):
        if row is not None and not isinstance(row, Mapping):
            malformed("log-probs by id are mappings", place(position), "a mapping or null", row)
    dicts = [row or {} for row in rows]
    counts = np.fromiter(map(len, dicts), np.int64, len(dicts))
    keys = list(chain.from_iterable(dicts))
    values = list(chain.from_iterable(row.values() for row in dicts))
    first = values[0] if values else None
    if isinstance(first, Mapping):
        log_probs = [value.get("logprob") for value in values]
        ranks = [value.get("rank") for value in values]
    elif hasattr(first, "logprob"):
        log_probs = [value.logprob for value in values]
        ranks = [getattr(value, "rank", None) for value in values]
    else:
        log_probs, ranks = values, [None] * len(values)
    floats, null = as_floats(log_probs, place)
    known = as_ids([UNKNOWN_RANK if rank is None else rank for rank in ranks], place)
    return counts, Entries(_ids(keys, place), floats, null, known)


def _ids(keys: Sequence[Any], place: Place) -> Int64:
    if keys and isinstance(keys[0], str):
        found = ids_of_texts(keys, prefix="")
        if found is None:
            malformed("log-probs are by token id", place(), "digits as keys", keys[0])
        return found
    return as_ids(keys, place)


def ids_of_texts(texts: Sequence[Any], *, prefix: str = ID_TEXT) -> Int64 | None:
    """Return the ids that texts name, or ``None`` if one is no id but a token's own text.

    Examples
    --------
    >>> ids_of_texts(["token_id:12", "token_id:0"])
    array([12,  0])
    >>> ids_of_texts(["12"]) is None
    True
    """
    if not all(isinstance(text, str) and text.startswith(prefix) for text in texts):
        return None
    digits = [text[len(prefix) :] for text in texts]
    if not all(text.isascii() and text.isdigit() and len(text) < 19 for text in digits):
        return None
    return np.array(list(map(int, digits)), np.int64)


def with_own(ids: Int64, counts: Int64, entries: Entries) -> LogProbs:
    """Return lists with the log-prob of each position's own token taken out of its list.

    Parameters
    ----------
    ids : (n,) int64
        The tokens.
    counts : (n,) int64
    entries : Entries
        The first of a position with the token's id is its own.
    """
    values, null = np.full(len(ids), np.nan), np.ones(len(ids), bool)
    owner = np.repeat(np.arange(len(ids)), counts)
    at = np.flatnonzero(entries.ids == ids[owner])[::-1]  # so that the first one stays
    values[owner[at]] = entries.log_probs[at]
    null[owner[at]] = entries.null[at]
    return LogProbs(ids, values, null, counts, entries)


def as_flat_log_probs(ids: Int64, flat: Any, place: Place) -> LogProbs:
    """Return vLLM's ``FlatLogprobs`` as lists; the sampled token may be in one twice.

    Parameters
    ----------
    ids : (n,) int64
        The generated tokens.
    flat : object
        With ``start_indices``, ``end_indices``, ``token_ids``, ``logprobs``, ``ranks``.
    place : Place
    """
    starts, ends = as_ids(flat.start_indices, place), as_ids(flat.end_indices, place)
    counts = ends - starts
    offsets = offsets_of(np.maximum(counts, 0))
    if len(starts) != len(ids) or (counts < 0).any() or not np.array_equal(starts, offsets[:-1]):
        malformed("flat log-probs have one run per token", place(), f"{len(ids)} runs", len(starts))
    log_probs, null = as_floats(list(flat.logprobs), place)
    ranks = as_ids([UNKNOWN_RANK if rank is None else rank for rank in flat.ranks], place)
    found = as_ids(flat.token_ids, place)
    if not len(found) == len(log_probs) == len(ranks) == offsets[-1]:
        malformed("flat log-probs are parallel", place(), int(offsets[-1]), len(found))
    return with_own(ids, counts, Entries(found, log_probs, null, ranks))
