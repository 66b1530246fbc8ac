"""Pack: samples become training rows, in steps of even load for all ranks.

Windows of consecutive records are planned and packed each by itself. Rows that make no whole step
in their window wait in the work directory; those of all windows are dealt together, so that only
the end of the data pays for the number of ranks. Windows depend on the inputs and on the options,
and so does everything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ragged_format.arguments import check_size, parse_bytes, shown
from ragged_format.decoding import Projection
from ragged_format.errors import PackingError, SchemaMismatchError, Where
from ragged_format.lists import Int64, flat, offsets_of
from ragged_format.packing import PackReport, deal_rows, pack_row, plan_rows, planning_columns
from ragged_format.packing.pack import check_choice
from ragged_format.packing.plan import MAX_RANKS
from ragged_format.parse import parse_schema
from ragged_format.profiles import REQUIRED, packed_from_sample
from ragged_pipeline.defaults import TASK_BYTES
from ragged_pipeline.job import Context, Job, write_shard
from ragged_pipeline.plan import Plan, Stage, Task
from ragged_pipeline.records import FileRecords, Records
from ragged_pipeline.runner import run

if TYPE_CHECKING:
    from ragged_format.packing import Plan as RowPlan
    from ragged_format.packing.forest import Fork
    from ragged_format.packing.pack import NullAdvantage, Packing
    from ragged_format.packing.planner import Tail
    from ragged_pipeline.inputs import RecordInputs
    from ragged_pipeline.runner import Result

__all__ = ["Pack", "pack_dataset"]

# Windows for which one task packs the rows that they left open.
OPEN_WINDOWS = 4
# Tokens of open rows that are dealt at a time.
DEAL_TOKENS = 1 << 24


class Pack(Job):
    """Training rows of at most so many tokens, in steps of one row per rank.

    Parameters
    ----------
    packing, fork, within_group, null_advantage
        As for :func:`ragged_format.packing.pack_row`.
    token_budget, ranks, window, tail
        As for :func:`ragged_format.packing.plan_rows`; `tail` is "keep" or "drop".
    shard_bytes : int
        Bytes of samples, uncompressed, that are planned and packed by one task, about.
    """

    name = "pack"
    version = 2
    validation = "full"
    task_memory = 900 << 20

    def __init__(
        self,
        *,
        packing: Packing = "tree",
        fork: Fork = "token",
        token_budget: int = 16384,
        ranks: int = 1,
        window: int = 4096,
        within_group: bool = False,
        null_advantage: NullAdvantage = "error",
        tail: Tail = "keep",
        shard_bytes: int = TASK_BYTES,
    ) -> None:
        check_choice("packing", packing)
        check_choice("fork", fork)
        check_choice("null_advantage", null_advantage)
        if tail not in ("keep", "drop"):
            raise PackingError(
                "tail has no such choice", expected="'keep' or 'drop'", got=shown(tail),
                remedy="pass 'keep' or 'drop'",
            )  # fmt: skip
        for name, size in (("token_budget", token_budget), ("window", window)):
            check_size(name, size)
        check_size("ranks", ranks, MAX_RANKS + 1)
        check_size("shard_bytes", shard_bytes)
        self.packing, self.fork, self.tail = packing, fork, tail
        self.token_budget, self.ranks, self.window = token_budget, ranks, window
        self.within_group, self.null_advantage = within_group, null_advantage
        self.shard_bytes = shard_bytes

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {
            "packing": self.packing, "fork": self.fork, "token_budget": self.token_budget,
            "ranks": self.ranks, "window": self.window, "within_group": self.within_group,
            "null_advantage": self.null_advantage, "tail": self.tail,
            "shard_bytes": self.shard_bytes,
        }  # fmt: skip

    def plan(self, inputs: RecordInputs) -> Plan:
        """Return the windows, and the tasks for rows that they leave open."""
        if inputs.ragged.profile != "sample":
            raise SchemaMismatchError(
                "only samples can be packed", code="RF-S002",
                where=Where(file=inputs.inputs[0].place), expected="profile 'sample'",
                got=f"profile {inputs.ragged.profile!r}",
            )  # fmt: skip
        runs, weights = inputs.tasks(self.shard_bytes)
        windows = [{"pieces": [piece.to_json() for piece in run]} for run in runs]
        if len(windows) < 2 or self.ranks == 1:
            stages: tuple[Stage, ...] = (Stage.of("pack", windows, weights),)
        else:
            ends = -(-len(windows) // OPEN_WINDOWS)
            payloads = [{"window": n, **window} for n, window in enumerate(windows)]
            payloads += [{"part": n, "parts": ends} for n in range(ends)]
            stages = (
                Stage.of("plan", windows, [weight // 8 for weight in weights]),
                Stage.of("deal", [{"windows": len(windows)}], [0]),
                Stage.of("pack", payloads, [*weights, *[0] * ends]),
            )
        schema = packed_from_sample(inputs.ragged).to_arrow()
        return Plan(self.name, self.version, self.options(), inputs.to_json(), schema, stages)

    def produce(
        self, plan: Plan, stage: int, task: Task, context: Context
    ) -> Iterator[pa.RecordBatch]:
        """Plan a window, deal what windows left open, or pack rows."""
        payload = task.payload
        name = plan.stages[stage].name
        if name == "plan":
            self._plan_window(payload, context)
        elif name == "deal":
            self._deal(int(payload["windows"]), context)
        elif len(plan.stages) == 1:
            records = _window(payload, context)
            rows = self._planned(records, self.tail)
            context.figures |= _left_out(rows)
            yield from self._pack(_Steps.of(rows), records, context, task.weight)
        elif "window" in payload:
            steps = _Steps.read(context.spilled(0, payload["window"]))
            yield from self._pack(steps, _window(payload, context), context, task.weight)
        else:
            dealt = context.spilled(1, 0)
            steps = _Steps.read(dealt).part(self.ranks, payload["part"], payload["parts"])
            opened = _opened(context, int(plan.stages[1].tasks[0].payload["windows"]))
            yield from self._pack(steps, opened, context, 0)

    def _planned(self, records: Records, tail: Tail) -> RowPlan:
        table = records.table(_columns(records.schema))
        return plan_rows(
            table, self.token_budget, self.ranks, packing=self.packing, fork=self.fork,
            within_group=self.within_group, window=self.window, tail=tail,
        )  # fmt: skip

    def _plan_window(self, payload: Any, context: Context) -> None:
        records = _window(payload, context)
        rows = self._planned(records, "open")
        _Steps.of(rows).save(context.spill)
        opened = [records.take(row) for row in rows.open_rows]
        np.save(context.spill / "open.npy", np.array([part.num_rows for part in opened], np.int64))
        tokens = [len(flat(part.column("input_ids")).values) for part in opened]
        np.save(context.spill / "open_tokens.npy", np.array(tokens, np.int64))
        np.save(context.spill / "open_load.npy", rows.open_load)
        write_shard(context.spill / "open.arrow", records.schema, opened, validate="off")
        context.figures |= _left_out(rows)

    def _deal(self, windows: int, context: Context) -> None:
        """Deal the open rows of all windows, those of like load together."""
        sizes, tokens, load = (
            np.concatenate([np.load(context.spilled(0, w) / f"{name}.npy") for w in range(windows)])
            for name in ("open", "open_tokens", "open_load")
        )
        records = _opened(context, windows, narrow=True)
        bounds = offsets_of(sizes)
        rows = [np.arange(*pair) for pair in pairwise(bounds.tolist())]
        order = np.argsort(-load, kind="stable").tolist()
        made: list[_Steps] = []
        dropped = missing = 0
        for numbers, last in _chunks([rows[i] for i in order], tokens[order], self.ranks):
            held = np.concatenate([np.zeros(0, np.int64), *numbers])
            cuts = offsets_of(np.array([len(row) for row in numbers], np.int64))
            part = deal_rows(
                pa.Table.from_batches([records.take(held)]),
                [np.arange(*pair) for pair in pairwise(cuts.tolist())],
                self.token_budget, self.ranks, packing=self.packing, fork=self.fork,
                within_group=self.within_group, tail=self.tail if last else "keep",
            )  # fmt: skip
            made.append(_Steps([held[row] for row in part.rows], part.load))
            dropped += len(part.dropped)
            missing += part.missing_rows
        _Steps.joined(made).save(context.spill)
        context.figures |= {"dropped": dropped, "missing_rows": missing}

    def _pack(
        self, steps: _Steps, records: Records | FileRecords, context: Context, weight: int
    ) -> Iterator[pa.RecordBatch]:
        report = PackReport()
        for row in steps.rows:
            yield pack_row(
                records.take(row), self.packing, self.fork, within_group=self.within_group,
                null_advantage=self.null_advantage, report=report,
            )  # fmt: skip
            context.advance(weight * len(row) // max(len(records), 1))
        counts = report.to_dict()
        del counts["samples"], counts["without_target"], counts["packing_ratio"]
        missing = np.zeros(-len(steps.load) % self.ranks, np.int64)
        loads = np.append(steps.load, missing).reshape(-1, self.ranks)
        context.figures |= {
            **counts, "planned": counts.pop("kept"), "steps": len(loads),
            "load": int(loads.sum()), "slowest_load": int(loads.max(axis=1, initial=0).sum()),
        }  # fmt: skip

    def finish(self, plan: Plan, figures: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return sums over all windows, and the ratios that follow from them."""
        sums = super().finish(plan, [[part for stage in figures for part in stage]])
        names = (
            "samples", "planned", "without_target", "oversize", "dropped", "rows", "steps",
            "missing_rows", "tokens", "unique_tokens", "targets", "load", "slowest_load",
            "null_advantages",
        )  # fmt: skip
        out = {name: sums.get(name, 0) for name in names}
        out["conflicts"] = sums.get("conflicts", {})
        return out | {
            "packing_ratio": round(out["tokens"] / out["unique_tokens"], 4)
            if out["unique_tokens"] else 1.0,
            "fill": round(out["unique_tokens"] / max(out["rows"] * self.token_budget, 1), 4),
            "imbalance": round(out["slowest_load"] * self.ranks / out["load"], 4)
            if out["load"] else 1.0,
        }  # fmt: skip


