"""Results of vLLM in this process, ``LLM.generate``, in the form of its HTTP answers.

Objects are told by their attributes; vLLM is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ragged_format.adapters._dicts import as_flat_log_probs, read_dicts, with_own
from ragged_format.adapters._records import in_record
from ragged_format.adapters._values import as_ids
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.adapters._values import LogProbs, Place
    from ragged_format.lists import Int64

__all__ = ["as_record"]

_PASSED = ("index", "text", "token_ids", "finish_reason", "stop_reason", "routed_experts")


def as_record(record: Any, row: int) -> Any:
    """Return a record whose response, if it is a ``RequestOutput``, is a mapping.

    Parameters
    ----------
    record : object
        A ``RequestOutput`` alone, or a record with one as its response; anything else is returned
        as it is.
    row : int
        Number of the record, for errors.
    """
    if _is_output(record):
        return {"response": _response(record, row)}
    response = record.get("response") if isinstance(record, Mapping) else None
    return {**record, "response": _response(response, row)} if _is_output(response) else record


def _is_output(value: Any) -> bool:
    return hasattr(value, "outputs") and hasattr(value, "prompt_token_ids")


def _response(output: Any, row: int) -> dict[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": getattr(output, "prompt_logprobs", None),
        "choices": [_choice(part, row) for part in output.outputs],
    }


def _choice(part: Any, row: int) -> dict[str, Any]:
    place = partial(in_record, Where(row=row))
    out = {name: getattr(part, name) for name in _PASSED if hasattr(part, name)}
    out["token_ids"] = ids = as_ids(
        list(part.token_ids), partial(place, f"outputs[{part.index}].token_ids")
    )
    # Absent where the engine's flag is off, as over HTTP; an object or its nested list.
    mask = getattr(part, "sampling_mask", None)
    if mask is not None:
        out["sampling_mask"] = mask
    mass = getattr(part, "sampling_mask_logprobs", None)
    if mass is not None:
        out["sampling_mask_logprobs"] = mass
    given = getattr(part, "logprobs", None)
    out["logprobs"] = None
    if given is not None:
        out["logprobs"] = _log_probs(ids, given, partial(place, f"outputs[{part.index}].logprobs"))
    out["weight_versions"] = getattr(part, "weight_versions", None)
    return out


def _log_probs(ids: Int64, given: Any, place: Place) -> LogProbs:
    if hasattr(given, "start_indices"):
        return as_flat_log_probs(ids, given, place)
    counts, entries = read_dicts(list(given), place)
    if len(counts) != len(ids):
        raise ConversionError(
            "logprobs has one element per generated token", code="RF-A006", where=place(),
            expected=len(ids), got=len(counts),
        )  # fmt: skip
    return with_own(ids, counts, entries)
