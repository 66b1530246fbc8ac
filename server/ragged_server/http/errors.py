"""Errors of the HTTP side; ``codes.py`` lists their codes with HTTP status and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragged_format.errors import RaggedError

__all__ = [
    "BadRequestError",
    "BusyError",
    "ForbiddenError",
    "HeaderTooLargeError",
    "HttpError",
    "InternalError",
    "MethodNotAllowedError",
    "MisdirectedError",
    "NotAcceptableError",
    "NotFoundError",
    "NotInstalledError",
    "NotReadyError",
    "SettingsError",
    "SlowRequestError",
    "TooLargeError",
    "UnauthorizedError",
    "UnsupportedMediaError",
]


class HttpError(RaggedError):
    """Base of the errors with which the HTTP side answers by itself.

    Parameters
    ----------
    what : str
        The situation, in one sentence.
    retry_after_s : float, optional
        Seconds after which the same request may succeed.
    limits : mapping of str to float, optional
        Limits that the request exceeded, by the name of their setting.
    headers : mapping of str to str, optional
        Header fields of the answer, such as ``Allow``.
    **fields
        As of :class:`ragged_format.errors.RaggedError`.
    """

    def __init__(
        self,
        what: str,
        *,
        retry_after_s: float | None = None,
        limits: Mapping[str, float] | None = None,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(what, **fields)
        self.retry_after_s = retry_after_s
        self.limits = dict(limits or {})
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments = super().__reduce__()
        state = {name: getattr(self, name) for name in ("retry_after_s", "limits", "headers")}
        return make, arguments, state


class BadRequestError(HttpError, ValueError):
    """A parameter or header has a value that it may not have."""

    code = "RF-H001"


class UnauthorizedError(HttpError, PermissionError):
    """The server has keys, and the request has none of them."""

    code = "RF-H002"


class ForbiddenError(HttpError, PermissionError):
    """The key is not for this dataset or not for this use."""

    code = "RF-H003"


class NotFoundError(HttpError, LookupError):
    """There is nothing at the path."""

    code = "RF-H004"


class MethodNotAllowedError(HttpError, ValueError):
    """The path does not take the method."""

    code = "RF-H005"


class NotAcceptableError(HttpError, ValueError):
    """Accept excludes every media type that there is."""

    code = "RF-H006"


class SlowRequestError(HttpError, TimeoutError):
    """The body did not arrive in time."""

    code = "RF-H007"


class TooLargeError(HttpError, ValueError):
    """The request is larger than a limit."""

    code = "RF-H008"


class UnsupportedMediaError(HttpError, ValueError):
    """The body's media type or content coding is not one that is read."""

    code = "RF-H009"


class MisdirectedError(HttpError, ValueError):
    """The Host header names a host that this server does not serve."""

    code = "RF-H010"


class HeaderTooLargeError(HttpError, ValueError):
    """The header is larger than a limit."""

    code = "RF-H011"


class InternalError(HttpError, RuntimeError):
    """The server has a fault."""

    code = "RF-H012"


class NotInstalledError(HttpError, ImportError):
    """An optional package is missing on this server."""

    code = "RF-H013"


class BusyError(HttpError, BlockingIOError):
    """Bodies in flight or readers use up what they may."""

    code = "RF-H014"


class NotReadyError(HttpError, RuntimeError):
    """The server is starting or stopping."""

    code = "RF-H015"


class SettingsError(HttpError, ValueError):
    """The server's settings contradict each other; it does not start."""

    code = "RF-H016"
