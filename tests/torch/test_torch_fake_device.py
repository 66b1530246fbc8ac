"""With values on an accelerator and counts on the host: right results there, and nothing waits."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.far_device import FarDevice

import ragged_format as rf
from ragged_format.torch import (
    RaggedBatch,
    RaggedLoader,
    clipped_policy_loss,
    forward_kl,
    head_log_probs,
    pad_buckets,
    pad_chunks,
    pad_ragged,
    reverse_kl,
    score_centering_loss,
    support_log_probs,
    transfer,
)
from ragged_format.torch.head import flat

COUNTS = np.array([3, 1, 6, 2, 1])
VOCABULARY = 24
# What the sets of five targets are: all given, none, or now one and now the other, so that
# neither kind is consecutive.
SETS = {"sets": COUNTS, "full": np.zeros(5, np.int64), "mixed": np.array([3, 0, 6, 0, 2])}


@pytest.fixture
def far():
    with FarDevice() as device:
        yield device


def assert_same(device, got, want):
    """Compare results, all of which lie on the device, with results on the CPU."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for mine, other in zip(got, want, strict=True):
            assert_same(device, mine, other)
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(device.get(got), want.detach(), rtol=1e-6, atol=1e-6)
    else:
        assert got == want


# The device itself


def test_the_device_sees_waits_copies_and_mixtures(far):
    there, here = far.put(torch.tensor([3, 0, 2])), torch.tensor([1, 1, 1])
    length = far.put(torch.tensor([3]))
    waiting = [
        lambda: there.sum().item(), lambda: bool((there > 0).all()), lambda: there[there > 0],
        lambda: there.nonzero(), lambda: torch.repeat_interleave(there), lambda: there.cpu(),
        lambda: here.to(there.device), lambda: torch.unique(there), lambda: torch.bincount(there),
        lambda: torch.segment_reduce(there.float(), "sum", lengths=length),
    ]  # fmt: skip
    for number, wait in enumerate(waiting):
        wait()
        assert len(far.log.waits) == number + 1, number
    assert [copy.to_device for copy in far.log.copies] == [False, True]
    for mixed in (lambda: there + here, lambda: there[here], lambda: here[there]):
        with pytest.raises(AssertionError):
            mixed()
    assert far.get((there + torch.tensor(1))[1:] * 2).tolist() == [2, 6]
    assert far.get(torch.arange(3, device=there.device) + there).tolist() == [3, 1, 4]


# Padding

PADDING = {
    "width": lambda *a, **k: pad_ragged(*a, 6, **k),
    "widest": pad_ragged,
    "multiple": lambda *a, **k: pad_ragged(*a, multiple_of=4, **k),
    "truncated": lambda *a, **k: pad_ragged(*a, 2, truncate=True, **k),
    "buckets": pad_buckets,
    "chunks": lambda *a, **k: list(pad_chunks(*a, 2, **k)),
}


@pytest.mark.parametrize("name", PADDING)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.bfloat16])
def test_padding_waits_for_nothing(far, name, dtype):
    values, counts = torch.arange(13).to(dtype), torch.from_numpy(COUNTS).to(torch.int32)
    want = PADDING[name](values, counts, fill=7)
    got = PADDING[name](far.put(values), far.put(counts), fill=7, host_counts=COUNTS)
    assert_same(far, got, want)
    assert (far.log.waits, far.log.copies) == ([], [])


@pytest.mark.parametrize("name", PADDING)
@pytest.mark.parametrize("form", [np.asarray, list, torch.from_numpy])
def test_counts_of_the_host_alone_are_copied_once(far, name, form):
    values = torch.arange(13)
    want = PADDING[name](values, COUNTS)
    assert_same(far, PADDING[name](far.put(values), form(COUNTS)), want)
    assert [copy.nbytes for copy in far.log.copies] == [8 * len(COUNTS)]
    assert far.log.waits == []


@pytest.mark.parametrize("name", PADDING)
def test_counts_of_the_device_alone_cost_at_most_one_wait(far, name):
    values, counts = torch.arange(13), torch.from_numpy(COUNTS)
    want = PADDING[name](values, counts)
    assert_same(far, PADDING[name](far.put(values), far.put(counts)), want)
    assert len(far.log.waits) == (0 if name in ("width", "truncated") else 1)


