"""Files and directories of other kinds that end up in a store: pages, pictures, exports."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragged_format.errors import DatasetExistsError, StorageError, Where
from ragged_format.local_storage import Lease
from ragged_format.storage import open_storage
from ragged_pipeline.stores.object_storage import ObjectStorage
from ragged_pipeline.stores.session import clear_dead

__all__ = ["file_output"]


@contextmanager
def file_output(place: str, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a local path; what the block makes there, a file or a directory, is uploaded.

    Guarantees: after an exception nothing of it is in the store. Each object is there whole or not
    at all; those of a directory appear one by one.

    Parameters
    ----------
    place : str
        URL.
    replaces : bool
        The block may replace a file that is there: it finds a copy at the path. Otherwise the place
        must be free.

    Raises
    ------
    DatasetExistsError
        There is something at the place (``RF-C009``).
    UnsupportedFeatureError
        Nothing can be written there (``RF-V002``).
    """
    storage = open_storage(place)
    if not isinstance(storage, ObjectStorage):
        storage.begin("")
        raise TypeError(place)
    there = next(storage.files(), None)
    if there is not None and not (replaces and there[0] == ""):
        raise DatasetExistsError(
            "there is something at the place already", where=Where(file=str(storage.place)),
            expected="nothing", got="an object", remedy="choose another place, or remove it",
        )  # fmt: skip
    scratch = storage.scratch("files")
    scratch.mkdir(parents=True, exist_ok=True)
    clear_dead(scratch)
    token = secrets.token_hex(8)
    lease = Lease(scratch, token)
    directory = scratch / token
    directory.mkdir()
    try:
        path = directory / storage.place.rpartition("/")[2]
        if there is not None:
            storage.fetch("", path, there[1])
        yield path
        _upload(storage, path)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lease.release()


def _upload(storage: ObjectStorage, path: Path) -> None:
    if path.is_file():
        storage.objects.upload(path, "")
        return
    done = []
    try:
        for file in sorted(path.rglob("*")):
            if file.is_file():
                done.append(file.relative_to(path).as_posix())
                storage.objects.upload(file, done[-1])
    except BaseException:
        with suppress(StorageError):
            storage.objects.delete(done)
        raise
