"""verifiers: traces of message nodes with sampling masks, in both directions.

A trace is a graph of nodes; every path from a root to a leaf is a branch, and becomes a sample. A
node's log-probs, and the rows of its mask, cover the tokens that it sampled. Masks are
``{"__nd__": true, dtype, shape, data}`` with raw bytes, which only MessagePack carries; JSON
records have none, and log-probs of four decimals.

A mask whose rows are not as many as the sampled tokens is an error here; verifiers drops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.adapters._msgpack import load_msgspec
from ragged_format.adapters._outgoing import Outgoing
from ragged_format.adapters._trajectory import (
    Policies,
    Trajectory,
    build,
    check_lengths,
    doubles,
    ids_of,
    mask_of,
    rounded,
    sampled_only,
    settle,
)
from ragged_format.adapters._values import Rows, malformed
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.errors import ConversionError, Where
from ragged_format.profiles import standard_column

if TYPE_CHECKING:
    from ragged_format.adapters._columns import LogProbMode
    from ragged_format.adapters._targets import Policy
    from ragged_format.adapters.report import ConversionReport
    from ragged_format.schema import Column

__all__ = [
    "ADAPTER",
    "decode_array",
    "encode_array",
    "from_samples",
    "payloads",
    "to_samples",
    "write",
]

_MASK = "sampling_mask"
_NAMES = {_MASK: _MASK, "tokens": "token_ids", "token_ids": "token_ids", "mask": "mask"}
# Fields of a node with one value per sampled token, and our columns.
_SAMPLED = {
    "advantages": "advantages", "reference_logprobs": "ref_log_probs",
    "trainer_logprobs": "old_log_probs",
}  # fmt: skip
_READ = frozenset({
    "parent", "semantic_parents", "message", "sampled", "timestamp", "token_ids", "mask",
    "is_content", "logprobs", _MASK, *_SAMPLED,
})  # fmt: skip
_OWN = (replace(standard_column("advantages"), type=pa.float64()),)
_HOLDS = frozenset({
    "rollout_log_probs", "candidate_counts", "candidate_ids", *_SAMPLED.values()
})  # fmt: skip
_GIVEN = _HOLDS | {"rollout_id", "branch_index", "reward", "advantage"}


def to_samples(
    payloads: Iterable[Mapping[str, Any] | Sequence[Mapping[str, Any]]],
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
    """Return the branches of traces as one batch, one sample for each.

    Guarantees: a copy that keeps every invariant of the format; a call that raises leaves `report`
    as it was.

    Parameters
    ----------
    payloads : iterable
        Traces: mappings with ``nodes``, or lists of nodes. ``id``, if there, names the trace;
        ``reward``, a number, is that of its branches.
    vocab_size, columns, schema, logprobs_mode, report
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    on_missing_support, on_invalid_support, on_missing_log_prob
        As there; an empty row, and a sampling node without a mask in a trace that has some, is a
        missing set.

    Raises
    ------
    ConversionError
        As there.

    Examples
    --------
    >>> mask = {
    ...     key: encode_array(np.int32(value))
    ...     for key, value in {"ids": [2, 6, 7], "counts": [2, 1]}.items()
    ... }
    >>> node = {
    ...     "parent": None,
    ...     "sampled": True,
    ...     "token_ids": [5, 6, 7],
    ...     "mask": [False, True, True],
    ...     "logprobs": [-0.5, 0.0],
    ...     "sampling_mask": mask,
    ... }
    >>> batch = to_samples([{"id": "t", "nodes": [node]}], vocab_size=10)
    >>> batch.column("candidate_counts").to_pylist(), batch.column("candidate_ids").to_pylist()
    ([[2, 1]], [[2, 6, 7]])
    """
    return build(
        payloads, _read, vocab_size=vocab_size, columns=columns, schema=schema,
        logprobs_mode=logprobs_mode,
        policies=Policies(on_missing_support, on_invalid_support, on_missing_log_prob),
        given=_GIVEN, own=_OWN, finish=_finish, report=report,
    )  # fmt: skip


def _finish(found: Sequence[Trajectory], asked: frozenset[str]) -> None:
    settle(found, asked, "advantages", "advantage", "target")


def _read(payload: Any, number: int, report: ConversionReport) -> list[Trajectory]:
    trace = payload if isinstance(payload, Mapping) else {"nodes": payload}
    nodes, where = trace.get("nodes"), Where(row=number)
    if not isinstance(nodes, Sequence) or isinstance(nodes, str | bytes):
        malformed("a trace has nodes", where, "a list of nodes", nodes)
    name = str(trace.get("id") or f"verifiers/{number}")
    parents = _parents(nodes, where)
    parts = [_Node.of(node, index, where) for index, node in enumerate(nodes)]
    for node in nodes:
        report.unread.update(k for k, v in node.items() if k not in _READ and v is not None)
    leaves = sorted(set(range(len(nodes))) - set(parents))
    reward = trace.get("reward")
    out = []
    for index, leaf in enumerate(leaves):
        path = [leaf]
        while (parent := parents[path[-1]]) >= 0:
            path.append(parent)
        branch = _branch([parts[i] for i in reversed(path)], f"{name}/{index}", where, report)
        branch.record_values = {"rollout_id": name, "branch_index": index}
        if isinstance(reward, int | float):
            branch.record_values["reward"] = float(reward)
        out.append(branch)
    return out


def _parents(nodes: Sequence[Any], where: Where) -> list[int]:
    """Return the parent of each node, -1 for a root; parents come before their children."""
    out = []
    for index, node in enumerate(nodes):
        parent = node.get("parent") if isinstance(node, Mapping) else node
        if parent is None and isinstance(node, Mapping):
            parent = -1
        if not isinstance(parent, int) or not -1 <= parent < index:
            malformed(
                "the parent of a node comes before it",
                Where(row=where.row, column=f"nodes[{index}].parent"),
                f"null, or 0 to {index - 1}", parent,
            )  # fmt: skip
        out.append(parent)
    return out


class _Node:
    """The arrays of one node."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int64],
        mask: npt.NDArray[np.bool_],
        values: dict[str, npt.NDArray[Any]],
        rows: Rows | None,
    ) -> None:
        self.tokens, self.mask, self.values, self.rows = tokens, mask, values, rows

    @classmethod
    def of(cls, node: Mapping[str, Any], index: int, where: Where) -> _Node:
        def at(field: str) -> Where:
            return Where(row=where.row, column=f"nodes[{index}].{field}")

        tokens = ids_of(node.get("token_ids") or [], at("token_ids"))
        mask = mask_of(node.get("mask") or [], at("mask"))
        check_lengths(len(tokens), {f"nodes[{index}].mask": len(mask)}, where, "token")
        sampled = int(np.count_nonzero(mask))
        values = {}
        for field in ("logprobs", *_SAMPLED):
            given = node.get(field)
            if given is None or (not len(given) and field == "logprobs"):
                continue
            values[field] = doubles(given, at(field))[0]
            lengths = {f"nodes[{index}].{field}": len(values[field])}
            check_lengths(sampled, lengths, where, "sampled token")
        rows = None
        given = node.get(_MASK)
        if given is not None:
            if not isinstance(given, Mapping) or not {"ids", "counts"} <= given.keys():
                malformed("a mask has ids and counts", at(_MASK), "ids, counts", given)
            ids, counts = (decode_array(given[key], at(_MASK)) for key in ("ids", "counts"))
            counts = counts.astype(np.int64)
            # verifiers drops such a mask without a word.
            check_lengths(sampled, {f"nodes[{index}].{_MASK}.counts": len(counts)}, where,
                          "sampled token")  # fmt: skip
            if (counts < 0).any():
                malformed("a count is not negative", at(_MASK), ">= 0", int(counts.min()))
            total = int(counts.sum())
            check_lengths(total, {f"nodes[{index}].{_MASK}.ids": len(ids)}, where, "candidate")
            rows = Rows(ids.astype(np.int64), counts, counts == 0)
        return cls(tokens, mask, values, rows)


