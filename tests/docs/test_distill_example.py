"""The distillation example runs from recorded replies to a falling loss."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "distill" / "train.py"


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_loss_falls(one_thread, tmp_path, capsys):
    history = runpy.run_path(str(EXAMPLE))["main"](str(tmp_path))
    assert history[-1] < 0.5 * history[0]
    assert max(history) == history[0]
    shown = capsys.readouterr().out
    assert "6 samples, 351 targets" in shown
    assert "5244 entries in, 2818 stored, dropped {'context': 2426}" in shown
