"""Jobs that keep some of the records: one stage, one shard for each run of the input."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ragged_format.ragged import concat
from ragged_pipeline.defaults import TASK_BYTES
from ragged_pipeline.job import Context, Job
from ragged_pipeline.plan import Plan, Stage, Task

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_pipeline.inputs import RecordInputs

__all__ = ["Mask", "RowJob", "kept_rows", "write_stage"]

Mask: TypeAlias = npt.NDArray[np.bool_]


def write_stage(inputs: RecordInputs, shard_bytes: int = TASK_BYTES, name: str = "write") -> Stage:
    """Return a stage with a task for each run of about so many bytes of the input."""
    runs, weights = inputs.tasks(shard_bytes)
    return Stage.of(name, [{"pieces": [piece.to_json() for piece in run]} for run in runs], weights)


def kept_rows(batch: pa.RecordBatch, keep: Mask) -> pa.RecordBatch | None:
    """Return the records of a batch where `keep` is true, ``None`` if there is none.

    Runs of consecutive records are copied at once; a batch that is kept whole is not copied.
    """
    if keep.all():
        return batch if batch.num_rows else None
    edges = np.flatnonzero(np.diff(keep.astype(np.int8), prepend=0, append=0))
    if not len(edges):
        return None
    runs = edges.reshape(-1, 2).tolist()
    return concat([batch.slice(start, stop - start) for start, stop in runs])


class RowJob(Job):
    """A job that keeps the records for which :meth:`keep` is true, in order."""

    shard_bytes: int = TASK_BYTES

    def prepare(self, inputs: RecordInputs) -> None:
        """Raise if the job does not fit its input."""

    def plan(self, inputs: RecordInputs) -> Plan:
        """Return one stage: a task for each output shard."""
        self.prepare(inputs)
        return Plan(
            self.name, self.version, self.options(), inputs.to_json(), inputs.schema,
            (write_stage(inputs, self.shard_bytes),),
        )  # fmt: skip

    @abstractmethod
    def keep(self, batch: pa.RecordBatch, context: Context) -> Mask:
        """Return which records to keep, (n,) bool; counts the others in ``context.figures``."""

    def produce(
        self, plan: Plan, stage: int, task: Task, context: Context
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of the task's pieces that are kept."""
        del plan, stage
        for batch in context.inputs.batches(task.payload["pieces"], advance=context.advance):
            found = kept_rows(batch, self.keep(batch, context))
            if found is not None:
                yield found


def count(figures: dict[str, Any], reason: str, number: int) -> None:
    """Count dropped records by reason."""
    if number:
        dropped = figures.setdefault("dropped", {})
        dropped[reason] = dropped.get(reason, 0) + int(number)
