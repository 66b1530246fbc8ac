"""Merge and reshard: the same records in other shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ragged_format.arguments import check_size
from ragged_pipeline.batching import BATCH_ROWS
from ragged_pipeline.defaults import TASK_BYTES
from ragged_pipeline.job import Context, Job
from ragged_pipeline.plan import Plan, Stage, Task

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_pipeline.inputs import RecordInputs

__all__ = ["Merge"]


class Merge(Job):
    """The records of all inputs, one input after the other, in shards of even size.

    Parameters
    ----------
    shard_bytes : int
        Size of a shard, about, uncompressed.
    batch_rows : int
        Records of a stored batch, at most.
    """

    name = "merge"
    version = 1

    def __init__(self, *, shard_bytes: int = TASK_BYTES, batch_rows: int = BATCH_ROWS) -> None:
        check_size("shard_bytes", shard_bytes)
        check_size("batch_rows", batch_rows)
        self.shard_bytes = shard_bytes
        self.batch_rows = batch_rows

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {"batch_rows": self.batch_rows, "shard_bytes": self.shard_bytes}

    def plan(self, inputs: RecordInputs) -> Plan:
        """Return one stage: a task for each output shard."""
        runs, weights = inputs.tasks(self.shard_bytes)
        payloads = [{"pieces": [piece.to_json() for piece in run]} for run in runs]
        stage = Stage.of("write", payloads, weights)
        return Plan(
            self.name, self.version, self.options(), inputs.to_json(), inputs.schema, (stage,)
        )

    def produce(
        self, plan: Plan, stage: int, task: Task, context: Context
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of the task's pieces."""
        del plan, stage
        yield from context.inputs.batches(task.payload["pieces"], advance=context.advance)
