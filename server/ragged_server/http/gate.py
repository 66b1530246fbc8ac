"""The outermost part of the application: request ids, hosts, errors, metrics and log lines.

Every request passes here once, whatever route answers it. Plain ASGI: the two routes of samples are
dispatched before FastAPI sees the request (docs/design/024-http.md).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from ragged_format.errors import RaggedError
from ragged_server.http.body import ClientGoneError, Receive, Scope, Send
from ragged_server.http.errors import MethodNotAllowedError, MisdirectedError, NotReadyError
from ragged_server.http.problems import as_error, let_go, shortened, status_of
from ragged_server.http.respond import send_problem
from ragged_server.http.tail import SlowReaderError
from ragged_server.logs import log, request_id_of_task
from ragged_server.settings import is_loopback

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

    from prometheus_client import Counter, Histogram

    from ragged_server.http.context import Context

__all__ = ["REFUSED", "REQUEST_ID", "App", "Gate"]

App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# Keys of the scope: the request's id, and the error with which a route of FastAPI answered.
REQUEST_ID = "ragged.request_id"
REFUSED = "ragged.refused"
# Names, not secrets; the system's own source would let other threads in before each request.
_ids = random.Random(os.urandom(16))  # noqa: S311
_ID = re.compile(rb"^[A-Za-z0-9._:-]{1,80}$")
# Asked every few seconds by whoever watches the server: no log lines.
_PROBES = {"/healthz", "/readyz", "/metrics"}
# Answers quote what clients sent: browsers must not take them for pages.
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
# Statuses that no client sees: it had gone.
_GONE = 499
_MOST_HOSTS = 64


class Gate:
    """The application.

    Parameters
    ----------
    context : Context
    samples : mapping of str to ASGI application
        Of ``/v1/samples``, by method.
    rest : ASGI application
        Answers all other paths, and the lifespan.

    Attributes
    ----------
    context : Context
    """

    def __init__(self, context: Context, samples: Mapping[str, App], rest: App) -> None:
        self.context = context
        self._samples = samples
        self._rest = rest
        self._checks_host = not context.keys
        self._hosts = {host.lower() for host in context.settings.allowed_hosts}
        # Hosts that were found good, as they were sent.
        self._good_hosts: set[bytes] = set()
        self._figures: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan."""
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope[REQUEST_ID] = request_id
        request_id_of_task.set(request_id)  # each request has a task, so a context, of its own
        await self._answer(_Exchange(scope, send, request_id), receive)

    async def _answer(self, exchange: _Exchange, receive: Receive) -> None:
        scope = exchange.scope
        error: RaggedError | None = None
        try:
            await self._dispatch(scope, receive, exchange.send)
        except ClientGoneError:
            exchange.status = exchange.status or _GONE
        except SlowReaderError:
            log.warning("reader_too_slow", path=scope["path"])
            exchange.is_broken = True
        except asyncio.CancelledError:
            # The server stops, and the time of running requests is up.
            error = NotReadyError(
                "the server stopped before the request ended", expected="a running server",
                got="one that stops", retry_after_s=2.0, headers={"Connection": "close"},
            )  # fmt: skip
            if exchange.status:
                exchange.is_broken = not exchange.is_complete
            else:
                await send_problem(exchange.send, error, exchange.request_id)
        except Exception as err:  # noqa: BLE001  every error of a request ends here
            error = as_error(err)
            if status_of(error) == 500:
                log.error("fault", path=scope["path"], exc_info=err)
            let_go(err)
            if exchange.status:
                exchange.is_broken = not exchange.is_complete
            else:
                await send_problem(exchange.send, error, exchange.request_id)
        self._record(exchange, error or scope.get(REFUSED))
        if exchange.is_broken:
            raise BrokenAnswerError

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._checks_host:
            self._check_host(scope)
        if scope["path"] != "/v1/samples":
            await self._rest(scope, receive, send)
            return
        app = self._samples.get(scope["method"])
        if app is None:
            allowed = ", ".join(self._samples)
            raise MethodNotAllowedError(
                "the path does not take this method", expected=allowed, got=scope["method"],
                headers={"Allow": allowed},
            )  # fmt: skip
        await app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Refuse names of others: a web page may point its own name at this machine."""
        text = next((value for name, value in scope["headers"] if name == b"host"), b"")
        if text in self._good_hosts:
            return
        host = text.decode("latin-1").lower()
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]")
        if not (is_loopback(name) or name in self._hosts):
            raise MisdirectedError(
                "without keys the server answers to names of this machine only",
                expected="localhost, a loopback address, or one of allowed_hosts",
                got=host[:100] or "no Host", remedy="set allowed_hosts, or give the server keys",
            )  # fmt: skip
        if len(self._good_hosts) < _MOST_HOSTS:
            self._good_hosts.add(text)

    def _record(self, exchange: _Exchange, error: RaggedError | None) -> None:
        metrics = self.context.metrics
        scope, seconds = exchange.scope, time.perf_counter() - exchange.begin
        labels = (_route(scope), _method(scope), exchange.status)
        figures = self._figures.get(labels)
        if figures is None:
            route, method, status = labels
            figures = self._figures[labels] = (
                metrics.requests.labels(route, method, str(status)),
                metrics.seconds.labels(route, method),
            )
        figures[0].inc()
        figures[1].observe(seconds)
        if error is not None:
            metrics.refused.labels(error.code).inc()
        wanted = self.context.settings.log_requests
        is_error = exchange.status >= 400
        if wanted == "none" or scope["path"] in _PROBES or (wanted == "errors" and not is_error):
            return
        line: dict[str, Any] = {
            "method": scope["method"], "path": scope["path"], "status": exchange.status,
            "seconds": round(seconds, 6), "client": (scope.get("client") or ("",))[0],
        }  # fmt: skip
        if error is not None:
            line |= {"code": error.code, "what": shortened(error.what), "got": str(error.got)[:200]}
        (log.warning if exchange.status >= 500 else log.info)("request", **line)


class BrokenAnswerError(Exception):
    """An answer had begun and cannot be finished; the server breaks the connection off."""


class _Exchange:
    """One request and what was sent in answer to it."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.begin = time.perf_counter()
        self.status = 0
        self.is_complete = False
        self.is_broken = False
        self._send = send
        self._fields = ((b"x-request-id", request_id.encode()), _NO_SNIFFING)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a message of the answer, with the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._fields]}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.match(value):
            text: str = value.decode("ascii")
            return text
    return f"{_ids.getrandbits(64):016x}"


_ROUTES = {
    "/", "/v1/samples", "/v1/status", "/v1/browse", "/metrics", "/healthz", "/readyz", "/version",
    "/openapi.json",
}  # fmt: skip
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def _route(scope: Scope) -> str:
    """Return a path for metrics: clients must not make labels."""
    return scope["path"] if scope["path"] in _ROUTES else "other"


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"
