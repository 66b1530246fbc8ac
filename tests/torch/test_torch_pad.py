"""Padding against lists padded in Python."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ragged_format import InvariantError, LimitExceededError, SchemaMismatchError
from ragged_format.schema import LOG_PROB_FILL
from ragged_format.torch import pad as pad_module
from ragged_format.torch import pad_buckets, pad_chunks, pad_ragged, width_buckets

DTYPES = [
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
]  # fmt: skip
counts_lists = st.lists(st.integers(0, 9), max_size=12)


def numbers(total, dtype=torch.int32):
    return (torch.arange(total) % 100 + 1).to(dtype)


def padded_list(values, counts, width, fill):
    rows, at = [], 0
    for count in counts:
        row = values[at : at + count][:width]
        rows.append(row + [fill] * (width - len(row)))
        at += count
    return rows


@given(counts=counts_lists, extra=st.integers(0, 3), fill=st.sampled_from([-1, 0, 7]))
def test_table_is_the_padded_lists(counts, extra, fill):
    values = numbers(sum(counts))
    width = max(counts, default=0) + extra
    table = pad_ragged(values, counts, width, fill)
    assert table.shape == (len(counts), width)
    assert table.dtype == torch.int32
    assert table.tolist() == padded_list(values.tolist(), counts, width, fill)


@given(counts=counts_lists, multiple_of=st.integers(1, 5))
def test_default_width_is_the_widest_row_rounded_up(counts, multiple_of):
    values = numbers(sum(counts))
    width = -(-max(counts, default=0) // multiple_of) * multiple_of
    table = pad_ragged(values, torch.tensor(counts, dtype=torch.int32), multiple_of=multiple_of)
    assert table.shape == (len(counts), width)
    assert table.tolist() == padded_list(values.tolist(), counts, width, -1)


@given(counts=counts_lists, width=st.integers(0, 9))
def test_truncate_drops_what_is_beyond_the_width(counts, width):
    values = numbers(sum(counts))
    table = pad_ragged(values, counts, width, truncate=True)
    assert table.tolist() == padded_list(values.tolist(), counts, width, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_dtype_and_trailing_shape_are_kept(dtype, shape):
    values = (torch.arange(4 * int(np.prod(shape))) % 2).reshape(4, *shape).to(dtype)
    table = pad_ragged(values, [3, 0, 1], fill=0)
    assert (table.dtype, table.shape) == (dtype, (3, 3, *shape))
    zero = torch.zeros(shape).to(dtype).tolist()
    whole = values.tolist()
    assert table.tolist() == [whole[:3], [zero] * 3, [whole[3], zero, zero]]
    buckets = pad_buckets(values, [3, 0, 1], fill=0)
    assert [(rows.tolist(), part.tolist()) for rows, part in buckets] == [
        ([2], [[whole[3]]]),
        ([0], [[*whole[:3], zero]]),
    ]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint32, np.int64])
def test_narrow_counts_do_not_overflow(kind):
    """pytorch/pytorch#129191: nothing is computed in the type of the counts."""
    counts = np.full(300, 120, kind)
    table = pad_ragged(numbers(300 * 120), counts)
    assert table[299, 119] == numbers(300 * 120)[-1]
    assert torch.equal(table.reshape(-1), numbers(300 * 120))
    assert torch.equal(pad_ragged(numbers(300 * 120), torch.from_numpy(counts)), table)


def test_slots_of_a_table_beyond_int32():
    """pytorch/pytorch#129191: a table of more than 2^31 slots is addressed right.

    The table itself would take gigabytes; only the slots of its values are computed.
    """
    counts = torch.zeros(5000, dtype=torch.int32)
    counts[[1, 4999]] = torch.tensor([2, 3], dtype=torch.int32)
    width = 1 << 20
    slots = pad_module.slot_index(counts, width, 5)
    assert slots.tolist() == [width, width + 1, *(4999 * width + n for n in range(3))]
    assert 4999 * width > 2**31


