"""miles: samples with a set for every response token, in both directions.

A sample is a mapping (or ``Sample``) with ``tokens``, ``response_length`` and response-long
``loss_mask``, ``rollout_log_probs``, ``rollout_sampling_mask_ids`` and ``_offsets``. A token of the
environment has itself for a set and log-prob 0.0; here it is not scored and has neither, so the
loss mask says which tokens get them back. Sessions are safetensors files, read and written without
that package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragged_format.adapters._response_csr import (
    GIVEN,
    OWN,
    Dialect,
    read_sample,
    write_samples,
)
from ragged_format.adapters._safetensors import read_tensors, write_tensors
from ragged_format.adapters._torch_files import load_samples
from ragged_format.adapters._trajectory import Policies, Trajectory, build, check_lengths
from ragged_format.adapters._values import malformed
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.adapters._columns import LogProbMode
    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.schema import Column

__all__ = [
    "ADAPTER",
    "decode_session",
    "encode_session",
    "from_samples",
    "payloads",
    "to_samples",
    "write",
]

_DIALECT = Dialect(
    system="miles", ids="rollout_sampling_mask_ids", offsets="rollout_sampling_mask_offsets",
    log_probs="rollout_sampling_mask_log_probs",
    nested=("rollout_sampling_mask", "rollout_sampling_masks"), observation="singleton",
)  # fmt: skip
_META = "_samples_meta"
# Tensors of a session and their types.
_TENSORS = {
    "tokens": "<i8", "loss_mask": "|u1", "rollout_log_probs": "<f8",
    "rollout_sampling_mask_ids": "<i4", "rollout_sampling_mask_offsets": "<i4",
    "rollout_sampling_mask_log_probs": "<f4", "rollout_topk_token_ids": "<i4",
    "rollout_topk_log_probs": "<f4", "teacher_log_probs": "<f8",
    "rollout_routed_experts": "<i4", "rollout_indexer_topk": "<i4",
}  # fmt: skip
_NULLS = ("rollout_routed_experts", "rollout_indexer_topk")
# What a session states for a sample that has nothing to say.
_PLAIN = {
    "response": "", "response_length": 0, "status": "completed", "weight_versions": [],
    "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0}, "metadata": {},
}  # fmt: skip


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
    policy_version: Mapping[str, int] | int | None = None,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return miles samples as one batch.

    Guarantees: a copy that keeps every invariant of the format; a call that raises leaves `report`
    as it was.

    Parameters
    ----------
    payloads : iterable of mappings
        ``Sample.to_dict()`` each; lists, arrays or tensors. Or training data: one mapping of lists
        over samples (``response_lengths``, ``loss_masks``, …), of which group-normalised
        ``rewards`` are not read. ``sample_id``, if there, names the
        sample; else ``index`` does.
    vocab_size, columns, schema, logprobs_mode, policy_version, report
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    on_missing_support, on_invalid_support, on_missing_log_prob
        As there; an empty row of a trained token is an invalid set.

    Raises
    ------
    ConversionError
        As there.

    Examples
    --------
    The last token but one is the environment's; its own set is not stored.

    >>> sample = {
    ...     "index": 0,
    ...     "tokens": [5, 6, 7, 8],
    ...     "response_length": 3,
    ...     "loss_mask": [1, 0, 1],
    ...     "rollout_log_probs": [-0.5, 0.0, 0.0],
    ...     "rollout_sampling_mask_ids": [2, 6, 7, 8],
    ...     "rollout_sampling_mask_offsets": [0, 2, 3, 4],
    ... }
    >>> batch = to_samples([sample], vocab_size=10)
    >>> batch.column("candidate_counts").to_pylist(), batch.column("candidate_ids").to_pylist()
    ([[2, 1]], [[2, 6, 8]])
    >>> from_samples(batch)[0]["rollout_sampling_mask_ids"].tolist()
    [2, 6, 7, 8]
    """
    return build(
        payloads, _read, vocab_size=vocab_size, columns=columns, schema=schema,
        logprobs_mode=logprobs_mode,
        policies=Policies(on_missing_support, on_invalid_support, on_missing_log_prob),
        policy_version=policy_version, given=GIVEN, own=OWN, report=report,
    )  # fmt: skip


def _read(payload: Any, number: int, report: ConversionReport) -> list[Trajectory]:
    if not isinstance(payload, Mapping):
        malformed("a sample is a mapping", Where(row=number), "Sample.to_dict()", payload)
    if "response_lengths" in payload:
        parts = _split(payload, Where(row=number))
        return [one for part in parts for one in _read(part, number, report)]
    index = payload.get("index")
    name = str(payload.get("sample_id") or f"miles/{number if index is None else index}")
    return [read_sample(payload, _DIALECT, name, Where(row=number), report)]


# Fields of training data, one value per sample each, and those of a sample.
_COLUMNS = {
    "tokens": "tokens", "response_lengths": "response_length", "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs", "raw_reward": "reward", "sample_indices": "index",
    "weight_versions": "weight_versions", "teacher_log_probs": "teacher_log_probs",
    **{name: name for name in (_DIALECT.ids, _DIALECT.offsets, _DIALECT.log_probs)},
    "rollout_topk_token_ids": "rollout_topk_token_ids",
    "rollout_topk_log_probs": "rollout_topk_log_probs",
}  # fmt: skip


