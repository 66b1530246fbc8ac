"""Answers in the form of the OpenAI endpoints, completions and chat, as choices; streams too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters._choice import Choice
from ragged_format.adapters._columns import FROM_RECORD, ROUTED_EXPERTS, SUPPORT, Options
from ragged_format.adapters._dicts import ids_of_texts, read_dicts
from ragged_format.adapters._experts import decode_experts
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
from ragged_format.adapters._stream import join_masks, read_events, truncated
from ragged_format.adapters._values import (
    UNKNOWN_RANK,
    Entries,
    LogProbs,
    Place,
    as_floats,
    as_ids,
    as_log_probs,
    as_rows,
    malformed,
)
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.adapters._engine import Answer, GroupId
    from ragged_format.lists import Int64

__all__ = ["Dialect", "read_openai"]

_RESPONSE_READ = frozenset({
    "id", "object", "created", "model", "choices", "usage", "prompt_token_ids", "request_id",
    "system_fingerprint",
})  # fmt: skip
_CHOICE_READ = frozenset({
    "index", "text", "message", "delta", "finish_reason", "stop_reason", "token_ids",
    "completion_token_ids", "prompt_token_ids", "logprobs", "sampling_mask", "arrival_time",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between engines of this form.

    Attributes
    ----------
    engine : str
        For the provenance.
    gives_sets : bool
        Whether the endpoint has candidate sets at all.
    refuse : callable
        ``refuse(record, response, where)`` raises for an error answer or another endpoint.
    remedy : str
        How to get candidate sets, for the error where they were asked for and are not there.
    """

    engine: str
    gives_sets: bool
    refuse: Callable[[Mapping[str, Any], Mapping[str, Any], Where], None]
    remedy: str


def read_openai(
    answer: Answer,
    dialect: Dialect,
    options: Options,
    *,
    prompt_is_scored: bool,
    group_id: GroupId | None,
    engine_version: str | None,
) -> list[Choice]:
    """Return the choices of a response; with `prompt_is_scored` its prompt as one choice.

    Raises
    ------
    ConversionError
        Fields are malformed (``RF-A002``), lengths disagree (``RF-A006``), the stream was cut
        (``RF-A008``), candidate sets were asked for and the endpoint has none (``RF-A009``), or
        tokens or identity are missing (``RF-A010``).
    """
    record, where = answer.record, answer.where
    response = answer.response
    if isinstance(response, bytes):
        response = _merge(read_events(response, where), where)
    if not isinstance(response, Mapping):
        malformed("a response is a JSON object", where, "an object", response)
    dialect.refuse(record, response, where)
    given = response.get("choices")
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        malformed("a response has choices", where, "a list 'choices'", given)
    request = record.get("request")
    request = request if isinstance(request, Mapping) else {}
    keys = ("id", "request_id")
    request_id = find_request_id((response, record, request), where, keys)
    facts = {
        "engine": dialect.engine,
        "engine_version": engine_version or record.get("engine_version"),
        "model": response.get("model"),
        "created": response.get("created"),
        "sampling": {k: v for k, v in request.items() if k not in _NO_SAMPLING},
    }
    facts = {key: value for key, value in facts.items() if value is not None}
    group_of = answer.group_of(group_id)
    group = request_id if len(given) > 1 and not prompt_is_scored else None
    choices = []
    for position, raw in enumerate(given):
        if not isinstance(raw, Mapping):
            malformed("a choice is an object", where, "an object", raw)
        index = whole(raw.get("index", position))
        if index is None:
            malformed("a choice has an index", where, "an integer", raw.get("index"))
        choice = _flat(raw)
        count_unread(answer.unread, choice, _CHOICE_READ | _ALSO_READ[prompt_is_scored], "choice.")
        if prompt_is_scored:
            if position:
                answer.unread["choice"] += 1
                continue
            rows = choice.get("prompt_logprobs")
            rows = response.get("prompt_logprobs") if rows is None else rows
            ids = _prompt_ids(choice, response, request, where)
            id_ = f"{request_id}/{index}"
            out = read_prompt(id_, where, record, ids, rows, answer.counts)
            answer.unread["choice.token_ids"] += 1
        else:
            out = Choice(f"{request_id}/{index}", index, where, *_NO_TOKENS)
            _fill(out, choice, response, request, answer, dialect, options)
        stopped = choice.get("stop_reason")
        own = facts if stopped is None else facts | {"stop_reason": stopped}
        values = {
            "group_id": group if group_of is None else group_of(record),
            "temperature": request.get("temperature"),
            "finish_reason": None if prompt_is_scored else choice.get("finish_reason"),
            "provenance": to_json(own, where, "request"),
        }
        if prompt_is_scored:
            values["teacher_id"] = response.get("model")
        for name in FROM_RECORD:
            if record.get(name) is not None:
                values[name] = record_value(record, name, position, len(given), where)
        out.record_values = values
        choices.append(out)
    if not prompt_is_scored:
        check_usage(response.get("usage"), choices[0].prompt_ids, choices, where)
    read = _RESPONSE_READ | _ALSO_READ[prompt_is_scored]
    count_unread(answer.unread, response, read, "response.")
    count_unread(answer.unread, record, RECORD_READ | _RECORD_ALSO[prompt_is_scored], "record.")
    return choices


