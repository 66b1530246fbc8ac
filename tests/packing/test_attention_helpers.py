"""Every form of the attention rule states the same relation."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefix_trie import ancestors, batch_of, sharing_samples, structure

import ragged_format as rf
from ragged_format.packing import pack_row
from ragged_format.packing.attention import (
    attention_mask,
    cu_seqlens,
    label_ids,
    pred_order,
    tree_leave,
    varlen_index,
)

WAYS = st.sampled_from([("tree", "token"), ("tree", "transition"), ("sequence", "token")])


def dense(row):
    shown = structure(row)
    mask = np.zeros((len(shown["input_ids"]),) * 2, bool)
    for query, keys in enumerate(ancestors(shown)):
        mask[query, keys] = True
    return mask


@given(samples=sharing_samples(), way=WAYS)
def test_the_dense_mask_is_the_ancestor_relation(samples, way):
    row = pack_row(batch_of(samples), *way)
    mask = attention_mask(row)
    assert (mask == dense(row)).all()
    assert mask.sum(axis=1).tolist() == [p + 1 for p in structure(row)["position_ids"]]


@given(samples=sharing_samples(), way=WAYS)
def test_the_mask_is_the_relation_of_prefixes(samples, way):
    """A token sees another iff that one begins the same way, as far as it goes, and is shared."""
    row = pack_row(batch_of(samples), *way)
    shown, mask = structure(row), attention_mask(row)
    contexts = [[shown["input_ids"][k] for k in np.flatnonzero(seen)] for seen in mask]
    for query, seen in enumerate(mask):
        for key in np.flatnonzero(seen):
            assert contexts[query][: len(contexts[key])] == contexts[key]
    if way == ("tree", "token"):
        for query, context in enumerate(contexts):
            same = [k for k, c in enumerate(contexts) if context[: len(c)] == c]
            assert same == np.flatnonzero(mask[query]).tolist()


@given(samples=sharing_samples(), way=WAYS)
def test_stamps_say_who_sees_whom(samples, way):
    row = pack_row(batch_of(samples), *way)
    leave = tree_leave(row)
    assert leave.dtype == np.int32
    enter = np.arange(len(leave))
    sees = (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])
    assert (sees == dense(row)).all()


@given(samples=sharing_samples(), way=WAYS)
def test_the_varlen_index_gathers_what_each_node_sees(samples, way):
    row = pack_row(batch_of(samples), *way)
    index = varlen_index(row)
    mask = np.zeros_like(dense(row))
    longest = [0, 0]
    bounds = zip(
        index.cu_seqlens_q, index.cu_seqlens_q[1:], index.cu_seqlens_k, index.cu_seqlens_k[1:],
        strict=False,
    )  # fmt: skip
    for q0, q1, k0, k1 in bounds:
        keys = index.kv_index[k0:k1]
        longest = [max(longest[0], q1 - q0), max(longest[1], k1 - k0)]
        for query in range(q0, q1):
            # Bottom-right aligned causal: the last query sees all keys.
            mask[query, keys[: len(keys) - (q1 - 1 - query)]] = True
    assert (mask == dense(row)).all()
    assert longest == [index.max_seqlen_q, index.max_seqlen_k]
    dtypes = (index.kv_index.dtype, index.cu_seqlens_q.dtype, index.cu_seqlens_k.dtype)
    assert dtypes == (np.int64, np.int32, np.int32)


@given(samples=sharing_samples())
def test_sequences_have_bounds(samples):
    """NVIDIA-NeMo/RL#2105: bounds exist for every member, so that attention stays inside."""
    row = pack_row(batch_of(samples), "sequence")
    bounds = cu_seqlens(row)
    lengths = [len(s["tokens"]) for s in samples if any(s["mask"])]
    assert bounds.dtype == np.int32
    assert np.diff(bounds).tolist() == lengths
    mask = dense(row)
    for start, end in pairwise(bounds):
        assert not mask[start:end, :start].any()
        assert not mask[start:end, end:].any()


@pytest.mark.parametrize("other", [[1, 3], [1, 2]], ids=["fork", "equal"])
def test_members_that_share_tokens_have_no_bounds(other):
    samples = [{"tokens": [1, 2], "mask": [0, 1]}, {"tokens": other, "mask": [0, 1]}]
    with pytest.raises(rf.PackingError, match="share tokens") as caught:
        cu_seqlens(pack_row(batch_of(samples)))
    assert "varlen_index" in caught.value.remedy


@given(samples=sharing_samples())
def test_each_position_of_a_transition_row_has_one_label(samples):
    row = pack_row(batch_of(samples), fork="transition")
    labels = label_ids(row)
    shown = structure(row)
    expected = dict(zip(shown["pred_index"], shown["target_ids"], strict=True))
    assert labels.tolist() == [expected.get(i, -100) for i in range(len(labels))]
    assert (label_ids(row, ignored=-1) == np.where(labels == -100, -1, labels)).all()


@given(samples=sharing_samples())
def test_a_position_with_several_labels_is_an_error(samples):
    row = pack_row(batch_of(samples))
    shown = structure(row)
    labels = {}
    for pred, target in zip(shown["pred_index"], shown["target_ids"], strict=True):
        labels.setdefault(pred, set()).add(target)
    if all(len(options) == 1 for options in labels.values()):
        assert set(np.flatnonzero(label_ids(row) >= 0)) == set(labels)
        return
    with pytest.raises(rf.PackingError, match="different tokens") as caught:
        label_ids(row)
    position = caught.value.where.position
    assert caught.value.got == sorted(labels[position])
    assert len(labels[position]) > 1


@given(samples=sharing_samples())
def test_targets_in_order_of_their_positions(samples):
    row = pack_row(batch_of(samples))
    pred = np.array(structure(row)["pred_index"], int)
    order = pred_order(row)
    assert sorted(order.tolist()) == list(range(len(pred)))
    keys = list(zip(pred[order].tolist(), order.tolist(), strict=True))
    assert keys == sorted(keys)


def test_helpers_take_one_packed_row():
    samples = batch_of([{"tokens": [1, 2], "mask": [0, 1]}])
    row = pack_row(samples)
    with pytest.raises(rf.SchemaMismatchError, match="packed row"):
        tree_leave(samples)
    with pytest.raises(rf.PackingError, match="one row at a time"):
        label_ids(rf.concat([row, row]))
