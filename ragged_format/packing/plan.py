"""Planning which samples make which row, for all ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.canonical import as_batch
from ragged_format.errors import PackingError
from ragged_format.lists import ranges
from ragged_format.packing.bins import (
    FULL,
    Row,
    Window,
    clusters,
    even_out,
    fill_gaps,
    form_rows,
    spread,
)
from ragged_format.packing.deal import PlannedRow, deal, grouped, split_heaviest
from ragged_format.packing.exchange import even_steps
from ragged_format.packing.forest import Fork, Keys, common_prefixes
from ragged_format.packing.layout import layout_of
from ragged_format.packing.pack import Packing, check_choice, scored_tokens

if TYPE_CHECKING:
    from ragged_format.lists import Int64
    from ragged_format.packing.sharing import ShareRules

__all__ = ["Plan", "plan_rows"]

Tail = Literal["keep", "drop"]
# An unfilled row of more samples than so many windows (of at least 4096 samples each) have is
# not planned again: the cost of each window would be that of many.
CARRIED = 1
# Rows of the last steps that are taken apart to make even ones with the rows left over.
MOST_TAIL = 512


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows for every rank, and what became of every sample.

    Each sample number is in exactly one of `rows`, `without_target`, `oversize` and `dropped`.

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
    tail : {"keep", "drop"}
        What to do with rows that make no whole step at the end: split rows so that they do (where
        there are too few samples for that the last step is short: ``missing_rows``), or leave them
        out (``dropped``).

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
    check_choice("packing", packing)
    check_choice("fork", fork)
    check_choice("tail", tail)
    for name, value in (("token_budget", token_budget), ("ranks", ranks), ("window", window)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise PackingError(f"{name} is a positive integer", expected=">= 1", got=value)
    if not max_repeat >= 0:
        raise PackingError("max_repeat is not negative", expected=">= 0", got=max_repeat)
    samples = as_batch(samples) if not isinstance(samples, pa.Table) else samples
    rules = layout_of(samples.schema).rules
    batch = _planning_columns(samples, rules)
    scored = scored_tokens(batch)
    lengths, targets = np.diff(scored.offsets), np.diff(scored.bounds)
    has_target = targets > 0
    fits = lengths <= token_budget
    if packing == "sequence":
        source = None
    else:
        keys = rules.keys(batch, scored.tokens, scored.offsets, within_group=within_group)
        source = _Sorter(keys, scored.offsets, lengths, fork)
    carried = CARRIED * max(window, 4096)
    planner = _Planner(source, lengths, token_budget, ranks, max_repeat, carried)
    planned = np.flatnonzero(has_target & fits)
    # Windows of equal size: a small last one would give rows that are hard to fill.
    windows = np.array_split(planned, -(-len(planned) // window)) if len(planned) else []
    for number, chosen in enumerate(windows, 1):
        planner.add(chosen, last=number == len(windows))
    rows, dropped = planner.finish(tail)
    return Plan(
        rows=[np.sort(row.samples) for row in rows],
        unique_tokens=np.array([row.unique_tokens for row in rows], np.int64),
        tokens=np.array([row.lengths.sum() for row in rows], np.int64),
        targets=np.array([targets[row.samples].sum() for row in rows], np.int64),
        load=np.array([row.load for row in rows], np.int64),
        without_target=np.flatnonzero(~has_target),
        oversize=np.flatnonzero(has_target & ~fits),
        dropped=np.sort(np.concatenate([np.zeros(0, np.int64), *(r.samples for r in dropped)])),
        num_samples=batch.num_rows,
        token_budget=token_budget,
        ranks=ranks,
    )


def _planning_columns(samples: pa.RecordBatch | pa.Table, rules: ShareRules) -> pa.RecordBatch:
    """Return the columns that planning reads, as one batch."""
    names = {"input_ids", "completion_mask"}
    names |= {column.name for column in (*rules.token_keys, *rules.record_keys, *rules.media)}
    if rules.group is not None:
        names.add(rules.group.name)
    chosen = samples.select([name for name in samples.schema.names if name in names])
    if isinstance(chosen, pa.RecordBatch):
        return chosen
    batches = chosen.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=chosen.schema)


class _Sorter:
    """Sorts samples by prefix."""

    def __init__(self, keys: Keys, offsets: Int64, lengths: Int64, fork: Fork) -> None:
        self.keys, self.offsets, self.lengths, self.fork = keys, offsets, lengths, fork

    def __call__(self, samples: Int64) -> tuple[Int64, Int64]:
        parts = self.keys.parts
        keys = Keys(
            self.keys.tokens,
            self.keys.compared,
            None if parts is None else [parts[i] for i in samples.tolist()],
        )
        order, shared = common_prefixes(
            keys, self.offsets[samples].tolist(), self.lengths[samples].tolist(), self.fork
        )
        return samples[np.array(order, np.int64)], np.array(shared, np.int64)


class _Planner:
    """Forms rows window by window and groups them into steps."""

    def __init__(
        self,
        sort: _Sorter | None,
        lengths: Int64,
        budget: int,
        ranks: int,
        max_repeat: float,
        most_carried: int,
    ) -> None:
        self.sort, self.lengths, self.budget, self.ranks = sort, lengths, budget, ranks
        self.max_repeat, self.most_carried = max_repeat, most_carried
        self.rows: list[PlannedRow] = []
        self.carried = np.zeros(0, np.int64)

    def add(self, samples: Int64, *, last: bool) -> None:
        """Plan one window; all of its rows are there after the last."""
        rows = self.form(np.sort(np.concatenate([self.carried, samples])))
        if not last:
            emptiest = min(rows, key=lambda row: (row.unique_tokens, row.first))
            few = len(emptiest.samples) <= self.most_carried
            if few and emptiest.unique_tokens < FULL * self.budget:
                rows = [row for row in rows if row is not emptiest]
                self.carried = emptiest.samples
            else:
                self.carried = np.zeros(0, np.int64)
        self.rows += rows

    def sorted(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return samples in prefix order, and what each shares with the one before."""
        if self.sort is None:
            return samples, np.zeros(len(samples), np.int64)
        return self.sort(samples)

    def window(self, samples: Int64) -> tuple[Int64, Window]:
        """Return samples in prefix order, and the window they make."""
        order, shared = self.sorted(samples)
        return order, Window(self.lengths[order], shared)

    def form(self, samples: Int64) -> list[PlannedRow]:
        """Return the rows of one window."""
        order, window = self.window(samples)
        rows = form_rows(window, self.budget)
        rows = fill_gaps(window, rows, self.budget, max_repeat=self.max_repeat)
        rows = even_out(window, rows, self.budget, max_repeat=self.max_repeat)
        return _planned(order, window, rows)

    def finish(self, tail: Tail) -> tuple[list[PlannedRow], list[PlannedRow]]:
        """Return all rows, step by step, and those that are left out."""
        steps, left = self.even_steps(self.rows)
        if tail == "keep" and left:
            steps, left = self.with_tail(steps, left), []
        return [row for step in deal(steps, self.ranks) for row in step], left

    def even_steps(self, rows: list[PlannedRow]) -> tuple[list[list[PlannedRow]], list[PlannedRow]]:
        """Return rows in steps of even load, the heaviest first, and the rows left over."""
        steps, left = grouped(rows, self.ranks)
        even_steps(steps, self.window, self.budget)
        return steps, left

    def with_tail(
        self, steps: list[list[PlannedRow]], left: list[PlannedRow]
    ) -> list[list[PlannedRow]]:
        """Return steps that hold the rows left over too.

        The last steps are taken apart with them: as many as are needed for one sample per row, and
        more where that takes time from the whole.
        """
        taken = 0
        while taken < len(steps) and _spare_samples(left) < -len(left) % self.ranks:
            taken += 1
            left = [*left, *steps[-taken]]
        best = self.tail_steps(left)
        sizes = [taken or 1]
        while sizes[-1] < len(steps) and sizes[-1] * self.ranks < MOST_TAIL:
            sizes.append(min(2 * sizes[-1], len(steps)))
        for more in sizes[taken > 0 :]:
            between = steps[len(steps) - more : len(steps) - taken]
            wider = [*left, *(row for step in between for row in step)]
            other = self.tail_steps(wider)
            if sum(map(_slowest, other)) < sum(map(_slowest, [*between, *best])):
                taken, left, best = more, wider, other
        return steps[: len(steps) - taken] + best

    def tail_steps(self, pool: list[PlannedRow]) -> list[list[PlannedRow]]:
        """Return rows as whole steps; the last is short where samples do not suffice."""
        steps, short = self.even_steps(self.even_tail(pool))
        return [*steps, *([short] if short else [])]

    def even_tail(self, pool: list[PlannedRow]) -> list[PlannedRow]:
        """Make of rows a multiple of the ranks, or one per sample where samples do not suffice."""
        count = min(len(pool) + -len(pool) % self.ranks, len(pool) + _spare_samples(pool))
        order, window = self.window(np.sort(np.concatenate([row.samples for row in pool])))
        everything = [Row(0, [(0, len(order))])]
        joined = _planned(order, window, everything)[0]
        ways = [split_heaviest(pool, count)]
        # Cutting all samples anew is more even, unless loads and tokens disagree too much to fit.
        ways.append(joined.split(count))
        runs = clusters(window, self.budget, joined.load / count)
        ways.append(_planned(order, window, spread(window, runs, count, self.budget, share=1.0)))
        fitting = [
            rows
            for rows in ways
            if len(rows) == count and max(row.unique_tokens for row in rows) <= self.budget
        ]
        return min(fitting, key=lambda rows: sorted((row.load for row in rows), reverse=True))


def _slowest(step: list[PlannedRow]) -> int:
    return max(row.load for row in step)


def _planned(order: Int64, window: Window, rows: list[Row]) -> list[PlannedRow]:
    runs = np.array([run for row in rows for run in sorted(row.runs)], np.int64).reshape(-1, 2)
    held = ranges(runs[:, 0], runs[:, 1] - runs[:, 0])
    ends = np.cumsum([sum(end - first for first, end in row.runs) for row in rows])
    common = np.zeros(len(held), np.int64)
    common[1:] = window.common(held[:-1], held[1:])
    common[ends[:-1]] = 0
    samples, lengths = order[held], window.lengths[held]
    parts = [slice(*bounds) for bounds in pairwise([0, *ends.tolist()])]
    return [PlannedRow(samples[part], lengths[part], common[part]) for part in parts]


def _spare_samples(rows: list[PlannedRow]) -> int:
    """Return how many rows more these could be."""
    return sum(len(row.samples) - 1 for row in rows)
