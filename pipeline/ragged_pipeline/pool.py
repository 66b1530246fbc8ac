"""The local engine: worker processes of this machine, to which tasks are dealt in order."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from ragged_format import errors
from ragged_format.errors import RaggedError, Where, WorkerError
from ragged_pipeline.memory import released
from ragged_pipeline.tasks import run_task
from ragged_pipeline.worker import reference_of

if TYPE_CHECKING:
    from ragged_pipeline.job import Job
    from ragged_pipeline.plan import Plan

__all__ = ["ONE_THREAD", "Pool", "job_orders", "job_pool", "rebuilt", "run_here"]

# Every worker is one thread of computation: more would fight over the cores.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "NUMBA_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}  # fmt: skip
# Times that a task whose worker died is given to another one.
ATTEMPTS = 3

Advance = Callable[[int], None]
Done = tuple[int, dict[str, Any]]


def _interpreter_of(module: str) -> list[str]:
    """Return the command of a fresh interpreter that calls ``main()`` of a module."""
    # The parent's modules are the worker's, however the parent found them.
    boot = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {module} import main; main()"
    )
    return [sys.executable, "-c", boot, json.dumps(sys.path)]


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Have processes that are started in the block never see Ctrl-C, which reaches all of a group.

    Ignoring it in the worker leaves a moment at its start, in which it dies with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def job_pool(job: Job, work: Path, *, workers: int, memory: int) -> Pool:
    """Return the workers of a job, whose orders :func:`job_orders` returns.

    Parameters
    ----------
    job : Job
    work : Path
        Work directory with ``plan.json`` and ``inputs.json``.
    workers : int
    memory : int
        Bytes that each task may use, about.
    """
    reference = reference_of(job)
    if reference.startswith("__main__:") or "<locals>" in reference:
        raise errors.JobError(
            "worker processes cannot import the class of this job", got=reference,
            expected="a class at the top of a module", remedy="move it there, or use workers=1",
        )  # fmt: skip
    setup = {
        "do": "ragged_pipeline.worker:job_tasks", "job": reference, "options": job.options(),
        "work": str(work), "memory": memory,
    }  # fmt: skip
    return Pool(setup, workers=workers)


def job_orders(stage: int, tasks: Iterable[int]) -> dict[int, Any]:
    """Return what a worker is told of tasks of a stage."""
    return {index: {"stage": stage, "task": index} for index in tasks}


def run_here(
    job: Job, plan: Plan, stage: int, tasks: Iterable[int], *, work: Path, inputs: Any,
    memory: int, advance: Advance,
) -> Iterator[Done]:  # fmt: skip
    """Do tasks in this process, one after the other; yields index and record of each."""
    for index in tasks:
        record = run_task(
            job, plan, stage, index, work=work, inputs=inputs, memory=memory, advance=advance
        )
        released()
        yield index, record


class Pool:
    """Worker processes that do tasks, and are given another where one dies.

    Use it as a context manager: leaving the block ends the workers.

    Parameters
    ----------
    setup : mapping
        JSON values. ``do`` names a function as ``module:name``; a worker calls it with `setup`, and
        what it returns with each order and a function that takes progress, for a record of it.
    workers : int
    """

    def __init__(self, setup: Mapping[str, Any], *, workers: int) -> None:
        self._setup = json.dumps(dict(setup))
        self._workers = workers
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        with self._lock:  # none is started from here on
            self._closed = True
            processes = list(self._processes.values())
        for process in processes:
            process.kill()
        for thread in self._threads:
            with suppress(RuntimeError):  # Ctrl-C came before it was started
                thread.join()
        for process in processes:
            _end(process)

    def run(self, orders: Mapping[int, Any], *, advance: Advance) -> Iterator[Done]:
        """Do tasks, in this order; yields index and record of each as they finish.

        Parameters
        ----------
        orders : mapping of int to JSON value
            What each task is, by its index.
        advance : callable
            Receives the progress of all of them.

        Raises
        ------
        RaggedError, OSError
            What a task raised; the others are given up.
        WorkerError
            Workers died over one task again and again (``RF-J002``).
        """
        waiting = deque(orders.items())
        left = len(waiting)
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._serve, args=(n, waiting, events), daemon=True)
            for n in range(min(self._workers, left))
        ]
        self._threads = threads
        for thread in threads:
            thread.start()
        while left:
            event = events.get()
            if isinstance(event, int):
                advance(event)
            elif isinstance(event, BaseException):
                waiting.clear()
                raise event
            else:
                left -= 1
                yield event

    def _serve(
        self, number: int, waiting: deque[tuple[int, Any]], events: queue.SimpleQueue[Any]
    ) -> None:
        """Feed one worker with tasks; a thread of the parent."""
        while not self._closed:
            try:
                index, order = waiting.popleft()
            except IndexError:
                return
            try:
                events.put((index, self._ask(number, index, order, events)))
            except BaseException as err:  # noqa: BLE001
                events.put(err)
                return

    def _ask(
        self, number: int, index: int, order: Any, events: queue.SimpleQueue[Any]
    ) -> dict[str, Any]:
        status = None
        for _ in range(ATTEMPTS):
            process = self._worker(number)
            stdin, stdout = _pipes(process)
            with suppress(BrokenPipeError):
                stdin.write(json.dumps(order) + "\n")
                stdin.flush()
            for line in iter(stdout.readline, ""):
                if not line.endswith("\n"):  # it died while it wrote
                    break
                message = json.loads(line)
                if "advance" in message:
                    events.put(int(message["advance"]))
                elif "done" in message:
                    return dict(message["done"])
                else:
                    raise rebuilt(message["error"])
            status = process.wait()
            if self._closed:
                break
        raise WorkerError(
            "the worker processes of a task died", where=Where(),
            expected="a process that lives until its task is done",
            got=f"exit status {status}, {ATTEMPTS} times, at task {index}",
            remedy="status -9 is often too little memory: fewer workers, or a smaller memory=",
        )  # fmt: skip

    def _worker(self, number: int) -> subprocess.Popen[str]:
        with self._lock:
            process = self._processes.get(number)
            if process is not None and (process.poll() is None or self._closed):
                return process
            if self._closed:
                raise WorkerError(
                    "the workers are ended already", expected="a pool that is open", got="closed",
                    remedy="run the job again",
                )  # fmt: skip
            if process is not None:
                _end(process)
            with _deaf_to_interrupts():
                process = subprocess.Popen(  # noqa: S603
                    _interpreter_of("ragged_pipeline.worker"),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    env=os.environ | ONE_THREAD,
                )  # fmt: skip
            self._processes[number] = process
        stdin, _ = _pipes(process)
        with suppress(BrokenPipeError):
            stdin.write(self._setup + "\n")
            stdin.flush()
        return process


def _end(process: subprocess.Popen[str]) -> None:
    """Collect a process that is dead or dying, and close its pipes."""
    process.wait()
    for pipe in _pipes(process):
        with suppress(BrokenPipeError):
            pipe.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise TypeError("a worker has pipes")
    return process.stdin, process.stdout


def rebuilt(data: dict[str, Any]) -> Exception:
    """Return the error that a worker described."""
    if data["kind"] == "ragged":
        cls = getattr(errors, data["error"], RaggedError)
        err: RaggedError = cls(
            data["what"], code=data["code"], where=Where(**data["where"]),
            expected=data["expected"], got=data["got"], remedy=data["remedy"],
        )  # fmt: skip
        return err
    if data["kind"] == "os":
        return OSError(data["errno"], data["strerror"], data["filename"])
    return RuntimeError(f"a task failed in its worker process:\n{data['text']}")
