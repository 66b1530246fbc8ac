"""One vLLM response of ``/inference/v1/generate`` as choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters._choice import Choice, VersionSpan
from ragged_format.adapters._columns import FROM_RECORD
from ragged_format.adapters._experts import decode_experts
from ragged_format.adapters._values import (
    LogProbs,
    Rows,
    as_float_rows,
    as_ids,
    as_log_probs,
    as_rows,
    malformed,
    plain,
)
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.lists import Int64

__all__ = ["ENDPOINT", "check_response", "read_choices"]

ENDPOINT = "/inference/v1/generate"
_RESPONSE_READ = frozenset({
    "request_id", "model", "created", "usage", "prompt_token_ids", "output_mode", "choices",
})  # fmt: skip
_CHOICE_READ = frozenset({
    "index", "finish_reason", "stop_reason", "token_ids", "routed_experts", "sampling_mask",
    "sampling_mask_logprobs", "weight_versions", "logprobs",
})  # fmt: skip
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
    status = record.get("http_status")
    failed = isinstance(status, int) and status >= 400
    if "error" in response or response.get("object") == "error" or failed:
        raise _engine_error(record, response, where)
    choices = response.get("choices")
    kind = response.get("object")
    is_openai = isinstance(kind, str) and ("completion" in kind)
    if is_openai or any(isinstance(c, Mapping) and {"message", "delta"} & set(c)
                        for c in (choices if isinstance(choices, Sequence) else ())):  # fmt: skip
        raise _wrong_endpoint(where, kind or "a chat completion")
    if choices is None and "sampling_params" in response:
        raise _wrong_endpoint(where, "a rendered request")
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        malformed("a response has choices", where, "a list 'choices'", choices)


def _wrong_endpoint(where: Where, got: object) -> ConversionError:
    return ConversionError(
        "the response is of an endpoint that never returns candidate sets", code="RF-A009",
        where=where, expected=f"a response of POST {ENDPOINT}", got=got,
        remedy=f"send token ids to {ENDPOINT} of a server started with --enable-scale-out "
        "--return-sampling-mask --logprobs-mode processed_logprobs; the OpenAI endpoints accept "
        "return_sampling_mask and ignore it",
    )  # fmt: skip


def _engine_error(
    record: Mapping[str, Any], response: Mapping[str, Any], where: Where
) -> ConversionError:
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
    report: ConversionReport,
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
    report : ConversionReport
        Counts fields that have no place in samples.

    Raises
    ------
    ConversionError
        Fields are malformed (``RF-A002``), lengths disagree (``RF-A006``), or there are no prompt
        tokens or no request id (``RF-A010``).
    """
    request = record.get("request")
    request = request if isinstance(request, Mapping) else {}
    sampling = request.get("sampling_params")
    sampling = sampling if isinstance(sampling, Mapping) else {}
    request_id = _request_id(record, request, response, where)
    prompt_ids = _prompt_ids(request, response, where)
    given = list(response["choices"])
    common = _provenance(response, sampling, engine_version, record)
    choices = []
    for position, choice in enumerate(given):
        if not isinstance(choice, Mapping):
            malformed("a choice is an object", where, "an object", choice)
        index = choice.get("index", position)
        if not isinstance(index, int) or isinstance(index, bool):
            malformed("a choice has an index", where, "an integer", index)
        out = Choice(
            f"{request_id}/{index}",
            index,
            where, prompt_ids,
            as_ids(choice.get("token_ids"), _at(where, index, "token_ids")),
            requested_k=_whole(sampling.get("logprobs")), top_k=_whole(sampling.get("top_k")),
        )  # fmt: skip
        _read_support(out, choice, sampling, request)
        _read_log_probs(out, choice, sampling)
        out.versions = _versions(choice, out.place("weight_versions"))
        if (encoded := choice.get("routed_experts")) is not None:
            if with_experts:
                start = _whole(sampling.get(_ROUTED_START)) or 0
                forwarded = max(len(prompt_ids) + len(out.token_ids) - 1 - start, 0)
                out.routed_start = start
                out.routed_experts = decode_experts(encoded, forwarded, out.place("routed_experts"))
            else:
                report.unread["routed_experts"] += 1
        group = request_id if len(given) > 1 else None
        out.record_values = _record_values(record, position, len(given), where) | {
            "group_id": group if group_of is None else group_of(record),
            "temperature": sampling.get("temperature"),
            "finish_reason": choice.get("finish_reason"),
            "provenance": _text(common, choice.get("stop_reason")),
        }
        choices.append(out)
        _count_unread(report, choice, _CHOICE_READ, "choice.")
    _check_usage(response.get("usage"), prompt_ids, choices, where)
    _count_unread(report, response, _RESPONSE_READ, "response.")
    return choices


