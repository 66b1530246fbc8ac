"""Planning which samples make which row, for all ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.canonical import as_batch
from ragged_format.errors import PackingError
from ragged_format.packing.layout import layout_of
from ragged_format.packing.pack import Packing, check_choice, check_count, scored_tokens
from ragged_format.packing.planner import Planner, Sorter, Tail
from ragged_format.packing.sharing import ShareRules
from ragged_format.parse import parse_schema
from ragged_format.schema import RaggedSchema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ragged_format.lists import Int64
    from ragged_format.packing.deal import PlannedRow
    from ragged_format.packing.forest import Fork

__all__ = ["MAX_RANKS", "Plan", "deal_rows", "plan_rows", "planning_columns"]

# Samples of a row that goes into the next window, at most; more, where windows are larger. The cost
# of each window would else be that of many.
LEAST_CARRIED = 4096
# More than any cluster has, and few enough for a list of their loads.
MAX_RANKS = 1 << 20


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows for every rank, and what became of every sample.

    Each sample number is in exactly one of `rows`, `without_target`, `oversize`, `dropped` and
    `open_rows`.

    Attributes
    ----------
    rows : list of (k,) int64
        Sample numbers of each row, ascending. Rows come step by step: row ``step * ranks + rank``
        belongs to `rank`.
    unique_tokens, tokens, targets, load : (r,) int64
        Of each row: tokens to forward, tokens of its samples one by one, scored tokens, attention
        score pairs (the sum of depth + 1 over forwarded tokens).
    without_target, oversize, dropped : (k,) int64
        Samples in no row: nothing in them is scored; longer than the budget; left over by
        ``tail="drop"``.
    open_rows : list of (k,) int64
        Rows of ``tail="open"`` that make no whole step, or none of even load, and the emptiest.
    open_load : (o,) int64
        Attention score pairs of each of them.
    num_samples, token_budget, ranks : int
        As given.
    """

    rows: list[Int64]
    unique_tokens: Int64
    tokens: Int64
    targets: Int64
    load: Int64
    without_target: Int64
    oversize: Int64
    dropped: Int64
    num_samples: int
    token_budget: int
    ranks: int
    open_rows: list[Int64] = field(default_factory=list)
    open_load: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))

    def for_rank(self, rank: int) -> list[Int64]:
        """Return the rows of one rank, in step order."""
        return self.rows[rank :: self.ranks]

    @property
    def missing_rows(self) -> int:
        """Rows that the last step lacks because no row has a second sample to give; else 0."""
        return -len(self.rows) % self.ranks

    @property
    def fill(self) -> float:
        """Mean share of the budget that rows use."""
        return float(self.unique_tokens.sum()) / max(len(self.rows) * self.token_budget, 1)

    @property
    def packing_ratio(self) -> float:
        """Tokens per forwarded token; 1 where nothing is shared."""
        return float(self.tokens.sum()) / max(int(self.unique_tokens.sum()), 1)

    @cached_property
    def _step_loads(self) -> Int64:
        """Loads by step and rank, (steps, ranks); 0 for a missing row."""
        return np.append(self.load, np.zeros(self.missing_rows, np.int64)).reshape(-1, self.ranks)

    @property
    def step_imbalance(self) -> npt.NDArray[np.float64]:
        """Largest load of a rank over the mean, per step, (steps,) float64."""
        return np.asarray(self._step_loads.max(axis=1) / self._step_loads.mean(axis=1))

    @property
    def imbalance(self) -> float:
        """Time lost to waiting: the sum of the steps' largest loads over the sum of their means."""
        if not self.rows:
            return 1.0
        return float(self._step_loads.max(axis=1).sum() / self._step_loads.mean(axis=1).sum())

    def metrics(self) -> dict[str, Any]:
        """Return sums and ratios as plain JSON values."""
        return {
            "samples": self.num_samples,
            "planned": sum(len(row) for row in self.rows),
            "without_target": len(self.without_target),
            "oversize": len(self.oversize),
            "dropped": len(self.dropped),
            "rows": len(self.rows),
            "ranks": self.ranks,
            "steps": -(-len(self.rows) // self.ranks),
            "missing_rows": self.missing_rows,
            "token_budget": self.token_budget,
            "tokens": int(self.tokens.sum()),
            "unique_tokens": int(self.unique_tokens.sum()),
            "targets": int(self.targets.sum()),
            "load": int(self.load.sum()),
            "fill": round(self.fill, 4),
            "imbalance": round(self.imbalance, 4),
            "packing_ratio": round(self.packing_ratio, 4),
        }


def plan_rows(
    samples: pa.RecordBatch | pa.Table,
    token_budget: int,
    ranks: int = 1,
    *,
    packing: Packing = "tree",
    fork: Fork = "token",
    within_group: bool = False,
    window: int = 4096,
    max_repeat: float = 1.0,
    tail: Tail = "keep",
) -> Plan:
    """Plan rows of at most `token_budget` unique tokens, and deal them to ranks.

    Rows are formed window by window: clusters of samples with a common prefix stay together as far
    as the budget allows, and gaps are filled with what fits. The emptiest row of a window goes into
    the next one. Then rows of like load, of all windows, are grouped into steps of one row per
    rank, and rows of a step exchange clusters until their loads are even. The result is the same
    for the same input; the number of rows depends on `ranks` only in that it is a multiple.

    Nothing is left out silently: see the attributes of :class:`Plan`.

    Parameters
    ----------
    samples : pyarrow.RecordBatch or pyarrow.Table
        Profile ``sample``. Only token ids, mask and the columns that restrict sharing are read.
    token_budget : int
        Largest number of unique tokens of a row.
    ranks : int
        Ranks of the job; each gets the same number of rows.
    packing, fork, within_group
        As in ``pack_row``; rows have the planned size if packed with the same.
    window : int
        Samples that are planned together.
    max_repeat : float
        A cluster that fits into a row is split to fill the gaps of others only where a moved part
        repeats at most this many times as many tokens of prefix as it moves; 0 splits none. More
        gives fuller rows and more tokens in all.
    tail : {"keep", "drop", "open"}
        What to do with rows that make no whole step at the end: split rows so that they do (where
        there are too few samples for that the last step is short: ``missing_rows``), leave them
        out (``dropped``), or return them, with those of uneven steps and the emptiest, for
        :func:`deal_rows` (``open_rows``).

    Raises
    ------
    PackingError
        A number out of range or an unknown choice (``RF-P001``).

    Examples
    --------
    >>> import pyarrow as pa
    >>> import ragged_format as rf
    >>> samples = rf.canonical(
    ...     pa.table(
    ...         {
    ...             "sample_id": ["a", "b", "c"],
    ...             "input_ids": [[5, 6, 1, 1], [7, 2, 2], [5, 6, 3]],
    ...             "completion_mask": [[0, 0, 1, 1], [0, 1, 1], [0, 0, 1]],
    ...         }
    ...     ),
    ...     rf.sample_schema(vocab_size=10, columns=[]),
    ... )
    >>> plan = plan_rows(samples, token_budget=5)
    >>> [row.tolist() for row in plan.rows], plan.unique_tokens.tolist()
    ([[0, 2], [1]], [5, 3])
    """
    check_count("window", window)
    job = _Planning(
        samples, token_budget, ranks, packing=packing, fork=fork, within_group=within_group,
        max_repeat=max_repeat, carried=max(window, LEAST_CARRIED), tail=tail,
    )  # fmt: skip
    job.planner.add_all(np.flatnonzero(job.has_target & job.fits), window)
    return job.plan()


def deal_rows(
    samples: pa.RecordBatch | pa.Table,
    rows: Iterable[npt.ArrayLike],
    token_budget: int,
    ranks: int = 1,
    *,
    packing: Packing = "tree",
    fork: Fork = "token",
    within_group: bool = False,
    max_repeat: float = 1.0,
    tail: Tail = "keep",
) -> Plan:
    """Deal rows that are formed already to ranks: those that several plans left open.

    Rows that are not full are formed anew together, so that there may be fewer.

    Parameters
    ----------
    samples : pyarrow.RecordBatch or pyarrow.Table
        The samples of all rows and no others; all of them have a target.
    rows : iterable of (k,) int
        Sample numbers of each row, of at most `token_budget` unique tokens.
    token_budget, ranks, packing, fork, within_group, max_repeat, tail
        As for :func:`plan_rows`.

    Raises
    ------
    PackingError
        A number out of range or an unknown choice (``RF-P001``).
    """
    job = _Planning(
        samples, token_budget, ranks, packing=packing, fork=fork, within_group=within_group,
        max_repeat=max_repeat, carried=0, tail=tail,
    )  # fmt: skip
    job.planner.adopt(_sample_numbers(rows, len(job.lengths)), LEAST_CARRIED)
    return job.plan()


class _Planning:
    """Checked arguments, what is known of the samples, and the planner."""

    def __init__(
        self, samples: pa.RecordBatch | pa.Table, token_budget: int, ranks: int, *,
        packing: Packing, fork: Fork, within_group: bool, max_repeat: float, carried: int,
        tail: Tail,
    ) -> None:  # fmt: skip
        check_choice("packing", packing)
        check_choice("fork", fork)
        check_choice("tail", tail)
        check_count("token_budget", token_budget)
        check_count("ranks", ranks, MAX_RANKS + 1)
        if not isinstance(max_repeat, int | float | np.number) or not max_repeat >= 0:
            raise PackingError(
                "max_repeat is a number that is not negative", expected=">= 0",
                got=repr(max_repeat), remedy="pass max_repeat >= 0",
            )  # fmt: skip
        samples = as_batch(samples) if not isinstance(samples, pa.Table) else samples
        rules = layout_of(samples.schema).rules
        batch = _planning_batch(samples, rules)
        scored = scored_tokens(batch)
        self.lengths, self.targets = np.diff(scored.offsets), np.diff(scored.bounds)
        self.has_target = self.targets > 0
        self.fits = self.lengths <= token_budget
        self.budget, self.ranks, self.tail = token_budget, ranks, tail
        if packing == "sequence":
            source = None
        else:
            keys = rules.keys(batch, scored.tokens, scored.offsets, within_group=within_group)
            source = Sorter(keys, scored.offsets, self.lengths, fork)
        self.planner = Planner(source, self.lengths, token_budget, ranks, max_repeat, carried)

    def plan(self) -> Plan:
        rows, left = self.planner.finish(self.tail)
        opened = left if self.tail == "open" else []
        lost = [row.samples for row in left] if self.tail == "drop" else []
        return Plan(
            rows=[np.sort(row.samples) for row in rows],
            unique_tokens=_each(rows, lambda row: row.unique_tokens),
            tokens=_each(rows, lambda row: row.lengths.sum()),
            targets=_each(rows, lambda row: self.targets[row.samples].sum()),
            load=_each(rows, lambda row: row.load),
            without_target=np.flatnonzero(~self.has_target),
            oversize=np.flatnonzero(self.has_target & ~self.fits),
            dropped=np.sort(np.concatenate([np.zeros(0, np.int64), *lost])),
            num_samples=len(self.lengths),
            token_budget=self.budget,
            ranks=self.ranks,
            open_rows=[np.sort(row.samples) for row in opened],
            open_load=_each(opened, lambda row: row.load),
        )


def _each(rows: list[PlannedRow], value: Callable[[PlannedRow], Any]) -> Int64:
    return np.array([value(row) for row in rows], np.int64)


def _sample_numbers(rows: Iterable[npt.ArrayLike], samples: int) -> list[Int64]:
    """Return the sample numbers of rows, each ascending."""
    try:
        found = [np.sort(np.asarray(row)) for row in rows]
    except (TypeError, ValueError):
        found = [np.zeros(1)]
    flat = np.concatenate([np.zeros(0, np.int64), *(row.reshape(-1) for row in found)])
    plain = all(row.ndim == 1 and (row.dtype.kind in "iu" or not len(row)) for row in found)
    if (
        not plain
        or not ((flat >= 0) & (flat < samples)).all()
        or len(set(flat.tolist())) < len(flat)
    ):
        raise PackingError(
            "rows are lists of sample numbers, each once", expected=f"0 <= number < {samples}",
            got=repr(rows)[:200], remedy="pass the open_rows of a plan, numbered anew",
        )  # fmt: skip
    return [row.astype(np.int64) for row in found]


def planning_columns(schema: RaggedSchema) -> list[str]:
    """Return the columns of profile ``sample`` that planning reads.

    Raises
    ------
    NotRaggedError
        It is no schema of this format (``RF-S001``).
    """
    if not isinstance(schema, RaggedSchema):
        schema = parse_schema(schema)
    return _planning_columns(schema.columns, ShareRules.of(schema))


def _planning_columns(names: Iterable[str], rules: ShareRules) -> list[str]:
    wanted = {"input_ids", "completion_mask"}
    wanted |= {column.name for column in (*rules.token_keys, *rules.record_keys, *rules.media)}
    if rules.group is not None:
        wanted.add(rules.group.name)
    return [name for name in names if name in wanted]


def _planning_batch(samples: pa.RecordBatch | pa.Table, rules: ShareRules) -> pa.RecordBatch:
    """Return the columns that planning reads, as one batch."""
    chosen = samples.select(_planning_columns(samples.schema.names, rules))
    if isinstance(chosen, pa.RecordBatch):
        return chosen
    batches = chosen.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=chosen.schema)
