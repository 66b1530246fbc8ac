"""Opening a log: what is there, what of it counts, and what must be made anew."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ragged_format.digest import canonical_json, record_digests, text_digest
from ragged_format.errors import SchemaMismatchError, Where
from ragged_format.known_schemas import KnownSchema, known_schema
from ragged_format.local_files import TEMPORARY_MARK, create, sync_directory
from ragged_format.manifest import Manifest
from ragged_server.store.errors import LogDamagedError, StorageFailedError, StoreBusyError
from ragged_server.store.file_layer import FileLayer
from ragged_server.store.index import IdIndex, Table
from ragged_server.store.ledger import Ledger
from ragged_server.store.log import Log
from ragged_server.store.prepare import id_digests
from ragged_server.store.reading import Part
from ragged_server.store.records import StoreSettings
from ragged_server.store.runs import Entries
from ragged_server.store.seal import LINEAGE_KEY, adopt, claim, current_manifest, sealed_shards
from ragged_server.store.segments import Scan, Segment, scan_segment, segment_sequence
from ragged_server.store.shards import SealedShard

__all__ = ["DirectoryLock", "Recovered", "recover", "unwritable"]

IDENTITY_NAME = "server.json"
# Ids of a run that is made anew at a time.
_REBUILT = 1 << 18


class DirectoryLock:
    """The lock of a server on its directory; free when the process ends, however it ends.

    Raises
    ------
    StoreBusyError
        Another server has it.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(self._descriptor)
            raise StoreBusyError(
                "another server has this directory", where=Where(file=str(folder)),
                expected="one server for one directory", got="a lock that is held",
                remedy="stop the other one, or choose another directory",
            ) from err  # fmt: skip

    def release(self) -> None:
        """Let another server have the directory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(slots=True)
class Recovered:
    """An opened log.

    Attributes
    ----------
    log_id : bytes
        8 bytes, public: in cursors.
    log : Log
    index : IdIndex
    table : Table, optional
        Of the segment that is appended to.
    ledger : Ledger
    known : KnownSchema, optional
        Columns of the log.
    segments : int
        Segments that were read.
    cut_bytes, cut_batches : int
    removed : list of str
    rebuilt_index : bool
    """

    log_id: bytes
    log: Log
    index: IdIndex
    table: Table | None
    ledger: Ledger
    known: KnownSchema | None
    segments: int
    cut_bytes: int
    cut_batches: int
    removed: list[str]
    rebuilt_index: bool


def recover(
    directory: Path, settings: StoreSettings, layer: FileLayer, clock: Callable[[], float]
) -> Recovered:
    """Open the log in a directory whose lock is held, or begin one.

    Raises
    ------
    LogDamagedError
        Acknowledged records are missing or damaged.
    SchemaMismatchError
        The dataset does not hold samples, or other columns than the settings ask for.
    """
    folder = directory / "log"
    removed = _remove_temporary(folder)
    manifest = current_manifest(directory)
    scans, log_id, key = _scan_all(folder, manifest)
    manifest = _own(directory, manifest, scans, log_id.hex())
    shards = () if manifest is None else sealed_shards(directory, manifest)
    sealed = _sealed_end(manifest)
    _require_whole(directory, shards, sealed)
    known = _columns(manifest, scans, settings)
    log = Log(folder, key, layer, clock)
    log.parts = shards
    log.end_sequence = sealed
    if shards:
        log.policy_version = shards[-1].facts.policy_version
    ledger = Ledger.load(folder, log_id.hex(), settings) or Ledger(settings)
    cut_bytes = cut_batches = 0
    for number, scan in enumerate(scans):
        if number + 1 < len(scans):
            scan.cut_before(scans[number + 1].first_sequence)
        cut_bytes += scan.file_bytes - scan.end_bytes
        cut_batches += scan.pending
        for commit in scan.commits:
            ledger.apply(commit)
        if not scan.commits or scan.end_sequence <= sealed:
            # Refused before its first commit, or sealed.
            layer.remove(scan.path)
            removed.append(scan.path.name)
            log.commits = max(log.commits, scan.commits[-1].number if scan.commits else 0)
            continue
        _require_next(scan, log.end_sequence)
        last = number == len(scans) - 1
        same = known is not None and scan.known is not None and scan.known.ragged == known.ragged
        try:
            log.adopt(scan, resume=last and same and scan.end_bytes < settings.segment_bytes)
        except OSError as err:
            raise StorageFailedError(
                "a segment cannot be made durable", where=Where(file=str(scan.path)),
                expected="a healthy disk", got=str(err), remedy="check the disk",
            ) from err  # fmt: skip
    log.commits = max(log.commits, ledger.commit)
    ledger.commit = log.commits
    # A server may have ended between removing records and writing that down.
    ledger.removed(log.first_sequence, clock())
    index, table, rebuilt = _index(folder, log, ledger.floor)
    return Recovered(
        log_id, log, index, table, ledger, known, len(scans), cut_bytes, cut_batches, removed,
        rebuilt,
    )  # fmt: skip


def _remove_temporary(folder: Path) -> list[str]:
    out = []
    for path in sorted(folder.iterdir()):
        if TEMPORARY_MARK in path.name:
            path.unlink(missing_ok=True)
            out.append(path.name)
    return out


def _scan_all(folder: Path, manifest: Manifest | None) -> tuple[list[Scan], bytes, str]:
    paths = sorted(path for path in folder.iterdir() if segment_sequence(path.name) is not None)
    lineage: dict[str, Any] = {} if manifest is None else manifest.lineage.get(LINEAGE_KEY, {})
    identity = _read_identity(folder)
    key = None if identity is None else identity[1]
    scans = []
    for path in paths:
        scan = scan_segment(path, key)
        if scan.later is not None and scan.later.end > int(lineage.get("next", 0)):
            raise LogDamagedError(
                f"a segment is damaged before records that were acknowledged: {scan.fault}",
                where=Where(file=str(path)), expected=f"commit {scan.later.number} and all before",
                got=f"whole commits up to sequence {scan.end_sequence}",
                remedy="restore the file from a copy; moved away, its records are lost",
            )  # fmt: skip
        if key is None and scan.commits:
            key = scan.commits[0].log_key
        scans.append(scan)
    log_id = identity[0] if identity else bytes.fromhex(lineage.get("id", secrets.token_hex(8)))
    key = key or secrets.token_hex(16)
    if identity is None:
        _write_identity(folder, log_id, key)
    return scans, log_id, key


def _read_identity(folder: Path) -> tuple[bytes, str] | None:
    path = folder / IDENTITY_NAME
    try:
        data = json.loads(path.read_bytes())
        checksum = data.pop("checksum")
        if text_digest(canonical_json(data)).hex() != checksum:
            raise ValueError("its checksum does not match")
        if data["version"] != 1:
            raise ValueError(f"version {data['version']}")
        return bytes.fromhex(data["id"]), str(data["key"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise LogDamagedError(
            "the identity of the log is malformed", where=Where(file=str(path)),
            expected="version, id, key and checksum", got=str(err),
            remedy="restore it; removed, it is made anew, and cursors of readers may be refused",
        ) from err  # fmt: skip


def _write_identity(folder: Path, log_id: bytes, key: str) -> None:
    data: dict[str, Any] = {"id": log_id.hex(), "key": key, "version": 1}
    data["checksum"] = text_digest(canonical_json(data)).hex()
    with create(folder / IDENTITY_NAME) as file:
        file.write(canonical_json(data))
    sync_directory(folder)


def _own(
    directory: Path, manifest: Manifest | None, scans: Sequence[Scan], log_id: str
) -> Manifest | None:
    """Return the manifest, that of a dataset without log taken over."""
    if manifest is None:
        return None
    if manifest.known.ragged.profile != "sample":
        raise SchemaMismatchError(
            "the directory holds another dataset", code="RF-S010", where=Where(file=str(directory)),
            expected="profile 'sample'", got=f"profile {manifest.known.ragged.profile!r}",
            remedy="choose another directory",
        )  # fmt: skip
    entry = manifest.lineage.get(LINEAGE_KEY)
    if entry is None:
        begun = next((scan.known for scan in scans if scan.commits), None)
        if begun is not None and scans[0].first_sequence == 0:
            return claim(directory, begun, log_id)
        return adopt(directory, log_id)
    if entry.get("id") != log_id:
        raise LogDamagedError(
            "dataset and log are not of one server", where=Where(file=str(directory)),
            expected=f"log {log_id}", got=f"lineage of log {entry.get('id')}",
            remedy="restore the directory as a whole from a copy",
        )  # fmt: skip
    return manifest


def _sealed_end(manifest: Manifest | None) -> int:
    return 0 if manifest is None else int(manifest.lineage[LINEAGE_KEY]["next"])


def _require_whole(directory: Path, shards: Sequence[SealedShard], sealed: int) -> None:
    """Raise if shards are missing other than from the oldest on, as retention removes them."""
    ends = [*(shard.first_sequence for shard in shards[1:]), sealed]
    for shard, following in zip(shards, ends, strict=False):
        if shard.end_sequence != following:
            raise LogDamagedError(
                "shards of the log are not listed any more", where=Where(file=str(directory)),
                expected=f"records {shard.end_sequence} to {following - 1}", got="no shard",
                remedy="restore manifest.json from a copy; write results of jobs elsewhere",
            )  # fmt: skip


def _columns(
    manifest: Manifest | None, scans: list[Scan], settings: StoreSettings
) -> KnownSchema | None:
    found = None if manifest is None else manifest.known
    for scan in scans:
        if found is None and scan.commits:
            found = scan.known
    if settings.schema is None:
        return found
    wanted = known_schema(settings.schema)
    if found is not None and found.ragged != wanted.ragged:
        raise SchemaMismatchError(
            "the log has other columns than the schema that was asked for", code="RF-S010",
            expected=list(wanted.ragged.columns), got=list(found.ragged.columns),
            remedy="leave the schema out, or choose another directory",
        )  # fmt: skip
    return found or wanted


def _require_next(scan: Scan, end: int) -> None:
    if scan.first_sequence != end:
        raise LogDamagedError(
            "records are missing between the segments of a log", where=Where(file=str(scan.path)),
            expected=f"a segment that begins at sequence {end}",
            got=f"one that begins at {scan.first_sequence}",
            remedy="restore the missing segment from a copy",
        )  # fmt: skip


def _index(folder: Path, log: Log, floor: int) -> tuple[IdIndex, Table | None, bool]:
    index = IdIndex(folder)
    index.floor = floor
    damaged = index.load(log.end_sequence)
    rebuilt = bool(damaged)
    shards_end = log.segments[0].first_sequence if log.segments else log.end_sequence
    for start, stop in index.gaps(log.first_sequence, shards_end):
        rebuilt = True
        for first, end, entries in _entries(log.shards, start, stop):
            index.add_run(entries, first, end)
    table = None
    for segment in log.segments:
        if segment.closed and not index.gaps(segment.first_sequence, segment.end_sequence):
            continue
        table = table_of(segment)
        index.add_table(table)
    return index, table if log.open_segment is not None else None, rebuilt


def table_of(segment: Segment) -> Table:
    """Return the ids of a segment."""
    table = Table(segment.first_sequence)
    for number in range(len(segment.batches)):
        batch = segment.batch(number)
        ids, digests = id_digests(batch).tobytes(), record_digests(batch).tobytes()
        for at in range(0, len(ids), 16):
            table.ids[ids[at : at + 16]] = digests[at : at + 16]
    return table


def _entries(parts: Sequence[Part], start: int, stop: int) -> Iterator[tuple[int, int, Entries]]:
    """Return (first, end, entries) for the records [start, stop) in pieces."""
    position = start
    pending: list[tuple[Any, Any]] = []
    first = start
    while position < stop:
        part = next(part for part in parts if part.first_sequence <= position < part.end_sequence)
        number = part.find(position)
        begin, rows = part.place(number)
        batch = part.batch(number).slice(position - begin, min(stop, begin + rows) - position)
        pending.append((id_digests(batch), record_digests(batch)))
        position += batch.num_rows
        if position - first >= _REBUILT or position >= stop:
            ids = np.concatenate([ids for ids, _ in pending])
            digests = np.concatenate([digests for _, digests in pending])
            yield first, position, Entries.of(ids, digests, np.arange(first, position))
            pending, first = [], position


def unwritable(directory: Path, err: OSError) -> StorageFailedError:
    """Return the error for a directory of which no store can be made."""
    return StorageFailedError(
        "the directory cannot be used", where=Where(file=str(directory)),
        expected="a directory that this process may write", got=str(err),
        remedy="change its owner or mode, or choose another one",
    )  # fmt: skip
