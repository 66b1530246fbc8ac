"""Convert: another system's data in files becomes samples.

Stage one converts every range of the input into a shard with the columns that its records have.
Only then is it known which columns there are. Stage two takes the shards that have them all as they
are, and converts the ranges of the others again.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.adapters import registry
from ragged_format.adapters.conversion import Conversion, WiderSchemaError, joined_schema
from ragged_format.arguments import check_size
from ragged_format.files import FileReader
from ragged_format.hash_runs import UInt64, id_hashes
from ragged_format.known_schemas import known_schema, read_schema_message
from ragged_format.local_files import create
from ragged_format.record_files import STDIN
from ragged_format.unique_ids import SAMPLE_ID, Ids, file_ids, require_unique
from ragged_pipeline.batching import rebatched
from ragged_pipeline.defaults import CONVERT_BYTES
from ragged_pipeline.foreign import ForeignInputs, find_foreign, no_records
from ragged_pipeline.job import Context, Job, Made, write_shard
from ragged_pipeline.plan import Plan, Stage, Task

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.decoding import Validation
    from ragged_format.errors import Where

__all__ = ["Convert", "schema_text"]

SHARD, IDS = "shard.arrow", "ids.npy"


def schema_text(schema: pa.Schema) -> str:
    """Return a schema as text, for the options of a job."""
    return base64.b64encode(known_schema(schema).message).decode()


def _schema(text: str) -> pa.Schema:
    return read_schema_message(base64.b64decode(text)).schema


class Convert(Job):
    """Samples from the files of another system, through an adapter.

    Parameters
    ----------
    adapter : str
        Name of the adapter.
    options : mapping, optional
        Arguments of its ``to_samples``, JSON values.
    schema : str, optional
        Exact schema of the output, as :func:`schema_text` gives it. Default: the columns that the
        records have, or those that the options name.
    task_bytes : int
        Input that one task reads, and from which one shard is made, about.
    """

    name = "convert"
    version = 1
    validation: Validation = "full"

    def __init__(
        self,
        *,
        adapter: str,
        options: Mapping[str, Any] | None = None,
        schema: str | None = None,
        task_bytes: int = CONVERT_BYTES,
    ) -> None:
        check_size("task_bytes", task_bytes)
        self.adapter = adapter
        self.arguments = dict(options or {})
        self.exact = None if schema is None else _schema(schema)
        self.task_bytes = task_bytes
        self.reader = registry.choose_reader(adapter)
        # Where the content of standard input lies, if that is read.
        self.pipe: str | None = None
        self._joined: dict[str, pa.Schema] = {}

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make this job again."""
        return {
            "adapter": self.adapter, "options": self.arguments, "task_bytes": self.task_bytes,
            "schema": None if self.exact is None else schema_text(self.exact),
        }  # fmt: skip

    def open(self, places: Sequence[str]) -> ForeignInputs:
        """Find, fingerprint and cut the files."""
        files = find_foreign(self.reader, places)
        if self.pipe is not None:
            files = [replace(f, path=self.pipe) if f.path == STDIN else f for f in files]
        return ForeignInputs(files, task_bytes=self.task_bytes)

    def reopen(self, refs: Sequence[Mapping[str, Any]]) -> ForeignInputs:
        """Open the files of :meth:`open` in a worker."""
        return ForeignInputs.from_refs(refs)

    def plan(self, inputs: ForeignInputs) -> Plan:
        """Return two stages with one task for each range of the input."""
        runs, weights = inputs.tasks(self.task_bytes)
        payloads = [{"ranges": run} for run in runs]
        stages = (
            Stage.of("convert", payloads, weights),
            Stage.of("write", payloads, [0] * len(weights)),
        )
        return Plan(self.name, self.version, self.options(), inputs.to_json(), self.exact, stages)

    def produce(
        self, plan: Plan, stage: int, task: Task, context: Context
    ) -> Iterator[pa.RecordBatch]:
        """Convert a range, with the columns that it has or in stage two with all of them."""
        if stage == 1:
            again = self._conversion(task, context, self.schema(plan, context))
            yield from again.batches(context.advance)
            context.figures["report"] = again.report.to_dict()
            return
        schema = self.exact
        while True:
            conversion = self._conversion(task, context, schema)
            try:
                found = self._write_first(conversion, context)
            except WiderSchemaError:
                schema = conversion.widest().schema
                continue
            context.figures.update(found)
            return

    def _conversion(self, task: Task, context: Context, schema: pa.Schema | None) -> Conversion:
        inputs: ForeignInputs = context.inputs
        ranges = task.payload["ranges"]
        return Conversion(
            self.reader, [], self.arguments, schema, self.adapter,
            lambda advance: inputs.read(ranges, self.reader, advance),
        )  # fmt: skip

    def _write_first(self, conversion: Conversion, context: Context) -> dict[str, Any]:
        hashes: list[UInt64] = [np.zeros(0, np.uint64)]

        def watched(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                hashes.append(id_hashes(batch.column(SAMPLE_ID)))
                yield batch

        batches = conversion.batches(context.advance)
        first = next(batches, None)
        if first is None:
            return {"windows": 0, "rows": 0, "schema": None, "report": {}}
        records = rebatched(watched(chain([first], batches)))
        made = write_shard(context.spill / SHARD, first.schema, records, validate=self.validation)
        np.save(context.spill / IDS, np.sort(np.concatenate(hashes)))
        return {
            "windows": 1, "rows": made.rows, "schema": schema_text(first.schema),
            "report": conversion.report.to_dict(),
        }  # fmt: skip

    def schema(self, plan: Plan, context: Context) -> pa.Schema:
        """Return the schema of all columns that any range has."""
        if plan.schema is not None:
            return plan.schema
        if plan.digest not in self._joined:
            schema = None
            previous = None
            for task in plan.stages[0].tasks:
                text = context.figures_of(0, task.index)["schema"]
                if text is not None and text != previous:
                    found, previous = _schema(text), text
                    schema = found if schema is None else joined_schema(schema, found)
            if schema is None:
                raise no_records([file.shown for file in context.inputs.files])
            self._joined[plan.digest] = schema
        return self._joined[plan.digest]

    def write(
        self, plan: Plan, task: Task, batches: Iterator[pa.RecordBatch], path: Path,
        context: Context,
    ) -> Made:  # fmt: skip
        """Take the shard of stage one if it has all columns, else write a new one."""
        schema = self.schema(plan, context)
        found = context.figures_of(0, task.index)["schema"]
        spilled = context.spilled(0, task.index) / SHARD
        if found is None or _schema(found) != schema:
            return super().write(plan, task, batches, path, context)
        trailer = FileReader(spilled).trailer
        path.unlink(missing_ok=True)
        try:
            os.link(spilled, path)
        except OSError:  # not every file system has hard links
            with spilled.open("rb") as source, create(path) as file:
                shutil.copyfileobj(source, file, 1 << 20)
        return Made(trailer.rows, path.stat().st_size, trailer.digest)

    def check(self, plan: Plan, context: Context) -> None:
        """Raise if there was nothing to convert, or if two samples have one id."""
        tasks = plan.stages[0].tasks
        if not any(context.figures_of(0, task.index)["windows"] for task in tasks):
            raise no_records([file.shown for file in context.inputs.files])
        hashes = [
            np.load(context.spilled(0, task.index) / IDS, mmap_mode="r")
            for task in tasks
            if context.figures_of(0, task.index)["windows"]
        ]
        require_unique(Ids(hashes, lambda: self._all_ids(plan, context)))

    def _all_ids(self, plan: Plan, context: Context) -> Iterator[tuple[Where, pa.Array]]:
        for task in plan.stages[0].tasks:
            path = context.spilled(0, task.index) / SHARD
            if path.exists():
                file = context.inputs.files[task.payload["ranges"][0][0]].shown
                yield from file_ids(path, compact=False, name=f"samples of {file}")

    def finish(self, plan: Plan, figures: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return the number of samples and the report of the adapter, over all tasks."""
        del plan
        report: dict[str, Any] = {}
        for first, second in zip(*figures, strict=True):
            _add(report, second.get("report", first["report"]))
        return {"records": sum(part["rows"] for part in figures[0]), "report": report}


def _add(target: dict[str, Any], counts: Mapping[str, Any]) -> None:
    for key, value in counts.items():
        if isinstance(value, Mapping):
            _add(target.setdefault(key, {}), value)
        else:
            target[key] = target.get(key, 0) + value
