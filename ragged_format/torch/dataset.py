"""A map-style dataset for ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from ragged_format.arguments import check_integer, column_names
from ragged_format.errors import OutOfRangeError, StateMismatchError
from ragged_format.torch.arguments import indices_array
from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.forks import check_fork
from ragged_format.torch.kept_views import DECODED_BYTES
from ragged_format.torch.source import Records, SourceLike, open_random_access

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ragged_format.schema import RaggedSchema

__all__ = ["RaggedDataset"]


class RaggedDataset(Dataset[RaggedBatch]):
    """The records of a dataset by index, each a batch of one record.

    For a plain ``torch.utils.data.DataLoader``: pass :meth:`collate` as ``collate_fn``. A
    DataLoader asks for all indices of a batch at once, so each batch is gathered by one copy; in a
    worker that copy goes to shared memory. Start workers by ``spawn`` or ``forkserver``: one that
    was forked from a process with threads raises instead of hanging. For a training run
    :class:`RaggedLoader`, or :class:`RaggedIterable` with workers, is faster and can resume.

    Pickles as the place of its source and opens it again, checked to be the same.

    Parameters
    ----------
    source : path, dataset, RecordBatch, Table or sequence of RecordBatch
        As for :class:`RaggedLoader`.
    columns : iterable of str, optional
        Columns wanted; the counts that their axes need are added. Default: all.
    verify : bool
        Compare each record batch of the source with its digest when it is first read.
    max_decoded_bytes : int
        Most bytes of decoded record batches that are kept, of compact shards.

    Raises
    ------
    SchemaMismatchError
        A column does not exist (``RF-S003``).
    RaggedError
        The source cannot be opened.

    Examples
    --------
    >>> import pyarrow as pa, ragged_format as rf, torch
    >>> rows = [
    ...     {"sample_id": f"s{n}", "input_ids": [n, n], "completion_mask": [0, 1]} for n in range(3)
    ... ]
    >>> schema = rf.sample_schema(vocab_size=9, columns=[])
    >>> dataset = RaggedDataset(pa.RecordBatch.from_pylist(rows, schema=schema))
    >>> dataset[2]["input_ids"]
    tensor([2, 2], dtype=torch.int32)
    >>> loader = torch.utils.data.DataLoader(dataset, batch_size=2, collate_fn=dataset.collate)
    >>> [batch.num_rows for batch in loader]
    [2, 1]
    """

    collate = staticmethod(RaggedBatch.collate)

    def __init__(
        self,
        source: SourceLike,
        *,
        columns: Iterable[str] | None = None,
        verify: bool = False,
        max_decoded_bytes: int = DECODED_BYTES,
    ) -> None:
        self._source = source
        self._columns = column_names(columns)
        self._verify = verify
        check_integer("max_decoded_bytes", max_decoded_bytes, 0)
        self._max_decoded_bytes = max_decoded_bytes
        opened = open_random_access(source, verify=verify)
        self._records = Records(opened, self._columns, max_decoded_bytes=max_decoded_bytes)
        self.fingerprint = opened.fingerprint

    @property
    def schema(self) -> RaggedSchema:
        """The columns that are loaded."""
        return self._records.plan.schema

    def __len__(self) -> int:
        return self._records.num_rows

    def __getitem__(self, index: int) -> RaggedBatch:
        """Return one record; a negative index counts from the end.

        Raises
        ------
        LimitExceededError
            There is no such record, or the index is no integer (``RF-L002``).
        """
        try:
            position = operator.index(index)
        except TypeError as err:
            raise OutOfRangeError(
                "an index is an integer", expected=f"{-len(self)} <= index < {len(self)}",
                got=repr(index), remedy="use dataset.__getitems__ for a list of indices",
            ) from err  # fmt: skip
        return self.__getitems__([position + len(self) if position < 0 else position])

    def __getitems__(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> RaggedBatch:
        """Return these records, in this order, as one batch.

        Raises
        ------
        LimitExceededError
            An index is negative, lies outside the dataset or is no integer (``RF-L002``).
        """
        check_fork()
        wanted = indices_array(indices)
        self._records.check(wanted)
        runs = self._records.singles(self._records.locate(wanted))
        return RaggedBatch.from_runs(self._records.plan, runs)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "source": self._source, "columns": self._columns, "verify": self._verify,
            "max_decoded_bytes": self._max_decoded_bytes, "fingerprint": self.fingerprint,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        RaggedDataset.__init__(
            self, state["source"], columns=state["columns"], verify=state["verify"],
            max_decoded_bytes=state["max_decoded_bytes"],
        )  # fmt: skip
        if self.fingerprint != state["fingerprint"]:
            raise StateMismatchError(
                "the dataset changed between processes", expected=state["fingerprint"],
                got=self.fingerprint, remedy="do not write to a dataset that is being read",
            )  # fmt: skip
