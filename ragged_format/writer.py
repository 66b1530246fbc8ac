"""Write datasets: shards of even batches, one atomic commit, and the removal of what is left over.

Names: shards are ``shard-<writer>-<number>.arrow``, where ``<writer>`` is 16 random hexadecimal
digits; files that are not finished have ``.tmp-`` in their name; ``writer-<writer>.lock`` is held
(``flock``) as long as the writer lives, which tells :func:`sweep` that its files are not left over.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Literal

import pyarrow as pa

from ragged_format.arguments import check_choice, check_number, check_size
from ragged_format.canonical import require_same
from ragged_format.compact.files import CompactWriter
from ragged_format.decoding import (
    VALIDATIONS,
    Batches,
    Validation,
    conform,
    iter_batches,
)
from ragged_format.digest import canonical_json
from ragged_format.errors import (
    DatasetExistsError,
    DatasetNotFoundError,
    RaggedError,
    SchemaMismatchError,
    Where,
)
from ragged_format.files import FileWriter
from ragged_format.forked import disown_in_children
from ragged_format.hash_runs import HashRuns
from ragged_format.known_schemas import known_schema
from ragged_format.manifest import ENCODINGS, MANIFEST_NAME, SHARD_SUFFIX, Manifest, Shard
from ragged_format.messages import decode_message, encode_message
from ragged_format.ragged import concat
from ragged_format.soundness import check_arrays
from ragged_format.storage import PlaceLike, Session, open_storage
from ragged_format.unique_ids import (
    ON_DUPLICATE,
    SAMPLE_ID,
    Ids,
    OnDuplicate,
    TakenIds,
    numbered,
    require_unique,
    shard_ids,
)
from ragged_format.validate import validate_batch
from ragged_format.writer_state import EndsWithBlock, require_open

__all__ = ["Writer", "sweep"]

Mode = Literal["error", "append", "overwrite"]
Encoding = Literal["hot", "compact"]
MODES: tuple[Mode, ...] = ("error", "append", "overwrite")

BATCH_ROWS = 1024
BATCH_BYTES = 32 << 20
SHARD_BYTES = 1 << 30
# Readers that opened a snapshot before a commit may open its shards this long after it.
GRACE_S = 24 * 3600.0


class Writer(EndsWithBlock):
    """Write records into a dataset; leaving the block commits them, all or none.

    Use it as a context manager. Until the commit no reader sees anything; an exception that leaves
    the block, or a crash, commits nothing. Several writers may append at the same time. After a
    write that failed on the way, as on a full disk, nothing is committed, and closing raises. In a
    forked child the writer is of no use, and harmless to its parent.

    Guarantees: what was committed is durable. Memory is bounded by about three stored batches; what
    is pending is copied where it would keep a much larger parent alive.

    Parameters
    ----------
    path : path or URL
        Directory of the dataset, created if need be, or its place in an object store.
    schema : pyarrow.Schema
        Schema of this format.
    mode : {"error", "append", "overwrite"}
        What to do with a dataset that is there: refuse, add shards, or replace its list of shards.
        Readers of a replaced dataset keep their snapshot; :func:`sweep` removes old shards later.
    validate : {"full", "structural", "off"}
        What is checked of everything that is written. Arrow's own validity always is.
    batch_rows, batch_bytes : int
        Records and bytes of a stored batch, whichever comes first.
    max_shard_bytes : int
        A shard that has reached this size is closed.
    encoding : {"hot", "compact"}
        ``"hot"`` for memory mapping and random access; ``"compact"`` for storage and transfer: a
        fraction of the size, decoded a batch at a time.
    on_duplicate : {"keep", "error"}
        What becomes of a sample whose id another one has. ``"keep"``: ids are compared within each
        batch that is written only, and ``ragged validate`` finds the others. ``"error"``: closing
        compares all of them, and those of a dataset that is appended to, which are read for it; it
        raises and commits nothing where one is there twice. Holds up to 64 MB of hashes more.
    lineage : mapping, optional
        JSON values that say where the data comes from; appending adds its keys to those there.
    storage_options : mapping, optional
        For object stores: credentials, endpoint and the like.

    Raises
    ------
    DatasetExistsError
        Mode "error", and there is a dataset (``RF-C009``).
    LimitExceededError
        A choice is unknown, or a size no positive integer (``RF-L001``).
    SchemaMismatchError
        Mode "append", and the dataset has another schema identity (``RF-S010``).

    Examples
    --------
    >>> import tempfile
    >>> import pyarrow as pa
    >>> from ragged_format import Dataset, sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> batch = pa.RecordBatch.from_pylist([row], schema=schema)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Writer(folder, schema) as writer:
    ...         writer.write(batch)
    ...     rows = Dataset(folder).num_rows
    ...     try:
    ...         Writer(folder, schema)
    ...     except DatasetExistsError as error:
    ...         code = error.code
    >>> rows, code
    (1, 'RF-C009')
    """

    def __init__(
        self,
        path: PlaceLike,
        schema: pa.Schema,
        mode: Mode = "error",
        *,
        validate: Validation = "full",
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BATCH_BYTES,
        max_shard_bytes: int = SHARD_BYTES,
        encoding: Encoding = "hot",
        on_duplicate: OnDuplicate = "keep",
        lineage: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_choice("validate", validate, VALIDATIONS)
        check_choice("encoding", encoding, ENCODINGS)
        check_choice("on_duplicate", on_duplicate, ON_DUPLICATE)
        for name, size in (("batch_rows", batch_rows), ("batch_bytes", batch_bytes)):
            check_size(name, size)
        check_size("max_shard_bytes", max_shard_bytes)
        self._storage = open_storage(path, storage_options)
        self.path = self._storage.place
        self._known = known_schema(schema)
        self._mode: Mode = mode
        self._validate: Validation = validate
        self._batch_rows = batch_rows
        self._batch_bytes = batch_bytes
        self._max_shard_bytes = max_shard_bytes
        self._lineage = _checked_lineage(lineage)
        self._written = 0
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = 0
        self._shards: list[Shard] = []
        self._file: FileWriter | CompactWriter | None = None
        self._encoding: Encoding = encoding
        self._state: Literal["open", "committed", "aborted", "failed", "forked"] = "open"
        self._taken: TakenIds | None = None
        self._merged(self._current())
        self._token = secrets.token_hex(8)
        self._session: Session = self._storage.begin(self._token)
        compares = on_duplicate == "error" and SAMPLE_ID in self._known.ragged
        self._ids = HashRuns(self._session.directory) if compares else None
        disown_in_children(self)

    @property
    def num_rows(self) -> int:
        """Records written so far."""
        return self._written

    def write(self, data: Batches) -> None:
        """Add records.

        Parameters
        ----------
        data : RecordBatch, Table, or an iterable of these
            Of the writer's schema; metadata outside the identity may differ.

        Raises
        ------
        SchemaMismatchError
            The schema's identity is another (``RF-S010``).
        InvariantError
            The data is invalid; ``where`` counts records from the start of this batch. The writer
            goes on with what it had before, if the caller handles the error; of an iterable, it
            has the items before the invalid one.
        DatasetExistsError
            The writer is finished, or an earlier write failed on the way (``RF-C009``).
        """
        self._require_open()
        checked: Iterable[pa.RecordBatch] = map(self._checked, count(), iter_batches(data))
        if isinstance(data, pa.Table):
            checked = list(checked)  # all of it or nothing
        for batch in checked:
            # Whatever interrupts it, the file under way may hold half a batch.
            try:
                self._add(batch)
                if self._ids is not None:
                    self._ids.add(batch.column(SAMPLE_ID))
            except BaseException:
                self.abort()
                self._state = "failed"
                raise

    def _require_open(self) -> None:
        require_open("closed" if self._state == "committed" else self._state, str(self.path))

    def _checked(self, index: int, part: pa.RecordBatch) -> pa.RecordBatch:
        where = Where(file=str(self.path), batch=index)
        batch = conform(part, self._known, where)
        try:
            check_arrays(batch)
            if self._validate != "off":
                validate_batch(batch, self._known.ragged, self._validate, where)
        except RaggedError as err:
            raise err.at(where) from err.__cause__
        return batch

    def _add(self, batch: pa.RecordBatch) -> None:
        start = 0
        while start < batch.num_rows:
            part = self._fitting(batch.slice(start, self._batch_rows - self._pending_rows))
            start += part.num_rows
            size = part.nbytes
            if self._pending and self._pending_bytes + size > self._batch_bytes:
                self._flush()
            self._pending.append(_compact(part, size))
            self._pending_rows += part.num_rows
            self._pending_bytes += size
            self._written += part.num_rows
            if self._pending_rows >= self._batch_rows or self._pending_bytes >= self._batch_bytes:
                self._flush()

    def _fitting(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the first half of a batch, as often as needed for it to be small enough."""
        while batch.num_rows > 1 and batch.nbytes > self._batch_bytes:
            batch = batch.slice(0, batch.num_rows // 2)
        return batch

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._file is None:
            name = f"shard-{self._token}-{len(self._shards):05d}{SHARD_SUFFIX}"
            kind = CompactWriter if self._encoding == "compact" else FileWriter
            self._file = kind(self._session.directory / name, self._known.schema)
        self._file.write(concat(self._pending))
        self._pending = []
        self._pending_rows = self._pending_bytes = 0
        if self._file.nbytes >= self._max_shard_bytes:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is not None:
            trailer = self._file.close()
            path = self._file.path
            size = path.stat().st_size
            self._shards.append(
                Shard(path.name, trailer.rows, size, trailer.digest, self._encoding)
            )
            self._file = None
            self._session.put(path.name)

    def close(self) -> None:
        """Commit what was written; does nothing the second time, or after :meth:`abort`.

        Raises
        ------
        DatasetExistsError, SchemaMismatchError
            Another writer made a dataset here meanwhile that the mode does not allow to change; or
            a write failed on the way.
        InvariantError
            A ``sample_id`` is there twice, and `on_duplicate` is "error" (``RF-I006``).
        """
        if self._state in ("failed", "forked"):
            self._require_open()
        if self._state != "open":
            return
        try:
            self._flush()
            self._close_shard()
            self._compare_ids()
            self._session.commit(self._merged, [shard.name for shard in self._shards])
            self._state = "committed"
        except BaseException:
            if self._session.undecided:
                # The manifest may be there all the same, so that the shards must stay.
                self._state = "committed"
            self.abort()
            raise
        finally:
            self._session.end()

    def _compare_ids(self) -> None:
        """Raise if two records have one id; those of a dataset that is appended to included."""
        if self._ids is None:
            return
        written = Manifest(self._known, tuple(self._shards), 1, {})
        name = f"records written to {self.path}"
        ids = Ids(self._ids.parts(), lambda: numbered(shard_ids(self._storage, written), name))
        require_unique(ids)
        if self._mode == "append":
            # Before the commit, which then finds nothing new to compare, and is short.
            self._taken = TakenIds(self._storage, ids, self._session.directory)
            self._taken.compare(self._current())

    def abort(self) -> None:
        """Drop what was written; does nothing after :meth:`close`."""
        if self._state != "open":
            return
        self._state = "aborted"
        if self._file is not None:
            self._file.abort()
        self._pending = []
        try:
            self._session.drop([shard.name for shard in self._shards])
        finally:
            self._session.end()

    def disown(self) -> None:
        """Leave everything to the parent of a forked child."""
        if self._state == "open":
            self._state = "forked"

    def _current(self) -> Manifest | None:
        with suppress(DatasetNotFoundError):
            return self._storage.read_manifest()
        return None

    def _merged(self, current: Manifest | None) -> Manifest:
        """Return the manifest that a commit on top of `current` writes."""
        if current is None:
            return Manifest(self._known, tuple(self._shards), 1, self._lineage)
        where = Where(file=f"{self.path}/{MANIFEST_NAME}")
        generation = current.generation + 1
        if self._mode == "overwrite":
            return Manifest(self._known, tuple(self._shards), generation, self._lineage)
        if self._mode == "error":
            raise DatasetExistsError(
                "there is a dataset already", where=where, expected="no dataset",
                got=f"generation {current.generation}",
                remedy="pass mode='append' or mode='overwrite', or choose another path",
            )  # fmt: skip
        require_same(current.known.ragged, self._known.ragged, where)
        if self._taken is not None:
            self._taken.compare(current)
        return Manifest(
            current.known, (*current.shards, *self._shards), generation,
            {**current.lineage, **self._lineage},
        )  # fmt: skip


def _checked_lineage(lineage: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        copied = json.loads(canonical_json(dict(lineage or {})))
    except (TypeError, ValueError) as err:
        raise SchemaMismatchError(
            "lineage holds JSON values", code="RF-S009", expected="a JSON object", got=str(err),
            remedy="pass a mapping of plain values",
        ) from err  # fmt: skip
    return dict(copied)


def _compact(batch: pa.RecordBatch, size: int) -> pa.RecordBatch:
    """Return a copy if the batch is a small view of much larger memory."""
    if batch.get_total_buffer_size() <= 2 * size + (1 << 16):
        return batch
    return decode_message(encode_message(batch), batch.schema)


def sweep(
    path: PlaceLike,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Remove what crashed or replaced writers left in a dataset; return the names removed.

    Removed are shards that the manifest does not list, temporary files, lock files of writers that
    do not live any more, and work directories of jobs that were interrupted and not taken up again,
    all of them only if they were last changed more than `grace_s` seconds ago. Shards that an
    overwrite replaced count from that moment. Files with other names are never touched, and neither
    is anything of a writer or job that is running on this machine. In an object store a writer
    counts as living for `grace_s` after its last shard; the work directories of its jobs are those
    on this machine.

    Parameters
    ----------
    path : path or URL
        Place of the dataset.
    grace_s : float
        Longer than any reader may take from opening the dataset to opening its shards.
    dry_run : bool
        Remove nothing; return what would be removed.
    storage_options : mapping, optional
        For object stores: credentials, endpoint and the like.
    """
    check_number("grace_s", grace_s, 0)
    return open_storage(path, storage_options).sweep(grace_s, dry_run=dry_run)
