"""Log lines with the request's id: one JSON object a line, or text for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

import orjson
import structlog
from structlog.tracebacks import ExceptionDictTransformer

from ragged_server.settings import ServerSettings

__all__ = ["configure", "log", "request_id_of_task"]

log = structlog.get_logger("ragged_server")

request_id_of_task: ContextVar[str] = ContextVar("request_id", default="")

_LEVELS = {
    "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING,
    "error": logging.ERROR,
}  # fmt: skip


def configure(settings: ServerSettings) -> None:
    """Set up log lines of this process on stderr, those of the standard library among them."""
    level = _LEVELS[settings.log_level]
    shared: list[Any] = [
        _add_request_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if settings.log_format == "json":
        ends: list[Any] = [
            # Without local variables: they hold keys and data of requests.
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(serializer=_dumps),
        ]
    else:
        ends = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, *ends],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # One write a line, its end included: several processes share the stream.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ends],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO))
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers[:] = []
        logger.propagate = name != "uvicorn.access"
        logger.setLevel(max(level, logging.WARNING))
        logger.addFilter(_is_news)


def _add_request_id(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if request_id := request_id_of_task.get():
        event["request_id"] = request_id
    return event


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether uvicorn says what has no line yet: an answer broken off on purpose has one."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "BrokenAnswerError"


def _dumps(value: Any, **_: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
