"""The rules of full validation that only packed records have: the prefix forest and its members.

Everything is counted over the whole batch: node, token and member numbers of a record are turned
into flat positions by adding the record's offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ragged_format.errors import InvariantError, Where
from ragged_format.lists import Int64, offsets_of, ranges
from ragged_format.view import Rule

if TYPE_CHECKING:
    from ragged_format.view import View

__all__ = ["PACKED_RULES"]


def _int64(view: View, name: str) -> Int64:
    return view.values(name).astype(np.int64)


def nodes_not_empty(view: View) -> None:
    """RF-I030."""
    bad = view.values("node_lengths") < 1
    view.forbid("RF-I030", "a node has no token", "node_lengths", bad, ">= 1")


def nodes_cover_tokens(view: View) -> None:
    """RF-I031."""
    tokens = np.diff(view.records["token"])
    sums = np.diff(offsets_of(_int64(view, "node_lengths"))[view.records["node"]])
    if (sums != tokens).any():
        row = int(np.argmax(sums != tokens))
        raise InvariantError(
            "the nodes of a record do not sum to its tokens", code="RF-I031",
            where=Where(row=row, column="node_lengths"),
            expected=f"sum {tokens[row]}", got=f"sum {sums[row]}",
        )  # fmt: skip


def nodes_in_preorder(view: View) -> None:
    """RF-I032."""
    parents, nodes = view.values("node_parents"), view.records["node"]
    own = np.arange(len(parents)) - np.repeat(nodes[:-1], np.diff(nodes))
    view.forbid(
        "RF-I032", "a node's parent is not an earlier node", "node_parents",
        (parents < -1) | (parents >= own), "-1, or an earlier node",
    )  # fmt: skip
    view.forbid(
        "RF-I032", "nodes are not in depth-first preorder", "node_parents",
        ~view.forest.in_preorder(), "-1, the previous node or one of its ancestors",
    )  # fmt: skip


def positions_are_depths(view: View) -> None:
    """RF-I033."""
    expected = ranges(view.forest.depths, view.forest.lengths)
    wrong = view.values("position_ids") != expected
    if wrong.any():
        first = int(np.argmax(wrong))
        view.fail_at(
            "RF-I033", "a position is not the number of ancestors", "position_ids", first,
            expected=int(expected[first]),
        )  # fmt: skip


def _inside(view: View, code: str, column: str, axis: str) -> None:
    """Forbid values of a column on a root axis that are not elements of the record's `axis`."""
    values = view.values(column)
    owner = view.schema[column].axis
    limit = np.repeat(np.diff(view.records[axis]), np.diff(view.records[owner]))
    view.forbid(
        code, f"{column} is outside the record's {axis} axis", column,
        (values < 0) | (values >= limit), f"0 <= {column} < number of {axis}s",
    )  # fmt: skip


def pred_index_inside(view: View) -> None:
    """RF-I034."""
    _inside(view, "RF-I034", "pred_index", "token")


def member_index_inside(view: View) -> None:
    """RF-I035."""
    _inside(view, "RF-I035", "member_index", "member")


def leaves_inside(view: View) -> None:
    """RF-I037."""
    _inside(view, "RF-I037", "member_leaf", "node")


def _flat_index(view: View, column: str, axis: str) -> Int64:
    """Return an index column counted over the batch instead of the record."""
    per_record = np.diff(view.records[view.schema[column].axis])
    return _int64(view, column) + np.repeat(view.records[axis][:-1], per_record)


def targets_ordered(view: View) -> None:
    """RF-I036."""
    member = _flat_index(view, "member_index", "member")
    position = view.values("position_ids")[_flat_index(view, "pred_index", "token")]
    backwards = member[1:] < member[:-1]
    again = (member[1:] == member[:-1]) & (position[1:] <= position[:-1])
    if (backwards | again).any():
        first = int(np.argmax(backwards | again)) + 1
        view.fail_at(
            "RF-I036", "targets are not ordered by member and position",
            "member_index" if backwards[first - 1] else "pred_index", first,
            expected="a later member, or a later position of the same, than the target before",
        )  # fmt: skip


