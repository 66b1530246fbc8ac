"""The installed trl and ours pack the same targets, sets and heads (needs the bench group)."""

import numpy as np
import pytest

from benchmarks import pack, shapes
from benchmarks.reference import queue, rows
from ragged_format.lists import flat
from ragged_format.packing import pack_row

pytestmark = [
    pytest.mark.bench,
    # Importing trl brings in libraries that warn.
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("generate", [shapes.agent, shapes.multi_turn])
def test_both_pack_the_same_row(generate):
    rollouts = generate()
    batch = shapes.to_arrow(rollouts)
    tree_row = rows.tree_row_class()
    after = rows.pack_row(queue.queue_samples(rollouts, "arrays"), tree_row, "after")
    before = rows.pack_row(queue.queue_samples(rollouts, "dicts"), tree_row, "before")
    pack.check_same(batch, after)
    row = pack_row(batch, packing="tree", fork="transition")
    column = {
        name: flat(row.column(name)).numpy().tolist()
        for name in ("candidate_ids", "candidate_counts", "topk_ids", "topk_counts",
                     "topk_log_probs")
    }  # fmt: skip
    candidate = head = 0
    for target, position in enumerate(after["token_index"].tolist()):
        width, size = column["candidate_counts"][target], column["topk_counts"][target]
        dense = before["sampling_mask"][position]
        assert dense[dense >= 0].tolist() == column["candidate_ids"][candidate : candidate + width]
        for tables in (before, after):
            assert (
                tables["topk_ids"][position, :size].tolist()
                == (column["topk_ids"][head : head + size])
            )
            assert np.array_equal(
                tables["topk_log_probs"][position, :size].numpy(),
                np.float32(column["topk_log_probs"][head : head + size]),
            )
        candidate, head = candidate + width, head + size


def test_published_sizes_of_the_row_are_reached():
    rollouts = shapes.agent()
    tree_row = rows.tree_row_class()
    after = rows.pack_row(queue.queue_samples(rollouts, "arrays"), tree_row, "after")
    before = rows.pack_row(queue.queue_samples(rollouts, "dicts"), tree_row, "before")
    assert len(after["input_ids"]) == 9_207
    assert len(after["tree_kv_index"]) == pytest.approx(57_200, rel=0.01)
    assert rows.row_bytes(after) / 1e6 == pytest.approx(3.12, rel=0.03)
    assert rows.row_bytes(before) / 1e6 == pytest.approx(39.7, rel=0.03)