@given(counts=counts_lists)
def test_buckets_hold_every_row_once_at_most_half_empty(counts):
    values = numbers(sum(counts))
    expected = padded_list(values.tolist(), counts, 16, -1)
    seen = []
    for rows, table in pad_buckets(values, counts):
        width = table.shape[1]
        assert width & (width - 1) == 0
        assert rows.tolist() == sorted(rows.tolist())
        for row, cells in zip(rows.tolist(), table.tolist(), strict=True):
            assert width // 2 < counts[row] <= width
            assert cells == expected[row][:width]
            seen.append(row)
    assert sorted(seen) == [row for row, count in enumerate(counts) if count]
    pairs = [(table.shape[1], rows.tolist()) for rows, table in pad_buckets(values, counts)]
    assert pairs == [(width, rows.tolist()) for width, rows in width_buckets(counts)]


@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=12))
def test_order_on_the_device_is_the_order_on_the_host(counts):
    on_host = [row for _, rows in width_buckets(counts) for row in rows.tolist()]
    buckets = max(max(counts) - 1, 0).bit_length() + 1
    order = pad_module.device_order(torch.tensor(counts), buckets).tolist()
    assert order == on_host + [row for row, count in enumerate(counts) if not count]


@given(counts=counts_lists, rows=st.integers(1, 5))
def test_chunks_are_parts_of_the_table_no_wider_than_needed(counts, rows):
    values = numbers(sum(counts))
    expected = padded_list(values.tolist(), counts, 9, -1)
    covered = 0
    for start, stop, table in pad_chunks(values, counts, rows):
        assert start == covered
        assert stop - start <= rows
        assert table.shape == (stop - start, max(counts[start:stop]))
        assert table.tolist() == [row[: table.shape[1]] for row in expected[start:stop]]
        covered = stop
    assert covered == len(counts)


def test_equal_lengths_and_single_rows_give_the_same_kind_of_table():
    """verl-project/verl#6407, verl-project/verl#6073."""
    assert pad_ragged(numbers(6), [3, 3]).shape == (2, 3)
    assert pad_ragged(numbers(3), [3]).shape == (1, 3)
    assert pad_ragged(numbers(0), []).shape == (0, 0)
    assert pad_ragged(numbers(0), [0, 0]).shape == (2, 0)
    assert len(pad_buckets(numbers(0), [0, 0])) == 0
    assert [type(part) for part in pad_buckets(numbers(3), [3])[0]] == [Tensor, Tensor]


def test_values_keep_their_gradient():
    values = torch.rand(6, dtype=torch.float64, requires_grad=True)
    counts = [2, 0, 4]
    assert torch.autograd.gradcheck(lambda v: pad_ragged(v, counts, 5, 0.5), values)
    assert torch.autograd.gradcheck(lambda v: pad_ragged(v, counts, 1, truncate=True), values)
    assert torch.autograd.gradcheck(lambda v: pad_buckets(v, counts)[1][1], values)
    assert torch.autograd.gradcheck(lambda v: list(pad_chunks(v, counts, 2))[1][2], values)


def test_padded_log_probs_have_finite_gradients_in_a_reverse_kl():
    """huggingface/trl#5594: padding by -inf gave NaN gradients at unequal lengths."""
    counts = [3, 1]
    teacher = torch.log(torch.tensor([0.5, 0.3, 0.2, 1.0]))
    student = torch.zeros(4, requires_grad=True)

    def gradient(fill):
        q = pad_ragged(teacher, counts, fill=fill)
        p = torch.log_softmax(pad_ragged(student, counts, fill=fill), -1)
        (grad,) = torch.autograd.grad((p.exp() * (p - q)).sum(), student)
        return grad

    assert torch.isfinite(gradient(LOG_PROB_FILL)).all()
    assert torch.isnan(gradient(float("-inf"))).any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend):
    def table(values, counts):
        return pad_ragged(values * 2, counts, 4).sum(1)

    compiled = torch.compile(table, fullgraph=True, backend=backend)
    values, counts = numbers(5), torch.tensor([1, 0, 4])
    assert compiled(values, counts).tolist() == table(values, counts).tolist()
    torch.compiler.reset()


