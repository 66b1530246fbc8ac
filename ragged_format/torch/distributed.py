"""Hand rows from one process to all: a header and one flat buffer each, no pickled objects.

One process plans and packs; every other one receives the row that is its own, as the arena over
which its tensors are views. Messages travel on a group that moves CPU tensors (gloo), while the
training step runs::

    group = dist.new_group(backend="gloo")
    for batch in scatter_stream(rows if dist.get_rank() == 0 else None, group=group):
        step(batch.to(device, non_blocking=True))

The header is fixed in size: protocol, kind, sizes. The buffer begins with the lengths of the row's
parts, the schema and the loader's state, and goes on with the arena.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from ragged_format.arguments import check_integer
from ragged_format.canonical import as_batch
from ragged_format.errors import HandOverError, LimitExceededError, SchemaMismatchError, Where
from ragged_format.parse import parse_schema
from ragged_format.torch.arena import aligned, allocate
from ragged_format.torch.arguments import check_group
from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.gather import measure, whole, write
from ragged_format.torch.plan import Plan, plan_of
from ragged_format.torch.views import open_view

if TYPE_CHECKING:
    from torch import Tensor

    from ragged_format.schema import RaggedSchema

__all__ = ["Pending", "broadcast_batch", "scatter_rows", "scatter_stream"]

PROTOCOL = 1
_ROW, _END, _FAILED = 0, 1, 2
_FIELDS = 8
# Before the lengths of the parts: how many they are, bytes of the schema and of the state.
_INTS = 3
_TAG = 0x5246
_TARGET = "target"

Row: TypeAlias = pa.RecordBatch | RaggedBatch


class Header(NamedTuple):
    """What precedes a buffer; eight int64.

    `step_targets` is -1 where they are not known.
    """

    protocol: int
    kind: int
    nbytes: int = 0
    num_rows: int = 0
    step_targets: int = 0
    num_repeated: int = 0
    is_filler: int = 0

    def tensor(self) -> Tensor:
        """Return the header as it is sent."""
        return torch.tensor([*self, *[0] * (_FIELDS - len(self))], dtype=torch.int64)


class Pending:
    """A hand-over that is under way; :meth:`wait` ends it.

    Attributes
    ----------
    nbytes_sent, nbytes_received : int
        Bytes that this process sends and receives, headers included.
    """

    def __init__(self, finish: Callable[[], RaggedBatch | None], sent: int, received: int) -> None:
        self._finish: Callable[[], RaggedBatch | None] | None = finish
        self._batch: RaggedBatch | None = None
        self.nbytes_sent = sent
        self.nbytes_received = received

    def wait(self) -> RaggedBatch | None:
        """Return this process's batch once it is here; ``None`` at the end of the rows.

        On the source it returns when nothing of the hand-over is left to send. Further calls return
        the same.

        Raises
        ------
        HandOverError
            The source failed to produce a row, or speaks another protocol; or a process is gone
            (``RF-T002``).
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._batch = finish()
        return self._batch


