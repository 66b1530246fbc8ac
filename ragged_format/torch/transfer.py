"""Copies to the device: of batches, beside the work of the consumer, and of small arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from ragged_format.torch.batch import RaggedBatch

__all__ = ["Transfer", "to_device"]


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array of ordinary memory on `device`; on the CPU a view of it, elsewhere a copy.

    Guarantees: the host does not wait for the device. From ordinary memory CUDA does, before copies
    of more than 64 KiB, even where they are asynchronous by name.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # Of torch's cache, which does not hand the memory out again before the copy has ended.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Transfer:
    """Moves batches to one device: on CUDA by a stream of its own, otherwise plainly.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def pins(self) -> bool:
        """Whether copies are asynchronous from page-locked memory only."""
        return self._stream is not None

    def start(self, batch: RaggedBatch) -> tuple[RaggedBatch, torch.cuda.Event | None]:
        """Start the copy, in the thread that makes batches."""
        if self._stream is None:
            return batch.to(self.device), None
        with torch.cuda.stream(self._stream):
            moved = batch.to(self.device, non_blocking=True)
            return moved, self._stream.record_event()

    def finish(self, batch: RaggedBatch, copied: torch.cuda.Event | None) -> RaggedBatch:
        """Make the consumer's stream wait for the copy; the host does not."""
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            batch.record_stream(current)
        return batch
