"""One of several processes that talk HTTP, for a store that another process has."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ragged_format.errors import RaggedError
from ragged_server.logs import configure, log
from ragged_server.process.remote_store import RemoteStore
from ragged_server.process.serve import DrainingServer, run
from ragged_server.settings import ServerSettings
from ragged_server.store.errors import ClosedStoreError

__all__ = ["DRAIN", "work"]

DRAIN = b"drain"
# Exit code of a worker that lost the store.
LOST = 3
_BEAT_S = 1.0
# How long a worker that starts waits for the store before it answers that it is not there.
_PATIENCE_S = 5.0


class _Server(DrainingServer):
    """A server that its supervisor tells to drain; signals are the supervisor's business.

    A terminal and service managers send theirs to every process of a group.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle none."""
        yield

    pipe: Connection

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._obey, name="ragged-pipe", daemon=True).start()
        beat = asyncio.create_task(self._beat())
        try:
            await super()._serve(sockets)
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        """Keep the gauges of this process up to date, for whichever worker is asked for metrics."""
        while True:
            self.context.metrics.in_flight.set(self.context.budget.used)
            await asyncio.sleep(_BEAT_S)

    def _obey(self) -> None:
        try:
            while self.pipe.recv_bytes() != DRAIN:
                pass
            self.handle_exit(signal.SIGTERM, None)
            self.pipe.recv_bytes()
        except (EOFError, OSError):
            # The supervisor is gone, and the store with it.
            os._exit(LOST)


def work(
    number: int, values: dict[str, Any], path: Path, listener: socket.socket, pipe: Connection
) -> None:
    """Serve until the supervisor says so, or is gone.

    Parameters
    ----------
    number : int
        Of the worker.
    values : dict
        All settings, checked.
    path : Path
        Socket of the store.
    listener : socket
        Listening.
    pipe : Connection
        Says `DRAIN`, and ends with the supervisor.
    """
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    settings = ServerSettings.model_construct(**values)
    configure(settings)
    log.info("worker_started", worker=number, pid=os.getpid())
    # Connections wait meanwhile; while recovery takes longer, probes get answers.
    store = RemoteStore(path, timeout_s=_PATIENCE_S, on_gone=_lost)
    is_open = True
    try:
        store.open()
    except ClosedStoreError:
        is_open = False
        store = RemoteStore(path, timeout_s=float("inf"), on_gone=_lost)

    def open_store() -> RemoteStore:
        if not is_open:
            store.open()
        return store

    def started(server: _Server) -> None:
        server.pipe = pipe

    try:
        run(
            settings, open_store, listener, server_class=_Server, on_server=started,
            waits_for_store=is_open,
        )  # fmt: skip
    except RaggedError as err:
        log.error("worker_failed", worker=number, exc_info=err)
        sys.exit(1)


def _lost(detail: str) -> None:
    log.error("store_lost", detail=detail)
    os._exit(LOST)
