"""Jobs whose decision on a record depends on others: by key, out of core.

Stage "read": each task hashes the keys of its records and leaves them sorted by partition. Stage
"decide": each task takes one partition from all tasks before, in canonical order, and leaves its
verdicts, by task. Stage "write": each task reads its records again and applies the verdicts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ragged_format.lists import offsets_of
from ragged_pipeline.defaults import TASK_BYTES
from ragged_pipeline.job import Context, Job
from ragged_pipeline.plan import Plan, Stage, Task
from ragged_pipeline.rows import write_stage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow as pa

    from ragged_pipeline.inputs import RecordInputs

__all__ = ["Exchange", "Keys", "hashed"]

Keys: TypeAlias = npt.NDArray[Any]
# Records of one partition, about.
PARTITION_ROWS = 1 << 21
_KEYS, _ROWS, _BOUNDS, _VERDICTS = "keys.npy", "rows.npy", "bounds.npy", "verdicts.npy"


def hashed(values: Iterable[bytes | None], number: int) -> npt.NDArray[np.uint64]:
    """Return xxh3-128 of every value, (n, 2) uint64; all zero for ``None``."""
    digest = xxhash.xxh3_128_digest
    none = bytes(16)
    data = b"".join(none if value is None else digest(value) for value in values)
    return np.frombuffer(data, np.dtype(">u8")).reshape(number, 2).astype(np.uint64)


class Exchange(Job):
    """A job in three stages; implementations give keys, verdicts and what they do.

    Attributes
    ----------
    key_type : numpy.dtype
        Of a key: a structure whose field ``hash``, (2,) uint64, decides the partition.
    verdict_type : numpy.dtype
        Of a verdict.
    """

    key_type: np.dtype[Any]
    verdict_type: np.dtype[Any]
    shard_bytes: int = TASK_BYTES

    @abstractmethod
    def key_columns(self, inputs: RecordInputs) -> list[str] | None:
        """Return the columns that :meth:`keys` reads, ``None`` for all."""

    @abstractmethod
    def keys(self, batch: pa.RecordBatch, context: Context) -> Keys:
        """Return the key of every record, (n,) of `key_type`."""

    @abstractmethod
    def decide(self, keys: Keys, context: Context) -> npt.NDArray[Any]:
        """Return the verdict on every record of a partition, (n,) of `verdict_type`.

        Records come in canonical order; all records of one ``hash`` are there.
        """

    @abstractmethod
    def apply(
        self, batch: pa.RecordBatch, verdicts: npt.NDArray[Any], plan: Plan, context: Context
    ) -> pa.RecordBatch | None:
        """Return what becomes of a batch; ``None`` if nothing is left."""

    def prepare(self, inputs: RecordInputs) -> None:
        """Raise if the job does not fit its input."""

    def output_schema(self, inputs: RecordInputs) -> pa.Schema:
        """Return the schema of the output."""
        return inputs.schema

    def plan(self, inputs: RecordInputs) -> Plan:
        """Return the three stages."""
        self.prepare(inputs)
        write = write_stage(inputs, self.shard_bytes)
        partitions = max(1, -(-inputs.num_rows // PARTITION_ROWS))
        reading = [task.weight // 20 for task in write.tasks]
        read = Stage.of("read", [task.payload for task in write.tasks], reading)
        decide = Stage.of("decide", [{}] * partitions, [0] * partitions)
        return Plan(
            self.name, self.version, self.options(), inputs.to_json(), self.output_schema(inputs),
            (read, decide, write),
        )  # fmt: skip

    def produce(
        self, plan: Plan, stage: int, task: Task, context: Context
    ) -> Iterator[pa.RecordBatch]:
        """Do one task of one of the three stages."""
        if stage == 0:
            self._read(plan, task, context)
        elif stage == 1:
            self._decide(plan, task, context)
        else:
            yield from self._write(plan, task, context)

    def _read(self, plan: Plan, task: Task, context: Context) -> None:
        inputs: RecordInputs = context.inputs
        batches = inputs.batches(task.payload["pieces"], columns=self.key_columns(inputs))
        found = [self.keys(batch, context) for batch in batches]
        keys = np.concatenate([np.zeros(0, self.key_type), *found])
        partitions = len(plan.stages[1].tasks)
        of_partition = (keys["hash"][:, 0] % np.uint64(partitions)).astype(np.int64)
        rows = np.argsort(of_partition, kind="stable")
        _save(context.spill, keys[rows], np.bincount(of_partition, minlength=partitions), _KEYS)
        np.save(context.spill / _ROWS, rows)

    def _decide(self, plan: Plan, task: Task, context: Context) -> None:
        parts = [
            _share(context.spilled(0, reader.index), _KEYS, task.index)
            for reader in plan.stages[0].tasks
        ]
        keys = np.concatenate([np.zeros(0, self.key_type), *parts])
        verdicts = self.decide(keys, context).astype(self.verdict_type, copy=False)
        _save(context.spill, verdicts, np.array([len(part) for part in parts], np.int64), _VERDICTS)

    def _write(self, plan: Plan, task: Task, context: Context) -> Iterator[pa.RecordBatch]:
        rows = np.load(context.spilled(0, task.index) / _ROWS, mmap_mode="r")
        verdicts = np.zeros(len(rows), self.verdict_type)
        shares = [
            _share(context.spilled(1, decider.index), _VERDICTS, task.index)
            for decider in plan.stages[1].tasks
        ]
        verdicts[rows] = np.concatenate([np.zeros(0, self.verdict_type), *shares])
        start = 0
        for batch in context.inputs.batches(task.payload["pieces"], advance=context.advance):
            stop = start + batch.num_rows
            done = self.apply(batch, verdicts[start:stop], plan, context)
            start = stop
            if done is not None:
                yield done


def _save(folder: Path, values: npt.NDArray[Any], counts: npt.NDArray[Any], name: str) -> None:
    np.save(folder / name, values)
    np.save(folder / _BOUNDS, offsets_of(counts.astype(np.int64)))


def _share(folder: Path, name: str, index: int) -> npt.NDArray[Any]:
    """Return one share of a file that :func:`_save` wrote; a view of the mapped file."""
    bounds = np.load(folder / _BOUNDS, mmap_mode="r")
    values = np.load(folder / name, mmap_mode="r")
    share: npt.NDArray[Any] = values[int(bounds[index]) : int(bounds[index + 1])]
    return share
