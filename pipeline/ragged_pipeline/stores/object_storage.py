"""The place of a dataset, or of a file, in an object store."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from ragged_format.digest import text_digest
from ragged_format.errors import (
    CorruptError,
    DatasetNotFoundError,
    MissingShardError,
    RaggedError,
    StorageError,
    Where,
)
from ragged_format.local_storage import LocalStorage
from ragged_format.manifest import MANIFEST_NAME, Manifest, Shard
from ragged_format.snapshot import ShardReader, open_cached
from ragged_pipeline.stores.calls import Conflict, NotThere
from ragged_pipeline.stores.objects import PART_BYTES, Entry, Objects
from ragged_pipeline.stores.session import ObjectSession
from ragged_pipeline.stores.sweeping import sweep
from ragged_pipeline.stores.urls import locate

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ObjectStorage", "open_store"]


def open_store(url: str, options: Mapping[str, Any]) -> ObjectStorage:
    """Return the place at a URL; see :func:`ragged_pipeline.stores.urls.locate` for the options."""
    return ObjectStorage(url, options)


class ObjectStorage:
    """A prefix of an object store.

    Shards are fetched whole, by ranges in parallel, into a cache on local disk, compared with their
    digests and mapped. Pickles as URL and options.

    Parameters
    ----------
    url : str
    options : mapping, optional
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._url, self._options = url, dict(options or {})
        self.location = locate(url, self._options)
        self.objects = Objects(self.location)
        self.place = self.location.place
        self.max_open_bytes: int = self.location.cache.max_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStorage, (self._url, self._options)

    def __repr__(self) -> str:
        return f"ObjectStorage({self.place!r})"

    def read_manifest(self) -> Manifest:
        """Return the current manifest."""
        return self.tagged_manifest()[0]

    def tagged_manifest(self) -> tuple[Manifest, dict[str, Any]]:
        """Return the current manifest and its tag, of one moment.

        Raises
        ------
        DatasetNotFoundError
            There is none (``RF-C008``).
        ManifestError
            It is damaged (``RF-C007``).
        """
        where = Where(file=self.objects.name(MANIFEST_NAME))
        try:
            text, tag = self.objects.get(MANIFEST_NAME)
        except NotThere as err:
            raise DatasetNotFoundError(
                "there is no dataset here", where=where, expected=f"a prefix with {MANIFEST_NAME}",
                got="no manifest",
                remedy="check bucket and prefix; write a dataset with rf.Writer(url, schema)",
            ) from err  # fmt: skip
        try:
            return Manifest.from_json(text), tag
        except RaggedError as err:
            raise err.at(where) from err.__cause__

    def open_shard(self, shard: Shard, manifest: Manifest, *, verify: bool) -> ShardReader:
        """Return a shard, mapped from the cache."""
        return open_cached(
            self.location.cache, f"{self.location.key}/{shard.name}", partial(self._fetch, shard),
            shard, manifest, verify=verify, label=self.objects.name(shard.name),
        )  # fmt: skip

    def _fetch(self, shard: Shard, path: Path) -> None:
        try:
            self.objects.download(shard.name, path, shard.bytes)
        except NotThere as err:
            raise MissingShardError(
                "a shard that the manifest lists is not there", expected=shard.name,
                where=Where(file=self.objects.name(shard.name)), got="no object",
                remedy="restore the object, or open the dataset anew if it was swept",
            ) from err  # fmt: skip

    def _self(self) -> Entry | None:
        """Return what the store says of the object at the URL itself, if there is one."""
        if not self.location.prefix:
            return None
        try:
            entry = self.objects.head("")
        except NotThere:
            return None
        except StorageError:
            # Who may not list a bucket is denied what is not there; the manifest tells.
            return None
        # What consoles show as a folder.
        return entry if entry.size or not self._url.endswith("/") else None

    def open_file(self) -> IO[bytes] | None:
        """Return the object at the URL itself, read by ranges, or None if there is none."""
        entry = self._self()
        return None if entry is None else cast("IO[bytes]", ObjectFile(self.objects, entry))

    def local_file(self) -> Path:
        """Return a copy of the object at the URL itself, in the cache."""
        entry = self.objects.head("")
        version = text_digest(f"{entry.tag}\n{entry.size}".encode()).hex()[:16]
        return self.location.cache.open(
            f"{self.location.key}/object-{version}.arrow", entry.size,
            lambda path: self.objects.download("", path, entry.size),
            lambda path, fresh: path,  # noqa: ARG005 - whoever opens it verifies it
        )  # fmt: skip

    def scratch(self, purpose: str) -> Path:
        """Return a directory on local disk for this place alone."""
        return self.location.scratch(purpose) / self.location.key

    def files(self) -> Iterator[tuple[str, int, str]]:
        """Yield name, size and version of all objects below the place; ``""`` is itself."""
        entry = self._self()
        entries = self.objects.list(deep=True) if entry is None else [entry]
        for entry in entries:
            if not entry.name.endswith("/"):
                yield entry.name, entry.size, f"{entry.tag} {entry.modified}"

    def fetch(self, name: str, path: Path, size: int) -> None:
        """Copy one of :meth:`files` to a path."""
        self.objects.download(name, path, size)

    def begin(self, token: str) -> ObjectSession:
        """Begin to write; the store is asked whether it honours conditions."""
        return ObjectSession(self, token)

    def sweep(self, grace_s: float, *, dry_run: bool = False) -> list[str]:
        """Remove what crashed or replaced writers left; of jobs, on this machine."""
        work = self.scratch("jobs")
        left = LocalStorage(work).sweep(grace_s, dry_run=dry_run) if work.is_dir() else []
        try:
            return [*sweep(self, grace_s, dry_run=dry_run), *left]
        except DatasetNotFoundError:
            if not left:
                raise
            return left


class ObjectFile(io.RawIOBase):
    """An object as a file that is read from front to back; the next range is fetched meanwhile."""

    def __init__(self, objects: Objects, entry: Entry) -> None:
        self.name = objects.name(entry.name)
        self._objects, self._entry = objects, entry
        self._block = memoryview(b"")
        self._asked = 0
        self._next: Future[memoryview] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer as far as what is there reaches; 0 at the end."""
        out = memoryview(buffer).cast("B")
        if not self._block:
            self._block = self._following()
        count = min(len(out), len(self._block))
        out[:count] = self._block[:count]
        self._block = self._block[count:]
        return count

    def close(self) -> None:
        """Forget what was fetched."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._next, self._block = None, None, memoryview(b"")
        super().close()

    def _following(self) -> memoryview:
        block = self._fetch(first=self._asked == 0) if self._next is None else self._next.result()
        self._next = None
        if self._asked < self._entry.size and len(block) == PART_BYTES:
            # Somebody reads on: fetch ahead from now on.
            self._pool = self._pool or ThreadPoolExecutor(1)
            self._next = self._pool.submit(self._fetch)
        return block

    def _fetch(self, *, first: bool = False) -> memoryview:
        # Most files are closed after a look at their first bytes.
        end = min(self._asked + (1 << 16 if first else PART_BYTES), self._entry.size)
        start, self._asked = self._asked, end
        try:
            return self._objects.read(self._entry.name, start, end, tag=self._entry.tag)
        except (Conflict, NotThere) as err:
            raise CorruptError(
                "an object was replaced while it was read", where=Where(file=self.name),
                expected="an object that stays as it is", got="another one",
                remedy="read it again",
            ) from err  # fmt: skip
