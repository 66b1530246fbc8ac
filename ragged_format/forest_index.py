"""Look-ups in the prefix forests of a packed batch, without a loop over nodes."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from ragged_format.lists import Int64, offsets_of

__all__ = ["ForestIndex"]


class ForestIndex:
    """The nodes of all records of a batch, numbered over the batch.

    Parameters
    ----------
    lengths : (s,) int64
        Tokens of each node.
    parents : (s,) int64
        Parent within the record, an earlier node, or -1.
    nodes : (num_rows + 1,) int64
        Offsets of the node axis per record.

    Examples
    --------
    >>> index = ForestIndex(np.array([3, 1, 2]), np.array([-1, 0, 0]), np.array([0, 3]))
    >>> index.levels.tolist(), index.depths.tolist()
    ([0, 1, 1], [0, 3, 3])
    >>> index.ancestors(np.array([2, 2]), np.array([0, 1])).tolist()
    [0, 2]
    """

    def __init__(self, lengths: Int64, parents: Int64, nodes: Int64) -> None:
        starts = np.repeat(nodes[:-1], np.diff(nodes))
        self.lengths = lengths
        self.parents = np.where(parents < 0, -1, parents + starts)
        self.first_tokens = offsets_of(lengths)
        self.levels, self.depths = self._above()

    def _above(self) -> tuple[Int64, Int64]:
        """Return the number of nodes and of tokens above each node, by pointer doubling."""
        far = self.parents.copy()
        levels = (far >= 0).astype(np.int64)
        depths = np.where(far >= 0, self.lengths[far], 0)
        while (far >= 0).any():
            has = far >= 0
            levels += np.where(has, levels[far], 0)
            depths += np.where(has, depths[far], 0)
            far = np.where(has, far[far], -1)
        return levels, depths

    @cached_property
    def _by_level(self) -> tuple[Int64, Int64]:
        order = np.argsort(self.levels, kind="stable")
        return order, self.levels[order] * len(order) + order

    def ancestors(self, nodes: Int64, levels: Int64) -> Int64:
        """Return the last node at each of `levels` that is not behind each of `nodes`, or -1.

        In depth-first preorder this is the ancestor at that level (the node itself at its own),
        for levels up to that of the node.
        """
        order, keys = self._by_level
        if not len(order):
            return np.full(len(nodes), -1, np.int64)
        at = np.searchsorted(keys, levels * len(order) + nodes, side="right") - 1
        found = np.where(at >= 0, order[at], -1)
        return np.where((found >= 0) & (self.levels[found] == levels), found, -1)

    def in_preorder(self) -> npt.NDArray[np.bool_]:
        """Return for each node whether its parent is -1, the node before it or an ancestor of that.

        True for all nodes if and only if the nodes are in depth-first preorder; after the first
        false entry the others say nothing.
        """
        before = np.arange(len(self.parents), dtype=np.int64) - 1
        reachable = self.levels <= self.levels[before] + 1
        found = self.ancestors(before, self.levels - 1) == self.parents
        in_order: npt.NDArray[np.bool_] = (self.parents < 0) | (reachable & found)
        return in_order

    def nodes_of(self, tokens: Int64) -> Int64:
        """Return the node of each token, both counted over the batch."""
        return np.searchsorted(self.first_tokens, tokens, side="right") - 1
