"""SkyRL: generate responses and training batches with a dense sample support, in both directions.

The support is a table of ``top_k`` ids per response token, -1 behind them, all -1 for none. It
cannot hold the ids that tie beyond ``top_k``, which samplers keep: writing such a set is an error
unless ``lossy=True``, which counts what it leaves out. The order of ids in a row is the sampler's
ranking; sets are kept ascending here, so that tables come back as equal sets.

SkyRL puts a sampled id that is missing from its row in place of the last one. That cannot be seen
in the table; full rows that end with the sampled id are counted as noted.
:func:`support_from_flat` tells which rows it would repair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.adapters._npz import write_npz
from ragged_format.adapters._response_csr import RESPONSE_LENGTH
from ragged_format.adapters._skyrl_out import HOLDS, SUPPORT, training_batch
from ragged_format.adapters._support_table import (
    decode_support,
    encode_support,
    rows_of,
    support_from_flat,
)
from ragged_format.adapters._trajectory import (
    Policies,
    Trajectory,
    build,
    check_lengths,
    doubles,
    ids_of,
    mask_of,
    per_target,
    rounded,
    sampled_only,
)
from ragged_format.adapters._values import malformed
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, offsets_of
from ragged_format.schema import Column

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragged_format.adapters._columns import LogProbMode
    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters._values import Bools

__all__ = [
    "ADAPTER",
    "decode_support",
    "encode_support",
    "support_from_flat",
    "to_samples",
    "to_training_batch",
    "write",
]

_NAMES = {
    "sampling_mask": "rollout_sample_support", "logprobs": "rollout_logprobs",
    "tokens": "sequences", "token_ids": "token_ids", "mask": "loss_masks",
}  # fmt: skip
_REWARDS = Column("token_rewards", "token", pa.float32())
_OWN = (RESPONSE_LENGTH, _REWARDS)
_GIVEN = HOLDS | {"response_length", "reward", "finish_reason"}


def to_samples(
    payloads: Iterable[Mapping[str, Any]],
    vocab_size: int | None = None,
    *,
    columns: Iterable[str | Column] | None = None,
    schema: pa.Schema | None = None,
    logprobs_mode: LogProbMode = "processed",
    on_missing_support: Policy = "error",
    on_invalid_support: Policy = "error",
    on_missing_log_prob: Literal["error", "flag", "drop_target", "drop_sample"] = "flag",
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return generate responses, or training batches, as one batch of samples.

    Guarantees: a copy that keeps every invariant of the format; a call that raises leaves `report`
    as it was.

    Parameters
    ----------
    payloads : iterable of mappings
        Records with ``response`` (``choices`` with ``token_ids`` and ``rollout_sample_support``)
        and, in the record or its ``request``, ``prompt_token_ids``: one list, or one for each
        choice. Or training batches: ``sequences`` and ``attention_mask``, (b, s) left-padded,
        ``response_mask``, ``loss_masks``, ``rollout_logprobs`` and ``rewards``, (b, r)
        right-aligned, and the support as ``values``, (sum of responses, top_k), and
        ``cu_seqlens``. ``sample_id`` or ``request_id``, if there, begins the sample ids.
    vocab_size, columns, schema, logprobs_mode, report
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    on_missing_support, on_invalid_support, on_missing_log_prob
        As there; a row of -1 alone of a trained token (a synthetic end token) is a missing set.

    Raises
    ------
    ConversionError
        As there.

    Examples
    --------
    >>> support = encode_support(np.array([[6, 2, -1], [7, -1, -1]], np.int32))
    >>> choice = {"token_ids": [6, 7], "rollout_sample_support": support}
    >>> record = {"prompt_token_ids": [5], "response": {"choices": [choice]}}
    >>> batch = to_samples([record], vocab_size=10)
    >>> batch.column("candidate_counts").to_pylist(), batch.column("candidate_ids").to_pylist()
    ([[2, 1]], [[2, 6, 7]])
    """
    return build(
        payloads, _read, vocab_size=vocab_size, columns=columns, schema=schema,
        logprobs_mode=logprobs_mode,
        policies=Policies(on_missing_support, on_invalid_support, on_missing_log_prob),
        given=_GIVEN, own=_OWN, finish=_finish, report=report,
    )  # fmt: skip


