"""A drop-in for the collator of TRL's AsyncGRPO trainer (trl 1.16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import torch
from torch import Tensor

from ragged_format.adapters.trl import to_micro_batch
from ragged_format.arguments import check_integer
from ragged_format.errors import SchemaMismatchError
from ragged_format.lists import flat

__all__ = ["RolloutCollator"]

_GROUPS = "member_group_id"


@dataclass
class RolloutCollator:
    """Make the padded batch of one micro-batch, as ``DataCollatorForRollout`` does.

    Call it with a list of one micro-batch, which is a sequence of packed rows, one per rank, packed
    with ``fork="transition"``. Keys, shapes, dtypes and values are those of the reference's own
    collator on the same samples; rows with candidate sets or heads add ``sampling_mask``,
    ``sampling_mask_counts``, ``topk_ids`` and ``topk_log_probs``.

    Parameters
    ----------
    pad_token_id : int
        Of the tokenizer; pads ``input_ids``.
    num_processes : int
        Ranks, and rows in a micro-batch.
    top_k : int, optional
        Width of the head tables; default: the longest head of the batch.
    lossy : bool
        Leave out what TRL has no place for, instead of refusing.

    Attributes
    ----------
    groups_trained : set of str
        Groups of all samples so far.

    Raises
    ------
    SchemaMismatchError
        Not one micro-batch of `num_processes` rows.
    ConversionError, PackingError
        As :func:`ragged_format.adapters.trl.to_micro_batch`.
    """

    pad_token_id: int
    num_processes: int = 1
    top_k: int | None = None
    lossy: bool = False
    groups_trained: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        check_integer("pad_token_id", self.pad_token_id, 0)
        check_integer("num_processes", self.num_processes, 1)
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1)

    def __call__(self, examples: Sequence[Sequence[pa.RecordBatch]]) -> dict[str, Tensor]:
        """Return the batch; all tensors are copies."""
        if not _is_one_of(examples, self.num_processes):
            raise SchemaMismatchError(
                "a call takes one micro-batch with a row for every process",
                expected=f"[[{self.num_processes} packed rows]]", got=_shape(examples),
                remedy="use batch_size=1 over a planner that yields lists of rows",
            )  # fmt: skip
        (rows,) = examples
        arrays = to_micro_batch(
            rows, pad_token_id=self.pad_token_id, top_k=self.top_k, lossy=self.lossy
        )
        for row in rows:
            if _GROUPS in row.schema.names:
                self.groups_trained.update(flat(row.column(_GROUPS)).values.drop_null().to_pylist())
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _is_one_of(examples: object, rows: int) -> bool:
    """Return whether these are a list of one list of so many record batches."""
    if not isinstance(examples, list | tuple) or len(examples) != 1:
        return False
    (only,) = examples
    if not isinstance(only, list | tuple) or len(only) != rows:
        return False
    return all(isinstance(row, pa.RecordBatch) for row in only)


def _shape(examples: object) -> str:
    if not isinstance(examples, list | tuple):
        return f"a {type(examples).__name__}"
    parts = [_shape(part) for part in examples[:4]]
    return f"[{', '.join(parts)}{', …' if len(examples) > 4 else ''}]"
