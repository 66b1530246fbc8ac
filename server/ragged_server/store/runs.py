"""Runs of the id index: sorted files of id digests, mapped into memory.

A run is ``index-<first>-<end>.ids``, both 20 digits: it has the ids of the records with sequences
in [first, end), those left out that were past their time when it was made. Bytes, all integers
little-endian: a head of 64 (magic ``RGDIDX01``, u64 first, u64 end, u64 number of ids n, xxh3-128
of everything behind the head, 16 zero bytes), then n u64 (the first half of each id digest, read as
big-endian), ascending; n u64 (the second halves); n record digests of 16 bytes; n i64 (sequences).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ragged_format.errors import ChecksumError, CorruptError, Where
from ragged_format.local_files import NewFile, create
from ragged_server.store.records import Bytes

__all__ = ["Entries", "Run", "merge_runs", "run_range", "write_run"]

MAGIC = b"RGDIDX01"
_head = struct.Struct("<8sQQQ16s16x")
_NAME = re.compile(r"index-(\d{20})-(\d{20})\.ids")
# Bytes of one id, and how many ids a merge handles at a time.
_ENTRY = 8 + 8 + 16 + 8
_CHUNK = 1 << 18

Uint64 = npt.NDArray[np.uint64]


class Entries(NamedTuple):
    """Ids as arrays of one length, sorted by (high, low).

    Attributes
    ----------
    high, low : (n,) uint64
        Halves of the id digests, read as big-endian.
    digests : (n, 16) uint8
        Of the records.
    sequences : (n,) int64
    """

    high: Uint64
    low: Uint64
    digests: Bytes
    sequences: npt.NDArray[np.int64]

    @classmethod
    def of(cls, ids: Bytes, digests: Bytes, sequences: npt.NDArray[np.int64]) -> Entries:
        """Return the entries of (n, 16) id digests in any order."""
        halves = np.ascontiguousarray(ids).view(">u8").astype(np.uint64).reshape(-1, 2)
        return cls(halves[:, 0], halves[:, 1], digests, sequences).sorted()

    def sorted(self) -> Entries:
        """Return the same entries in order."""
        return self.picked(np.lexsort((self.low, self.high)))

    def picked(self, index: Any) -> Entries:
        """Return some of the entries: a slice, a mask or positions."""
        return Entries(
            self.high[index], self.low[index], self.digests[index], self.sequences[index]
        )


def run_range(name: str) -> tuple[int, int] | None:
    """Return first and end of the run with this file name, None for other files."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


