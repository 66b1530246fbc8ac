"""``ragged serve --workers N``: this process has the store, N others talk HTTP.

Workers decode, validate and digest; what they hand over is finished messages. Each has a socket of
its own at one address, among which the kernel deals connections, and a pipe by which it is told to
drain and sees whether this process lives. A worker that dies is started again at the same socket,
where clients wait meanwhile; what it had not handed over was not acknowledged. When this process
ends, so do all workers at once: without the store they are of no use.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from prometheus_client.multiprocess import mark_process_dead

from ragged_format.errors import RaggedError
from ragged_server.http.errors import SettingsError
from ragged_server.http.metrics import METRICS_DIRECTORY
from ragged_server.logs import log
from ragged_server.process.remote_store import StoreServer
from ragged_server.process.serve import DrainingServer, handled_signals, listen, make_server, url_of
from ragged_server.process.worker import DRAIN, work

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from ragged_server.settings import ServerSettings
    from ragged_server.store.store import Store

__all__ = ["serve_with_workers", "share_of_worker"]

# Limits of a whole server, of which each worker gets its part.
_SHARED_OUT = (
    "max_in_flight_bytes", "max_connections", "max_readers", "max_waiting", "read_threads",
    "decode_threads",
)  # fmt: skip
# A worker that dies earlier than this after its start has not come up.
_YOUNG_S = 10.0
_MOST_FAILURES = 5
_RESTART_S = 0.2
_PREDECESSOR_S = 5.0


def share_of_worker(settings: ServerSettings) -> dict[str, Any]:
    """Return the settings of one of the workers: limits of the server are shared out.

    Examples
    --------
    >>> from ragged_server.settings import load_settings
    >>> share = share_of_worker(load_settings(Path("live"), workers=4, max_readers=32))
    >>> share["max_readers"], share["max_request_bytes"] >> 20
    (8, 64)
    """
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    for name in _SHARED_OUT:
        values[name] = max(1, -(-values[name] // settings.workers))
    # One body must fit whatever the share is.
    values["max_in_flight_bytes"] = max(values["max_in_flight_bytes"], settings.max_decoded_bytes)
    return values


def serve_with_workers(
    settings: ServerSettings,
    open_store: Callable[[], Store],
    *,
    on_listen: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal, and return when everything that was acknowledged is closed on disk.

    Parameters
    ----------
    settings : ServerSettings
    open_store : callable
        Opens the store, in this process.
    on_listen : callable, optional
        Called with the base URL when connections are accepted.

    Raises
    ------
    SettingsError
        Keys, certificates or the address cannot be used, or no worker comes up (``RF-H016``).
    RaggedError
        The store cannot be opened.
    """
    # What is wrong with the settings shall be said here, and once.
    make_server(settings, open_store, DrainingServer)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragged-")))
        path = folder / "store"
        listeners = [stack.enter_context(one) for one in _listeners(settings)]
        stack.enter_context(_environment(METRICS_DIRECTORY, str(folder)))
        pool = stack.enter_context(_Pool(settings, path, listeners))
        stack.enter_context(pool.signals())
        pool.start()
        url = url_of(settings, listeners[0])
        log.info("listening", url=url, dataset=settings.dataset, workers=settings.workers)
        if on_listen is not None:
            on_listen(url)
        # Workers answer probes while the store recovers.
        store = open_store()
        seal_while = pool.may_seal if settings.seal_on_stop else None
        stack.callback(store.close, seal_while=seal_while)
        stack.callback(StoreServer(store, path).close)
        log.info("store_opened", directory=str(settings.directory))
        pool.watch()
        pool.end()
    log.info("stopped")


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    started_s: float = field(default_factory=time.monotonic)


class _Pool:
    """The workers: started, started again, told to drain, and ended with the block."""

    def __init__(
        self, settings: ServerSettings, path: Path, listeners: list[socket.socket]
    ) -> None:
        self._values = share_of_worker(settings)
        self._drain_s = settings.drain_timeout_s + settings.drain_delay_s
        self._path = path
        self._listeners = listeners
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._failures = 0
        self._signals = 0
        self._drained_by_s = -float("inf")
        self._wake, self._woken = self._context.Pipe(duplex=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()

    def start(self) -> None:
        """Start all."""
        self._workers = [self._start(number) for number in range(len(self._listeners))]

    def _start(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=work, args=(number, self._values, self._path, self._listeners[number], theirs),
            name=f"ragged-worker-{number}", daemon=True,
        )  # fmt: skip
        process.start()
        theirs.close()
        return _Worker(process, ours)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT as the wish to stop; the second one stops at once."""
        with handled_signals(self._on_signal):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signals += 1
        self._woken.send_bytes(b"s")

    def may_seal(self) -> bool:
        """Return whether there is time left to seal: the pool was told to end, and once only."""
        return self._signals <= 1 and time.monotonic() < self._drained_by_s

    def watch(self) -> None:
        """Start workers again that died, until a signal.

        Raises
        ------
        SettingsError
            They do not come up.
        """
        while not self._signals:
            ended = wait([self._wake, *(worker.process.sentinel for worker in self._workers)])
            if self._signals:
                return
            for number, worker in enumerate(self._workers):
                if worker.process.sentinel in ended:
                    self._replace(number, worker)

    def _replace(self, number: int, worker: _Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        code = worker.process.exitcode
        mark_process_dead(worker.process.pid, str(self._path.parent))  # type: ignore[no-untyped-call]
        log.error("worker_died", worker=number, exit_code=code)
        is_young = time.monotonic() - worker.started_s < _YOUNG_S
        self._failures = self._failures + 1 if is_young else 0
        if self._failures >= _MOST_FAILURES * len(self._workers):
            raise SettingsError(
                "the workers do not come up", expected="processes that serve",
                got=f"exit code {code}, {self._failures} times in a row",
                remedy="the lines of the log before this one say why",
            )  # fmt: skip
        if is_young:
            time.sleep(_RESTART_S)
        self._workers[number] = self._start(number)

    def end(self) -> None:
        """Let the workers drain, at most as long as the settings say or until another signal."""
        log.info("stopping", workers=len(self._workers))
        for worker in self._workers:
            with suppress(OSError):
                worker.pipe.send_bytes(DRAIN)
        self._drained_by_s = time.monotonic() + self._drain_s
        end = self._drained_by_s + 10.0
        running = [worker.process.sentinel for worker in self._workers]
        asked = self._signals
        while running and self._signals == asked and time.monotonic() < end:
            ended = wait([self._wake, *running], timeout=end - time.monotonic())
            running = [sentinel for sentinel in running if sentinel not in ended]
            if self._wake in ended:
                self._wake.recv_bytes()


def _listeners(settings: ServerSettings) -> list[socket.socket]:
    """Return one listening socket for each worker, all at one address."""
    if settings.port:
        _require_free(settings)
    out = [listen(settings, reuse_port=True)]
    try:
        while len(out) < settings.workers:
            out.append(listen(settings, port=out[0].getsockname()[1], reuse_port=True))
    except RaggedError:
        for one in out:
            one.close()
        raise
    return out


def _require_free(settings: ServerSettings) -> None:
    """Refuse an address that is taken: the kernel would let servers of one user share it."""
    end = time.monotonic() + _PREDECESSOR_S
    while True:
        try:
            listen(settings).close()
        except SettingsError:
            # Workers of a server that was killed are about to end.
            if time.monotonic() > end:
                raise
            time.sleep(_RESTART_S)
        else:
            return


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
