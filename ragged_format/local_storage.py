"""A dataset in a directory of this machine: commits under a lock, leases, and what is swept."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ragged_format.errors import (
    DatasetNotFoundError,
    MissingShardError,
    Where,
)
from ragged_format.local_files import TEMPORARY_MARK, local_path, open_binary, usable_place
from ragged_format.manifest import (
    MANIFEST_NAME,
    SHARD_SUFFIX,
    Manifest,
    Shard,
    locked,
    read_manifest,
    write_manifest,
)
from ragged_format.snapshot import ShardReader

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Lease", "LocalSession", "LocalStorage", "lease_name", "lives", "replaced"]


class LocalStorage:
    """A directory, or a file, of this machine.

    Parameters
    ----------
    path : path or ``file://`` URL
    """

    max_open_bytes = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.place = local_path(path)

    def read_manifest(self) -> Manifest:
        """Return the current manifest."""
        return read_manifest(self.place)

    def open_shard(self, shard: Shard, manifest: Manifest, *, verify: bool) -> ShardReader:
        """Return a shard, mapped."""
        return ShardReader(self.place / shard.name, shard, manifest, verify=verify)

    def open_file(self) -> IO[bytes] | None:
        """Return the file, or None for a directory or nothing."""
        return open_binary(self.place) if self.place.is_file() else None

    def local_file(self) -> Path:
        """Return the path."""
        return self.place

    def begin(self, token: str) -> LocalSession:
        """Create the directory if need be, and the lease of a writer."""
        with usable_place(self.place):
            self.place.mkdir(parents=True, exist_ok=True)
            return LocalSession(self.place, token)

    def sweep(self, grace_s: float, *, dry_run: bool = False) -> list[str]:
        """Remove what is left over, under the commit lock."""
        directory = self.place
        if not directory.is_dir():
            raise DatasetNotFoundError(
                "there is no dataset here", where=Where(file=str(directory)),
                expected="a directory", got="none",
            )  # fmt: skip
        removed = []
        with locked(directory):
            try:
                listed = {shard.name for shard in read_manifest(directory).shards}
            except DatasetNotFoundError:
                listed = set()
            oldest = time.time() - grace_s
            for entry in sorted(directory.iterdir()):
                match = _OURS.fullmatch(entry.name)
                if match is None or entry.name in listed or entry.name == MANIFEST_NAME:
                    continue
                if entry.is_dir() and match["job"] is None:
                    continue  # no name of ours is one of a directory, but for those of jobs
                token = match["shard"] or match["writer"] or match["job"]
                with suppress(FileNotFoundError):  # its writer finished meanwhile
                    if _changed(entry) > oldest or (token and lives(directory, token)):
                        continue
                    if dry_run or _remove(entry, match["job"], oldest):
                        removed.append(entry.name)
        return removed


class LocalSession:
    """A writer's work in a directory: shards take their names at once, a lease guards them."""

    def __init__(self, directory: Path, token: str) -> None:
        self.directory = directory
        self.undecided = False
        self._lease = Lease(directory, token)

    def put(self, name: str) -> None:
        """Do nothing: the file is in its place, and durable, since it was closed."""

    def commit(
        self, merge: Callable[[Manifest | None], Manifest], names: Sequence[str]
    ) -> Manifest:
        """Replace the manifest under the dataset's lock."""
        directory = self.directory
        with locked(directory):
            current = None
            with suppress(DatasetNotFoundError):
                current = read_manifest(directory)
            merged = merge(current)
            for name in replaced(current, merged):
                # Let the grace period of shards that leave the manifest begin now.
                with suppress(FileNotFoundError):
                    os.utime(directory / name)
            for name in names:
                if not (directory / name).exists():
                    raise MissingShardError(
                        "a shard vanished before its commit", expected=name,
                        where=Where(file=str(directory)), got="no file",
                        remedy="do not remove files of a running writer",
                    )  # fmt: skip
            # The manifest may be there even if an exception follows.
            self.undecided = True
            write_manifest(directory, merged)
            self.undecided = False
        return merged

    def drop(self, names: Sequence[str]) -> None:
        """Remove shards."""
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def end(self) -> None:
        """Release the lease."""
        self._lease.release()


def replaced(current: Manifest | None, merged: Manifest) -> Iterable[str]:
    """Return the names of shards that a commit takes from the list."""
    kept = {shard.name for shard in merged.shards}
    return [s.name for s in (current.shards if current is not None else ()) if s.name not in kept]


def lease_name(token: str) -> str:
    """Return the name of the file, or object, that shows that a writer lives."""
    return f"writer-{token}.lock"


class Lease:
    """A lock file that shows that a writer lives; free when the process ends, however it ends.

    Parameters
    ----------
    directory : Path
    token : str
        Of the writer; the file is called as :func:`lease_name` says.
    """

    def __init__(self, directory: Path, token: str) -> None:
        self.token = token
        self._path = directory / lease_name(token)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o666)
        # Also when a writer is dropped without an end, so that its files can be swept.
        self._close = weakref.finalize(self, os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Remove the file; does nothing the second time."""
        if self._close.alive:
            self._path.unlink(missing_ok=True)
            self._close()


_OURS = re.compile(
    rf"(?:shard-(?P<shard>[0-9a-f]{{16}})-\d+{re.escape(SHARD_SUFFIX)}"
    rf"|writer-(?P<writer>[0-9a-f]{{16}})\.lock"
    # The work directory of a job: the digest of its plan, whose beginning is the writer's.
    rf"|\.ragged-job-(?P<job>[0-9a-f]{{16}})[0-9a-f]{{16}}"
    rf"|{re.escape(MANIFEST_NAME)})"
    rf"(?P<temporary>{re.escape(TEMPORARY_MARK)}[0-9a-f]+)?"
)


def _changed(entry: Path) -> float:
    """Return when a file, or anything in a work directory, was last changed."""
    below: list[Path] = list(entry.iterdir()) if entry.is_dir() else []
    return max([path.stat().st_mtime for path in [entry, *below]])


def _remove(entry: Path, job: str | None, oldest: float) -> bool:
    """Remove a file or work directory; return False if its job was taken up just now."""
    if job is None or not entry.is_dir():
        entry.unlink()
        return True
    # A job holds its lock as long as it uses the directory; so does whoever removes it.
    path = entry.parent / lease_name(job)
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A job that ended meanwhile has removed the name, and another may have begun under it.
        if path.stat().st_ino != os.fstat(descriptor).st_ino or _changed(entry) > oldest:
            return False
        shutil.rmtree(entry)
        if is_new:
            path.unlink(missing_ok=True)
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(descriptor)
    return True


def lives(directory: Path, token: str) -> bool:
    """Return whether the writer of a token holds its lease."""
    try:
        descriptor = os.open(directory / lease_name(token), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