def _branch(path: Sequence[_Node], name: str, where: Where, report: ConversionReport) -> Trajectory:
    tokens = np.concatenate([node.tokens for node in path])
    scored = np.concatenate([node.mask for node in path])
    out = Trajectory.of(name, where, tokens, scored, _NAMES)
    sampling = [node for node in path if node.mask.any()]
    if any("logprobs" in node.values for node in sampling):
        values = np.concatenate([_of(node, "logprobs", np.nan) for node in sampling])
        out.log_probs = sampled_only(rounded(values, report), np.isnan(values))
    for field, ours in _SAMPLED.items():
        if any(field in node.values for node in sampling):
            # As verifiers has it, a node without values counts as zeros.
            parts = [_of(node, field, 0.0) for node in sampling]
            out.target_values = {**out.target_values, ours: np.concatenate(parts)}
    if any(node.rows is not None for node in sampling):
        rows = [node.rows or _no_rows(node) for node in sampling]
        out.support = Rows(
            np.concatenate([part.values for part in rows]),
            np.concatenate([part.counts for part in rows]),
            np.concatenate([part.counts == 0 for part in rows]),
        )
    return out


def _of(node: _Node, field: str, missing: float) -> npt.NDArray[np.float64]:
    values = node.values.get(field)
    return np.full(int(np.count_nonzero(node.mask)), missing) if values is None else values


