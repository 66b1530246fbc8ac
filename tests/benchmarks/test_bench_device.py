"""The benchmark of GPU figures runs; on CPUs its lines say what is missing."""

from benchmarks import device
from benchmarks.harness import Settings

QUICK = Settings(rounds=1, slice_s=0.0, quick=True)


def test_every_form_runs_on_the_cpu():
    figures = device.run(QUICK, "cpu")
    assert [figure.ratio is not None for figure in figures] == [True, True, False]


def test_without_cuda_the_goals_are_stated(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    figures = device.run(QUICK)
    assert [figure.met for figure in figures] == [None, None, None]
    assert all(figure.goal for figure in figures)
