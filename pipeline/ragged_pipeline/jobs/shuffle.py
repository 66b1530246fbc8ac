"""Shuffle: all records in a random order that the seed fixes, out of core.

A record's key is a random number that follows from the seed and from its place in the input (or
from its group); the order is that of the keys. Stage "scatter": each task leaves its records in the
order of their keys, cut into buckets, ranges of keys. Stage "write": each task takes one bucket
from all tasks before, and orders it. Every record is read and written twice, one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ragged_format.arguments import check_seed, check_size, parse_bytes
from ragged_format.errors import JobError
from ragged_format.files import FileReader
from ragged_pipeline.batching import BATCH_BYTES
from ragged_pipeline.defaults import TASK_BYTES
from ragged_pipeline.job import Context, Job, write_shard
from ragged_pipeline.plan import Plan, Stage, Task
from ragged_pipeline.records import Records
from ragged_pipeline.runner import run

if TYPE_CHECKING:
    from ragged_format.lists import Int64
    from ragged_pipeline.inputs import RecordInputs
    from ragged_pipeline.runner import Result

__all__ = ["Shuffle", "gathered", "in_order", "scatter", "shuffle"]

UInt64 = npt.NDArray[np.uint64]

# Part of what a seed means: another algorithm needs another name.
_ALGORITHM = "ragged-shuffle-1"
# Files that are mapped at once; of more, the records are copied.
MAPPED = 256


class Shuffle(Job):
    """All records of the inputs in a random order.

    Parameters
    ----------
    seed : int
        Another seed gives another order.
    keep_groups : bool
        Records of one ``group_id`` stay together, in the order of the input; groups are shuffled. A
        record without group is one by itself.
    shard_bytes : int
        Bytes of a shard, uncompressed, about.
    """

    name = "shuffle"
    version = 1
    task_memory = 700 << 20

    def __init__(
        self, *, seed: int = 0, keep_groups: bool = False, shard_bytes: int = TASK_BYTES
    ) -> None:
        check_seed(seed)
        check_size("shard_bytes", shard_bytes)
        self.seed, self.keep_groups, self.shard_bytes = int(seed), keep_groups, shard_bytes

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {
            "seed": self.seed, "keep_groups": self.keep_groups, "shard_bytes": self.shard_bytes,
        }  # fmt: skip

    def plan(self, inputs: RecordInputs) -> Plan:
        """Return both stages, or one where one task can do it."""
        if self.keep_groups and "group_id" not in inputs.ragged.columns:
            raise JobError(
                "groups can only stay together if they are known", expected="column 'group_id'",
                got=list(inputs.ragged.columns), remedy="shuffle records one by one",
            )  # fmt: skip
        runs, weights = inputs.tasks(self.shard_bytes)
        first = 0
        payloads = []
        for part in runs:
            payloads.append({"pieces": [piece.to_json() for piece in part], "first": first})
            first += sum(piece.rows for piece in part)
        if len(runs) < 2:
            stages: tuple[Stage, ...] = (Stage.of("write", payloads, weights),)
        else:
            buckets = len(runs)
            share = sum(weights) // buckets
            stages = (
                Stage.of("scatter", payloads, weights),
                Stage.of("write", [{"bucket": n} for n in range(buckets)], [share] * buckets),
            )
        return Plan(
            self.name, self.version, self.options(), inputs.to_json(), inputs.schema, stages
        )

    def produce(
        self, plan: Plan, stage: int, task: Task, context: Context
    ) -> Iterator[pa.RecordBatch]:
        """Scatter the records of a task into buckets, or yield those of one bucket."""
        del stage  # the payload tells
        if "bucket" in task.payload:
            records, keys = gathered(context, 0, len(plan.stages[0].tasks), task.payload["bucket"])
            yield from in_order(records, np.argsort(keys, kind="stable"), context, task.weight)
            return
        inputs: RecordInputs = context.inputs
        records = Records(inputs.batches(task.payload["pieces"]), inputs.schema)
        keys = self._keys(records, task.payload["first"])
        order = np.argsort(keys, kind="stable")
        if len(plan.stages) == 1:
            yield from in_order(records, order, context, task.weight)
        else:
            scatter(records, keys, order, len(plan.stages[1].tasks), task.weight, context)

    def _keys(self, records: Records, first: int) -> UInt64:
        """Return the key of every record; `first` is the place of the first one."""
        start = np.uint64(xxhash.xxh3_64_intdigest(f"{_ALGORITHM}|{self.seed}".encode()))
        keys = _mixed(start, np.arange(first, first + len(records), dtype=np.uint64))
        if self.keep_groups:
            seed = int(start)
            for at, group in enumerate(records.table(["group_id"]).column(0).to_pylist()):
                if group is not None:
                    keys[at] = xxhash.xxh3_64_intdigest(group.encode(), seed=seed)
        return keys


def scatter(
    records: Records, keys: UInt64, order: Int64, buckets: int, weight: int,
    context: Context,
) -> None:  # fmt: skip
    """Leave records in an order, that of their keys, cut into buckets: equal ranges of keys."""
    # Bucket of a key: its place in the range of all keys, by the high half of the product.
    edges = np.array([-(-(n << 64) // buckets) for n in range(1, buckets)], np.uint64)
    bounds = np.searchsorted(keys[order], edges)
    parts = np.split(order, bounds)
    starts = [0]

    def batches() -> Iterator[pa.RecordBatch]:
        for part in parts:
            count = 0
            for batch in in_order(records, part, context, weight):
                yield batch
                count += 1
            starts.append(starts[-1] + count)

    path = context.spill / "records.arrow"
    write_shard(path, records.schema, batches(), validate="off")
    np.save(context.spill / "batches.npy", np.array(starts))
    np.save(context.spill / "keys.npy", keys[order])
    np.save(context.spill / "rows.npy", np.array([0, *bounds, len(order)], np.int64))


def _mixed(start: np.uint64, numbers: UInt64) -> UInt64:
    """Return a random number per number: the finaliser of splitmix64, a bijection."""
    with np.errstate(over="ignore"):
        z = start + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def gathered(context: Context, stage: int, tasks: int, bucket: int) -> tuple[Records, UInt64]:
    """Return the records of a bucket that all tasks of a stage scattered, and their keys."""
    batches: list[pa.RecordBatch] = []
    keys: list[UInt64] = []
    for task in range(tasks):
        folder = context.spilled(stage, task)
        first, end = np.load(folder / "batches.npy")[bucket : bucket + 2].tolist()
        start, stop = np.load(folder / "rows.npy")[bucket : bucket + 2].tolist()
        keys.append(np.load(folder / "keys.npy", mmap_mode="r")[start:stop])
        reader = FileReader(folder / "records.arrow")
        found = [reader.batch(index) for index in range(first, end)]
        if tasks > MAPPED:
            found = [batch.take(pa.array(np.arange(batch.num_rows))) for batch in found]
        batches += found
    return Records(batches, context.inputs.schema), np.concatenate(keys)


def in_order(
    records: Records, order: Int64, context: Context, weight: int
) -> Iterator[pa.RecordBatch]:
    """Yield records in an order, in batches of about the size of stored ones."""
    mean = records.nbytes / max(len(records), 1)
    rows = int(min(max(BATCH_BYTES / 2 // max(mean, 1), 1), 1024))
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        yield records.take(part)
        context.advance(weight * len(part) // max(len(records), 1))


def shuffle(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    keep_groups: bool = False,
    shard_bytes: int | str = TASK_BYTES,
    **running: Any,
) -> Result:
    """Write all records in a random order, which follows from seed and input alone.

    Parameters
    ----------
    inputs : path or URL, or a sequence of them
        Datasets or files, of samples or of packed rows.
    out : path or URL
        Of the dataset.
    seed : int
        Another seed gives another order.
    keep_groups : bool
        Records of one ``group_id`` stay together, in the order of the input.
    shard_bytes : int or str
        Bytes of a shard, uncompressed, about: "256MiB".
    **running
        As for :func:`ragged_pipeline.runner.run`: ``mode``, ``workers``, ``memory``, ``engine``,
        ``force``, ``on_duplicate``, ``progress``.

    Raises
    ------
    JobError
        Groups are to be kept, and there is no column ``group_id`` (``RF-J001``).

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import ragged_format as rf
    >>> from ragged_format.testing import rollouts
    >>> samples = rollouts(np.random.default_rng(0), num_samples=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(f"{folder}/in", samples.schema) as writer:
    ...         writer.write(samples)
    ...     done = shuffle(f"{folder}/in", f"{folder}/out", seed=1)
    ...     ids = rf.Dataset(f"{folder}/out")[:]["sample_id"]
    >>> (
    ...     sorted(ids.to_pylist()) == sorted(samples["sample_id"].to_pylist()),
    ...     ids.equals(samples["sample_id"]),
    ... )
    (True, False)
    """
    job = Shuffle(seed=seed, keep_groups=keep_groups, shard_bytes=parse_bytes(shard_bytes))
    return run(job, inputs, out, **running)
