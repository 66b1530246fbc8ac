"""Places that fsspec knows, to be read from: its URLs, ``OpenFile`` objects and mappers."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from ragged_format.digest import text_digest
from ragged_format.errors import (
    DatasetNotFoundError,
    MissingShardError,
    RaggedError,
    StorageError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.manifest import MANIFEST_NAME, Manifest, Shard
from ragged_format.snapshot import ShardReader, open_cached
from ragged_format.storage import ReadOnlyStorage
from ragged_pipeline.stores.urls import cache_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FsspecStorage", "open_fsspec"]

_CACHE = ("cache_dir", "cache_bytes")


def open_fsspec(place: Any, options: Mapping[str, Any]) -> FsspecStorage | None:
    """Return the place of a URL or of an fsspec object; None for a URL that fsspec does not know.

    Parameters
    ----------
    place : str, ``OpenFile`` or mapper
    options : mapping
        Of the file system, and ``cache_dir`` and ``cache_bytes``.
    """
    if not isinstance(place, str):
        path = getattr(place, "path", None) or getattr(place, "root", "")
        return FsspecStorage(place.fs, str(path), options)
    try:
        import fsspec
    except ImportError:
        return None
    first = place.split("://", 1)[0].split("::", 1)[0]
    if first not in fsspec.available_protocols():
        return None
    own = {name: value for name, value in options.items() if name not in _CACHE}
    try:
        fs, path = fsspec.core.url_to_fs(place, **own)
    except (ImportError, ValueError, TypeError) as err:
        raise UnsupportedFeatureError(
            "fsspec cannot open this URL", where=Where(file=place),
            expected="a file system that is installed, and its options", got=str(err),
            remedy="install what fsspec names, or use s3://, gs:// or az://",
        ) from err  # fmt: skip
    except OSError as err:
        raise StorageError(
            "the file system cannot be reached", where=Where(file=place),
            expected="an answer", got=f"{type(err).__name__}: {err}",
            remedy="check URL and network",
        ) from err  # fmt: skip
    return FsspecStorage(fs, path, options)


class FsspecStorage(ReadOnlyStorage):
    """A directory or file of an fsspec file system.

    Read-only: fsspec has no put that fails when somebody else was faster.

    Parameters
    ----------
    fs : fsspec.AbstractFileSystem
    path : str
    options : mapping, optional
        ``cache_dir`` and ``cache_bytes``.
    """

    def __init__(self, fs: Any, path: str, options: Mapping[str, Any] | None = None) -> None:
        self._fs, self._path = fs, path.rstrip("/")
        self._options = {n: value for n, value in (options or {}).items() if n in _CACHE}
        self._cache = cache_of(self._options)
        self.place = _shown(fs, self._path)
        self.max_open_bytes = self._cache.max_bytes
        self._key = text_digest(self.place.encode()).hex()[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecStorage, (self._fs, self._path, self._options)

    def read_manifest(self) -> Manifest:
        """Return the current manifest."""
        where = Where(file=f"{self.place}/{MANIFEST_NAME}")
        try:
            text = self._fs.cat_file(f"{self._path}/{MANIFEST_NAME}")
        except (FileNotFoundError, NotADirectoryError) as err:
            raise DatasetNotFoundError(
                "there is no dataset here", where=where, got="no manifest",
                expected=f"a directory with {MANIFEST_NAME}", remedy="check the path",
            ) from err  # fmt: skip
        try:
            return Manifest.from_json(bytes(text))
        except RaggedError as err:
            raise err.at(where) from err.__cause__

    def open_shard(self, shard: Shard, manifest: Manifest, *, verify: bool) -> ShardReader:
        """Return a shard, mapped from the cache."""
        return open_cached(
            self._cache, f"{self._key}/{shard.name}", partial(self._fetch, shard.name),
            shard, manifest, verify=verify, label=f"{self.place}/{shard.name}",
        )  # fmt: skip

    def _fetch(self, name: str, path: Path) -> None:
        try:
            self._fs.get_file(f"{self._path}/{name}", str(path))
        except FileNotFoundError as err:
            raise MissingShardError(
                "a shard that the manifest lists is not there", expected=name,
                where=Where(file=f"{self.place}/{name}"), got="no file",
                remedy="restore the file, or open the dataset anew if it was swept",
            ) from err  # fmt: skip

    def scratch(self, purpose: str) -> Path:
        """Return a directory on local disk for this place alone."""
        return self._cache.directory.parent / purpose / self._key

    def files(self) -> Iterator[tuple[str, int, str]]:
        """Yield name, size and version of all files below the place; ``""`` is itself."""
        if self._fs.isfile(self._path):
            found = {self._path: self._fs.info(self._path)}
        else:
            found = self._fs.find(self._path, detail=True)
        for path, info in sorted(found.items()):
            yield path.removeprefix(self._path).strip("/"), info["size"], str(info)

    def fetch(self, name: str, path: Path, size: int) -> None:  # noqa: ARG002 - as the others'
        """Copy one of :meth:`files` to a path."""
        self._fs.get_file(f"{self._path}/{name}" if name else self._path, str(path))

    def open_file(self) -> IO[bytes] | None:
        """Return the file, or None for a directory or nothing."""
        if not self._fs.isfile(self._path):
            return None
        return cast("IO[bytes]", _ClosingFile(self._fs.open(self._path, "rb")))

    def local_file(self) -> Path:
        """Return a copy of the file, in the cache."""
        info = self._fs.info(self._path)
        size = info.get("size")
        if size is None:
            raise StorageError(
                "the file system does not tell the size of the file",
                where=Where(file=str(self.place)), expected="a size", got="none",
                remedy="copy the file here first",
            )  # fmt: skip
        version = text_digest(repr(sorted(info.items(), key=str)).encode()).hex()[:16]
        return self._cache.open(
            f"{self._key}/object-{version}.arrow", int(size),
            lambda path: self._fs.get_file(self._path, str(path)),
            lambda path, fresh: path,  # noqa: ARG005 - whoever opens it verifies it
        )  # fmt: skip


class _ClosingFile(io.RawIOBase):
    """A file that closes what it reads from at the end, or when it is dropped."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        out = memoryview(buffer).cast("B")
        data = self._file.read(len(out)) if out and not self.closed else b""
        out[: len(data)] = data
        if out and not data:
            self.close()
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _shown(fs: Any, path: str) -> str:
    """Return a URL for errors, without what may be a secret in options."""
    if "fsspec" in sys.modules and hasattr(fs, "unstrip_protocol"):
        return str(fs.unstrip_protocol(path)).split("?")[0]
    return path
