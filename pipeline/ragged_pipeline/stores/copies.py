"""Files of other systems in a store, copied to local disk for the job that reads them."""

from __future__ import annotations

import atexit
import secrets
import shutil
from pathlib import Path

from ragged_format.errors import DatasetNotFoundError, StorageError, UnsupportedFeatureError, Where
from ragged_format.local_storage import Lease
from ragged_format.storage import open_storage
from ragged_pipeline.stores.fsspec_storage import FsspecStorage
from ragged_pipeline.stores.object_storage import ObjectStorage
from ragged_pipeline.stores.session import clear_dead

__all__ = ["local_copy"]

# Of each copy, which version of the object it is.
_copied: dict[Path, str] = {}
# A lock on the directory of this process for each scratch place, held as long as it lives.
_leases: dict[Path, Lease] = {}


def local_copy(place: str) -> Path:
    """Return a local copy of an object, or of everything below a prefix as a directory.

    What changed since an earlier call is copied anew. The copy is removed when this process ends,
    or by the next one if this one is killed.

    Parameters
    ----------
    place : str
        URL.

    Raises
    ------
    DatasetNotFoundError
        There is nothing (``RF-C008``).
    """
    storage = open_storage(place)
    if not isinstance(storage, ObjectStorage | FsspecStorage):
        raise UnsupportedFeatureError(
            "files at such URLs cannot be copied", where=Where(file=place),
            expected="an object store, or what fsspec knows", got=type(storage).__name__,
            remedy="copy them here first",
        )  # fmt: skip
    root = _own_directory(storage.scratch("copies"))
    name = place.rstrip("/").rpartition("/")[2] or "root"
    found = set()
    for relative, size, version in storage.files():
        _require_inside(place, relative)
        path = root / name / relative if relative else root / name
        found.add(path)
        if _copied.get(path) != version:
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.fetch(relative, path, size)
            _copied[path] = version
    for path in [path for path in _copied if path.is_relative_to(root) and path not in found]:
        path.unlink(missing_ok=True)
        del _copied[path]
    if not found:
        raise DatasetNotFoundError(
            "there is no input file", where=Where(file=place), expected="an object, or some below",
            got="nothing", remedy="check bucket and prefix",
        )  # fmt: skip
    return root / name


def _require_inside(place: str, relative: str) -> None:
    """Refuse names that lead out of the directory: keys may be any text."""
    if relative and any(part in ("", ".", "..") for part in relative.split("/")):
        raise StorageError(
            "an object has a name that no file can have", where=Where(file=place),
            expected="names between single slashes", got=relative, remedy="rename the object",
        )  # fmt: skip


def _own_directory(scratch: Path) -> Path:
    """Return the directory of this process below a scratch place."""
    if scratch not in _leases:
        scratch.mkdir(parents=True, exist_ok=True)
        clear_dead(scratch)
        token = secrets.token_hex(8)
        _leases[scratch] = Lease(scratch, token)
        (scratch / token).mkdir()
        atexit.register(_remove, scratch / token, _leases[scratch])
    return scratch / _leases[scratch].token


def _remove(directory: Path, lease: Lease) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lease.release()
