"""One writer in an object store: local staging, a lease, and commits by conditional put."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragged_format.errors import (
    DatasetNotFoundError,
    MissingShardError,
    StorageError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.local_storage import Lease, lease_name, lives, replaced
from ragged_format.manifest import MANIFEST_NAME, Manifest
from ragged_pipeline.stores.calls import Conflict, NotThere
from ragged_pipeline.stores.objects import Objects, pause

if TYPE_CHECKING:
    from ragged_pipeline.stores.object_storage import ObjectStorage

__all__ = [
    "ObjectSession",
    "clear_dead",
    "commit",
    "require_conditions",
    "tombstone_name",
]

# Rounds of reading and putting the manifest: in each, one of the writers that compete succeeds.
_ROUNDS = 200
# Answers in a row that leave open whether a put took place.
_FAILURES = 4


def tombstone_name(token: str) -> str:
    """Return the name of the object that says which shards a writer took from the list."""
    return f"replaced-{token}.json"


class ObjectSession:
    """A writer's work on a dataset in an object store.

    Shards are written to a directory of this machine and uploaded when they are finished. What a
    killed process left in that directory is removed by the next one.
    """

    def __init__(self, storage: ObjectStorage, token: str) -> None:
        self.undecided = False
        self._storage, self._token = storage, token
        self._objects = storage.objects
        staging = storage.location.scratch("staging")
        staging.mkdir(parents=True, exist_ok=True)
        clear_dead(staging)
        self._local = Lease(staging, token)
        self.directory = staging / token
        self.directory.mkdir()
        try:
            require_conditions(self._objects, lease_name(token))
        except BaseException:
            self.end()
            raise

    def put(self, name: str) -> None:
        """Upload a shard, and show that the writer lives."""
        file = self.directory / name
        self._objects.upload(file, name)
        file.unlink()
        self._objects.put(lease_name(self._token), b"")

    def commit(
        self, merge: Callable[[Manifest | None], Manifest], names: Sequence[str]
    ) -> Manifest:
        """Replace the manifest, and retry on what others committed meanwhile."""
        self._objects.put(lease_name(self._token), b"")
        try:
            merged = commit(self._storage, merge, names, self._token, self._decide)
        finally:
            self._remove_lease()
        return merged

    def _decide(self, *, undecided: bool) -> None:
        self.undecided = undecided

    def drop(self, names: Sequence[str]) -> None:
        """Remove shards."""
        self._objects.delete(names)

    def end(self) -> None:
        """Remove lease and staging."""
        self._remove_lease()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._local.release()

    def _remove_lease(self) -> None:
        # A store out of reach keeps it, and it expires.
        with suppress(StorageError):
            self._objects.delete([lease_name(self._token)])


def commit(
    storage: ObjectStorage,
    merge: Callable[[Manifest | None], Manifest],
    names: Sequence[str],
    token: str,
    decide: Callable[..., None],
) -> Manifest:
    """Replace the manifest by what `merge` makes of the current one, by conditional puts.

    Guarantees: no commit is lost. A put whose answer was lost is looked up, by its shards, or by
    its bytes where it has none, so that it counts once.

    Parameters
    ----------
    storage : ObjectStorage
    merge : callable
        Called again on what others committed meanwhile.
    names : sequence of str
        Shards that this writer put.
    token : str
        Of the writer.
    decide : callable
        Told ``undecided=`` before a put, and when its outcome is known.

    Raises
    ------
    MissingShardError
        A shard that was put is gone (``RF-C006``).
    StorageError
        The store failed; whether the commit took place is then unknown (``RF-C010``).
    """
    objects = storage.objects
    where = Where(file=objects.name(MANIFEST_NAME))
    _require_shards(objects, names)
    tried: bytes | None = None
    failures = 0
    for attempt in range(_ROUNDS):
        current, tag = _current(storage)
        if tried is not None:
            if current is not None and _is_ours(current, names, tried):
                decide(undecided=False)
                return current
            if not failures:
                decide(undecided=False)
        merged = merge(current)
        tried = merged.to_json()
        if gone := replaced(current, merged):
            # Before the commit, so that it is there whatever happens; listed shards are not swept.
            objects.put(tombstone_name(token), json.dumps({"shards": list(gone)}).encode())
        decide(undecided=True)
        try:
            objects.put(MANIFEST_NAME, tried, tag)
        except Conflict:
            # Another writer's commit, or this one's own whose first answer was lost.
            failures = 0
        except StorageError as err:
            failures += 1
            if failures == _FAILURES:
                err.remedy = (
                    "look whether the commit took place before you repeat it; its shards stay "
                    "until they are swept"
                )
                raise
        else:
            decide(undecided=False)
            return merged
        pause(attempt)
    raise StorageError(
        "other writers were faster each time", where=where, expected="one success",
        got=f"{_ROUNDS} conflicts", remedy="let fewer writers append at the same time",
    )  # fmt: skip


def _current(storage: ObjectStorage) -> tuple[Manifest | None, dict[str, Any]]:
    """Return the manifest and the condition under which it may be replaced."""
    try:
        current, tag = storage.tagged_manifest()
    except DatasetNotFoundError:
        return None, {}
    if not tag:
        raise UnsupportedFeatureError(
            "the store gives objects no tags", where=Where(file=storage.place),
            expected="an ETag", got="none", remedy="use a store with conditional puts",
        )  # fmt: skip
    return current, tag


def _is_ours(current: Manifest, names: Sequence[str], tried: bytes) -> bool:
    """Return whether a commit took place: its shards are listed, or it is the last one."""
    if not names:
        return current.to_json() == tried
    return set(names) <= {shard.name for shard in current.shards}


def _require_shards(objects: Objects, names: Sequence[str]) -> None:
    for name in names:
        try:
            objects.head(name)
        except NotThere as err:
            raise MissingShardError(
                "a shard vanished before its commit", expected=name,
                where=Where(file=objects.name(name)), got="no object",
                remedy="do not remove objects of a running writer",
            ) from err  # fmt: skip


def require_conditions(objects: Objects, name: str) -> None:
    """Create an object, and raise unless the store refuses what it must refuse.

    Raises
    ------
    UnsupportedFeatureError
        It ignores conditions: commits would be lost (``RF-V002``).
    """
    objects.put(name, b"")
    for condition in ({}, {"e_tag": '"0123456789abcdef0123456789abcdef"'}):
        try:
            objects.put(name, b"", condition)
        except Conflict:
            continue
        raise UnsupportedFeatureError(
            "the store ignores the conditions of puts, so that commits of several writers would be "
            "lost", where=Where(file=objects.place), expected="If-None-Match and If-Match honoured",
            got="a put that should have failed",
            remedy="use a store with conditional puts: S3, GCS, Azure, MinIO, R2",
        )  # fmt: skip


def clear_dead(staging: Path) -> None:
    """Remove what killed processes left: directories named by tokens whose lease nobody holds."""
    for directory in staging.iterdir():
        if directory.is_dir() and not lives(staging, directory.name):
            shutil.rmtree(directory, ignore_errors=True)
            (staging / lease_name(directory.name)).unlink(missing_ok=True)
