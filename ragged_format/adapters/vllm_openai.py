"""vLLM rollouts of the OpenAI endpoints: completions and chat completions as samples.

These endpoints never return candidate sets; a request for them is accepted and ignored. Their
lists of log-probs are by text unless the request says otherwise, and text does not name a token:
such entries are counted and left out. Also scored prompts (``prompt_logprobs``) of a teacher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ragged_format.adapters._columns import make_options
from ragged_format.adapters._engine import GroupId, convert
from ragged_format.adapters._openai import Dialect, read_openai
from ragged_format.adapters._prompt import (
    Targeted,
    check_targets,
    inner_columns,
    inner_schema,
    scored_modes,
    to_teacher,
)
from ragged_format.adapters._response import ENDPOINT, engine_error, is_error
from ragged_format.adapters.registry import Adapter, Reader
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.schema import Column

__all__ = ["ADAPTER", "to_samples"]


def to_samples(
    records: Iterable[Mapping[str, Any]],
    vocab_size: int | None = None,
    *,
    columns: Iterable[str | Column] | None = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "processed",
    targets: Targeted = "generated",
    on_missing_support: Policy = "error",
    on_invalid_support: Policy = "error",
    on_missing_log_prob: Literal["error", "flag", "drop_target", "drop_sample"] = "flag",
    on_error: Literal["raise", "skip"] = "raise",
    heads: int | None = None,
    group_id: GroupId | None = None,
    policy_version: Mapping[str, int] | int | None = None,
    engine_version: str | None = None,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return answers of ``/v1/completions`` and ``/v1/chat/completions`` as one batch of samples.

    Guarantees: a copy; everything that the input has is stored or counted in `report`; a call that
    raises leaves `report` as it was.

    Parameters
    ----------
    records : iterable of mappings
        Records as in :func:`ragged_format.adapters.vllm.to_samples`, or responses alone; responses
        need token ids (``return_token_ids`` or ``return_tokens_as_token_ids``).
    targets : {"generated", "prompt"}
        What the samples' targets are. ``prompt``: the tokens of a prompt that a teacher scored
        (``prompt_logprobs``), from the record's ``completion_start`` on, or all but the first; the
        columns are ``teacher_topk_*`` and ``teacher_log_probs``, and what was generated is counted
        as unread.
    vocab_size, columns, schema, logprobs_mode, on_missing_support, on_invalid_support,
    on_missing_log_prob, on_error, heads, group_id, policy_version, engine_version, report :
        See the vLLM adapter.

    Raises
    ------
    ConversionError
        As the vLLM adapter; ``RF-A009`` where candidate sets were asked for (and
        `on_missing_support` is ``error``), ``RF-A010`` where there are no token ids.

    Examples
    --------
    >>> response = {
    ...     "id": "c1",
    ...     "object": "text_completion",
    ...     "choices": [
    ...         {
    ...             "index": 0,
    ...             "finish_reason": "length",
    ...             "prompt_token_ids": [5, 6, 7],
    ...             "token_ids": [1],
    ...             "prompt_logprobs": [
    ...                 None,
    ...                 {"6": {"logprob": -2.0, "rank": 3}, "4": {"logprob": -0.5, "rank": 1}},
    ...                 {"7": {"logprob": -0.25, "rank": 1}},
    ...             ],
    ...         }
    ...     ],
    ... }
    >>> batch = to_samples([{"response": response}], vocab_size=10, targets="prompt")
    >>> batch.column("teacher_topk_ids").to_pylist(), batch.column("teacher_log_probs").to_pylist()
    ([[4, 7]], [[-2.0, -0.25]])
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
    read = partial(
        read_openai, dialect=_DIALECT, options=options, prompt_is_scored=prompt_is_scored,
        group_id=group_id, engine_version=engine_version,
    )  # fmt: skip
    batch = convert(records, read, options, report)
    return to_teacher(batch, asked) if prompt_is_scored else batch


def _refuse(record: Mapping[str, Any], response: Mapping[str, Any], where: Where) -> None:
    if is_error(record, response):
        raise engine_error(record, response, where)
    kind = response.get("object")
    if not (isinstance(kind, str) and "completion" in kind):
        raise ConversionError(
            "the response is not of an OpenAI endpoint", code="RF-A009", where=where,
            expected="an object of kind text_completion or chat.completion", got=kind,
            remedy=f"responses of {ENDPOINT} are converted by the adapter vllm",
        )  # fmt: skip


_DIALECT = Dialect(
    "vllm", gives_sets=False, refuse=_refuse,
    remedy=f"send token ids to {ENDPOINT} of a server started with --enable-scale-out "
    "--return-sampling-mask; or choose another on_missing_support",
)  # fmt: skip


def _recognizes(record: Any) -> bool:
    """Return whether a record is, or holds, an OpenAI answer without candidate sets."""
    response = record.get("response", record) if isinstance(record, Mapping) else None
    kind = response.get("object") if isinstance(response, Mapping) else None
    if not (isinstance(kind, str) and "completion" in kind):
        return False
    choices = response.get("choices") if isinstance(response, Mapping) else None
    choice = choices[0] if isinstance(choices, Sequence) and len(choices) else {}
    inner = choice.get("message", choice.get("delta")) if isinstance(choice, Mapping) else {}
    inner = inner if isinstance(inner, Mapping) else {}
    others = {"sampling_mask", "meta_info", "completion_token_ids"}
    return not (others & {*choice, *inner})


ADAPTER = Adapter(
    name="vllm_openai",
    title="vLLM, completions and chat; scored prompts",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
)
