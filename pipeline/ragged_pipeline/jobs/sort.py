"""Sort: all records in the order of some columns, out of core.

Stage "read": each task leaves the keys of its records. Stage "order": one task sorts all keys; they
are held in memory, about 50 bytes a record, the records are not. Stages "scatter" and "write" are
those of a shuffle, whose random numbers are the places in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.arguments import check_size
from ragged_format.errors import JobError
from ragged_format.lists import offsets_of
from ragged_pipeline.batching import BATCH_ROWS
from ragged_pipeline.defaults import TASK_BYTES
from ragged_pipeline.job import Context, Job
from ragged_pipeline.jobs.shuffle import gathered, in_order, scatter
from ragged_pipeline.optional import require_polars
from ragged_pipeline.plan import Plan, Stage, Task
from ragged_pipeline.records import Records

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_pipeline.inputs import RecordInputs

__all__ = ["Sort"]

_KEYS, _RANKS = "keys.arrow", "ranks.npy"


class Sort(Job):
    """The records of all inputs in the order of some columns.

    Records that are equal in all of them stay in the order of the inputs; nulls come last.

    Parameters
    ----------
    by : sequence of str
        Record columns, or lengths as ``token_length``; earlier ones count first.
    descending : bool
        The largest first.
    shard_bytes : int
        Size of a shard, about, uncompressed.
    batch_rows : int
        Records of a stored batch, at most.
    """

    name = "sort"
    version = 1
    task_memory = 700 << 20

    def __init__(
        self,
        *,
        by: Sequence[str],
        descending: bool = False,
        shard_bytes: int = TASK_BYTES,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        check_size("shard_bytes", shard_bytes)
        check_size("batch_rows", batch_rows)
        if isinstance(by, str) or not by:
            raise JobError(
                "a sort has columns", expected="a list of names", got=repr(by),
                remedy="name at least one column",
            )  # fmt: skip
        require_polars("sorted datasets")
        self.by, self.descending = list(by), bool(descending)
        self.shard_bytes, self.batch_rows = shard_bytes, batch_rows

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {
            "by": self.by, "descending": self.descending, "shard_bytes": self.shard_bytes,
            "batch_rows": self.batch_rows,
        }  # fmt: skip

    def plan(self, inputs: RecordInputs) -> Plan:
        """Return the four stages."""
        from ragged_pipeline.frames import frame_schema

        known = frame_schema(inputs.ragged)
        if lacking := [name for name in self.by if name not in known]:
            raise JobError(
                "the input has no such column to sort by", expected=", ".join(known),
                got=", ".join(lacking),
            )  # fmt: skip
        runs, weights = inputs.tasks(self.shard_bytes)
        payloads = [{"pieces": [piece.to_json() for piece in run]} for run in runs]
        share = sum(weights) // max(len(weights), 1)
        stages = (
            Stage.of("read", payloads, [weight // 20 for weight in weights]),
            Stage.of("order", [{}] if runs else [], [0] if runs else []),
            Stage.of("scatter", payloads, weights),
            Stage.of("write", [{"bucket": n} for n in range(len(runs))], [share] * len(runs)),
        )
        return Plan(
            self.name, self.version, self.options(), inputs.to_json(), inputs.schema, stages
        )

    def produce(
        self, plan: Plan, stage: int, task: Task, context: Context
    ) -> Iterator[pa.RecordBatch]:
        """Do one task of one of the four stages."""
        if stage == 0:
            self._read(task, context)
        elif stage == 1:
            self._order(plan, context)
        elif stage == 2:
            self._scatter(plan, task, context)
        else:
            tasks = len(plan.stages[2].tasks)
            records, keys = gathered(context, 2, tasks, task.payload["bucket"])
            yield from in_order(records, np.argsort(keys, kind="stable"), context, task.weight)

    def _read(self, task: Task, context: Context) -> None:
        import polars as pl

        from ragged_pipeline.frames import columns_for, to_frame

        inputs: RecordInputs = context.inputs
        columns = columns_for(inputs.ragged, self.by)
        batches = inputs.batches(task.payload["pieces"], columns=columns)
        frames = [to_frame(batch, inputs.ragged, self.by) for batch in batches]
        pl.concat(frames).write_ipc(context.spill / _KEYS)

    def _order(self, plan: Plan, context: Context) -> None:
        """Save the place of every record in the order, by task."""
        import polars as pl

        frames = [
            pl.read_ipc(context.spilled(0, task.index) / _KEYS) for task in plan.stages[0].tasks
        ]
        rows = offsets_of(np.array([frame.height for frame in frames], np.int64))
        order = (
            pl.concat(frames).with_row_index("place of the record")
            .sort(self.by, descending=self.descending, nulls_last=True, maintain_order=True)
            .get_column("place of the record").to_numpy()
        )  # fmt: skip
        ranks = np.empty(len(order), np.uint64)
        ranks[order] = np.arange(len(order), dtype=np.uint64)
        np.save(context.spill / _RANKS, ranks)
        np.save(context.spill / "bounds.npy", rows)

    def _scatter(self, plan: Plan, task: Task, context: Context) -> None:
        folder = context.spilled(1, 0)
        start, stop = np.load(folder / "bounds.npy")[task.index : task.index + 2].tolist()
        ranks = np.load(folder / _RANKS, mmap_mode="r")
        # Spread over the whole range of keys, of which buckets are equal parts.
        step = (1 << 64) // max(len(ranks), 1) if len(ranks) > 1 else 1
        keys = ranks[start:stop] * np.uint64(step)
        inputs: RecordInputs = context.inputs
        records = Records(inputs.batches(task.payload["pieces"]), inputs.schema)
        order = np.argsort(keys, kind="stable")
        scatter(records, keys, order, len(plan.stages[3].tasks), task.weight, context)
