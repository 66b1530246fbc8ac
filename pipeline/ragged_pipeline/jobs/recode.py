"""Compact and expand: the same records in the other encoding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ragged_format.arguments import check_size, parse_bytes
from ragged_pipeline.defaults import TASK_BYTES
from ragged_pipeline.job import Context, Job
from ragged_pipeline.plan import Plan, Stage, Task
from ragged_pipeline.runner import run

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_pipeline.inputs import RecordInputs
    from ragged_pipeline.runner import Result

__all__ = ["Compact", "Expand", "Recode", "compact", "expand"]


class Recode(Job):
    """The records of all inputs, in order, in the encoding of the subclass.

    Parameters
    ----------
    shard_bytes : int
        Input, uncompressed, that becomes one shard, about.
    """

    version = 1

    def __init__(self, *, shard_bytes: int = TASK_BYTES) -> None:
        check_size("shard_bytes", shard_bytes)
        self.shard_bytes = shard_bytes

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {"shard_bytes": self.shard_bytes}

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


class Compact(Recode):
    """The same records in the compact encoding."""

    name = "compact"
    encoding = "compact"


class Expand(Recode):
    """The same records uncompressed."""

    name = "expand"
    encoding = "hot"


def compact(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    shard_bytes: int | str = TASK_BYTES,
    **running: Any,
) -> Result:
    """Write the same records in the compact encoding, for storage and transfer; exact.

    Parameters
    ----------
    inputs : path or URL, or a sequence of them
        Datasets or files, of samples or of packed rows.
    out : path or URL
        Of the dataset.
    shard_bytes : int or str
        Input, uncompressed, that becomes one shard, about: "256MiB".
    **running
        As for :func:`ragged_pipeline.runner.run`: ``mode``, ``workers``, ``memory``, ``engine``,
        ``force``, ``on_duplicate``, ``progress``.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import ragged_format as rf
    >>> from ragged_format.testing import rollouts
    >>> samples = rollouts(np.random.default_rng(0), num_samples=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(f"{folder}/hot", samples.schema) as writer:
    ...         writer.write(samples)
    ...     before = sum(shard.bytes for shard in rf.Dataset(f"{folder}/hot").shards)
    ...     done = compact(f"{folder}/hot", f"{folder}/cold")
    >>> done.rows, done.bytes < before
    (64, True)
    """
    return run(Compact(shard_bytes=parse_bytes(shard_bytes)), inputs, out, **running)


def expand(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    shard_bytes: int | str = TASK_BYTES,
    **running: Any,
) -> Result:
    """Write the same records uncompressed, for memory mapping and random access; exact.

    Parameters as for :func:`compact`.
    """
    return run(Expand(shard_bytes=parse_bytes(shard_bytes)), inputs, out, **running)
