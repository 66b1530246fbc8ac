"""Arrays of one record or batch as numbered ``.npz`` files of a directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["write_npz"]


def write_npz(path: str, stem: str, parts: Iterable[Mapping[str, npt.NDArray[Any]]]) -> int:
    """Write each mapping of arrays as ``<path>/<stem>-<number>.npz``; returns how many."""
    folder = Path(path)
    folder.mkdir()
    number = -1
    for number, arrays in enumerate(parts):
        np.savez_compressed(folder / f"{stem}-{number:06d}.npz", allow_pickle=False, **arrays)
    return number + 1
