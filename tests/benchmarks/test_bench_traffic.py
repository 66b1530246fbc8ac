"""Formulas of the bytes that move, as the page on losses has them, against operators' tensors."""

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.traffic import Traffic, moved
from ragged_format.torch import pad_buckets, pad_ragged, support_log_probs
from ragged_format.torch.head import flat
from ragged_format.torch.head.log_probs import CHUNK_ELEMENTS

PAGE = (Path(__file__).parents[2] / "docs" / "torch-head.md").read_text()
DTYPES = [torch.int32, torch.bfloat16, torch.int64]


def in_page(*formulas):
    """Whether the page has a line of its table with these formulas."""
    cells = [[cell.strip() for cell in line.split("|")] for line in PAGE.splitlines()]
    wanted = [f"`{formula}`" for formula in formulas]
    return any(row[2 : 2 + len(wanted)] == wanted for row in cells)


def coefficients(terms, counted):
    """Return by what each term enters the counts, which must be exactly linear in the terms."""
    terms, counted = np.array(terms, float), np.array(counted, float)
    found, *_ = np.linalg.lstsq(terms, counted, rcond=None)
    assert np.abs(terms @ found - counted).max() < 0.5
    return found.round(6).tolist()


def rows_of(targets, count, dtype):
    """Return values, and counts of the type in which they are stored."""
    counts = torch.full((targets,), count, dtype=torch.int32)
    return torch.zeros(targets * count, dtype=dtype), counts


def test_what_counts():
    table, index = torch.zeros(100, 4), torch.tensor([3, 5])
    cases = {
        "views and empty memory": (lambda: torch.empty(9).view(3, 3)[1:].T.expand(2, 3, 2), 0),
        "both sides of a copy": (lambda: table.clone(), 2 * 1600),
        "rows read by an index": (lambda: table[index], 16 + 2 * 32),
        "rows written by an index": (
            lambda: table.index_copy_(0, index, torch.empty(2, 4)), 16 + 2 * 32),
        "rows added to by an index": (
            lambda: table.index_add_(0, index, torch.empty(2, 4)), 16 + 3 * 32),
        "an expanded input once": (lambda: table + torch.empty(1, 4).expand(100, 4), 2 * 1600 + 16),
        "in place, read and written": (lambda: table.mul_(2.0), 2 * 1600),
    }  # fmt: skip
    for name, (call, expected) in cases.items():
        assert moved(call) == expected, name
    with Traffic() as traffic:
        table.zero_()
    assert traffic.by_operator == {"aten.zero_": 1600}


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding(dtype):
    size = dtype.itemsize
    assert in_page("2 e W")
    assert moved(lambda: torch.zeros(7, 9, dtype=dtype).clone()) == (1 + 2) * size * 63
    assert in_page("e W + (2 e + 32) c + 76")
    terms, counted = [], []
    for targets, count, width in product((100, 300), (4, 8), (8, 32)):
        values, counts = rows_of(targets, count, dtype)
        counted.append(moved(partial(pad_ragged, values, counts, width, host_counts=counts)))
        terms.append((targets * width, targets * count, targets, 1))
    assert coefficients(terms, counted)[:3] == [size, 2 * size + 32, 76]


@pytest.mark.parametrize("dtype", DTYPES)
def test_buckets(dtype):
    size = dtype.itemsize
    assert in_page("(4 e + 35) s + 116")
    terms, counted = [], []
    for targets, count in product((100, 300), (4, 8, 16)):
        values, counts = rows_of(targets, count, dtype)
        counted.append(moved(partial(pad_buckets, values, counts, host_counts=counts)))
        # A bucket's width and a constant: the columns that rows are compared with, and the fill.
        terms.append((targets * count, targets, count, 1))
    per_slot, per_target, *_ = coefficients(terms, counted)
    assert (per_slot, per_target) == (4 * size + 35, 116)


