"""A stream at a path as a source that is read in order, again and again."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ragged_format.errors import ChecksumError, UnsupportedFeatureError, Where
from ragged_format.lists import offsets_of
from ragged_format.streams import StreamReader

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.schema import RaggedSchema

__all__ = ["StreamShard"]


class _Index(NamedTuple):
    """What a first pass over a stream tells."""

    schema: RaggedSchema
    rows: tuple[int, ...]
    digest: str


class StreamShard:
    """The batches of a stream, read forward; one that lies before begins the stream anew.

    A first pass reads the stream to its trailer, so that its length is known and a cut stream is an
    error at once; it is made once for each state of the file. Nothing is kept.

    Parameters
    ----------
    path : path
    verify : bool
        Compare each batch with its digest when it is read.

    Raises
    ------
    UnsupportedFeatureError
        It is no file that can be read twice (``RF-V002``).
    CorruptError
        The stream is not whole.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UnsupportedFeatureError(
                "a loader reads a stream more than once", where=Where(file=str(path)),
                expected="a file", got="a pipe or a device",
                remedy="store it first, or use OnlineLoader, which reads once",
            )  # fmt: skip
        self._verify = verify
        found = self.path.stat()
        index = _index(self.path, found.st_ino, found.st_size, found.st_mtime_ns)
        self.ragged_schema = index.schema
        self.digest = index.digest
        self.bounds = offsets_of(np.asarray(index.rows, np.int64))
        self._reader: StreamReader | None = None
        self._next = 0

    def batch(self, index: int) -> pa.RecordBatch:
        """Return one batch.

        Raises
        ------
        ChecksumError
            The file is another one than when it was opened (``RF-C004``).
        """
        if self._reader is None or index < self._next:
            self.close()
            self._reader = StreamReader(self.path, verify=self._verify)
        while True:
            batch = next(self._reader, None)
            number, self._next = self._next, self._next + 1
            expected = int(self.bounds[number + 1] - self.bounds[number])
            if batch is None or batch.num_rows != expected:
                raise ChecksumError(
                    "the stream changed while it was being read",
                    where=Where(file=str(self.path), batch=number), expected=f"{expected} records",
                    got="the end" if batch is None else batch.num_rows,
                    remedy="do not write to a stream that is being read",
                )  # fmt: skip
            if number == index:
                return batch

    def close(self) -> None:
        """Close the file; the next batch opens it again."""
        if self._reader is not None:
            self._reader.close()
        self._reader, self._next = None, 0


@lru_cache(maxsize=16)
def _index(path: Path, *state: int) -> _Index:  # noqa: ARG001 - the state is part of the key
    with StreamReader(path, verify=False) as reader:
        rows = tuple(batch.num_rows for batch in reader)
        digest = "" if reader.trailer is None else reader.trailer.digest
        return _Index(reader.ragged_schema, rows, digest)
