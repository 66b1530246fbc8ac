"""``meta_info`` of SGLang as arrays: masks, log-probs and top-K lists, nested, flat or base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._values import (
    Bools,
    Entries,
    Floats,
    LogProbs,
    Place,
    Rows,
    as_float_rows,
    as_floats,
    as_ids,
    as_rows,
    malformed,
)
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.lists import Int64


__all__ = [
    "PROMPT_READ", "READ", "Lists", "Part", "decode", "join", "output_ids", "read_part",
    "read_prompt",
]  # fmt: skip

MASK, SAMPLING, PER_CANDIDATE = (
    "output_token_sampling_mask", "output_token_sampling_logprobs",
    "output_token_sampling_mask_logprobs",
)  # fmt: skip
MASK_LENGTH, TOKENS, TOP = (
    "output_token_sampling_mask_length", "output_token_logprobs", "output_top_logprobs",
)  # fmt: skip
TRUNCATED = "output_token_sampling_mask_truncated"
STORE = "output_store_ref"
_STORED = (
    "output_token_sampling_mask_lengths", "output_token_sampling_mask_token_ids", SAMPLING,
)  # fmt: skip
# The form of engines that slime patches.
_SLIME = ("top_p_token_ids", "top_p_token_offsets", "top_p_log_probs")
_FLAT = ("val_flat", "idx_flat", "val_flat_b64", "idx_flat_b64", "val_flat_b64_dtype",
         "idx_flat_b64_dtype", "val_flat_dtype", "idx_flat_dtype", "shape", "null_prefix",
         "temperature_scaled")  # fmt: skip
READ = frozenset({
    MASK, SAMPLING, PER_CANDIDATE, MASK_LENGTH, TRUNCATED, TOKENS, TOP, STORE, *_SLIME,
    *(f"{TOP}_{suffix}" for suffix in _FLAT),
    "id", "finish_reason", "prompt_tokens", "completion_tokens", "weight_version",
    "output_token_logprobs_length", "reasoning_tokens", "cached_tokens", "num_retractions",
    "e2e_latency",
})  # fmt: skip

_INPUT_TOKENS, _INPUT_TOP = "input_token_logprobs", "input_top_logprobs"
# What is read of the answer to a request for the log-probs of a prompt.
PROMPT_READ = frozenset({
    _INPUT_TOKENS, _INPUT_TOP, *(f"{_INPUT_TOP}_{suffix}" for suffix in _FLAT),
    "id", "prompt_tokens", "cached_tokens", "reasoning_tokens", "num_retractions", "e2e_latency",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lists:
    """Top-K lists of consecutive positions.

    Attributes
    ----------
    counts : (n,) int64
        Entries of each position; 0 where the list is null.
    entries : Entries
        Of all lists end to end, ranks from 1.
    """

    counts: Int64
    entries: Entries


@dataclass(frozen=True, slots=True)
class Part:
    """What one message says about the tokens that it covers; ``None`` where it is silent.

    Attributes
    ----------
    ids : (n,) int64
    support, support_log_probs : Rows, optional
    cut : (n,) bool, optional
        Sets that the engine cut at its limit.
    sampling : (n,) float64, optional
        Log-probs over the support; NaN where null.
    sampling_null : (n,) bool, optional
    raw : (n,) float64, optional
        Log-probs over the vocabulary; NaN where null.
    raw_null : (n,) bool, optional
    top : Lists, optional
    """

    ids: Int64
    support: Rows | None = None
    support_log_probs: Rows | None = None
    cut: Bools | None = None
    sampling: Floats | None = None
    sampling_null: Bools | None = None
    raw: Floats | None = None
    raw_null: Bools | None = None
    top: Lists | None = None


def output_ids(body: Mapping[str, Any], meta: Mapping[str, Any], where: Where) -> Int64:
    """Return the generated tokens: ``output_ids``, or those that the log-probs name."""
    for key in ("output_ids", "response_token_ids", "token_ids"):
        if body.get(key) is not None:
            return as_ids(body[key], partial(_at, where, key))
    if meta.get(TOKENS) is not None:
        return _triples(meta[TOKENS], partial(_at, where, TOKENS))[0]
    raise ConversionError(
        "the generated tokens are not known", code="RF-A010", where=where,
        expected="'output_ids', or 'response_token_ids' of a chat choice", got=None,
        remedy="request return_token_ids of a chat completion",
    )  # fmt: skip


def _at(where: Where, field: str, position: int | None = None) -> Where:
    return Where(where.file, row=where.row, column=field, position=position)


def read_part(
    ids: Int64,
    meta: Mapping[str, Any],
    store: Mapping[str, Any] | None,
    place: Callable[..., Where],
) -> Part:
    """Return what a message says about its tokens, every length checked.

    Parameters
    ----------
    ids : (n,) int64
        Tokens of the message.
    meta : mapping
        Its ``meta_info``.
    store : mapping, optional
        Arrays by name of an ``output_store_ref``.
    place : callable
        ``place(field, position)`` for errors.

    Raises
    ------
    ConversionError
        A field is malformed (``RF-A002``), of another length (``RF-A006``), or refers to a store
        that was not read (``RF-A001``).
    """
    if meta.get(STORE) is not None:
        meta = {**meta, **_from_store(meta[STORE], store, place)}
    elif meta.get(_SLIME[0]) is not None:
        meta = {**meta, **_from_slime(meta, place)}
    support = mass = sampling = null = None
    if meta.get(MASK) is not None:
        support = as_rows(meta[MASK], partial(place, MASK))
        _same_length(len(support.counts), ids, MASK, place)
    cut = None
    if meta.get(TRUNCATED) is not None:
        told = meta[TRUNCATED]
        if not isinstance(told, list) or not all(isinstance(row, bool) for row in told):
            malformed("a flag per token says which sets were cut", place(TRUNCATED), "flags", told)
        _same_length(len(told), ids, TRUNCATED, place)
        cut = np.array(told, bool)
    given = meta.get(PER_CANDIDATE)
    values = meta.get(SAMPLING)
    if values is not None and _is_nested(values):  # one build has the candidates' under this key
        given, values = values, None
    if given is not None:
        mass = as_float_rows(given, partial(place, PER_CANDIDATE))
        if support is None or not np.array_equal(mass.counts, support.counts):
            raise ConversionError(
                "candidate log-probs are parallel to the candidate sets", code="RF-A006",
                where=place(PER_CANDIDATE),
                expected="no sets" if support is None else f"{len(support.values)} values",
                got=f"{len(mass.values)} values",
            )  # fmt: skip
    if values is not None:
        sampling, null = as_floats(values, partial(place, SAMPLING))
        _same_length(len(sampling), ids, SAMPLING, place)
    elif mass is not None and support is not None:
        sampling = _of_sampled(ids, support, mass)
        null = np.isnan(sampling)
    raw = raw_null = None
    if meta.get(TOKENS) is not None:
        named, raw, raw_null = _triples(meta[TOKENS], partial(place, TOKENS))
        _same_length(len(raw), ids, TOKENS, place)
        if not np.array_equal(named, ids):
            first = int(np.argmax(named != ids))
            raise ConversionError(
                "log-probs are of the sampled tokens", code="RF-A006", where=place(TOKENS, first),
                expected=int(ids[first]), got=int(named[first]),
            )  # fmt: skip
    top = read_lists(meta, TOP, place)
    if top is not None:
        _same_length(len(top.counts), ids, TOP, place)
    return Part(ids, support, mass, cut, sampling, null, raw, raw_null, top)


def _is_nested(values: Any) -> bool:
    if isinstance(values, Rows):
        return True
    # A row without a mask is null in both forms.
    return isinstance(values, Sequence) and any(isinstance(row, list | tuple) for row in values)


def _same_length(length: int, ids: Int64, field: str, place: Callable[..., Where]) -> None:
    if length != len(ids):
        raise ConversionError(
            f"{field} has one element per generated token", code="RF-A006", where=place(field),
            expected=len(ids), got=length,
            remedy="the lists of this response are not aligned; do not cut or pad them",
        )  # fmt: skip


def _of_sampled(ids: Int64, support: Rows, mass: Rows) -> Floats:
    """Return the log-prob of the sampled token among those of its set; NaN where it is not."""
    out = np.full(len(ids), np.nan)
    owner = np.repeat(np.arange(len(ids)), support.counts)
    hit = support.values == ids[owner]
    out[owner[hit]] = mass.values[hit]
    return out


def _triples(rows: Any, place: Place) -> tuple[Int64, Floats, Bools]:
    """Return ids, log-probs and where those are null, of ``[[log-prob, id, text], …]``."""
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        malformed("log-probs are a list", place(), "[[log-prob, id, text], ...]", rows)
    for position, row in enumerate(rows):
        if not isinstance(row, list | tuple) or len(row) < 2:
            malformed("a log-prob is a triple", place(position), "[log-prob, id, text]", row)
    values, null = as_floats([row[0] for row in rows], place)
    return as_ids([row[1] for row in rows], place), values, null


def read_lists(meta: Mapping[str, Any], key: str, place: Callable[..., Where]) -> Lists | None:
    """Return the top-K lists under a key, nested, flat or base64; ``None`` if there are none."""
    nested = meta.get(key)
    if nested is not None:
        if not isinstance(nested, Sequence) or isinstance(nested, str):
            malformed("top-K lists are a list", place(key), "a list per token", nested)
        rows = [() if row is None else row for row in nested]
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = list(chain.from_iterable(rows))
        ids, values, null = _triples(flat, partial(place, key))
        return Lists(counts, Entries(ids, values, null, _ranks(counts)))
    found = {
        kind: _flat(meta, f"{key}_{kind}_flat", place, dtype)
        for kind, dtype in (("val", "float32"), ("idx", "int32"))
    }
    if found["val"] is None or found["idx"] is None:
        return None
    shape = meta.get(f"{key}_shape")
    size = len(found["idx"])
    prefix = meta.get(f"{key}_null_prefix") or 0
    if (
        not isinstance(shape, list | tuple)
        or len(shape) != 2
        or shape[0] * shape[1] != size
        or len(found["val"]) != size
    ):
        raise ConversionError(
            "flat lists have the shape that is stated", code="RF-A006", where=place(key),
            expected=f"{shape}", got=f"{len(found['val'])} values, {size} ids",
        )  # fmt: skip
    counts = np.append(np.zeros(prefix, np.int64), np.full(shape[0], shape[1], np.int64))
    values = found["val"].astype(np.float64)
    null = np.isnan(values)
    return Lists(
        counts, Entries(found["idx"].astype(np.int64), values, null & False, _ranks(counts))
    )


def read_prompt(ids: Int64, meta: Mapping[str, Any], place: Callable[..., Where]) -> LogProbs:
    """Return the log-probs of a prompt's tokens and the lists beside them, by own position.

    Raises
    ------
    ConversionError
        The prompt was not scored from its first token on (``RF-A007``), or lengths disagree
        (``RF-A006``).
    """
    if meta.get(_INPUT_TOKENS) is None:
        raise ConversionError(
            "the prompt was not scored", code="RF-A007", where=place(_INPUT_TOKENS),
            expected="a log-prob per prompt token", got=None,
            remedy="set return_logprob, top_logprobs_num and logprob_start_len 0 in the request",
        )  # fmt: skip
    named, values, null = _triples(meta[_INPUT_TOKENS], partial(place, _INPUT_TOKENS))
    top = read_lists(meta, _INPUT_TOP, place)
    if top is None:
        none = np.zeros(len(values), np.int64)
        top = Lists(none, _NO_ENTRIES)
    for field, length in ((_INPUT_TOKENS, len(values)), (_INPUT_TOP, len(top.counts))):
        if length != len(ids):
            raise ConversionError(
                "a scored prompt has a list per token, its first one null", code="RF-A006",
                where=place(field), expected=len(ids), got=length,
                remedy="set logprob_start_len 0 in the request",
            )  # fmt: skip
    if not np.array_equal(named, ids):
        first = int(np.argmax(named != ids))
        raise ConversionError(
            "log-probs are of the prompt's tokens", code="RF-A006",
            where=place(_INPUT_TOKENS, first), expected=int(ids[first]), got=int(named[first]),
        )  # fmt: skip
    return LogProbs(ids, values, null, top.counts, top.entries)


def _ranks(counts: Int64) -> Int64:
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts) + 1


def _flat(
    meta: Mapping[str, Any], key: str, place: Callable[..., Where], dtype: str
) -> npt.NDArray[Any] | None:
    encoded = meta.get(f"{key}_b64")
    if encoded is not None:
        told = meta.get(f"{key}_b64_dtype", meta.get(f"{key}_dtype", dtype))
        return decode(encoded, told, (dtype,), place(f"{key}_b64"))
    plain = meta.get(key)
    if plain is None:
        return None
    if dtype == "int32":
        return as_ids(plain, partial(place, key))
    return as_floats(plain, partial(place, key))[0]


def decode(encoded: Any, dtype: Any, allowed: Sequence[str], where: Where) -> npt.NDArray[Any]:
    """Return base64 of little-endian numbers as an array.

    Raises
    ------
    ConversionError
        It is not base64, of another dtype, or not a whole number of elements (``RF-A002``).
    """
    if dtype not in allowed:
        malformed("encoded numbers are of a known type", where, " or ".join(allowed), dtype)
    try:
        raw = encoded if isinstance(encoded, bytes) else base64.b64decode(encoded, validate=True)
        return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"))
    except (binascii.Error, TypeError, ValueError) as err:
        raise ConversionError(
            "encoded numbers are base64", code="RF-A002", where=where,
            expected=f"base64 of {dtype}", got=err,
        ) from err  # fmt: skip


def _from_store(
    reference: Any, store: Mapping[str, Any] | None, place: Callable[..., Where]
) -> dict[str, Any]:
    """Return the fields that a reference to the output store stands for."""
    fields = reference.get("fields") if isinstance(reference, Mapping) else None
    if not isinstance(fields, Mapping):
        malformed("a store reference names its fields", place(STORE), "'fields'", reference)
    missing = sorted(fields.keys() - (store or {}).keys())
    if missing:
        raise ConversionError(
            "the response refers to an output store that was not read", where=place(STORE),
            expected=f"record['store'] with {', '.join(missing)}", got=reference.get("handle"),
            remedy="read the handle while the engine holds it, and put its arrays (or their bytes) "
            "into the record as 'store'; or request without return_outputs_via_store",
        )  # fmt: skip
    arrays = {name: _stored(store[name], fields[name], name, place) for name in fields if store}
    out: dict[str, Any] = {}
    lengths, ids, values = (arrays.get(name) for name in _STORED)
    if lengths is not None and ids is not None:
        if int(lengths.sum()) != len(ids):
            raise ConversionError(
                "mask lengths sum to the number of ids", code="RF-A006", where=place(_STORED[0]),
                expected=len(ids), got=int(lengths.sum()),
            )  # fmt: skip
        out[MASK] = Rows(ids.astype(np.int64), lengths.astype(np.int64))
    if values is not None:
        out[SAMPLING] = values
    if "routed_experts" in arrays:
        out["routed_experts"] = arrays["routed_experts"]
    return out


def _stored(value: Any, told: Any, name: str, place: Callable[..., Where]) -> npt.NDArray[Any]:
    dtype = told.get("dtype") if isinstance(told, Mapping) else None
    shape = told.get("shape") if isinstance(told, Mapping) else None
    if not isinstance(value, np.ndarray):
        value = decode(value, dtype, ("int32", "int64", "float32"), place(name))
    if not isinstance(shape, list | tuple) or value.size != np.prod(shape, dtype=np.int64):
        raise ConversionError(
            "a stored array has the shape that the reference states", code="RF-A006",
            where=place(name), expected=shape, got=value.shape,
        )  # fmt: skip
    shaped: npt.NDArray[Any] = value.reshape(shape)
    return shaped


def _from_slime(meta: Mapping[str, Any], place: Callable[..., Where]) -> dict[str, Any]:
    """Return the fields of base64 sets with offsets under the names of nested ones."""
    ids, offsets = (
        decode(meta.get(name), "int32", ("int32",), place(name)).astype(np.int64)
        for name in _SLIME[:2]
    )
    rows = as_rows({"token_ids": ids, "offsets": offsets}, partial(place, _SLIME[1]))
    out: dict[str, Any] = {MASK: rows}
    if meta.get(_SLIME[2]) is not None:
        values = decode(meta[_SLIME[2]], "float32", ("float32",), place(_SLIME[2]))
        if len(values) == len(ids):
            out[PER_CANDIDATE] = Rows(values.astype(np.float64), rows.counts)
        else:
            out[SAMPLING] = values
    return out


def join(parts: Sequence[Part]) -> Part:
    """Return the parts of an incremental stream as one.

    A field that some parts have and others lack is null for the tokens of the others.
    """
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([part.ids for part in parts])
    sampling, sampling_null = _join_floats(parts, "sampling")
    raw, raw_null = _join_floats(parts, "raw")
    top = None
    if any(part.top is not None for part in parts):
        lists = [
            part.top or Lists(np.zeros(len(part.ids), np.int64), _NO_ENTRIES) for part in parts
        ]
        entries = Entries(
            *(
                np.concatenate(column)
                for column in zip(*(one.entries for one in lists), strict=True)
            )
        )
        top = Lists(np.concatenate([one.counts for one in lists]), entries)
    cut = None
    if any(part.cut is not None for part in parts):
        cut = np.concatenate(
            [np.zeros(len(part.ids), bool) if part.cut is None else part.cut for part in parts]
        )
    return Part(
        ids, _join_rows(parts, "support"), _join_rows(parts, "support_log_probs"), cut,
        sampling, sampling_null, raw, raw_null, top,
    )  # fmt: skip


_NO_ENTRIES = Entries(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool), np.zeros(0, np.int64))


def _join_floats(parts: Sequence[Part], field: str) -> tuple[Floats | None, Bools | None]:
    if all(getattr(part, field) is None for part in parts):
        return None, None
    values, nulls = [], []
    for part in parts:
        mine = getattr(part, field)
        values.append(np.full(len(part.ids), np.nan) if mine is None else mine)
        nulls.append(
            np.ones(len(part.ids), bool) if mine is None else getattr(part, f"{field}_null")
        )
    return np.concatenate(values), np.concatenate(nulls)


def _join_rows(parts: Sequence[Part], field: str) -> Rows | None:
    if all(getattr(part, field) is None for part in parts):
        return None
    rows = []
    for part in parts:
        mine = getattr(part, field)
        if mine is None:
            none = np.zeros(len(part.ids), np.int64)
            mine = Rows(none[:0], none, np.ones(len(none), bool))
        rows.append(mine)
    null = np.concatenate(
        [np.zeros(len(r.counts), bool) if r.null is None else r.null for r in rows]
    )
    return Rows(
        np.concatenate([r.values for r in rows]), np.concatenate([r.counts for r in rows]),
        null if null.any() else None,
    )  # fmt: skip
