"""Where jobs put their output: a dataset that is committed at once.

This is the one place that writes outputs. A local directory is the one kind here; object stores are
in :mod:`ragged_pipeline.stores.job_output`, and others register with :func:`register_output`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ragged_format.errors import DatasetExistsError, DatasetNotFoundError, Where
from ragged_format.local_files import (
    TEMPORARY_MARK,
    local_path,
    path_text,
    scheme_of,
    sync_directory,
    usable_place,
)
from ragged_format.local_storage import lease_name
from ragged_format.manifest import MANIFEST_NAME, Manifest, locked, read_manifest, write_manifest
from ragged_format.storage import is_remote, open_storage
from ragged_pipeline.tasks import record_names

if TYPE_CHECKING:
    from ragged_pipeline.plan import Plan

__all__ = ["LocalOutput", "Output", "open_output", "register_output"]

WORK_PREFIX = ".ragged-job-"


class Output(ABC):
    """A place that takes finished shards and a manifest.

    Attributes
    ----------
    place : str
        Path or URL, as it was given.
    """

    place: str

    @abstractmethod
    def current(self) -> Manifest | None:
        """Return the manifest that is there."""

    @abstractmethod
    def work(self, plan: Plan) -> Path:
        """Return the local work directory of a plan: always the same one."""

    @abstractmethod
    def held(self, plan: Plan) -> AbstractContextManager[None]:
        """Hold the right to run this plan; free again when the process ends, however it ends.

        Raises
        ------
        DatasetExistsError
            Another process runs it (``RF-C009``).
        """

    @abstractmethod
    def moved(self, name: str) -> Path | None:
        """Return where :meth:`put` moves a file of this name, if that is on this machine."""

    @abstractmethod
    def put(self, file: Path, name: str) -> None:
        """Take a finished local file; it may be gone if an earlier, interrupted call took it."""

    @abstractmethod
    def commit(self, build: Callable[[Manifest | None], Manifest]) -> Manifest:
        """Replace the manifest by what `build` makes of the current one, atomically."""

    def clear(self, plan: Plan) -> None:
        """Remove the work directory of a plan."""
        shutil.rmtree(self.work(plan), ignore_errors=True)

    def tidy(self, plan: Plan) -> None:
        """Remove what a run left that was killed after its commit."""
        self.clear(plan)


class LocalOutput(Output):
    """A directory of this machine.

    Work directories lie in it, so that shards are moved, not copied.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._path = local_path(place)
        if self._path.exists() and not self._path.is_dir():
            raise DatasetExistsError(
                "a dataset is a directory, and there is a file in its place",
                where=Where(file=str(self._path)), expected="a directory, or nothing", got="a file",
                remedy="choose another path",
            )  # fmt: skip

    def current(self) -> Manifest | None:
        """Return the manifest that is there."""
        with suppress(DatasetNotFoundError):
            return read_manifest(self._path)
        return None

    def work(self, plan: Plan) -> Path:
        """Return the work directory of a plan."""
        return self._path / f"{WORK_PREFIX}{plan.digest}"

    @contextmanager
    def held(self, plan: Plan) -> Iterator[None]:
        """Hold the lock file of the plan's shards, which also keeps them from being swept."""
        is_new = not self._path.exists()
        path = self._path / lease_name(plan.token)
        with usable_place(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(path)
        try:
            yield
        except BaseException:
            if not record_names(self.work(plan)):
                self.clear(plan)
            raise
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            if is_new:
                with suppress(OSError):  # not empty: something was made
                    self._path.rmdir()

    def tidy(self, plan: Plan) -> None:
        """Remove what a run left that was killed after its commit, unless it lives."""
        if (self._path / lease_name(plan.token)).exists() or self.work(plan).exists():
            with suppress(OSError), self.held(plan):
                self.clear(plan)

    def moved(self, name: str) -> Path | None:
        """Return the path of a shard."""
        return self._path / name

    def put(self, file: Path, name: str) -> None:
        """Move a file into the dataset's directory."""
        with suppress(FileNotFoundError):
            file.replace(self._path / name)

    def commit(self, build: Callable[[Manifest | None], Manifest]) -> Manifest:
        """Replace the manifest under the dataset's lock."""
        sync_directory(self._path)
        with locked(self._path):
            current = self.current()
            manifest = build(current)
            kept = {shard.name for shard in manifest.shards}
            for shard in current.shards if current is not None else ():
                # The grace period of shards that leave the list begins now.
                if shard.name not in kept:
                    with suppress(FileNotFoundError):
                        os.utime(self._path / shard.name)
            # Under the lock nobody else writes one: these are of runs killed over it.
            for left in self._path.glob(f"{MANIFEST_NAME}{TEMPORARY_MARK}*"):
                left.unlink(missing_ok=True)
            write_manifest(self._path, manifest)
        return manifest


def _lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(descriptor)
            raise DatasetExistsError(
                "another process runs this job", where=Where(file=str(path)),
                expected="one run of a job at a time", got="a run under way",
                remedy="wait for it, or end it; what it finished is kept",
            ) from err  # fmt: skip
        # The one who had it may have removed the name meanwhile.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


_kinds: dict[str, Callable[[str], Output]] = {}


def register_output(scheme: str, opener: Callable[[str], Output]) -> None:
    """Let jobs write to URLs of a further scheme; a second call replaces the first."""
    _kinds[scheme.lower()] = opener


def open_output(place: str | os.PathLike[str]) -> Output:
    """Return the output at a path or URL.

    Raises
    ------
    UnsupportedFeatureError
        The URL's scheme is not known (``RF-V002``).
    DatasetExistsError
        There is a file in its place (``RF-C009``).
    """
    text = path_text(place)
    if text == "-":
        raise DatasetExistsError(
            "a dataset is a directory, and - stands for standard output", where=Where(file=text),
            expected="a path or URL", got="'-'", remedy="name a directory; one called so is ./-",
        )  # fmt: skip
    opener = _kinds.get(scheme_of(text) or "")
    if opener is not None:
        return opener(text)
    if is_remote(text):
        open_storage(text)  # says what is missing where the store's package is not installed
        from ragged_pipeline.stores.job_output import StoreOutput

        return StoreOutput(text)
    return LocalOutput(text)
