"""SGLang rollouts: answers of ``/generate`` and of chat completions with ``meta_info`` as samples.

The engine gives two kinds of log-probs: over the candidate set (``output_token_sampling_logprobs``)
and over the vocabulary (``output_token_logprobs`` and the top-K lists). Columns are declared
accordingly: with ``logprobs_mode="processed"`` the tokens' log-probs are the former; heads are raw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters import _sglang
from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._choice import Choice, VersionSpan
from ragged_format.adapters._columns import FROM_RECORD, ROUTED_EXPERTS, Options, make_options
from ragged_format.adapters._engine import Answer, GroupId, convert
from ragged_format.adapters._experts import check_experts
from ragged_format.adapters._prompt import (
    START,
    Targeted,
    check_targets,
    inner_columns,
    inner_schema,
    prompt_choice,
    to_teacher,
)
from ragged_format.adapters._records import (
    RECORD_READ,
    count_unread,
    find_request_id,
    in_record,
    record_value,
    to_json,
    whole,
)
from ragged_format.adapters._sglang_messages import (
    Message,
    finish_of,
    is_cumulative,
    messages_of,
    prompt_ids,
)
from ragged_format.adapters._values import Entries, LogProbs, as_ids
from ragged_format.adapters.registry import Adapter, Reader
from ragged_format.errors import ConversionError, Where
from ragged_format.log_prob import LogProb

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.schema import Column

__all__ = ["ADAPTER", "to_samples"]

_HEAD_MODES = {
    "raw": LogProb("raw", "vocabulary"),
    "temperature_scaled": LogProb("processed", "vocabulary"),
}


def to_samples(
    records: Iterable[Any],
    vocab_size: int | None = None,
    *,
    columns: Iterable[str | Column] | None = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "processed",
    head_mode: Literal["raw", "temperature_scaled"] = "raw",
    targets: Targeted = "generated",
    on_missing_support: Policy = "error",
    on_invalid_support: Policy = "error",
    on_missing_log_prob: Literal["error", "flag", "drop_target", "drop_sample"] = "flag",
    on_error: Literal["raise", "skip"] = "raise",
    heads: int | None = None,
    experts_shape: tuple[int, int] | None = None,
    group_id: GroupId | None = None,
    policy_version: Mapping[str, int] | int | None = None,
    engine_version: str | None = None,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return SGLang answers as one batch of samples, one record per generated sequence.

    Guarantees: a copy; everything that the input has is stored or counted in `report`; a call that
    raises leaves `report` as it was.

    Parameters
    ----------
    records : iterable
        Each a record with ``request`` and ``response`` as in
        :func:`ragged_format.adapters.vllm.to_samples`, or a response alone. A response is the
        object that ``/generate`` answers, the list that it answers to a batch, a chat completion
        with ``meta_info``, the text of an event stream, or the list of its events; streams may be
        cumulative or incremental. ``store`` of a record has the arrays of an ``output_store_ref``.
    vocab_size, columns, schema : see the vLLM adapter
    logprobs_mode : {"processed", "raw"}
        Which log-probs ``rollout_log_probs`` are to hold: those over the candidate set, or those
        over the vocabulary before temperature. The others are counted as unread.
    head_mode : {"raw", "temperature_scaled"}
        What the top-K lists are: ``temperature_scaled`` where the engine ran with
        ``SGLANG_RETURN_ORIGINAL_LOGPROB=0``.
    targets : {"generated", "prompt"}
        ``prompt``: the prompt, which a teacher scored, as in the vLLM adapter; from
        ``input_token_logprobs`` and ``input_top_logprobs``, in `head_mode`.
    on_missing_support, on_invalid_support, on_missing_log_prob, on_error : see the vLLM adapter
    heads : int, optional
        Most entries of a head; 0 for no heads.
    experts_shape : (layers, experts per token), optional
        Of ``routed_experts``, whose base64 form does not state it; without it they are unread.
    group_id, policy_version, engine_version, report : see the vLLM adapter

    Raises
    ------
    ConversionError
        As the vLLM adapter; ``RF-A001`` where the response refers to a store that was not read,
        ``RF-A003`` where the engine aborted, e.g. since a set exceeded its limit.

    Examples
    --------
    >>> meta = {
    ...     "id": "r1",
    ...     "finish_reason": {"type": "stop", "matched": 7},
    ...     "output_token_sampling_mask": [[3], [9, 4, 1]],
    ...     "output_token_sampling_logprobs": [0.0, -0.5],
    ... }
    >>> response = {"output_ids": [3, 4], "prompt_token_ids": [5, 6], "meta_info": meta}
    >>> batch = to_samples([response], vocab_size=10)
    >>> batch.column("candidate_ids").to_pylist(), batch.column("finish_reason").to_pylist()
    ([[3, 1, 4, 9]], ['stop'])
    """
    if head_mode not in _HEAD_MODES:
        raise ConversionError(
            "top-K lists are raw or scaled by temperature", code="RF-A011",
            expected=" or ".join(_HEAD_MODES), got=head_mode,
        )  # fmt: skip
    prompt_is_scored = check_targets(targets)
    asked = schema
    modes = {
        "candidate_log_probs": LogProb("processed", "support"),
        "topk_log_probs": _HEAD_MODES[head_mode],
    }
    if prompt_is_scored:
        modes["rollout_log_probs"] = modes["topk_log_probs"]
        columns, schema = inner_columns(columns), inner_schema(schema)
    options = make_options(
        vocab_size=vocab_size, columns=columns, schema=schema, logprobs_mode=logprobs_mode,
        policies={
            "on_missing_support": on_missing_support, "on_invalid_support": on_invalid_support,
            "on_missing_log_prob": on_missing_log_prob,
        },
        on_error=on_error, heads=heads, policy_version=policy_version, modes=modes,
    )  # fmt: skip
    if options.schema is not None and ROUTED_EXPERTS in options.schema:
        layers, k = options.schema[ROUTED_EXPERTS].shape
        experts_shape = (layers, k)
    is_scaled = head_mode == "temperature_scaled"
    settings = _Settings(
        options, is_scaled, experts_shape, group_id, engine_version, prompt_is_scored
    )
    wrapped = ({"response": r} if isinstance(r, list) else r for r in records_of(records))
    batch = convert(wrapped, partial(_read, settings), options, report)
    return to_teacher(batch, asked) if prompt_is_scored else batch


