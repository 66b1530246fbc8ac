"""Arenas are reused exactly when nobody looks at them any more."""

import gc
import weakref

import torch

from ragged_format.torch import RaggedLoader
from ragged_format.torch.arena import Ring


class FakeEvent:
    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


def test_a_slot_is_reused_when_its_last_view_is_gone():
    ring = Ring(planned=1)
    lease = ring.acquire(100)
    slot, memory = lease.slot, lease.tensor()
    del lease
    numbers = memory[64:128].view(torch.int32)
    array = numbers.numpy()[2:]
    del memory, numbers
    assert not slot.is_free()
    address = array.ctypes.data
    assert slot.memory.data_ptr() < address < slot.memory.data_ptr() + 200
    del array
    assert slot.is_free()
    assert ring.acquire(100).slot is slot
    assert (ring.stats.slots, ring.stats.grown, ring.stats.allocations) == (1, 0, 1)


def test_what_autograd_saved_holds_a_slot():
    ring = Ring(planned=1)
    lease = ring.acquire(100)
    slot, memory = lease.slot, lease.tensor()[:12].view(torch.float32)
    del lease
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * memory).sum()
    del memory
    assert not slot.is_free()
    loss.backward()
    del loss
    assert slot.is_free()


def test_a_slot_waits_for_copies_from_it():
    ring = Ring(planned=1)
    lease = ring.acquire(100)
    slot, events = lease.slot, [FakeEvent(), FakeEvent()]
    slot.events.extend(events)
    del lease
    assert not slot.is_free()
    events[1].passed = True
    assert not slot.is_free()
    events[0].passed = True
    assert slot.is_free()
    assert slot.events == []


def test_the_ring_grows_while_all_slots_are_held_and_counts_it():
    ring = Ring(planned=2)
    held = [ring.acquire(100) for _ in range(5)]
    assert (ring.stats.slots, ring.stats.grown, ring.stats.allocations) == (5, 3, 5)
    held.clear()
    for _ in range(10):
        ring.acquire(100)
    assert (ring.stats.slots, ring.stats.grown, ring.stats.allocations) == (5, 3, 5)
    assert ring.stats.leases == 15


def test_a_slot_that_is_too_small_is_replaced():
    ring = Ring(planned=1)
    ring.acquire(100)
    small = ring.stats.nbytes
    assert ring.acquire(10 * small).tensor().numel() >= 10 * small
    assert (ring.stats.slots, ring.stats.grown, ring.stats.allocations) == (1, 0, 2)
    assert ring.stats.nbytes >= 10 * small
    ring.acquire(10 * small + 1000)
    assert ring.stats.allocations == 2, "the headroom serves batches that are a little larger"


def test_the_memory_lives_as_long_as_a_view():
    ring = Ring(planned=1)
    lease = ring.acquire(100)
    memory = lease.tensor()
    memory.fill_(7)
    gone = weakref.ref(lease)
    del lease, ring
    gc.collect()
    assert gone() is not None
    assert memory.tolist()[:100] == [7] * 100
    del memory
    assert gone() is None


def test_tensors_outlive_batch_and_loader(samples):
    expected = [token for record in samples.column("input_ids").to_pylist() for token in record]
    for prefetch in (0, 2):
        loader = RaggedLoader(samples, batch_size=4, prefetch=prefetch)
        tensors = [batch["input_ids"] for batch in loader]
        loader.close()
        del loader
        gc.collect()
        assert torch.cat(tensors).tolist() == expected


def test_a_consumer_that_keeps_batches_makes_the_ring_grow(samples):
    for prefetch in (0, 2):
        with RaggedLoader(samples, batch_size=4, prefetch=prefetch) as loader:
            kept = list(loader)
            assert loader.stats.slots >= len(kept) == 10
            assert loader.stats.grown == loader.stats.slots - (prefetch + 2)


def test_the_steady_state_allocates_nothing(samples):
    """pytorch/pytorch#124456, allenai/allennlp#4670: pinning by the batch dominates all else."""
    for prefetch in (0, 1, 3):
        with RaggedLoader(samples, batch_size=2, shuffle=True, prefetch=prefetch) as loader:
            for _ in loader:
                pass
            for _ in range(4):
                for _ in loader:
                    pass
            assert loader.stats.grown == 0
            assert loader.stats.allocations <= prefetch + 2
            assert loader.stats.leases == 5 * 19


def test_a_clone_frees_the_slot(samples):
    with RaggedLoader(samples, batch_size=2, prefetch=0) as loader:
        kept = [batch.clone() for batch in loader]
        assert loader.stats.grown == 0
        assert sum(batch.num_rows for batch in kept) == 37
