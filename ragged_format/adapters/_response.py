"""One vLLM response of ``/inference/v1/generate`` as choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters._choice import Choice, VersionSpan
from ragged_format.adapters._columns import FROM_RECORD
from ragged_format.adapters._experts import check_experts, decode_experts
from ragged_format.adapters._prompt import START, read_prompt
from ragged_format.adapters._records import (
    RECORD_READ,
    check_length,
    check_usage,
    count_unread,
    find_request_id,
    in_record,
    record_value,
    to_json,
    whole,
)
from ragged_format.adapters._values import (
    Entries,
    LogProbs,
    Rows,
    as_float_rows,
    as_floats,
    as_ids,
    as_log_probs,
    as_rows,
    malformed,
)
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from collections import Counter

    from ragged_format.adapters._engine import Answer, GroupId
    from ragged_format.lists import Int64

__all__ = [
    "ENDPOINT",
    "check_response",
    "engine_error",
    "is_error",
    "read_choices",
    "read_scored_prompt",
]

ENDPOINT = "/inference/v1/generate"
_RESPONSE_READ = frozenset({
    "request_id", "model", "created", "usage", "prompt_token_ids", "output_mode", "choices",
})  # fmt: skip
_CHOICE_READ = frozenset({
    "index", "finish_reason", "stop_reason", "token_ids", "routed_experts", "sampling_mask",
    "sampling_mask_logprobs", "weight_versions", "logprobs", "token_logprobs",
})  # fmt: skip
# A number per token instead of an object (vllm-project/vllm#57442).
_FLAT = "token_logprobs"
_ROUTED_START = "routed_experts_prompt_start"
_MASK_REQUESTS = ("return_sampling_mask", "return_sampling_mask_logprobs")


def check_response(record: Mapping[str, Any], response: Any, where: Where) -> None:
    """Raise unless `response` is an answer of the generate endpoint.

    Raises
    ------
    ConversionError
        An error answer (``RF-A003``), an answer of another endpoint (``RF-A009``), or no object
        (``RF-A002``).
    """
    if not isinstance(response, Mapping):
        malformed("a response is a JSON object", where, "an object", response)
    if is_error(record, response):
        raise engine_error(record, response, where)
    choices = response.get("choices")
    kind = response.get("object")
    is_openai = isinstance(kind, str) and ("completion" in kind)
    if is_openai or any(isinstance(c, Mapping) and ("message" in c or "delta" in c)
                        for c in (choices if isinstance(choices, Sequence) else ())):  # fmt: skip
        raise _wrong_endpoint(where, kind or "a chat completion")
    if choices is None and "sampling_params" in response:
        raise _wrong_endpoint(where, "a rendered request")
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        malformed("a response has choices", where, "a list 'choices'", choices)


def is_error(record: Mapping[str, Any], response: Mapping[str, Any]) -> bool:
    """Return whether a response is an error answer."""
    status = record.get("http_status")
    failed = isinstance(status, int) and status >= 400
    return "error" in response or response.get("object") == "error" or failed


def _wrong_endpoint(where: Where, got: object) -> ConversionError:
    return ConversionError(
        "the response is of an endpoint that never returns candidate sets", code="RF-A009",
        where=where, expected=f"a response of POST {ENDPOINT}", got=got,
        remedy=f"send token ids to {ENDPOINT} of a server started with --enable-scale-out "
        "--return-sampling-mask --logprobs-mode processed_logprobs; the OpenAI endpoints accept "
        "return_sampling_mask and ignore it",
    )  # fmt: skip


def engine_error(
    record: Mapping[str, Any], response: Mapping[str, Any], where: Where
) -> ConversionError:
    """Return the error for an error answer, which says what is behind vLLM's empty status 500."""
    error = response.get("error", response)
    detail = error if isinstance(error, Mapping) else {"message": error}
    message, code = detail.get("message"), detail.get("code", record.get("http_status"))
    if message or code != 500:
        return ConversionError(
            "the engine refused the request", code="RF-A003", where=where, expected="a result",
            got=f"{code}: {message}",
            remedy="correct the request; on_error='skip' converts the other records",
        )  # fmt: skip
    request = record.get("request")
    sampling = request if isinstance(request, Mapping) else {}
    if isinstance(sampling.get("sampling_params"), Mapping):
        sampling = sampling["sampling_params"]
    return ConversionError(
        "the engine refused the sampling parameters: with --return-sampling-mask every request "
        "needs top_k > 0 and temperature > 0",
        code="RF-A003", where=where, expected="top_k > 0 and temperature > 0",
        got=f"status 500 with an empty message; top_k={sampling.get('top_k')}, "
        f"temperature={sampling.get('temperature')}",
        remedy="set top_k (the vocabulary size means no cut) and temperature; do not retry, the "
        "same request fails again",
    )  # fmt: skip