def _window(payload: Any, context: Context) -> Records:
    inputs: RecordInputs = context.inputs
    return Records(inputs.batches(payload["pieces"]), inputs.schema)


def _opened(context: Context, windows: int, *, narrow: bool = False) -> FileRecords:
    """Return the records of the rows that windows left open."""
    folders = [context.spilled(0, window) for window in range(windows)]
    counts = [int(np.load(folder / "open.npy").sum()) for folder in folders]
    paths = [folder / "open.arrow" for folder in folders]
    inputs: RecordInputs = context.inputs
    if not narrow:
        return FileRecords(paths, counts, inputs.schema)
    columns = _columns(inputs.schema)
    schema = Projection(inputs.ragged, inputs.schema, columns).schema
    return FileRecords(paths, counts, schema, columns)


def _columns(schema: pa.Schema) -> list[str]:
    known = parse_schema(schema)
    wanted = {*REQUIRED[known.profile], *planning_columns(known)}
    return [name for name in schema.names if name in wanted]


def _left_out(plan: RowPlan) -> dict[str, int]:
    return {
        "samples": plan.num_samples, "without_target": len(plan.without_target),
        "oversize": len(plan.oversize), "dropped": len(plan.dropped),
        "missing_rows": 0 if plan.open_rows else plan.missing_rows,
    }  # fmt: skip


