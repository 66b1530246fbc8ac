"""What a job is: a plan, then tasks that are pure functions of it and of the input ranges.

A job is made of options that are JSON values, and worker processes make it again from them. Its
class therefore stands in a module that can be imported, and takes its options as keywords.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ragged_format.compact.files import CompactWriter
from ragged_format.files import FileWriter
from ragged_pipeline.batching import BATCH_BYTES, BATCH_ROWS, rebatched
from ragged_pipeline.inputs import RecordInputs, open_inputs

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.decoding import Validation
    from ragged_pipeline.plan import Plan, Task

__all__ = ["Context", "Job", "Made", "write_shard"]


@dataclass(frozen=True, slots=True)
class Made:
    """The file of a task of the last stage.

    Attributes
    ----------
    rows, bytes : int
        Records in it, and its size.
    digest : str
        Identity of its content: of a shard, that of its trailer; 32 hexadecimal digits.
    encoding : str
        Of a shard, "hot" or "compact"; "file" for a file of another kind, whose digest is that of
        its bytes.
    """

    rows: int
    bytes: int
    digest: str
    encoding: str = "hot"


@dataclass
class Context:
    """What a task is given besides its plan.

    Attributes
    ----------
    inputs : object
        What :meth:`Job.open` returned, opened again in the worker: the same snapshots.
    spill : Path
        Directory of this task for files that later stages read; kept only if the task finishes.
    memory : int
        Bytes that this task may use, about. May decide the size of buffers, never what is made.
    figures : dict
        JSON values about what was done; the task fills it, :meth:`Job.finish` reads it.
    advance : callable
        To be called with bytes of input done since the last call; for the progress.
    """

    inputs: Any
    spill: Path
    work: Path
    memory: int
    advance: Callable[[int], None] = lambda _: None
    figures: dict[str, Any] = field(default_factory=dict)
    _read: Callable[[Path, int, int], dict[str, Any]] | None = None

    def spilled(self, stage: int, task: int) -> Path:
        """Return the directory that a finished task of an earlier stage filled."""
        return self.work / f"{stage:02d}-{task:06d}.d"

    def figures_of(self, stage: int, task: int) -> dict[str, Any]:
        """Return the figures of a finished task of an earlier stage."""
        if self._read is None:
            raise LookupError("this context has no finished tasks")
        return self._read(self.work, stage, task)


class Job(ABC):
    """One kind of work on datasets.

    Guarantees that an implementation gives: its options are its only state; what a task makes
    depends on plan, task and inputs alone.

    Attributes
    ----------
    name : str
        As in the command.
    version : int
        To be raised with every change of the bytes that the job makes.
    validation : {"full", "structural", "off"}
        What is checked of the output before it is written.
    encoding : {"hot", "compact"}
        Of the output shards.
    batch_rows, batch_bytes : int
        Of stored batches; 0 rows stands for batches as they come.
    task_memory : int
        Bytes that one task uses at most, its process included, about; decides how many tasks run
        at once.
    unites : bool
        Samples of several inputs come into one output as they are, so that two of one id are
        refused before the first task.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    unites: ClassVar[bool] = True
    validation: Validation = "structural"
    encoding: Literal["hot", "compact"] = "hot"
    batch_rows: int = BATCH_ROWS
    batch_bytes: int = BATCH_BYTES
    task_memory: int = 400 << 20

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again, JSON values."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make a job of its options."""
        return cls(**options)

    def open(self, places: Sequence[str]) -> Any:
        """Open the inputs: an object of the protocol :class:`ragged_pipeline.inputs.Inputs`."""
        return open_inputs(places)

    def reopen(self, refs: Sequence[Mapping[str, Any]]) -> Any:
        """Open in a worker what ``refs()`` of the inputs described."""
        return RecordInputs.from_refs(refs)

    @abstractmethod
    def plan(self, inputs: Any) -> Plan:
        """Return what is to be done."""

    @abstractmethod
    def produce(
        self, plan: Plan, stage: int, task: Task, context: Context
    ) -> Iterator[pa.RecordBatch]:
        """Do one task.

        In the last stage, yield the records of the output shard. In earlier ones, write files into
        ``context.spill`` and yield nothing.
        """

    def schema(self, plan: Plan, context: Context) -> pa.Schema:  # noqa: ARG002
        """Return the schema of the output, known after the stages before the last."""
        if plan.schema is None:
            raise NotImplementedError(f"{type(self).__name__} states no schema")
        return plan.schema

    def file_name(self, plan: Plan, index: int) -> str:
        """Return the name of an output file."""
        return f"shard-{plan.token}-{index:05d}.arrow"

    def write(
        self, plan: Plan, task: Task, batches: Iterator[pa.RecordBatch], path: Path,
        context: Context,
    ) -> Made:  # fmt: skip
        """Write the file of a task of the last stage, durably."""
        del task
        schema = self.schema(plan, context)
        if self.batch_rows:
            batches = rebatched(batches, rows=self.batch_rows, nbytes=self.batch_bytes)
        return write_shard(path, schema, batches, encoding=self.encoding, validate=self.validation)

    def check(self, plan: Plan, context: Context) -> None:  # noqa: B027
        """Raise if the finished tasks together must not be committed."""

    def finish(self, plan: Plan, figures: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return the figures of the whole job, from those of each task of each stage, in order."""
        del plan
        return _sums(figures[-1])


def write_shard(
    path: Path,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    encoding: Literal["hot", "compact"] = "hot",
    validate: Validation = "structural",
) -> Made:
    """Write batches as one durable shard.

    Guarantees: after this, the file is there whole, and its bytes follow from the batches.
    """
    kind = CompactWriter if encoding == "compact" else FileWriter
    with kind(path, schema, validate=validate) as writer:
        for batch in batches:
            writer.write(batch)
    trailer = writer.close()
    return Made(trailer.rows, path.stat().st_size, trailer.digest, encoding)


def _sums(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of integers, and of those in nested objects; anything else is left out."""
    out: dict[str, Any] = {}
    for part in figures:
        for key, value in part.items():
            if isinstance(value, Mapping):
                out[key] = _sums([out.get(key, {}), value])
            elif isinstance(value, int):
                out[key] = out.get(key, 0) + value
    return dict(sorted(out.items()))