_NO_TOKENS = (np.zeros(0, np.int64), np.zeros(0, np.int64))
_NO_SAMPLING = frozenset({"messages", "prompt", "model", "stream", "stream_options", "request_id"})
_ALSO_READ = {True: frozenset({"prompt_logprobs"}), False: frozenset({ROUTED_EXPERTS})}
_RECORD_ALSO = {True: frozenset({START}), False: frozenset[str]()}
# FastDeploy has ids within the message or delta.
_INNER = ("prompt_token_ids", "completion_token_ids")


def _flat(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("message", "delta"):
        inner = choice.get(key)
        if isinstance(inner, Mapping) and any(inner.get(name) is not None for name in _INNER):
            return {**choice, **{name: inner.get(name) for name in _INNER}}
    return choice


def _fill(
    out: Choice,
    choice: Mapping[str, Any],
    response: Mapping[str, Any],
    request: Mapping[str, Any],
    answer: Answer,
    dialect: Dialect,
    options: Options,
) -> None:
    where = answer.where
    out.prompt_ids = _prompt_ids(choice, response, request, where)
    given = choice.get("logprobs")
    tokens = given.get("tokens") if isinstance(given, Mapping) else None
    out.token_ids = _token_ids(out, choice, tokens)
    out.top_k = whole(request.get("top_k"))
    mask = choice.get("sampling_mask")
    asked = bool(request.get("return_sampling_mask"))
    if asked and not dialect.gives_sets and "sampling_mask" not in choice:
        wanted = options.schema is None or SUPPORT[0] in options.schema
        if wanted and options.on_missing_support == "error":
            raise ConversionError(
                "candidate sets were asked for, and the endpoint ignores that", code="RF-A009",
                where=out.place("sampling_mask"), expected="a response with sampling_mask",
                got=response.get("object"), remedy=dialect.remedy,
            )  # fmt: skip
    out.support_expected = asked or "sampling_mask" in choice
    if mask is not None:
        out.support = as_rows(mask, partial(out.place, "sampling_mask"))
        check_length(out, "sampling_mask", len(out.support.counts))
    wanted_log_probs = request.get("logprobs")
    out.log_probs_expected = wanted_log_probs is not None and wanted_log_probs is not False
    if given is not None:
        out.log_probs = _log_probs(out, given, whole(wanted_log_probs), answer)
    if (encoded := choice.get(ROUTED_EXPERTS)) is not None:
        if options.schema is not None and ROUTED_EXPERTS not in options.schema:
            answer.unread[f"choice.{ROUTED_EXPERTS}"] += 1
        else:
            forwarded = max(len(out.prompt_ids) + len(out.token_ids) - 1, 0)
            out.routed_experts = decode_experts(encoded, forwarded, out.place(ROUTED_EXPERTS))


def _prompt_ids(
    choice: Mapping[str, Any],
    response: Mapping[str, Any],
    request: Mapping[str, Any],
    where: Where,
) -> Int64:
    prompt = request.get("prompt")
    is_ids = isinstance(prompt, list) and not isinstance(prompt[0] if prompt else "", str | list)
    sources = [(choice, "prompt_token_ids"), (response, "prompt_token_ids")]
    found = [
        as_ids(source[key], partial(in_record, where, key))
        for source, key in [*sources, (request, "prompt" if is_ids else "prompt_token_ids")]
        if source.get(key) is not None
    ]
    if not found or not len(found[0]):
        raise ConversionError(
            "the prompt's tokens are not known", code="RF-A010", where=where,
            expected="'prompt_token_ids' in the response, or token ids as the prompt, not empty",
            got="neither" if not found else "an empty list",
            remedy="set return_token_ids in the request",
        )  # fmt: skip
    for other in found[1:]:
        if not np.array_equal(other, found[0]):
            raise ConversionError(
                "request and response have different prompts", code="RF-A006", where=where,
                expected=f"{len(other)} tokens as in the request", got=f"{len(found[0])} tokens",
                remedy="join responses to requests by request id, not by order",
            )  # fmt: skip
    return found[0]


def _token_ids(out: Choice, choice: Mapping[str, Any], texts: Any) -> Int64:
    for key in ("token_ids", "completion_token_ids"):
        if choice.get(key) is not None:
            return as_ids(choice[key], partial(out.place, key))
    named = choice.get("logprobs")
    if texts is None and isinstance(named, Mapping) and isinstance(named.get("content"), list):
        texts = [entry.get("token") for entry in named["content"] if isinstance(entry, Mapping)]
    ids = ids_of_texts(texts) if isinstance(texts, list) and texts else None
    if ids is None:
        raise ConversionError(
            "the generated tokens are not known", code="RF-A010", where=out.place("token_ids"),
            expected="'token_ids' of the choice, or tokens as ids in its log-probs", got=None,
            remedy="set return_token_ids (vLLM: or return_tokens_as_token_ids) in the request; "
            "text is not tokenised again",
        )  # fmt: skip
    return ids


def _log_probs(out: Choice, given: Any, k: int | None, answer: Answer) -> LogProbs | None:
    place = partial(out.place, "logprobs")
    if isinstance(given, Mapping) and given.get("content") is not None:
        read = as_log_probs(given["content"], place)
        check_length(out, "logprobs", len(read.values))
    elif isinstance(given, Mapping) and given.get("token_logprobs") is not None:
        read = _completions(out, given, k, answer, place)
    else:
        return None
    if read.ids is not None and not np.array_equal(read.ids, out.token_ids):
        first = int(np.argmax(read.ids != out.token_ids))
        raise ConversionError(
            "log-probs are of the sampled tokens", code="RF-A006", where=place(first),
            expected=int(out.token_ids[first]), got=int(read.ids[first]),
        )  # fmt: skip
    return read


def _completions(
    out: Choice, given: Mapping[str, Any], k: int | None, answer: Answer, place: Place
) -> LogProbs:
    """Return the lists of the completions endpoint, whose mappings are by text or by id."""
    values, null = as_floats(given["token_logprobs"], place)
    check_length(out, "logprobs", len(values))
    texts = given.get("tokens")
    ids = ids_of_texts(texts) if isinstance(texts, list) else None
    rows = [row or {} for row in given.get("top_logprobs") or ()]
    keys = [key for row in rows for key in row]
    none = np.zeros(len(values), np.int64)
    if rows:
        check_length(out, "logprobs", len(rows))
    if ids_of_texts(keys) is None:
        # Two ids of one text share an entry (vllm-project/vllm#44319): it says of neither.
        if k is not None and k > 0:
            answer.counts.noted["top_lists_short"] += sum(len(row) < k for row in rows)
        empty = Entries(none[:0], values[:0], null[:0], none[:0])
        return LogProbs(ids, values, null, none, empty, len(keys))
    if not keys:
        return LogProbs(ids, values, null, none, Entries(none[:0], values[:0], null[:0], none[:0]))
    by_id = [{key.removeprefix("token_id:"): value for key, value in row.items()} for row in rows]
    counts, entries = read_dicts(by_id, place)
    if k:
        entries = _ranked(out.token_ids, counts, entries, k)
        out.lists_sampled = False
    return LogProbs(ids, values, null, counts, entries)


def _ranked(tokens: Int64, counts: Int64, entries: Entries, k: int) -> Entries:
    """Return entries with the ranks that the size of their list tells.

    A list of at most K is the K best; of K + 1 the best K and the sampled token, whose rank is not
    known.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    beyond = (entries.ids == tokens[owner]) & (counts[owner] > k)
    key = np.where(beyond, np.inf, -entries.log_probs)
    order = np.lexsort((key, owner))
    starts = np.cumsum(counts) - counts
    ranks = np.empty(len(owner), np.int64)
    ranks[order] = np.arange(len(owner)) - starts[owner] + 1
    ranks[beyond] = UNKNOWN_RANK
    return entries._replace(ranks=ranks)


def _merge(events: Sequence[Any], where: Where) -> dict[str, Any]:
    """Return the response that the events of a stream add up to, choices put together by index."""
    merged: dict[str, Any] = {}
    deltas: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if not isinstance(event, Mapping):
            malformed("an event is a JSON object", where, "an object", event)
        if "error" in event:
            return dict(event)
        if merged.get("id", event.get("id")) != event.get("id"):
            raise ConversionError(
                "events of one stream are of one request", code="RF-A006", where=where,
                expected=merged["id"], got=event.get("id"),
            )  # fmt: skip
        merged |= {k: v for k, v in event.items() if k != "choices" and v is not None}
        for delta in event.get("choices") or ():
            index = whole(delta.get("index")) if isinstance(delta, Mapping) else None
            if index is None:
                malformed("a delta has the index of its choice", where, "an index", delta)
            deltas.setdefault(index, []).append(_flat(delta))
    if not deltas:
        raise truncated(where, "events with choices", "none")
    merged["choices"] = [_joined(index, parts, where) for index, parts in sorted(deltas.items())]
    return merged


def _joined(index: int, deltas: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for delta in deltas:
        out.update((key, value) for key, value in delta.items() if value is not None)
    if out.get("finish_reason") is None:
        raise truncated(where, f"a finish_reason of choice {index}", "none")
    out["index"] = index
    out.pop("delta", None)

    def place(field: str, position: int | None = None) -> Where:
        return in_record(where, f"choices[{index}].{field}", position)

    # The first event, which names the role, has no token and no set.
    tokens = [
        as_ids(delta[key] if delta.get(key) is not None else (), partial(place, key))
        for delta in deltas
        for key in (next((key for key in _IDS if delta.get(key) is not None), _IDS[0]),)
    ]
    if any(key in out for key in _IDS):
        out["token_ids"] = np.concatenate(tokens)
    if "sampling_mask" in out:
        out["sampling_mask"] = join_masks(deltas, tokens, partial(place, "sampling_mask"))
    given = [part for d in deltas if isinstance(part := d.get("logprobs"), Mapping)]
    if given:
        out["logprobs"] = {
            key: [item for part in given for item in part.get(key) or ()]
            for key in ("content", "tokens", "token_logprobs", "top_logprobs")
            if any(part.get(key) is not None for part in given)
        }
    return out


_IDS = ("token_ids", "completion_token_ids")
