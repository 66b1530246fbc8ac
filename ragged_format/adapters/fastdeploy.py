"""FastDeploy rollouts: chat completions and completions with ``sampling_mask`` as samples.

The engine puts candidate sets into each choice, and token ids into the message (or, streaming, the
delta). A stream's events have the sets of their own tokens; the first event, which names the role,
has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ragged_format.adapters._columns import make_options
from ragged_format.adapters._engine import GroupId, convert
from ragged_format.adapters._openai import Dialect, read_openai
from ragged_format.adapters._records import error_of, refused
from ragged_format.adapters.registry import Adapter, Reader

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.errors import Where
    from ragged_format.schema import Column

__all__ = ["ADAPTER", "to_samples"]


def to_samples(
    records: Iterable[Mapping[str, Any]],
    vocab_size: int | None = None,
    *,
    columns: Iterable[str | Column] | None = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "processed",
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
    """Return FastDeploy answers as one batch of samples, one record per choice.

    Guarantees: a copy; everything that the input has is stored or counted in `report`; a call that
    raises leaves `report` as it was. A set of the whole vocabulary (``top_p`` 1) is stored as it
    is.

    Parameters
    ----------
    records : iterable of mappings
        Records as in :func:`ragged_format.adapters.vllm.to_samples`, or responses alone; a response
        may be the text of an event stream. The request needs ``return_token_ids``.
    vocab_size, columns, schema, logprobs_mode, on_missing_support, on_invalid_support,
    on_missing_log_prob, on_error, heads, group_id, policy_version, engine_version, report :
        See the vLLM adapter. Log-probs are processed where the request set
        ``top_p_normalized_logprobs``, and over the vocabulary, raw, without it.

    Raises
    ------
    ConversionError
        As the vLLM adapter.

    Examples
    --------
    >>> response = {
    ...     "id": "chatcmpl-1",
    ...     "object": "chat.completion",
    ...     "choices": [
    ...         {
    ...             "index": 0,
    ...             "message": {"prompt_token_ids": [5, 6], "completion_token_ids": [3, 4]},
    ...             "sampling_mask": [[3], [1, 4, 9]],
    ...             "finish_reason": "stop",
    ...         }
    ...     ],
    ... }
    >>> to_samples([response], vocab_size=10).column("candidate_ids").to_pylist()
    [[3, 1, 4, 9]]
    """
    options = make_options(
        vocab_size=vocab_size, columns=columns, schema=schema, logprobs_mode=logprobs_mode,
        policies={
            "on_missing_support": on_missing_support, "on_invalid_support": on_invalid_support,
            "on_missing_log_prob": on_missing_log_prob,
        },
        on_error=on_error, heads=heads, policy_version=policy_version,
    )  # fmt: skip
    read = partial(
        read_openai, dialect=_DIALECT, options=options, prompt_is_scored=False, group_id=group_id,
        engine_version=engine_version,
    )  # fmt: skip
    return convert(records, read, options, report)


def _refuse(record: Mapping[str, Any], response: Mapping[str, Any], where: Where) -> None:
    if (said := error_of(record, response)) is not None:
        raise refused(where, said)


_DIALECT = Dialect(
    "fastdeploy", gives_sets=True, refuse=_refuse,
    remedy="start the server with --enable-keep-sampling-mask",
)  # fmt: skip
_IDS = frozenset({"completion_token_ids", "prompt_token_ids"})


def _recognizes(record: Any) -> bool:
    """Return whether a record is, or holds, an answer with ids where FastDeploy has them."""
    response = record.get("response", record) if isinstance(record, Mapping) else None
    choices = response.get("choices") if isinstance(response, Mapping) else None
    choice = choices[0] if isinstance(choices, Sequence) and len(choices) else None
    if not isinstance(choice, Mapping) or "meta_info" in choice:
        return False
    inner = choice.get("message", choice.get("delta"))
    inner = inner if isinstance(inner, Mapping) else {}
    has_bare_sets = "sampling_mask" in choice and "token_ids" not in choice
    return bool(_IDS & inner.keys()) or "completion_token_ids" in choice or has_bare_sets


ADAPTER = Adapter(
    name="fastdeploy",
    title="FastDeploy, chat and completions with sampling_mask",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
)
