"""The way of a loader's batches to CUDA: page-locked slots, one copy each, reused when it is done.

In place of CUDA stands a stub that keeps tensors on the CPU and does what the test says when the
test says it: a copy is done when its event passes.
"""

import threading
from types import SimpleNamespace

import pytest
import torch

from ragged_format.torch import RaggedLoader, batch, loader

CUDA = torch.device("cuda", 0)


class OnCuda(torch.Tensor):
    """A tensor that says it lies on CUDA."""

    is_cuda = True

    def record_stream(self, stream):
        stream.used.append(self.numel())


class Stream:
    def __init__(self, cuda):
        self.cuda = cuda
        self.waited, self.used = [], []

    def record_event(self):
        event = Event(self.cuda)
        event.record(self)
        return event

    def wait_event(self, event):
        self.waited.append(event)


class Event:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self, stream):
        self.stream = stream
        self.cuda.events.append(self)

    def query(self):
        return self.cuda.done


@pytest.fixture
def cuda(monkeypatch):
    stub = SimpleNamespace(done=False, events=[], pinned=[], copies=[], streams=[])
    stub.main = Stream(stub)
    entered = threading.local()

    def current(device=None):
        return getattr(entered, "stream", stub.main)

    def new_stream(device):
        assert device == CUDA
        stub.streams.append(Stream(stub))
        return stub.streams[-1]

    class Entered:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            entered.stream = self.stream

        def __exit__(self, *error):
            del entered.stream

    plain_empty, plain_to = torch.empty, torch.Tensor.to

    def empty(*args, pin_memory=False, **options):
        if pin_memory:
            stub.pinned.append(args[0])
        return plain_empty(*args, **options)

    def to(self, target, *args, **options):
        if target != CUDA:
            return plain_to(self, target, *args, **options)
        copy = SimpleNamespace(nbytes=self.numel(), at=self.data_ptr(), stream=current())
        stub.copies.append(SimpleNamespace(**vars(copy), **options))
        return self.clone().as_subclass(OnCuda)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(stub))
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    for module in (loader, batch):
        monkeypatch.setattr(module, "usable_device", lambda device: CUDA)
    return stub


def test_a_batch_is_one_asynchronous_copy_from_page_locked_memory(cuda, samples):
    with RaggedLoader(samples, batch_size=8, device="cuda", prefetch=0) as batches:
        sizes = [moved.nbytes for moved in batches]
        slots = [slot.memory for slot in batches._ring._slots]
    assert [copy.nbytes for copy in cuda.copies] == sizes
    assert len(sizes) == 5
    (side,) = cuda.streams
    assert all(copy.non_blocking and copy.stream is side for copy in cuda.copies)
    bounds = [(memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in slots]
    for copy in cuda.copies:
        assert any(low <= copy.at <= high - copy.nbytes for low, high in bounds)
    assert len(cuda.pinned) == len(slots), "every slot is page-locked"


def test_the_consumer_s_stream_waits_for_the_copy_and_keeps_its_memory(cuda, samples):
    with RaggedLoader(samples, batch_size=8, device="cuda", prefetch=0) as batches:
        for number, moved in enumerate(batches, 1):
            assert len(cuda.main.waited) == len(cuda.main.used) == number
            assert cuda.main.used[-1] == moved.arena.numel()
    (side,) = cuda.streams
    assert all(event.stream is side for event in cuda.main.waited)
    # One event for the consumer and one for the slot, each behind the copy.
    assert [event.stream for event in cuda.events] == [side] * 10
    assert side.waited == []


def test_a_slot_is_not_filled_again_before_its_copy_is_done(cuda, samples):
    with RaggedLoader(samples, batch_size=8, device="cuda", prefetch=0) as batches:
        for _ in batches:
            pass
        starts = [copy.at for copy in cuda.copies]
        assert len(set(starts)) == 5, "no copy has ended, so no slot was free"
        assert (batches.stats.allocations, batches.stats.grown) == (5, 3)
        cuda.done = True
        for _ in batches:
            pass
        assert {copy.at for copy in cuda.copies[5:]} <= set(starts)
        assert batches.stats.allocations == 5


def test_batches_made_ahead_are_copied_in_the_thread_that_makes_them(cuda, samples):
    with RaggedLoader(samples, batch_size=8, device="cuda", prefetch=2) as batches:
        sizes = [moved.nbytes for moved in batches]
    assert [copy.nbytes for copy in cuda.copies] == sizes
    assert all(copy.non_blocking for copy in cuda.copies)
    assert len(cuda.main.waited) == 5


def test_widths_and_text_stay_on_the_host(cuda, samples):
    with RaggedLoader(samples, batch_size=8, device="cuda", prefetch=0) as batches:
        moved = next(iter(batches))
        assert moved.strings("sample_id") == samples.column("sample_id").to_pylist()[:8]
        assert moved.lengths_host("token").tolist() == moved.lengths("token").tolist()
        assert moved._host.untyped_storage().data_ptr() != cuda.copies[0].at
