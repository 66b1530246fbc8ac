"""Bytes that operators move: what memory bandwidth alone allows, before anything is measured.

Every operator is taken to read its inputs and to write its results once. Of an input that is read
or written by an index only the rows named count, of an expanded one only what it has; views move
nothing. Caches are not modelled, and matrix products read their factors once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Traffic", "moved"]

_aten = torch.ops.aten
# Read as many rows as they return.
_GATHER = {_aten.index, _aten.index_select, _aten.gather, _aten.embedding}
# Write rows of their first argument; of these, additions read them as well.
_SCATTER = {_aten.index_copy_, _aten.index_put_, _aten._index_put_impl_}
_ADD = {_aten.index_add_, _aten.scatter_add_}
_WRITE_ONLY = {_aten.copy_, _aten.fill_, _aten.zero_}
# Look at no value of what they are like.
_LIKE = {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_full}
_NOTHING = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided}


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operators move while it is active.

    Attributes
    ----------
    nbytes : int
    by_operator : dict of str to int
        The same by operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self.by_operator: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        size = _size(func.overloadpacket, _tensors((args, kwargs)), _tensors(out))
        self.nbytes += size
        if size:
            name = str(func.overloadpacket)
            self.by_operator[name] = self.by_operator.get(name, 0) + size
        return out


def moved(call: Any) -> int:
    """Return the bytes that the operators of a call move."""
    with Traffic() as traffic:
        call()
    return int(traffic.nbytes)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(operator: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    if operator in _NOTHING:
        return 0
    if operator in _GATHER:
        return sum(map(_held, inputs[1:])) + 2 * sum(map(_held, outputs))
    if operator in _SCATTER or operator in _ADD:
        return sum(map(_held, inputs[1:])) + _held(inputs[-1]) * (2 if operator in _ADD else 1)
    if operator in _WRITE_ONLY:
        same = operator is _aten.copy_ and inputs[0].data_ptr() == inputs[1].data_ptr()
        return 0 if same else sum(map(_held, inputs))
    if operator in _LIKE:
        return sum(map(_held, outputs))
    known = {part.untyped_storage().data_ptr() for part in inputs if part.numel()}
    is_view = any(part.untyped_storage().data_ptr() in known for part in outputs)
    if is_view and not operator.__name__.endswith("_"):
        return 0
    return sum(map(_held, inputs)) + sum(map(_held, outputs))


def _held(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of expanded dimensions one element."""
    number = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else min(size, 1)
    return number * tensor.element_size()
