"""The Ray engine: the same tasks as those of the local engine, dealt by Ray Data to a cluster.

A task goes to Ray as a number and does its work in the work directory, as everywhere, so that what
is made does not depend on the engine, and what one engine finished the other one keeps. Ray carries
no records: no block of data is copied through its object store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragged_format.errors import JobError, MissingDependencyError, Where, WorkerError
from ragged_format.local_files import TEMPORARY_MARK
from ragged_pipeline.memory import released
from ragged_pipeline.pool import ATTEMPTS, ONE_THREAD, Advance, Done, rebuilt
from ragged_pipeline.worker import described, opened_job, reference_of

if TYPE_CHECKING:
    from ragged_pipeline.job import Job
    from ragged_pipeline.plan import Plan
    from ragged_pipeline.runner import Engine

__all__ = ["ray_engine"]


def ray_engine(*, tasks_per_block: int = 1) -> Engine:
    """Return an engine that runs the tasks of a stage through Ray Data.

    It uses the cluster that ``RAY_ADDRESS`` names or that the process is connected to, else starts
    Ray on this machine. All nodes must see the output directory under the same path, and have this
    library and the job's module installed.

    Parameters
    ----------
    tasks_per_block : int
        Tasks that go to a worker together. More than one pays only where tasks take less than a
        second.

    Raises
    ------
    MissingDependencyError
        Ray is not installed (``RF-D001``).
    """
    try:
        import ray.data  # noqa: F401
    except ImportError as err:
        raise MissingDependencyError(
            "the Ray engine needs Ray", expected="ray[data]", got="not installed",
            remedy="pip install 'ragged-format[ray]'",
        ) from err  # fmt: skip

    def engine(
        job: Job, plan: Plan, stage: int, tasks: Iterable[int], *, work: Path, inputs: Any,
        workers: int, memory: int, advance: Advance,
    ) -> Iterator[Done]:  # fmt: skip
        del plan, inputs, advance  # workers read them from the work directory; Ray tells the end
        indices = list(tasks)
        reference = reference_of(job)
        if reference.startswith("__main__:") or "<locals>" in reference:
            raise JobError(
                "Ray's workers cannot import the class of this job", got=reference,
                expected="a class at the top of a module", remedy="move it there",
            )  # fmt: skip
        _connect(workers)
        setup = json.dumps({
            "job": reference, "options": job.options(), "work": str(work.resolve()),
            "memory": memory // workers, "path": sys.path,
        })  # fmt: skip
        for answer in _answers(setup, stage, indices, workers, tasks_per_block, job.task_memory):
            message = json.loads(answer)
            if "error" in message:
                raise rebuilt(message["error"])
            yield message["task"], message["done"]

    return engine


def _connect(workers: int) -> None:
    """Connect to a cluster, or start Ray here; does nothing where the process is connected."""
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"num_cpus": workers, "include_dashboard": False}
    # Without an address Ray joins a cluster that was ever started here, and refuses `num_cpus`.
    ray.init(address=address or "local", configure_logging=False, log_to_driver=False, **local)


def _answers(
    setup: str, stage: int, tasks: list[int], workers: int, tasks_per_block: int, memory: int
) -> Iterator[str]:
    """Yield what the tasks answered, as they finish."""
    import ray
    from ray.exceptions import RayError

    blocks = -(-len(tasks) // tasks_per_block)
    rows = [{"stage": stage, "task": task} for task in tasks]
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # What this process prints is its user's.
    context.enable_operator_progress_bars = False
    data = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        _do_all, fn_args=(setup,), batch_size=1, batch_format="pyarrow",
        num_cpus=1, concurrency=min(workers, blocks), memory=memory,
    )  # fmt: skip
    try:
        for row in data.iter_rows():
            yield row["answer"]
    except RayError as err:
        raise WorkerError(
            "Ray gave a task up", where=Where(),
            expected="workers that live until their task is done",
            got=f"{type(err).__name__}: {str(err).strip().splitlines()[-1]}",
            remedy="look into Ray's logs; a killed worker is often one without memory",
        ) from err  # fmt: skip


def _do_all(batch: Any, setup: str) -> Any:
    """Do the tasks of a batch; runs in Ray's workers."""
    import pyarrow as pa

    answers = [_do(setup, **row) for row in batch.to_pylist()]
    return pa.table({"answer": pa.array(answers, pa.string())})


def _do(setup: str, stage: int, task: int) -> str:
    # Ray would wrap an error, and lose where, expected and got.
    try:
        record = _opened(setup)(stage, task)
    except Exception as err:  # noqa: BLE001
        return json.dumps({"error": described(err)})
    released()
    return json.dumps({"task": task, "done": record})


@lru_cache(maxsize=4)
def _opened(setup: str) -> Callable[[int, int], dict[str, Any]]:
    """Open a job in this worker, once."""
    given = json.loads(setup)
    os.environ.update(ONE_THREAD)
    sys.path.extend(entry for entry in given["path"] if entry not in sys.path)
    import pyarrow as pa

    from ragged_pipeline.tasks import run_task

    pa.set_cpu_count(1)
    work = Path(given["work"])
    if not (work / "plan.json").is_file():
        raise JobError(
            "a node of the cluster does not see the output directory", where=Where(file=str(work)),
            expected="one file system that all nodes share", got="no such directory",
            remedy="write to a shared file system",
        )  # fmt: skip
    job, plan, inputs = opened_job(given["job"], given["options"], work)

    def do(stage: int, task: int) -> dict[str, Any]:
        with _counted(work, stage, task):
            return run_task(
                job, plan, stage, task, work=work, inputs=inputs, memory=given["memory"]
            )

    return do


@contextmanager
def _counted(work: Path, stage: int, task: int) -> Iterator[None]:
    """Refuse a task over which workers have died too often; Ray tries again for ever."""
    # One byte for each attempt, in a file that the next run of the job clears away.
    attempts = work / f"{stage:02d}-{task:06d}{TEMPORARY_MARK}attempts"
    with attempts.open("ab") as file:
        file.write(b".")
    if (tried := attempts.stat().st_size) > ATTEMPTS:
        attempts.unlink(missing_ok=True)
        raise WorkerError(
            "the worker processes of a task died", where=Where(file=str(work)),
            expected="a process that lives until its task is done",
            got=f"{tried - 1} deaths at task {task}",
            remedy="look into Ray's logs; a killed worker is often one without memory",
        )  # fmt: skip
    yield
    attempts.unlink(missing_ok=True)
