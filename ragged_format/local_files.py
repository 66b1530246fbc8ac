"""Local files that appear whole or not at all, and paths that may be given as URLs."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from ragged_format.errors import (
    DatasetExistsError,
    DatasetNotFoundError,
    NotRaggedError,
    RaggedError,
    StorageError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.forked import disown_in_children
from ragged_format.writer_state import require_open

__all__ = [
    "TEMPORARY_MARK",
    "NewFile",
    "create",
    "local_path",
    "open_binary",
    "scheme_of",
    "sync_directory",
    "temporary_name",
    "usable_place",
]

# Part of the name of every file that is not finished. Readers ignore such files.
TEMPORARY_MARK = ".tmp-"
_REFUSALS = {
    errno.EACCES: "check the permissions, or choose another place",
    errno.EPERM: "check the permissions, or choose another place",
    errno.EROFS: "choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "choose another place",
}


def temporary_name(path: Path) -> Path:
    """Return a fresh name beside `path` for a file that will be renamed to it."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{secrets.token_hex(8)}")


@contextmanager
def usable_place(path: Path) -> Iterator[None]:
    """Have errors say what is wrong with a place in which the block makes something.

    That is an argument, so that its errors are ours. A disk that is full or fails is not: its
    errors stay those of the operating system, here and whenever something is written later.

    Parameters
    ----------
    path : Path
        What is to be written.

    Raises
    ------
    DatasetNotFoundError
        The directory of the place does not exist (``RF-C008``).
    DatasetExistsError
        There is a file where a directory is to be (``RF-C009``).
    StorageError
        The operating system allows nothing to be made there (``RF-C010``).
    """
    try:
        yield
    except OSError as err:
        if isinstance(err, RaggedError):
            raise
        where = Where(file=str(path))
        if isinstance(err, FileNotFoundError):
            raise DatasetNotFoundError(
                "the directory to write to does not exist", where=where,
                expected="a directory", got=f"nothing at {path.parent}",
                remedy="make it first, or choose another place",
            ) from err  # fmt: skip
        if isinstance(err, NotADirectoryError | FileExistsError):
            raise DatasetExistsError(
                "there is a file where a directory is to be", where=where,
                expected="a directory, or nothing", got="a file", remedy="choose another path",
            ) from err  # fmt: skip
        number = err.errno or (errno.EACCES if isinstance(err, PermissionError) else None)
        if number not in _REFUSALS:
            raise
        refused = StorageError(
            "nothing can be written at the place", where=where,
            expected="a place that this process may write", got=err.strerror or err,
            remedy=_REFUSALS[number],
        )  # fmt: skip
        refused.errno = number
        raise refused from err


class NewFile:
    """A file under a temporary name that takes its final name, and its place, when it is complete.

    Guarantees: other processes see the old file or the whole new one; a file that is open or mapped
    elsewhere keeps its content; after :meth:`commit` the new file survives a power cut. A forked
    child can neither write to it nor remove it.

    Attributes
    ----------
    file : binary file object
        To be written.

    Raises
    ------
    DatasetExistsError
        The place is taken by what is no file (``RF-C009``): renaming would fail, or replace a
        device or a pipe by a file.
    DatasetNotFoundError, StorageError
        Nothing can be made at the place, see :func:`usable_place`.
    """

    def __init__(self, path: Path) -> None:
        with usable_place(path):
            is_taken = path.exists() and not path.is_file()
        if is_taken:
            raise DatasetExistsError(
                "the place of a file is taken by something else", where=Where(file=str(path)),
                expected="a file, or nothing",
                got="a directory" if path.is_dir() else "a device, pipe or socket",
                remedy="choose another path; open a device or pipe and pass the file object",
            )  # fmt: skip
        self._path = path
        self._temporary = temporary_name(path)
        with usable_place(path):
            self.file = self._temporary.open("xb")
        self._ours = True
        disown_in_children(self)

    def commit(self) -> None:
        """Make the content durable and the name final; on an exception nothing remains."""
        if not self._ours:
            require_open("forked", str(self._path))
        with self.removed_on_error():
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self._temporary.replace(self._path)
        sync_directory(self._path.parent)

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Remove the temporary file if an exception leaves the block."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove the temporary file."""
        # Closing flushes, which fails again on a full disk.
        with suppress(OSError):
            self.file.close()
        if self._ours:
            self._temporary.unlink(missing_ok=True)

    def disown(self) -> None:
        """Leave the file to the parent of a forked child, and its buffered bytes as well."""
        self._ours = False
        if not self.file.closed:
            # The buffer is flushed when the child ends; it must not reach the parent's file.
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self.file.fileno(), inheritable=False)
            os.close(nowhere)


@contextmanager
def create(path: Path) -> Iterator[IO[bytes]]:
    """Write a :class:`NewFile`; leaving the block commits it, an exception removes it."""
    new = NewFile(path)
    with new.removed_on_error():
        yield new.file
    new.commit()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading, unbuffered.

    Raises
    ------
    DatasetNotFoundError
        There is no file (``RF-C008``).
    NotRaggedError
        The path is a directory.
    """
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError as err:
        raise DatasetNotFoundError(
            "there is no such file", where=Where(file=str(path)), expected="a file", got="nothing"
        ) from err
    except IsADirectoryError as err:
        raise NotRaggedError(
            "the path is a directory, not a file", where=Where(file=str(path)), expected="a file",
            got="a directory", remedy="open a dataset with rf.Dataset or rf.open_source",
        ) from err  # fmt: skip


def scheme_of(url: str) -> str | None:
    """Return the scheme of a URL, ``None`` for a plain path."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    return match.group(1).lower() if match else None


def path_text(place: str | os.PathLike[str]) -> str:
    """Return a path or URL as text.

    Raises
    ------
    DatasetNotFoundError
        It is neither, or empty (``RF-C008``).
    """
    if isinstance(place, str | os.PathLike):
        text = os.fspath(place)
        if isinstance(text, str) and text:
            return text
        if text == "":
            # An unset variable of a shell; it would stand for the working directory.
            raise DatasetNotFoundError(
                "the path is empty", expected="a path or URL", got="''",
                remedy="name a place; the working directory is '.'",
            )  # fmt: skip
    raise DatasetNotFoundError(
        "this is no path",
        expected="text or a path",
        got=f"{place!r}, a {type(place).__name__}",
        remedy="pass str or pathlib.Path; read data in memory with rf.read_stream",
    )


def local_path(place: str | os.PathLike[str]) -> Path:
    """Return the path that a path or a ``file://`` URL names.

    Raises
    ------
    UnsupportedFeatureError
        The URL has another scheme, or names another host.
    """
    text = path_text(place)
    scheme = scheme_of(text)
    if scheme is None:
        return Path(text)
    parts = urlsplit(text)
    if scheme != "file" or parts.netloc not in ("", "localhost"):
        raise UnsupportedFeatureError(
            "the place is not on this machine", expected="a path or file:///path", got=text,
            remedy="open it with rf.open_source, which knows the registered schemes",
        )  # fmt: skip
    return Path(unquote(parts.path))
