"""Local copies of files that lie elsewhere: whole, checked, and no more bytes than allowed."""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ragged_format.errors import CorruptError, LimitExceededError, Where

__all__ = ["CACHE_BYTES", "ShardCache", "default_cache_directory"]

T = TypeVar("T")

CACHE_BYTES = 64 << 30
_PART = ".part"
# Fetches that can be under way at once without waiting for one of another name.
_FETCH_LOCKS = 64


def default_cache_directory() -> Path:
    """Return where copies are kept unless told otherwise.

    ``$RAGGED_CACHE_DIR``, else ``ragged`` in ``$XDG_CACHE_HOME``, else ``~/.cache/ragged``.
    """
    chosen = os.environ.get("RAGGED_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ragged"


class ShardCache:
    """A directory with copies of immutable files, the least recently opened removed first.

    Guarantees: any number of processes and threads of one machine may use it; a copy is there whole
    or not at all; each file is fetched by one of them while the others wait; a file that is open or
    mapped keeps its content when its copy is removed, and its space until it is closed. What a
    killed process left behind is removed or overwritten.

    Parameters
    ----------
    directory : path
        Created if need be. What is removed from it are files named ``….arrow`` and ``….part``.
    max_bytes : int
        Most bytes that copies take, those being fetched included.

    Attributes
    ----------
    fetched, evicted : int
        Files so far, by this object.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int = CACHE_BYTES) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.fetched = 0
        self.evicted = 0

    def __reduce__(self) -> tuple[object, ...]:
        return ShardCache, (self.directory, self.max_bytes)

    def open(
        self,
        name: str,
        size: int,
        fetch: Callable[[Path], object],
        opener: Callable[[Path, bool], T],
    ) -> T:
        """Open the copy of a file, fetching it if it is not there.

        Parameters
        ----------
        name : str
            Name of the copy, below the directory, ending in ``.arrow``; equal names, equal content.
        size : int
            Bytes of the file.
        fetch : callable
            ``fetch(path)`` writes the content to that path.
        opener : callable
            ``opener(path, fresh)`` opens the copy and returns the result. It is called with `fresh`
            first when the copy was just fetched, under another name, to check its content; then, or
            alone, without. It raises :class:`ragged_format.errors.CorruptError` for a damaged copy,
            which is fetched once more unless it is fresh.

        Raises
        ------
        LimitExceededError
            The file alone is larger than `max_bytes` (``RF-L001``).
        """
        path = self.directory / name
        if size > self.max_bytes:
            raise LimitExceededError(
                f"{path.name} alone does not fit into the cache", where=Where(file=str(path)),
                expected=f"<= {self.max_bytes} bytes", got=size,
                remedy="raise the cache's bytes, or write smaller shards",
            )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked("cache.lock", fcntl.LOCK_SH):
            found = self._present(path, size, opener)
        if found is not None:
            return found[0]
        with self._locked(self._fetch_lock(path), fcntl.LOCK_EX):
            # Another one may have fetched it while this one waited.
            with self._locked("cache.lock", fcntl.LOCK_SH):
                found = self._present(path, size, opener)
            return self._fetched(path, size, fetch, opener) if found is None else found[0]

    def _present(self, path: Path, size: int, opener: Callable[[Path, bool], T]) -> tuple[T] | None:
        with suppress(FileNotFoundError, CorruptError):
            if path.stat().st_size == size:
                os.utime(path)
                return (opener(path, False),)  # noqa: FBT003 - the callback's contract
        return None

    def _fetched(
        self,
        path: Path,
        size: int,
        fetch: Callable[[Path], object],
        opener: Callable[[Path, bool], T],
    ) -> T:
        # The name says how many bytes are reserved: fetching may cut the file before it writes.
        part = path.with_name(f"{path.name}.{size}{_PART}")
        try:
            with self._locked("cache.lock", fcntl.LOCK_EX):
                part.unlink(missing_ok=True)
                self._make_room(size)
                part.touch()
            fetch(part)
            # Checked before others see it, opened before they can remove it.
            opener(part, True)  # noqa: FBT003 - the callback's contract
            with self._locked("cache.lock", fcntl.LOCK_SH):
                part.replace(path)
                self.fetched += 1
                return opener(path, False)  # noqa: FBT003 - the callback's contract
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Remove copies until `size` more bytes fit; the caller holds the lock."""
        found = []
        for path in self.directory.rglob("*"):
            if path.suffix in (_PART, ".arrow"):
                with suppress(FileNotFoundError):
                    state = path.stat()
                    nbytes = _reserved(path)[1] if path.suffix == _PART else state.st_size
                    found.append((state.st_mtime_ns, nbytes, path))
        taken = sum(entry[1] for entry in found)
        for _, nbytes, path in sorted(found):
            if taken + size <= self.max_bytes:
                break
            if path.suffix == _PART and self._is_being_fetched(_reserved(path)[0]):
                continue
            path.unlink(missing_ok=True)
            taken -= nbytes
            self.evicted += path.suffix != _PART

    def _fetch_lock(self, path: Path) -> str:
        name = path.relative_to(self.directory).as_posix().encode()
        return f"fetch-{zlib.crc32(name) % _FETCH_LOCKS:02d}.lock"

    def _is_being_fetched(self, path: Path) -> bool:
        descriptor = os.open(
            self.directory / self._fetch_lock(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[None]:
        descriptor = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            # Not by closing alone: a forked child may hold a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _reserved(part: Path) -> tuple[Path, int]:
    """Return the final name of a copy that is being fetched, and its bytes."""
    name, _, size = part.name.removesuffix(_PART).rpartition(".")
    return part.with_name(name), int(size) if size.isdecimal() else 0
