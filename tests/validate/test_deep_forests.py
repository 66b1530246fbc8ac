"""Forests of a hundred thousand nodes: what walks paths would not end within the time limit."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forests import preorder_parents

import ragged_format as rf
from ragged_format.forest_index import ForestIndex

SIZE = 100_000
SCHEMA = rf.packed_schema(vocab_size=SIZE, columns=[])


def packed(parents, leaves, lengths, pred, member):
    """Return one record of nodes of one token each, its token ids all different."""
    size = len(parents)
    positions = np.asarray(lengths)[np.argsort(leaves)] - 1 if len(leaves) == size else None
    values = {
        "input_ids": np.arange(size), "position_ids": positions, "node_lengths": np.ones(size),
        "node_parents": parents, "pred_index": pred, "target_ids": pred + 1,
        "member_index": member, "member_leaf": leaves, "member_lengths": lengths,
    }  # fmt: skip
    arrays = []
    for field in SCHEMA:
        if field.name == "member_sample_id":
            items = pa.array([f"{i}" for i in range(len(leaves))])
        else:
            items = pa.array(np.asarray(values[field.name]).astype(np.int32))
        offsets = pa.array([0, len(items)], pa.int64())
        arrays.append(pa.LargeListArray.from_arrays(offsets, items, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


@pytest.mark.timeout(20)
def test_one_chain_with_a_member_at_every_node():
    nodes = np.arange(SIZE)
    data = packed(nodes - 1, nodes, nodes + 1, nodes[:-1], nodes[1:])
    rf.validate(data)
    broken = data.set_column(
        SCHEMA.get_field_index("pred_index"), SCHEMA.field("pred_index"),
        pa.array([[*range(SIZE - 2), SIZE - 1]], SCHEMA.field("pred_index").type),
    )  # fmt: skip
    with pytest.raises(rf.InvariantError) as info:
        rf.validate(broken)
    assert (info.value.code, info.value.where.position) == ("RF-I039", SIZE - 2)


@pytest.mark.timeout(20)
def test_many_roots():
    nodes, none = np.arange(SIZE), np.zeros(0, np.int64)
    rf.validate(packed(np.full(SIZE, -1), nodes, np.ones(SIZE), none, none))


@st.composite
def forests(draw):
    """Draw (lengths, parents, offsets) of several records."""
    records = [
        preorder_parents(draw, draw(st.integers(0, 8))) for _ in range(draw(st.integers(0, 4)))
    ]
    lengths = [draw(st.integers(1, 3)) for record in records for _ in record]
    offsets = np.cumsum([0, *map(len, records)])
    return (
        np.array(lengths, np.int64),
        np.array([parent for record in records for parent in record], np.int64),
        offsets,
    )


@given(forests())
def test_index_against_walking(forest):
    lengths, parents, offsets = forest
    index = ForestIndex(lengths, parents, offsets)
    start = {node: int(first) for first, last in pairwise(offsets)
             for node in range(first, last)}  # fmt: skip
    for node in range(len(parents)):
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(int(parents[path[-1]]) + start[node])
        assert index.levels[node] == len(path) - 1
        assert index.depths[node] == sum(lengths[above] for above in path[1:])
        found = index.ancestors(np.full(len(path), node), np.arange(len(path)))
        assert found.tolist() == path[::-1]
    assert index.in_preorder().all()
    owners = np.repeat(np.arange(len(lengths)), lengths)
    assert index.nodes_of(np.arange(lengths.sum())).tolist() == owners.tolist()


@given(st.lists(st.integers(-1, 6), max_size=7))
def test_preorder_against_a_stack(wanted):
    parents = [min(parent, node - 1) for node, parent in enumerate(wanted)]
    path, valid = [], True
    for node, parent in enumerate(parents):
        if parent >= 0 and parent not in path:
            valid = False
            break
        path = path[: path.index(parent) + 1] if parent >= 0 else []
        path.append(node)
    index = ForestIndex(
        np.ones(len(parents), np.int64), np.array(parents, np.int64), np.array([0, len(parents)])
    )
    in_order = index.in_preorder()
    assert in_order.all() == valid
    if not valid:
        assert int(np.argmin(in_order)) == node


def test_ancestors_in_an_empty_forest():
    none = np.zeros(0, np.int64)
    index = ForestIndex(none, none, np.zeros(1, np.int64))
    assert index.ancestors(np.array([-1, 0]), np.array([0, 3])).tolist() == [-1, -1]
