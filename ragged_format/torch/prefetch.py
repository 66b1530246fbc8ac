"""A thread that makes batches ahead of their consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from ragged_format.errors import RaggedError

__all__ = ["Prefetcher"]

T = TypeVar("T")

# How often a waiting consumer makes sure that the thread is alive.
_LOOK_S = 1.0


class Prefetcher(Generic[T]):
    """Runs a generator in a thread, at most `depth` items ahead.

    An error of the generator reaches the consumer after the items made before it. The thread ends
    when the generator does, or on :meth:`stop`, which waits for it.

    Parameters
    ----------
    make : callable
        Returns the generator; called in the thread. It must not refer to the consumer, or the
        consumer would never be collected.
    depth : int
        Items made ahead, >= 1.
    name : str
        Name of the thread.
    """

    def __init__(self, make: Callable[[], Generator[T, None, None]], depth: int, name: str) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._done = False
        self._error: BaseException | None = None
        # A daemon, because the interpreter joins other threads before exit handlers can stop them.
        self._thread = threading.Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def get(self) -> T:
        """Return the next item, waiting for it.

        Raises
        ------
        StopIteration
            The generator has ended.
        Exception
            What the generator raised, or RaggedError if the thread died without a word.
        """
        with self._changed:
            while not self._items:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self._done:
                    raise StopIteration
                if not self._changed.wait(_LOOK_S) and not self._thread.is_alive():
                    self._done = True
                    raise RaggedError(
                        "the loader's thread is gone", expected="a running thread",
                        got="none, for instance because the process was forked",
                        remedy="iterate in the process that made the iterator",
                    )  # fmt: skip
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        """End the thread and wait until it has; items not taken are dropped."""
        with self._changed:
            self._stopped = self._done = True
            self._items.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, make: Callable[[], Generator[T, None, None]]) -> None:
        items = None
        try:
            items = make()
            # Room first: a batch that is made before there is room would need one more arena.
            while self._has_room():
                item = next(items, None)
                if item is None:
                    return
                with self._changed:
                    if not self._stopped:
                        self._items.append(item)
                    self._changed.notify_all()
                del item
        except BaseException as err:  # noqa: BLE001 - whatever it is, the consumer must learn of it
            self._error = err
        finally:
            if items is not None:
                items.close()
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            while len(self._items) >= self._depth and not self._stopped:
                self._changed.wait()
            return not self._stopped