def _chunks(rows: list[Int64], tokens: Int64, ranks: int) -> Iterator[tuple[list[Int64], bool]]:
    """Yield rows in whole steps of about `DEAL_TOKENS` tokens, the rest with the last of them."""
    held: list[Int64] = []
    size = 0
    for number, row in enumerate(rows, 1):
        held.append(row)
        size += int(tokens[number - 1])
        if len(held) % ranks == 0 and size >= DEAL_TOKENS and len(rows) - number >= ranks:
            yield held, False
            held, size = [], 0
    if held:
        yield held, True


def pack_dataset(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    token_budget: int = 16384,
    ranks: int = 1,
    packing: Packing = "tree",
    fork: Fork = "token",
    window: int = 4096,
    within_group: bool = False,
    null_advantage: NullAdvantage = "error",
    tail: Tail = "keep",
    shard_bytes: int | str = TASK_BYTES,
    **running: Any,
) -> Result:
    """Pack samples into training rows, in steps of one row per rank.

    Parameters
    ----------
    inputs : path or URL, or a sequence of them
        Datasets or files of samples.
    out : path or URL
        Of the dataset of rows. Row ``step * ranks + rank`` belongs to `rank`.
    token_budget, ranks, packing, fork, window, within_group, tail
        As for :func:`ragged_format.packing.plan_rows`.
    null_advantage : {"error", "keep"}
        As for :func:`ragged_format.packing.pack_row`.
    shard_bytes : int or str
        Samples that are packed together and become one shard, about: "256MiB".
    **running
        As for :func:`ragged_pipeline.runner.run`: ``mode``, ``workers``, ``memory``, ``engine``,
        ``force``, ``progress``.

    Returns
    -------
    Result
        Its figures are sums over all rows, what was left out by reason, ``packing_ratio``,
        ``fill`` and ``imbalance``.

    Raises
    ------
    PackingError
        An unknown choice, a null advantage, or groups that are missing (``RF-P001``).
    SchemaMismatchError
        The input does not hold samples (``RF-S002``).

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import ragged_format as rf
    >>> from ragged_format.testing import rollouts
    >>> samples = rollouts(np.random.default_rng(0), num_samples=32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(f"{folder}/samples", samples.schema) as writer:
    ...         writer.write(samples)
    ...     done = pack_dataset(f"{folder}/samples", f"{folder}/rows", token_budget=2048, ranks=2)
    >>> done.figures["samples"], done.figures["planned"], done.rows % 2
    (32, 32, 0)
    """
    job = Pack(
        packing=packing, fork=fork, token_budget=token_budget, ranks=ranks, window=window,
        within_group=within_group, null_advantage=null_advantage, tail=tail,
        shard_bytes=parse_bytes(shard_bytes),
    )  # fmt: skip
    return run(job, inputs, out, **running)


