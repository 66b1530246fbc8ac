"""Packing in plain Python, one trie node per token, and samples that share prefixes heavily.

Independent of the library: :func:`packed_by_trie` states what a packed row is, token by token.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

import ragged_format as rf

END = "end of sample"


@dataclass
class Node:
    token: object
    depth: int
    parent: "Node | None"
    children: dict = field(default_factory=dict)
    ends: bool = False
    position: int = -1  # packed position
    chain: int = -1  # number of its unary chain


def packed_by_trie(samples, packing, fork, shareable=lambda index, sample: "all"):
    """Return the structure of the row that samples give.

    Parameters
    ----------
    samples : list of dict
        ``tokens``, ``mask`` and optionally ``keys`` (per token), all lists.
    packing, fork : str
        As in ``pack_row``.
    shareable : callable
        From index and sample to a value that is equal where samples may share.
    """
    kept = [(i, sample) for i, sample in enumerate(samples) if any(sample["mask"])]
    roots, routes = {}, []
    for index, sample in kept:
        tokens = sample["tokens"]
        keys = sample.get("keys") or [None] * len(tokens)
        part = index if packing == "sequence" else ("shared", shareable(index, sample))
        level, parent, route = roots, None, []
        for position, token in enumerate(tokens):
            following = tokens[position + 1] if position + 1 < len(tokens) else END
            key = (token, keys[position])
            if fork == "transition":
                key += (following,)
            if parent is None:
                key += (part,)
            if key not in level:
                level[key] = Node(token, position, parent)
            parent = level[key]
            route.append(parent)
            level = parent.children
        parent.ends = True
        routes.append(route)
    order = []
    todo = list(reversed(roots.values()))
    while todo:
        node = todo.pop()
        node.position = len(order)
        order.append(node)
        todo.extend(reversed(node.children.values()))
    chain_lengths, chain_parents = [], []
    for node in order:
        above = node.parent
        if above is not None and len(above.children) == 1 and not above.ends:
            node.chain = above.chain
            chain_lengths[node.chain] += 1
        else:
            node.chain = len(chain_lengths)
            chain_lengths.append(1)
            chain_parents.append(-1 if above is None else above.chain)
    pred, target, member = [], [], []
    for number, (route, (_, sample)) in enumerate(zip(routes, kept, strict=True)):
        for position, scored in enumerate(sample["mask"]):
            if scored:
                pred.append(route[position - 1].position)
                target.append(sample["tokens"][position])
                member.append(number)
    return {
        "input_ids": [node.token for node in order],
        "position_ids": [node.depth for node in order],
        "node_lengths": chain_lengths,
        "node_parents": chain_parents,
        "pred_index": pred,
        "target_ids": target,
        "member_index": member,
        "member_leaf": [route[-1].chain for route in routes],
        "member_lengths": [len(route) for route in routes],
    }


def ancestors(row):
    """Return the packed positions that each token sees, from node lengths and parents alone."""
    seen, ends = [], []
    for length, parent in zip(row["node_lengths"], row["node_parents"], strict=True):
        above = [] if parent < 0 else seen[ends[parent] - 1]
        for _ in range(length):
            above = [*above, len(seen)]
            seen.append(above)
        ends.append(len(seen))
    return seen


def structure(row):
    """Return the structural columns of a packed one-record batch as lists."""
    names = (
        "input_ids", "position_ids", "node_lengths", "node_parents", "pred_index", "target_ids",
        "member_index", "member_leaf", "member_lengths",
    )  # fmt: skip
    assert row.num_rows == 1
    return {name: row.column(name)[0].as_py() for name in names}


@st.composite
def sharing_samples(draw, max_samples=9, max_length=9, vocab=3):
    """Draw samples most of which continue a prefix of an earlier one."""
    samples = []
    for _ in range(draw(st.integers(0, max_samples))):
        start = []
        if samples and draw(st.booleans()):
            earlier = draw(st.sampled_from(samples))["tokens"]
            start = earlier[: draw(st.integers(0, len(earlier)))]
        fresh = draw(st.lists(st.integers(0, vocab - 1), max_size=max_length - len(start)))
        tokens = start + fresh
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))]
        samples.append({"tokens": tokens, "mask": mask[: len(tokens)]})
    return samples


SCHEMA = rf.sample_schema(
    vocab_size=16,
    columns=["group_id", "advantage", "rollout_log_probs", "candidate_counts", "candidate_ids"],
)


def batch_of(samples, schema=SCHEMA, **columns):
    """Return samples as a batch; every scored token has values that tell it from all others.

    Further columns are given by name, as lists of Python values.
    """
    number = 0
    given = {"sample_id": [f"s{i}" for i in range(len(samples))]}
    given["input_ids"] = [sample["tokens"] for sample in samples]
    given["completion_mask"] = [sample["mask"] for sample in samples]
    given["group_id"] = [f"g{i % 2}" for i in range(len(samples))]
    given["advantage"] = [float(i) for i in range(len(samples))]
    for name in ("rollout_log_probs", "candidate_counts", "candidate_ids"):
        given[name] = []
    for sample in samples:
        scored = [
            token for token, mark in zip(sample["tokens"], sample["mask"], strict=True) if mark
        ]
        sets = [sorted({token, number % 7 + 3, number % 5 + 8}) for token in scored]
        given["rollout_log_probs"].append([-float(number + i) / 64 for i in range(len(scored))])
        given["candidate_counts"].append([len(ids) for ids in sets])
        given["candidate_ids"].append([token for ids in sets for token in ids])
        number += len(scored)
    given |= columns
    arrays = [pa.array(given[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def random_samples(rng, count, vocab=50, prompts=4, longest=40):
    """Return samples with a few common prompts, from a NumPy generator."""
    heads = [rng.integers(0, vocab, rng.integers(1, longest)).tolist() for _ in range(prompts)]
    out = []
    for _ in range(count):
        head = heads[rng.integers(prompts)]
        tail = rng.integers(0, vocab, rng.integers(1, longest)).tolist()
        out.append({"tokens": head + tail, "mask": [0] * len(head) + [1] * len(tail)})
    return out


def targets_of(row, samples):
    """Return each target of a packed row with its member, position, sets and what it sees."""
    row_lists = {name: row.column(name)[0].as_py() for name in row.schema.names}
    seen = ancestors(row_lists)
    ids = (
        np.split(
            np.array(row_lists["candidate_ids"], int), np.cumsum(row_lists["candidate_counts"])[:-1]
        )
        if row_lists["candidate_counts"]
        else []
    )
    out = []
    for i, pred in enumerate(row_lists["pred_index"]):
        member = row_lists["member_index"][i]
        context = [row_lists["input_ids"][position] for position in seen[pred]]
        out.append(
            (
                row_lists["member_sample_id"][member],
                len(context),
                row_lists["target_ids"][i],
                row_lists["rollout_log_probs"][i],
                ids[i].tolist(),
                context,
            )
        )
    return out