@dataclass(frozen=True, slots=True)
class _Settings:
    options: Options
    is_scaled: bool
    experts_shape: tuple[int, int] | None
    group_id: GroupId | None
    engine_version: str | None
    prompt_is_scored: bool


def _read(settings: _Settings, answer: Answer) -> list[Choice]:
    record, where = answer.record, answer.where
    request = record.get("request")
    request = request if isinstance(request, Mapping) else {}
    sequences: dict[tuple[str, int], list[Message]] = {}
    for message in messages_of(answer):
        id_ = find_request_id(
            (message.meta, message.body, record, request), where, ("id", "request_id", "rid")
        )
        sequences.setdefault((id_, message.index), []).append(message)
    group_of = answer.group_of(settings.group_id)
    if group_of is not None:
        group = group_of(record)
    else:
        group = _name(record, request, next(iter(sequences))[0]) if len(sequences) > 1 else None
    choices = []
    for position, ((id_, index), messages) in enumerate(sequences.items()):
        prefix = "meta_info."
        if "response_token_ids" in messages[0].body:
            prefix = f"choices[{index}].{prefix}"
        if settings.prompt_is_scored:
            out = _scored(f"{id_}/{index}", prefix, messages, request, answer, settings)
        else:
            out = Choice(f"{id_}/{index}", index, where, *_NO_TOKENS)
            out.prefix, out.names = prefix, _NAMES
            _fill(out, messages, request, answer, settings)
        for name in FROM_RECORD:
            if record.get(name) is not None:
                value = record_value(record, name, position, len(sequences), where)
                out.record_values = {**out.record_values, name: value}
        out.record_values = {**out.record_values, "group_id": group}
        choices.append(out)
    read = RECORD_READ | ({START} if settings.prompt_is_scored else {"store"})
    count_unread(answer.unread, record, read, "record.")
    return choices


_NAMES = {"sampling_mask": _sglang.MASK, "logprobs": "output_*_logprobs"}
_NO_TOKENS = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def _name(record: Mapping[str, Any], request: Mapping[str, Any], first: str) -> str:
    """Return the id of a request that gave several sequences."""
    for value in (record.get("request_id"), request.get("rid")):
        if isinstance(value, str):
            return value
    return first


