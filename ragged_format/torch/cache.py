"""A dataset elsewhere, of which the shards in use are kept on local disk."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragged_format.arguments import check_callable, check_size
from ragged_format.errors import DatasetNotFoundError, LimitExceededError, StorageError, Where
from ragged_format.local_files import path_text
from ragged_format.manifest import MANIFEST_NAME, read_manifest
from ragged_format.shard_cache import ShardCache
from ragged_format.snapshot import ShardReader, Snapshot, open_cached
from ragged_format.storage import ReadOnlyStorage

if TYPE_CHECKING:
    from ragged_format.manifest import Manifest, Shard

__all__ = ["CachedDataset"]

Fetch = Callable[[str, Path], None]


class CachedDataset:
    """A dataset that is fetched shard by shard when a loader needs it, for ``shuffle="block"``.

    A loader that is given one fetches a shard before it reads from it, checks it against the
    manifest and removes the shards not used for longest when there are more than `max_bytes`. With
    ``shuffle="block"``, and windows of blocks that fit into the cache together, an epoch fetches
    each shard about once; with a global shuffle it would fetch one for almost every record.

    Guarantees: several processes can use one directory; a shard is there whole or not at all. What
    a batch was made of is copied, so removing a shard never touches a batch.

    Parameters
    ----------
    fetch : callable
        ``fetch(name, path)`` copies the file `name` of the dataset (``manifest.json``, or a shard)
        to `path`. Picklable where workers are used.
    directory : path
        Where files are kept; created if need be.
    max_bytes : int
        Most bytes of shards that are kept.

    Raises
    ------
    LimitExceededError
        A shard alone is larger than `max_bytes` (``RF-L001``).

    Examples
    --------
    >>> import shutil, tempfile
    >>> import pyarrow as pa, ragged_format as rf
    >>> from ragged_format.torch import CachedDataset, RaggedLoader
    >>> rows = [{"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}]
    >>> schema = rf.sample_schema(vocab_size=9, columns=[])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(f"{folder}/far", schema) as writer:
    ...         writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    ...     far = CachedDataset(
    ...         lambda name, path: shutil.copyfile(f"{folder}/far/{name}", path),
    ...         f"{folder}/near",
    ...         max_bytes=1 << 20,
    ...     )
    ...     with RaggedLoader(far, shuffle="block") as loader:
    ...         [batch.strings("sample_id") for batch in loader]
    [['a']]
    """

    def __init__(self, fetch: Fetch, directory: str | os.PathLike[str], *, max_bytes: int) -> None:
        check_callable("fetch", fetch)
        check_size("max_bytes", max_bytes)
        self.fetch = fetch
        self.directory = Path(path_text(directory))
        self.max_bytes = operator.index(max_bytes)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise StorageError(
                "the directory of the cache cannot be made", where=Where(file=str(self.directory)),
                expected="a directory that can be written", got=str(err),
                remedy="pass another directory",
            ) from err  # fmt: skip
        self._storage = _Fetched(fetch, ShardCache(self.directory, max_bytes))
        self.manifest = self._storage.read_manifest()
        for shard in self.manifest.shards:
            if shard.bytes > max_bytes:
                raise LimitExceededError(
                    f"shard {shard.name} alone does not fit into the cache",
                    expected=f"<= {max_bytes} bytes", got=shard.bytes,
                    remedy="raise max_bytes, or write smaller shards",
                )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the place: another process opens it anew, by the same directory."""
        return partial(type(self), max_bytes=self.max_bytes), (self.fetch, self.directory)

    def snapshot(self, *, verify: bool) -> Snapshot:
        """Return the shards, for one reading thread."""
        return Snapshot(self._storage, self.manifest, verify=verify)


class _Fetched(ReadOnlyStorage):
    """What a callable fetches, as a place of a dataset."""

    def __init__(self, fetch: Fetch, cache: ShardCache) -> None:
        self.place = cache.directory
        self.max_open_bytes = cache.max_bytes
        self._fetch, self._cache = fetch, cache

    def read_manifest(self) -> Manifest:
        directory = self._cache.directory
        part = directory / f"{MANIFEST_NAME}.{os.getpid()}-{threading.get_ident()}.tmp"
        try:
            self._fetch(MANIFEST_NAME, part)
            if not part.is_file():
                raise DatasetNotFoundError(
                    "fetch made no file", where=Where(file=MANIFEST_NAME),
                    expected=f"the file at {part}", got="none",
                    remedy="copy the file to the path that fetch is given, or raise",
                )  # fmt: skip
            part.replace(directory / MANIFEST_NAME)
        finally:
            part.unlink(missing_ok=True)
        return read_manifest(directory)

    def open_shard(self, shard: Shard, manifest: Manifest, *, verify: bool) -> ShardReader:
        fetch = partial(self._fetch, shard.name)
        return open_cached(self._cache, shard.name, fetch, shard, manifest, verify=verify)
