"""The parts of SGLang answers: of ``/generate``, of chat completions, of event streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters._records import count_unread, error_of, in_record, refused, whole
from ragged_format.adapters._stream import read_events, truncated
from ragged_format.adapters._values import as_ids, malformed
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.adapters._engine import Answer
    from ragged_format.lists import Int64

__all__ = ["Message", "finish_of", "is_cumulative", "messages_of", "prompt_ids"]

_OVERFLOW = "sampling-mask-max-tokens"
_BODY_READ = frozenset({
    "text", "output_ids", "meta_info", "prompt_token_ids", "index", "request_id", "model",
})  # fmt: skip
_CHOICE_READ = frozenset({
    "index", "message", "finish_reason", "matched_stop", "prompt_token_ids", "response_token_ids",
    "meta_info",
})  # fmt: skip
_RESPONSE_READ = frozenset({"id", "object", "created", "model", "choices", "usage", "metadata"})


@dataclass(frozen=True, slots=True)
class Message:
    """A response, an event of a stream, or a choice of a chat completion.

    Attributes
    ----------
    body : mapping
        With tokens, or the ids of the prompt.
    meta : mapping
        Its ``meta_info``.
    index : int
        Of the sequence in its request.
    """

    body: Mapping[str, Any]
    meta: Mapping[str, Any]
    index: int


def messages_of(answer: Answer) -> Iterator[Message]:
    """Yield the parts of a response that have tokens.

    Raises
    ------
    ConversionError
        An error answer (``RF-A003``), a chat choice without ``meta_info`` (``RF-A009``), a cut
        stream (``RF-A008``), or something else (``RF-A002``).
    """
    response, where = answer.response, answer.where
    if isinstance(response, bytes):
        response = read_events(response, where)
    parts = response if isinstance(response, list) else [response]
    if not parts:
        malformed("a response has at least one part", where, "an object", "an empty list")
    for part in parts:
        if not isinstance(part, Mapping):
            malformed("a response is a JSON object, or a list of them", where, "an object", part)
        if (said := error_of(answer.record, part)) is not None:
            raise _refused(said, where)
        if isinstance(part.get("meta_info"), Mapping):
            count_unread(answer.unread, part, _BODY_READ, "response.")
            yield Message(part, part["meta_info"], whole(part.get("index")) or 0)
            continue
        choices = part.get("choices")
        if not isinstance(choices, Sequence) or isinstance(choices, str):
            malformed("a response has meta_info or choices", where, "'meta_info'", list(part))
        for position, choice in enumerate(choices):
            meta = choice.get("meta_info") if isinstance(choice, Mapping) else None
            if not isinstance(meta, Mapping):
                raise ConversionError(
                    "a chat choice has no meta_info, where the engine puts candidate sets",
                    code="RF-A009", where=where, expected="choices[].meta_info", got=None,
                    remedy="request return_meta_info, return_token_ids and return_sampling_mask; "
                    "/v1/completions never has them",
                )  # fmt: skip
            count_unread(answer.unread, choice, _CHOICE_READ, "choice.")
            index = whole(choice.get("index"))
            model = {"model": part.get("model")}
            yield Message({**model, **choice}, meta, position if index is None else index)
        count_unread(answer.unread, part, _RESPONSE_READ, "response.")


def _refused(said: object, where: Where) -> ConversionError:
    if _OVERFLOW in str(said):
        return ConversionError(
            "a candidate set is larger than the engine's limit, so the engine refused the request",
            code="RF-A003", where=where, expected="sets within --sampling-mask-max-tokens",
            got=said, remedy="lower top_k, or raise the limit of the server",
        )  # fmt: skip
    return refused(where, said)


def finish_of(reason: Any, message: Message, where: Where) -> tuple[str, Any]:
    """Return why the sequence ended, in a word and with what matched.

    Raises
    ------
    ConversionError
        It did not end (``RF-A008``), or the engine aborted it with an error (``RF-A003``).
    """
    if reason is None:
        raise truncated(where, "a finish_reason in the last event", "none")
    if isinstance(reason, str):
        return reason, message.body.get("matched_stop")
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if not isinstance(kind, str):
        malformed("a finish_reason has a type", where, "an object with 'type'", reason)
    if kind == "abort" and reason.get("status_code") is not None:
        raise _refused(f"{reason['status_code']}: {reason.get('message')}", where)
    return kind, reason.get("matched", reason.get("message"))


def is_cumulative(ids: Sequence[Int64], meta: Mapping[str, Any], where: Where) -> bool:
    """Return whether each event repeats the tokens of those before it.

    Raises
    ------
    ConversionError
        Neither reading gives the number of tokens that the engine states (``RF-A006``).
    """
    total = whole(meta.get("completion_tokens"))
    last, together = len(ids[-1]), sum(map(len, ids))
    grows = all(len(a) <= len(b) and np.array_equal(a, b[: len(a)]) for a, b in pairwise(ids))
    if grows and total in (None, last) and (total is not None or last > 1):
        return True
    if total in (None, together):
        return False
    raise ConversionError(
        "the events of a stream have all tokens of the sequence", code="RF-A006", where=where,
        expected=f"{total} tokens", got=f"{last} in the last event, {together} in all",
        remedy="events were lost or are of several requests",
    )  # fmt: skip


def prompt_ids(messages: Sequence[Message], request: Mapping[str, Any], where: Where) -> Int64:
    """Return the prompt's tokens, of whatever names them; all that does must agree.

    Raises
    ------
    ConversionError
        Two things name different prompts (``RF-A006``), or nothing does (``RF-A010``).
    """
    found: list[tuple[str, Int64]] = []
    for message in messages:
        for source, key in ((message.body, "prompt_token_ids"), (request, "input_ids")):
            value = source.get(key)
            if value is not None and not (len(value) and isinstance(value[0], list)):
                found.append((key, as_ids(value, partial(in_record, where, key))))
        told = whole(message.meta.get("prompt_tokens"))
        scored = message.meta.get("input_token_logprobs")
        # From its first token on, which has no log-prob.
        if isinstance(scored, Sequence) and len(scored) and scored[0][0] is None:
            ids = as_ids(
                [row[1] for row in scored], partial(in_record, where, "input_token_logprobs")
            )
            if told in (None, len(ids)):
                found.append(("input_token_logprobs", ids))
        for key, ids in found:
            if told not in (None, len(ids)) or not np.array_equal(ids, found[0][1]):
                raise ConversionError(
                    "all that names the prompt names the same", code="RF-A006",
                    where=in_record(where, key), expected=f"{told or len(found[0][1])} tokens",
                    got=f"{len(ids)} tokens",
                    remedy="join responses to requests by request id, not by order",
                )  # fmt: skip
    if not found or not len(found[0][1]):
        raise ConversionError(
            "the prompt's tokens are not known", code="RF-A010", where=where,
            expected="'prompt_token_ids' in the response or 'input_ids' in the request, not empty",
            got="neither" if not found else "an empty list",
            remedy="keep the request with its response, or request return_prompt_token_ids",
        )  # fmt: skip
    return found[0][1]
