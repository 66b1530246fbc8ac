"""Where datasets lie: what a directory and an object store have in common.

A package makes URLs of a scheme places of datasets by an entry point in the group
``ragged_format.stores``, whose name is the scheme and whose object is called with the URL and the
storage options and returns a :class:`Storage`. The name ``*`` stands for all schemes that no other
entry names::

    [project.entry-points."ragged_format.stores"]
    s3 = "ragged_pipeline.stores:open_store"

Its module is imported when the first such URL is opened. The opener of ``*`` is also called with
objects that have a file system in ``fs``, as fsspec's have; it returns None for what it does not
know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from ragged_format.arguments import check_callable, check_text
from ragged_format.errors import MissingDependencyError, UnsupportedFeatureError, Where
from ragged_format.local_files import path_text, scheme_of
from ragged_format.local_storage import LocalStorage

if TYPE_CHECKING:
    from ragged_format.manifest import Manifest, Shard
    from ragged_format.snapshot import ShardReader

__all__ = [
    "PlaceLike",
    "ReadOnlyStorage",
    "Session",
    "Storage",
    "find_storage",
    "is_remote",
    "open_storage",
    "register_store",
    "store_schemes",
]

PlaceLike: TypeAlias = "str | os.PathLike[str] | Storage"
Merge: TypeAlias = "Callable[[Manifest | None], Manifest]"


@runtime_checkable
class Storage(Protocol):
    """The place of one dataset, or of one file. Pickles; may be used by several threads."""

    @property
    def place(self) -> Path | str:
        """Path or URL, as errors show it; without secrets."""
        ...

    @property
    def max_open_bytes(self) -> int | None:
        """Most bytes of shards that a reader keeps open; None: as many as there are."""
        ...

    def read_manifest(self) -> Manifest:
        """Return the current manifest.

        Raises
        ------
        DatasetNotFoundError
            There is none (``RF-C008``).
        ManifestError
            It is damaged (``RF-C007``).
        """
        ...

    def open_shard(self, shard: Shard, manifest: Manifest, *, verify: bool) -> ShardReader:
        """Return a shard, opened; errors as :class:`ragged_format.snapshot.ShardReader`."""
        ...

    def open_file(self) -> IO[bytes] | None:
        """Return the place itself as a file to be read once, or None if it is no file."""
        ...

    def local_file(self) -> Path:
        """Return the place itself, which is a file, as a file of this machine."""
        ...

    def begin(self, token: str) -> Session:
        """Begin to write under a token of 16 hexadecimal digits that nobody else uses.

        Raises
        ------
        DatasetExistsError
            Something else is in the way (``RF-C009``).
        UnsupportedFeatureError
            Nothing can be written here (``RF-V002``).
        """
        ...

    def sweep(self, grace_s: float, *, dry_run: bool = False) -> list[str]:
        """Remove what crashed or replaced writers left; see :func:`ragged_format.sweep`."""
        ...


class ReadOnlyStorage:
    """A :class:`Storage` to be read from: to be derived from."""

    place: Path | str
    max_open_bytes: int | None

    def read_manifest(self) -> Manifest:
        """Return the current manifest."""
        raise NotImplementedError

    def open_shard(self, shard: Shard, manifest: Manifest, *, verify: bool) -> ShardReader:
        """Return a shard, opened."""
        raise NotImplementedError

    def open_file(self) -> IO[bytes] | None:
        """Return None: the place is a dataset."""
        return None

    def local_file(self) -> Path:
        """Refuse: the place is no file."""
        raise self._read_only("there is no file here")

    def begin(self, token: str) -> Session:  # noqa: ARG002 - the protocol's
        """Refuse."""
        raise self._read_only("this place can only be read from")

    def sweep(self, grace_s: float, *, dry_run: bool = False) -> list[str]:  # noqa: ARG002
        """Refuse."""
        raise self._read_only("this place can only be read from")

    def _read_only(self, what: str) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            what, where=Where(file=str(self.place)),
            expected="a directory, or an object store with conditional puts",
            got=type(self).__name__, remedy="write to a directory, or to s3://, gs:// or az://",
        )  # fmt: skip


class Session(Protocol):
    """One writer's work on a dataset, from its first shard to the commit.

    Attributes
    ----------
    directory : Path
        Where shards are written before they are put.
    undecided : bool
        The commit may have succeeded although it raised: its shards must stay.
    """

    directory: Path
    undecided: bool

    def put(self, name: str) -> None:
        """Take a finished shard, which lies in the directory; durable when this returns."""
        ...

    def commit(self, merge: Merge, names: Sequence[str]) -> Manifest:
        """Replace the manifest by what `merge` makes of the current one, atomically.

        Guarantees: no commit of another writer is lost; `merge` is called again on what another
        one committed meanwhile. What `merge` raises is raised, and nothing is changed.

        Parameters
        ----------
        merge : callable
            Takes the current manifest, or None.
        names : sequence of str
            Shards that were put.

        Raises
        ------
        MissingShardError
            A shard that was put is gone (``RF-C006``).
        """
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Remove shards that were put and will not be committed."""
        ...

    def end(self) -> None:
        """Release what the session holds; may be called again."""
        ...


