"""Errors of the server's store; ``codes.py`` lists their codes with HTTP status and meaning."""

from __future__ import annotations

from typing import Any

from ragged_format.errors import RaggedError

__all__ = [
    "ClosedStoreError",
    "ConflictError",
    "CursorError",
    "CursorExpiredError",
    "IdempotencyBusyError",
    "IdempotencyMismatchError",
    "LogDamagedError",
    "QueueFullError",
    "QuotaExceededError",
    "RepeatedIdError",
    "StorageFailedError",
    "StorageFullError",
    "StoreBusyError",
]


class _RetryError(RaggedError):
    """An error after which the same request may succeed later.

    Attributes
    ----------
    retry_after_s : float, optional
        Seconds after which it is worth trying again.
    """

    def __init__(self, what: str, *, retry_after_s: float | None = None, **fields: Any) -> None:
        super().__init__(what, **fields)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments = super().__reduce__()
        return make, arguments, {"retry_after_s": self.retry_after_s}


class ConflictError(RaggedError, ValueError):
    """A sample_id is in the log with other content; nothing of the request was stored (409)."""

    code = "RF-H101"


class RepeatedIdError(RaggedError, ValueError):
    """A sample_id is twice in one request (422)."""

    code = "RF-H102"


class IdempotencyMismatchError(RaggedError, ValueError):
    """An Idempotency-Key was used before with another payload (422)."""

    code = "RF-H103"


class IdempotencyBusyError(RaggedError, RuntimeError):
    """A request with the same Idempotency-Key is under way (409)."""

    code = "RF-H104"


class CursorError(RaggedError, ValueError):
    """A cursor is malformed, or of another log (400)."""

    code = "RF-H105"


class CursorExpiredError(RaggedError, LookupError):
    """What a cursor points at was removed by retention (410).

    Attributes
    ----------
    oldest : str
        The oldest valid cursor.
    """

    code = "RF-H106"

    def __init__(self, what: str, *, oldest: str = "", **fields: Any) -> None:
        super().__init__(what, **fields)
        self.oldest = oldest

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments = super().__reduce__()
        return make, arguments, {"oldest": self.oldest}


class StorageFullError(_RetryError, OSError):
    """The disk is full; nothing of the request was stored (507)."""

    code = "RF-H107"


class StorageFailedError(_RetryError, OSError):
    """The disk fails or is read-only; nothing of the request counts as stored (503)."""

    code = "RF-H108"


class QuotaExceededError(_RetryError, PermissionError):
    """An account has stored what its quota allows in this window (429)."""

    code = "RF-H109"


class QueueFullError(_RetryError, BlockingIOError):
    """The writer is behind; nothing of the request was taken (503)."""

    code = "RF-H110"


class ClosedStoreError(_RetryError, RuntimeError):
    """The store is shutting down, or is not open (503)."""

    code = "RF-H111"


class StoreBusyError(RaggedError, BlockingIOError):
    """Another server has the directory."""

    code = "RF-H112"


class LogDamagedError(RaggedError, OSError):
    """Acknowledged records of the log are missing or damaged."""

    code = "RF-H113"