def _read(payload: Any, number: int, report: ConversionReport) -> list[Trajectory]:
    where = Where(row=number)
    if not isinstance(payload, Mapping):
        malformed("a payload is a mapping", where, "a record or a training batch", payload)
    name = str(payload.get("sample_id") or payload.get("request_id") or f"skyrl/{number}")
    if "sequences" in payload:
        return list(_training_batch(payload, name, where, report))
    response = payload.get("response", payload)
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        malformed("a response has choices", where, "choices", response)
    prompts = _prompts(payload, len(choices), where)
    return [
        _choice(choice, prompts[index], f"{name}/{index}", where, report)
        for index, choice in enumerate(choices)
    ]


def _prompts(record: Mapping[str, Any], size: int, where: Where) -> list[Int64]:
    request = record.get("request")
    sources = (record, request if isinstance(request, Mapping) else {})
    given = next((s["prompt_token_ids"] for s in sources if "prompt_token_ids" in s), None)
    at = Where(row=where.row, column="prompt_token_ids")
    if given is None:
        raise ConversionError(
            "the prompt of a response is not known", code="RF-A010", where=at,
            expected="prompt_token_ids in the record or its request", got=None,
        )  # fmt: skip
    if len(given) and isinstance(given[0], Sequence | np.ndarray):
        check_lengths(size, {"prompt_token_ids": len(given)}, where, "choice")
        return [ids_of(ids, at) for ids in given]
    return [ids_of(given, at)] * size


def _choice(
    choice: Any, prompt: Int64, name: str, where: Where, report: ConversionReport
) -> Trajectory:
    if not isinstance(choice, Mapping) or choice.get("token_ids") is None:
        malformed("a choice has token_ids", where, "token_ids", choice)
    tokens = ids_of(choice["token_ids"], Where(row=where.row, column="token_ids"))
    scored = np.repeat([False, True], [len(prompt), len(tokens)])
    out = Trajectory.of(name, where, np.concatenate([prompt, tokens]), scored, _NAMES)
    out.record_values = {"response_length": len(tokens)}
    if choice.get("finish_reason") is not None:
        out.record_values["finish_reason"] = choice["finish_reason"]
    log_probs = choice.get("logprobs")
    if log_probs is not None:
        content = log_probs.get("content") if isinstance(log_probs, Mapping) else None
        if not isinstance(content, Sequence):
            malformed("log-probs have a content list", where, "a list", log_probs)
        _place_log_probs(out, [entry.get("logprob") for entry in content], scored, report)
    if choice.get(SUPPORT) is not None:
        table = decode_support(choice[SUPPORT], Where(row=where.row, column=SUPPORT))
        _place_support(out, table, tokens, scored[len(prompt) :], report)
    else:
        out.support_expected = SUPPORT in choice
    report.unread["routed_experts"] += choice.get("routed_experts") is not None
    return out


def _place_log_probs(out: Trajectory, given: Any, scored: Bools, report: ConversionReport) -> None:
    values, null = doubles(given, Where(row=out.where.row, column="rollout_logprobs"))
    mask = scored[len(scored) - len(values) :]
    expected = int(out.record_values["response_length"])
    check_lengths(expected, {"rollout_logprobs": len(values)}, out.where, "response token")
    kept = per_target(np.where(null, 0.0, values), mask, "rollout_logprobs", report.unread)
    kept = rounded(kept, report)
    kept[null[mask]] = np.nan
    out.log_probs = sampled_only(kept, null[mask])


def _place_support(
    out: Trajectory, table: npt.NDArray[Any], tokens: Int64, mask: Bools, report: ConversionReport
) -> None:
    where = Where(row=out.where.row, column=SUPPORT)
    check_lengths(len(tokens), {SUPPORT: len(table)}, where, "response token")
    beside = int(np.count_nonzero(table[~mask] >= 0))
    report.candidates.taken += beside
    report.candidates.drop("token_not_scored", beside)
    out.support = rows_of(table[mask], where)
    full = out.support.counts == table.shape[1]
    report.noted["sets_of_full_width"] += int(np.count_nonzero(full))
    # A repaired row looks like this, and so does a set whose last id was sampled.
    last = full & (table[mask][:, -1:] == tokens[mask][:, None]).any(axis=1)
    report.noted["sets_perhaps_repaired"] += int(np.count_nonzero(last & (table.shape[1] > 1)))


