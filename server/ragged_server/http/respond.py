"""Answers of the routes that are plain ASGI, and how headers and parameters are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl

import orjson

from ragged_format.errors import RaggedError
from ragged_server.http.body import Scope, Send
from ragged_server.http.errors import BadRequestError
from ragged_server.http.problems import MEDIA_TYPE, headers_of, problem, status_of

__all__ = ["Parameters", "accepts", "parameters_of", "send_bytes", "send_json", "send_problem"]

Fields = Iterable[tuple[bytes, bytes]]


async def send_bytes(send: Send, status: int, body: bytes, headers: Fields = ()) -> None:
    """Send a whole answer."""
    fields = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, data: Any, headers: Fields = ()) -> None:
    """Send a JSON value."""
    fields = [(b"content-type", b"application/json"), *headers]
    await send_bytes(send, status, orjson.dumps(data), fields)


async def send_problem(send: Send, error: RaggedError, request_id: str) -> int:
    """Send an error as a problem document; returns its status."""
    status = status_of(error)
    fields = [(b"content-type", MEDIA_TYPE.encode()), (b"cache-control", b"no-store")]
    await send_bytes(send, status, problem(error, request_id), [*fields, *headers_of(error)])
    return status


def accepts(header: bytes | None, media_type: str) -> bool:
    """Return whether an Accept header allows a media type; no header allows all.

    Examples
    --------
    >>> arrow = "application/vnd.apache.arrow.stream"
    >>> [accepts(header, arrow) for header in (None, b"*/*", b"application/*;q=0.5", b"text/html")]
    [True, True, True, False]
    >>> accepts(b"*/*, application/vnd.apache.arrow.stream;q=0", arrow)
    False
    """
    if not header or header.strip() == b"*/*":
        return True
    kind = media_type.partition("/")[0]
    found = {}
    for part in header.decode("latin-1").lower().split(","):
        name, *parameters = (word.strip() for word in part.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        found[name] = not _is_zero(quality)
    # The most specific one decides.
    for name in (media_type, f"{kind}/*", "*/*"):
        if name in found:
            return found[name]
    return False


def _is_zero(quality: str) -> bool:
    try:
        return float(quality) <= 0
    except ValueError:
        return False


class Parameters:
    """Query parameters of a request: each at most once, and none that is unknown.

    Parameters
    ----------
    values : dict of str to str
    """

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    def __bool__(self) -> bool:
        return bool(self._values)

    def text(self, name: str) -> str | None:
        """Return a parameter, ``None`` if it is absent."""
        return self._values.get(name)

    def integer(self, name: str, default: int, least: int, most: int = (1 << 63) - 1) -> int:
        """Return a parameter that is an integer within bounds.

        Raises
        ------
        BadRequestError
            It is not (``RF-H001``).
        """
        text = self._values.get(name)
        if text is None:
            return default
        digits = text[1:] if text[:1] == "-" else text
        if digits.isascii() and digits.isdigit() and len(digits) <= 19:
            value = int(text)
            if least <= value <= most:
                return value
        raise _bad(name, f"an integer, {least} to {most}", text)

    def number(self, name: str, default: float) -> float:
        """Return a parameter that is a number of seconds, not negative.

        Raises
        ------
        BadRequestError
            It is not (``RF-H001``).
        """
        text = self._values.get(name)
        if text is None:
            return default
        plain = text.replace(".", "", 1)
        if plain.isascii() and plain.isdigit() and len(text) <= 20:
            return float(text)
        raise _bad(name, "seconds, as 30 or 0.5", text)


def parameters_of(scope: Scope, names: Iterable[str]) -> Parameters:
    """Return the query parameters of a request.

    Raises
    ------
    BadRequestError
        One is unknown, there twice, or not UTF-8 (``RF-H001``).
    """
    query = scope["query_string"]
    if not query:
        return Parameters({})
    known = tuple(names)
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict",
            max_num_fields=64,
        )  # fmt: skip
    except ValueError as err:  # UnicodeDecodeError is one
        raise BadRequestError(
            "the query is malformed", expected="name=value&name=value", got=repr(query[:200])
        ) from err
    out: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            raise BadRequestError(
                "there is no such parameter", expected=", ".join(known), got=name[:80],
                remedy="check its spelling",
            )  # fmt: skip
        if name in out:
            raise BadRequestError("a parameter is there twice", expected="once", got=name)
        out[name] = value
    return Parameters(out)


def _bad(name: str, expected: str, got: str) -> BadRequestError:
    return BadRequestError(
        f"the parameter {name} has another value", expected=expected, got=repr(got[:80])
    )
