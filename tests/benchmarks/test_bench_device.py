"""The benchmark of GPU figures runs; on CPUs its lines say what is missing."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from support.far_device import FarDevice

from benchmarks import device
from benchmarks.harness import Settings
from ragged_format.torch import RaggedBatch

QUICK = Settings(rounds=1, slice_s=0.0, quick=True)


@pytest.fixture(autouse=True)
def _one_thread():
    """The tensors are small, and test processes share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_form_runs_on_the_cpu():
    figures = device.run(QUICK, "cpu")
    assert [figure.ratio is not None for figure in figures] == [True, True, False, False]


def test_without_cuda_the_goals_are_stated(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    figures = device.run(QUICK)
    assert [figure.met for figure in figures] == [None, None, None, None]
    assert all(figure.goal for figure in figures)


def test_on_a_device_what_is_timed_mixes_no_places_and_copies_nothing(monkeypatch):
    """A stand-in for CUDA: tensors that the host cannot see, on which mixing devices raises."""
    timed = []
    original = device.interleave

    def interleave(contenders, settings):
        before = len(far.log.copies)
        out = original(contenders, settings)
        timed.extend(far.log.copies[before:])
        return out

    monkeypatch.setattr(device, "interleave", interleave)
    with FarDevice() as far:
        figures = device.run(QUICK, "meta")
    assert [figure.ratio is not None for figure in figures] == [True, True, False, False]
    assert timed == []


def test_wrong_results_on_the_device_are_not_timed(monkeypatch):
    right = device.ours
    monkeypatch.setattr(
        device, "ours", lambda case, **options: right(case, **options) * (2 if options else 1)
    )
    with pytest.raises(AssertionError):
        device.check_device(torch.device("cpu"), ["gather"])


@pytest.fixture
def cuda(monkeypatch):
    """What the counts ask of CUDA, in place of it; the tensors stay on the CPU."""
    seen = SimpleNamespace(mode="default", modes=[], events=[], synchronised=[])

    def set_mode(mode):
        seen.mode = mode
        seen.modes.append(mode)

    class Profile:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def events(self):
            return seen.events

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "synchronize", seen.synchronised.append)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(RaggedBatch, "pin_memory", lambda self: self)
    monkeypatch.setattr(RaggedBatch, "to", lambda self, device, **options: self)
    return seen


def test_copies_are_counted_by_the_profiler(cuda):
    names = ("aten::copy_", "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)")
    cuda.events = [SimpleNamespace(name=name) for name in names]
    figure = device._copies(torch.device("cuda"))
    assert (figure.ratio, figure.met) == (1.0, True)
    assert cuda.synchronised == [torch.device("cuda")]


def test_waits_are_counted_by_torch_and_its_mode_is_set_back(cuda, monkeypatch):
    monkeypatch.setattr(device.Case, "to", lambda self, place, dtype: self)
    original = device.step

    def step(head, case):
        if cuda.mode == "warn" and head.keywords["on_outside"] == "error":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return original(head, case)

    monkeypatch.setattr(device, "step", step)
    figure = device._waits(torch.device("cuda"))
    assert (figure.ratio, figure.met) == (1.0, True)
    assert figure.ours == "1, with labels only flagged 0"
    assert cuda.modes == ["warn", 0, "warn", 0]