def head_bytes(targets, count, width, vocabulary, kernel, chunk=1 << 26):
    """Return the bytes of forward and backward pass, bfloat16; sets of `count`, 0 is full."""
    hidden = torch.zeros(targets, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
    counts = torch.full((targets,), count)
    inputs = (
        hidden, weight, torch.arange(targets), torch.zeros(targets, dtype=torch.int64),
        torch.arange(count).repeat(targets), counts,
    )  # fmt: skip
    with Traffic() as forward:
        log_probs, _ = support_log_probs(
            *inputs, host_counts=counts, on_outside="flag", kernel=kernel, chunk_elements=chunk,
            out_dtype=torch.float32,
        )  # fmt: skip
    with Traffic() as backward:
        torch.autograd.grad(log_probs.sum(), (hidden, weight))
    return forward.nbytes, backward.nbytes


def set_coefficients(kernel):
    """Return forward and backward what sets move: H c, H, V H, c, 1 a target; V, 1 in all."""
    sizes = list(product((50, 100), (4, 8), (64, 128), (256, 512)))
    terms = [(m * c * h, m * h, v * h, m * c, m, v, 1) for m, c, h, v in sizes]
    counted = zip(*(head_bytes(*size, kernel) for size in sizes), strict=True)
    return [coefficients(terms, numbers) for numbers in counted]


def test_the_head_by_gathered_rows():
    assert in_page("26 H c + 10 H", "86 H c + 20 H")
    forward, backward = set_coefficients("gather")
    assert forward[:3] == [26, 10, 0]
    assert backward[:3] == [86, 20, 10]
    assert max(*forward[3:5], *backward[3:5]) < 400
    assert "`10 V H` a step" in PAGE


def test_the_head_by_triton(monkeypatch):
    """Around the kernels nothing grows with H but the gradients; the kernels' part is their loads.

    Each loads for a candidate the rows that it multiplies or scales, 2 H a row; additions to
    gradients in float32 read and write 8 H, for the hidden states' once a target.
    """
    nothing = SimpleNamespace(
        dots=lambda hidden, weight, positions, rows, out: out.zero_(),
        add_hidden=lambda *parts: None, add_weight=lambda *parts: None,
    )  # fmt: skip
    monkeypatch.setattr(flat, "_triton", lambda: nothing)
    forward, backward = set_coefficients("triton")
    row, sums = 2, 8
    assert in_page("4 H c", "16 H c + 18 H")
    dots, add_hidden, add_weight = 2 * row, row, row + sums
    assert (forward[0] + dots, forward[1]) == (4, 0)
    assert (backward[0] + dots + add_hidden + add_weight, backward[1] + sums) == (16, 18)
    assert (forward[2], backward[2]) == (0, 10)
    assert max(forward[3], backward[3]) < 400


def test_the_head_over_the_full_vocabulary():
    assert in_page("74 V", "100 V")
    sizes = list(product((50, 100), (64, 128), (256, 512)))
    terms = [(m * v, m * h, v * h, m, v, 1) for m, h, v in sizes]
    counted = zip(*(head_bytes(m, 0, h, v, "gather") for m, h, v in sizes), strict=True)
    forward, backward = (coefficients(terms, numbers) for numbers in counted)
    assert (forward[0], backward[0]) == (72, 80)
    # A chunk of targets reads the weight, which the gradient at the end, 10 V H, does not.
    per_chunk = forward[2], backward[2] - 10
    assert per_chunk == (2, 20)
    # A chunk has H targets, so that V H a chunk is V a target.
    assert (forward[0] + per_chunk[0], backward[0] + per_chunk[1]) == (74, 100)


@pytest.mark.parametrize(("width", "targets"), [(2, 512), (600, 600), (2048, 2048)])
def test_chunks_of_the_full_vocabulary_are_of_as_many_targets_as_the_width(width, targets):
    class Products(TorchDispatchMode):
        heights: ClassVar = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                self.heights.append(len(out))
            return out

    case = [torch.zeros(rows, width) for rows in (3, 8_300)]
    index = torch.zeros(targets + 70, dtype=torch.int64)
    with Products() as products, torch.no_grad():
        products.heights.clear()
        support_log_probs(*case, index, index, index[:0], index, chunk_elements=CHUNK_ELEMENTS)
    assert products.heights[0] == pytest.approx(targets, rel=0.002)
    assert set(products.heights) == {products.heights[0], len(index) - products.heights[0]}


def test_the_example_of_the_page():
    words = " ".join(PAGE.split())
    for text in (
        "20,000 targets, c = 3, W = 512, H = 2,048, V = 131,072 and 4.8 TB/s",
        "2.2 kB a target where a copy of the table moves 4.1",
        "15 GB by gathered rows (3 ms) and 3 GB by Triton (0.7 ms)", "2.7 GB more (0.6 ms)",
        "460 GB (95 ms) and computes 43 TFLOP",
    ):  # fmt: skip
        assert text in words, text
    targets, c, slots, hidden, vocabulary, rate = 20_000, 3, 512, 2_048, 131_072, 4.8e12
    assert round(4 * slots + 40 * c + 76, -2) == 2200
    assert round(8 * slots, -2) == 4100
    per_step = {
        "gathered": targets * hidden * (112 * c + 30), "triton": targets * hidden * (20 * c + 18),
        "weight": 10 * vocabulary * hidden,
        "full": targets * vocabulary * 174,
    }  # fmt: skip
    gigabytes = {name: float(f"{size / 1e9:.2g}") for name, size in per_step.items()}
    assert gigabytes == {"gathered": 15, "triton": 3.2, "weight": 2.7, "full": 460}
    milliseconds = {name: size / rate * 1e3 for name, size in per_step.items()}
    expected = {"gathered": 3, "triton": 0.7, "weight": 0.6, "full": 95}
    assert milliseconds == pytest.approx(expected, rel=0.07)
    assert float(f"{8 * targets * vocabulary * hidden / 1e12:.2g}") == 43
    # Cheaper than a copy: e W + (2 e + 32) c < 2 e W; a full row: (3 e + 32) c against 2 e c.
    size = 4
    assert size / (2 * size + 32) == 1 / 10
    assert (3 * size + 32) / (2 * size) == 5.5
