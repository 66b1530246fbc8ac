"""Memory of batches: one aligned allocation each, and a ring that reuses them.

A slot of the ring is free again when the last tensor or array that views it is gone and every
copy to a device that reads it has finished. What the views keep alive for that is a
:class:`Lease`; batch objects, loaders and rings may go earlier.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "Lease",
    "Ring",
    "RingStats",
    "Slot",
    "aligned",
    "allocate",
    "allocate_here",
]

ALIGNMENT = 64
# Small slots would be replaced again and again while the first batches set the size.
_MINIMUM = 1 << 16
_HEADROOM = 1.25


class Event(Protocol):
    """What a copy to a device leaves behind; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Return whether the copy has finished."""
        ...


def aligned(nbytes: int) -> int:
    """Return the next multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def allocate(nbytes: int, *, pin: bool = False, shared: bool = False) -> Tensor:
    """Return uninitialised memory, (nbytes,) uint8, that starts at a multiple of 64.

    Parameters
    ----------
    nbytes : int
        Size.
    pin : bool
        Page-locked memory, from which copies to an accelerator run asynchronously.
    shared : bool
        Shared memory, which crosses to another process without a copy.
    """
    if shared:
        storage = torch.UntypedStorage._new_shared(nbytes + ALIGNMENT)  # type: ignore[no-untyped-call]  # noqa: SLF001
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    elif pin:
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
    else:
        # numpy asks for huge pages where torch does not: a third more copy rate was measured.
        memory = torch.from_numpy(np.empty(nbytes + ALIGNMENT, np.uint8))
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


def allocate_here(nbytes: int) -> Tensor:
    """Return new memory, in a DataLoader worker such that crosses to the main process uncopied."""
    return allocate(nbytes, shared=torch.utils.data.get_worker_info() is not None)


class Lease:
    """The right to use one slot; alive as long as any view of the slot's memory.

    It describes the memory to numpy, whose array then holds the lease, and torch tensors over that
    array hold it in turn. It also keeps the memory itself alive.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_memory", "slot")

    def __init__(self, slot: Slot) -> None:
        self._memory = slot.memory
        self.slot = slot
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (slot.memory.numel(),),
            "data": (slot.memory.data_ptr(), False),
        }

    def tensor(self) -> Tensor:
        """Return the slot's memory as (capacity,) uint8; it and its views keep the lease alive."""
        return torch.from_numpy(np.asarray(self))


class Slot:
    """One reusable allocation.

    Attributes
    ----------
    memory : (capacity,) uint8 Tensor
    events : list of Event
        Copies that read the memory and may still run.
    """

    __slots__ = ("_lease", "events", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.events: list[Event] = []
        self._lease: weakref.ref[Lease] | None = None

    def lease(self) -> Lease:
        """Return a new lease; the slot must be free."""
        lease = Lease(self)
        self._lease = weakref.ref(lease)
        return lease

    def is_free(self) -> bool:
        """Return whether no view is alive and no copy is running."""
        if self._lease is not None and self._lease() is not None:
            return False
        while self.events and self.events[-1].query():
            self.events.pop()
        return not self.events


@dataclass(slots=True)
class RingStats:
    """Counters of a ring.

    Attributes
    ----------
    slots : int
        Allocations that the ring holds.
    nbytes : int
        Their size together.
    leases : int
        Times that a slot was handed out.
    grown : int
        Slots added beyond the planned number, because all were in use.
    allocations : int
        Allocations made, the first ones and replacements by larger ones included.
    """

    slots: int = 0
    nbytes: int = 0
    leases: int = 0
    grown: int = 0
    allocations: int = 0


@dataclass(slots=True)
class Ring:
    """Reusable allocations; one thread acquires, any may let go.

    Parameters
    ----------
    planned : int
        Slots that a well-behaved consumer needs; more are added, and counted, when it holds on to
        batches.
    pin : bool
        Page-lock the memory.
    """

    planned: int
    pin: bool = False
    stats: RingStats = field(default_factory=RingStats)
    _slots: list[Slot] = field(default_factory=list)
    _largest: int = _MINIMUM

    def acquire(self, nbytes: int) -> Lease:
        """Return a lease on memory of at least `nbytes`.

        A free slot that is large enough costs no allocation. A free one that is too small is
        replaced by one a quarter larger than the largest batch so far.
        """
        if nbytes > self._largest:
            self._largest = aligned(int(nbytes * _HEADROOM))
        self.stats.leases += 1
        small = None
        for slot in self._slots:
            if slot.is_free():
                if slot.memory.numel() >= nbytes:
                    return slot.lease()
                small = slot
        if small is not None:
            self._slots.remove(small)
            self.stats.nbytes -= small.memory.numel()
        elif len(self._slots) >= self.planned:
            self.stats.grown += 1
        slot = Slot(allocate(self._largest, pin=self.pin))
        self._slots.append(slot)
        self.stats.allocations += 1
        self.stats.slots = len(self._slots)
        self.stats.nbytes += slot.memory.numel()
        return slot.lease()
