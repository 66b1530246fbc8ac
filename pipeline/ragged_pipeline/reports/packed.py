"""What packing gained: shared tokens, fill, the load of ranks, the forest of one row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.errors import InvariantError, Where
from ragged_format.lists import segment_sums
from ragged_pipeline.reports.bins import histogram
from ragged_pipeline.reports.runs import Runs
from ragged_pipeline.reports.tally import Tally

if TYPE_CHECKING:
    from ragged_format.lists import Int64
    from ragged_pipeline.reports.samples import Samples

__all__ = ["Packing"]

# A forest with more nodes than this is no picture.
_MOST_NODES = 256
# Of a row that has more all the same, this many are kept.
_KEPT_NODES = 1024


class Packing:
    """Figures of packed records.

    Parameters
    ----------
    ranks : int
        Records of a training step, one per rank.
    row : int, optional
        Record whose forest is shown; by default the one that shares most tokens, among those of at
        most 256 nodes.
    """

    def __init__(self, ranks: int, row: int | None) -> None:
        self.ranks = ranks
        self.row = row
        self.tokens = Tally()
        self.members = Tally()
        self.nodes = Tally()
        self.member_tokens = 0
        self.load = Runs(ranks)
        # (fits a picture, shared tokens, -record), and the forest.
        self._best: tuple[tuple[int, int, int], dict[str, Any]] | None = None

    def add(self, samples: Samples, first_record: int) -> None:
        """Add a batch whose first record has this number in the data."""
        lengths = samples.flat("input_ids").lengths
        members, nodes = samples.flat("member_lengths"), samples.flat("node_lengths")
        self.tokens.add(lengths)
        self.members.add(members.lengths)
        self.nodes.add(nodes.lengths)
        own = segment_sums(members.numpy(), members.offsets)
        self.member_tokens += int(own.sum())
        depths = samples.flat("position_ids")
        # A token sees its ancestors and itself.
        pairs = segment_sums(depths.numpy().astype(np.int64) + 1, depths.offsets)
        self.load.add(first_record, pairs)
        self._look(samples, first_record, own - lengths, nodes.lengths)

    def _look(self, samples: Samples, first_record: int, shared: Int64, nodes: Int64) -> None:
        if self.row is not None:
            if 0 <= self.row - first_record < len(shared):
                place = self.row - first_record
                self._offer((0, 0, 0), samples, place, first_record)
            return
        if not len(shared):
            return
        fits = (nodes <= _MOST_NODES) & (nodes > 0)
        place = int(np.lexsort((-np.arange(len(shared)), shared, fits))[-1])
        rank = (int(fits[place]), int(shared[place]), -(first_record + place))
        if self._best is None or rank > self._best[0]:
            self._offer(rank, samples, place, first_record)

    def _offer(
        self, rank: tuple[int, int, int], samples: Samples, place: int, first_record: int
    ) -> None:
        self._best = (rank, _forest(samples, place, first_record + place))

    def merge(self, other: Packing) -> None:
        """Add another part of the data."""
        for name in ("tokens", "members", "nodes", "load"):
            getattr(self, name).merge(getattr(other, name))
        self.member_tokens += other.member_tokens
        if other._best is not None and (self._best is None or other._best[0] > self._best[0]):
            self._best = other._best

    def to_json(self, budget: int | None) -> dict[str, Any]:
        """Return packing, balance and tree as JSON values; `budget` is tokens of a full row."""
        rows, tokens = self.tokens.count, int(self.tokens.total)
        known = budget is not None
        full = budget if budget is not None else int(self.tokens.high or 0)
        return {
            "packing": {
                "rows": rows, "members": int(self.members.total), "nodes": int(self.nodes.total),
                "member_tokens": self.member_tokens, "tokens": tokens,
                "ratio": self.member_tokens / tokens if tokens else None,
                "budget": full, "budget_is_known": known,
                "fill": tokens / (rows * full) if rows and full else None,
                "row_tokens": self.tokens.to_json() | {"histogram": _shares(self.tokens, full)},
                "members_per_row": self.members.to_json(),
                "nodes_per_row": self.nodes.to_json(),
            },
            "balance": self._balance(),
            "tree": None if self._best is None else self._best[1],
        }  # fmt: skip

    def _balance(self) -> dict[str, Any] | None:
        load = self.load
        if self.ranks < 2:
            return None
        rest = load.unfinished
        total = load.total + sum(part[2] for part in rest)
        worst = load.largest + sum(part[1] for part in rest)
        return {
            "ranks": self.ranks,
            "steps": load.count + len(rest),
            "missing_rows": sum(self.ranks - part[0] for part in rest),
            "by_rank": load.by_place.tolist(),
            "imbalance": worst * self.ranks / total if total else None,
            "steps_ratio": load.ratios.to_json() | {"histogram": histogram(load.ratios)},
        }


def _shares(tokens: Tally, full: int) -> list[dict[str, Any]]:
    """Return how many rows use 0-5 %, 5-10 %, … of a full row, and more than all of it."""
    out = []
    for number in range(20):
        low, high = -(-full * number // 20), -(-full * (number + 1) // 20) - 1
        high = full if number == 19 else high
        out.append(
            {"low": number / 20, "high": (number + 1) / 20, "count": tokens.between(low, high)}
        )
    over = tokens.count - tokens.between(0, full)
    return [*out, {"low": 1.0, "high": None, "count": over}] if over else out


def _forest(samples: Samples, place: int, record: int) -> dict[str, Any]:
    """Return the forest of one row."""
    lengths, parents = (
        samples.numbers(name)[slice(*samples.flat(name).offsets[place : place + 2].tolist())]
        for name in ("node_lengths", "node_parents")
    )
    above = parents.astype(np.int64)
    bad = above >= np.arange(len(above))
    if bad.any():
        position = int(np.argmax(bad))
        raise InvariantError(
            "a parent is an earlier node", code="RF-I032",
            where=Where(row=place, column="node_parents", position=position),
            expected=f"< {position}", got=int(above[position]),
            remedy="see all that is wrong with ragged validate",
        )  # fmt: skip
    first, last = samples.flat("member_leaf").offsets[place : place + 2].tolist()
    ids = samples.scalar("sample_id")[first:last].to_pylist()
    targets = np.zeros(len(lengths), np.int64)
    start, end = samples.flat("pred_index").offsets[place : place + 2].tolist()
    ends = np.cumsum(lengths.astype(np.int64))
    node = np.searchsorted(ends, samples.numbers("pred_index")[start:end], side="right")
    np.add.at(targets, np.minimum(node, max(len(targets) - 1, 0)), 1)
    return {
        "record": record,
        "tokens": int(lengths.sum()),
        "member_tokens": int(samples.numbers("member_lengths")[first:last].sum()),
        "num_nodes": len(lengths),
        # In preorder, so that the first nodes are a forest of their own.
        "nodes": [
            {"length": length, "parent": parent, "targets": count}
            for length, parent, count in zip(
                lengths[:_KEPT_NODES].tolist(), above.tolist(), targets.tolist(), strict=False
            )
        ],
        "num_members": last - first,
        "members": [
            {"sample_id": name, "leaf": leaf}
            for name, leaf in zip(
                ids, samples.numbers("member_leaf")[first:last].tolist(), strict=True
            )
            if leaf < _KEPT_NODES
        ],
    }  # fmt: skip