def _split(data: Mapping[str, Any], where: Where) -> Iterator[dict[str, Any]]:
    """Yield the samples of training data, which has lists of them field by field."""
    size = len(data["response_lengths"])
    given = {ours: data[name] for name, ours in _COLUMNS.items() if data.get(name) is not None}
    check_lengths(size, {name: len(values) for name, values in given.items()}, where, "sample")
    cut = data.get("truncated")
    for number in range(size):
        sample = {name: values[number] for name, values in given.items()}
        if cut is not None:
            sample["status"] = "truncated" if cut[number] else "completed"
        yield sample


def from_samples(
    samples: pa.RecordBatch, *, partial: bool = False, top_k: int | None = None
) -> list[dict[str, Any]]:
    """Return samples as mappings of miles' fields, big ones as arrays.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample``, valid.
    partial : bool
        Write an empty row for a trained token without a set (full vocabulary), which only miles'
        partial masks allow.
    top_k : int, optional
        Width of the head tables, unused slots -1 and -inf; ``None``: that of the largest head.

    Raises
    ------
    ConversionError
        Columns or flags that miles cannot hold; a trained token without a set (``RF-A001``).
    """
    return write_samples(samples, _DIALECT, partial=partial, top_k=top_k)


def decode_session(data: bytes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the samples of a session reply (safetensors) and its session metadata.

    Guarantees: :func:`encode_session` gives `data` back; arrays are read-only views of it.

    Raises
    ------
    ConversionError
        The bytes are not a session (``RF-A002``).
    """
    where = Where()
    tensors = read_tensors(data, where)
    try:
        meta = json.loads(tensors.pop(_META).tobytes())
        samples = [dict(entry) for entry in meta.pop("samples")]
        for key, array in tensors.items():
            field, _, number = key.rpartition(".")
            samples[int(number)][field] = array
        for sample in samples:
            sample.update(dict.fromkeys(sample["nulls"]))
    except (
        KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError
    ) as err:  # fmt: skip
        raise ConversionError(
            "the bytes are not a session of miles", code="RF-A002", where=where,
            expected=f"tensors FIELD.SAMPLE and {_META}", got=f"{type(err).__name__}: {err}",
        ) from err  # fmt: skip
    return samples, meta


def encode_session(
    samples: Iterable[Mapping[str, Any]], session: Mapping[str, Any] | None = None
) -> bytes:
    """Return samples as a session reply, byte for byte as miles writes it.

    Parameters
    ----------
    samples : iterable of mappings
        As :func:`from_samples` or :func:`decode_session` returns them.
    session : mapping, optional
        The metadata that :func:`decode_session` returns beside them.
    """
    tensors = {}
    entries = []
    for number, sample in enumerate(samples):
        for name, dtype in _TENSORS.items():
            if sample.get(name) is not None:
                tensors[f"{name}.{number}"] = np.asarray(sample[name], dtype)
        nulls = [name for name in _NULLS if sample.get(name) is None]
        entry = {key: sample.get(key, value) for key, value in _PLAIN.items()}
        entries.append(entry | {"nulls": sample.get("nulls", nulls)})
    meta = {"samples": entries} | dict(session or {"session_metadata": {}, "empty_reason": None})
    text = json.dumps(meta, separators=(",", ":"), ensure_ascii=False).encode()
    tensors[_META] = np.frombuffer(text, np.uint8)
    return write_tensors(tensors)


def payloads(path: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of a session (``.safetensors``) or of a dump (``.pt``)."""
    place = Path(path)
    if place.suffix == ".pt":
        yield from load_samples(path)
        return
    try:
        samples, _ = decode_session(place.read_bytes())
    except ConversionError as err:
        raise err.at(Where(file=path)) from err.__cause__
    for number, sample in enumerate(samples):
        yield sample | {"sample_id": f"{place.stem}/{number}"}


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    partial: bool = False,
    top_k: int | None = None,
) -> Mapping[str, int]:
    """Write samples as sessions, one ``part_N.safetensors`` in `path` for each batch.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        Directory to make.
    partial, top_k
        As in :func:`from_samples`.

    Returns
    -------
    mapping of str to int
        Files and samples written.
    """
    folder = Path(path)
    folder.mkdir()
    counts = {"files": 0, "samples": 0}
    for batch in batches:
        samples = from_samples(batch, partial=partial, top_k=top_k)
        place = folder / f"part_{counts['files']:05d}.safetensors"
        place.write_bytes(encode_session(samples))
        counts["files"] += 1
        counts["samples"] += len(samples)
    return counts


def _recognizes(record: Any) -> bool:
    names = {"tokens", "response_length"}
    own = {_DIALECT.ids, *_DIALECT.nested}
    return isinstance(record, Mapping) and names <= record.keys() and bool(own & record.keys())


ADAPTER = Adapter(
    name="miles",
    title="miles, samples as safetensors sessions, dumps or mappings",
    reads=Reader(
        to_samples=to_samples, payloads=payloads, suffixes=(".safetensors", ".pt"),
        recognizes=_recognizes,
    ),
    writes=Writer(write=write, profile="sample", makes="a directory of safetensors sessions"),
)  # fmt: skip
