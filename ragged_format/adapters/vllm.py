"""vLLM rollouts: responses of ``/inference/v1/generate`` as samples.

The endpoint returns, for each generated token, the ids that survived truncation
(``sampling_mask``), the sampled token's log-prob and a list of the best others. Log-probs are of
one mode per call, heads are exact prefixes of the sampler's ranking, nothing is repaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._columns import ROUTED_EXPERTS, make_options
from ragged_format.adapters._engine import Answer, GroupId, convert
from ragged_format.adapters._in_process import as_record
from ragged_format.adapters._prompt import (
    Targeted,
    check_targets,
    inner_columns,
    inner_schema,
    scored_modes,
    to_teacher,
)
from ragged_format.adapters._response import check_response, read_choices, read_scored_prompt
from ragged_format.adapters._stream import read_stream
from ragged_format.adapters.registry import Adapter, Reader

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._choice import Choice
    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.schema import Column

__all__ = ["ADAPTER", "to_samples"]


def to_samples(
    records: Iterable[Mapping[str, Any]],
    vocab_size: int | None = None,
    on_missing_support: Policy = "error",
    *,
    columns: Iterable[str | Column] | None = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "processed",
    targets: Targeted = "generated",
    on_invalid_support: Policy = "error",
    on_missing_log_prob: Literal["error", "flag", "drop_target", "drop_sample"] = "flag",
    on_error: Literal["raise", "skip"] = "raise",
    heads: int | None = None,
    group_id: GroupId | None = None,
    policy_version: Mapping[str, int] | int | None = None,
    engine_version: str | None = None,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return vLLM responses as one batch of samples, one record per choice.

    Guarantees: a copy that keeps every invariant of the format; every record, token, candidate and
    head entry of the input is stored or counted in `report`; a call that raises leaves `report` as
    it was.

    Parameters
    ----------
    records : iterable of mappings
        Each with ``request`` and ``response``. The response is the answer of
        ``/inference/v1/generate`` as a mapping, as JSON text or as the text of an event stream
        (str or bytes; bytes are the fast way), or a ``RequestOutput`` of vLLM in this process. A
        response alone is a record too. Further keys that are read: ``group_id``,
        ``rollout_id``, ``branch_index``, ``reward``, ``advantage``, ``env_name``, ``metrics`` (all
        but the first may be lists with one value per choice), ``request_id``, ``http_status``,
        ``engine_version``, ``logprobs_mode``, and ``source`` or ``name`` (for errors).
    vocab_size : int
        Of the model; may be left out where `schema` says it.
    columns : iterable of str or Column, optional
        The optional columns wanted. ``None``: record columns, and the others that at least one
        record of this call has or asked for. Calls that must agree name their columns or schema.
    schema : pyarrow.Schema, optional
        Instead of `vocab_size` and `columns`: the exact schema of the result.
    logprobs_mode : {"processed", "raw"}
        What the engine's ``--logprobs-mode`` was.
    targets : {"generated", "prompt"}
        What the samples' targets are. ``prompt``: the tokens of a prompt that a teacher scored
        (``prompt_logprobs``), from the record's ``completion_start`` on, or all but the first; the
        columns are ``teacher_topk_*`` and ``teacher_log_probs``, and what was generated is counted
        as unread.
    on_missing_support : {"error", "flag", "full_vocab", "drop_target", "drop_sample"}
        What to do where a generated token has no candidate set though its choice has the field or
        asked for it: raise, store none and flag it, store none (which says: the full vocabulary),
        do not score the token, leave the sample out.
    on_invalid_support : same choices
        What to do with a set that is empty, has an id twice, lacks the sampled token, or a
        candidate's log-prob.
    on_missing_log_prob : {"flag", "error", "drop_target", "drop_sample"}
        What to do where a log-prob is null, NaN, a floor or not given. ``flag`` stores 0.0.
    on_error : {"raise", "skip"}
        What to do with a record that cannot be read (error answers, truncated streams, …). Skipped
        records are counted by the error's code.
    heads : int, optional
        Most entries of a head; 0 for no heads. ``None``: all that are certain.
    group_id : str or callable, optional
        Key of the record, or function of the record, that gives the prompt group. ``None``: the
        record's ``group_id``, else the request id where a response has several choices, else null.
    policy_version : mapping of str to int, or int, optional
        Number of each weight version string, or of all. Without it, digits are parsed and other
        versions are null.
    engine_version : str, optional
        For the provenance; overrides the record's.
    report : ConversionReport or mutable mapping, optional
        Receives the counts, added to those it has.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A003`` an error answer, ``RF-A004`` a lost candidate set,
        ``RF-A005`` ids that contradict each other or the vocabulary, ``RF-A006`` lengths that
        disagree, ``RF-A007`` log-probs of another mode or impossible ones, ``RF-A008`` a truncated
        stream, ``RF-A009`` another endpoint, ``RF-A010`` no or no unique identity, ``RF-A011``
        columns or options that do not fit.

    Examples
    --------
    >>> response = {
    ...     "request_id": "r1",
    ...     "prompt_token_ids": [5, 6],
    ...     "choices": [{"index": 0, "token_ids": [3, 4], "sampling_mask": [[3], [1, 4, 9]]}],
    ... }
    >>> batch = to_samples([{"response": response}], vocab_size=10)
    >>> batch.column("candidate_counts").to_pylist(), batch.column("candidate_ids").to_pylist()
    ([[1, 3]], [[3, 1, 4, 9]])
    >>> response["choices"][0]["sampling_mask"][1] = [1, 9]
    >>> to_samples([{"response": response}], vocab_size=10)
    Traceback (most recent call last):
    ...
    ragged_format.errors.ConversionError: [RF-A005] the sampled token is not in its candidate set
      where:    row 0, column 'choices[0].sampling_mask', position 1
      expected: a set with the sampled token
      got:      [1, 9] for token 4
      remedy:   choose on_invalid_support to convert the rest; sets are never repaired
    """
    prompt_is_scored = check_targets(targets)
    asked = schema
    if prompt_is_scored:
        columns, schema = inner_columns(columns), inner_schema(schema)
    options = make_options(
        vocab_size=vocab_size, columns=columns, schema=schema, logprobs_mode=logprobs_mode,
        policies={
            "on_missing_support": on_missing_support, "on_invalid_support": on_invalid_support,
            "on_missing_log_prob": on_missing_log_prob,
        },
        on_error=on_error, heads=heads, policy_version=policy_version,
        modes=scored_modes(logprobs_mode) if prompt_is_scored else None,
    )  # fmt: skip

    def read(answer: Answer) -> list[Choice]:
        response = answer.response
        if isinstance(response, bytes):
            response = read_stream(response, answer.where)
        check_response(answer.record, response, answer.where)
        if prompt_is_scored:
            return [read_scored_prompt(answer, response, group_id, engine_version)]
        return read_choices(
            answer.record, response, answer.where, unread=answer.unread,
            group_of=answer.group_of(group_id), engine_version=engine_version,
            with_experts=options.schema is None or ROUTED_EXPERTS in options.schema,
        )  # fmt: skip

    wrapped = (as_record(record, row) for row, record in enumerate(records_of(records)))
    batch = convert(wrapped, read, options, report)
    return to_teacher(batch, asked) if prompt_is_scored else batch


def _recognizes(record: Any) -> bool:
    """Return whether a record holds a response of the generate endpoint."""
    response = record.get("response") if isinstance(record, Mapping) else None
    if not isinstance(response, Mapping):
        return False
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, Sequence) and len(choices) else None
    return isinstance(first, Mapping) and "token_ids" in first and "object" not in response


ADAPTER = Adapter(
    name="vllm",
    title="vLLM, /inference/v1/generate",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
)
