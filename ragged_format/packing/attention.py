"""What attention kernels and label-style trainers need, derived from a packed row.

All functions take one packed record. The rule behind every form: a token sees its ancestors in the
prefix forest and itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.arguments import check_integer
from ragged_format.canonical import as_batch
from ragged_format.errors import PackingError, SchemaMismatchError, Where
from ragged_format.lists import Int64, flat, offsets_of, ranges, to_numpy

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

__all__ = [
    "IGNORED_LABEL",
    "VarlenIndex",
    "attention_mask",
    "cu_seqlens",
    "label_ids",
    "pred_order",
    "tree_leave",
    "varlen_index",
]

IGNORED_LABEL = -100


def tree_leave(row: pa.RecordBatch) -> npt.NDArray[np.int32]:
    """Return the packed position at which each token's subtree ends, (N,) int32.

    With ``enter[k] = k``, query q sees key k iff ``enter[k] <= enter[q] < leave[k]``.

    Examples
    --------
    A prompt of two tokens with two responses, of two tokens and of one:

    >>> import pyarrow as pa
    >>> import ragged_format as rf
    >>> from ragged_format.packing import pack_row
    >>> samples = rf.canonical(
    ...     pa.table(
    ...         {
    ...             "sample_id": ["a", "b"],
    ...             "input_ids": [[5, 6, 1, 2], [5, 6, 3]],
    ...             "completion_mask": [[0, 0, 1, 1], [0, 0, 1]],
    ...         }
    ...     ),
    ...     rf.sample_schema(vocab_size=10, columns=[]),
    ... )
    >>> tree_leave(pack_row(samples)).tolist()
    [5, 5, 4, 4, 5]
    """
    lengths, parents = _nodes(row)
    # In preorder a subtree is a run of nodes: its end is that of its last node.
    ends = np.cumsum(lengths).tolist()
    above = parents.tolist()
    for node in range(len(ends) - 1, -1, -1):
        if above[node] >= 0 and ends[above[node]] < ends[node]:
            ends[above[node]] = ends[node]
    return np.repeat(np.array(ends, np.int32), lengths)


def cu_seqlens(row: pa.RecordBatch) -> npt.NDArray[np.int32]:
    """Return the bounds of the members of a row in which nothing is shared, (members + 1,) int32.

    Raises
    ------
    PackingError
        Members share tokens (``RF-P001``); use :func:`varlen_index`.
    """
    row = _checked(row)
    lengths, parents = _nodes(row)
    shared = np.flatnonzero(parents >= 0)
    leaves = to_numpy(flat(row.column("member_leaf")).values)
    if len(shared) or len(np.unique(leaves)) < len(leaves):
        column = "node_parents" if len(shared) else "member_leaf"
        raise PackingError(
            "members of the row share tokens, so that they are no sequences of their own",
            where=Where(column=column), expected="one root node per member",
            got=f"{len(lengths)} nodes, {len(shared)} of them with a parent, {len(leaves)} members",
            remedy='pack with packing="sequence", or use varlen_index',
        )  # fmt: skip
    return offsets_of(lengths).astype(np.int32)


@dataclass(frozen=True, slots=True)
class VarlenIndex:
    """Arguments of a variable-length attention call: one sequence per node.

    The queries of a node are its tokens; its keys and values are those of the whole path from the
    root to its end, gathered by `kv_index`. The call is causal with bottom-right alignment.

    Attributes
    ----------
    kv_index : (Kv,) int64
        Packed positions of every node's path, end to end.
    cu_seqlens_q, cu_seqlens_k : (s + 1,) int32
        Bounds of the nodes and of their paths.
    max_seqlen_q, max_seqlen_k : int
        Longest node and longest path.
    """

    kv_index: Int64
    cu_seqlens_q: npt.NDArray[np.int32]
    cu_seqlens_k: npt.NDArray[np.int32]
    max_seqlen_q: int
    max_seqlen_k: int


def varlen_index(row: pa.RecordBatch) -> VarlenIndex:
    """Return the gather index and bounds for a variable-length attention kernel."""
    lengths, parents = _nodes(row)
    starts = np.cumsum(lengths) - lengths
    to_node: list[Int64] = []
    for node, parent in enumerate(parents.tolist()):
        own = np.array([node], np.int64)
        to_node.append(own if parent < 0 else np.concatenate([to_node[parent], own]))
    path = np.concatenate([np.zeros(0, np.int64), *to_node])
    depths = offsets_of(lengths[path])[offsets_of(np.array([len(p) for p in to_node], np.int64))]
    keys = np.diff(depths)
    return VarlenIndex(
        kv_index=ranges(starts[path], lengths[path]),
        cu_seqlens_q=offsets_of(lengths).astype(np.int32),
        cu_seqlens_k=depths.astype(np.int32),
        max_seqlen_q=int(lengths.max(initial=0)),
        max_seqlen_k=int(keys.max(initial=0)),
    )


def attention_mask(row: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return the dense mask, (N, N) bool: ``mask[q, k]`` where token q sees token k.

    Quadratic in the row; meant for tests and small models.
    """
    leave = tree_leave(row)
    enter = np.arange(len(leave))
    seen: npt.NDArray[np.bool_] = enter[None, :] <= enter[:, None]
    return seen & (enter[:, None] < leave[None, :])


def label_ids(row: pa.RecordBatch, *, ignored: int = IGNORED_LABEL) -> Int64:
    """Return the scored next token of each position, (N,) int64; `ignored` where there is none.

    Raises
    ------
    PackingError
        A position predicts different tokens (``RF-P001``), which ``fork="transition"`` avoids.
    """
    check_integer("ignored", ignored, -(1 << 63), 1 << 63)
    row = _checked(row)
    pred, targets = _targets(row)
    labels = np.full(len(flat(row.column("input_ids")).values), ignored, np.int64)
    labels[pred] = targets
    torn = labels[pred] != targets
    if torn.any():
        first = int(np.argmax(torn))
        position = int(pred[first])
        raise PackingError(
            "a position predicts different tokens, so that it has no one label",
            where=Where(row=0, column="input_ids", position=position), expected="one token",
            got=np.unique(targets[pred == position]).tolist(),
            remedy='pack with fork="transition", or use pred_index and target_ids',
        )  # fmt: skip
    return labels


def pred_order(row: pa.RecordBatch) -> Int64:
    """Return the order of targets by predicting position, (M,) int64; members keep their order."""
    return np.argsort(_targets(row)[0], kind="stable")


def _targets(row: pa.RecordBatch) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    row = _checked(row)
    return (
        to_numpy(flat(row.column("pred_index")).values),
        to_numpy(flat(row.column("target_ids")).values),
    )


def _nodes(row: pa.RecordBatch) -> tuple[Int64, Int64]:
    row = _checked(row)
    lengths = to_numpy(flat(row.column("node_lengths")).values).astype(np.int64)
    return lengths, to_numpy(flat(row.column("node_parents")).values).astype(np.int64)


def _checked(row: pa.RecordBatch) -> pa.RecordBatch:
    row = as_batch(row)
    if "node_lengths" not in row.schema.names:
        raise SchemaMismatchError(
            "attention helpers take a packed row", code="RF-S003", expected="column 'node_lengths'",
            got=row.schema.names, remedy="pack samples with pack_row",
        )  # fmt: skip
    if row.num_rows != 1:
        raise PackingError(
            "attention helpers take one row at a time", expected=1, got=row.num_rows,
            remedy="slice the batch: batch.slice(i, 1)",
        )  # fmt: skip
    return row
