"""Sealing: a closed segment becomes a shard of the dataset.

The manifest's lineage has a key ``log``: an object with ``id`` (of the log, 16 hexadecimal digits),
``next`` (sequence after the last sealed record) and ``shards``: for each shard of the log, by name,
``[first_sequence, first_s, last_s, policy_version]``, see
:class:`ragged_server.store.shards.ShardFacts`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from ragged_format.errors import (
    DatasetNotFoundError,
    ManifestError,
    SchemaMismatchError,
    Where,
)
from ragged_format.files import FileWriter
from ragged_format.known_schemas import KnownSchema
from ragged_format.local_storage import Lease
from ragged_format.manifest import (
    MANIFEST_NAME,
    SHARD_SUFFIX,
    Manifest,
    Shard,
    locked,
    read_manifest,
    write_manifest,
)
from ragged_format.ragged import concat
from ragged_server.store.errors import LogDamagedError
from ragged_server.store.segments import Segment
from ragged_server.store.shards import SealedShard, ShardFacts

__all__ = [
    "LINEAGE_KEY",
    "SealingCutError",
    "adopt",
    "claim",
    "current_manifest",
    "remove_left_over",
    "seal_segment",
    "sealed_shards",
    "unlist",
]

LINEAGE_KEY = "log"


class SealingCutError(Exception):
    """Sealing was to end before it was done; nothing of it is listed."""


def current_manifest(directory: Path) -> Manifest | None:
    """Return the dataset's manifest, None if there is no dataset yet."""
    try:
        return read_manifest(directory)
    except DatasetNotFoundError:
        return None


def sealed_shards(directory: Path, manifest: Manifest) -> tuple[SealedShard, ...]:
    """Return the shards of the log that the manifest lists, in order.

    Raises
    ------
    ManifestError
        The lineage is malformed.
    """
    entry = manifest.lineage.get(LINEAGE_KEY)
    if entry is None:
        return ()
    try:
        facts = {name: ShardFacts(*values) for name, values in entry["shards"].items()}
        shards = [
            SealedShard(directory, shard, manifest, facts[shard.name])
            for shard in manifest.shards
            if shard.name in facts
        ]
        return tuple(sorted(shards, key=lambda shard: shard.first_sequence))
    except (KeyError, TypeError, AttributeError) as err:
        raise ManifestError(
            "the lineage of a log is malformed",
            where=Where(file=str(directory / MANIFEST_NAME)), expected="id, next and shards",
            got=f"{type(err).__name__}: {err}", remedy="restore manifest.json from a copy",
        ) from err  # fmt: skip


def seal_segment(
    directory: Path,
    segment: Segment,
    log_id: str,
    *,
    batch_rows: int,
    batch_bytes: int,
    seal_while: Callable[[], bool] | None = None,
) -> SealedShard:
    """Write the records of a closed segment as one shard and commit it to the manifest.

    Guarantees: each batch was compared with its digest; on an exception nothing is listed.

    Parameters
    ----------
    directory : Path
        Of the dataset.
    segment : Segment
    log_id : str
    batch_rows, batch_bytes : int
        Sizes that the shard's batches reach.
    seal_while : callable, optional
        Asked before each batch and before the commit; False ends it.

    Raises
    ------
    ChecksumError, CorruptError
        The segment is damaged.
    LogDamagedError
        The dataset is not that of the log any more.
    SealingCutError
        `seal_while` returned False.
    OSError
        The disk is full or fails.
    """
    done = _sealed_before(directory, segment)
    if done is not None:
        return done
    token = log_id[:8] + secrets.token_hex(4)
    path = directory / f"shard-{token}-00000{SHARD_SUFFIX}"
    # Held until the shard is listed, so that nobody sweeps it.
    lease = Lease(directory, token)
    try:
        with FileWriter(path, segment.known.schema) as writer:
            for batch in resized(_asked(segment.verified(), seal_while), batch_rows, batch_bytes):
                writer.write(batch)
        trailer = writer.close()
        shard = Shard(path.name, trailer.rows, path.stat().st_size, trailer.digest)
        facts = ShardFacts(
            segment.first_sequence, segment.times[0], segment.times[1], segment.policy_version
        )
        _require_time(seal_while)
        with locked(directory):
            manifest = _with_shard(directory, segment.known, log_id, shard, facts)
            write_manifest(directory, manifest)
    except BaseException:
        if not _is_listed(directory, path.name):
            path.unlink(missing_ok=True)
        raise
    finally:
        lease.release()
    return SealedShard(directory, shard, manifest, facts)


