"""Packing samples into one training row."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.arguments import shown
from ragged_format.canonical import as_batch
from ragged_format.errors import InvariantError, LimitExceededError, PackingError, Where
from ragged_format.lists import Int64, flat, offsets_of
from ragged_format.packing.forest import Forest, Fork, Keys, chains, common_prefixes, grow, paths
from ragged_format.packing.layout import Layout, OneLists, layout_of
from ragged_format.packing.tokens import Segments, TokenColumns
from ragged_format.profiles import member_counts
from ragged_format.ragged import take

if TYPE_CHECKING:
    from ragged_format.packing.report import PackReport
    from ragged_format.schema import Column

__all__ = ["Packing", "Scored", "check_choice", "pack_row", "scored_tokens"]

Packing = Literal["tree", "sequence"]
NullAdvantage = Literal["error", "keep"]

CHOICES = {
    "packing": ("tree", "sequence"),
    "fork": ("token", "transition"),
    "null_advantage": ("error", "keep"),
    "tail": ("keep", "drop", "open"),
}
MAX_TOKENS = 2**31 - 1  # positions and lengths of a packed row are int32


def check_choice(name: str, value: object) -> None:
    """Raise ``RF-P001`` unless `value` is one of the choices of option `name`."""
    if not isinstance(value, str) or value not in CHOICES[name]:
        listed = " or ".join(map(repr, CHOICES[name]))
        raise PackingError(
            f"{name} has no such choice", expected=listed, got=shown(value),
            remedy=f"pass {listed}",
        )  # fmt: skip


def check_count(name: str, value: object, below: int = 1 << 63) -> None:
    """Raise ``RF-P001`` unless `value` is a positive integer below a limit."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 1 <= value < below:  # type: ignore[operator]
        raise PackingError(
            f"{name} is a positive integer", expected=f">= 1 and < {below}", got=repr(value),
            remedy=f"pass {name} in that range",
        )  # fmt: skip


class Scored(NamedTuple):
    """The scored tokens of samples.

    Attributes
    ----------
    tokens : (t,) int32
        ``input_ids`` end to end.
    offsets : (n + 1,) int64
        Tokens of each sample.
    positions : (m,) int64
        Flat index of each scored token, ascending.
    bounds : (n + 1,) int64
        Scored tokens of each sample.
    """

    tokens: npt.NDArray[np.int32]
    offsets: Int64
    positions: Int64
    bounds: Int64


def scored_tokens(samples: pa.RecordBatch) -> Scored:
    """Return the tokens of samples and which of them are scored.

    Raises
    ------
    InvariantError
        The mask has other lengths than the tokens (``RF-I003``), or a first token is scored, which
        nothing predicts (``RF-I009``).
    """
    ids, offsets = flat(samples.column("input_ids"))
    mask, mask_offsets = flat(samples.column("completion_mask"))
    if offsets.tobytes() != mask_offsets.tobytes():
        row = int(np.argmax(offsets[1:] != mask_offsets[1:]))
        raise InvariantError(
            "the mask has one entry per token",
            code="RF-I003", where=Where(row=row, column="completion_mask"),
            expected=int(offsets[row + 1] - offsets[row]),
            got=int(mask_offsets[row + 1] - mask_offsets[row]),
        )  # fmt: skip
    positions = np.flatnonzero(mask.to_numpy(zero_copy_only=True) != 0)
    bounds = np.searchsorted(positions, offsets)
    some = np.flatnonzero(bounds[:-1] < bounds[1:])
    orphans = some[positions[bounds[some]] == offsets[some]]
    if len(orphans):
        raise InvariantError(
            "the first token of a sample is scored", code="RF-I009", expected=0, got=1,
            where=Where(row=int(orphans[0]), column="completion_mask", position=0),
            remedy="cut the sample with ragged_format.cut, which drops that target",
        )  # fmt: skip
    return Scored(ids.to_numpy(zero_copy_only=True), offsets, positions, bounds)


