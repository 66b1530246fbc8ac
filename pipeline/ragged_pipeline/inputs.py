"""What jobs read: datasets, files and streams of this format, addressed by shard and row range.

This is the one place that opens inputs. A place is whatever :func:`ragged_format.open_source`
opens: a directory, a file or the URL of a registered scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ragged_format.canonical import require_same
from ragged_format.compact.files import CompactReader
from ragged_format.dataset import Dataset
from ragged_format.decoding import Projection
from ragged_format.digest import text_digest
from ragged_format.errors import JobError, Where
from ragged_format.lists import Int64, offsets_of
from ragged_format.manifest import Manifest
from ragged_format.sources import open_source
from ragged_format.unique_ids import source_ids
from ragged_pipeline.defaults import TASK_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.schema import RaggedSchema
    from ragged_pipeline.plan import Plan

__all__ = [
    "Input",
    "Inputs",
    "Piece",
    "RecordInputs",
    "open_inputs",
    "require_planned",
]

# How many times larger compact shards are when they are decoded, about.
EXPANSION = 6


class Inputs(Protocol):
    """All inputs of a job, in order."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return name, kind, fingerprint and sizes of each: what the plan and the lineage state."""
        ...

    def refs(self) -> list[dict[str, Any]]:
        """Return what another process of this machine needs to open the same snapshot."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of records of one shard.

    Attributes
    ----------
    input, shard : int
        Which input, and which of its shards.
    start, stop : int
        Records within the shard.
    """

    input: int
    shard: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of records."""
        return self.stop - self.start

    def to_json(self) -> list[int]:
        """Return JSON values."""
        return [self.input, self.shard, self.start, self.stop]


@dataclass(frozen=True, slots=True)
class _Extent:
    rows: int
    weight: int  # bytes when uncompressed, about


class Input:
    """One dataset or file of this format, with random access to the batches of its shards.

    Parameters
    ----------
    place : str
        Path or URL.
    manifest : Manifest, optional
        Snapshot of a dataset. ``None``: the current one.
    """

    def __init__(self, place: str, manifest: Manifest | None = None) -> None:
        self.place = place
        source: Any = (
            open_source(place)
            if manifest is None
            else Dataset(place, manifest=manifest, verify=True)
        )
        if not source.is_random_access:
            raise JobError(
                "a job reads its input more than once, and a stream can be read once",
                where=Where(file=place), expected="a dataset or file", got="a stream",
                remedy="write it to a dataset first: ragged merge STREAM OUT",
            )  # fmt: skip
        if isinstance(source, Dataset):
            source = Dataset(source.path, manifest=source.snapshot.manifest, verify=True)
        self._source = source
        self.schema: pa.Schema = source.schema
        self.ragged: RaggedSchema = source.ragged_schema
        self.num_rows = int(source.num_rows)
        self.extents = _extents(source)

    @property
    def kind(self) -> str:
        """``"dataset"`` or ``"file"``."""
        return "dataset" if isinstance(self._source, Dataset) else "file"

    @property
    def fingerprint(self) -> str:
        """Digest of schema identity, content and shards, 32 hexadecimal digits."""
        if isinstance(self._source, Dataset):
            return self._source.fingerprint
        trailer = self._source.trailer
        text = f"{self.ragged.identity}\n{trailer.digest}\n{trailer.rows}"
        return text_digest(text.encode()).hex()

    def to_json(self) -> dict[str, Any]:
        """Return what the plan states of this input."""
        return {
            "kind": self.kind, "fingerprint": self.fingerprint, "rows": self.num_rows,
            "shards": len(self.extents),
        }  # fmt: skip

    def ref(self) -> dict[str, Any]:
        """Return what another process needs to open the same snapshot."""
        if not isinstance(self._source, Dataset):
            return {"place": self.place}
        return {"place": self.place, "manifest": self._source.snapshot.manifest.to_json().decode()}

    def _opened(self, shard: int) -> tuple[Any, Int64]:
        if isinstance(self._source, Dataset):
            reader = self._source.snapshot.reader(shard)
            return reader, reader.bounds
        return self._source, offsets_of(np.array(self._source.rows_per_batch, np.int64))

    def placed_ids(self) -> Iterator[tuple[Where, pa.Array]]:
        """Yield the ids of all samples with the places of their batches."""
        return source_ids(self._source, name=self.place)

    def batches(
        self, piece: Piece, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of a piece in batches, verified; views where the input allows."""
        projection = Projection(self.ragged, self.schema, columns)
        reader, bounds = self._opened(piece.shard)
        first = int(np.searchsorted(bounds, piece.start, side="right")) - 1
        for index in range(first, len(bounds) - 1):
            begin, end = int(bounds[index]), int(bounds[index + 1])
            if begin >= piece.stop:
                return
            start, stop = max(piece.start, begin), min(piece.stop, end)
            if start < stop:
                batch = projection.apply(reader.batch(index))
                yield batch.slice(start - begin, stop - start)


