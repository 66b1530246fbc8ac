"""Checks of arguments that are tensors, counts or devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ragged_format.arguments import check_number
from ragged_format.errors import OutOfRangeError, SchemaMismatchError, UnsupportedFeatureError

__all__ = [
    "INTEGERS",
    "check_group",
    "check_scale",
    "check_tensors",
    "counts_array",
    "indices_array",
    "usable_device",
]

INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip


def check_tensors(**named: object) -> None:
    """Raise unless every argument is a tensor."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise SchemaMismatchError(
                f"{name} is a tensor", expected="torch.Tensor", got=f"a {type(value).__name__}",
                remedy="make one with torch.as_tensor",
            )  # fmt: skip


def check_scale(name: str, value: object) -> None:
    """Raise unless an argument is a number, or a tensor of numbers."""
    if not isinstance(value, Tensor):
        check_number(name, value)


def check_group(group: object) -> None:
    """Raise unless this is a process group that this process is in, or None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        # What new_group returns to the processes that it leaves out is no group either.
        raise SchemaMismatchError(
            "this process is in no such group", expected="a ProcessGroup with this process",
            got=repr(group), remedy="pass what torch.distributed.new_group returned to its members",
        )  # fmt: skip


def counts_array(counts: Any) -> npt.NDArray[np.int64]:
    """Return counts that lie on the host as int64.

    Raises
    ------
    SchemaMismatchError
        They are no integers.
    """
    array = _array(counts)
    if array.dtype.kind not in "iub" and array.size:
        raise SchemaMismatchError(
            "counts are integers", expected="integers", got=array.dtype,
            remedy="pass a tensor, an array or a list of integers",
        )  # fmt: skip
    if array.ndim != 1:
        raise SchemaMismatchError(
            "counts are one-dimensional", expected="(m,)", got=array.shape,
            remedy="pass one count for each row",
        )  # fmt: skip
    return array.astype(np.int64, copy=False)


def indices_array(indices: Any) -> npt.NDArray[np.int64]:
    """Return positions of records as int64, (k,).

    Raises
    ------
    OutOfRangeError
        They are no integers in one dimension (``RF-L002``).
    """
    array = _array(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise OutOfRangeError(
            "indices are a list of integers", expected="(k,) int",
            got=f"{array.dtype} of shape {array.shape}",
            remedy="pass a list or an array of integers",
        )  # fmt: skip
    return array.astype(np.int64, copy=False)


def _array(values: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError):  # lists of different lengths, tensors on a device
        return np.asarray("no integers")


def usable_device(device: torch.device | str | int) -> torch.device:
    """Return a device, with its index, on which tensors can be made.

    Raises
    ------
    UnsupportedFeatureError
        There is no such device (``RF-V002``).
    """
    try:
        return torch.empty(0, device=device).device
    # torch says it by any of these: no device, built without CUDA, no driver, no such index.
    except (TypeError, RuntimeError, AssertionError, ImportError) as err:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = ", ".join(f"cuda:{number}" for number in range(found)) or "none with CUDA"
        raise UnsupportedFeatureError(
            "there is no such device", expected=f"cpu; here are {gpus}", got=repr(device),
            remedy="pass a device that this machine has, and a torch built for it",
        ) from err  # fmt: skip