def pack_row(
    samples: pa.RecordBatch | pa.Table,
    packing: Packing = "tree",
    fork: Fork = "token",
    *,
    within_group: bool = False,
    null_advantage: NullAdvantage = "error",
    report: PackReport | None = None,
) -> pa.RecordBatch:
    """Pack samples into one row of the ``packed`` profile.

    Common prefixes are stored once; every scored token stays a target of its own, with its own
    log-probs, candidate set and heads. Samples without a scored token are left out (and counted in
    `report`); the others become the row's members, in their order.

    Guarantees: target columns and all axes below are views of the samples' (only outer offsets are
    new), as are the member columns where no sample is left out. Nodes are in depth-first preorder,
    children in the order of the samples; targets are ordered by member and position. A token column
    of one's own keeps the first member's value that is not all fill. A root axis of one's own is
    joined end to end, and ``member_<axis>_counts`` says how much of it each member has.

    Parameters
    ----------
    samples : pyarrow.RecordBatch or pyarrow.Table
        Profile ``sample``; validated input is assumed beyond what is listed under *Raises*.
    packing : {"tree", "sequence"}
        Share common prefixes, or lay whole samples end to end.
    fork : {"token", "transition"}
        ``"token"``: share the longest common prefix, so that one position may predict several
        targets. ``"transition"``: share a position only if the next token agrees too (the end of a
        sample is a next token of its own), so that each position has one next token.
    within_group : bool
        Share only between samples of equal ``group_id``; null shares with nobody.
    null_advantage : {"error", "keep"}
        What to do with a member whose ``advantage`` is null, where the column exists.
    report : PackReport, optional
        Counts are added to it. Without it conflicting token columns are not counted, which saves
        comparing them.

    Returns
    -------
    pyarrow.RecordBatch
        One record; empty on every axis where no sample has a target.

    Raises
    ------
    PackingError
        An unknown choice, a null advantage, or ``within_group`` without groups (``RF-P001``).
    InvariantError
        Lengths that contradict each other (``RF-I003``, ``RF-I005``), or a scored first token
        (``RF-I009``).
    LimitExceededError
        More than 2^31 - 1 tokens (``RF-L001``).

    Examples
    --------
    >>> import pyarrow as pa
    >>> import ragged_format as rf
    >>> schema = rf.sample_schema(vocab_size=10, columns=[])
    >>> samples = rf.canonical(
    ...     pa.table(
    ...         {
    ...             "sample_id": ["a", "b"],
    ...             "input_ids": [[5, 6, 1], [5, 6, 2]],
    ...             "completion_mask": [[0, 0, 1], [0, 0, 1]],
    ...         }
    ...     ),
    ...     schema,
    ... )
    >>> row = pack_row(samples)
    >>> row.column("input_ids").to_pylist(), row.column("pred_index").to_pylist()
    ([[5, 6, 1, 2]], [[1, 1]])
    >>> pack_row(samples, fork="transition").column("input_ids").to_pylist()
    [[5, 6, 1, 6, 2]]
    """
    check_choice("packing", packing)
    check_choice("fork", fork)
    check_choice("null_advantage", null_advantage)
    samples = as_batch(samples)
    layout = layout_of(samples.schema)
    scored = scored_tokens(samples)
    targets = np.diff(scored.bounds)
    num_samples = len(targets)
    kept = None if targets.all() else np.flatnonzero(targets)
    null_advantages = _check_advantage(samples, kept, null_advantage)
    if kept is not None:
        targets = targets[kept]
        if layout.own_roots:
            # Their elements of samples left out would stay; the rest has none on other axes.
            samples = take(samples, kept)
            scored = scored_tokens(samples)
            kept = None
    lengths = np.diff(scored.offsets)
    starts = scored.offsets[:-1]
    if kept is not None:
        lengths, starts = lengths[kept], starts[kept]
    num_tokens = int(lengths.sum())
    if num_tokens > MAX_TOKENS:
        raise LimitExceededError(
            "a packed row has at most 2^31 - 1 tokens", expected=MAX_TOKENS, got=num_tokens,
            remedy="plan rows with a token budget: plan_rows(samples, token_budget)",
        )  # fmt: skip
    if packing == "sequence":
        forest = chains(lengths.tolist())
    else:
        keys = layout.rules.keys(samples, scored.tokens, scored.offsets, within_group=within_group)
        forest = _forest(keys, kept, starts.tolist(), lengths.tolist(), fork)
    row = _Row(forest, scored, starts, lengths, targets)
    out = _assemble(samples, layout, row, scored, kept, report)
    if report is not None:
        report.rows += 1
        report.samples += num_samples
        report.kept += len(targets)
        report.without_target += num_samples - len(targets)
        report.tokens += num_tokens
        report.unique_tokens += len(row.input_ids)
        report.targets += len(scored.positions)
        report.null_advantages += null_advantages
    return out


def _forest(
    keys: Keys, kept: Int64 | None, starts: list[int], lengths: list[int], fork: Fork
) -> Forest:
    if kept is not None and keys.parts is not None:
        parts = keys.parts
        keys = Keys(keys.tokens, keys.compared, [parts[i] for i in kept])
    order, shared = common_prefixes(keys, starts, lengths, fork)
    return grow(order, shared, lengths)


def _check_advantage(samples: pa.RecordBatch, kept: Int64 | None, policy: NullAdvantage) -> int:
    """Return how many members have a null advantage; raise if that is not allowed."""
    if "advantage" not in samples.schema.names:
        return 0
    column = samples.column("advantage")
    if column.null_count == 0:
        return 0
    null = column.is_null().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(null) if kept is None else kept[null[kept]]
    if len(rows) and policy == "error":
        raise PackingError(
            "a sample to train on has no advantage",
            where=Where(row=int(rows[0]), column="advantage"), expected="a number",
            got=f"null in {len(rows)} samples",
            remedy='compute advantages before packing, or allow it: null_advantage="keep"',
        )  # fmt: skip
    return len(rows)


