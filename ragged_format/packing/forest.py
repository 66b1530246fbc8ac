"""The prefix forest of a set of samples, built by sorting and array comparison.

Samples are sorted by their tokens, so that those with a common prefix lie side by side; the longest
common prefix of each sample with its neighbour then determines the whole forest. Python steps are
per sample and node, never per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Forest", "Fork", "Keys", "chains", "grow", "paths"]

Fork = Literal["token", "transition"]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Keys:
    """What sharing compares.

    Attributes
    ----------
    tokens : (t,) int
        Token ids of all samples, end to end.
    compared : (t,) int
        Compared per token: the ids themselves, or codes of id and share keys whose bytes sort by id
        first. Equal codes mean equal ids.
    parts : list of int, optional
        Part of each sample; samples of different parts share nothing. ``None``: one part.
    """

    tokens: npt.NDArray[Any]
    compared: npt.NDArray[Any]
    parts: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Forest:
    """A prefix forest of unary chains in depth-first preorder, children in insertion order.

    Attributes
    ----------
    node_lengths, node_parents : (s,) int32
        Tokens of each node, and its parent (-1 for a root).
    node_depths : list of int
        Depth of each node's first token.
    node_members : list of int
        The first member that has the node; its tokens are the node's.
    leaves : (k,) int32
        Node where each member ends.
    """

    node_lengths: Int32
    node_parents: Int32
    node_depths: list[int]
    node_members: list[int]
    leaves: Int32


def chains(lengths: Sequence[int]) -> Forest:
    """Return the forest in which nothing is shared: one root chain per sample.

    Examples
    --------
    >>> chains([3, 2]).node_parents.tolist()
    [-1, -1]
    """
    count = len(lengths)
    return Forest(
        np.array(lengths, np.int32),
        np.full(count, -1, np.int32),
        [0] * count,
        list(range(count)),
        np.arange(count, dtype=np.int32),
    )


def common_prefixes(
    keys: Keys, starts: Sequence[int], lengths: Sequence[int], fork: Fork
) -> tuple[list[int], list[int]]:
    """Sort samples so that common prefixes are adjacent, and measure these.

    Parameters
    ----------
    keys : Keys
        What is compared.
    starts, lengths : sequences of n int
        Where the tokens of each sample lie in `keys`.
    fork : {"token", "transition"}
        Whether a position is shared by its own token alone or together with the next one.

    Returns
    -------
    order : list of n int
        Sample numbers, sorted; equal samples keep their order.
    shared : list of n int
        Positions that each sample of `order` shares with the one before it; ``shared[0] == 0``.
    """
    compared = np.ascontiguousarray(keys.compared)
    # Byte order is not numeric order, and need not be: any order in which equal prefixes are
    # neighbours serves, and comparing bytes objects is one memcmp.
    raw = compared.view(np.uint8).data
    size = compared.itemsize
    chunks = [
        bytes(raw[start * size : (start + length) * size])
        for start, length in zip(starts, lengths, strict=True)
    ]
    parts = keys.parts
    if parts is None:
        order = sorted(range(len(chunks)), key=chunks.__getitem__)
    else:
        order = sorted(range(len(chunks)), key=lambda i: (parts[i], chunks[i]))
    shared = [0] * len(order)
    for rank in range(1, len(order)):
        a, b = order[rank - 1], order[rank]
        if parts is not None and parts[a] != parts[b]:
            continue
        shared[rank] = _common(keys.tokens, compared, starts[a], lengths[a], starts[b], lengths[b],
                               fork)  # fmt: skip
    return order, shared


def _common(
    tokens: npt.NDArray[Any], compared: npt.NDArray[Any],
    start_a: int, length_a: int, start_b: int, length_b: int, fork: Fork,
) -> int:  # fmt: skip
    """Return how many positions two samples share."""
    shorter = min(length_a, length_b)
    if shorter == 0:
        return 0
    differs = compared[start_a : start_a + shorter] != compared[start_b : start_b + shorter]
    common = int(differs.argmax())
    if not differs[common]:
        common = shorter
    if fork == "token" or common == 0:
        return common
    if common == shorter:
        # The end of a sample is a next token of its own.
        return common if length_a == length_b else common - 1
    same_next = bool(tokens[start_a + common] == tokens[start_b + common])
    return common if same_next else common - 1


def grow(order: Sequence[int], shared: Sequence[int], lengths: Sequence[int]) -> Forest:
    """Return the forest of samples sorted by :func:`common_prefixes`.

    A chain is split where samples diverge and where one ends.

    Parameters
    ----------
    order, shared : sequences of n int
        As :func:`common_prefixes` returns them.
    lengths : sequence of n int
        Tokens of each sample, each >= 1.

    Examples
    --------
    Samples ``[1, 2, 3]`` and ``[1, 2, 4]``, and their common prefix as a third:

    >>> forest = grow([2, 0, 1], [0, 2, 2], [3, 3, 2])
    >>> forest.node_lengths.tolist(), forest.node_parents.tolist(), forest.leaves.tolist()
    ([2, 1, 1], [-1, 0, 0], [1, 2, 0])
    """
    ends, parents, firsts, ending = _trie(order, shared, lengths)
    children: list[list[int]] = [[] for _ in ends]
    # Ancestors have the first member of their subtree, so a parent's children come out in the order
    # in which members brought them in.
    for node in sorted(range(1, len(ends)), key=firsts.__getitem__, reverse=True):
        children[parents[node]].append(node)
    number = [-1] * len(ends)
    preorder: list[int] = []
    todo = children[0]
    while todo:
        node = todo.pop()
        number[node] = len(preorder)
        preorder.append(node)
        todo += children[node]
    depths = [ends[parents[node]] for node in preorder]
    return Forest(
        np.array([ends[node] for node in preorder], np.int32) - np.array(depths, np.int32),
        np.array([number[parents[node]] for node in preorder], np.int32),
        depths,
        [firsts[node] for node in preorder],
        np.array([number[node] for node in ending], np.int32),
    )


def _trie(
    order: Sequence[int], shared: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return end depth, parent and first member of each node (0 is above the roots), and leaves.

    Walks the sorted samples with the path of the last one as a stack: nodes deeper than what the
    next sample shares are complete.
    """
    ends, parents, firsts = [0], [-1], [len(order)]
    leaves = [0] * len(order)
    path = [0]
    for sample, common in zip(order, shared, strict=True):
        while ends[path[-1]] > common:
            done = path.pop()
            if ends[path[-1]] < common:
                parents.append(path[-1])
                ends.append(common)
                firsts.append(firsts[done])
                path.append(len(ends) - 1)
                parents[done] = path[-1]
            top = path[-1]
            if firsts[done] < firsts[top]:
                firsts[top] = firsts[done]
        if lengths[sample] > common:
            parents.append(path[-1])
            ends.append(lengths[sample])
            firsts.append(sample)
            path.append(len(ends) - 1)
        # Otherwise it equals the sample before, which has the lower number.
        leaves[sample] = path[-1]
    while len(path) > 1:
        done = path.pop()
        if firsts[done] < firsts[path[-1]]:
            firsts[path[-1]] = firsts[done]
    return ends, parents, firsts, leaves


def paths(parents: Sequence[int], leaves: Sequence[int]) -> list[list[int]]:
    """Return the nodes from the root to each leaf."""
    to_node: list[list[int]] = []
    for node, parent in enumerate(parents):
        to_node.append([node] if parent < 0 else [*to_node[parent], node])
    return [to_node[leaf] for leaf in leaves]
