"""Binary fields that prime-rl adds to the choices of its engine's answers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._values import UNKNOWN_RANK, Entries, LogProbs, Rows, malformed
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = ["decode_compact_logprobs", "decode_kept_tokens", "expand_response"]

_COMPACT = "u32-f32-le-v1"
_PAIR = np.dtype([("id", "<u4"), ("log_prob", "<f4")])


def expand_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer whose choices have plain fields, for ``vllm.to_samples``.

    ``kept_tokens`` becomes ``sampling_mask``, and ``compact_logprobs`` becomes ``logprobs``; all
    else stays as it is.

    Raises
    ------
    ConversionError
        A field is malformed (``RF-A002``) or has another length than the tokens (``RF-A006``).
    """
    choices = [_expanded(choice, number) for number, choice in enumerate(response["choices"])]
    return {**response, "choices": choices}


def _expanded(choice: Mapping[str, Any], number: int) -> dict[str, Any]:
    out = dict(choice)
    size = len(choice.get("token_ids") or ())
    if "kept_tokens" in out:
        kept = out.pop("kept_tokens")
        at = Where(column=f"choices[{number}].kept_tokens")
        out["sampling_mask"] = None if kept is None else decode_kept_tokens(kept, size, at)
    compact = out.pop("compact_logprobs", None)
    if compact is not None:
        at = Where(column=f"choices[{number}].compact_logprobs")
        out["logprobs"] = {"content": decode_compact_logprobs(compact, size, at)}
    return out


def _bytes(text: Any, where: Where) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as err:
        raise ConversionError(
            "the field is base64", code="RF-A002", where=where, expected="base64", got=str(err)
        ) from err


def _numbers(data: bytes, dtype: npt.DTypeLike, where: Where) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        malformed("the bytes are whole numbers", where, f"a multiple of {size}", len(data))
    return np.frombuffer(data, dtype)


def decode_kept_tokens(value: Mapping[str, Any], tokens: int, where: Where | None = None) -> Rows:
    """Return the sets of ``kept_tokens``: base64 int32 ``ids`` and ``counts``; 0 is a null set.

    Raises
    ------
    ConversionError
        Not base64 of int32 (``RF-A002``), counts of another number than `tokens`, or ids of
        another than the counts say (``RF-A006``).
    """
    where = where or Where()
    if not isinstance(value, Mapping) or not {"ids", "counts"} <= value.keys():
        malformed("kept tokens have ids and counts", where, "ids, counts", value)
    ids = _numbers(_bytes(value["ids"], where), "<i4", where).astype(np.int64)
    counts = _numbers(_bytes(value["counts"], where), "<i4", where).astype(np.int64)
    _check("a count for every token", tokens, len(counts), where)
    if (counts < 0).any():
        malformed("a count is not negative", where, ">= 0", int(counts.min()))
    _check("as many ids as the counts say", int(counts.sum()), len(ids), where)
    return Rows(ids, counts, counts == 0)


def _check(what: str, expected: int, got: int, where: Where) -> None:
    if got != expected:
        raise ConversionError(
            f"there are {what}", code="RF-A006", where=where, expected=expected, got=got,
            remedy="take masks and tokens of the same answer",
        )  # fmt: skip


def decode_compact_logprobs(
    value: Mapping[str, Any], tokens: int, where: Where | None = None
) -> LogProbs:
    """Return the log-probs of ``compact_logprobs``, format ``u32-f32-le-v1``.

    The bytes are pairs of an id and a log-prob, ``offsets`` says where the pairs of each token
    begin, and the first pair of each token is the sampled one, as in the engine's lists.

    Raises
    ------
    ConversionError
        Another format or malformed bytes (``RF-A002``), or offsets that do not fit (``RF-A006``).
    """
    where = where or Where()
    if not isinstance(value, Mapping) or value.get("format") != _COMPACT:
        found = value.get("format") if isinstance(value, Mapping) else value
        malformed("compact log-probs are of a known format", where, _COMPACT, found)
    pairs = _numbers(_bytes(value.get("data"), where), _PAIR, where)
    offsets: Int64 = np.asarray(value.get("offsets"), np.int64)
    _check("an offset more than tokens", tokens + 1, offsets.size, where)
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(pairs) or (counts < 1).any():
        raise ConversionError(
            "offsets rise from 0 to the number of pairs, by one pair a token at least",
            code="RF-A006", where=where, expected=f"0 … {len(pairs)}", got=offsets.tolist(),
        )  # fmt: skip
    ids, log_probs = pairs["id"].astype(np.int64), pairs["log_prob"].astype(np.float64)
    none = np.zeros(len(pairs), bool)
    entries = Entries(ids, log_probs, none, np.full(len(pairs), UNKNOWN_RANK))
    first = offsets[:-1]
    return LogProbs(ids[first], log_probs[first], none[first], counts, entries)
