"""File descriptors: connections must not use up what the store needs to write."""

from __future__ import annotations

import resource

from ragged_server.logs import log
from ragged_server.settings import ServerSettings

__all__ = ["within_descriptors"]

# For segments, shards, index runs, maps and everything else that is no connection.
_KEPT = 256


def within_descriptors(settings: ServerSettings) -> ServerSettings:
    """Raise the process' limit of open files as far as connections need it and it may.

    Returns
    -------
    ServerSettings
        With fewer ``max_connections`` if the limit allows no more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + _KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings
    most = max(1, soft - _KEPT)
    log.warning(
        "fewer_connections", max_connections=most, wanted=settings.max_connections, open_files=soft,
        remedy="raise the hard limit of open files (LimitNOFILE, ulimit -Hn)",
    )  # fmt: skip
    return settings.model_copy(update={"max_connections": most})
