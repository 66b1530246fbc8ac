"""The thread that makes batches ahead."""

import os
import threading
import time

import pytest

from ragged_format import RaggedError
from ragged_format.torch.prefetch import Prefetcher


def start(make, depth=2):
    return Prefetcher(make, depth, "ragged-loader")


def test_items_come_in_order_and_then_it_ends():
    prefetcher = start(lambda: (n for n in range(5)))
    assert [prefetcher.get() for _ in range(5)] == list(range(5))
    for _ in range(2):
        with pytest.raises(StopIteration):
            prefetcher.get()
    prefetcher.stop()


def test_no_more_than_depth_are_made_ahead():
    made = []

    def numbers():
        for n in range(100):
            made.append(n)
            yield n

    prefetcher = start(numbers, depth=3)
    for taken in range(1, 6):
        prefetcher.get()
        deadline = time.monotonic() + 10
        while len(made) < taken + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(made) == taken + 3
    prefetcher.stop()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_error_arrives_after_the_items_before_it(kind):
    def failing():
        yield 1
        raise kind("broken")

    prefetcher = start(failing)
    assert prefetcher.get() == 1
    with pytest.raises(kind, match="broken"):
        prefetcher.get()
    with pytest.raises(StopIteration):
        prefetcher.get()
    prefetcher.stop()


def test_an_error_before_the_first_item():
    def failing():
        raise OSError("no file")

    prefetcher = start(failing)
    with pytest.raises(OSError, match="no file"):
        prefetcher.get()
    prefetcher.stop()


def test_stop_ends_a_thread_that_waits_for_room_and_closes_the_generator():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    prefetcher = start(endless)
    prefetcher.get()
    prefetcher.stop()
    assert closed.is_set()
    with pytest.raises(StopIteration):
        prefetcher.get()
    prefetcher.stop()


def test_stop_from_the_thread_itself_does_not_wait_for_itself():
    box = []

    def stopping():
        yield 1
        box[0].stop()
        yield 2

    prefetcher = start(stopping, depth=1)
    box.append(prefetcher)
    assert prefetcher.get() == 1
    prefetcher._thread.join(10)
    assert not prefetcher._thread.is_alive()


def test_a_thread_that_is_gone_is_an_error_within_seconds(monkeypatch):
    release = threading.Event()

    def waiting():
        release.wait()
        yield 1

    prefetcher = start(waiting)
    monkeypatch.setattr(prefetcher._thread, "is_alive", lambda: False)
    with pytest.raises(RaggedError, match="thread is gone"):
        prefetcher.get()
    release.set()
    prefetcher._thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_gets_an_error_not_a_hang():
    prefetcher = start(lambda: (n for n in range(3)))
    assert prefetcher.get() == 0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for _ in range(4):
                prefetcher.get()
        except RaggedError:
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    status = (0, 0)
    while status[0] == 0 and time.monotonic() < deadline:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    assert status == (child, 0) or os.waitstatus_to_exitcode(status[1]) == 0
    prefetcher.stop()
