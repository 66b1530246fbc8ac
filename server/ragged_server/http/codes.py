"""The catalogue of the server's codes: every way in which a request is refused, once.

Codes of the format itself (``RF-S…``, ``RF-I…``, ``RF-C…``, ``RF-A…``, ``RF-L…``) appear in answers
as well; they are those of ``spec/03-invariants.md``. ``spec/08-http.md`` states this catalogue; a
test holds both equal.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODES", "Code"]


@dataclass(frozen=True, slots=True)
class Code:
    """One stable code of the HTTP interface.

    Attributes
    ----------
    code : str
        Identifier; never reused for another meaning.
    error : str
        Class in :mod:`ragged_server.store.errors` or :mod:`ragged_server.http.errors` that carries
        it.
    status : int
        HTTP status of the answer.
    rule : str
        The situation, in one sentence.
    """

    code: str
    error: str
    status: int
    rule: str


_ALL = (
    # The request, as the HTTP side judges it
    Code("RF-H001", "BadRequestError", 400, "A parameter or header has a value that it may not have."),
    Code("RF-H002", "UnauthorizedError", 401, "The server has keys, and the request has none of them."),
    Code("RF-H003", "ForbiddenError", 403, "The key is not for this dataset or not for this use."),
    Code("RF-H004", "NotFoundError", 404, "There is nothing at this path."),
    Code("RF-H005", "MethodNotAllowedError", 405, "The path does not take this method; Allow lists those it takes."),
    Code("RF-H006", "NotAcceptableError", 406, "Accept excludes every media type that there is."),
    Code("RF-H007", "SlowRequestError", 408, "The header or the body did not arrive in time."),
    Code("RF-H008", "TooLargeError", 413, "The request is larger than a limit; limits names it."),
    Code("RF-H009", "UnsupportedMediaError", 415, "The body's media type or content coding is not one that is read."),
    Code("RF-H010", "MisdirectedError", 421, "The Host header names a host that this server does not serve."),
    Code("RF-H011", "HeaderTooLargeError", 431, "The header is larger than a limit; limits names it."),
    Code("RF-H012", "InternalError", 500, "The server has a fault; its log has the request id."),
    Code("RF-H013", "NotInstalledError", 501, "This server lacks an optional package that the source needs."),
    Code("RF-H014", "BusyError", 503, "Bodies in flight, or readers, use up what they may."),
    Code("RF-H015", "NotReadyError", 503, "The server is starting or stopping."),
    Code("RF-H016", "SettingsError", 500, "Settings contradict each other; the server does not start."),
    # The store
    Code("RF-H101", "ConflictError", 409, "A sample_id is stored with other content; nothing of the request was stored."),
    Code("RF-H102", "RepeatedIdError", 422, "A sample_id is twice in one request."),
    Code("RF-H103", "IdempotencyMismatchError", 422, "The Idempotency-Key was used for another payload."),
    Code("RF-H104", "IdempotencyBusyError", 409, "A request with this Idempotency-Key is still running."),
    Code("RF-H105", "CursorError", 400, "The cursor is malformed, or of another log."),
    Code("RF-H106", "CursorExpiredError", 410, "What the cursor points at was removed; oldest is the oldest valid cursor."),
    Code("RF-H107", "StorageFullError", 507, "The disk is full; nothing of the request was stored."),
    Code("RF-H108", "StorageFailedError", 503, "The disk fails or is read-only; nothing of the request counts as stored."),
    Code("RF-H109", "QuotaExceededError", 429, "The key has stored what its quota allows; Retry-After says when it is renewed."),
    Code("RF-H110", "QueueFullError", 503, "Too much waits for the disk; nothing of the request was taken."),
    Code("RF-H111", "ClosedStoreError", 503, "The store is shutting down, or is not open."),
    Code("RF-H112", "StoreBusyError", 500, "Another server has the directory; this one does not start."),
    Code("RF-H113", "LogDamagedError", 500, "Acknowledged records of the log are missing or damaged."),
)  # fmt: skip

CODES: dict[str, Code] = {entry.code: entry for entry in _ALL}
