"""The rules of full validation that only packed records have: the prefix forest and its members.

Everything is counted over the whole batch: node, token and member numbers of a record are turned
into flat positions by adding the record's offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ragged_format.lists import Int64, offsets_of, ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragged_format.view import View

__all__ = ["PACKED_RULES"]


def forest(view: View) -> None:
    """RF-I030, RF-I031, RF-I032, RF-I033."""
    if view.schema.profile != "packed":
        return
    lengths = view.values("node_lengths").astype(np.int64)
    view.forbid("RF-I030", "a node has no token", "node_lengths", lengths < 1, ">= 1")
    tokens, nodes = np.diff(view.records["token"]), view.records["node"]
    sums = offsets_of(lengths)[nodes]
    if (np.diff(sums) != tokens).any():
        row = int(np.argmax(np.diff(sums) != tokens))
        # An element that may not exist: name the record's first node, or where it would be.
        view.fail_at(
            "RF-I031", "the nodes of a record do not sum to its tokens", "node_lengths",
            int(nodes[row]), expected=f"sum {tokens[row]}", got=f"sum {np.diff(sums)[row]}",
        )  # fmt: skip
    parents = view.values("node_parents").astype(np.int64)
    own = np.arange(len(parents)) - np.repeat(nodes[:-1], np.diff(nodes))
    view.forbid(
        "RF-I032", "a node's parent is not an earlier node", "node_parents",
        (parents < -1) | (parents >= own), "-1, or an earlier node",
    )  # fmt: skip
    _check_preorder(view, parents, own)
    depth = node_depths(parents, lengths, nodes)
    positions = view.values("position_ids")
    expected = ranges(depth, lengths)
    wrong = positions != expected
    if wrong.any():
        first = int(np.argmax(wrong))
        view.fail_at(
            "RF-I033", "a position is not the number of ancestors", "position_ids", first,
            expected=int(expected[first]), got=positions[first],
        )  # fmt: skip


def _check_preorder(view: View, parents: Int64, own: Int64) -> None:
    """Check that each parent is the previous node or one of its ancestors."""
    path: list[int] = []
    for element, (node, parent) in enumerate(zip(own.tolist(), parents.tolist(), strict=True)):
        if node == 0 or parent < 0:
            path.clear()
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            view.fail_at(
                "RF-I032", "nodes are not in depth-first preorder", "node_parents", element,
                expected="-1, the previous node or one of its ancestors", got=parent,
            )  # fmt: skip
        path.append(node)


def node_depths(parents: Int64, lengths: Int64, nodes: Int64) -> Int64:
    """Return the number of tokens above each node, (s,) int64; parents precede their children."""
    starts = np.repeat(nodes[:-1], np.diff(nodes))
    flat_parents = np.where(parents < 0, -1, parents + starts)
    depth = np.zeros(len(parents), np.int64)
    for node, parent in enumerate(flat_parents.tolist()):
        if parent >= 0:
            depth[node] = depth[parent] + lengths[parent]
    return depth


def members(view: View) -> None:
    """RF-I037, RF-I038, RF-I041."""
    if view.schema.profile != "packed":
        return
    nodes, member_bounds = view.records["node"], view.records["member"]
    leaf = view.values("member_leaf").astype(np.int64)
    per_record = np.diff(member_bounds)
    limit = np.repeat(np.diff(nodes), per_record)
    view.forbid(
        "RF-I037", "a member's leaf is not a node", "member_leaf",
        (leaf < 0) | (leaf >= limit), "0 <= leaf < number of nodes",
    )  # fmt: skip
    flat_leaf = leaf + np.repeat(nodes[:-1], per_record)
    lengths = view.values("node_lengths").astype(np.int64)
    parents = view.values("node_parents").astype(np.int64)
    ends = node_depths(parents, lengths, nodes) + lengths
    stated = view.values("member_lengths")
    wrong = stated != ends[flat_leaf]
    if wrong.any():
        first = int(np.argmax(wrong))
        view.fail_at(
            "RF-I038", "a member's length is not that of its path", "member_lengths", first,
            expected=int(ends[flat_leaf[first]]), got=stated[first],
        )  # fmt: skip
    childless = np.ones(len(parents), bool)
    starts = np.repeat(nodes[:-1], np.diff(nodes))
    childless[(parents + starts)[parents >= 0]] = False
    childless[flat_leaf] = False
    view.forbid(
        "RF-I041", "a node without children is no member's leaf", "node_parents", childless,
        "a member whose leaf it is",
    )  # fmt: skip


def targets(view: View) -> None:
    """RF-I034, RF-I035, RF-I036, RF-I039, RF-I040."""
    if view.schema.profile != "packed":
        return
    target_bounds = view.records["target"]
    per_record = np.diff(target_bounds)
    pred = view.values("pred_index").astype(np.int64)
    member = view.values("member_index").astype(np.int64)
    for column, values, axis, code in (
        ("pred_index", pred, "token", "RF-I034"),
        ("member_index", member, "member", "RF-I035"),
    ):
        limit = np.repeat(np.diff(view.records[axis]), per_record)
        view.forbid(
            code, f"{column} is outside the record's {axis} axis", column,
            (values < 0) | (values >= limit), f"0 <= {column} < number of {axis}s",
        )  # fmt: skip
    flat_member = member + np.repeat(view.records["member"][:-1], per_record)
    flat_pred = pred + np.repeat(view.records["token"][:-1], per_record)
    depth = view.values("position_ids").astype(np.int64)[flat_pred]
    order = (flat_member[1:] < flat_member[:-1]) | (
        (flat_member[1:] == flat_member[:-1]) & (depth[1:] <= depth[:-1])
    )
    if order.any():
        first = int(np.argmax(order)) + 1
        view.fail_at(
            "RF-I036", "targets are not ordered by member and position", "pred_index", first,
            expected="a later position or member than the target before", got=int(pred[first]),
        )  # fmt: skip
    paths = MemberPaths(view)
    wrong = paths.packed_position(flat_member, depth) != flat_pred
    wrong |= depth >= view.values("member_lengths")[flat_member] - 1
    view.forbid(
        "RF-I039", "pred_index is not on the path of its member, before its last token",
        "pred_index", wrong, "a token of the member with a next token",
    )  # fmt: skip
    following = view.values("input_ids")[paths.packed_position(flat_member, depth + 1)]
    wrong = view.values("target_ids") != following
    if wrong.any():
        first = int(np.argmax(wrong))
        view.fail_at(
            "RF-I040", "a target is not the member's next token", "target_ids", first,
            expected=int(following[first]), got=view.values("target_ids")[first],
        )  # fmt: skip


class MemberPaths:
    """Root-to-leaf paths of every member of a batch, for looking up packed positions by depth."""

    def __init__(self, view: View) -> None:
        nodes, member_bounds = view.records["node"], view.records["member"]
        lengths = view.values("node_lengths").astype(np.int64)
        parents = view.values("node_parents").astype(np.int64)
        starts = np.repeat(nodes[:-1], np.diff(nodes))
        up = np.where(parents < 0, -1, parents + starts).tolist()
        first_token = offsets_of(lengths)[:-1]
        depth = node_depths(parents, lengths, nodes)
        leaves = view.values("member_leaf") + np.repeat(nodes[:-1], np.diff(member_bounds))
        path: list[int] = []
        counts = np.zeros(len(leaves), np.int64)
        for number, leaf in enumerate(leaves.tolist()):
            chain = []
            while leaf >= 0:
                chain.append(leaf)
                leaf = up[leaf]
            path.extend(reversed(chain))
            counts[number] = len(chain)
        on_path = np.asarray(path, np.int64)
        self._first_token = first_token[on_path]
        self._depth = depth[on_path]
        # One ascending key for (member, depth): members are far enough apart to never overlap.
        self._stride = len(view.values("input_ids")) + 1
        self._keys = np.repeat(np.arange(len(leaves)), counts) * self._stride + self._depth

    def packed_position(self, member: Int64, depth: Int64) -> Int64:
        """Return the flat packed position of the token at `depth` of each `member`."""
        step = np.searchsorted(self._keys, member * self._stride + depth, side="right") - 1
        return self._first_token[step] + depth - self._depth[step]


PACKED_RULES: tuple[Callable[[View], None], ...] = (forest, members, targets)
