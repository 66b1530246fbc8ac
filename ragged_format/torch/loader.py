"""The loader: batches of a dataset in seeded order, made ahead in a thread, resumable."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ragged_format.arguments import check_integer, column_names
from ragged_format.errors import RaggedError, StateMismatchError, UnsupportedFeatureError
from ragged_format.torch.arena import Ring, RingStats
from ragged_format.torch.arguments import usable_device
from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.kept_views import DECODED_BYTES
from ragged_format.torch.prefetch import Prefetcher
from ragged_format.torch.reading import Reading, Shuffle
from ragged_format.torch.state import MOST_EPOCHS, Point, parse
from ragged_format.torch.transfer import Transfer

if TYPE_CHECKING:
    import torch

    from ragged_format.schema import RaggedSchema
    from ragged_format.torch.mixing import Mixture
    from ragged_format.torch.produce import Made
    from ragged_format.torch.source import SourceLike
    from ragged_format.torch.steps import Tail

__all__ = ["RaggedLoader"]

# Each is an arena; a number beyond is a mistake.
_MOST_PREFETCH = 1 << 16


class RaggedLoader:
    """Batches of a dataset as tensors, in order or shuffled, for one rank.

    A thread copies the columns of each batch from the mapped files into one of a few reused
    arenas, ahead of the consumer. An arena is reused only when no tensor views it any more; a
    consumer that keeps batches makes the ring of arenas grow, which `stats` counts.

    Every ``iter()`` is the next epoch, unless :meth:`set_epoch` or :meth:`load_state_dict` says
    otherwise. The order of an epoch depends on the dataset's content, the seed and the epoch only;
    ranks share it out without overlap. A loader has one iteration at a time: a new one ends the
    one before.

    Guarantees: constant memory in the size of the dataset. An error in the thread, a file that is
    gone included, is raised in the consumer. Pickles, and copies, as the place of its source with
    its options and state; opens it again. Not thread-safe.

    Parameters
    ----------
    source : path, dataset, RecordBatch, Table, sequence of RecordBatch, CachedDataset or Mixture
        Anything with random access: a dataset or file that ``rf.open_source`` opens, batches in
        memory, a dataset that is elsewhere, or several of these. Also the path of a stream that can
        be read more than once, without shuffling: a state is a number of records there as
        elsewhere, and continuing before the place at hand reads the stream anew.
    batch_size : int, optional
        Records in a batch of this rank. Default: 1; with a token budget, as many as fit.
    columns : iterable of str, optional
        Columns wanted; the counts that their axes need are added. Default: all.
    token_budget : int, optional
        Most tokens in a batch of this rank, which takes the next records of the order as long as
        they fit. Every rank reads the lengths of all records for that.
    shuffle : bool, "global" or "block"
        ``True`` and ``"global"``: a seeded permutation of all records, another one in each epoch.
        ``"block"``: blocks of consecutive records are permuted, and records within a window of
        blocks; for data that is fetched shard by shard (:class:`CachedDataset`).
    block_size, window : int
        Records of a block, and blocks of a window, for ``shuffle="block"``.
    seed : int
        Of the permutations.
    rank, world_size : int
        Which share of every step this loader delivers.
    replicas : int
        Ranks that get the same rows: those of one tensor- or context-parallel group, consecutive
        ranks. It divides `world_size`.
    device : torch.device or str
        Where the tensors go: one copy per batch, on CUDA from page-locked memory by a stream of its
        own.
    tail : {"keep", "drop", "pad", "empty"}
        The last records that do not fill a batch on every rank. ``keep`` splits them evenly, so
        that batches are smaller and some ranks may have one batch fewer; ``drop`` leaves them out;
        ``pad`` repeats records of the epoch, counted in ``batch.num_repeated``; ``empty`` splits
        them and gives ranks that get none an empty row, one token and no target, told by
        ``batch.is_filler``. With the latter three all ranks have equally many batches.
    prefetch : int
        Batches made ahead; 0 makes them in the calling thread.
    verify : bool
        Compare each record batch of the source with its digest when it is first read.
    max_decoded_bytes : int
        Most bytes of decoded record batches that are kept, beside those that one batch needs: of
        compact shards, which are decoded a record batch at a time, and of streams.

    Raises
    ------
    SchemaMismatchError
        A column does not exist (``RF-S003``).
    LimitExceededError
        A number is out of its range (``RF-L001``).
    UnsupportedFeatureError
        There is no such device, or the source has no random access (``RF-V002``).
    RaggedError
        The source cannot be opened.

    Examples
    --------
    >>> import pyarrow as pa, ragged_format as rf
    >>> rows = [
    ...     {"sample_id": f"s{n}", "input_ids": [n, n], "completion_mask": [0, 1]} for n in range(5)
    ... ]
    >>> schema = rf.sample_schema(vocab_size=9, columns=[])
    >>> data = pa.RecordBatch.from_pylist(rows, schema=schema)
    >>> with RaggedLoader(data, batch_size=2) as loader:
    ...     for batch in loader:
    ...         print(batch.strings("sample_id"), batch["input_ids"].tolist())
    ['s0', 's1'] [0, 0, 1, 1]
    ['s2', 's3'] [2, 2, 3, 3]
    ['s4'] [4, 4]
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
        device: torch.device | str = "cpu",
        tail: Tail = "keep",
        prefetch: int = 2,
        verify: bool = False,
        max_decoded_bytes: int = DECODED_BYTES,
    ) -> None:
        check_integer("prefetch", prefetch, 0, _MOST_PREFETCH)
        reading = Reading(
            source, batch_size, column_names(columns), token_budget, shuffle,
            block_size, window, seed, rank, world_size, replicas, tail, verify, max_decoded_bytes,
        )  # fmt: skip
        self._set_up(reading, device, operator.index(prefetch))

    def _set_up(self, reading: Reading, device: torch.device | str, prefetch: int) -> None:
        self._reading = reading
        self._producer = reading.open()
        self._counted: tuple[int, int] | None = None
        self._transfer = Transfer(usable_device(device))
        self._prefetch = prefetch
        # Those made ahead, the one that the consumer has and the one that it takes.
        self._ring = Ring(planned=prefetch + 2, pin=self._transfer.pins)
        self._current: weakref.ref[_Epoch] | None = None
        self._delivered = Point(0)
        self._next_epoch = 0
        # Asked for by load_state_dict, until a batch beyond it is delivered.
        self._resumed: Point | None = None

    @property
    def schema(self) -> RaggedSchema:
        """The columns that are loaded."""
        return self._producer.records.plan.schema

    @property
    def num_rows(self) -> int:
        """Records of an epoch, all ranks together."""
        return self._producer.identity.num_rows

    @property
    def stats(self) -> RingStats:
        """Counters of the ring of arenas."""
        return self._ring.stats

    def __len__(self) -> int:
        """Return the batches of one whole epoch on this rank.

        With a token budget that of the next epoch: it reads the length of every record, and epochs
        differ.
        """
        epoch = self._next_epoch
        if self._counted is None or self._counted[0] != epoch:
            # Records of its own: list() asks for the length while the thread is reading.
            producer = (
                self._producer if self._reading.token_budget is None else self._reading.open()
            )
            self._counted = epoch, producer.count(Point(epoch))
        return self._counted[1]

    def __iter__(self) -> Iterator[RaggedBatch]:
        """Begin the next epoch, or the one that was set or resumed; ends an iteration before."""
        if (running := self._running()) is not None:
            running.supersede()
        point = self._begin_at()
        self._next_epoch = point.epoch + 1
        self._delivered = point
        epoch = _Epoch(self, point)
        self._current = weakref.ref(epoch)
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next ``iter()`` begins.

        An iteration that runs is not changed. A point inside that very epoch, from
        :meth:`load_state_dict`, is kept.
        """
        check_integer("epoch", epoch, 0, MOST_EPOCHS)
        epoch = operator.index(epoch)
        self._next_epoch = epoch
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        if self._running() is None:
            self._delivered = self._begin_at()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that the consumer got, as JSON values.

        After the last batch of an epoch it is the beginning of the next.
        """
        return self._producer.state(self._delivered)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved state: an iteration that runs jumps there, else the next does.

        Batch size and ranks may differ from those of the state: what remains of the epoch is dealt
        anew.

        Raises
        ------
        StateMismatchError
            The state belongs to other data or options; printed both sides.
        """
        point = parse(state, self._producer.identity)
        self._resumed = self._delivered = point
        self._next_epoch = point.epoch + 1
        if (running := self._running()) is not None:
            running.restart(point)

    def close(self) -> None:
        """End the iteration that runs and its thread; the loader can be iterated again."""
        if (running := self._running()) is not None:
            running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, index: object) -> RaggedBatch:
        """Batches have no index; that a loader is iterated is said here to what tries.

        Raises
        ------
        UnsupportedFeatureError
            Always (``RF-V002``).
        """
        raise UnsupportedFeatureError(
            "a RaggedLoader is iterated, not indexed", expected="for batch in loader",
            got=f"index {index!r}",
            remedy="for a torch DataLoader pass a RaggedIterable with batch_size=None, or a "
            "RaggedDataset",
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Return the place of the source, the options and the state: a copy opens it again."""
        resumed = self._resumed if self._running() is None else self._delivered
        return {
            "reading": self._reading, "device": self._transfer.device, "prefetch": self._prefetch,
            "identity": self._producer.identity, "next_epoch": self._next_epoch,
            "delivered": self._delivered, "resumed": resumed,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(state["reading"], state["device"], state["prefetch"])
        if self._producer.identity != state["identity"]:
            raise StateMismatchError(
                "the dataset changed between processes", expected=state["identity"].fingerprint,
                got=self._producer.identity.fingerprint,
                remedy="do not write to a dataset that is being read",
            )  # fmt: skip
        self._next_epoch = state["next_epoch"]
        self._delivered, self._resumed = state["delivered"], state["resumed"]

    def _running(self) -> _Epoch | None:
        epoch = None if self._current is None else self._current()
        return epoch if epoch is not None and epoch.is_running else None

    def _begin_at(self) -> Point:
        return Point(self._next_epoch) if self._resumed is None else self._resumed

    def _note(self, after: Point) -> None:
        self._resumed = None
        self._delivered = after


class _Epoch(Iterator[RaggedBatch]):
    """One iteration; dropping it ends its thread."""

    def __reduce__(self) -> NoReturn:
        raise UnsupportedFeatureError(
            "an iteration that is under way is not copied", expected="a loader",
            got="its iterator", remedy="copy the loader: its iterations continue at its state",
        )  # fmt: skip

    def __init__(self, loader: RaggedLoader, point: Point) -> None:
        self._loader = loader
        self._superseded = False
        self._pid = os.getpid()
        self.is_running = True
        self._begin(point)

    def __next__(self) -> RaggedBatch:
        if self._superseded:
            raise StateMismatchError(
                "a later iteration of this loader has begun", expected="one iteration at a time",
                got="an iterator from before", remedy="use two loaders to read side by side",
            )  # fmt: skip
        if not self.is_running:
            raise StopIteration
        if os.getpid() != self._pid:
            raise RaggedError(
                "an iteration does not survive a fork", expected=f"process {self._pid}",
                got=f"process {os.getpid()}", remedy="begin a new iteration in this process",
            )  # fmt: skip
        try:
            made = self._next()
        except StopIteration:
            self._loader._note(Point(self._epoch + 1))  # noqa: SLF001
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        self._loader._note(made.after)  # noqa: SLF001
        return self._loader._transfer.finish(made.batch, made.copied)  # noqa: SLF001

    def restart(self, point: Point) -> None:
        """Jump to another point."""
        self._end()
        self._begin(point)

    def supersede(self) -> None:
        """End, and make later calls an error."""
        self._superseded = True
        self.close()

    def close(self) -> None:
        """End the thread."""
        if self.is_running:
            self.is_running = False
            self._end()

    def _begin(self, point: Point) -> None:
        loader = self._loader
        make = partial(loader._producer.batches, point, loader._ring, loader._transfer)  # noqa: SLF001
        self._epoch = point.epoch
        if depth := loader._prefetch:  # noqa: SLF001
            prefetcher: Prefetcher[Made] = Prefetcher(make, depth, "ragged-loader")
            self._next = prefetcher.get
            # Also at interpreter exit, before threads are cut off.
            self._end = weakref.finalize(self, prefetcher.stop)
        else:
            batches = make()
            self._next = batches.__next__
            self._end = weakref.finalize(self, batches.close)