def read_choices(
    record: Mapping[str, Any],
    response: Mapping[str, Any],
    where: Where,
    *,
    with_experts: bool,
    engine_version: str | None,
    group_of: Callable[[Mapping[str, Any]], Any] | None,
    unread: Counter[str],
) -> list[Choice]:
    """Return the choices of a response, their lengths checked against each other.

    Parameters
    ----------
    record : mapping
        With ``request``, and the extra values that :data:`FROM_RECORD` names.
    response : mapping
        As :func:`check_response` lets it pass; big fields may be arrays already.
    where : Where
        Of the record.
    with_experts : bool
        Whether to decode the routed experts.
    engine_version : str, optional
        For the provenance.
    group_of : callable, optional
        Gives the group of the record; ``None``: the request is the group of its choices.
    unread : Counter
        Counts fields that have no place in samples.

    Raises
    ------
    ConversionError
        Fields are malformed (``RF-A002``), lengths disagree (``RF-A006``), or there are no prompt
        tokens or no request id (``RF-A010``).
    """
    asked = _Asked.of(record)
    request_id = find_request_id((response, record, asked.request), where)
    prompt_ids = _prompt_ids(asked.request, response, where)
    given = list(response["choices"])
    facts = _provenance(response, asked.sampling, engine_version, record)
    group = request_id if len(given) > 1 else None
    shared = {
        "group_id": group if group_of is None else group_of(record),
        "temperature": asked.sampling.get("temperature"),
        "provenance": to_json(facts, where, "sampling_params"),
    }
    per_choice = [name for name in FROM_RECORD if record.get(name) is not None]
    choices = []
    for position, choice in enumerate(given):
        if not isinstance(choice, Mapping):
            malformed("a choice is an object", where, "an object", choice)
        index = choice.get("index", position)
        if not isinstance(index, int) or isinstance(index, bool):
            malformed("a choice has an index", where, "an integer", index)
        out = Choice(f"{request_id}/{index}", index, where, prompt_ids, prompt_ids[:0])
        out.token_ids = as_ids(choice.get("token_ids"), partial(out.place, "token_ids"))
        out.top_k = asked.top_k
        _read_support(out, choice, asked)
        _read_log_probs(out, choice, asked)
        out.versions = _versions(out, choice)
        if (encoded := choice.get("routed_experts")) is not None:
            if with_experts:
                forwarded = len(prompt_ids) + len(out.token_ids) - 1 - asked.routed_start
                out.routed_start = asked.routed_start
                read_experts = (
                    check_experts if isinstance(encoded, np.ndarray) else decode_experts
                )  # in this process it is an array
                out.routed_experts = read_experts(
                    encoded, max(forwarded, 0), out.place("routed_experts")
                )
            else:
                unread["choice.routed_experts"] += 1
        values = shared | {"finish_reason": choice.get("finish_reason")}
        for name in per_choice:
            values[name] = record_value(record, name, position, len(given), where)
        if (stopped := choice.get("stop_reason")) is not None:
            values["provenance"] = to_json(facts | {"stop_reason": stopped}, where, "stop_reason")
        out.record_values = values
        choices.append(out)
        count_unread(unread, choice, _CHOICE_READ, "choice.")
    check_usage(response.get("usage"), prompt_ids, choices, where)
    count_unread(unread, response, _RESPONSE_READ, "response.")
    count_unread(unread, record, RECORD_READ, "record.")
    return choices


def read_scored_prompt(
    answer: Answer,
    response: Mapping[str, Any],
    group_id: GroupId | None,
    engine_version: str | None,
) -> Choice:
    """Return the prompt of a response, scored by a teacher, as one choice."""
    record, where = answer.record, answer.where
    asked = _Asked.of(record)
    ids = _prompt_ids(asked.request, response, where)
    request_id = find_request_id((response, record, asked.request), where)
    rows = response.get("prompt_logprobs")
    out = read_prompt(f"{request_id}/0", where, record, ids, rows, answer.counts)
    group_of = answer.group_of(group_id)
    facts = _provenance(response, asked.sampling, engine_version, record)
    out.record_values = {
        "group_id": None if group_of is None else group_of(record),
        "temperature": asked.sampling.get("temperature"),
        "provenance": to_json(facts, where, "sampling_params"),
        "teacher_id": response.get("model"),
        **{
            name: record_value(record, name, 0, 1, where)
            for name in FROM_RECORD
            if record.get(name) is not None
        },
    }
    for choice in response["choices"]:
        if isinstance(choice, Mapping):
            count_unread(answer.unread, choice, _INDEX, "choice.")
    count_unread(answer.unread, response, _RESPONSE_READ | {"prompt_logprobs"}, "response.")
    count_unread(answer.unread, record, RECORD_READ | {START}, "record.")
    return out