def _extents(source: Any) -> list[_Extent]:
    if isinstance(source, Dataset):
        return [
            _Extent(s.rows, s.bytes * (EXPANSION if s.encoding == "compact" else 1))
            for s in source.shards
        ]
    compact = isinstance(source, CompactReader)
    size = source.path.stat().st_size
    return [_Extent(source.num_rows, size * (EXPANSION if compact else 1))]


class RecordInputs:
    """Inputs of records of one schema.

    Parameters
    ----------
    inputs : sequence of Input
        In canonical order: their records follow each other.

    Raises
    ------
    JobError
        There is none (``RF-J001``).
    SchemaMismatchError
        They do not share one identity (``RF-S010``).
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        if not inputs:
            raise JobError(
                "a job reads at least one input", expected="a dataset", got="none",
                remedy="name the datasets or files",
            )  # fmt: skip
        self.inputs = list(inputs)
        for other in self.inputs[1:]:
            require_same(self.inputs[0].ragged, other.ragged, Where(file=other.place))

    @property
    def schema(self) -> pa.Schema:
        """Schema of the first input, whose identity all share."""
        return self.inputs[0].schema

    @property
    def ragged(self) -> RaggedSchema:
        """Declarations of all inputs."""
        return self.inputs[0].ragged

    @property
    def num_rows(self) -> int:
        """Records of all inputs."""
        return sum(part.num_rows for part in self.inputs)

    def to_json(self) -> list[dict[str, Any]]:
        """Return what the plan states of the inputs."""
        return [part.to_json() for part in self.inputs]

    def refs(self) -> list[dict[str, Any]]:
        """Return what another process needs to open the same snapshots."""
        return [part.ref() for part in self.inputs]

    @classmethod
    def from_refs(cls, refs: Sequence[Mapping[str, Any]]) -> RecordInputs:
        """Open the snapshots that :meth:`refs` describes."""
        opened = []
        for ref in refs:
            text = ref.get("manifest")
            manifest = None if text is None else Manifest.from_json(text.encode())
            opened.append(Input(ref["place"], manifest))
        return cls(opened)

    def placed_ids(self) -> Iterator[tuple[Where, pa.Array]]:
        """Yield the ids of all samples with the places of their batches."""
        for source in self.inputs:
            yield from source.placed_ids()

    def batches(
        self,
        pieces: Sequence[Sequence[int]],
        *,
        columns: Sequence[str] | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of pieces (as JSON values), under the schema of the first input.

        Parameters
        ----------
        pieces : sequence of [input, shard, start, stop]
        columns : sequence of str, optional
            Columns wanted; the counts that their axes need come with them.
        advance : callable, optional
            Called with the share of each piece's weight that its batches make up.
        """
        schema = Projection(self.ragged, self.schema, columns).schema
        for values in pieces:
            piece = Piece(*values)
            source = self.inputs[piece.input]
            extent = source.extents[piece.shard]
            for batch in source.batches(piece, columns):
                yield batch.cast(schema) if batch.schema != schema else batch
                if advance is not None:
                    advance(extent.weight * batch.num_rows // max(extent.rows, 1))

    def tasks(self, task_bytes: int = TASK_BYTES) -> tuple[list[list[Piece]], list[int]]:
        """Cut all records into runs of about `task_bytes`; return them and their weights.

        Guarantees: depends on the shards' rows and sizes only. Records keep their order.
        """
        runs: list[list[Piece]] = []
        weights: list[int] = []
        room = 0
        for number, source in enumerate(self.inputs):
            for shard, extent in enumerate(source.extents):
                parts = max(1, min(round(extent.weight / task_bytes), extent.rows))
                bounds = [extent.rows * n // parts for n in range(parts + 1)]
                for start, stop in pairwise(bounds):
                    if start == stop:
                        continue
                    weight = extent.weight * (stop - start) // extent.rows
                    # A run is closed once another piece would take it far beyond its size.
                    if not runs or room < weight // 2:
                        runs.append([])
                        weights.append(0)
                        room = task_bytes
                    runs[-1].append(Piece(number, shard, start, stop))
                    weights[-1] += weight
                    room -= weight
        return runs, weights


def require_planned(inputs: Any, plan: Plan) -> None:
    """Raise unless records that a worker opened are those of the plan; other inputs see to that.

    Raises
    ------
    JobError
        An input was replaced while the job ran (``RF-J001``).
    """
    if not isinstance(inputs, RecordInputs):
        return
    for source, planned in zip(inputs.inputs, plan.inputs, strict=True):
        if source.to_json() != planned:
            raise JobError(
                "an input was replaced while the job ran", where=Where(file=source.place),
                expected=f"fingerprint {planned.get('fingerprint')}", got=source.fingerprint,
                remedy="run the job again; leave its inputs as they are meanwhile",
            )  # fmt: skip


def open_inputs(places: Sequence[str]) -> RecordInputs:
    """Open datasets and files of this format as the inputs of a job.

    Parameters
    ----------
    places : sequence of str
        Paths or URLs.

    Raises
    ------
    DatasetNotFoundError, NotRaggedError
        There is nothing, or something else, at a place.
    JobError, SchemaMismatchError
        There is no input, or the inputs differ.
    """
    return RecordInputs([Input(place) for place in places])