def test_padding_passes_gradients_on(far):
    values = torch.rand(13, requires_grad=True)
    for pad in PADDING.values():
        grads = []
        for leaf in (values, far.put(values)):
            out = pad(leaf, COUNTS, fill=0.5)
            tables = [out] if isinstance(out, torch.Tensor) else [part[-1] for part in out]
            grads += torch.autograd.grad(sum((table * table).sum() for table in tables), leaf)
        assert_same(far, grads[1], grads[0])
    assert far.log.waits == []


# The head


def head_case(device, counts, dtype):
    """Return inputs of the head on the CPU and on the device."""
    generator = torch.Generator().manual_seed(5)
    labels = [4, 9, 2, 20, 7]
    ids = []
    for label, count in zip(labels, counts.tolist(), strict=True):
        others = [token for token in range(VOCABULARY) if token != label]
        ids += [label, *others][:count]
    here = {
        "hidden": torch.randn(6, 16, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(VOCABULARY, 16, generator=generator).to(dtype).requires_grad_(),
        "pred_index": torch.tensor([0, 1, 1, 3, 5], dtype=torch.int32),
        "target_ids": torch.tensor(labels, dtype=torch.int32),
        "candidate_ids": torch.tensor(ids, dtype=torch.int32),
        "candidate_counts": torch.from_numpy(counts).to(torch.int32),
    }
    return here, {name: device.put(tensor) for name, tensor in here.items()}


def transforms(place):
    bias = torch.linspace(-1, 1, VOCABULARY).requires_grad_()
    heat = torch.linspace(0.5, 2, 5)
    return {"bias": place(bias), "temperature": place(heat), "soft_cap": 3.0, "logit_scale": 0.7}


def step(case, options, extra=()):
    out = (head_log_probs if extra else support_log_probs)(*case.values(), *extra, **options)
    leaves = [case["hidden"], case["weight"]]
    if "bias" in options:
        leaves.append(options["bias"])
    total = sum((part * part).sum() for part in out)
    return [*out, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize(("over", "plain"), [("support", True), ("vocabulary", False)])
@pytest.mark.parametrize("chunk", [1 << 22, 96, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", SETS.values(), ids=SETS)
def test_head_waits_once_for_its_check_or_never(far, counts, dtype, chunk, over, plain):
    """Few elements to a chunk send wide sets the dense way, and split every pass."""
    here, there = head_case(far, counts, dtype)
    options = {
        "entropy_over": over, "chunk_elements": chunk, "out_dtype": torch.float32,
        "kernel": "gather",
    }  # fmt: skip
    own = {} if plain else transforms(lambda tensor: tensor)
    moved = {} if plain else transforms(far.put)
    want = step(here, {**options, **own})
    for on_outside, waits in (("flag", 0), ("error", 1)):
        far.log.waits.clear()
        far.log.copies.clear()
        got = step(there, {**options, **moved, "host_counts": counts, "on_outside": on_outside})
        assert_same(far, got, want)
        assert len(far.log.waits) == waits
        # The numbers of targets that are not consecutive, and nothing else.
        assert all(copy.to_device and copy.nbytes <= 8 * len(counts) for copy in far.log.copies)
        if len({bool(count) for count in counts}) == 1:
            assert chunk != 1 << 22 or far.log.copies == []


def test_heads_wait_once_for_their_check_or_never(far):
    here, there = head_case(far, COUNTS, torch.float32)
    heads = here["candidate_ids"], here["candidate_counts"]
    want = step(here, {"kernel": "gather"}, heads)
    moved = [far.put(part) for part in heads]
    for on_outside, waits in (("flag", 0), ("error", 1)):
        far.log.waits.clear()
        options = {"host_counts": COUNTS, "host_head_counts": COUNTS, "on_outside": on_outside}
        assert_same(far, step(there, options, moved), want)
        assert (len(far.log.waits), far.log.copies) == (waits, [])


def test_without_host_counts_the_head_waits_for_them(far):
    _, there = head_case(far, COUNTS, torch.float32)
    support_log_probs(*there.values(), on_outside="flag")
    assert [wait.split()[0] for wait in far.log.waits] == ["aten._to_copy"]


def test_a_temperature_on_the_device_is_not_looked_at(far):
    here, there = head_case(far, COUNTS, torch.float32)
    options = {"on_outside": "flag", "host_counts": COUNTS}
    want = support_log_probs(*here.values(), torch.tensor(1.5))
    got = support_log_probs(*there.values(), far.put(torch.tensor(1.5)), **options)
    assert_same(far, got, want)
    assert far.log.waits == []


def test_what_the_check_finds_is_the_error_of_the_cpu(far):
    for name, at, value, code in (
        ("candidate_ids", 2, VOCABULARY, "RF-I011"), ("target_ids", 1, 23, "RF-I013"),
    ):  # fmt: skip
        here, _ = head_case(far, COUNTS, torch.float32)
        here[name][at] = value
        for case in (here, {key: far.put(tensor) for key, tensor in here.items()}):
            with pytest.raises(rf.InvariantError) as caught:
                support_log_probs(*case.values(), host_counts=COUNTS)
            assert (caught.value.code, caught.value.where.position) == (code, at)


def test_hidden_states_and_weight_in_two_places_are_a_typed_error(far):
    here, there = head_case(far, COUNTS, torch.float32)
    for name in ("hidden", "weight"):
        with pytest.raises(rf.SchemaMismatchError, match="one device"):
            support_log_probs(*{**there, name: here[name]}.values())
    with pytest.raises(rf.SchemaMismatchError, match="one device"):
        support_log_probs(*there.values(), bias=torch.zeros(VOCABULARY))


def test_triton_kernels_get_what_they_index_by_and_nothing_waits(far, monkeypatch):
    """In their place the same sums by other operations: the kernels take plain memory."""

    def dots(hidden, weight, positions, rows, out):
        assert positions.dtype == rows.dtype == torch.int64
        assert all(t.is_contiguous() for t in (positions, rows, out))
        out.copy_((hidden[positions].to(out.dtype) * weight[rows].to(out.dtype)).sum(1))

    def add_hidden(weight, positions, offsets, rows, grad, out):
        assert offsets.dtype == positions.dtype == torch.int64
        assert all(t.is_contiguous() for t in (positions, offsets, rows, grad, out))
        owner = torch.repeat_interleave(torch.diff(offsets), output_size=len(rows))
        out.index_add_(0, positions[owner], weight[rows].to(out.dtype) * grad[:, None])

    def add_weight(hidden, positions, rows, grad, out):
        assert all(t.is_contiguous() for t in (positions, rows, grad, out))
        out.index_add_(0, rows, hidden[positions].to(out.dtype) * grad[:, None])

    kernels = SimpleNamespace(dots=dots, add_hidden=add_hidden, add_weight=add_weight)
    monkeypatch.setattr(flat, "_triton", lambda: kernels)
    for counts in (COUNTS, SETS["mixed"]):
        for dtype in (torch.float32, torch.bfloat16):
            here, there = head_case(far, counts, dtype)
            want = step(here, {"kernel": "gather", "out_dtype": torch.float32})
            far.log.waits.clear()
            got = step(there, {
                "kernel": "triton", "out_dtype": torch.float32, "host_counts": counts,
                "on_outside": "flag",
            })  # fmt: skip
            assert_same(far, got, want)
            assert far.log.waits == []


# Losses


def centred(own, old, gain, head, teacher, counts, weights, tail):
    return score_centering_loss(own, old, gain, head, teacher, counts, weights, tail=tail)


def divergence(own, old, gain, head, teacher, counts, kl, tail):
    return own + kl(head, teacher, counts, tail=tail)


LOSSES = [
    *(
        partial(centred, weights=weights, tail=tail)
        for weights in ("none", "tis", "mis")
        for tail in ("proportional", "none")
    ),
    *(
        partial(divergence, kl=kl, tail=tail)
        for kl in (forward_kl, reverse_kl)
        for tail in ("bucket", "renormalize")
    ),
]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("counts_there", [True, False])
def test_losses_wait_for_nothing(far, loss, counts_there):
    generator = torch.Generator().manual_seed(3)
    counts = np.array([3, 0, 6, 2, 1])
    own, old, other = (-torch.rand(5, generator=generator) for _ in range(3))
    head, teacher = (-3 - torch.rand(12, generator=generator) for _ in range(2))
    results = []
    for place in (lambda tensor: tensor, far.put):
        leaves = [place(tensor).requires_grad_() for tensor in (own, head)]
        sizes = torch.from_numpy(counts)
        out = loss(
            leaves[0], place(old), place(other), leaves[1], place(teacher),
            place(sizes) if counts_there else sizes,
        )  # fmt: skip
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert_same(far, results[1], results[0])
    assert far.log.waits == []
    assert [copy.nbytes for copy in far.log.copies] == ([] if counts_there else [40])


def test_the_clipped_loss_waits_for_nothing(far):
    own, old, gain = torch.rand(3, 5)
    out = clipped_policy_loss(far.put(own).requires_grad_(), far.put(old), far.put(gain))
    out.sum().backward()
    assert_same(far, out, clipped_policy_loss(own, old, gain))
    assert (far.log.waits, far.log.copies) == ([], [])


# Batches


def test_a_batch_moves_by_one_copy_and_its_tables_need_no_other(far, samples):
    batch = RaggedBatch.from_arrow(samples)
    moved = batch.to("meta", non_blocking=True)
    (copy,) = far.log.copies
    assert (copy.to_device, copy.nbytes, copy.non_blocking) == (True, batch.nbytes, True)
    for column in batch.schema:
        assert_same(far, moved[column.name], batch[column.name])
        assert_same(far, moved.valid(column.name), batch.valid(column.name))
        if column.axis == "record" or column.fill is None:
            continue
        for form in (
            lambda b, name=column.name: b.padded(name),
            lambda b, name=column.name: b.padded(name, 2, truncate=True, multiple_of=3),
            lambda b, name=column.name: b.buckets(name),
            lambda b, name=column.name: list(b.chunks(name, 7)),
        ):
            assert_same(far, form(moved), form(batch))
    for axis in batch.plan.axes[1:]:
        for part in ("offsets", "lengths", "counts", "padded_mask"):
            assert_same(far, getattr(moved, part)(axis), getattr(batch, part)(axis))
        assert moved.width(axis) == batch.width(axis)
        assert np.array_equal(moved.counts_host(axis), batch.counts_host(axis))
        assert np.array_equal(moved.lengths_host(axis), batch.lengths_host(axis))
    assert moved.strings("sample_id") == batch.strings("sample_id")
    assert (far.log.waits, len(far.log.copies)) == ([], 1)


def test_rows_of_nested_masks_are_counts_of_the_host(far):
    """They are no column: their counts are the only copy beside the arena."""
    own = [
        rf.Column("kept", "candidate", pa.uint8(), opens="kept_candidate", mask=True),
        rf.Column("kept_ids", "kept_candidate", pa.int32(), fill=-1),
    ]
    schema = rf.sample_schema(vocab_size=99, columns=["candidate_counts", "candidate_ids", *own])
    row = {"sample_id": "a", "input_ids": [1, 2, 3], "completion_mask": [0, 1, 1],
           "candidate_counts": [3, 1], "candidate_ids": [2, 5, 7, 3], "kept": [1, 0, 1, 0],
           "kept_ids": [20, 70]}  # fmt: skip
    batch = RaggedBatch.from_arrow(pa.RecordBatch.from_pylist([row], schema=schema))
    moved = batch.to("meta", non_blocking=True)
    assert_same(far, moved.padded("kept_ids"), batch.padded("kept_ids"))
    assert [copy.nbytes for copy in far.log.copies] == [batch.nbytes, 16]
    assert far.log.waits == []


def test_a_loader_makes_one_copy_a_batch(far, samples):
    with RaggedLoader(samples, batch_size=8, device="meta", prefetch=0) as loader:
        sizes = [batch.nbytes for batch in loader]
    assert [copy.nbytes for copy in far.log.copies] == sizes
    assert len(sizes) == 5


# Small arrays


def test_small_arrays_reach_cuda_by_page_locked_memory(monkeypatch):
    """From other memory CUDA waits before copies of more than 64 KiB."""
    calls = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: calls.append("pin") or self.clone()
    )
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, **options: calls.append((device, options)) or self
    )
    array, cuda = np.arange(5), torch.device("cuda", 1)
    out = transfer.to_device(array, cuda)
    assert calls == ["pin", (cuda, {"non_blocking": True})]
    assert out.data_ptr() != array.ctypes.data
    calls.clear()
    assert transfer.to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data
    assert calls == [(torch.device("cpu"), {"non_blocking": True})]