_INDEX = frozenset({"index"})


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the request asked for."""

    request: Mapping[str, Any]
    sampling: Mapping[str, Any]
    support: bool
    log_probs: bool
    top_k: int | None
    routed_start: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> _Asked:
        request = record.get("request")
        request = request if isinstance(request, Mapping) else {}
        sampling = request.get("sampling_params")
        sampling = sampling if isinstance(sampling, Mapping) else {}
        return cls(
            request,
            sampling,
            any(source.get(key) for source in (sampling, request) for key in _MASK_REQUESTS),
            sampling.get("logprobs") is not None,
            whole(sampling.get("top_k")),
            whole(sampling.get(_ROUTED_START)) or 0,
        )


def _prompt_ids(request: Mapping[str, Any], response: Mapping[str, Any], where: Where) -> Int64:
    sources = [(response, "prompt_token_ids"), (request, "token_ids")]
    found = [
        as_ids(source[field], partial(in_record, where, field))
        for source, field in sources
        if source.get(field) is not None
    ]
    if not found or not len(found[0]):
        raise ConversionError(
            "the prompt's tokens are not known", code="RF-A010", where=where,
            expected="'prompt_token_ids' in the response or 'token_ids' in the request, not empty",
            got="neither" if not found else "an empty list",
            remedy="set return_token_ids in the request, or keep the request with its response",
        )  # fmt: skip
    if len(found) > 1 and not np.array_equal(found[0], found[1]):
        raise ConversionError(
            "request and response have different prompts", code="RF-A006", where=where,
            expected=f"{len(found[1])} tokens as in the request", got=f"{len(found[0])} tokens",
            remedy="join responses to requests by request id, not by order",
        )  # fmt: skip
    return found[0]


def _read_support(out: Choice, choice: Mapping[str, Any], asked: _Asked) -> None:
    out.support_expected = asked.support or "sampling_mask" in choice
    mask = choice.get("sampling_mask")
    if mask is None:
        return
    out.support = rows = as_rows(mask, partial(out.place, "sampling_mask"))
    check_length(out, "sampling_mask", len(rows.counts))
    mass = choice.get("sampling_mask_logprobs")
    if mass is not None:
        place = partial(out.place, "sampling_mask_logprobs")
        out.support_log_probs = parallel = as_float_rows(mass, place)
        if not np.array_equal(parallel.counts, rows.counts):
            raise ConversionError(
                "candidate log-probs are parallel to the candidate sets", code="RF-A006",
                where=place(), expected=_short(rows), got=_short(parallel),
            )  # fmt: skip


def _short(rows: Rows) -> str:
    return f"{len(rows.counts)} rows, {len(rows.values)} values"


def _read_log_probs(out: Choice, choice: Mapping[str, Any], asked: _Asked) -> None:
    out.log_probs_expected = asked.log_probs
    given = choice.get("logprobs")
    content = given.get("content") if isinstance(given, Mapping) else given
    flat = choice.get(_FLAT)
    if content is None and flat is None:
        return
    if content is None:
        values, null = as_floats(flat, partial(out.place, _FLAT))
        none = np.zeros(len(values), np.int64)
        no_entries = Entries(none[:0], values[:0], null[:0], none[:0])
        parsed = LogProbs(None, values, null, none, no_entries)
    else:
        parsed = as_log_probs(content, partial(out.place, "logprobs"))
    check_length(out, "logprobs", len(parsed.values))
    if parsed.ids is not None and not np.array_equal(parsed.ids, out.token_ids):
        first = int(np.argmax(parsed.ids != out.token_ids))
        raise ConversionError(
            "log-probs are of the sampled tokens", code="RF-A006",
            where=out.place("logprobs", first), expected=int(out.token_ids[first]),
            got=int(parsed.ids[first]),
        )  # fmt: skip
    out.log_probs = parsed
    if isinstance(given, LogProbs):  # in this process, the K best and the sampled token
        out.lists_sampled = parsed.counts.max(initial=0) <= 1


def _versions(out: Choice, choice: Mapping[str, Any]) -> list[VersionSpan]:
    spans = choice.get("weight_versions") or ()
    try:
        found = [VersionSpan(str(s["version"]), s["start"], s["end"]) for s in spans]
    except (KeyError, TypeError):
        found = [VersionSpan("", -1, -1)]
    if any(whole(span.start) is None or whole(span.end) is None for span in found) or (
        found and found[0].start < 0
    ):
        malformed(
            "weight versions are spans", out.place("weight_versions"),
            "objects of version, start >= 0, end", spans,
        )  # fmt: skip
    return found


def _provenance(
    response: Mapping[str, Any],
    sampling: Mapping[str, Any],
    engine_version: str | None,
    record: Mapping[str, Any],
) -> dict[str, Any]:
    facts = {
        "engine": "vllm",
        "engine_version": engine_version or record.get("engine_version"),
        "model": response.get("model"),
        "created": response.get("created"),
        "output_mode": response.get("output_mode"),
    }
    known = {key: value for key, value in facts.items() if value is not None}
    return known | {"sampling": dict(sampling)}