def scatter_rows(
    rows: Sequence[Row] | None = None,
    *,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    row_of: Sequence[int] | None = None,
) -> Pending:
    """Send every process its row; each receives only its own.

    Every process of the group calls it, in the same order; what the others pass as `rows` does not
    matter. The source sends without waiting. The others wait for the header (that is, until the
    source has its rows), and the row itself travels until :meth:`Pending.wait`: start the next
    hand-over before a step to hide it behind the step.

    Guarantees: the source's own row makes no copy beyond its arena, a sent row one. Received memory
    is page-locked where there is CUDA. ``step_targets`` of the batches is the number of targets in
    all distinct rows, the same on every process.

    Parameters
    ----------
    rows : sequence of RecordBatch or RaggedBatch, optional
        One per process, or as `row_of` says; batches lie on the CPU. ``None``: there are no more
        rows, and every process gets ``None``.
    src : int
        The rank in the group that has the rows.
    group : ProcessGroup, optional
        One that moves CPU tensors. Default: the whole world.
    row_of : sequence of int, optional
        Which row each rank gets; ranks of one tensor- or context-parallel group get the same.

    Raises
    ------
    LimitExceededError
        Not one row per process, on every process (``RF-L001``).
    SchemaMismatchError
        The group moves no CPU tensors.
    """
    world = _World.of(group, src)
    if world.rank != src:
        return world.receive(_check)
    if rows is None:
        return world.send_all(Header(PROTOCOL, _END), "")
    try:
        wanted = [*map(operator.index, range(world.size) if row_of is None else row_of)]
        number = len(rows)
    except TypeError:
        wanted, number = [], -1
    if len(wanted) != world.size or (row_of is None and number != world.size) or not all(
        0 <= row < number for row in wanted
    ):  # fmt: skip
        have = f"{number} rows" if number >= 0 else f"a {type(rows).__name__}"
        return world.fail(LimitExceededError(
            "every process gets one of the rows", expected=f"a list of {world.size} rows",
            got=have if row_of is None else f"{have}, row_of={row_of}",
            remedy="pass one row for each process, or say in row_of which each gets",
        ))  # fmt: skip
    try:
        parcels = [
            _parcel(row, own=all(rank == src for rank, of in enumerate(wanted) if of == number))
            for number, row in enumerate(rows)
        ]
    except Exception as err:  # noqa: BLE001
        return world.fail(err)
    targets = [_targets(parcel.batch) for parcel in parcels]
    total = None if None in targets else sum(filter(None, targets))
    for parcel in parcels:
        parcel.batch.step_targets = total
    works, sent = [], 0
    for rank, row in enumerate(wanted):
        if rank != src:
            parcel = parcels[row]
            works += world.send(rank, parcel.header(total), parcel.buffer)
            sent += _FIELDS * 8 + len(parcel.buffer)
    return Pending(_after(works, parcels[wanted[src]].batch), sent, 0)


def broadcast_batch(
    batch: Row | None = None, *, src: int = 0, group: dist.ProcessGroup | None = None
) -> Pending:
    """Send every process the same batch; otherwise as :func:`scatter_rows`.

    Parameters
    ----------
    batch : RecordBatch or RaggedBatch, optional
        On the source; ``None`` ends.
    src, group
        As for :func:`scatter_rows`.
    """
    size = _World.of(group, src).size
    rows = None if batch is None else [batch]
    return scatter_rows(rows, src=src, group=group, row_of=[0] * size)


def scatter_stream(
    rows: Iterable[Sequence[Row]] | None = None,
    *,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    row_of: Sequence[int] | None = None,
    ahead: bool = True,
) -> Iterator[RaggedBatch]:
    """Yield this process's row of every step; the next one travels meanwhile.

    Parameters
    ----------
    rows : iterable of sequence of RecordBatch or RaggedBatch
        On the source: the rows of each step. A loop that is left early is left after the same
        step by all processes, which then can begin another one; the step that was already
        travelling is lost.
    src, group, row_of
        As for :func:`scatter_rows`.
    ahead : bool
        Ask for the next step before one is yielded. Without it a step is yielded as soon as it is
        there, and the next one travels after it: for samples that the step before brings forth,
        which would be waited for in vain. The same on all processes.

    Raises
    ------
    HandOverError
        On the other processes, where the iterable raises on the source, which raises that.
    """
    world = _World.of(group, src)
    steps: Iterator[Sequence[Row]] | None = None

    def advance() -> Pending:
        nonlocal steps
        step = None
        if world.rank == src:
            try:
                if steps is None:
                    steps = iter(() if rows is None else _steps_of(rows))
                step = next(steps, None)
            except Exception as err:  # noqa: BLE001
                return world.fail(err)
        return scatter_rows(step, src=src, group=group, row_of=row_of)

    batch = advance().wait()
    while batch is not None:
        following = advance() if ahead else None
        try:
            yield batch
        except GeneratorExit:
            # What travels is taken off the wire, or the next hand-over would receive it.
            if following is not None:
                with suppress(HandOverError):
                    following.wait()
            raise
        batch = (following or advance()).wait()


def _steps_of(rows: Any) -> Iterable[Sequence[Row]]:
    if isinstance(rows, Iterable):
        return rows
    raise SchemaMismatchError(
        "the rows of a stream come step by step", expected="an iterable of lists of rows",
        got=f"a {type(rows).__name__}", remedy="pass an OnlineLoader, or a generator of such lists",
    )  # fmt: skip


