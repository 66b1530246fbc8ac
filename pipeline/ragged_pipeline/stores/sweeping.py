"""What crashed and replaced writers left in an object store."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ragged_format.errors import DatasetNotFoundError
from ragged_format.manifest import SHARD_SUFFIX
from ragged_pipeline.stores.calls import NotThere

if TYPE_CHECKING:
    from ragged_pipeline.stores.object_storage import ObjectStorage
    from ragged_pipeline.stores.objects import Entry, Objects

__all__ = ["sweep"]

_OURS = re.compile(
    rf"shard-(?P<shard>[0-9a-f]{{16}})-\d+{re.escape(SHARD_SUFFIX)}"
    r"|writer-(?P<writer>[0-9a-f]{16})\.lock"
    r"|replaced-(?P<replaced>[0-9a-f]{16})\.json"
)


def sweep(storage: ObjectStorage, grace_s: float, *, dry_run: bool = False) -> list[str]:
    """Remove shards that the manifest does not list, expired leases and what overwrites noted.

    A shard is removed when it, the lease of its writer and the note that an overwrite replaced it
    are older than `grace_s`, as far as there are such; a note when its shards are gone.
    """
    objects = storage.objects
    # Listed before the manifest is read: what is committed in between is listed in it.
    found = {
        entry.name: (entry, match)
        for entry in objects.list()
        if (match := _OURS.fullmatch(entry.name)) is not None
    }
    try:
        listed = {shard.name for shard in storage.read_manifest().shards}
    except DatasetNotFoundError:
        if not found:
            raise
        listed = set()
    oldest = datetime.now(UTC) - timedelta(seconds=grace_s)
    living = {m["writer"] for e, m in found.values() if m["writer"] and e.modified > oldest}
    notes = {e.name: _noted(objects, e) for e, m in found.values() if m["replaced"]}
    fresh = {
        shard
        for name, shards in notes.items()
        if found[name][0].modified > oldest
        for shard in shards
    }
    gone = {
        entry.name
        for entry, match in found.values()
        if match["shard"]
        and entry.name not in listed | fresh
        and match["shard"] not in living
        and entry.modified <= oldest
    }
    gone |= {e.name for e, m in found.values() if m["writer"] and m["writer"] not in living}
    gone |= {
        name
        for name, shards in notes.items()
        if found[name][0].modified <= oldest and not (shards & found.keys()) - gone - listed
    }
    if not dry_run:
        objects.delete(sorted(gone))
    return sorted(gone)


def _noted(objects: Objects, entry: Entry) -> set[str]:
    with suppress(NotThere, ValueError, TypeError, KeyError, RecursionError):
        return set(json.loads(objects.get(entry.name)[0])["shards"])
    return set()
