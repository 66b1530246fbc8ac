"""Errors as problem documents (RFC 9457): which status each has, and what the client is told."""

from __future__ import annotations

import math
from typing import Any

import orjson

from ragged_format.errors import (
    ConversionError,
    CorruptError,
    LimitExceededError,
    MissingDependencyError,
    NotRaggedError,
    OutOfRangeError,
    RaggedError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from ragged_server.codes import CODES
from ragged_server.http_errors import InternalError, NotInstalledError

__all__ = ["MEDIA_TYPE", "STATUSES", "as_error", "headers_of", "problem", "status_of"]

MEDIA_TYPE = "application/problem+json"

# Titles of the statuses that a request can be answered with, besides success.
STATUSES = {
    400: "The request or its body is malformed",
    401: "An API key is needed",
    403: "The API key does not allow this",
    404: "There is nothing here",
    405: "The method is not for this path",
    406: "No form of the answer is acceptable",
    408: "The request arrived too slowly",
    409: "The request conflicts with what is stored",
    410: "The cursor has expired",
    413: "The request is too large",
    415: "The body's form is not one that is read",
    421: "The host is not one that is served",
    422: "The samples break a rule",
    429: "A quota is used up",
    431: "The header is too large",
    500: "The server has a fault",
    501: "The server lacks a package",
    503: "The server cannot take this now",
    507: "The disk is full",
}
# Of the format's errors, by class; the first that fits. Bytes that cannot be decoded are 400,
# content that breaks a rule is 422.
_CLASSES: tuple[tuple[type[RaggedError], int], ...] = (
    (OutOfRangeError, 400),
    (LimitExceededError, 413),
    (NotRaggedError, 400),
    (CorruptError, 400),
    (UnsupportedVersionError, 400),
    (UnsupportedFeatureError, 400),
    (ConversionError, 422),
)


def status_of(error: RaggedError) -> int:
    """Return the HTTP status of an error.

    Examples
    --------
    >>> from ragged_format.errors import InvariantError, TruncatedError
    >>> status_of(InvariantError("a count is negative")), status_of(TruncatedError("cut"))
    (422, 400)
    """
    known = CODES.get(error.code)
    if known is not None:
        return known.status
    return next((status for cls, status in _CLASSES if isinstance(error, cls)), 422)


def as_error(error: BaseException) -> RaggedError:
    """Return the error to tell a client: of faults of the server it learns no details."""
    if isinstance(error, MissingDependencyError):
        return NotInstalledError(
            error.what, expected=error.expected, got=error.got,
            remedy="ask whoever runs the server to install it",
        )  # fmt: skip
    if isinstance(error, RaggedError):
        return error
    return InternalError(
        "the server has a fault",
        remedy="its log has the request id; a repeated request may succeed",
    )


def problem(error: RaggedError, request_id: str) -> bytes:
    """Return the problem document of an error, as JSON.

    Its members: ``type`` (path of a page about the code), ``title``, ``status``, ``detail``,
    ``instance``, ``code``, ``errors`` (of each: code, what, where, expected, got, remedy),
    ``request_id``, and where they apply ``limits``, ``retry_after_s`` and ``oldest``.
    """
    status = status_of(error)
    document: dict[str, Any] = {
        "type": f"/problems/{error.code}",
        "title": STATUSES.get(status, "The request was refused"),
        "status": status,
        "detail": _detail(error),
        "instance": f"urn:ragged:request:{request_id}",
        "code": error.code,
        "errors": [error.to_dict()],
        "request_id": request_id,
    }
    for name in ("limits", "retry_after_s", "oldest"):
        if value := getattr(error, name, None):
            document[name] = value
    return orjson.dumps(document, default=str, option=orjson.OPT_NON_STR_KEYS)


def _detail(error: RaggedError) -> str:
    parts = {"expected": error.expected, "got": error.got}
    given = "; ".join(f"{name}: {value}" for name, value in parts.items() if value is not None)
    return f"{error.what} ({given})" if given else error.what


def headers_of(error: RaggedError) -> list[tuple[bytes, bytes]]:
    """Return the header fields that an error adds to its answer."""
    out = [(name, value) for name, value in getattr(error, "headers", {}).items()]
    seconds = getattr(error, "retry_after_s", None)
    if seconds is None and status_of(error) in (429, 503):
        seconds = 1
    if seconds is not None:
        out.append(("Retry-After", str(max(1, math.ceil(seconds)))))
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in out]
