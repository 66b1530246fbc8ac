"""One thread per library, and what the figures were taken on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["describe", "pin_threads", "set_thread_variables", "settle_allocator"]

_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "POLARS_MAX_THREADS", "RAYON_NUM_THREADS",
)  # fmt: skip
_PACKAGES = (
    "numpy",
    "pyarrow",
    "torch",
    "trl",
    "xxhash",
    "zstandard",
    "pysimdjson",
    "numba",
    "polars",
)


def set_thread_variables() -> None:
    """Set the variables that libraries read when they are imported; call it before any of them."""
    for name in _VARIABLES:
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pin_threads() -> None:
    """Give pyarrow and, where it is installed, torch one thread each."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


def settle_allocator() -> None:
    """Bring glibc's allocator into the state that a long-running process has.

    Its thresholds rise when a large block is freed. Until then every buffer of more than 128 KiB
    costs a system call and page faults, which would slow formats with large buffers, the pickled
    arrays of the reference five times.
    """
    bytearray(31 << 20)


def describe() -> dict[str, Any]:
    """Return machine, load and versions as plain JSON values."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
    }


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