def _asked(
    batches: Iterator[pa.RecordBatch], seal_while: Callable[[], bool] | None
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        _require_time(seal_while)
        yield batch


def _require_time(seal_while: Callable[[], bool] | None) -> None:
    if seal_while is not None and not seal_while():
        raise SealingCutError


def _sealed_before(directory: Path, segment: Segment) -> SealedShard | None:
    """Return the shard of a segment whose sealing failed after the manifest was replaced."""
    manifest = current_manifest(directory)
    for shard in () if manifest is None else sealed_shards(directory, manifest):
        if (shard.first_sequence, shard.end_sequence) == (
            segment.first_sequence, segment.end_sequence,
        ):  # fmt: skip
            return shard
    return None


def _with_shard(
    directory: Path, known: KnownSchema, log_id: str, shard: Shard, facts: ShardFacts
) -> Manifest:
    current = current_manifest(directory) or Manifest(known)
    if facts.first_sequence == 0 and LINEAGE_KEY not in current.lineage:
        # Whatever is listed was written by others meanwhile.
        current = _claimed(directory, current, known, log_id)
    entry = _entry(directory, current, log_id)
    lineage = {
        **current.lineage,
        LINEAGE_KEY: {
            "id": log_id,
            "next": facts.first_sequence + shard.rows,
            "shards": {**entry["shards"], shard.name: facts.to_json()},
        },
    }
    return Manifest(current.known, (*current.shards, shard), current.generation + 1, lineage)


def _entry(directory: Path, manifest: Manifest, log_id: str) -> dict[str, Any]:
    entry = manifest.lineage.get(LINEAGE_KEY)
    if entry is None or entry.get("id") != log_id:
        raise LogDamagedError(
            "the dataset is not that of the log any more: somebody replaced its manifest",
            where=Where(file=str(directory / MANIFEST_NAME)), expected=f"lineage of log {log_id}",
            got=entry and entry.get("id"), remedy="restore manifest.json from a copy",
        )  # fmt: skip
    return dict(entry)


def _is_listed(directory: Path, name: str) -> bool:
    try:
        return any(shard.name == name for shard in read_manifest(directory).shards)
    except (OSError, ValueError):
        return False


def adopt(directory: Path, log_id: str) -> Manifest:
    """Give the shards of a dataset that had no log sequences from 0 on, and return its manifest."""
    with locked(directory):
        manifest = read_manifest(directory)
        shards, position = {}, 0
        for shard in manifest.shards:
            changed = (directory / shard.name).stat().st_mtime
            shards[shard.name] = ShardFacts(position, changed, changed, None).to_json()
            position += shard.rows
        entry = {"id": log_id, "next": position, "shards": shards}
        manifest = Manifest(
            manifest.known, manifest.shards, manifest.generation + 1,
            {**manifest.lineage, LINEAGE_KEY: entry},
        )  # fmt: skip
        write_manifest(directory, manifest)
    return manifest


def claim(directory: Path, known: KnownSchema, log_id: str) -> Manifest:
    """Make a dataset that others wrote beside a log, before it was sealed, the log's as well.

    Their shards stay listed and are no part of the log.

    Raises
    ------
    SchemaMismatchError
        They have other columns than the log.
    """
    with locked(directory):
        manifest = _claimed(directory, read_manifest(directory), known, log_id)
        write_manifest(directory, manifest)
    return manifest


def _claimed(directory: Path, current: Manifest, known: KnownSchema, log_id: str) -> Manifest:
    if current.known.ragged != known.ragged:
        raise SchemaMismatchError(
            "somebody wrote a dataset with other columns beside the log", code="RF-S010",
            where=Where(file=str(directory / MANIFEST_NAME)),
            expected=list(known.ragged.columns), got=list(current.known.ragged.columns),
            remedy="move manifest.json and its shards to another directory",
        )  # fmt: skip
    lineage = {**current.lineage, LINEAGE_KEY: {"id": log_id, "next": 0, "shards": {}}}
    return Manifest(current.known, current.shards, current.generation + 1, lineage)


def remove_left_over(directory: Path, log_id: str, grace_s: float) -> list[str]:
    """Remove shards of this log that are not listed and were not changed for the time of grace.

    They are those whose sealing was interrupted, and removed ones that were still in use when their
    server stopped. Must not run while a segment is sealed.
    """
    manifest = current_manifest(directory)
    listed = set() if manifest is None else {shard.name for shard in manifest.shards}
    removed = []
    for path in sorted(directory.glob(f"shard-{log_id[:8]}*")):
        with suppress(FileNotFoundError):
            if path.name not in listed and path.stat().st_mtime <= time.time() - grace_s:
                path.unlink()
                removed.append(path.name)
    return removed


def unlist(directory: Path, gone: Sequence[SealedShard], log_id: str) -> None:
    """Remove shards from the manifest; their files stay for readers that have them listed."""
    names = {shard.name for shard in gone}
    with locked(directory):
        current = read_manifest(directory)
        entry = _entry(directory, current, log_id)
        kept = {name: facts for name, facts in entry["shards"].items() if name not in names}
        lineage = {**current.lineage, LINEAGE_KEY: {**entry, "shards": kept}}
        shards = tuple(shard for shard in current.shards if shard.name not in names)
        write_manifest(directory, Manifest(current.known, shards, current.generation + 1, lineage))
        for name in names:
            # Their time of grace begins now.
            with suppress(FileNotFoundError):
                os.utime(directory / name)


def resized(
    batches: Iterator[pa.RecordBatch], batch_rows: int, batch_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Return the same records in batches that reach one of the sizes, the last one excepted."""
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, batch_rows - rows)
            while part.num_rows > 1 and part.nbytes > batch_bytes:
                part = part.slice(0, part.num_rows // 2)
            more = part.nbytes
            if pending and size + more > batch_bytes:
                yield concat(pending)
                pending, rows, size = [], 0, 0
                continue
            start += part.num_rows
            pending.append(part)
            rows, size = rows + part.num_rows, size + more
            if rows >= batch_rows:
                yield concat(pending)
                pending, rows, size = [], 0, 0
    if pending:
        yield concat(pending)
