"""Errors that only clients of the server raise; the server's own are raised by their class."""

from __future__ import annotations

from ragged_format.errors import RaggedError

__all__ = ["RefusedError", "UnreachableError"]


class UnreachableError(RaggedError, ConnectionError):
    """A client gave up: no server answered in time."""

    code = "RF-H201"


class RefusedError(RaggedError, OSError):
    """What answered is not this server, or a newer one with a code that the client lacks."""

    code = "RF-H202"
