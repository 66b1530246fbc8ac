"""A worker process of a job or a report, driven over pipes by :mod:`ragged_pipeline.pool`.

Standard input gets JSON lines: first what to do, then tasks. What comes back are JSON lines on the
descriptor that was standard output: progress, a finished task, an error. When standard input ends
the process ends at once, whatever it is doing, so that no worker outlives its parent.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ragged_pipeline.memory import released

if TYPE_CHECKING:
    from ragged_pipeline.job import Job
    from ragged_pipeline.plan import Plan

__all__ = ["described", "job_tasks", "main", "opened_job", "reference_of"]

ADVANCE_S = 0.1


def reference_of(job: Job) -> str:
    """Return how a worker finds the class of a job: ``module:qualified name``."""
    return f"{type(job).__module__}:{type(job).__qualname__}"


def _found(reference: str) -> Any:
    """Return the class or function of a reference, as :func:`reference_of` makes them."""
    module, _, name = reference.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def main() -> None:
    """Do tasks until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a library prints must not come between
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    setup = json.loads(lines.get())
    try:
        do = _prepared(setup)
    except Exception as err:  # noqa: BLE001
        _send(answers, {"error": described(err)})
        return
    advance = _Advance(answers)
    while True:
        order = json.loads(lines.get())
        try:
            record = do(order, advance)
        except Exception as err:  # noqa: BLE001
            _send(answers, {"error": described(err)})
            continue
        _send(answers, {"done": record})
        released()


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def opened_job(reference: str, options: dict[str, Any], work: Path) -> tuple[Job, Plan, Any]:
    """Return a job, its plan and its inputs, as the parent wrote them to the work directory.

    Raises
    ------
    JobError
        The inputs are not those of the plan any more (``RF-J001``).
    """
    from ragged_pipeline.inputs import require_planned
    from ragged_pipeline.plan import Plan

    job: Job = _found(reference).from_options(options)
    plan = Plan.from_json((work / "plan.json").read_bytes())
    inputs = job.reopen(json.loads((work / "inputs.json").read_bytes()))
    require_planned(inputs, plan)
    return job, plan, inputs


def _prepared(setup: dict[str, Any]) -> Any:
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    return _found(setup["do"])(setup)


def job_tasks(setup: dict[str, Any]) -> Callable[[Any, Callable[[int], None]], dict[str, Any]]:
    """Return what does the tasks of a job, which :func:`ragged_pipeline.pool.job_pool` set up."""
    from ragged_pipeline.tasks import run_task

    work = Path(setup["work"])
    job, plan, inputs = opened_job(setup["job"], setup["options"], work)

    def do(order: Any, advance: Callable[[int], None]) -> dict[str, Any]:
        return run_task(
            job, plan, order["stage"], order["task"], work=work, inputs=inputs,
            memory=setup["memory"], advance=advance,
        )  # fmt: skip

    return do


class _Advance:
    """Sends progress, a few times a second."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self._waiting, self._last = 0, time.monotonic()

    def __call__(self, weight: int) -> None:
        self._waiting += weight
        if (now := time.monotonic()) - self._last >= ADVANCE_S:
            _send(self._answers, {"advance": self._waiting})
            self._waiting, self._last = 0, now


def _send(answers: IO[str], message: dict[str, Any]) -> None:
    try:
        answers.write(json.dumps(message) + "\n")
    except BrokenPipeError:  # the parent is gone
        os._exit(0)


def described(err: Exception) -> dict[str, Any]:
    """Return an error as JSON values, for :func:`ragged_pipeline.pool.rebuilt`."""
    from ragged_format.errors import RaggedError

    if isinstance(err, RaggedError):
        return {"kind": "ragged", **err.to_dict()}
    if isinstance(err, OSError) and err.errno is not None:
        name = None if err.filename is None else str(err.filename)
        return {"kind": "os", "errno": err.errno, "strerror": err.strerror, "filename": name}
    return {"kind": "other", "text": "".join(traceback.format_exception(err))}