def member_lengths_right(view: View) -> None:
    """RF-I038."""
    leaves = _flat_index(view, "member_leaf", "node")
    expected = view.forest.depths[leaves] + view.forest.lengths[leaves]
    wrong = view.values("member_lengths") != expected
    if wrong.any():
        first = int(np.argmax(wrong))
        view.fail_at(
            "RF-I038", "a member's length is not that of its path", "member_lengths", first,
            expected=int(expected[first]),
        )  # fmt: skip


def predictors_on_path(view: View) -> None:
    """RF-I039."""
    forest = view.forest
    token = _flat_index(view, "pred_index", "token")
    member = _flat_index(view, "member_index", "member")
    leaf = _flat_index(view, "member_leaf", "node")[member]
    node = forest.nodes_of(token)
    level = np.minimum(forest.levels[node], forest.levels[leaf])
    wrong = forest.ancestors(leaf, level) != node
    wrong |= view.values("position_ids")[token] >= view.values("member_lengths")[member] - 1
    view.forbid(
        "RF-I039", "pred_index is not on the path of its member, before its last token",
        "pred_index", wrong, "a token of the member that another one follows",
    )  # fmt: skip


def targets_follow(view: View) -> None:
    """RF-I040."""
    forest = view.forest
    token = _flat_index(view, "pred_index", "token")
    member = _flat_index(view, "member_index", "member")
    node, following = forest.nodes_of(token), token + 1
    # Behind a node's last token the path goes on in the child that leads to the member's leaf.
    ends = np.flatnonzero(following == forest.first_tokens[node + 1])
    leaf = _flat_index(view, "member_leaf", "node")[member[ends]]
    child = forest.ancestors(leaf, forest.levels[node[ends]] + 1)
    following[ends] = forest.first_tokens[child]
    expected = view.values("input_ids")[following]
    wrong = view.values("target_ids") != expected
    if wrong.any():
        first = int(np.argmax(wrong))
        view.fail_at(
            "RF-I040", "a target is not the member's next token", "target_ids", first,
            expected=int(expected[first]),
        )  # fmt: skip


def leaves_have_members(view: View) -> None:
    """RF-I041."""
    parents = view.forest.parents
    childless = np.ones(len(parents), bool)
    childless[parents[parents >= 0]] = False
    childless[_flat_index(view, "member_leaf", "node")] = False
    view.forbid(
        "RF-I041", "a node without children is no member's leaf", "node_parents", childless,
        "a member whose leaf it is",
    )  # fmt: skip


_FOREST = ("RF-I030", "RF-I031", "RF-I032")
_PLACES = (*_FOREST, "RF-I033", "RF-I034", "RF-I035", "RF-I037", "RF-I038")

PACKED_RULES: tuple[Rule, ...] = tuple(
    Rule(code, check, after, "packed")
    for code, check, after in (
        ("RF-I030", nodes_not_empty, ()),
        ("RF-I031", nodes_cover_tokens, ()),
        ("RF-I032", nodes_in_preorder, ()),
        ("RF-I033", positions_are_depths, _FOREST),
        ("RF-I034", pred_index_inside, ()),
        ("RF-I035", member_index_inside, ()),
        ("RF-I036", targets_ordered, ("RF-I033", "RF-I034", "RF-I035")),
        ("RF-I037", leaves_inside, ()),
        ("RF-I038", member_lengths_right, (*_FOREST, "RF-I037")),
        ("RF-I039", predictors_on_path, _PLACES),
        ("RF-I040", targets_follow, (*_PLACES, "RF-I039")),
        ("RF-I041", leaves_have_members, ("RF-I032", "RF-I037")),
    )
)
