"""What a step of the head holds at once, counted, and the sets that go each way."""

import numpy as np
import pytest
import torch

from benchmarks import head as bench
from ragged_format.torch import support_log_probs

CHUNK = 1 << 16


def test_the_count_sees_what_is_alive():
    with bench.PeakMemory() as memory:
        one = torch.zeros(1000)
        two = one + 1
        del two
        three = one * 2
        view = three[:5]
    assert memory.peak == 8000
    assert memory.alive == 8000
    del one, three
    assert memory.alive == 4000
    assert len(view) == 5


def peak(sizes):
    case = bench.heavy_tail(len(sizes), vocabulary=1024, hidden=16, sizes=np.array(sizes))
    return bench.peak_bytes(lambda case: bench.ours(case, chunk_elements=CHUNK), case)


def test_peak_is_flat_in_the_widest_set():
    """verl-project/verl#6511: an (N, V) buffer ran out of memory."""
    narrow = peak([1] * 2000 + [8] * 64)
    wide = peak([1] * 2000 + [512] + [1] * 63)
    assert wide <= 1.1 * narrow
    assert peak([1] * 2000 + [1000] + [1] * 63) <= 1.1 * narrow  # by matrix products


def test_peak_is_a_tenth_of_the_dense_forms():
    case = bench.heavy_tail(2000, width=512, vocabulary=4096, hidden=32)
    own = bench.peak_bytes(bench.ours, case)
    for dense in (bench.masked_logits, bench.tiles):
        assert own <= 0.1 * bench.peak_bytes(dense, case)


@pytest.mark.parametrize(
    "form", [bench.masked_logits, bench.tiles, bench.padded_rows, bench.buckets, bench.gathered]
)
def test_all_forms_agree(form):
    bench.check_same(form, bench.heavy_tail(300, width=40, vocabulary=256, hidden=16))


@pytest.mark.parametrize("kernel", ["sparse", "gather"])
@pytest.mark.parametrize("chunk", [64, 1 << 14, 1 << 22])
def test_every_way_gives_the_same(kernel, chunk):
    """Narrow sets go the flat way, wide and full ones the dense way, in chunks of any size."""
    rng = np.random.default_rng(0)
    sizes = rng.choice([0, 1, 3, 60, 90, 200], 40)
    case = bench.heavy_tail(40, vocabulary=256, hidden=8, sizes=sizes)
    hidden, weight = (t.detach().double().requires_grad_() for t in (case.hidden, case.weight))
    logits = hidden @ weight.T
    allowed = torch.zeros(40, 256, dtype=torch.bool)
    owner = torch.repeat_interleave(case.candidate_counts)
    allowed[owner, case.candidate_ids.long()] = True
    allowed[case.candidate_counts == 0] = True
    expected = logits.masked_fill(~allowed, -torch.inf).log_softmax(1)
    expected = expected[torch.arange(40), case.target_ids]
    log_probs, _ = support_log_probs(
        hidden, weight, case.pred_index, case.target_ids, case.candidate_ids,
        case.candidate_counts, chunk_elements=chunk, kernel=kernel,
    )  # fmt: skip
    mine = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(mine, torch.autograd.grad(expected.sum(), (hidden, weight)))