def _fill(
    out: Choice,
    messages: Sequence[Message],
    request: Mapping[str, Any],
    answer: Answer,
    settings: _Settings,
) -> None:
    """Read the messages of one sequence into a choice."""
    where, last = answer.where, messages[-1]
    reason = last.meta.get("finish_reason", last.body.get("finish_reason"))
    kind, stopped = finish_of(reason, last, where)
    parts = _parts(out, messages, answer)
    part = _sglang.join(parts)
    out.token_ids = part.ids
    _check_totals(out, part, last.meta)
    out.prompt_ids = prompt_ids(messages, request, where)
    asked_mask = bool(request.get("return_sampling_mask"))
    out.support, out.support_log_probs = part.support, part.support_log_probs
    out.support_cut = part.cut
    out.support_expected = asked_mask or part.support is not None
    out.log_probs_expected = bool(request.get("return_logprob")) or asked_mask
    out.lists_sampled = False
    out.log_probs = _log_probs(out, part, last.meta, answer, settings)
    sampling = request.get("sampling_params")
    sampling = sampling if isinstance(sampling, Mapping) else {}
    out.top_k = whole(sampling.get("top_k"))
    version = last.meta.get("weight_version")
    if version is not None:
        out.versions = [VersionSpan(str(version), 0, len(part.ids))]
    _read_experts(out, last.meta, answer, settings)
    out.record_values = {
        "temperature": sampling.get("temperature"),
        "finish_reason": kind,
        "provenance": _provenance(last, request, answer, settings, stopped),
    }
    count_unread(answer.unread, last.meta, _sglang.READ | {ROUTED_EXPERTS}, "meta_info.")


def _provenance(
    message: Message,
    request: Mapping[str, Any],
    answer: Answer,
    settings: _Settings,
    stopped: Any = None,
) -> str:
    sampling = request.get("sampling_params")
    facts = {
        "engine": "sglang",
        "engine_version": settings.engine_version or answer.record.get("engine_version"),
        "model": message.body.get("model") or request.get("model"),
        "sampling": dict(sampling) if isinstance(sampling, Mapping) else {},
        "stop_reason": stopped,
    }
    known = {key: value for key, value in facts.items() if value is not None}
    return to_json(known, answer.where, "sampling_params")


def _scored(
    sample_id: str,
    prefix: str,
    messages: Sequence[Message],
    request: Mapping[str, Any],
    answer: Answer,
    settings: _Settings,
) -> Choice:
    """Return the prompt, which a teacher scored, as one choice."""
    last, where = messages[-1], answer.where

    def place(field: str, position: int | None = None) -> Where:
        return in_record(where, prefix + field, position)

    ids = prompt_ids(messages, request, where)
    scored = _sglang.read_prompt(ids, last.meta, place)
    out = prompt_choice(sample_id, where, answer.record, ids, scored, answer.counts)
    out.prefix, out.names = prefix, {"logprobs": "input_*_logprobs"}
    sampling = request.get("sampling_params")
    out.record_values = {
        "temperature": sampling.get("temperature") if isinstance(sampling, Mapping) else None,
        "provenance": _provenance(last, request, answer, settings),
        "teacher_id": last.body.get("model") or request.get("model"),
    }
    count_unread(answer.unread, last.meta, _sglang.PROMPT_READ, "meta_info.")
    answer.unread["output_ids"] += 1
    return out


def _parts(out: Choice, messages: Sequence[Message], answer: Answer) -> list[_sglang.Part]:
    """Return the messages that together have every token once."""
    where = answer.where
    ids = [_sglang.output_ids(m.body, m.meta, where) for m in messages]
    if len(messages) > 1 and is_cumulative(ids, messages[-1].meta, where):
        messages, ids = messages[-1:], ids[-1:]
    store = answer.record.get("store")
    store = store if isinstance(store, Mapping) else None
    return [
        _sglang.read_part(own, message.meta, store, out.place)
        for own, message in zip(ids, messages, strict=True)
    ]


def _check_totals(out: Choice, part: _sglang.Part, meta: Mapping[str, Any]) -> None:
    told = {"completion_tokens": len(part.ids)}
    counts = None if part.support is None else part.support.counts
    if counts is not None:
        told[_sglang.MASK_LENGTH] = len(counts)
    for key, count in told.items():
        value = meta.get(key)
        if isinstance(value, list) and counts is not None:  # other builds list the counts
            value, count = as_ids(value, partial(out.place, key)).tolist(), counts.tolist()
        if value is not None and value != count:
            raise ConversionError(
                f"{key} agrees with the lists of the response", code="RF-A006",
                where=out.place(key), expected=value, got=count,
                remedy="the response lacks tokens that the engine generated",
            )  # fmt: skip