def _at(where: Where, index: int, field: str) -> Where:
    return Where(where.file, row=where.row, column=f"choices[{index}].{field}")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _request_id(
    record: Mapping[str, Any],
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    where: Where,
) -> str:
    for source in (response, record, request):
        value = source.get("request_id")
        if isinstance(value, str) and value:
            return value
    raise ConversionError(
        "a sample has no identity", code="RF-A010", where=where,
        expected="a string 'request_id' in the response, the record or the request", got=None,
        remedy="put the request's id into the record as 'request_id'",
    )  # fmt: skip


def _prompt_ids(request: Mapping[str, Any], response: Mapping[str, Any], where: Where) -> Int64:
    sources = [(response, "prompt_token_ids"), (request, "token_ids")]
    found = [
        as_ids(source[field], Where(where.file, row=where.row, column=field))
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


def _read_support(
    out: Choice, choice: Mapping[str, Any], sampling: Mapping[str, Any], request: Mapping[str, Any]
) -> None:
    asked = any(source.get(key) for source in (sampling, request) for key in _MASK_REQUESTS)
    out.support_expected = asked or "sampling_mask" in choice
    mask = choice.get("sampling_mask")
    if mask is None:
        return
    out.support = rows = as_rows(mask, out.place("sampling_mask"))
    _check_length(out, "sampling_mask", len(rows.counts))
    mass = choice.get("sampling_mask_logprobs")
    if mass is not None:
        out.support_log_probs = parallel = as_float_rows(mass, out.place("sampling_mask_logprobs"))
        if not np.array_equal(parallel.counts, rows.counts):
            raise ConversionError(
                "candidate log-probs are parallel to the candidate sets", code="RF-A006",
                where=out.place("sampling_mask_logprobs"), expected=_short(rows),
                got=_short(parallel),
            )  # fmt: skip


def _short(rows: Rows) -> str:
    return f"{len(rows.counts)} rows, {len(rows.values)} values"


def _read_log_probs(out: Choice, choice: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    out.log_probs_expected = sampling.get("logprobs") is not None
    given = choice.get("logprobs")
    if given is None:
        return
    content = given.get("content") if isinstance(given, Mapping) else given
    if content is None:
        return
    parsed: LogProbs = as_log_probs(content, out.place("logprobs"))
    _check_length(out, "logprobs", len(parsed.values))
    if parsed.ids is not None and not np.array_equal(parsed.ids, out.token_ids):
        first = int(np.argmax(parsed.ids != out.token_ids))
        raise ConversionError(
            "log-probs are of the sampled tokens", code="RF-A006",
            where=out.place("logprobs", first), expected=int(out.token_ids[first]),
            got=int(parsed.ids[first]),
        )  # fmt: skip
    out.log_probs = parsed


def _check_length(out: Choice, field: str, length: int) -> None:
    if length != len(out.token_ids):
        raise ConversionError(
            f"{field} has one element per generated token", code="RF-A006", where=out.place(field),
            expected=len(out.token_ids), got=length,
            remedy="the columns of this choice are not aligned; do not cut or pad them",
        )  # fmt: skip


def _versions(choice: Mapping[str, Any], where: Where) -> list[VersionSpan]:
    spans = choice.get("weight_versions") or ()
    try:
        return [VersionSpan(str(s["version"]), s["start"] + 0, s["end"] + 0) for s in spans]
    except (KeyError, TypeError):
        malformed("weight versions are spans", where, "objects of version, start, end", spans)


def _record_values(
    record: Mapping[str, Any], position: int, size: int, where: Where
) -> dict[str, Any]:
    """Return the record's own values; a list has one value per choice."""
    out = {}
    for name in FROM_RECORD:
        if (value := record.get(name)) is None:
            continue
        if isinstance(value, list | tuple | np.ndarray):
            if len(value) != size:
                raise ConversionError(
                    f"a list of {name} has one value per choice", code="RF-A006",
                    where=Where(where.file, row=where.row, column=name), expected=size,
                    got=len(value),
                )  # fmt: skip
            value = value[position]
        if isinstance(value, np.generic):
            value = value.item()
        if name == "metrics" and isinstance(value, Mapping):
            value = _json(value)
        out[name] = value
    return out


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


def _text(common: dict[str, Any], stop_reason: Any) -> str:
    return _json(common if stop_reason is None else common | {"stop_reason": stop_reason})


def _json(value: Any) -> str:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=plain
    )


def _check_usage(usage: Any, prompt: Int64, choices: Sequence[Choice], where: Where) -> None:
    if not isinstance(usage, Mapping):
        return
    have = {
        "prompt_tokens": len(prompt),
        "completion_tokens": sum(len(choice.token_ids) for choice in choices),
    }
    for key, count in have.items():
        if (told := usage.get(key)) is not None and told != count:
            raise ConversionError(
                f"usage.{key} counts the tokens of the response", code="RF-A006", where=where,
                expected=told, got=count,
                remedy="the response lacks tokens or choices that the engine generated",
            )  # fmt: skip


def _count_unread(
    report: ConversionReport, source: Mapping[str, Any], read: frozenset[str], prefix: str
) -> None:
    for key, value in source.items():
        if key not in read and value is not None:
            report.unread[prefix + key] += 1
