"""Errors as problem documents (RFC 9457): which status each has, and what the client is told."""

from __future__ import annotations

import math
import traceback
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
from ragged_server.http.codes import CODES
from ragged_server.http.errors import InternalError, NotInstalledError

__all__ = [
    "MEDIA_TYPE",
    "STATUSES",
    "as_error",
    "headers_of",
    "let_go",
    "problem",
    "shortened",
    "status_of",
]

MEDIA_TYPE = "application/problem+json"
# Characters of a text in a problem: ids, which errors quote, may be as long as a body.
_LONGEST = 1000

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
        "errors": [{name: _cut(value) for name, value in error.to_dict().items()}],
        "request_id": request_id,
    }
    for name in ("limits", "retry_after_s", "oldest"):
        if value := getattr(error, name, None):
            document[name] = value
    return orjson.dumps(document, default=str, option=orjson.OPT_NON_STR_KEYS)


def _detail(error: RaggedError) -> str:
    parts = {"expected": error.expected, "got": error.got}
    given = "; ".join(f"{name}: {_cut(str(v))}" for name, v in parts.items() if v is not None)
    what = shortened(error.what)
    return f"{what} ({given})" if given else what


def _cut(value: Any) -> Any:
    return shortened(value) if isinstance(value, str) else value


def shortened(text: str) -> str:
    """Return a text that may quote what a client sent, at most about 1,000 characters of it.

    Examples
    --------
    >>> len(shortened("x" * 1_000)), shortened("x" * 5_000)[-27:]
    (1000, 'xxx... (of 5000 characters)')
    """
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... (of {len(text)} characters)"


def let_go(error: BaseException) -> None:
    """Drop the traceback of an error, and so the bodies and batches that its frames hold.

    Tracebacks live in a cycle with the futures that carry the error, until the collector comes by;
    what the request had reserved is free long before. To be called when everything about the error
    is logged, and by the thread that found it: its frames lie behind those of the traceback.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            found.__traceback__ = None
            pending += [found.__cause__, found.__context__]


def headers_of(error: RaggedError) -> list[tuple[bytes, bytes]]:
    """Return the header fields that an error adds to its answer."""
    out = [(name, value) for name, value in getattr(error, "headers", {}).items()]
    seconds = getattr(error, "retry_after_s", None)
    if seconds is None and status_of(error) in (429, 503):
        seconds = 1
    if seconds is not None:
        out.append(("Retry-After", str(max(1, math.ceil(seconds)))))
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in out]