def test_nothing_waits_for_the_device():
    """Tensors on the meta device have no values, so whatever asks for one fails."""
    host = np.array([1, 5, 0, 2])
    values, counts = torch.empty(8, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    assert pad_ragged(values, counts, 6).shape == (4, 6)
    assert pad_ragged(values, counts, 3, truncate=True).shape == (4, 3)
    assert pad_ragged(values, counts, host_counts=host).shape == (4, 5)
    shapes = [(rows.shape, table.shape) for rows, table in pad_buckets(
        values, counts, host_counts=host)]  # fmt: skip
    assert shapes == [((1,), (1, 1)), ((1,), (1, 2)), ((1,), (1, 8))]
    chunks = list(pad_chunks(values, counts, 3, host_counts=host))
    assert [table.shape for _, _, table in chunks] == [(3, 5), (1, 2)]
    with pytest.raises(NotImplementedError, match="meta"):
        pad_ragged(values, counts)


def test_counts_known_to_the_device_only_are_checked_there(monkeypatch):
    monkeypatch.setattr(pad_module, "_host", lambda counts: None)
    values = numbers(3)
    assert pad_ragged(values, [1, 2], 2).tolist() == [[1, -1], [2, 3]]
    assert pad_ragged(values, [1, 2], 1, truncate=True).tolist() == [[1], [2]]
    with pytest.raises(RuntimeError, match="exceeds the width"):
        pad_ragged(values, [1, 2], 1)
    assert pad_ragged(values, [1, 2]).shape == (2, 2)
    assert len(pad_buckets(values, [1, 2])) == 2
    assert len(list(pad_chunks(values, [1, 2], 1))) == 2
    with pytest.raises(SchemaMismatchError, match="on the host"):
        width_buckets([1])


def test_a_row_wider_than_the_width_is_an_error():
    """verl-project/verl#7514: valid tokens are never cut silently."""
    with pytest.raises(LimitExceededError) as caught:
        pad_ragged(numbers(5), [1, 4], 3)
    assert (caught.value.code, caught.value.where.position) == ("RF-L001", 1)
    assert "truncate=True" in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "code"), [([1, -1, 3], "RF-I004"), ([1, 1], "RF-I005"), ([2, 2], "RF-I005")]
)
def test_impossible_counts(counts, code):
    for pad in (pad_ragged, pad_buckets, lambda v, c: pad_chunks(v, c, 1)):
        with pytest.raises(InvariantError) as caught:
            pad(numbers(3), counts)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"width": -1}, LimitExceededError),
        ({"multiple_of": 0}, LimitExceededError),
        ({"fill": 0.5}, LimitExceededError),
        ({"fill": 2**31}, LimitExceededError),
        ({"counts": [1.0, 2.0]}, SchemaMismatchError),
        ({"counts": [[1, 2]]}, SchemaMismatchError),
    ],
)
def test_impossible_arguments(arguments, error):
    with pytest.raises(error):
        pad_ragged(**{"values": numbers(3), "counts": [1, 2], **arguments})


@pytest.mark.parametrize(
    ("dtype", "fill", "range_text"),
    [
        (torch.uint8, -1, "[0, 255]"),
        (torch.int8, 200, "[-128, 127]"),
        (torch.bool, -1, "[0, 1]"),
        (torch.float16, 1e6, "65504"),
        (torch.int32, float("nan"), "[-2147483648, 2147483647]"),
    ],
)
def test_a_fill_that_the_type_cannot_hold_names_its_range(dtype, fill, range_text):
    with pytest.raises(LimitExceededError, match="cannot hold the fill") as caught:
        pad_ragged(numbers(3, dtype), [1, 2], fill=fill)
    assert range_text in str(caught.value)


@pytest.mark.parametrize("fill", [float("-inf"), float("nan"), -1, 0.5])
def test_floats_take_any_fill(fill):
    table = pad_ragged(torch.ones(3, dtype=torch.float16), [1, 2], fill=fill)
    assert table.dtype == torch.float16
    assert str(table[0, 1].item()) == str(float(fill))


def test_a_chunk_has_rows():
    with pytest.raises(LimitExceededError):
        pad_chunks(numbers(3), [1, 2], 0)