class Run:
    """One run, its file mapped.

    Raises
    ------
    CorruptError, ChecksumError
        The file is not what its writer wrote.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        self.nbytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_head.size)
        if len(head) < _head.size:
            raise self._broken("a head of 64 bytes", len(head))
        magic, self.first, self.end, count, checksum = _head.unpack(head)
        if magic != MAGIC or (self.first, self.end) != run_range(path.name):
            raise self._broken(f"a run named {path.name}", head[:24].hex())
        if self.nbytes != _head.size + count * _ENTRY:
            raise self._broken(f"{count} ids", f"{self.nbytes} bytes")
        # An empty file cannot be mapped.
        data: Any = np.memmap(path, np.uint8, "r", _head.size) if count else np.zeros(0, np.uint8)
        if verify and xxhash.xxh3_128_digest(data) != checksum:
            raise ChecksumError(
                "a run of the id index does not match its checksum", where=Where(file=str(path)),
                expected=checksum.hex(), got="another", remedy="it is made anew from the log",
            )  # fmt: skip
        cuts = (np.cumsum([0, 8, 8, 16, 8]) * count).tolist()
        high, low, digests, sequences = (data[a:b] for a, b in pairwise(cuts))
        self.entries = Entries(
            high.view(np.uint64), low.view(np.uint64), digests.reshape(count, 16),
            sequences.view(np.int64),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.entries.high)

    def _broken(self, expected: object, got: object) -> CorruptError:
        return CorruptError(
            "a run of the id index is malformed", where=Where(file=str(self.path)),
            expected=expected, got=got, remedy="it is made anew from the log",
        )  # fmt: skip

    def find(
        self, ordered: Uint64, order: npt.NDArray[np.int64], keys: Sequence[bytes], floor: int
    ) -> Iterator[tuple[int, bytes]]:
        """Return (place among `keys`, record digest) of the ids that the run has.

        Parameters
        ----------
        ordered : (n,) uint64
            High halves, ascending, which is gentle to the page cache.
        order : (n,) int64
            Places of these among `keys`.
        keys : sequence of bytes
            Id digests.
        floor : int
            Records below this sequence do not count.
        """
        high = self.entries.high
        if not len(high):
            return
        places = np.searchsorted(high, ordered)
        same = high[np.minimum(places, len(high) - 1)] == ordered
        for hit in np.flatnonzero(same).tolist():
            wanted = int(order[hit])
            low = int.from_bytes(keys[wanted][8:], "big")
            place = int(places[hit])
            # Different ids may share their first half.
            while place < len(high) and high[place] == ordered[hit]:
                if int(self.entries.low[place]) == low and self.entries.sequences[place] >= floor:
                    yield wanted, self.entries.digests[place].tobytes()
                place += 1


def write_run(folder: Path, entries: Entries, first: int, end: int) -> Run:
    """Write sorted entries as the run of the records [first, end)."""
    path = _path(folder, first, end)
    parts = [_raw(part) for part in _parts(entries)]
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    with create(path) as file:
        file.write(_head.pack(MAGIC, first, end, len(entries.high), hasher.digest()))
        for part in parts:
            file.write(part)
    return Run(path, verify=False)


def merge_runs(
    folder: Path, runs: Sequence[Run], floor: int, stopped: Callable[[], bool] = lambda: False
) -> Run | None:
    """Write one run with the ids of all, those below `floor` left out.

    Guarantees: memory is bounded, however many ids there are.

    Parameters
    ----------
    folder : Path
    runs : sequence of Run
        Neighbours.
    floor : int
        Sequence.
    stopped : callable, optional
        Asked now and then; once it is true, nothing is written and None returned.
    """
    first, end = runs[0].first, runs[-1].end
    kept = sum(int(np.count_nonzero(run.entries.sequences >= floor)) for run in runs)
    path = _path(folder, first, end)
    starts = np.cumsum([0, 8, 8, 16]) * kept + _head.size
    new = NewFile(path)
    with new.removed_on_error():
        file, done = new.file, 0
        for chunk in _merged(runs, floor):
            if stopped():
                new.abort()
                return None
            for start, part in zip(starts.tolist(), _parts(chunk), strict=True):
                raw = _raw(part)
                file.seek(start + done * (len(raw) // max(len(chunk.high), 1)))
                file.write(raw)
            done += len(chunk.high)
        file.flush()
        file.seek(0)
        file.write(_head.pack(MAGIC, first, end, kept, bytes(16)))
        file.flush()
        file.seek(0)
        file.write(_head.pack(MAGIC, first, end, kept, _file_digest(Path(file.name))))
    new.commit()
    return Run(path, verify=False)


def _path(folder: Path, first: int, end: int) -> Path:
    return folder / f"index-{first:020d}-{end:020d}.ids"


def _parts(entries: Entries) -> tuple[npt.NDArray[Any], ...]:
    return entries.high, entries.low, entries.digests, entries.sequences


def _raw(part: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(part).view(np.uint8).reshape(-1).data


def _file_digest(path: Path) -> bytes:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        file.seek(_head.size)
        while part := file.read(1 << 20):
            hasher.update(part)
    return hasher.digest()


def _merged(runs: Sequence[Run], floor: int) -> Iterator[Entries]:
    """Return the entries of all runs in order, in chunks that hold an equal share of hashes."""
    total = sum(len(run) for run in runs)
    pieces = max(1, -(-total // _CHUNK))
    bounds = [(number << 64) // pieces for number in range(1, pieces)]
    cuts = [
        [0, *np.searchsorted(run.entries.high, np.array(bounds, np.uint64)).tolist(), len(run)]
        for run in runs
    ]
    for number in range(pieces):
        parts = [
            run.entries.picked(slice(own[number], own[number + 1]))
            for run, own in zip(runs, cuts, strict=True)
        ]
        joined = Entries(
            np.concatenate([part.high for part in parts]),
            np.concatenate([part.low for part in parts]),
            np.concatenate([part.digests for part in parts]),
            np.concatenate([part.sequences for part in parts]),
        )
        yield joined.picked(joined.sequences >= floor).sorted()
