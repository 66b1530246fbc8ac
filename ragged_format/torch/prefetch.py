"""A thread that makes batches ahead of their consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ragged_format.errors import RaggedError

__all__ = ["Prefetcher"]

T = TypeVar("T")

# How often a waiting consumer makes sure that the thread is alive.
_LOOK_S = 1.0


class _End:
    """The last thing that the thread says."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


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

    # Two queues of C, not a condition of Python: that costs more than the batch of a few samples.

    def __init__(self, make: Callable[[], Generator[T, None, None]], depth: int, name: str) -> None:
        self._items: SimpleQueue[T | _End] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._stopped = False
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
        while True:
            try:
                item = self._items.get(timeout=_LOOK_S)
            except Empty:
                if self._thread.is_alive() or not self._items.empty():
                    continue
                item = _End(
                    RaggedError(
                        "the loader's thread is gone", expected="a running thread", got="none",
                        remedy="iterate in the process that made the iterator",
                    )
                )  # fmt: skip
            if not isinstance(item, _End):
                self._room.put(None)
                return item
            self._items.put(_End(None))  # for the next call
            raise item.error or StopIteration

    def stop(self) -> None:
        """End the thread and wait until it has; items not taken are dropped."""
        self._stopped = True
        self._room.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        while not self._items.empty():
            self._items.get()
        self._items.put(_End(None))

    def _run(self, make: Callable[[], Generator[T, None, None]]) -> None:
        error: BaseException | None = None
        try:
            items = make()
            try:
                while True:
                    # Room first: a batch made before there is room would need one more arena.
                    self._room.get()
                    if self._stopped:
                        break
                    self._items.put(next(items))
            finally:
                items.close()
        except StopIteration:
            pass
        except BaseException as err:  # noqa: BLE001 - whatever it is, the consumer must learn of it
            error = err
        self._items.put(_End(error))