class _Parcel(NamedTuple):
    """A batch, and the buffer that carries it; empty where nobody else gets it."""

    batch: RaggedBatch
    buffer: Tensor

    def header(self, step_targets: int | None) -> Header:
        known = -1 if step_targets is None else step_targets
        batch = self.batch
        return Header(
            PROTOCOL, _ROW, len(self.buffer), batch.num_rows, known, batch.num_repeated,
            batch.is_filler,
        )  # fmt: skip


def _parcel(row: Row, *, own: bool) -> _Parcel:
    facts: dict[str, Any]
    if isinstance(row, RaggedBatch):
        if own:
            return _Parcel(row, torch.empty(0, dtype=torch.uint8))
        plan, view = row.plan, row.view()
        facts = {
            "state": row.state, "num_repeated": row.num_repeated, "is_filler": row.is_filler,
        }  # fmt: skip
    else:
        row = as_batch(row)
        plan, facts = plan_of(parse_schema(row.schema)), {}
        if own:
            return _Parcel(RaggedBatch.from_arrow(row), torch.empty(0, dtype=torch.uint8))
        view = open_view(row, plan, Where())
    measured = measure(plan, whole([view]))
    detail = _detail(plan, measured.layout.lengths, facts.get("state"))
    start = aligned(len(detail))
    buffer = allocate(start + measured.layout.nbytes)
    buffer[: len(detail)] = torch.from_numpy(detail)
    buffer[len(detail) : start] = 0
    write(plan, measured, buffer[start:].numpy())
    return _Parcel(
        RaggedBatch(plan, measured.num_rows, measured.layout, buffer[start:], **facts), buffer
    )


def _detail(plan: Plan, lengths: list[int], state: Mapping[str, Any] | None) -> Any:
    schema = _schema_bytes(plan.schema)
    try:
        text = b"" if state is None else json.dumps(state).encode()
    except (TypeError, ValueError) as err:
        raise SchemaMismatchError(
            "the state of a batch is JSON values", expected="what a loader's state_dict() returns",
            got=str(err), remedy="keep other things beside the batch",
        ) from err  # fmt: skip
    numbers = np.array([len(lengths), len(schema), len(text), *lengths], np.int64)
    return np.frombuffer(numbers.tobytes() + schema + text, np.uint8).copy()


@lru_cache(maxsize=32)
def _schema_bytes(schema: RaggedSchema) -> bytes:
    raw: bytes = schema.to_arrow().serialize().to_pybytes()
    return raw


@lru_cache(maxsize=32)
def _plan_from(schema: bytes) -> Plan:
    return plan_of(parse_schema(pa.ipc.read_schema(pa.py_buffer(schema))))


def _open(buffer: Tensor, header: Header) -> RaggedBatch:
    array = buffer.numpy()
    count, schema, state = array[: _INTS * 8].view(np.int64).tolist()
    end = (_INTS + count) * 8
    lengths = array[_INTS * 8 : end].view(np.int64).tolist()
    plan = _plan_from(array[end : end + schema].tobytes())
    text = array[end + schema : end + schema + state].tobytes()
    arena = buffer[aligned(end + schema + state) :]
    return RaggedBatch(
        plan, header.num_rows, plan.layout(lengths), arena,
        state=json.loads(text) if text else None,
        step_targets=None if header.step_targets < 0 else header.step_targets,
        num_repeated=header.num_repeated, is_filler=bool(header.is_filler),
    )  # fmt: skip


def _targets(batch: RaggedBatch) -> int | None:
    if _TARGET not in batch.plan.axes:
        return None
    return int(batch.lengths_host(_TARGET).sum())


def _after(works: list[dist.Work], batch: RaggedBatch | None) -> Callable[[], RaggedBatch | None]:
    def finish() -> RaggedBatch | None:
        for work in works:
            _finish(work)
        return batch

    return finish


def _check(header: Header, text: str) -> None:
    if header.protocol != PROTOCOL:
        raise HandOverError(
            "the source speaks another protocol", expected=PROTOCOL, got=header.protocol,
            remedy="install the same version of ragged-format on all nodes",
        )  # fmt: skip
    if header.kind == _FAILED:
        raise HandOverError(
            "the source could not produce a row", expected="a row", got=text,
            remedy="see the error that the source raised",
        )  # fmt: skip


