"""A batch of records as tensors that are views of one allocation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from ragged_format.arguments import check_integer, column_names, list_of
from ragged_format.canonical import as_batches
from ragged_format.decoding import iter_batches
from ragged_format.errors import SchemaMismatchError, UnsupportedFeatureError, Where
from ragged_format.parse import parse_schema
from ragged_format.schema import RECORD
from ragged_format.torch.arena import Slot, allocate, allocate_here
from ragged_format.torch.arguments import usable_device
from ragged_format.torch.arrow import record_batch
from ragged_format.torch.columns import ArenaColumns
from ragged_format.torch.gather import Measured, Runs, measure, whole, write
from ragged_format.torch.pad import pad_buckets, pad_chunks, pad_ragged, round_up
from ragged_format.torch.plan import Layout, Plan, plan_of
from ragged_format.torch.views import View, open_view, view_of

__all__ = ["RaggedBatch"]

_FACTS = ("state", "num_repeated", "is_filler", "step_targets")


class RaggedBatch(ArenaColumns):
    """Records as tensors, all of them views of one allocation, the arena.

    ``batch[name]`` is a column flat, all records end to end: (t,), or (t, *shape) for fixed-shape
    elements. How it divides is given by :meth:`lengths`, :meth:`counts` and :meth:`offsets`;
    :meth:`padded`, :meth:`buckets` and :meth:`chunks` make tables of it. Number columns that may be
    null have a mask, :meth:`valid`; text is decoded by :meth:`strings`.

    Batches come from :class:`RaggedLoader` and :class:`RaggedDataset`, or from
    :meth:`from_arrow` and :meth:`collate`; the type never depends on the data. They pass through
    ``torch.utils.data.DataLoader``, pinning included, and between processes.

    Guarantees: columns begin at multiples of 64 bytes. Tensors made by a batch stay valid when the
    batch and its loader are gone. A batch is not thread-safe; its tensors are.

    Attributes
    ----------
    schema : RaggedSchema
        The columns that were loaded.
    num_rows : int
        Records.
    state : dict, optional
        State of the loader that made the batch: loading it continues after this batch.
    arena : (nbytes,) uint8 Tensor
        The allocation that all tensors view.
    plan : Plan
        Of what parts the arena consists.
    num_repeated : int
        Records at the end that repeat others of the epoch (``tail="pad"`` only).
    is_filler : bool
        The only record is an empty row, one token and no target: no record was left for this rank
        (``tail="empty"`` only).
    step_targets : int, optional
        Scored tokens in the batches of all ranks at this step, repeated records included: what a
        token-level loss is divided by. The same on every rank, found without communication. None
        where the columns loaded do not tell, and for batches that no loader made.

    Examples
    --------
    >>> import pyarrow as pa, ragged_format as rf
    >>> schema = rf.sample_schema(vocab_size=9, columns=["candidate_counts", "candidate_ids"])
    >>> row = {
    ...     "sample_id": "a",
    ...     "input_ids": [4, 5, 6],
    ...     "completion_mask": [0, 1, 1],
    ...     "candidate_counts": [2, 1],
    ...     "candidate_ids": [3, 5, 6],
    ... }
    >>> batch = RaggedBatch.from_arrow(pa.RecordBatch.from_pylist([row], schema=schema))
    >>> batch["candidate_ids"]
    tensor([3, 5, 6], dtype=torch.int32)
    >>> batch.padded("candidate_ids")
    tensor([[ 3,  5],
            [ 6, -1]], dtype=torch.int32)
    >>> batch.strings("sample_id")
    ['a']
    """

    __slots__ = ("_slot", "is_filler", "num_repeated", "state", "step_targets")

    def __init__(
        self,
        plan: Plan,
        num_rows: int,
        layout: Layout,
        arena: Tensor,
        *,
        host: Tensor | None = None,
        slot: Slot | None = None,
        state: Mapping[str, Any] | None = None,
        num_repeated: int = 0,
        is_filler: bool = False,
        step_targets: int | None = None,
    ) -> None:
        super().__init__(plan, num_rows, layout, arena, host)
        self._slot = slot
        self.state = state
        self.num_repeated = num_repeated
        self.is_filler = is_filler
        self.step_targets = step_targets

    @classmethod
    def from_arrow(
        cls,
        data: pa.RecordBatch | pa.Table | Iterable[pa.RecordBatch],
        columns: Iterable[str] | None = None,
    ) -> Self:
        """Return record batches of one schema as one batch in an arena of its own; a copy.

        Parameters
        ----------
        data : RecordBatch, Table or iterable of RecordBatch
            At least one, with this format's schema metadata.
        columns : iterable of str, optional
            The columns wanted; the counts that their axes need are added. Default: all.

        Raises
        ------
        SchemaMismatchError
            A column does not exist, or the batches differ in schema.
        InvariantError
            Lists are broken or disagree in length; values are not checked.
        """
        batches = list(as_batches(data) if isinstance(data, pa.Table) else iter_batches(data))
        if not batches:
            raise SchemaMismatchError(
                "at least one record batch is needed", expected=">= 1", got=0,
                remedy="pass an empty batch of the schema for no records",
            )  # fmt: skip
        schema = parse_schema(batches[0].schema)
        names = column_names(columns)
        plan = plan_of(schema if names is None else schema.select(names))
        views = [
            open_view(batch, plan, Where(batch=number)) for number, batch in enumerate(batches)
        ]
        return cls.from_runs(plan, whole(views))

    @classmethod
    def collate(cls, batches: Iterable[RaggedBatch]) -> Self:
        """Join batches of one schema, for use as ``collate_fn`` of a DataLoader; a copy.

        A batch that already is one is returned as it is. Inside a DataLoader worker the arena lies
        in shared memory, so that the main process gets it without another copy.

        Raises
        ------
        SchemaMismatchError
            The schemas differ, or there is no batch.
        """
        if isinstance(batches, cls):
            return batches
        parts = list_of("batches", RaggedBatch, batches)
        if not parts:
            raise SchemaMismatchError(
                "at least one batch is needed", expected=">= 1", got=0,
                remedy="pass the batches of a dataset, such as dataset[0]",
            )  # fmt: skip
        plan = parts[0].plan
        for number, part in enumerate(parts):
            if part.plan is not plan and part.schema != plan.schema:
                raise SchemaMismatchError(
                    "batches of different schemas cannot be joined", code="RF-S010",
                    where=Where(batch=number), expected=plan.schema, got=part.schema,
                )  # fmt: skip
        return cls.from_runs(plan, whole([part.view() for part in parts]))

    @classmethod
    def from_runs(cls, plan: Plan, runs: Runs) -> Self:
        """Return the records of these runs in an arena of its own."""
        measured = measure(plan, runs)
        return cls.fill(plan, measured, allocate_here(measured.layout.nbytes))

    @classmethod
    def fill(
        cls,
        plan: Plan,
        measured: Measured,
        arena: Tensor,
        *,
        slot: Slot | None = None,
        state: Mapping[str, Any] | None = None,
        num_repeated: int = 0,
        is_filler: bool = False,
        step_targets: int | None = None,
    ) -> Self:
        """Copy measured runs into `arena` and return the batch over it."""
        write(plan, measured, arena.numpy())
        return cls(
            plan, measured.num_rows, measured.layout, arena[: measured.layout.nbytes],
            slot=slot, state=state, num_repeated=num_repeated, is_filler=is_filler,
            step_targets=step_targets,
        )  # fmt: skip

    # Tables

    def padded(
        self,
        name: str,
        width: int | None = None,
        fill: float | None = None,
        *,
        multiple_of: int | None = None,
        truncate: bool = False,
    ) -> Tensor:
        """Return a column as a padded table, (rows, width, *shape).

        Rows are as in :meth:`rows`: targets for candidate sets and heads, records for columns of
        tokens and targets. Nothing waits for the device. Columns of one axis get one width.

        Parameters
        ----------
        name : str
            A number column below the record axis.
        width : int, optional
            Slots in a row. Default: the widest row.
        fill : int or float, optional
            Default: the fill that the schema declares.
        multiple_of : int, optional
            Round the width up to a multiple.
        truncate : bool
            Drop what is beyond `width`; otherwise that is an error.

        Raises
        ------
        SchemaMismatchError
            There is no such column, or it is text or on the record axis.
        LimitExceededError
            A row is wider than `width` (``RF-L001``).
        """
        values, counts, host, default = self._for_table(name)
        return pad_ragged(
            values, counts, width, default if fill is None else fill,
            multiple_of=multiple_of, truncate=truncate, host_counts=host,
        )  # fmt: skip

    def padded_mask(
        self, axis: str, width: int | None = None, *, multiple_of: int | None = None
    ) -> Tensor:
        """Return which slots of an axis' tables hold a value, (rows, width) bool.

        Parameters as for :meth:`padded`.
        """
        counts, host = self.rows(axis)
        if width is None:
            width = int(host.max()) if len(host) else 0
        check_integer("width", width, 0)
        columns = torch.arange(round_up(width, multiple_of), device=self.device)
        return columns < counts.to(torch.int64)[:, None]

    def buckets(self, name: str, fill: float | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return a column as tables in widths of powers of two, [(row_index, table)].

        Together they hold at most twice the values. Rows without values are in no bucket.
        Parameters and errors as for :meth:`padded`, result as of
        :func:`ragged_format.torch.pad.pad_buckets`.
        """
        values, counts, host, default = self._for_table(name)
        return pad_buckets(values, counts, default if fill is None else fill, host_counts=host)

    def chunks(
        self, name: str, rows: int, fill: float | None = None, *, multiple_of: int | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield a column as (start, stop, table) of consecutive rows, never the whole table.

        Parameters and errors as for :meth:`padded`, result as of
        :func:`ragged_format.torch.pad.pad_chunks`.
        """
        values, counts, host, default = self._for_table(name)
        return pad_chunks(
            values, counts, rows, default if fill is None else fill,
            multiple_of=multiple_of, host_counts=host,
        )  # fmt: skip

    # Memory

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> RaggedBatch:
        """Return the batch on `device`, by one copy of the arena; itself if it is there already.

        With ``non_blocking`` from pinned memory the copy runs on the current stream; the memory of
        this batch is not reused before it has finished.

        Raises
        ------
        UnsupportedFeatureError
            There is no such device (``RF-V002``).
        """
        if device == self.device:
            return self
        target = usable_device(device)
        unnumbered = torch.device(device).index is None and self.device.type == target.type
        if self.device == target or unnumbered:
            return self
        arena = self.arena.to(target, non_blocking=non_blocking)
        if self._slot is not None and arena.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(arena.device))
            self._slot.events.append(event)
        host = None
        if target.type != "cpu":
            # Widths and text are needed on the host; a copy, so that the arena can be reused.
            host = self._host[: self._layout.starts[self.plan.num_host]].clone()
        return self._over(arena, host)

    def pin_memory(self, device: torch.device | str | None = None) -> RaggedBatch:  # noqa: ARG002
        """Return the batch in page-locked memory, by one copy; ``DataLoader`` calls this.

        Raises
        ------
        UnsupportedFeatureError
            There is no accelerator for which memory is locked (``RF-V002``).
        """
        if self.arena.is_pinned():
            return self
        try:
            arena = self.arena.pin_memory()
        except RuntimeError as err:
            raise UnsupportedFeatureError(
                "memory cannot be page-locked here", expected="an accelerator, and memory to lock",
                got=str(err).splitlines()[0], remedy="leave pin_memory out on the CPU",
            ) from err  # fmt: skip
        return self._over(arena, None)

    def clone(self) -> RaggedBatch:
        """Return a copy in memory of its own, which frees the loader's slot for reuse."""
        arena = torch.empty_like(self.arena)
        if self.device.type == "cpu":
            arena = allocate(self.nbytes)
        return self._over(arena.copy_(self.arena), self._host if self._host is not self.arena
                          else None)  # fmt: skip

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the caching allocator that `stream` uses the tensors."""
        self.arena.record_stream(stream)

    def to_arrow(self) -> pa.RecordBatch:
        """Return the batch as Arrow data, for what takes records: checks, masks, files.

        Guarantees: numbers and text are not copied; the result keeps the memory, as tensors do.
        It has the columns that were loaded, and no metadata but the format's own.

        Raises
        ------
        SchemaMismatchError
            The batch is not on the CPU.
        """
        keys = [(part.kind, part.name) for part in self.plan.parts]
        return record_batch(self.plan, dict(zip(keys, self._host_arrays(), strict=True)))

    def view(self) -> View:
        """Return the batch as a source to gather from; it must be on the CPU."""
        arrays = self._host_arrays()
        arrays = [
            array if part.over >= 0 else array.reshape(-1).view(np.uint8)
            for part, array in zip(self.plan.parts, arrays, strict=True)
        ]
        return view_of(self.plan, self.num_rows, arrays)

    def _host_arrays(self) -> list[npt.NDArray[Any]]:
        if self.device.type != "cpu":
            raise SchemaMismatchError(
                "only batches on the CPU can be read by the host", expected="cpu", got=self.device,
                remedy="join or convert batches before moving them",
            )  # fmt: skip
        return [self._host_array(part.kind, part.name) for part in self.plan.parts]

    def __reduce__(self) -> tuple[Any, ...]:
        arena = self.arena
        if arena.untyped_storage().nbytes() > 2 * self.nbytes + 4096:
            arena = self.clone().arena  # a slot of a ring would travel whole
        schema = self.schema.to_arrow().serialize().to_pybytes()
        layout = (list(self._layout.starts), list(self._layout.lengths))
        host = None if self._host is self.arena else self._host
        return _rebuild, (schema, self.num_rows, layout, arena, host, self._facts())

    def __repr__(self) -> str:
        return (
            f"RaggedBatch(num_rows={self.num_rows}, nbytes={self.nbytes}, "
            f"device={str(self.device)!r}, columns={self.keys()})"
        )

    def _over(self, arena: Tensor, host: Tensor | None) -> RaggedBatch:
        return RaggedBatch(
            self.plan, self.num_rows, self._layout, arena,
            host=host, **self._facts(),
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        """Return what is known of the batch beside its content."""
        return {name: getattr(self, name) for name in _FACTS}

    def _for_table(self, name: str) -> tuple[Tensor, Tensor, npt.NDArray[np.int64], float]:
        column = self.schema[name]
        if column.axis == RECORD or column.fill is None:
            raise SchemaMismatchError(
                "only number columns below the record axis are padded",
                where=Where(column=name), expected="numbers on another axis than 'record'",
                got=f"{column.type} on axis {column.axis!r}",
                remedy=f"use batch.{'strings' if column.fill is None else 'valid'}({name!r})",
            )  # fmt: skip
        counts, host = self.rows(column.axis)
        return self[name], counts, host, column.fill


def _collate(batches: Sequence[RaggedBatch], **_: object) -> RaggedBatch:
    """Do what a DataLoader without a ``collate_fn`` asks for: a lone batch keeps its state."""
    return batches[0] if len(batches) == 1 else RaggedBatch.collate(batches)


default_collate_fn_map[RaggedBatch] = _collate


def _rebuild(
    schema: bytes,
    num_rows: int,
    layout: tuple[list[int], list[int]],
    arena: Tensor,
    host: Tensor | None,
    facts: dict[str, Any],
) -> RaggedBatch:
    plan = plan_of(parse_schema(pa.ipc.read_schema(pa.py_buffer(schema))))
    return RaggedBatch(plan, num_rows, Layout(*layout), arena, host=host, **facts)


# So that torch.load reads batches that torch.save wrote, weights_only too.
torch.serialization.add_safe_globals([_rebuild])
