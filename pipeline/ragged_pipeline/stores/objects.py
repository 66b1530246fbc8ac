"""The objects below one prefix of a store."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import obstore

from ragged_format.errors import StorageError, Where
from ragged_pipeline.stores.calls import NotThere, called

if TYPE_CHECKING:
    from ragged_pipeline.stores.urls import Location

__all__ = ["Entry", "Objects", "pause"]

# Bytes of one ranged get, and how many are under way at once.
PART_BYTES = 8 << 20
PARTS = 8
# A multipart upload has at most 10,000 parts.
_MAX_PARTS = 9_000
# A body that breaks off is fetched again so often; obstore repeats requests that fail before it.
_TRIES = 4


class Entry(NamedTuple):
    """What a store says of an object."""

    name: str
    size: int
    tag: dict[str, Any]
    modified: datetime


class Objects:
    """Reads, writes and lists the objects below a prefix; safe for threads.

    All methods raise :class:`~ragged_format.errors.StorageError` where the store fails, and
    :class:`~ragged_pipeline.stores.calls.NotThere` where an object is missing.
    """

    def __init__(self, location: Location) -> None:
        self._store = location.store
        self._prefix = location.prefix
        self.place = location.place

    def name(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.place}/{name}" if name else self.place

    def key(self, name: str) -> str:
        """Return the key of an object; that of the prefix itself for an empty name."""
        return "/".join(part for part in (self._prefix, name) if part)

    def get(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """Return an object's bytes and its tag, of one moment."""
        with called(self.name(name)):
            result = obstore.get(self._store, self.key(name))
            return bytes(result.bytes()), _tag(result.meta)

    def head(self, name: str) -> Entry:
        """Return what the store says of an object."""
        with called(self.name(name)):
            return _entry(name, obstore.head(self._store, self.key(name)))

    def list(self, *, deep: bool = False) -> Iterator[Entry]:
        """Yield the objects directly below the prefix, or all below it."""
        start = f"{self._prefix}/" if self._prefix else ""
        with called(self.place):
            for chunk in obstore.list(self._store, prefix=self._prefix or None, chunk_size=1000):
                for meta in chunk:
                    name = meta["path"].removeprefix(start)
                    if name and (deep or "/" not in name):
                        yield _entry(name, meta)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are gone already do not matter."""
        for name in names:
            try:
                with called(self.name(name)):
                    obstore.delete(self._store, self.key(name))
            except NotThere:
                continue

    def put(self, name: str, content: bytes, condition: dict[str, Any] | None = None) -> None:
        """Write a small object.

        Parameters
        ----------
        name : str
        content : bytes
        condition : dict, optional
            A tag: replace the object only if it still has it. An empty one: create the object.
            Default: write it whatever is there.

        Raises
        ------
        Conflict
            The condition does not hold.
        """
        mode: Any = "overwrite" if condition is None else condition or "create"
        with called(self.name(name)):
            obstore.put(self._store, self.key(name), content, mode=mode, use_multipart=False)

    def upload(self, file: Path, name: str) -> None:
        """Write a file as an object, large ones in parts; it is there whole or not at all."""
        size = file.stat().st_size
        part = max(PART_BYTES, -(-size // _MAX_PARTS))
        with called(self.name(name)):
            obstore.put(
                self._store, self.key(name), file, use_multipart=size > part, chunk_size=part,
                max_concurrency=PARTS,
            )  # fmt: skip
        if (stored := self.head(name).size) != size:
            raise StorageError(
                "the store kept another number of bytes than it was sent",
                where=Where(file=self.name(name)), expected=size, got=stored,
                remedy="try again; the store is broken if it happens again",
            )  # fmt: skip

    def download(self, name: str, path: Path, size: int) -> None:
        """Copy an object of a known size to a file, by ranges in parallel."""
        starts = range(0, size, PART_BYTES)
        with path.open("wb") as file:
            os.truncate(file.fileno(), size)
            if len(starts) <= 1:
                self._copy(name, file.fileno(), 0, size)
                return
            with ThreadPoolExecutor(min(PARTS, len(starts))) as pool:
                jobs = [
                    pool.submit(self._copy, name, file.fileno(), a, min(a + PART_BYTES, size))
                    for a in starts
                ]
                try:
                    for job in jobs:
                        job.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise

    def _copy(self, name: str, descriptor: int, start: int, end: int) -> None:
        done = start
        view = memoryview(self.read(name, start, end))
        while done < end:
            done += os.pwrite(descriptor, view[done - start :], done)

    def read(
        self, name: str, start: int, end: int, *, tag: dict[str, Any] | None = None
    ) -> memoryview:
        """Return the bytes ``[start, end)`` of an object.

        Parameters
        ----------
        tag : dict, optional
            The object must still have it.

        Raises
        ------
        Conflict
            It has not.
        """
        if start == end:
            return memoryview(b"")
        options: Any = {"range": (start, end)}
        if tag and tag.get("e_tag"):
            options["if_match"] = tag["e_tag"]
        for attempt in range(_TRIES):
            try:
                with called(self.name(name)):
                    result = obstore.get(self._store, self.key(name), options=options)
                    body = memoryview(result.bytes())
                if len(body) == end - start:
                    return body
                error = StorageError(
                    "the store sent another number of bytes than it was asked for",
                    where=Where(file=self.name(name)), expected=end - start, got=len(body),
                    remedy="the object may be cut; restore it",
                )  # fmt: skip
            except StorageError as err:
                error = err
            pause(attempt)
        raise error


def pause(attempt: int) -> None:
    """Wait before the next attempt: at random, longer each time, 2 s at most."""
    time.sleep(random.uniform(0, min(0.02 * 2**attempt, 2.0)))  # noqa: S311 - no secret


def _tag(meta: Any) -> dict[str, Any]:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


def _entry(name: str, meta: Any) -> Entry:
    return Entry(name, meta["size"], _tag(meta), meta["last_modified"])