class _World(NamedTuple):
    """A process group as one process sees it."""

    group: dist.ProcessGroup | None
    src: int
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, src: int) -> _World:
        if not (dist.is_available() and dist.is_initialized()):
            raise SchemaMismatchError(
                "there is no process group", expected="torch.distributed, initialised", got="none",
                remedy="call torch.distributed.init_process_group first",
            )  # fmt: skip
        check_group(group)
        config = dist.get_backend_config(group)
        if "cpu" not in config:
            raise SchemaMismatchError(
                "the process group moves no CPU tensors", expected="a group with gloo",
                got=config, remedy='pass group=dist.new_group(backend="gloo")',
            )  # fmt: skip
        size = dist.get_world_size(group)
        check_integer("src", src, 0, size)
        return cls(group, operator.index(src), dist.get_rank(group), size)

    def send(self, rank: int, header: Header, buffer: Tensor) -> list[dist.Work]:
        """Send to one rank of the group; the works keep the tensors alive."""
        works = [_isend(header.tensor(), rank, self.group)]
        if len(buffer):
            works.append(_isend(buffer, rank, self.group))
        return works

    def send_all(self, header: Header, text: str) -> Pending:
        """Send a header, with a text as buffer, to everybody else."""
        raw = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        raw = raw[: header.nbytes]
        works = []
        for rank in range(self.size):
            if rank != self.src:
                works += self.send(rank, header, raw)
        return Pending(_after(works, None), (_FIELDS * 8 + len(raw)) * (self.size - 1), 0)

    def fail(self, err: Exception) -> Pending:
        """Tell everybody else that the source failed, then raise `err`."""
        text = f"{type(err).__name__}: {err}"
        with suppress(HandOverError):  # they may be gone: what failed here says more
            self.send_all(Header(PROTOCOL, _FAILED, len(text.encode())), text).wait()
        raise err

    def receive(self, check: Callable[[Header, str], None]) -> Pending:
        """Wait for the header, and start to receive what it announces."""
        numbers = torch.empty(_FIELDS, dtype=torch.int64)
        _finish(_irecv(numbers, self.src, self.group))
        header = Header(*numbers.tolist()[: len(Header._fields)])
        received = _FIELDS * 8 + header.nbytes
        if header.protocol != PROTOCOL:
            check(header, "")
        if not header.nbytes:
            return Pending(_after([], None), 0, received)
        buffer = allocate(header.nbytes, pin=torch.cuda.is_available())
        work = _irecv(buffer, self.src, self.group)

        def finish() -> RaggedBatch | None:
            _finish(work)
            if header.kind == _FAILED:
                check(header, buffer.numpy().tobytes().decode())
            return _open(buffer, header)

        return Pending(finish, 0, received)


@contextmanager
def _others() -> Iterator[None]:
    """Say what it means when the group's backend fails."""
    try:
        yield
    except RuntimeError as err:
        raise HandOverError(
            "another process of the hand-over is gone", expected="all processes of the group",
            got=str(err).strip().splitlines()[0],
            remedy="see what ended it; one that was slow needs a group with a longer timeout",
        ) from err  # fmt: skip


def _finish(work: dist.Work) -> None:
    with _others():
        work.wait()


def _isend(tensor: Tensor, rank: int, group: dist.ProcessGroup | None) -> dist.Work:
    with _others():
        work = dist.isend(tensor, group=group, tag=_TAG, group_dst=rank)
    return _started(work, tensor, "send")


def _irecv(tensor: Tensor, rank: int, group: dist.ProcessGroup | None) -> dist.Work:
    with _others():
        work = dist.irecv(tensor, group=group, tag=_TAG, group_src=rank)
    return _started(work, tensor, "receive")


def _started(work: dist.Work | None, tensor: Tensor, what: Literal["send", "receive"]) -> dist.Work:
    if work is None:  # only for a process outside the group
        raise SchemaMismatchError(
            f"this process cannot {what}: it is not in the group", expected="a member",
            got=tuple(tensor.shape),
        )  # fmt: skip
    return work
