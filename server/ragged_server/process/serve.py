"""Run one server in this process until it is told to stop, then let it drain."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import uvicorn

from ragged_format.errors import Where
from ragged_server.http.app import create_app
from ragged_server.http.errors import SettingsError
from ragged_server.http.protocol import protocol_class
from ragged_server.logs import log
from ragged_server.process.descriptors import within_descriptors
from ragged_server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragged_server.http.context import AnyStore, Context
    from ragged_server.http.gate import Gate

__all__ = ["DrainingServer", "handled_signals", "listen", "make_server", "run", "serve", "url_of"]

_BACKLOG = 2048
# Time for connections to close when the time of running requests is up.
_CUT_S = 2
# How often a draining server looks whether everything has ended.
_TICK_S = 0.05


@contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give SIGINT and SIGTERM to `handler` inside the block; nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class DrainingServer(uvicorn.Server):
    """A server that ends in steps: not ready, requests end, connections and store close.

    The first SIGTERM or SIGINT begins that; the second one ends it at once.

    Parameters
    ----------
    settings : ServerSettings
    app : Gate
    """

    def __init__(self, settings: ServerSettings, app: Gate) -> None:
        config = uvicorn.Config(
            app,
            http=protocol_class(settings),
            ws="none",
            loop="auto",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=settings.keep_alive_timeout_s,  # type: ignore[arg-type]
            # What still runs then has had its time already.
            timeout_graceful_shutdown=_CUT_S,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        super().__init__(config)
        self._settings = settings
        self.context: Context = app.context
        self._draining: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Stop because the store cannot be opened."""
        self.failure = error
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin to drain; the second time, end at once."""
        if self.context.is_draining:
            self.force_exit = self.should_exit = self.context.is_hurried = True
            return
        self.context.is_draining = True
        # A handler runs between any two steps of this thread, which may hold a lock that the rest
        # needs (that of the log, for one): the loop does it.
        self._loop.call_soon_threadsafe(self._begin, signal.Signals(sig).name)

    def _begin(self, name: str) -> None:
        log.info("stopping", signal=name)
        self.context.drain()
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._settings.drain_delay_s)
        end = loop.time() + self._settings.drain_timeout_s
        while (self.context.ingesting or self.context.reading) and loop.time() < end:
            await asyncio.sleep(_TICK_S)
        self.should_exit = True

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super()._serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving, and do not raise them again afterwards: exit is 0."""
        with handled_signals(self.handle_exit):
            yield


def serve(
    settings: ServerSettings,
    open_store: Callable[[], AnyStore],
    *,
    on_listen: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal, and return when everything that was acknowledged is closed on disk.

    Parameters
    ----------
    settings : ServerSettings
    open_store : callable
        See :func:`ragged_server.http.app.create_app`.
    on_listen : callable, optional
        Called with the base URL when connections are accepted.

    Raises
    ------
    SettingsError
        Keys, certificates or the address cannot be used (``RF-H016``).
    RaggedError
        The store cannot be opened.
    """

    def started(server: DrainingServer) -> None:
        url = url_of(settings, listener)
        keys = len(server.context.keys.keys)
        log.info("listening", url=url, dataset=settings.dataset, keys=keys)
        if on_listen is not None:
            on_listen(url)

    with listen(settings) as listener:
        run(settings, open_store, listener, server_class=DrainingServer, on_server=started)
    log.info("stopped")


_S = TypeVar("_S", bound=DrainingServer)


def run(
    settings: ServerSettings,
    open_store: Callable[[], AnyStore],
    listener: socket.socket,
    *,
    server_class: type[_S],
    on_server: Callable[[_S], None],
    waits_for_store: bool = False,
) -> None:
    """Serve on a socket that listens.

    Parameters
    ----------
    settings, open_store
        See :func:`serve`.
    listener : socket
    server_class : type
    on_server : callable
        Called with the server before it runs.
    waits_for_store : bool
        Whether no connection is accepted before the store is open.
    """
    settings = within_descriptors(settings)
    server = make_server(settings, open_store, server_class, waits_for_store=waits_for_store)
    on_server(server)
    # What exists by now stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure


def make_server(
    settings: ServerSettings,
    open_store: Callable[[], AnyStore],
    server_class: type[_S],
    *,
    waits_for_store: bool = False,
) -> _S:
    """Return a server that only has to run; all settings are checked.

    Raises
    ------
    SettingsError
        Keys, tokenizer or certificates cannot be used (``RF-H016``).
    """
    servers: list[_S] = []
    app = create_app(
        settings, open_store, on_failure=lambda err: servers[0].fail(err),
        waits_for_store=waits_for_store,
    )  # fmt: skip
    server = server_class(settings, app)
    servers.append(server)
    try:
        server.config.load()
    except (OSError, ssl.SSLError) as err:
        raise SettingsError(
            "the certificate or its key cannot be used", where=Where(file=str(settings.tls_cert)),
            expected="PEM files that belong together", got=err,
        ) from err  # fmt: skip
    return server


def url_of(settings: ServerSettings, listener: socket.socket) -> str:
    """Return the base URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls_cert is not None else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def listen(
    settings: ServerSettings, *, port: int | None = None, reuse_port: bool = False
) -> socket.socket:
    """Return a socket that listens at the address of the settings.

    Parameters
    ----------
    settings : ServerSettings
    port : int, optional
        Instead of that of the settings.
    reuse_port : bool
        Whether others of this user may listen there too.

    Raises
    ------
    SettingsError
        The address cannot be used (``RF-H016``).
    """
    port = settings.port if port is None else port
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server(
            (settings.host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port
        )
    except OSError as err:
        raise SettingsError(
            "the server cannot listen at the address", expected="an address that is free",
            got=f"{settings.host}:{port}: {err.strerror or err}",
            remedy="choose another port, or stop what listens there",
        ) from err  # fmt: skip
