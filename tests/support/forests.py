"""Random valid packed records, built in plain Python from a random tree."""

from itertools import pairwise

import pyarrow as pa
from hypothesis import strategies as st

import ragged_format as rf

SCHEMA = rf.packed_schema(
    vocab_size=64,
    columns=["rollout_log_probs", "candidate_counts", "candidate_ids", "member_reward"],
)


@st.composite
def packed_records(draw, max_rows=3, max_nodes=6):
    """Draw a batch of packed records whose members share prefixes in any way."""
    rows = draw(st.integers(0, max_rows))
    records = [_record(draw, f"r{row}", max_nodes) for row in range(rows)]
    return pa.RecordBatch.from_pylist(records, schema=SCHEMA)


def _record(draw, name, max_nodes):
    parents = preorder_parents(draw, draw(st.integers(0, max_nodes)))
    lengths = [draw(st.integers(1, 3)) for _ in parents]
    tokens = [draw(st.integers(0, 3)) for _ in range(sum(lengths))]
    paths, start = [], 0
    for parent, length in zip(parents, lengths, strict=True):
        paths.append((paths[parent] if parent >= 0 else []) + list(range(start, start + length)))
        start += length
    leaves = [node for node in range(len(parents)) if node not in parents]
    extra = draw(st.lists(st.sampled_from(range(len(parents))), max_size=2)) if parents else []
    leaves = draw(st.permutations(leaves + extra))
    depths = {token: depth for path in paths for depth, token in enumerate(path)}
    record = {
        "input_ids": tokens, "position_ids": [depths[token] for token in range(len(tokens))],
        "node_lengths": lengths, "node_parents": parents,
        "pred_index": [], "target_ids": [], "member_index": [], "rollout_log_probs": [],
        "candidate_counts": [], "candidate_ids": [],
        "member_sample_id": [f"{name}-{i}" for i in range(len(leaves))],
        "member_reward": [draw(st.sampled_from([None, 0.5])) for _ in leaves],
        "member_leaf": leaves, "member_lengths": [len(paths[leaf]) for leaf in leaves],
    }  # fmt: skip
    for member, leaf in enumerate(leaves):
        path = paths[leaf]
        for here, after in pairwise(path):
            if draw(st.booleans()):
                candidates = sorted({tokens[after], 40}) if draw(st.booleans()) else []
                record["pred_index"].append(here)
                record["target_ids"].append(tokens[after])
                record["member_index"].append(member)
                record["rollout_log_probs"].append(-0.5)
                record["candidate_counts"].append(len(candidates))
                record["candidate_ids"].extend(candidates)
    return record


def preorder_parents(draw, nodes):
    """Draw the parents of a forest in depth-first preorder."""
    parents, path = [], []
    for node in range(nodes):
        keep = draw(st.integers(0, len(path)))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents
