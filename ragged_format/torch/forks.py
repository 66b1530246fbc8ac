"""Whether a process was forked from one in which a fork is not safe."""

from __future__ import annotations

import os
import sys
import threading

from ragged_format.errors import UnsupportedFeatureError

__all__ = ["check_fork"]

# Of the last fork that made this process: threads that ran in its parent besides the one that
# forked. None in a process that was not forked.
_found: list[str] | None = None
_parent: list[str] = []
# Libraries whose thread pools hang in a forked process once they were used.
_POOLS = ("polars",)


def _before() -> None:
    current = threading.current_thread()
    _parent[:] = [f"thread {t.name!r}" for t in threading.enumerate() if t is not current]
    _parent.extend(f"the thread pool of {name}" for name in _POOLS if name in sys.modules)


def _in_child() -> None:
    global _found
    _found = list(_parent)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_in_child)


def check_fork() -> None:
    """Raise in a process forked from one with threads: its locks may be held for ever.

    Raises
    ------
    UnsupportedFeatureError
        With what ran in the parent (``RF-V002``).
    """
    if _found:
        raise UnsupportedFeatureError(
            "this worker was forked from a process with threads, and could hang",
            expected="workers started by 'spawn' or 'forkserver'",
            got="fork, beside " + ", ".join(_found),
            remedy="DataLoader(..., multiprocessing_context='spawn')",
        )  # fmt: skip
