"""One door for every place that records come from: directory, file, stream, URLs of any scheme.

A package makes URLs of a scheme openable by an entry point in the group ``ragged_format.schemes``,
whose name is the scheme and whose object is an opener, as :func:`register_scheme` takes it::

    [project.entry-points."ragged_format.schemes"]
    http = "ragged_server.client.source:open_url"

Its module is imported when the first such URL is opened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ragged_format.arguments import check_callable, check_text
from ragged_format.byte_source import ZSTD_MAGIC, describe
from ragged_format.compact.files import CompactReader, is_compact
from ragged_format.dataset import Dataset
from ragged_format.errors import (
    DatasetNotFoundError,
    MissingDependencyError,
    NotRaggedError,
    RaggedError,
    TruncatedError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.files import MAGIC, FileReader
from ragged_format.flatbuffer import CONTINUATION
from ragged_format.local_files import local_path, open_binary, path_text, scheme_of
from ragged_format.storage import Storage, find_storage, is_remote, store_schemes
from ragged_format.streams import StreamReader

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.schema import RaggedSchema

__all__ = ["Source", "open_source", "register_scheme"]


@runtime_checkable
class Source(Protocol):
    """What every source of records offers.

    A source with random access (``is_random_access``) knows its ``num_rows`` and can be iterated
    again and again; a stream knows its rows at the end only (None) and is read once.
    """

    @property
    def schema(self) -> pa.Schema:
        """Schema of the batches."""
        ...

    @property
    def ragged_schema(self) -> RaggedSchema:
        """Declarations of the batches."""
        ...

    @property
    def num_rows(self) -> int | None:
        """Number of records, if known."""
        ...

    @property
    def is_random_access(self) -> bool:
        """Whether batches can be read in any order, and again."""
        ...

    def batches(self, *, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all records in batches."""
        ...


Opener = Callable[[str], Source]
_openers: dict[str, Opener] = {}
_GROUP = "ragged_format.schemes"


def register_scheme(scheme: str, opener: Opener) -> None:
    """Let :func:`open_source` open URLs of a further scheme; a second call replaces the first.

    It also replaces an opener that a package registered as an entry point.

    Parameters
    ----------
    scheme : str
        What stands before ``://``, for instance "s3".
    opener : callable
        Takes the whole URL, returns a :class:`Source`.
    """
    check_text("scheme", scheme)
    check_callable("opener", opener)
    _openers[scheme.lower()] = opener


def open_source(source: Any, *, storage_options: Mapping[str, Any] | None = None) -> Source:
    """Return the source of records at a place, whatever it is.

    What a file is follows from its first bytes, not from its name. Content of files and streams is
    verified while it is read; a dataset is opened as :class:`ragged_format.Dataset` opens it.

    Parameters
    ----------
    source : path, URL, ``"-"``, binary file object, or fsspec's ``OpenFile`` or mapper
        A directory is a dataset; a file is an Arrow file or stream of this format; ``"-"`` is a
        stream on standard input; a file object is a stream. In an object store a prefix with a
        manifest is a dataset.
    storage_options : mapping, optional
        For object stores: credentials, endpoint, ``cache_dir``, ``cache_bytes`` and the like.

    Raises
    ------
    DatasetNotFoundError
        There is nothing at that place (``RF-C008``).
    NotRaggedError
        What is there is not of this format (``RF-S001``).
    UnsupportedFeatureError
        The scheme of the URL is not registered (``RF-V002``).
    MissingDependencyError
        The package that opens URLs of this scheme needs a module that is not installed
        (``RF-D001``).

    Examples
    --------
    >>> open_source("gopher://host/data")
    Traceback (most recent call last):
    ...
    ragged_format.errors.UnsupportedFeatureError: [RF-V002] URLs of this scheme cannot be opened
      expected: a path, or one of ...file://...
      got:      gopher://host/data
      remedy:   register an opener with rf.register_scheme, or copy the data here
    """
    if hasattr(source, "read"):
        return StreamReader(source)
    if isinstance(source, Storage):
        return _open_stored(source)
    if not hasattr(source, "fs"):
        text = path_text(source)
        if text == "-":
            return StreamReader(sys.stdin.buffer)
        if not is_remote(text):
            return _open_local(local_path(text))
        opener = _opener(str(scheme_of(text)))
        if opener is not None:
            return opener(text)
    storage = find_storage(source, storage_options)
    if storage is None:
        names = sorted({*_openers, *_entries(), *store_schemes()})
        raise UnsupportedFeatureError(
            "URLs of this scheme cannot be opened",
            expected=f"a path, or one of {', '.join(f'{name}://' for name in names)}",
            got=str(source),
            remedy="register an opener with rf.register_scheme, or copy the data here",
        )  # fmt: skip
    return _open_stored(storage)


def _open_stored(storage: Storage) -> Source:
    file = storage.open_file()
    if file is None:
        return Dataset(storage)
    with file:
        head = file.read(8)
    if head.startswith((CONTINUATION, ZSTD_MAGIC)):
        return StreamReader(storage.open_file())
    try:
        return _open_local(storage.local_file())
    except RaggedError as err:
        err.where = replace(err.where, file=str(storage.place))
        raise


def _opener(scheme: str) -> Opener | None:
    """Return what opens URLs of a scheme; an opener registered by a call comes first."""
    if scheme in _openers:
        return _openers[scheme]
    entry = _entries().get(scheme)
    if entry is None:
        return None
    try:
        opener: Opener = entry.load()
    except ImportError as err:
        raise MissingDependencyError(
            f"opening {scheme}:// URLs needs a module that is not installed",
            expected=f"module {err.name!r}", got=f"{entry.value} fails to import",
            remedy="install the extra that it belongs to, or all: pip install 'ragged-format[all]'",
        ) from err  # fmt: skip
    return opener


@cache
def _entries() -> dict[str, EntryPoint]:
    """Return the openers that packages register, by scheme; imports none of them."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=_GROUP), key=lambda e: (e.name, e.value)):
        found.setdefault(entry.name.lower(), entry)
    return found


def _open_local(path: Path) -> Source:
    if path.is_dir():
        return Dataset(path)
    if not path.exists():
        raise DatasetNotFoundError(
            "there is nothing at this place", where=Where(file=str(path)),
            expected="a dataset directory, an Arrow file or a stream", got="nothing",
        )  # fmt: skip
    if not path.is_file():
        return StreamReader(path)  # a pipe: its first bytes can be read once only
    with open_binary(path) as file:
        head = file.read(8)
    if head.startswith(MAGIC):
        return CompactReader(path) if is_compact(path) else FileReader(path)
    if head.startswith((CONTINUATION, ZSTD_MAGIC)):
        return StreamReader(path)
    if not head:
        raise TruncatedError(
            "the file is empty", where=Where(file=str(path)), expected="an Arrow file or stream",
            got="no bytes",
        )  # fmt: skip
    raise NotRaggedError(
        "the file is neither an Arrow file nor an Arrow stream", where=Where(file=str(path)),
        expected="an Arrow IPC file or stream of this format", got=describe(head),
        remedy="import it: ragged convert --help",
    )  # fmt: skip