def _no_rows(node: _Node) -> Rows:
    counts = np.zeros(int(np.count_nonzero(node.mask)), np.int64)
    return Rows(counts[:0], counts, counts == 0)


def decode_array(value: Any, where: Where | None = None) -> npt.NDArray[Any]:
    """Return an array of the wire form ``{"__nd__": true, dtype, shape, data}``, or one as it is.

    Guarantees: a read-only view of the bytes.

    Raises
    ------
    ConversionError
        Another form, or another type than integers (``RF-A002``).
    """
    if isinstance(value, np.ndarray):
        return value
    where = where or Where()
    try:
        if value["__nd__"] is not True:
            malformed("an array on the wire says so", where, "__nd__ true", value["__nd__"])
        out = np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
    except (KeyError, TypeError, ValueError) as err:
        raise ConversionError(
            "an array on the wire has dtype, shape and raw bytes", code="RF-A002", where=where,
            expected="__nd__, dtype, shape, data", got=f"{type(err).__name__}: {err}",
            remedy="JSON cannot carry masks; read the MessagePack form",
        ) from err  # fmt: skip
    if out.dtype.kind not in "iu" or out.ndim != 1:
        malformed("ids and counts are integers in one dimension", where, "int32", out.dtype)
    return out


def encode_array(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return an array in its wire form."""
    data = np.ascontiguousarray(array)
    return {
        "__nd__": True, "dtype": str(data.dtype), "shape": list(data.shape), "data": data.tobytes()
    }  # fmt: skip


def from_samples(samples: pa.RecordBatch) -> list[list[dict[str, Any]]]:
    """Return each sample as a chain of nodes, one for each run of scored tokens.

    A node has the context before its sampled tokens, as verifiers has where no renderer attributes
    the prompt; messages have no place in samples.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample``, valid.

    Raises
    ------
    ConversionError
        Columns or flags that nodes cannot hold (``RF-A001``).
    """
    source = Outgoing(samples, "verifiers", _HOLDS)
    values: dict[str, npt.NDArray[Any]] = {}
    for field, ours in (("logprobs", "rollout_log_probs"), *_SAMPLED.items()):
        column = source.values(ours)
        if column is not None:
            values[field] = column.astype(np.float64)
    if "advantages" not in values and None not in (scalars := source.record("advantage")):
        values["advantages"] = np.repeat(np.array(scalars, float), np.diff(source.targets))
    sets = source.sets()
    if sets is not None:
        counts, ids, _ = sets
        candidates = np.append(0, np.cumsum(counts))
    out = []
    for begin, end in pairwise(source.offsets.tolist()):
        nodes: list[dict[str, Any]] = []
        for first, last in _runs(source.scored[begin:end]):
            part = slice(begin + first, begin + last)
            targets = slice(*np.searchsorted(source.positions, [part.start, part.stop]).tolist())
            mask = source.scored[part]
            node: dict[str, Any] = {
                "parent": len(nodes) - 1 if nodes else None, "sampled": bool(mask.any()),
                "token_ids": source.tokens[part].tolist(), "mask": mask.tolist(), "logprobs": [],
            }  # fmt: skip
            node |= {field: column[targets].tolist() for field, column in values.items()}
            node[_MASK] = None
            if sets is not None and mask.any():
                rows = slice(int(candidates[targets.start]), int(candidates[targets.stop]))
                node[_MASK] = {
                    "ids": encode_array(ids[rows].astype(np.int32)),
                    "counts": encode_array(counts[targets].astype(np.int32)),
                }
            nodes.append(node)
        out.append(nodes)
    return out


def _runs(scored: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the spans that end with a run of scored tokens, and the rest."""
    ends = np.flatnonzero(scored[:-1] & ~scored[1:]) + 1
    bounds = [0, *ends.tolist(), len(scored)]
    # A sample without tokens is a node without tokens.
    return [(a, b) for a, b in pairwise(bounds) if a < b] or [(0, 0)]


def payloads(path: str) -> Iterator[dict[str, Any]]:
    """Yield the traces of a MessagePack file: a trace, a list of traces, or of lists of nodes.

    Raises
    ------
    ConversionError
        The file is something else (``RF-A002``).
    """
    msgspec = load_msgspec()
    place = Path(path)
    try:
        data = msgspec.msgpack.decode(place.read_bytes())
    except msgspec.MsgspecError as err:
        raise ConversionError(
            "the file is not MessagePack", code="RF-A002", where=Where(file=path),
            expected="traces", got=str(err),
        ) from err  # fmt: skip
    traces = [data] if isinstance(data, Mapping) else data
    if not isinstance(traces, list):
        malformed("the file holds traces", Where(file=path), "a list of traces", traces)
    for number, trace in enumerate(traces):
        fields = trace if isinstance(trace, Mapping) else {"nodes": trace}
        yield {"id": f"{place.stem}/{number}", **fields}


def write(batches: Iterable[pa.RecordBatch], path: str) -> Mapping[str, int]:
    """Write samples as one MessagePack file: a list of lists of nodes.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``; all are held in memory.
    path : str
        File to write.

    Returns
    -------
    mapping of str to int
        Traces and nodes written.
    """
    traces = list(chain.from_iterable(from_samples(batch) for batch in batches))
    Path(path).write_bytes(load_msgspec().msgpack.encode(traces))
    return {"traces": len(traces), "nodes": sum(map(len, traces))}


def _recognizes(record: Any) -> bool:
    nodes = record.get("nodes") if isinstance(record, Mapping) else None
    first = nodes[0] if isinstance(nodes, Sequence) and len(nodes) else None
    return isinstance(first, Mapping) and {"token_ids", "mask", "parent"} <= first.keys()


ADAPTER = Adapter(
    name="verifiers",
    title="verifiers, traces of message nodes as MessagePack",
    reads=Reader(
        to_samples=to_samples, payloads=payloads, suffixes=(".msgpack",), recognizes=_recognizes
    ),
    writes=Writer(write=write, profile="sample", makes="one MessagePack file of node lists"),
)
