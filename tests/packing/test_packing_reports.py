"""Guards against public reports of packing that mixed or lost samples."""

from itertools import pairwise

import numpy as np
from support.prefix_trie import batch_of, structure

from ragged_format.lists import flat, to_numpy
from ragged_format.packing import pack_row, plan_rows
from ragged_format.packing.attention import attention_mask, cu_seqlens

SHORT = [
    {"tokens": [1, 2, 3], "mask": [0, 1, 1]},
    {"tokens": [4, 5], "mask": [0, 1]},
    {"tokens": [1, 6, 7, 8], "mask": [0, 0, 1, 1]},
]


def test_boundaries_of_packed_samples_are_part_of_the_row():
    """NVIDIA-NeMo/RL#2105: without cu_seqlens, attention ran across packed samples."""
    row = pack_row(batch_of(SHORT), "sequence")
    assert structure(row)["node_lengths"] == [3, 2, 4]
    assert cu_seqlens(row).tolist() == [0, 3, 5, 9]
    assert all(name in row.schema.names for name in ("node_lengths", "node_parents"))


def test_packed_samples_do_not_see_each_other():
    """huggingface/trl#1230: packed samples attended to the ones before them."""
    row = pack_row(batch_of(SHORT), "sequence")
    mask = attention_mask(row)
    expected = np.zeros((9, 9), bool)
    for start, end in pairwise(cu_seqlens(row)):
        expected[start:end, start:end] = np.tri(end - start, dtype=bool)
    assert (mask == expected).all()


def test_positions_start_anew_for_each_sample():
    """huggingface/trl#3526: position ids ran on across packed samples."""
    row = pack_row(batch_of(SHORT), "sequence")
    assert structure(row)["position_ids"] == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    # In a tree a branch goes on from the depth where it left.
    assert structure(pack_row(batch_of(SHORT)))["position_ids"] == [0, 1, 2, 1, 2, 3, 0, 1]


def test_no_token_is_cut_off_to_fit():
    """huggingface/trl#3910: packing truncated samples that crossed the end of a row."""
    plan = plan_rows(batch_of(SHORT), 4, packing="sequence")
    assert sorted(row.tolist() for row in plan.rows) == [[0], [1], [2]]
    for row in plan.rows:
        packed = pack_row(batch_of([SHORT[i] for i in row]), "sequence")
        tokens = [token for i in row for token in SHORT[i]["tokens"]]
        assert structure(packed)["input_ids"] == tokens


def test_a_sample_is_never_divided_between_rows():
    """huggingface/trl#4170: packing put the end of one sample at the start of the next row."""
    plan = plan_rows(batch_of(SHORT), 3, packing="sequence")
    assert plan.oversize.tolist() == [2]
    assert sorted(i for row in plan.rows for i in row.tolist()) == [0, 1]


def test_a_mask_belongs_to_its_own_target():
    """Sets hang on targets: samples that share a scored token keep a set each."""
    shared = [{"tokens": [1, 2], "mask": [0, 1]}] * 2
    row = pack_row(batch_of(shared, candidate_counts=[[1], [2]], candidate_ids=[[2], [2, 9]]))
    assert structure(row)["input_ids"] == [1, 2]
    assert to_numpy(flat(row.column("candidate_counts")).values).tolist() == [1, 2]
    assert to_numpy(flat(row.column("candidate_ids")).values).tolist() == [2, 2, 9]
