"""The Triton kernels, by Triton's interpreter on the CPU, give what the other kernels give."""

import os
import subprocess
import sys

import pytest
import torch

import ragged_format as rf
from benchmarks import head as bench
from ragged_format.torch import support_log_probs
from ragged_format.torch.head import triton_kernels

# The interpreter is chosen when Triton is imported, hence a process of its own.
SCRIPT = """
import torch
from benchmarks import head as bench
from ragged_format.torch import support_log_probs

case = bench.heavy_tail(60, width=40, vocabulary=256, hidden=70)
inputs = (case.pred_index // 3, case.target_ids, case.candidate_ids, case.candidate_counts)
for dtype, close in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
    results = []
    for kernel in ("auto", "triton"):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (case.hidden, case.weight)]
        log_probs, entropy = support_log_probs(
            *leaves, *inputs, kernel=kernel, out_dtype=torch.float64, chunk_elements=1 << 10
        )
        loss = (log_probs * torch.linspace(0, 1, 60)).sum() + entropy.sum()
        results.append([log_probs, entropy, *torch.autograd.grad(loss, leaves)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=close, atol=close)
print("equal")
"""


@pytest.mark.triton
def test_the_kernels_agree_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


def test_without_triton_its_choice_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(triton_kernels, "triton", None)
    case = bench.heavy_tail(3, width=4, vocabulary=16, hidden=4)
    with pytest.raises(rf.MissingDependencyError, match="Triton"):
        support_log_probs(
            case.hidden, case.weight, case.pred_index, case.target_ids, case.candidate_ids,
            case.candidate_counts, kernel="triton",
        )  # fmt: skip
    assert torch.is_grad_enabled()
