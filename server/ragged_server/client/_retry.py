"""Requests of the clients: sent again where that can help, and refusals as exceptions."""

from __future__ import annotations

import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2

import ragged_format.errors
import ragged_server.http.errors
import ragged_server.store.errors
from ragged_format.errors import RaggedError, TruncatedError, Where
from ragged_server.client._io import Answer, Call, Io
from ragged_server.client.errors import RefusedError, UnreachableError
from ragged_server.store.errors import IdempotencyBusyError

__all__ = ["Retries", "problem_error", "request"]

T = TypeVar("T")

_log = logging.getLogger("ragged_server.client")

# A pause that is not worth a word: a server that is started anew, a connection that was cut.
_QUIET_S = 2.0
_RETRYABLE = frozenset({429, 502, 503, 504})
_CLASSES: dict[str, type[RaggedError]] = {
    name: error
    for module in (ragged_format.errors, ragged_server.store.errors, ragged_server.http.errors)
    for name in module.__all__
    if isinstance(error := getattr(module, name), type) and issubclass(error, RaggedError)
}


@dataclass(frozen=True, slots=True)
class Retries:
    """When a request is sent again.

    That is the case after 429, 502, 503 and 504, and after a connection that failed or was cut:
    sample ids make it harmless that the first one may have arrived. The pause doubles from
    `first_s` to `most_s`, less a random part of up to a half; ``Retry-After`` makes it longer, up
    to `most_retry_after_s`. A server that stays out of reach for more than two seconds is a
    warning of the logger ``ragged_server.client``.

    Attributes
    ----------
    for_s : float
        Give up when so many seconds have passed; 0 never retries.
    first_s, most_s, most_retry_after_s : float
        Seconds.
    """

    for_s: float = 300.0
    first_s: float = 0.1
    most_s: float = 10.0
    most_retry_after_s: float = 60.0

    def pause_s(self, attempt: int, retry_after_s: float | None, chance: float) -> float:
        """Return how long to wait after an attempt, counted from 0; `chance` is in [0, 1).

        Examples
        --------
        >>> retries = Retries(first_s=1.0)
        >>> retries.pause_s(0, None, 0.5), retries.pause_s(40, None, 0.0), retries.pause_s(0, 3, 0)
        (0.75, 10.0, 3.0)
        """
        pause = min(self.most_s, self.first_s * 2.0 ** min(attempt, 30)) * (1 - chance / 2)
        if retry_after_s is None:
            return pause
        # Never earlier than asked for; later by chance, so that clients do not come together.
        return min(retry_after_s, self.most_retry_after_s) + pause * chance


async def request(
    io: Io,
    call: Call,
    retries: Retries,
    *,
    read: Callable[[Answer], T],
    on_retry: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Return what `read` makes of the answer to a request; it sees answers of status 2xx only.

    Raises
    ------
    RaggedError
        The server refused the request: the class belongs to the problem's code.
    UnreachableError
        No answer came in time, or the server's certificate is none that is trusted
        (``RF-H201``).
    """
    since, attempt, is_told = clock(), 0, False
    while True:
        retry_after_s, error = None, None
        try:
            answer = await io.send(call)
            if answer.status < 300:
                return await io.call(lambda: read(answer))  # noqa: B023 - run before the next turn
            error = problem_error(answer, call.url)
            retry_after_s = _retry_after(answer.headers.get("retry-after"))
            if answer.status not in _RETRYABLE and not isinstance(error, IdempotencyBusyError):
                raise error
        except (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError) as err:
            raise _unreachable(call, str(err), attempt) from err
        except (httpx2.TransportError, TruncatedError) as err:
            if (untrusted := _untrusted(err)) is not None:
                raise _unverified(call, untrusted) from err
            error = _unreachable(call, str(err) or type(err).__name__, attempt)
            error.__cause__ = err
        pause_s = retries.pause_s(attempt, retry_after_s, random.random())  # noqa: S311
        if clock() - since + pause_s > retries.for_s:
            raise error
        if not is_told and isinstance(error, UnreachableError) and clock() - since >= _QUIET_S:
            is_told = True
            _log.warning(
                "%s: %s; trying again for %.0f s in all", call.url, error.got, retries.for_s
            )
        attempt += 1
        on_retry()
        await io.sleep(pause_s)


def _unreachable(call: Call, got: str, attempt: int) -> UnreachableError:
    return UnreachableError(
        "the server cannot be reached", where=Where(file=call.url), expected="an answer",
        got=f"{got} (attempt {attempt + 1})",
        remedy="check the URL and that the server runs; records that were sent may be sent again",
    )  # fmt: skip


def _untrusted(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """Return the refusal of a certificate behind an error: no later attempt mends it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _unverified(call: Call, error: ssl.SSLCertVerificationError) -> UnreachableError:
    return UnreachableError(
        "the server's certificate is not trusted", where=Where(file=call.url),
        expected="a certificate of a known authority, for this name",
        got=error.verify_message or str(error),
        remedy="name the authority's file: --ca-file FILE, or Client(verify=FILE)",
    )  # fmt: skip


def problem_error(answer: Answer, url: str) -> RaggedError:
    """Return the exception for an answer that is not 2xx: the one that the server raised.

    Examples
    --------
    >>> body = b'{"code": "RF-H101", "errors": [{"error": "ConflictError", "what": "it differs"}]}'
    >>> error = problem_error(Answer(409, {}, body), "http://host/v1/samples")
    >>> type(error).__name__, error.code, error.what
    ('ConflictError', 'RF-H101', 'it differs')
    """
    problem = _problem(answer)
    listed = problem.get("errors")
    first = listed[0] if isinstance(listed, list) and listed else {}
    said: dict[str, Any] = first if isinstance(first, dict) else {}
    text = problem.get("detail") or answer.body[:200].decode(errors="replace")
    request_id = problem.get("request_id")
    error = _CLASSES.get(str(said.get("error")), RefusedError)(
        str(said.get("what") or problem.get("title") or f"the server answered {answer.status}"),
        code=said.get("code") or problem.get("code"), where=_where(said.get("where"), url),
        expected=said.get("expected"),
        got=said.get("got") or (f"request {request_id}" if said else f"{answer.status} {text}"),
        remedy=said.get("remedy"),
    )  # fmt: skip
    for name in ("oldest", "limits"):
        if name in problem:
            setattr(error, name, problem[name])
    return error


def _problem(answer: Answer) -> dict[str, Any]:
    if "json" not in answer.headers.get("content-type", "json"):
        return {}
    try:
        problem = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return problem if isinstance(problem, dict) else {}


def _where(where: object, url: str) -> Where:
    known = where if isinstance(where, Mapping) else {}
    return Where(**{"file": url, **{k: v for k, v in known.items() if k in Where.__slots__}})


def _retry_after(text: str | None) -> float | None:
    """Return the seconds that Retry-After names: a number, or a date."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
