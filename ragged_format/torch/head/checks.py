"""What the inputs of the head must be: shapes, kinds, devices, ranges, sets of ids."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from ragged_format.arguments import check_choice, check_number
from ragged_format.errors import (
    InvariantError,
    LimitExceededError,
    SchemaMismatchError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.torch.arguments import INTEGERS, check_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from ragged_format.lists import Int64

__all__ = [
    "check_counts",
    "check_distinct",
    "check_host_counts",
    "check_ids",
    "check_indices",
    "check_inputs",
    "check_labels",
    "check_positions",
    "check_results",
    "check_temperatures",
    "check_transform",
]


def check_inputs(
    hidden: Tensor,
    weight: Tensor,
    pred_index: Tensor,
    target_ids: Tensor,
    candidate_ids: Tensor,
    candidate_counts: Tensor,
    bias: Tensor | None,
) -> None:
    """Raise unless these are tensors whose shapes, kinds and devices fit each other."""
    model = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    columns = {
        "pred_index": pred_index, "target_ids": target_ids, "candidate_ids": candidate_ids,
        "candidate_counts": candidate_counts,
    }  # fmt: skip
    check_tensors(**model)
    check_indices(**columns)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise SchemaMismatchError(
            "hidden (n, h) and weight (v, h) do not fit", expected="one h",
            got=(tuple(hidden.shape), tuple(weight.shape)), remedy="pass those of one model",
        )  # fmt: skip
    if hidden.dtype != weight.dtype or not hidden.dtype.is_floating_point:
        raise SchemaMismatchError(
            "hidden and weight do not fit", expected="one float dtype",
            got=(hidden.dtype, weight.dtype), remedy="cast hidden to the dtype of weight",
        )  # fmt: skip
    if bias is not None and bias.shape != weight.shape[:1]:
        raise SchemaMismatchError(
            "bias and weight do not fit", expected=tuple(weight.shape[:1]), got=tuple(bias.shape),
            remedy="pass those of one model",
        )  # fmt: skip
    for name, tensor in model.items():
        if tensor.layout != torch.strided:
            raise SchemaMismatchError(
                f"{name} is a dense tensor", expected=torch.strided, got=tensor.layout,
                remedy="pass tensor.to_dense()",
            )  # fmt: skip
        if tensor.device != hidden.device:
            raise SchemaMismatchError(
                f"{name} and hidden lie on one device", expected=hidden.device, got=tensor.device,
                remedy="move it there",
            )  # fmt: skip
    for name in ("pred_index", "candidate_counts"):
        if columns[name].shape != target_ids.shape:
            raise SchemaMismatchError(
                f"{name} and target_ids do not fit", expected=tuple(target_ids.shape),
                got=tuple(columns[name].shape), remedy="pass the columns of one batch",
            )  # fmt: skip


def check_indices(**named: Tensor) -> None:
    """Raise unless ids, positions and counts are tensors of integers, of one dimension."""
    check_tensors(**named)
    for name, tensor in named.items():
        if tensor.dtype not in INTEGERS or tensor.dim() != 1:
            raise SchemaMismatchError(
                f"{name} are integers", expected="integers of one dimension",
                got=(tensor.dtype, tuple(tensor.shape)), remedy="pass the column of the batch",
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


def check_temperatures(temperature: Tensor, size: int) -> None:
    """Raise for what is no temperature of `size` targets; values on the host are looked at."""
    if temperature.dim() and temperature.shape != (size,):
        raise SchemaMismatchError(
            "temperature is a scalar or has one entry per target", expected=(size,),
            got=tuple(temperature.shape), remedy="pass a number, or the temperature of each target",
        )  # fmt: skip
    if not (temperature.dtype.is_floating_point or temperature.dtype in INTEGERS):
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
        where=Where(column="temperature", position=first if temperature.dim() else None),
        got=float(temperature.reshape(-1)[first]), remedy="use 1 for logits as they are",
    )  # fmt: skip


def check_host_counts(counts: Tensor, host: Int64) -> None:
    """Raise unless counts on the host are those of a tensor that is on the host too."""
    if counts.device.type == "cpu" and not np.array_equal(counts.to(torch.int64).numpy(), host):
        raise InvariantError(
            "the counts on the host are others", code="RF-I005", expected="the same counts",
            got="different ones", remedy="pass batch.counts_host(axis) of the same batch",
        )  # fmt: skip


def check_distinct(ids: Tensor, counts: Tensor) -> None:
    """Raise if a set on the host holds an id twice: it would count twice in its normaliser.

    Sets in ascending order, as they are stored, cost one comparison.
    """
    if ids.device.type != "cpu" or len(ids) < 2:
        return
    begins = torch.zeros(len(ids), dtype=torch.bool)
    starts = counts.cumsum(0) - counts
    begins[starts[counts > 0]] = True
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


def check_results(on_outside: str, out_dtype: torch.dtype | None) -> None:
    """Raise unless these say how results are returned."""
    check_choice("on_outside", on_outside, ("error", "flag"))
    floats = isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point
    if out_dtype is not None and not floats:
        raise SchemaMismatchError(
            "out_dtype is a float dtype", expected="a torch.dtype of floats", got=repr(out_dtype),
            remedy="pass torch.float32, for instance",
        )  # fmt: skip


def check_counts(host: Int64, targets: int, candidates: int) -> None:
    """Raise unless there is a count for each target, and they sum to the candidates."""
    if host.shape != (targets,) or (len(host) and host.min() < 0) or host.sum() != candidates:
        raise InvariantError(
            "the counts do not describe the candidates", code="RF-I005",
            expected=f"{targets} counts >= 0 that sum to {candidates}",
            got=f"counts of shape {host.shape}, sum {host.sum()}",
            remedy="pass the counts of these candidates",
        )  # fmt: skip


def check_positions(pred_index: Tensor, rows: int) -> None:
    """Raise unless every target has a row of the hidden states; waits for their device."""
    outside = (pred_index < 0) | (pred_index >= rows)
    if not bool(outside.any()):
        return
    first = int(outside.nonzero()[0, 0])
    raise InvariantError(
        "a position is none of the hidden states", code="RF-I034",
        where=Where(column="pred_index", position=first), expected=f"0 <= position < {rows}",
        got=int(pred_index[first]), remedy="pass the hidden states of the whole row",
    )  # fmt: skip


def check_ids(ids: Tensor, outside: Tensor, column: str, start: int, size: int) -> None:
    """Raise if an id is `outside` the rows of the weight."""
    if not bool(outside.any()):
        return
    first = int(outside.nonzero()[0, 0])
    raise InvariantError(
        "an id is no row of the weight",
        code="RF-I011" if column == "candidate_ids" else "RF-I014",
        where=Where(column=column, position=first),
        expected=f"ids in [{start}, {start + size})", got=int(ids[first]),
        remedy="give the whole weight, or the process group over which it is sharded",
    )  # fmt: skip


def check_labels(hits: Tensor, host: Int64, target_ids: Tensor, on_outside: str) -> None:
    """Raise unless every label is once in its set; `hits` says how often."""
    if on_outside == "flag" or bool((hits == 1).all()):
        return
    first = int((hits != 1).nonzero()[0, 0])
    missing = hits[first] == 0
    raise InvariantError(
        "a candidate set lacks the sampled token" if missing else "an id is twice in one set",
        code="RF-I013" if missing else "RF-I012",
        where=Where(column="candidate_ids", position=first),
        expected=f"token {int(target_ids[first])} once among the {host[first] or 'vocabulary'} ids",
        got=f"{int(hits[first])} times",
        remedy='repair the data, or pass on_outside="flag" to get -inf there',
    )
