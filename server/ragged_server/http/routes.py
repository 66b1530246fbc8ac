"""Routes besides the samples themselves: state of the server, probes, metrics, problem pages."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

import ragged_format as rf
from ragged_format.codes import CODES as FORMAT_CODES
from ragged_format.schema import FORMAT_VERSION
from ragged_server.http.auth import Key, Scope
from ragged_server.http.codes import CODES
from ragged_server.http.context import Context
from ragged_server.http.errors import NotFoundError, NotReadyError
from ragged_server.http.metrics import CONTENT_TYPE
from ragged_server.http.respond import parameters_of

__all__ = ["context_of", "known_parameters", "require", "router"]


async def known_parameters(request: Request) -> None:
    """Refuse query parameters that the route does not have, and those that are there twice.

    Raises
    ------
    BadRequestError
        See :func:`ragged_server.http.respond.parameters_of`.
    """
    parameters = request.scope["route"].dependant.query_params
    parameters_of(request.scope, [parameter.alias for parameter in parameters])


router = APIRouter(dependencies=[Depends(known_parameters)])


def context_of(request: Request) -> Context:
    """Return the state of the application that answers a request."""
    context: Context = request.app.state.context
    return context


class require:  # noqa: N801  reads as a word where routes are declared
    """Dependency: the request has a key for a use, where the server has keys.

    Parameters
    ----------
    scope : {"ingest", "read", "admin"}
    """

    def __init__(self, scope: Scope) -> None:
        self._scope: Scope = scope

    async def __call__(self, request: Request) -> Key | None:
        """Return the key, ``None`` if the server has none."""
        return context_of(request).keys.check(request.headers.get("authorization"), self._scope)


@router.get("/healthz", tags=["operate"], summary="Whether the process answers")
async def healthz() -> dict[str, str]:
    """Answer 200 as long as the process runs."""
    return {"status": "ok"}


@router.get("/readyz", tags=["operate"], summary="Whether samples are taken")
def readyz(request: Request) -> dict[str, str]:
    """Answer 200 if samples can be stored now; 503 while recovering, stopping or without disk."""
    why = context_of(request).why_not_ready()
    if why is not None:
        raise NotReadyError("the server takes no samples", expected="ready", got=why)
    return {"status": "ready"}


@router.get("/version", tags=["operate"], summary="Versions of the server and of the format")
async def version() -> dict[str, str]:
    """Answer the versions."""
    number = ".".join(map(str, FORMAT_VERSION))
    return {"version": rf.__version__, "format": number, "api": "v1"}


@router.get(
    "/metrics", tags=["operate"], summary="Metrics in Prometheus' text format",
    response_class=PlainTextResponse, dependencies=[Depends(require("read"))],
)  # fmt: skip
def metrics(request: Request) -> Response:
    """Answer all metrics of this process and of the store."""
    context = context_of(request)
    context.metrics.in_flight.set(context.budget.used)
    context.metrics.ready.set(context.why_not_ready() is None)
    return Response(context.metrics.text(), media_type=CONTENT_TYPE)


@router.get(
    "/v1/status", tags=["samples"], summary="State of the log and of the server",
    dependencies=[Depends(require("read"))],
)  # fmt: skip
def status(request: Request) -> JSONResponse:
    """Answer what the log holds and what waits; ``store`` is null until it is open."""
    context = context_of(request)
    settings = context.settings
    store: dict[str, Any] | None = None
    if context.is_open:
        store = context.store.status().to_dict()
    names = [name for name in type(settings).model_fields if name.startswith("max_")]
    names += ["header_timeout_s", "body_idle_timeout_s", "body_timeout_s", "send_timeout_s"]
    return JSONResponse(
        {
            "server": {**context.to_dict(), "version": rf.__version__},
            "store": store,
            "limits": {name: getattr(settings, name) for name in names},
        }
    )


@router.get("/openapi.json", include_in_schema=False)
def document(request: Request) -> JSONResponse:
    """Answer this interface as an OpenAPI document."""
    return JSONResponse(request.app.openapi())


@router.get("/problems/{code}", tags=["operate"], summary="What a code means")
async def explain(code: str) -> dict[str, Any]:
    """Answer the rule behind a code; the ``type`` of problem documents leads here."""
    own = CODES.get(code)
    if own is not None:
        return {"code": own.code, "error": own.error, "status": own.status, "rule": own.rule}
    known = FORMAT_CODES.get(code)
    if known is not None:
        return {"code": known.code, "error": known.error, "status": None, "rule": known.rule}
    raise NotFoundError("there is no such code", expected="a code of a problem", got=code[:40])
