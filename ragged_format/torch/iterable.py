"""Whole batches for a plain ``torch.utils.data.DataLoader``, resumable, whatever its workers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ragged_format.arguments import check_integer, column_names
from ragged_format.errors import LimitExceededError, StateMismatchError
from ragged_format.parse import parse_schema
from ragged_format.torch.arena import allocate
from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.forks import check_fork
from ragged_format.torch.kept_views import DECODED_BYTES
from ragged_format.torch.reading import Reading, Shuffle
from ragged_format.torch.state import MOST_EPOCHS, Point, parse

if TYPE_CHECKING:
    from ragged_format.schema import RaggedSchema
    from ragged_format.torch.mixing import Mixture
    from ragged_format.torch.produce import Producer
    from ragged_format.torch.source import SourceLike
    from ragged_format.torch.steps import Tail

__all__ = ["RaggedIterable"]

# Workers that can have begun a different number of epochs, each.
_MOST_WORKERS = 1024


class RaggedIterable(IterableDataset[RaggedBatch]):
    """The batches of :class:`RaggedLoader` as an iterable dataset for a plain ``DataLoader``.

    Use ``DataLoader(dataset, batch_size=None, num_workers=n, multiprocessing_context="spawn")``.
    Each worker makes whole batches, every n-th one, in one shared-memory tensor each, and the
    DataLoader takes them in turn: the order is the same for any number of workers.

    Every ``iter()`` of the DataLoader is the next epoch, unless :meth:`set_epoch` or
    :meth:`load_state_dict` says otherwise; both reach workers that persist. Every batch carries in
    ``batch.state`` the state after it, from which a dataset with any number of workers, ranks or
    batch size continues; after the last batch of an epoch that is the next epoch.

    Guarantees: a worker that dies is an error of the DataLoader within seconds. Workers forked from
    a process with threads raise instead of hanging.

    Parameters
    ----------
    source, batch_size, columns, token_budget, shuffle, block_size, window, seed, rank, world_size,
    replicas, tail, verify, max_decoded_bytes
        As for :class:`RaggedLoader`.

    Raises
    ------
    SchemaMismatchError
        A column does not exist (``RF-S003``).
    LimitExceededError
        A number is out of its range (``RF-L001``).
    RaggedError
        The source cannot be opened.

    Examples
    --------
    >>> import pyarrow as pa, ragged_format as rf
    >>> from torch.utils.data import DataLoader
    >>> rows = [
    ...     {"sample_id": f"s{n}", "input_ids": [n, n], "completion_mask": [0, 1]} for n in range(5)
    ... ]
    >>> schema = rf.sample_schema(vocab_size=9, columns=[])
    >>> dataset = RaggedIterable(pa.RecordBatch.from_pylist(rows, schema=schema), batch_size=2)
    >>> loader = DataLoader(dataset, batch_size=None)
    >>> [batch.strings("sample_id") for batch in loader]
    [['s0', 's1'], ['s2', 's3'], ['s4']]
    """

    def __init__(
        self,
        source: SourceLike | Mixture,
        batch_size: int | None = None,
        columns: Iterable[str] | None = None,
        *,
        token_budget: int | None = None,
        shuffle: Shuffle = False,
        block_size: int = 1024,
        window: int = 16,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        replicas: int = 1,
        tail: Tail = "keep",
        verify: bool = False,
        max_decoded_bytes: int = DECODED_BYTES,
    ) -> None:
        self._reading = Reading(
            source, batch_size, column_names(columns), token_budget, shuffle,
            block_size, window, seed, rank, world_size, replicas, tail, verify, max_decoded_bytes,
        )  # fmt: skip
        self._producer: Producer | None = self._reading.open()
        self._identity = self._producer.identity
        self._schema = self._producer.records.plan.schema
        # In shared memory, because workers that persist keep the dataset that they began with: the
        # point at which the first iteration begins, how often it was loaded, and how many
        # iterations each worker has begun since.
        nbytes = 8 * (4 + _MOST_WORKERS)
        self._shared = allocate(nbytes, shared=True).view(torch.int64).zero_()

    @property
    def schema(self) -> RaggedSchema:
        """The columns that are loaded."""
        return self._schema

    @property
    def num_rows(self) -> int:
        """Records of an epoch, all ranks together."""
        return self._identity.num_rows

    def __len__(self) -> int:
        """Return the batches of one whole epoch on this rank; see :class:`RaggedLoader`."""
        begun = int(self._shared[4:].max())
        return self._open().count(Point(int(self._shared[0]) + begun))

    def __iter__(self) -> Iterator[RaggedBatch]:
        check_fork()
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if workers > _MOST_WORKERS:
            raise LimitExceededError(
                "too many workers", expected=f"<= {_MOST_WORKERS}", got=workers
            )
        begun = int(self._shared[4 + worker])
        epoch, position, batches, loaded = self._shared[:4].tolist()
        self._shared[4 + worker] = begun + 1
        point = Point(epoch + begun) if begun else Point(epoch, position, batches)
        return self._batches(point, worker, workers, loaded)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next ``iter()`` begins, in workers that persist too.

        A point inside that very epoch, from :meth:`load_state_dict`, is kept.
        """
        check_integer("epoch", epoch, 0, MOST_EPOCHS)
        epoch = operator.index(epoch)
        fresh = not bool(self._shared[4:].any())
        if not (fresh and int(self._shared[0]) == epoch):
            self._set(Point(epoch))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved state, ``batch.state``, with the next ``iter()``.

        An iteration that is under way raises at its next batch; batches that workers have made
        ahead still come.

        Raises
        ------
        StateMismatchError
            The state belongs to other data or options; printed both sides.
        """
        self._set(parse(state, self._identity))
        self._shared[3] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state at which the next ``iter()`` begins.

        The dataset does not know which batches a DataLoader has delivered: inside an epoch, use the
        ``state`` of the last batch.
        """
        begun = int(self._shared[4:].max())
        epoch, position, batches = self._shared[:3].tolist()
        point = Point(epoch + begun) if begun else Point(epoch, position, batches)
        return self._open().state(point)

    def _set(self, point: Point) -> None:
        self._shared[4:] = 0
        self._shared[:3] = torch.tensor(point)

    def _batches(
        self, point: Point, worker: int, workers: int, loaded: int
    ) -> Iterator[RaggedBatch]:
        for batch in self._open().share(point, worker, workers):
            if int(self._shared[3]) != loaded:
                raise StateMismatchError(
                    "a state was loaded while the iteration was under way",
                    expected=f"the end of epoch {point.epoch}", got="load_state_dict",
                    remedy="begin a new iteration: it continues at the state that was loaded",
                )  # fmt: skip
            yield batch

    def _open(self) -> Producer:
        if self._producer is None:
            producer = self._reading.open()
            if producer.identity != self._identity:
                raise StateMismatchError(
                    "the dataset changed between processes", expected=self._identity.fingerprint,
                    got=producer.identity.fingerprint,
                    remedy="do not write to a dataset that is being read",
                )  # fmt: skip
            self._producer = producer
        return self._producer

    def __getstate__(self) -> dict[str, Any]:
        schema = self._schema.to_arrow().serialize().to_pybytes()
        return {**self.__dict__, "_producer": None, "_schema": schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._schema = parse_schema(pa.ipc.read_schema(pa.py_buffer(state["_schema"])))
