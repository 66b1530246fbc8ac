"""slime (and vime): samples whose observation tokens have empty sets, in both directions.

A sample is a mapping (or ``Sample.to_dict()``) with ``tokens``, ``response_length`` and
response-long ``loss_mask``, ``rollout_log_probs``, ``rollout_top_p_token_ids`` and ``_offsets``.
A trained token may have an empty set there too; whether that says "missing" or "full vocabulary" is
for ``on_missing_support`` to say.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._response_csr import (
    GIVEN,
    OWN,
    Dialect,
    read_sample,
    write_samples,
)
from ragged_format.adapters._torch_files import load_samples, save_samples
from ragged_format.adapters._trajectory import Policies, Trajectory, build
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
    "decode_meta_info",
    "encode_meta_info",
    "from_samples",
    "payloads",
    "to_samples",
    "write",
]

_DIALECT = Dialect(
    system="slime", ids="rollout_top_p_token_ids", offsets="rollout_top_p_token_offsets",
    log_probs="rollout_top_p_log_probs", nested=(), observation="empty",
)  # fmt: skip
_TENSORS = frozenset({
    _DIALECT.ids, _DIALECT.offsets, _DIALECT.log_probs, "rollout_topk_token_ids",
    "rollout_topk_log_probs",
})  # fmt: skip
# Fields of the engine's meta_info, their older names, and their types.
_META = {
    _DIALECT.ids: (("top_p_token_ids", "top_p_kept_token_ids"), "<i4"),
    _DIALECT.offsets: (("top_p_token_offsets", "top_p_kept_token_offsets"), "<i4"),
    _DIALECT.log_probs: (("top_p_log_probs",), "<f4"),
}


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
    """Return slime samples as one batch.

    Guarantees: a copy that keeps every invariant of the format; a call that raises leaves `report`
    as it was.

    Parameters
    ----------
    payloads : iterable of mappings
        ``Sample.to_dict()`` each; lists, arrays or tensors. ``sample_id``, if there, names the
        sample; else ``index`` does. In place of the sets, ``meta_info`` of the patched engine may
        hold them in base64.
    vocab_size, columns, schema, logprobs_mode, policy_version, report
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    on_missing_support, on_invalid_support, on_missing_log_prob
        As there; an empty row of a trained token is a missing set.

    Raises
    ------
    ConversionError
        As there.

    Examples
    --------
    >>> sample = {
    ...     "index": 0,
    ...     "tokens": [5, 6, 7, 8],
    ...     "response_length": 3,
    ...     "loss_mask": [1, 0, 1],
    ...     "rollout_log_probs": [-0.5, 0.0, 0.0],
    ...     "rollout_top_p_token_ids": [2, 6, 8],
    ...     "rollout_top_p_token_offsets": [0, 2, 2, 3],
    ... }
    >>> batch = to_samples([sample], vocab_size=10)
    >>> batch.column("candidate_counts").to_pylist(), batch.column("candidate_ids").to_pylist()
    ([[2, 1]], [[2, 6, 8]])
    >>> from_samples(batch)[0]["rollout_top_p_token_offsets"].tolist()
    [0, 2, 2, 3]
    """
    return build(
        payloads, _read, vocab_size=vocab_size, columns=columns, schema=schema,
        logprobs_mode=logprobs_mode,
        policies=Policies(on_missing_support, on_invalid_support, on_missing_log_prob),
        policy_version=policy_version, given=GIVEN, own=OWN, report=report,
    )  # fmt: skip


def _read(payload: Any, number: int, report: ConversionReport) -> list[Trajectory]:
    where = Where(row=number)
    if not isinstance(payload, Mapping):
        malformed("a sample is a mapping", where, "Sample.to_dict()", payload)
    meta = payload.get("meta_info")
    if isinstance(meta, Mapping):
        rest = {key: value for key, value in payload.items() if key != "meta_info"}
        payload = decode_meta_info(meta, where) | rest
    index = payload.get("index")
    name = str(payload.get("sample_id") or f"slime/{number if index is None else index}")
    return [read_sample(payload, _DIALECT, name, where, report)]


def from_samples(samples: pa.RecordBatch, *, top_k: int | None = None) -> list[dict[str, Any]]:
    """Return samples as mappings of slime's fields, big ones as arrays.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample``, valid.
    top_k : int, optional
        Width of the head tables, unused slots -1 and -inf; ``None``: that of the largest head.

    Raises
    ------
    ConversionError
        Columns or flags that slime cannot hold (``RF-A001``): a missing log-prob among them, which
        would become a 0.0 like any other (vime#70).
    """
    return write_samples(samples, _DIALECT, top_k=top_k)


def decode_meta_info(
    meta_info: Mapping[str, Any], where: Where | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Return the sets in the engine's ``meta_info`` as the fields of a sample.

    Guarantees: read-only views of the decoded bytes; no field for what is not there.

    Raises
    ------
    ConversionError
        Not base64 of whole little-endian numbers (``RF-A002``).
    """
    where = where or Where()
    out = {}
    for field, (names, dtype) in _META.items():
        for name in names:
            text = meta_info.get(name)
            if text is None:
                continue
            try:
                out[field] = np.frombuffer(base64.b64decode(text, validate=True), dtype)
            except (binascii.Error, TypeError, ValueError) as err:
                raise ConversionError(
                    "the sets of meta_info are base64 of little-endian numbers", code="RF-A002",
                    where=Where(where.file, row=where.row, column=f"meta_info.{name}"),
                    expected=f"base64 of {dtype}", got=str(err),
                ) from err  # fmt: skip
            break
    return out


def encode_meta_info(sample: Mapping[str, Any]) -> dict[str, str]:
    """Return the sets of a sample in the base64 form of ``meta_info``, its newer names."""
    return {
        names[0]: base64.b64encode(np.asarray(sample[field], dtype).tobytes()).decode()
        for field, (names, dtype) in _META.items()
        if sample.get(field) is not None
    }


def payloads(path: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of a dump (``rollout_N.pt``)."""
    return load_samples(path)


def write(
    batches: Iterable[pa.RecordBatch], path: str, *, top_k: int | None = None
) -> Mapping[str, int]:
    """Write samples as dumps, one ``rollout_N.pt`` in `path` for each batch.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        Directory to make.
    top_k
        As in :func:`from_samples`.

    Returns
    -------
    mapping of str to int
        Files and samples written.
    """
    folder = Path(path)
    folder.mkdir()
    counts = {"files": 0, "samples": 0}
    for number, batch in enumerate(batches):
        samples = from_samples(batch, top_k=top_k)
        save_samples(samples, folder / f"rollout_{number}.pt", number, _TENSORS)
        counts["files"] += 1
        counts["samples"] += len(samples)
    return counts


def _recognizes(record: Any) -> bool:
    names = {"tokens", "response_length", _DIALECT.ids}
    return isinstance(record, Mapping) and names <= record.keys()


ADAPTER = Adapter(
    name="slime",
    title="slime and vime, samples as dumps or mappings",
    reads=Reader(
        to_samples=to_samples, payloads=payloads, suffixes=(".pt",), recognizes=_recognizes
    ),
    writes=Writer(write=write, profile="sample", makes="a directory of rollout_N.pt"),
)