class _Row:
    """The structure of a row: tokens, nodes, targets and members as flat arrays."""

    def __init__(
        self, forest: Forest, scored: Scored, starts: Int64, lengths: Int64, targets: Int64
    ) -> None:
        self.forest = forest
        tokens = scored.tokens
        depths, owners = forest.node_depths, forest.node_members
        sizes = forest.node_lengths.tolist()
        begin = starts.tolist()
        spans = [
            (begin[member] + depth, size)
            for member, depth, size in zip(owners, depths, sizes, strict=True)
        ]
        longest = int(lengths.max()) if len(lengths) else 0
        position = np.arange(longest, dtype=np.int32)
        nothing = tokens[:0]
        self.input_ids = np.concatenate(
            [tokens[first : first + size] for first, size in spans] or [nothing]
        )
        self.position_ids = np.concatenate(
            [position[depth : depth + size] for depth, size in zip(depths, sizes, strict=True)]
            or [nothing]
        )
        self.member_lengths = lengths.astype(np.int32)
        self.segments = _segments(forest, starts)
        self.target_ids = tokens[scored.positions]
        self.pred_index = _predecessors(self.segments, scored.positions)
        self.member_index = np.repeat(np.arange(len(targets), dtype=np.int32), targets)

    def structure(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "node_lengths": self.forest.node_lengths,
            "node_parents": self.forest.node_parents,
            "pred_index": self.pred_index,
            "target_ids": self.target_ids,
            "member_index": self.member_index,
            "member_leaf": self.forest.leaves,
            "member_lengths": self.member_lengths,
        }


def _segments(forest: Forest, starts: Int64) -> Segments:
    routes = paths(forest.node_parents.tolist(), forest.leaves.tolist())
    nodes = np.fromiter(chain.from_iterable(routes), np.int64)
    members = np.repeat(np.arange(len(routes)), [len(route) for route in routes])
    depths = np.array(forest.node_depths, np.int64)
    lengths = forest.node_lengths.astype(np.int64)
    owners = np.array(forest.node_members, np.int64)
    return Segments(
        sources=starts[members] + depths[nodes],
        positions=(np.cumsum(lengths) - lengths)[nodes],
        lengths=lengths[nodes],
        owned=owners[nodes] == members,
    )


def _predecessors(segments: Segments, scored: Int64) -> npt.NDArray[np.int32]:
    """Return the packed position of the token before each scored one, (m,) int32."""
    before = scored - 1
    # Both ascend, so that each segment holds a run of them.
    runs = np.searchsorted(before, segments.sources)
    sizes = np.diff(np.append(runs, len(before)))
    return (before + np.repeat(segments.positions - segments.sources, sizes)).astype(np.int32)


def _assemble(
    samples: pa.RecordBatch,
    layout: Layout,
    row: _Row,
    scored: Scored,
    kept: Int64 | None,
    report: PackReport | None,
) -> pa.RecordBatch:
    arrays: dict[str, pa.Array] = {}
    one_list = OneLists(layout)
    for name, values in row.structure().items():
        arrays[name] = one_list(name, pa.array(values))
    for name, source in layout.member_columns:
        array = samples.column(source)
        if kept is not None:
            array = array.take(pa.array(kept))
        arrays[name] = one_list(name, array)
    for root, columns in layout.joined_columns:
        bounds = {"target": scored.bounds}
        for column in columns:
            values, offsets = flat(samples.column(column.name))
            _check_lengths(column, offsets, bounds.setdefault(column.axis, offsets))
            if column.opens is not None:
                counts = values.to_numpy(zero_copy_only=True)
                bounds[column.opens] = offsets_of(counts)[offsets]
            arrays[column.name] = one_list(column.name, values)
        if root != "target":
            name = member_counts(root)
            counts = np.diff(bounds.get(root, np.zeros_like(scored.bounds))).astype(np.int32)
            arrays[name] = one_list(name, pa.array(counts))
    if layout.token_columns:
        picker = TokenColumns(samples, layout.schema, row.segments)
        for column, values in picker.columns(layout.token_columns, report):
            arrays[column.name] = one_list(column.name, values)
    return pa.RecordBatch.from_arrays([arrays[name] for name in layout.names], schema=layout.packed)


def _check_lengths(column: Column, offsets: Int64, expected: Int64) -> None:
    """Raise unless a column has as many elements in each sample as its axis has there."""
    if offsets.tobytes() == expected.tobytes():
        return
    row = int(np.argmax(offsets[1:] != expected[1:]))
    raise InvariantError(
        f"a column has another length than its axis {column.axis!r}",
        code="RF-I005", where=Where(row=row, column=column.name),
        expected=int(expected[row + 1] - expected[row]), got=int(offsets[row + 1] - offsets[row]),
        remedy="ragged_format.validate names the first fault of a batch",
    )  # fmt: skip
