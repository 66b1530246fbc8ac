"""Getting the samples of packed rows back."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ragged_format.canonical import as_batch
from ragged_format.errors import InvariantError, PackingError, SchemaMismatchError, Where
from ragged_format.lists import Int64, flat, offsets_of, ranges, segment_sums, to_list, to_numpy
from ragged_format.packing.forest import paths
from ragged_format.packing.tokens import gather
from ragged_format.parse import parse_schema
from ragged_format.profiles import (
    MEMBER_PREFIX,
    ROOT_AXES,
    member_counts,
    sample_from_packed,
)
from ragged_format.schema import RECORD, RaggedSchema

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["unpack_row"]


def unpack_row(packed: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """Return the members of packed rows as samples, the inverse of ``pack_row``.

    Samples come back in the order of rows and members, with the columns that the row holds; what
    packing left out (samples without a target) is gone, and a token column of one's own comes back
    from the shared copy.

    Guarantees: target columns and all axes below are views of the row's.

    Parameters
    ----------
    packed : pyarrow.RecordBatch
        Profile ``packed``, any number of rows; validated input is assumed beyond what is listed
        under *Raises*.

    Raises
    ------
    SchemaMismatchError
        The batch is not packed (``RF-S002``).
    InvariantError
        Targets are not ordered by member (``RF-I036``), or a member's length is not that of its
        path (``RF-I038``).
    PackingError
        Rows have a root axis of one's own that no member count opens (``RF-P001``).

    Examples
    --------
    >>> import pyarrow as pa
    >>> import ragged_format as rf
    >>> from ragged_format.packing import pack_row
    >>> samples = rf.canonical(
    ...     pa.table(
    ...         {
    ...             "sample_id": ["a", "b"],
    ...             "input_ids": [[5, 6, 1], [5, 6, 2]],
    ...             "completion_mask": [[0, 0, 1], [0, 1, 1]],
    ...         }
    ...     ),
    ...     rf.sample_schema(vocab_size=10, columns=[]),
    ... )
    >>> unpack_row(pack_row(samples)).equals(samples)
    True
    """
    packed = as_batch(packed)
    schema = parse_schema(packed.schema)
    if schema.profile != "packed":
        raise SchemaMismatchError(
            "only packed rows can be unpacked", code="RF-S002", expected="profile 'packed'",
            got=schema.profile, remedy="pack samples with pack_row",
        )  # fmt: skip
    if own := schema.root_axes[len(ROOT_AXES["packed"]) :]:
        raise PackingError(
            "a root axis of rows does not say which element is whose",
            expected="axes opened by member_<axis>_counts", got=", ".join(own),
            remedy="select the columns of other axes",
        )  # fmt: skip
    members = _Members(packed)
    wanted = sample_from_packed(schema)
    arrays: dict[str, pa.Array] = {"completion_mask": members.completion_mask(wanted)}
    for column in wanted.on(RECORD):
        arrays[column.name] = flat(packed.column(MEMBER_PREFIX + column.name)).values
    for column in wanted.on("token"):
        if column.opens == "target":
            continue
        picked = members.token_index
        for below, values, offsets in gather(packed, schema, column, picked, members.offsets):
            arrays[below.name] = to_list(values, offsets, below)
    for root in ("target", *wanted.root_axes[len(ROOT_AXES["sample"]) :]):
        bounds = {root: members.bounds(root)}
        for axis in wanted.below(root):
            for column in wanted.on(axis):
                values = flat(packed.column(column.name)).values
                arrays[column.name] = to_list(values, bounds[axis], column)
                if column.opens is not None:
                    bounds[column.opens] = offsets_of(to_numpy(values))[bounds[axis]]
    return pa.RecordBatch.from_arrays(
        [arrays[column.name] for column in wanted], schema=wanted.to_arrow()
    )


class _Members:
    """The members of packed rows, their tokens and targets, counted over the whole batch.

    Attributes
    ----------
    token_index : (t,) int64
        Packed token of each token of the members, end to end.
    offsets : (n + 1,) int64
        Tokens of each member.
    """

    def __init__(self, packed: pa.RecordBatch) -> None:
        self.packed = packed
        lengths, nodes = self._flat("node_lengths")
        parents, _ = self._flat("node_parents")
        leaves, member_rows = self._flat("member_leaf")
        parents = np.where(parents < 0, -1, parents + np.repeat(nodes[:-1], np.diff(nodes)))
        leaves = leaves + np.repeat(nodes[:-1], np.diff(member_rows))
        routes = paths(parents.tolist(), leaves.tolist())
        on_path = np.fromiter(chain.from_iterable(routes), np.int64)
        starts = np.cumsum(lengths) - lengths
        self.token_index = ranges(starts[on_path], lengths[on_path])
        route_bounds = offsets_of(np.array([len(route) for route in routes], np.int64))
        found = segment_sums(lengths[on_path], route_bounds)
        self.offsets = offsets_of(found)
        stated, _ = self._flat("member_lengths")
        _forbid("RF-I038", "member_lengths", "a member's length is not that of its path",
                member_rows, stated != found, "the tokens from the root to its leaf")  # fmt: skip
        owner, target_rows = self._flat("member_index")
        per_row = np.diff(target_rows)
        self.owner = owner + np.repeat(member_rows[:-1], per_row)
        falls = np.zeros(len(owner), bool)
        falls[1:] = self.owner[1:] < self.owner[:-1]
        _forbid("RF-I036", "member_index", "targets are not ordered by member",
                target_rows, falls, "no smaller than the target before")  # fmt: skip
        _, tokens = self._flat("position_ids")
        self.predecessors = self._flat("pred_index")[0] + np.repeat(tokens[:-1], per_row)

    def _flat(self, name: str) -> tuple[Int64, Int64]:
        values, offsets = flat(self.packed.column(name))
        return to_numpy(values).astype(np.int64), offsets

    def completion_mask(self, wanted: RaggedSchema) -> pa.Array:
        """Return the mask: 1 at the position after each predecessor."""
        depths = to_numpy(flat(self.packed.column("position_ids")).values)
        mask = np.zeros(int(self.offsets[-1]), np.uint8)
        mask[self.offsets[self.owner] + depths[self.predecessors] + 1] = 1
        return to_list(mask, self.offsets, wanted["completion_mask"])

    def bounds(self, root: str) -> Int64:
        """Return the elements of a joined axis of each member, (n + 1,) int64."""
        if root == "target":
            return offsets_of(np.bincount(self.owner, minlength=len(self.offsets) - 1))
        return offsets_of(self._flat(member_counts(root))[0])


def _forbid(
    code: str, column: str, what: str, rows: Int64, bad: npt.NDArray[np.bool_], expected: str
) -> None:
    if bad.any():
        element = int(np.argmax(bad))
        row = int(np.searchsorted(rows, element, side="right")) - 1
        where = Where(row=row, column=column, position=element - int(rows[row]))
        raise InvariantError(what, code=code, where=where, expected=expected, got="otherwise")
