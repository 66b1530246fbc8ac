"""A dataset elsewhere, of which the shards in use are kept on local disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ragged_format.errors import LimitExceededError
from ragged_format.lists import offsets_of
from ragged_format.manifest import MANIFEST_NAME, read_manifest
from ragged_format.snapshot import ShardReader

if TYPE_CHECKING:
    from ragged_format.lists import Int64
    from ragged_format.manifest import Manifest

__all__ = ["CachedDataset", "CachedShards"]

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
        self.fetch = fetch
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        _fetch(fetch, MANIFEST_NAME, self.directory)
        self.manifest = read_manifest(self.directory)
        for shard in self.manifest.shards:
            if shard.bytes > max_bytes:
                raise LimitExceededError(
                    f"shard {shard.name} alone does not fit into the cache",
                    expected=f"<= {max_bytes} bytes", got=shard.bytes,
                    remedy="raise max_bytes, or write smaller shards",
                )  # fmt: skip

    def shards(self, *, verify: bool) -> CachedShards:
        """Return the shards, for one reading thread."""
        return CachedShards(self, self.manifest, verify=verify)


class CachedShards:
    """The shards of a :class:`CachedDataset`; used by one thread.

    Attributes
    ----------
    fetched, evicted : int
        Shards so far.
    on_evict : callable, optional
        Told the number of each shard that is removed, before it is.
    """

    def __init__(self, dataset: CachedDataset, manifest: Manifest, *, verify: bool) -> None:
        self.bounds: Int64 = offsets_of(np.array([s.rows for s in manifest.shards], np.int64))
        self.on_evict: Callable[[int], None] | None = None
        self.fetched = 0
        self.evicted = 0
        self._dataset, self._manifest, self._verify = dataset, manifest, verify
        # In the order of their last use.
        self._open: dict[int, ShardReader] = {}
        self._nbytes = 0

    def reader(self, number: int) -> ShardReader:
        """Return one shard, fetching it if it is not there."""
        reader = self._open.pop(number, None)
        if reader is None:
            shard = self._manifest.shards[number]
            while self._open and self._nbytes + shard.bytes > self._dataset.max_bytes:
                self._evict(next(iter(self._open)))
            directory = self._dataset.directory
            if not (directory / shard.name).exists():
                _fetch(self._dataset.fetch, shard.name, directory)
                self.fetched += 1
            reader = ShardReader(directory, shard, self._manifest, verify=self._verify)
            self._nbytes += shard.bytes
        self._open[number] = reader
        return reader

    def _evict(self, number: int) -> None:
        if self.on_evict is not None:
            self.on_evict(number)
        del self._open[number]
        shard = self._manifest.shards[number]
        self._nbytes -= shard.bytes
        self.evicted += 1
        (self._dataset.directory / shard.name).unlink(missing_ok=True)


def _fetch(fetch: Fetch, name: str, directory: Path) -> None:
    """Fetch a file such that others see it whole."""
    part = directory / f"{name}.{os.getpid()}-{threading.get_ident()}.part"
    try:
        fetch(name, part)
        part.replace(directory / name)
    finally:
        part.unlink(missing_ok=True)