StoreOpener: TypeAlias = Callable[[Any, Mapping[str, Any]], Storage | None]
_openers: dict[str, StoreOpener] = {}
_GROUP = "ragged_format.stores"
_ANY = "*"


def register_store(scheme: str, opener: StoreOpener) -> None:
    """Let datasets lie at URLs of a further scheme; a second call replaces the first.

    Parameters
    ----------
    scheme : str
        What stands before ``://``.
    opener : callable
        Takes the URL and the storage options, returns a :class:`Storage`.
    """
    check_text("scheme", scheme)
    check_callable("opener", opener)
    _openers[scheme.lower()] = opener


def open_storage(place: PlaceLike, options: Mapping[str, Any] | None = None) -> Storage:
    """Return the storage at a place.

    Parameters
    ----------
    place : path, URL, object with a file system, or Storage
        A storage is returned as it is. Objects with a file system are fsspec's ``OpenFile`` and
        mapper.
    options : mapping, optional
        For object stores: credentials, endpoint and the like, as the store names them.

    Raises
    ------
    UnsupportedFeatureError
        Nothing that is installed knows the URL's scheme (``RF-V002``).
    MissingDependencyError
        The package that does needs a module that is not installed (``RF-D001``).

    Examples
    --------
    >>> open_storage("file:///data/rollouts").place.as_posix()
    '/data/rollouts'
    """
    if isinstance(place, Storage):
        return place
    if not hasattr(place, "fs"):
        text = path_text(place)
        if not is_remote(text):
            return LocalStorage(text)
    storage = find_storage(place, options)
    if storage is None:
        known = ", ".join(f"{name}://" for name in store_schemes())
        raise UnsupportedFeatureError(
            "URLs of this scheme are no places of datasets",
            expected=f"a path, or one of {known}", got=str(place),
            remedy="copy the data here, or register the scheme with "
            "ragged_format.storage.register_store",
        )  # fmt: skip
    return storage


def is_remote(text: str) -> bool:
    """Return whether a text is a URL of another scheme than ``file``."""
    return _scheme(text) not in (None, "file")


def find_storage(place: Any, options: Mapping[str, Any] | None = None) -> Storage | None:
    """Return the storage at a URL, or of an object with a file system, if anything knows it.

    Raises
    ------
    MissingDependencyError
        The entry point that does cannot be imported (``RF-D001``).
    """
    scheme = _ANY if hasattr(place, "fs") else str(_scheme(place))
    opener = _openers.get(scheme)
    if opener is None:
        entry = _entries().get(scheme) or _entries().get(_ANY)
        if entry is None:
            return None
        try:
            opener = entry.load()
        except ImportError as err:
            raise MissingDependencyError(
                f"opening {scheme}:// URLs needs a module that is not installed",
                expected=f"module {err.name!r}", got=f"{entry.value} fails to import",
                remedy="pip install 'ragged-format[store]'",
            ) from err  # fmt: skip
    return opener(place, dict(options or {}))


def store_schemes() -> list[str]:
    """Return the schemes at which datasets can lie, those left to ``*`` excepted."""
    return sorted({"file", *_openers, *_entries()} - {_ANY})


@cache
def _entries() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=_GROUP), key=lambda e: (e.name, e.value)):
        found.setdefault(entry.name.lower(), entry)
    return found


def _scheme(text: str) -> str | None:
    """Return the scheme of a URL; that of a chain such as ``simplecache::s3://…`` is its first."""
    head, chained, rest = text.partition("::")
    if chained and "://" in rest and head.isalnum():
        return head.lower()
    return scheme_of(text)
