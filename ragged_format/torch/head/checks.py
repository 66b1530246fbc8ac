"""What the inputs of the head must be, beyond their shapes: kinds, devices, ranges, sets of ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ragged_format.arguments import check_number
from ragged_format.errors import (
    InvariantError,
    LimitExceededError,
    SchemaMismatchError,
    UnsupportedFeatureError,
    Where,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = [
    "check_distinct",
    "check_group",
    "check_host_counts",
    "check_indices",
    "check_once",
    "check_same_device",
    "check_temperatures",
    "check_transform",
    "check_versions",
    "not_compiled",
    "versions_of",
]

P = ParamSpec("P")
R = TypeVar("R")

_INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip


def check_indices(**named: Tensor) -> None:
    """Raise unless ids, positions and counts are integers, of one dimension."""
    for name, tensor in named.items():
        if tensor.dtype not in _INTEGERS or tensor.dim() != 1:
            raise SchemaMismatchError(
                f"{name} are integers", expected="integers of one dimension",
                got=(tensor.dtype, tuple(tensor.shape)), remedy="pass the column of the batch",
            )  # fmt: skip


def check_same_device(device: torch.device, **named: Tensor | None) -> None:
    """Raise unless the tensors of the model are plain ones on one device."""
    for name, tensor in named.items():
        if tensor is not None and tensor.layout != torch.strided:
            raise SchemaMismatchError(
                f"{name} is a dense tensor", expected=torch.strided, got=tensor.layout,
                remedy="pass tensor.to_dense()",
            )  # fmt: skip
        if tensor is not None and tensor.device != device:
            raise SchemaMismatchError(
                f"{name} and hidden lie on one device", expected=device, got=tensor.device,
                remedy="move it there",
            )  # fmt: skip


def check_transform(bias: Tensor | None, logit_scale: float, soft_cap: float | None) -> None:
    """Raise unless the logits follow: real biases, a finite scale, a positive finite cap."""
    if bias is not None and not bias.dtype.is_floating_point:
        raise SchemaMismatchError(
            "bias is a float tensor", expected="a float dtype", got=bias.dtype,
            remedy="cast it to the dtype of the weight",
        )  # fmt: skip
    check_number("logit_scale", logit_scale)
    if not math.isfinite(logit_scale):
        raise LimitExceededError(
            "logit_scale is finite", expected="a finite number", got=logit_scale,
            remedy="use 1 for logits as they are",
        )  # fmt: skip
    if soft_cap is None:
        return
    check_number("soft_cap", soft_cap)
    if not 0 < soft_cap < math.inf:
        raise LimitExceededError(
            "a soft cap is positive and finite", expected="> 0", got=soft_cap,
            remedy="leave it out for logits without a cap",
        )  # fmt: skip


def check_temperatures(temperature: Tensor) -> None:
    """Raise for what cannot be a temperature; values that are on the host are looked at."""
    if not (temperature.dtype.is_floating_point or temperature.dtype in _INTEGERS):
        raise SchemaMismatchError(
            "temperatures are numbers", expected="a float dtype", got=temperature.dtype,
            remedy="pass a float tensor",
        )  # fmt: skip
    if temperature.requires_grad and torch.is_grad_enabled():
        raise UnsupportedFeatureError(
            "temperatures get no gradient", expected="a tensor without requires_grad",
            got="one with it", remedy="pass temperature.detach(), or scale the hidden states",
        )  # fmt: skip
    if temperature.device.type != "cpu":
        return  # to look would wait for the device
    inverse = temperature.double().reciprocal()
    sound = (inverse > 0) & (inverse < torch.finfo(torch.float32).max)
    if bool(sound.all()):
        return
    first = int((~sound).reshape(-1).nonzero()[0, 0])
    raise LimitExceededError(
        "a temperature is positive and finite", expected="> 0",
        where=Where(column="temperature", position=first),
        got=float(temperature.reshape(-1)[first]), remedy="use 1 for logits as they are",
    )  # fmt: skip


def check_host_counts(counts: Tensor, host: npt.NDArray[np.int64]) -> None:
    """Raise unless counts on the host are those of a tensor that is on the host too."""
    if counts.device.type == "cpu" and not np.array_equal(counts.to(torch.int64).numpy(), host):
        raise InvariantError(
            "the counts on the host are others", code="RF-I005", expected="the same counts",
            got="different ones", remedy="pass batch.counts_host(axis) of the same batch",
        )  # fmt: skip


def check_group(group: object) -> None:
    """Raise unless the group over which the vocabulary is sharded is one of this process."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise SchemaMismatchError(
            "group is a process group with this process", expected="a ProcessGroup",
            got=repr(group), remedy="pass what torch.distributed.new_group returned here",
        )  # fmt: skip


def check_distinct(ids: Tensor, counts: Tensor) -> None:
    """Raise if a set on the host holds an id twice: it would count twice in its normaliser.

    Sets in ascending order, as they are stored, cost one comparison.
    """
    if ids.device.type != "cpu" or len(ids) < 2:
        return
    begins = torch.zeros(len(ids), dtype=torch.bool)
    starts = counts.cumsum(0) - counts
    begins[starts[(counts > 0)]] = True
    if bool(((ids[1:] > ids[:-1]) | begins[1:]).all()):
        return
    owner = torch.repeat_interleave(counts, output_size=len(ids))
    order = ids.sort(stable=True).indices
    order = order[owner[order].sort(stable=True).indices]
    twice = (ids[order][1:] == ids[order][:-1]) & (owner[order][1:] == owner[order][:-1])
    if not bool(twice.any()):
        return
    second = int(order[1:][twice][0])
    raise InvariantError(
        "an id is twice in one set", code="RF-I012",
        where=Where(column="candidate_ids", position=second), expected="distinct ids",
        got=f"{int(ids[second])} twice in the set of target {int(owner[second])}",
        remedy="repair the data: ragged_format.validate names the record",
    )  # fmt: skip


def versions_of(*tensors: Tensor) -> list[int]:
    """Return numbers that change when the tensors are written to."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]  # noqa: SLF001


def check_versions(known: list[int], *tensors: Tensor) -> None:
    """Raise in a backward pass whose sets are not those of the forward pass any more."""
    if known != versions_of(*tensors):
        raise UnsupportedFeatureError(
            "ids, counts or positions were changed between forward and backward",
            expected="the values of the forward pass", got="an in-place change",
            remedy="change a clone of the tensor",
        )  # fmt: skip


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function out of compiled graphs, and its type, which torch's decorator loses."""
    kept: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept


def check_once() -> None:
    """Raise in a backward pass that is to be differentiated itself: statistics are constants."""
    if torch.is_grad_enabled():
        raise UnsupportedFeatureError(
            "gradients of a gradient of the head are not supported",
            expected="backward without create_graph", got="create_graph=True",
            remedy="compute this part of the loss from dense logits",
        )  # fmt: skip