def _log_probs(
    out: Choice,
    part: _sglang.Part,
    meta: Mapping[str, Any],
    answer: Answer,
    settings: _Settings,
) -> LogProbs | None:
    """Return the log-probs of the mode asked for, and the top-K lists."""
    is_raw = settings.options.mode.mode == "raw"
    processed, raw = (part.sampling, part.sampling_null), (part.raw, part.raw_null)
    (values, null), other = (raw, processed) if is_raw else (processed, raw)
    if values is None and other[0] is not None:
        raise ConversionError(
            "the response has log-probs of the other mode only", code="RF-A007",
            where=out.place(_sglang.SAMPLING if is_raw else _sglang.TOKENS),
            expected=f"{settings.options.mode.mode} log-probs",
            got="processed" if is_raw else "raw",
            remedy="request return_sampling_mask, or pass the logprobs_mode of what is there",
        )  # fmt: skip
    if other[0] is not None:
        answer.unread[f"meta_info.{_sglang.SAMPLING if is_raw else _sglang.TOKENS}"] += 1
    scaled = meta.get(f"{_sglang.TOP}_temperature_scaled")
    if part.top is not None and scaled is not None and bool(scaled) != settings.is_scaled:
        raise ConversionError(
            "top-K lists are of another mode than the call says", code="RF-A007",
            where=out.place(_sglang.TOP),
            expected="temperature_scaled" if settings.is_scaled else "raw",
            got="temperature_scaled" if scaled else "raw",
            remedy="pass the head_mode that is there",
        )  # fmt: skip
    if values is None and part.top is None:
        return None
    if values is None or null is None:
        values, null = np.full(len(part.ids), np.nan), np.ones(len(part.ids), bool)
    none = np.zeros(len(part.ids), np.int64)
    counts, entries = none, Entries(none[:0], values[:0], null[:0], none[:0])
    if part.top is not None:
        counts, entries = part.top.counts, part.top.entries
    return LogProbs(part.ids, values, null, counts, entries)


def _read_experts(
    out: Choice, meta: Mapping[str, Any], answer: Answer, settings: _Settings
) -> None:
    given = meta.get(ROUTED_EXPERTS)
    if given is None:
        return
    place = out.place(ROUTED_EXPERTS)
    schema = settings.options.schema
    wanted = schema is None or ROUTED_EXPERTS in schema
    if not wanted or (settings.experts_shape is None and not isinstance(given, np.ndarray)):
        answer.unread[f"meta_info.{ROUTED_EXPERTS}"] += 1
        return
    forwarded = max(len(out.prompt_ids) + len(out.token_ids) - 1, 0)
    if isinstance(given, np.ndarray):
        out.routed_experts = check_experts(given, forwarded, place)
        return
    layers, k = settings.experts_shape or (0, 0)
    flat = _sglang.decode(given, "int32", ("int32",), place)
    if len(flat) != forwarded * layers * k:
        raise ConversionError(
            "routed experts have a row for every token but the last", code="RF-A006", where=place,
            expected=f"{forwarded} x {layers} x {k} numbers", got=f"{len(flat)} numbers",
            remedy="check experts_shape; sgl-project/sglang#20964 lost the last token",
        )  # fmt: skip
    out.routed_experts = check_experts(flat.reshape(forwarded, layers, k), forwarded, place)


def _recognizes(record: Any) -> bool:
    """Return whether a record is, or holds, an answer with ``meta_info``."""
    response = record.get("response", record) if isinstance(record, Mapping) else record
    first = response[0] if isinstance(response, list) and response else response
    if not isinstance(first, Mapping):
        return False
    if isinstance(first.get("meta_info"), Mapping):
        return True
    choices = first.get("choices")
    choice = choices[0] if isinstance(choices, Sequence) and len(choices) else None
    return isinstance(choice, Mapping) and isinstance(choice.get("meta_info"), Mapping)


ADAPTER = Adapter(
    name="sglang",
    title="SGLang, /generate and chat with meta_info",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
)