class _Steps(NamedTuple):
    """Rows in step order: record numbers of each, and the load of each."""

    rows: list[Int64]
    load: Int64

    @classmethod
    def of(cls, plan: RowPlan) -> _Steps:
        return cls(plan.rows, plan.load)

    @classmethod
    def joined(cls, parts: list[_Steps]) -> _Steps:
        rows = [row for part in parts for row in part.rows]
        return cls(rows, np.concatenate([np.zeros(0, np.int64), *(p.load for p in parts)]))

    def part(self, ranks: int, number: int, parts: int) -> _Steps:
        steps = -(-len(self.rows) // ranks)
        chosen = slice(steps * number // parts * ranks, steps * (number + 1) // parts * ranks)
        return _Steps(self.rows[chosen], self.load[chosen])

    def save(self, folder: Path) -> None:
        np.save(folder / "members.npy", np.concatenate([np.zeros(0, np.int64), *self.rows]))
        np.save(folder / "sizes.npy", np.array([len(row) for row in self.rows], np.int64))
        np.save(folder / "load.npy", self.load)

    @classmethod
    def read(cls, folder: Path) -> _Steps:
        members, sizes = np.load(folder / "members.npy"), np.load(folder / "sizes.npy")
        rows = np.split(members, np.cumsum(sizes)[:-1]) if len(sizes) else []
        return cls(rows, np.load(folder / "load.npy"))
