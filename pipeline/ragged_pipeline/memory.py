"""Memory that allocators keep for later, given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import pyarrow as pa

__all__ = ["released", "releasing"]

# Bytes of input between two releases. Of what is freed, allocators keep several times as much.
STEP = 16 << 20


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


def released() -> None:
    """Give memory that Arrow and the C library keep back to the system."""
    pa.default_memory_pool().release_unused()
    trim = _trim()
    if trim is not None:
        trim(0)


def releasing(advance: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that passes its bytes on, and releases memory every now and then."""
    waiting = 0

    def watched(weight: int) -> None:
        nonlocal waiting
        waiting += weight
        if waiting >= STEP:
            waiting = 0
            released()
        advance(weight)

    return watched
