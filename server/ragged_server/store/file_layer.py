"""The few file operations on which durability rests, so that tests can make them fail.

Everything that the log does to its segments goes through a :class:`FileLayer`. Reads of committed
bytes do not: they map the real file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ragged_format.local_files import sync_directory

__all__ = ["FileLayer", "LogFile", "RealFiles", "write_all"]

# Most buffers that one call may hand to the kernel.
_IOV_MAX = 1024


class LogFile(Protocol):
    """A file that is open for appending."""

    def writev(self, buffers: Sequence[memoryview]) -> int:
        """Append buffers; return how many bytes were written, which may be fewer."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file, and continue appending there."""
        ...

    def sync(self) -> None:
        """Make data and size durable, in a file that has a name."""
        ...

    def close(self) -> None:
        """Close the file; does not sync."""
        ...


class FileLayer(Protocol):
    """Where segments live."""

    def create(self, path: Path) -> LogFile:
        """Create a file that must not exist."""
        ...

    def append(self, path: Path) -> LogFile:
        """Open an existing file at its end."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...


class RealFiles:
    """Files of the operating system."""

    def create(self, path: Path) -> LogFile:
        """Create a file that must not exist."""
        return _RealFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def append(self, path: Path) -> LogFile:
        """Open an existing file at its end."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.lseek(descriptor, 0, os.SEEK_END)
        return _RealFile(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        sync_directory(path)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink(missing_ok=True)


class _RealFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writev(self, buffers: Sequence[memoryview]) -> int:
        return os.writev(self._descriptor, buffers)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        os.lseek(self._descriptor, size, os.SEEK_SET)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)
        # Else records would be acknowledged that nobody finds again.
        if not os.fstat(self._descriptor).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "somebody removed the file")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_all(file: LogFile, buffers: Sequence[memoryview]) -> None:
    """Append all bytes of the buffers, however many calls it takes.

    Raises
    ------
    OSError
        A write failed; the file may hold a part.
    """
    rest = [view for view in buffers if len(view)]
    while rest:
        part = rest[:_IOV_MAX]
        written = file.writev(part)
        if written <= 0:
            raise OSError(0, "a write wrote nothing")
        done = 0
        for view in part:
            if written < len(view):
                break
            written -= len(view)
            done += 1
        rest = rest[done:]
        if written:
            rest[0] = rest[0][written:]
