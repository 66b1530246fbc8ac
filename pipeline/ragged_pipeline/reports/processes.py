"""Worker processes that gather parts, for :mod:`ragged_pipeline.reports.collect`.

A worker is a fresh interpreter with two pipes. It needs no ``__main__`` of the caller, so that
scripts without a guard work, and it ends when its pipes do, so that none outlives its parent.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ragged_format.errors import WorkerError
from ragged_pipeline.pool import deaf_to_interrupts, interpreter_of

if TYPE_CHECKING:
    from ragged_pipeline.reports.collect import Part
    from ragged_pipeline.reports.statistics import Options, Statistics

__all__ = ["in_processes", "main"]

# Parts per worker that may wait for an earlier one.
_AHEAD = 4


def in_processes(
    source: Any, parts: list[Part], options: Options, workers: int
) -> Iterator[tuple[Part, Statistics]]:
    """Yield each part with its figures, in order; memory is bounded by a few parts per worker.

    Raises
    ------
    RaggedError, OSError
        What a worker met.
    WorkerError
        A worker died (``RF-J002``).
    """
    pool = [_Worker(source, options) for _ in range(workers)]
    todo: queue.SimpleQueue[tuple[int, Part] | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_serve, args=(worker, todo, done), daemon=True) for worker in pool
    ]
    try:
        for thread in threads:
            thread.start()
        early: dict[int, Any] = {}
        sent = 0
        for number, part in enumerate(parts):
            while sent < min(len(parts), number + workers * _AHEAD):
                todo.put((sent, parts[sent]))
                sent += 1
            while number not in early:
                index, answer = done.get()
                early[index] = answer
            answer = early.pop(number)
            if isinstance(answer, BaseException):
                raise answer
            yield part, answer
    finally:
        for worker in pool:
            worker.kill()
        for _ in threads:
            todo.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for worker in pool:
            worker.close()


def _serve(
    worker: _Worker,
    todo: queue.SimpleQueue[tuple[int, Part] | None],
    done: queue.SimpleQueue[tuple[int, Any]],
) -> None:
    """Feed one worker; a thread of the parent."""
    while (order := todo.get()) is not None:
        index, part = order
        done.put((index, worker.ask(part)))


class _Worker:
    """One process."""

    def __init__(self, source: Any, options: Options) -> None:
        with deaf_to_interrupts():
            self._process = subprocess.Popen(  # noqa: S603
                interpreter_of("ragged_pipeline.reports.processes"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
            )  # fmt: skip
        self._setup: Any = (source, options)

    def ask(self, part: Part) -> Any:
        """Return the figures of a part, or the error that it ended in."""
        try:
            for message in (self._setup, part):
                if message is not None:
                    pickle.dump(message, self._process.stdin)  # type: ignore[arg-type]
            self._setup = None
            self._process.stdin.flush()  # type: ignore[union-attr]
            return pickle.load(self._process.stdout)  # type: ignore[arg-type]  # noqa: S301
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            return WorkerError(
                "a worker process died", expected="a process that lives until its part is read",
                got=f"exit status {self._process.wait()}",
                remedy="status -9 is often too little memory: use fewer workers",
            )  # fmt: skip
        except Exception as err:  # noqa: BLE001
            return err  # such as a source that cannot be sent

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Leave nothing of an ended process."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def main() -> None:
    """Gather parts until standard input ends."""
    import pyarrow as pa

    from ragged_pipeline.reports.collect import gather_part

    pa.set_cpu_count(1)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between
    orders = os.fdopen(os.dup(0), "rb")
    with suppress(EOFError, BrokenPipeError):
        source, options = pickle.load(orders)  # noqa: S301
        while True:
            part = pickle.load(orders)  # noqa: S301
            try:
                answer: Any = gather_part(source, part, options)
            except Exception as err:  # noqa: BLE001
                answer = err
            pickle.dump(answer, answers)
            answers.flush()
            pa.default_memory_pool().release_unused()
