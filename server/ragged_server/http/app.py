"""The application: routes, errors and the life of the store, as one ASGI callable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import ragged_format as rf
from ragged_format.errors import RaggedError, Where
from ragged_server.http.context import AnyStore, Context
from ragged_server.http.errors import (
    BadRequestError,
    MethodNotAllowedError,
    NotFoundError,
)
from ragged_server.http.gate import REFUSED, REQUEST_ID, Gate
from ragged_server.http.ingest import Ingest
from ragged_server.http.openapi import describe
from ragged_server.http.page import routes as page
from ragged_server.http.problems import MEDIA_TYPE, as_error, headers_of, problem, status_of
from ragged_server.http.routes import router
from ragged_server.http.tail import Tail
from ragged_server.logs import log
from ragged_server.settings import ServerSettings
from ragged_server.store.errors import StoreBusyError

__all__ = ["create_app"]


def create_app(
    settings: ServerSettings,
    open_store: Callable[[], AnyStore],
    *,
    on_failure: Callable[[BaseException], None] | None = None,
    waits_for_store: bool = False,
) -> Gate:
    """Return the ASGI application of one server.

    Parameters
    ----------
    settings : ServerSettings
    open_store : callable
        Opens the store; called once, in a thread, when the application starts. Until it returns,
        ``/readyz`` and all that needs the store answer 503.
    on_failure : callable, optional
        Called with the error if the store cannot be opened; the server then is of no use.
    waits_for_store : bool
        Whether no connection is accepted before the store is open.

    Raises
    ------
    SettingsError
        The keys or the tokenizer cannot be read (``RF-H016``).
    """
    context = Context(settings, open_store)
    page.texts_of(settings.tokenizer)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        opening = asyncio.create_task(_open(context, on_failure))
        if waits_for_store:
            await opening
        try:
            yield
        finally:
            await context.close()
            await opening

    rest = FastAPI(
        title="ragged ingestion server", version=rf.__version__, lifespan=lifespan,
        # The pages of FastAPI load scripts from elsewhere; the document is a route of ours.
        docs_url=None, redoc_url=None, openapi_url=None,
        exception_handlers={
            RaggedError: _refuse, HTTPException: _refuse, RequestValidationError: _refuse,
            Exception: _refuse,
        },
    )  # fmt: skip
    rest.state.context = context
    rest.include_router(router)
    rest.include_router(page.router)
    describe(rest, settings)
    return Gate(context, {"GET": Tail(context), "POST": Ingest(context)}, rest)


async def _open(context: Context, on_failure: Callable[[BaseException], None] | None) -> None:
    await context.open()
    if context.failure is not None:
        failure = context.failure
        if isinstance(failure, StoreBusyError):  # says it all
            log.error("store_not_opened", code=failure.code, error=str(failure))
        else:
            log.error("store_not_opened", exc_info=failure)
        if on_failure is not None:
            on_failure(context.failure)
        return
    store = context.store
    context.metrics.observe(store.status)
    recovery = store.status().recovery
    figures: dict[str, Any] = {}
    if recovery is not None:
        figures = {name: getattr(recovery, name) for name in recovery.__slots__}
    log.info("store_opened", directory=str(context.settings.directory), **figures)


async def _refuse(request: Request, error: Exception) -> Response:
    refused = request.scope[REFUSED] = _as_ragged(request, error)
    request_id = request.scope.get(REQUEST_ID, "")
    headers = {name.decode(): value.decode("latin-1") for name, value in headers_of(refused)}
    return Response(
        problem(refused, request_id), status_of(refused), headers, media_type=MEDIA_TYPE
    )


def _as_ragged(request: Request, error: Exception) -> RaggedError:
    """Return what FastAPI and Starlette raise, or a fault, as an error of ours."""
    if isinstance(error, RaggedError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return BadRequestError(
            "a parameter has another value", where=Where(column=place), expected=first["msg"],
            got=repr(first.get("input"))[:200],
        )  # fmt: skip
    if not isinstance(error, HTTPException):
        return as_error(error)
    status = error.status_code
    path = request.url.path[:200]
    if status == 404:
        return NotFoundError("there is nothing at this path", got=path)
    if status == 405:
        headers = dict(getattr(error, "headers", None) or {})
        return MethodNotAllowedError(
            "the path does not take this method", expected=headers.get("Allow"),
            got=request.method, headers=headers,
        )  # fmt: skip
    return BadRequestError(
        "the request is malformed", got=str(getattr(error, "detail", error))[:200]
    )
