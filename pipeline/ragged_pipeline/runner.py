"""Run a job: plan, do the tasks that are not done yet, commit all output at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragged_format import __version__
from ragged_format.arguments import check_callable, check_choice, check_size, parse_bytes
from ragged_format.canonical import require_same
from ragged_format.errors import DatasetExistsError, JobError, Where
from ragged_format.known_schemas import known_schema
from ragged_format.local_files import create, path_text
from ragged_format.manifest import Manifest, Shard
from ragged_format.unique_ids import ON_DUPLICATE, OnDuplicate, TakenIds
from ragged_pipeline.defaults import MEMORY
from ragged_pipeline.duplicates import require_unique_inputs, taken_ids
from ragged_pipeline.job import Made
from ragged_pipeline.outputs import Output, open_output
from ragged_pipeline.pool import Pool, job_orders, job_pool, run_here
from ragged_pipeline.progress import Meter, Report
from ragged_pipeline.tasks import (
    clear_unfinished,
    context_of,
    finished,
    output_file,
    record_names,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_pipeline.job import Job
    from ragged_pipeline.plan import Plan

__all__ = [
    "Engine",
    "Mode",
    "Result",
    "jobs_of",
    "places_of",
    "register_engine",
    "run",
]

Mode = Literal["error", "append", "overwrite"]
MODES: tuple[Mode, ...] = ("error", "append", "overwrite")

# Does the tasks of one stage: called with job, plan, stage and indices, and with work directory,
# opened inputs, workers, memory of a task and progress as keywords; yields index and record.
Engine = Callable[..., Iterator[tuple[int, dict[str, Any]]]]


def _load_ray() -> Engine:
    from ragged_pipeline.ray_engine import ray_engine

    return ray_engine()


_engines: dict[str, Callable[[], Engine]] = {"ray": _load_ray}


def register_engine(name: str, load: Callable[[], Engine]) -> None:
    """Let :func:`run` use a further engine; `load` imports and returns it."""
    _engines[name] = load


@dataclass(frozen=True, slots=True)
class Result:
    """What a job did.

    Attributes
    ----------
    job : str
        Name of the job.
    path : str
        Of the output.
    plan : str
        Digest of the plan.
    rows_in, rows : int
        Records of the inputs and of the output.
    shards, bytes : int
        Files that the job made, and their size.
    figures : dict
        What the job counted; JSON values, the same in every run of the plan.
    tasks, resumed : int
        Tasks of all stages, and those that an earlier, interrupted run had finished.
    unchanged : bool
        The output was there already, made by the same plan; nothing was done.
    """

    job: str
    path: str
    plan: str
    rows_in: int | None
    rows: int
    shards: int
    bytes: int
    figures: dict[str, Any] = field(default_factory=dict)
    tasks: int = 0
    resumed: int = 0
    unchanged: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "job": self.job, "path": self.path, "plan": self.plan, "rows_in": self.rows_in,
            "rows": self.rows, "shards": self.shards, "bytes": self.bytes,
            "figures": self.figures, "tasks": self.tasks, "resumed": self.resumed,
            "unchanged": self.unchanged,
        }  # fmt: skip


def run(
    job: Job,
    inputs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    mode: Mode = "error",
    engine: str = "local",
    workers: int | None = None,
    memory: int | str = MEMORY,
    force: bool = False,
    on_duplicate: OnDuplicate = "error",
    progress: Report | None = None,
) -> Result:
    """Run a job from inputs to a dataset.

    Guarantees: no reader sees the output before all of it is there. The bytes of all shards and of
    the manifest follow from job and inputs, whatever engine, workers and memory are, and however
    often the run was interrupted: what an interrupted run finished is kept in the output directory
    and used by the next one. A job that has been committed already is not run again.

    Parameters
    ----------
    job : Job
    inputs : path or URL, or a sequence of them
    out : path or URL
        Of the dataset.
    mode : {"error", "append", "overwrite"}
        What to do with a dataset that is there, made by another plan.
    engine : {"local", "ray", ...}
        What does the tasks: processes of this machine, a Ray cluster, or an engine that is
        registered.
    workers : int, optional
        Processes. Default: one per core. With one, or one task, this process does the work.
    memory : int or str
        Anonymous memory of all processes together, as "2GiB": limits how many tasks run at once.
    force : bool
        Make the output again though the same plan made it already.
    on_duplicate : {"error", "keep"}
        What becomes of samples of one id that come together, from several inputs or because the
        output is appended to: the job is refused, or both are kept. One input is taken as it is.
    progress : callable, optional
        Receives a :class:`ragged_pipeline.progress.Progress` every now and then.

    Raises
    ------
    DatasetExistsError
        There is a dataset and mode is "error", or another process runs the same job (``RF-C009``).
    InvariantError
        Two samples that come together have one id (``RF-I006``).
    JobError
        The job does not fit its inputs (``RF-J001``).
    WorkerError
        Worker processes died (``RF-J002``).
    RaggedError, OSError
        What a task raised.
    """
    check_choice("mode", mode, MODES)
    check_choice("engine", engine, ("local", *_engines))
    check_choice("on_duplicate", on_duplicate, ON_DUPLICATE)
    if workers is not None:
        check_size("workers", workers)
    if progress is not None:
        check_callable("progress", progress)
    places = places_of(inputs)
    limit = parse_bytes(memory)
    output = open_output(out)
    opened = job.open(places)
    plan = job.plan(opened)
    if (earlier := _earlier(output, plan, mode, force=force)) is not None:
        output.tidy(plan)
        return earlier
    work = output.work(plan)
    with output.held(plan):
        with _noted(work, plan):
            _prepare(work, plan, opened)
            if on_duplicate == "error":
                require_unique_inputs(job, plan, opened, work)
            with ExitStack() as stack:
                chosen = _engine(engine)
                if isinstance(chosen, _Local):
                    stack.callback(chosen.close)
                resumed, records = _run_stages(
                    job, plan, opened, output, engine=chosen, progress=progress,
                    workers=_at_once(job, workers, limit), memory=limit,
                )  # fmt: skip
            context = context_of(work, opened, memory=limit)
            job.check(plan, context)
            figures = [[record["figures"] for record in stage] for stage in records]
            record = lineage_of(plan, job.finish(plan, figures))
            made = [Made(**part["made"]) for part in records[-1]]
            schema = job.schema(plan, context)
            taken = None
            if mode == "append" and on_duplicate == "error":
                taken = taken_ids(job, plan, schema, output, made, work)
            if taken is not None:
                # Before the commit, which then finds nothing new to compare, and is short.
                taken.compare(output.current())
            shards = _publish(job, plan, output, made)
        output.commit(lambda current: _manifest(current, schema, shards, record, mode, out, taken))
        output.clear(plan)
    return _result(output, plan, record, shards, sum(map(len, records)), resumed)


def places_of(inputs: Any) -> list[str]:
    """Return the places of inputs as text: of one, or of a sequence of them.

    Raises
    ------
    DatasetNotFoundError
        One is no path or URL (``RF-C008``).
    """
    alone = isinstance(inputs, str | bytes | os.PathLike) or not isinstance(inputs, Iterable)
    places: Iterable[Any] = [inputs] if alone else inputs
    return [path_text(place) for place in places]


def _earlier(output: Output, plan: Plan, mode: Mode, *, force: bool) -> Result | None:
    """Return the result of an earlier run of the plan; raises if another dataset is in the way."""
    current = output.current()
    if current is None:
        return None
    record = next((r for r in jobs_of(current.lineage) if r.get("plan") == plan.digest), None)
    if record is None:
        if mode == "error":
            raise DatasetExistsError(
                "there is a dataset already, made otherwise", where=Where(file=output.place),
                expected="no dataset", got=f"generation {current.generation}",
                remedy="pass mode='append' or mode='overwrite', or choose another path",
            )  # fmt: skip
        return None
    if force:
        return None
    own = [shard for shard in current.shards if shard.name.startswith(f"shard-{plan.token}-")]
    return _result(output, plan, record, own, 0, 0, unchanged=True)


def jobs_of(lineage: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of the jobs that made a dataset, as its lineage states them."""
    jobs = lineage.get("jobs")
    return [job for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []


def lineage_of(plan: Plan, figures: dict[str, Any]) -> dict[str, Any]:
    """Return what the manifest states about a job."""
    return {
        "job": plan.job, "version": plan.version, "options": dict(plan.options),
        "inputs": plan.inputs, "plan": plan.digest, "figures": figures,
        "libraries": {"ragged-format": __version__},
    }  # fmt: skip


def _at_once(job: Job, workers: int | None, limit: int) -> int:
    """Return how many tasks run at once."""
    fit = limit // job.task_memory
    if fit < 1:
        raise JobError(
            "the memory is too little for one task",
            expected=f"at least {job.task_memory >> 20} MiB", got=f"{limit >> 20} MiB",
            remedy="allow more memory=",
        )  # fmt: skip
    return int(min(workers or os.cpu_count() or 1, fit))


@contextmanager
def _noted(work: Path, plan: Plan) -> Iterator[None]:
    """Have an interruption say what is kept."""
    try:
        yield
    except KeyboardInterrupt as err:
        total = sum(len(stage.tasks) for stage in plan.stages)
        done = len(record_names(work))
        err.add_note(
            f"{done} of {total} tasks are finished and kept; to go on, run the same again"
            if done
            else "no task was finished, and nothing is kept"
        )
        raise


def _engine(name: str) -> Engine:
    return _Local() if name == "local" else _engines[name]()


def _prepare(work: Path, plan: Plan, inputs: Any) -> None:
    work.mkdir(parents=True, exist_ok=True)
    clear_unfinished(work)
    for name, text in (("plan.json", plan.to_json()),
                       ("inputs.json", json.dumps(inputs.refs()).encode())):  # fmt: skip
        with create(work / name) as file:
            file.write(text)


def _run_stages(
    job: Job, plan: Plan, inputs: Any, output: Output, *, engine: Engine, workers: int,
    memory: int, progress: Report | None,
) -> tuple[int, list[list[dict[str, Any]]]]:  # fmt: skip
    """Do all tasks; return how many were done already, and the records of all, by stage."""
    work = output.work(plan)
    meter = Meter(sum(t.weight for stage in plan.stages for t in stage.tasks), progress)
    resumed, out = 0, []
    for number, stage in enumerate(plan.stages):
        is_last = number == len(plan.stages) - 1
        records: dict[int, dict[str, Any]] = {}
        for task in stage.tasks:
            moved = output.moved(job.file_name(plan, task.index)) if is_last else None
            record = finished(work, plan, number, task.index, moved=moved)
            if record is not None:
                records[task.index] = record
                meter.skip(task.weight)
        resumed += len(records)
        meter.stage(stage.name, number + 1, len(plan.stages))
        todo = [task.index for task in stage.tasks if task.index not in records]
        if todo:
            done = engine(
                job, plan, number, todo, work=work, inputs=inputs, workers=workers, memory=memory,
                advance=meter.advance,
            )  # fmt: skip
            for index, record in done:
                records[index] = record
                meter.settle(stage.tasks[index].weight)
        meter.end()
        out.append([records[task.index] for task in stage.tasks])
    return resumed, out


class _Local:
    """The engine of this machine; its worker processes serve all stages of a job."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def __call__(
        self, job: Job, plan: Plan, stage: int, tasks: Iterable[int], *, work: Path, inputs: Any,
        workers: int, memory: int, advance: Callable[[int], None],
    ) -> Iterator[tuple[int, dict[str, Any]]]:  # fmt: skip
        tasks = list(tasks)
        if min(workers, len(tasks)) == 1:
            yield from run_here(
                job, plan, stage, tasks, work=work, inputs=inputs, memory=memory // workers,
                advance=advance,
            )  # fmt: skip
            return
        if self._pool is None:
            self._pool = job_pool(job, work, workers=workers, memory=memory // workers)
        yield from self._pool.run(job_orders(stage, tasks), advance=advance)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _publish(job: Job, plan: Plan, output: Output, made: list[Made]) -> list[Shard]:
    """Put the files that have records into the output, and return them as the manifest does."""
    shards = []
    for index, part in enumerate(made):
        if part.rows:
            name = job.file_name(plan, index)
            output.put(output_file(output.work(plan), plan, index), name)
            shards.append(Shard(name, part.rows, part.bytes, part.digest, part.encoding))
    return shards


def _manifest(
    current: Manifest | None, schema: pa.Schema, shards: list[Shard], record: dict[str, Any],
    mode: Mode, out: str | os.PathLike[str], taken: TakenIds | None,
) -> Manifest:  # fmt: skip
    known = known_schema(schema)
    if current is None:
        return Manifest(known, tuple(shards), 1, {"jobs": [record]})
    generation = current.generation + 1
    earlier = [job for job in jobs_of(current.lineage) if job.get("plan") != record["plan"]]
    made_here = len(earlier) < len(jobs_of(current.lineage))
    if mode == "overwrite" or (mode == "error" and made_here and not earlier):
        return Manifest(known, tuple(shards), generation, {"jobs": [record]})
    if mode == "error":
        raise DatasetExistsError(
            "another writer made a dataset here meanwhile", where=Where(file=os.fspath(out)),
            expected="no dataset", got=f"generation {current.generation}",
            remedy="pass mode='append' or mode='overwrite', or choose another path",
        )  # fmt: skip
    require_same(current.known.ragged, known.ragged, Where(file=os.fspath(out)))
    if taken is not None:
        taken.compare(current)
    names = {shard.name for shard in shards}
    kept = tuple(shard for shard in current.shards if shard.name not in names)
    lineage = {**current.lineage, "jobs": [*earlier, record]}
    return Manifest(current.known, (*kept, *shards), generation, lineage)


def _result(
    output: Output, plan: Plan, record: dict[str, Any], shards: Sequence[Shard], tasks: int,
    resumed: int, *, unchanged: bool = False,
) -> Result:  # fmt: skip
    known = [part.get("rows") for part in plan.inputs]
    return Result(
        job=plan.job, path=output.place, plan=plan.digest,
        rows_in=sum(map(int, known)) if None not in known else None,  # type: ignore[arg-type]
        rows=sum(shard.rows for shard in shards), shards=len(shards),
        bytes=sum(shard.bytes for shard in shards), figures=dict(record["figures"]), tasks=tasks,
        resumed=resumed, unchanged=unchanged,
    )  # fmt: skip