def _training_batch(
    batch: Mapping[str, Any], name: str, where: Where, report: ConversionReport
) -> Iterator[Trajectory]:
    arrays = {}
    for key in ("sequences", "attention_mask", "response_mask", "loss_masks"):
        if batch.get(key) is None:
            malformed("a training batch has its tokens and masks", where, key, list(batch))
        arrays[key] = _array(batch[key])
    for key in ("rollout_logprobs", "rewards"):
        if batch.get(key) is not None:
            arrays[key] = _array(batch[key])
    support = _packed_support(batch.get(SUPPORT), where)
    shapes = {key: array.shape for key, array in arrays.items()}
    rows, width = arrays["response_mask"].shape
    left = arrays["sequences"].shape
    wide = {"sequences", "attention_mask"}
    if any(shape != (left if key in wide else (rows, width)) for key, shape in shapes.items()) or (
        left[0] != rows
    ):
        raise ConversionError(
            "the columns of a training batch have one shape", code="RF-A006", where=where,
            expected="(b, s) for sequences, (b, r) for responses", got=shapes,
        )  # fmt: skip
    lengths = np.count_nonzero(arrays["response_mask"], axis=1).astype(np.int64)
    if support is not None:
        _check_bounds(support[1], lengths, len(support[0]), where)
    for row in range(rows):
        count, length = int(np.count_nonzero(arrays["attention_mask"][row])), int(lengths[row])
        at = Where(row=where.row, column=f"sequences[{row}]")
        if length > count or not _is_right_aligned(arrays, row, count, length):
            malformed(
                "sequences are padded on the left, and responses stand at their end", at,
                "masks of 0, then 1", f"{count} tokens, {length} of the response",
            )  # fmt: skip
        tokens = arrays["sequences"][row, left[1] - count :].astype(np.int64)
        response = slice(width - length, width)
        mask = mask_of(arrays["loss_masks"][row, response], where)
        scored = np.concatenate([np.zeros(count - length, bool), mask])
        out = Trajectory.of(f"{name}/{row}", where, tokens, scored, _NAMES)
        out.record_values = {"response_length": length}
        if "rollout_logprobs" in arrays:
            _place_log_probs(out, arrays["rollout_logprobs"][row, response], scored, report)
        if "rewards" in arrays:
            rewards = np.zeros(count, np.float32)
            rewards[count - length :] = arrays["rewards"][row, response]
            out.token_values = {"token_rewards": rewards}
        if support is not None:
            table = support[0][support[1][row] : support[1][row + 1]]
            _place_support(out, table, tokens[count - length :], mask, report)
        yield out


def _array(value: Any) -> npt.NDArray[Any]:
    return np.asarray(value.numpy() if hasattr(value, "detach") else value)


def _packed_support(value: Any, where: Where) -> tuple[npt.NDArray[Any], Int64] | None:
    if value is None:
        return None
    parts = value if isinstance(value, Mapping) else {
        key: getattr(value, key, None) for key in ("values", "cu_seqlens")
    }  # fmt: skip
    if parts.get("values") is None or parts.get("cu_seqlens") is None:
        malformed("a packed support has values and cu_seqlens", where, "both", list(parts))
    return _array(parts["values"]), _array(parts["cu_seqlens"]).astype(np.int64)


def _check_bounds(bounds: Int64, lengths: Int64, total: int, where: Where) -> None:
    at = Where(row=where.row, column=f"{SUPPORT}.cu_seqlens")
    expected = offsets_of(lengths)
    if bounds.tolist() != expected.tolist() or total != expected[-1]:
        raise ConversionError(
            "the support has one row per response token", code="RF-A006", where=at,
            expected=expected.tolist(), got=f"{bounds.tolist()} of {total} rows",
        )  # fmt: skip


