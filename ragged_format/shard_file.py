"""What readers, and writers, of hot and of compact files have in common."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragged_format.errors import OutOfRangeError, Where
from ragged_format.writer_state import EndsWithBlock, WriterState, require_open

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.decoding import Projection
    from ragged_format.local_files import NewFile
    from ragged_format.schema import RaggedSchema
    from ragged_format.trailer import Trailer

__all__ = ["ShardFile", "ShardFileWriter"]


class ShardFile(ABC):
    """A file of record batches with random access, and a trailer.

    Attributes
    ----------
    path : Path
    trailer : Trailer
    is_random_access : bool
        True.
    """

    is_random_access = True
    path: Path
    trailer: Trailer
    _projection: Projection

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    @property
    def schema(self) -> pa.Schema:
        """Schema of the batches that are returned."""
        return self._projection.schema

    @property
    def ragged_schema(self) -> RaggedSchema:
        """Declarations of the batches that are returned."""
        return self._projection.ragged

    @property
    def num_rows(self) -> int:
        """Number of records."""
        return self.trailer.rows

    @property
    def num_batches(self) -> int:
        """Number of batches, the trailer not counted."""
        return self.trailer.batches

    @property
    def rows_per_batch(self) -> tuple[int, ...]:
        """Records of every batch."""
        return self.trailer.rows_per_batch

    def verify(self) -> Trailer:
        """Read everything, compare it with all digests, and return the trailer."""
        for _ in self.scan():
            pass
        return self.trailer

    @abstractmethod
    def batches(self, *, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches, with these columns only if some are named."""

    @abstractmethod
    def scan(self, *, verify: bool = True) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches with all columns, nothing kept."""

    def _check_index(self, index: int) -> None:
        """Raise unless there is such a batch."""
        try:
            known = 0 <= operator.index(index) < self.num_batches
        except TypeError:
            known = False
        if not known:
            raise OutOfRangeError(
                "there is no such batch", where=Where(file=str(self.path)),
                expected=f"0 <= index < {self.num_batches}", got=repr(index),
                remedy="ask num_batches first",
            )  # fmt: skip


class ShardFileWriter(EndsWithBlock):
    """A writer of a file that appears under its name, whole, when it is closed.

    Attributes
    ----------
    path : Path
    trailer : Trailer, optional
        Of the file, once it is closed.
    """

    path: Path
    trailer: Trailer | None = None
    _new: NewFile
    _state: WriterState

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return int(self._new.file.tell())

    def close(self) -> Trailer:
        """Write the trailer, publish the file, once, and return the trailer."""
        if self.trailer is None:
            require_open(self._state, str(self.path))
            try:
                trailer = self._finish()
                self._new.commit()
            except BaseException:
                self.abort()
                raise
            self._state = "closed"
            self.trailer = trailer
        return self.trailer

    def abort(self) -> None:
        """Remove what was written; does nothing after :meth:`close`."""
        if self._state != "closed":
            self._state = "aborted"
            self._new.abort()

    @abstractmethod
    def _finish(self) -> Trailer:
        """Write what comes after the last batch, and return the trailer."""
