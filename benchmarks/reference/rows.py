"""Whole rows as the reference packs them: installed tree packing plus the steps of `tables`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from benchmarks.reference.tables import array_tables, dense_mask, dict_tables, flat_mask

if TYPE_CHECKING:
    from benchmarks.reference.queue import QueueSample

__all__ = ["add", "pack_row", "row_bytes", "trl_version"]

Form = Literal["plain", "main", "before", "after"]
Tensors = dict[str, torch.Tensor]


def trl_version() -> str | None:
    """Return the version of the installed trl, ``None`` if it is not there."""
    if importlib.util.find_spec("trl") is None:
        return None
    return importlib.metadata.version("trl")


def tree_row_class() -> Any:
    """Import and return trl's class that holds the trie of one row."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo.packing import TreeRow

    return TreeRow


def add(samples: Sequence[QueueSample], tree_row: Any) -> Any:
    """Return a new row with all samples inserted into its trie."""
    row = tree_row()
    for sample in samples:
        row.add(sample.to_dict())
    return row


def pack_row(samples: Sequence[QueueSample], tree_row: Any, form: Form) -> Tensors:
    """Return the packed row.

    Parameters
    ----------
    samples : sequence of QueueSample
        With dicts for ``"before"``, with arrays for ``"after"``.
    tree_row : type
        What :func:`tree_row_class` returns.
    form : {"plain", "main", "before", "after"}
        No sets or tables, as the installed release; the dense mask; the dense mask and the tables
        from dicts; flat ids with counts and the tables from arrays.
    """
    tensors: Tensors = add(samples, tree_row).pack()
    packed = len(tensors["input_ids"])
    index = tensors["token_index"]
    if form in ("main", "before"):
        tensors |= dense_mask(samples, index, packed)
    if form == "before":
        tensors |= dict_tables(samples, index, packed)
    if form == "after":
        tensors |= flat_mask(samples, index, packed)
        tensors |= array_tables(samples, index, packed)
    return tensors


def row_bytes(tensors: Tensors) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())