def _is_right_aligned(
    arrays: Mapping[str, npt.NDArray[Any]], row: int, count: int, length: int
) -> bool:
    """Return whether both masks of a row are zeros, then ones, and nothing lies on padding."""
    tokens, response = arrays["attention_mask"][row], arrays["response_mask"][row]
    outside = slice(0, len(response) - length)
    empty = all(
        not arrays[key][row, outside].any()
        for key in ("loss_masks", "rollout_logprobs", "rewards") if key in arrays
    )  # fmt: skip
    return bool(tokens[len(tokens) - count :].all() and response[outside.stop :].all() and empty)


def _finish(found: Sequence[Trajectory], asked: frozenset[str]) -> None:
    """Make a reward at the last token of each sample its record column."""
    parts = [one.token_values.get("token_rewards") for one in found]
    spread = any(part is not None and part[:-1].any() for part in parts)
    if "token_rewards" in asked or (spread and "reward" not in asked):
        return
    if spread:
        raise ConversionError(
            "a sample has rewards before its last token", code="RF-A011",
            where=Where(column="reward"), expected="one reward for each sample", got="several",
            remedy="ask for the column 'token_rewards'",
        )  # fmt: skip
    for one, part in zip(found, parts, strict=True):
        if part is not None:
            reward = float(part[-1]) if len(part) else 0.0
            one.record_values = {**one.record_values, "reward": reward}
            one.token_values = {}


def to_training_batch(
    samples: pa.RecordBatch,
    *,
    top_k: int,
    lossy: bool = False,
    pad_token_id: int = 0,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return samples as the columns of a training batch.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample``, valid.
    top_k : int
        Width of the support.
    lossy : bool
        Cut sets wider than `top_k`: the sampled token stays, and of the others the most likely
        where ``candidate_log_probs`` tell, else those with the lowest ids. Candidates' log-probs
        themselves are left out. Everything cut is counted in `report`.
    pad_token_id : int
        Id on the left of shorter sequences.
    report : ConversionReport or mutable mapping, optional
        Receives the counts: ``candidates``, ``sets_cut``, and ``rewards_rounded`` to float32.

    Returns
    -------
    dict of str to array
        ``sequences``, ``attention_mask`` (b, s) int64, ``response_mask`` (b, r) int64,
        ``loss_masks``, ``rewards``, ``rollout_logprobs`` (b, r) float32, and
        ``rollout_sample_support``, a dict of ``values`` (n, top_k) int32 and ``cu_seqlens``
        (b + 1,) int32. What the samples lack is left out.

    Raises
    ------
    ConversionError
        A set is wider than `top_k`, columns that the batch cannot hold, flagged targets
        (``RF-A001``).
    """
    return training_batch(samples, top_k, pad_token_id, report, lossy=lossy)


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    top_k: int,
    lossy: bool = False,
    pad_token_id: int = 0,
) -> Mapping[str, int]:
    """Write training batches, one ``batch-N.npz`` in `path` for each batch of samples.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        Directory to make.
    top_k, lossy, pad_token_id
        As in :func:`to_training_batch`.

    Returns
    -------
    mapping of str to int
        Files written; sets cut and ids left out.
    """
    report = ConversionReport()

    def parts() -> Iterator[dict[str, npt.NDArray[Any]]]:
        for batch in batches:
            out = to_training_batch(
                batch, top_k=top_k, lossy=lossy, pad_token_id=pad_token_id, report=report
            )
            support = out.pop(SUPPORT, {})
            yield out | {f"{SUPPORT}.{key}": value for key, value in support.items()}

    files = write_npz(path, "batch", parts())
    return {
        "files": files, "sets_cut": report.converted["sets_cut"],
        "ids_left_out": report.candidates.dropped["beyond_top_k"],
    }  # fmt: skip


def _recognizes(record: Any) -> bool:
    response = record.get("response", record) if isinstance(record, Mapping) else None
    choices = response.get("choices") if isinstance(response, Mapping) else None
    first = choices[0] if isinstance(choices, Sequence) and len(choices) else None
    return isinstance(first, Mapping) and SUPPORT in first


ADAPTER = Adapter(
    name="skyrl",
    title="SkyRL, generate responses and training batches with a sample support",
    reads=Reader(to_samples=to_samples, recognizes=_recognizes),
    writes=Writer(
        write=write, profile="sample", makes="a directory with one batch-N.npz per batch"
    ),
)
