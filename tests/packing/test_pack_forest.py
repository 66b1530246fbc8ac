"""The structure of packed rows against a trie that is built token by token."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.prefix_trie import (
    SCHEMA,
    ancestors,
    batch_of,
    packed_by_trie,
    random_samples,
    sharing_samples,
    structure,
    targets_of,
)

import ragged_format as rf
from ragged_format.packing import PackReport, pack_row
from ragged_format.packing.forest import Keys, chains, common_prefixes, grow
from ragged_format.testing import variants
from ragged_format.validate import validate

FORKS = ("token", "transition")
WAYS = [("tree", "token"), ("tree", "transition"), ("sequence", "token")]


def sample(*tokens, context=1):
    return {"tokens": list(tokens), "mask": [int(i >= context) for i in range(len(tokens))]}


NESTED = [sample(*([1] * length)) for length in (2, 4, 3, 2, 5)]


@pytest.mark.parametrize(("packing", "fork"), WAYS)
@given(samples=sharing_samples())
@example(samples=[])
@example(samples=NESTED)
@example(samples=[sample(1, 2, 3)] * 3)
@example(samples=[sample(1, 2), sample(1, 2, 1), sample(1, 2)])
@example(samples=[sample(1), sample(1, 1)])
def test_rows_are_those_of_the_trie(packing, fork, samples):
    row = pack_row(batch_of(samples), packing, fork)
    validate(row)
    assert structure(row) == packed_by_trie(samples, packing, fork)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("packing", "fork"), WAYS)
def test_larger_rows_are_those_of_the_trie(packing, fork, seed):
    samples = random_samples(np.random.default_rng(seed), 80, vocab=3)
    row = pack_row(batch_of(samples), packing, fork)
    assert structure(row) == packed_by_trie(samples, packing, fork)


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize(
    "samples",
    [
        [sample(*range(2, 2 + length)) for length in range(2, 14)] * 30,
        [sample(*([0] * length)) for length in range(400, 1, -1)],
        [sample(7, 8, 9)] * 300,
        [sample(i % 16, 1) for i in range(300)],
    ],
    ids=["each a prefix of the next", "nested, longest first", "equal", "two tokens"],
)
def test_many_samples_of_a_bad_shape(fork, samples):
    row = pack_row(batch_of(samples), fork=fork)
    assert structure(row) == packed_by_trie(samples, "tree", fork)


@given(samples=sharing_samples(), fork=st.sampled_from(FORKS))
def test_a_token_sees_its_ancestors_and_these_are_its_prefix(samples, fork):
    """huggingface/trl#1230, huggingface/trl#3526: nothing of another sample is seen."""
    row = structure(pack_row(batch_of(samples), fork=fork))
    seen = ancestors(row)
    assert [len(positions) - 1 for positions in seen] == row["position_ids"]
    kept = [s for s in samples if any(s["mask"])]
    scored = [(s, p) for s in kept for p, mark in enumerate(s["mask"]) if mark]
    for pred, (member, position) in zip(row["pred_index"], scored, strict=True):
        assert [row["input_ids"][i] for i in seen[pred]] == member["tokens"][:position]


@given(samples=sharing_samples())
def test_both_packings_give_the_same_targets_sets_and_ancestry(samples):
    batch = batch_of(samples)
    rows = [pack_row(batch, packing, fork) for packing, fork in WAYS]
    tree, transition, sequence = (targets_of(row, samples) for row in rows)
    assert tree == transition == sequence
    sizes = [len(structure(row)["input_ids"]) for row in rows]
    assert sizes[0] <= sizes[1] <= sizes[2]


@given(samples=sharing_samples(), seed=st.integers(0, 2**16), fork=st.sampled_from(FORKS))
def test_the_order_of_samples_changes_only_the_order(samples, seed, fork):
    batch = batch_of(samples)
    order = np.random.default_rng(seed).permutation(len(samples))
    shuffled = pack_row(rf.take(batch, order), fork=fork)
    row = pack_row(batch, fork=fork)
    assert sorted(targets_of(shuffled, samples)) == sorted(targets_of(row, samples))
    paths = [sorted(_contexts(structure(r))) for r in (row, shuffled)]
    assert paths[0] == paths[1]


def _contexts(row):
    return [[row["input_ids"][i] for i in positions] for positions in ancestors(row)]


@given(samples=sharing_samples(), fork=st.sampled_from(FORKS))
def test_the_physical_form_of_samples_does_not_matter(samples, fork):
    batch = batch_of(samples)
    expected = pack_row(batch, fork=fork)
    for name, variant in variants(batch, same_schema=True).items():
        assert pack_row(variant, fork=fork).equals(expected), name


@given(samples=sharing_samples(), fork=st.sampled_from(FORKS))
def test_sharing_within_groups_compares_the_group(samples, fork):
    groups = [["a", "b", None][len(s["tokens"]) % 3] for s in samples]
    row = pack_row(batch_of(samples, group_id=groups), fork=fork, within_group=True)
    # Samples without a group share with nobody.
    allowed = [i if group is None else group for i, group in enumerate(groups)]
    expected = packed_by_trie(samples, "tree", fork, lambda i, _: allowed[i])
    assert structure(row) == expected


def with_column(column):
    return rf.sample_schema(
        vocab_size=16, columns=[*(c for c in SCHEMA.names if c != "sample_id"), column]
    )


TOKEN_KEYS = {
    "int": (pa.int64(), (), [5, 5, 6]),
    "string": (pa.string(), (), ["x", "x", "yy"]),
    "shape": (pa.int16(), (2,), [[1, 2], [1, 2], [1, 3]]),
}


@pytest.mark.parametrize("kind", TOKEN_KEYS)
@given(samples=sharing_samples(vocab=2), fork=st.sampled_from(FORKS), seed=st.integers(0, 99))
def test_token_share_keys_are_compared_elementwise(kind, samples, fork, seed):
    type_, shape, choices = TOKEN_KEYS[kind]
    schema = with_column(rf.Column("image", "token", type_, shape, share_key=True))
    rng = np.random.default_rng(seed)
    keys = [
        [choices[i] for i in rng.choice(3, len(s["tokens"]), p=[0.6, 0.2, 0.2])] for s in samples
    ]
    row = pack_row(batch_of(samples, schema, image=keys), fork=fork)
    keyed = [s | {"keys": [str(k) for k in ks]} for s, ks in zip(samples, keys, strict=True)]
    assert structure(row) == packed_by_trie(keyed, "tree", fork)
    # The keys of the row are those of its tokens.
    for sample_keys, route in zip(
        [ks for ks, s in zip(keys, samples, strict=True) if any(s["mask"])],
        _routes(structure(row)),
        strict=True,
    ):
        assert [row.column("image")[0].as_py()[i] for i in route] == sample_keys


def _routes(row):
    seen = ancestors(row)
    ends = np.cumsum(row["node_lengths"])
    return [seen[ends[leaf] - 1] for leaf in row["member_leaf"]]


RECORD_KEYS = {
    "string": rf.Column("adapter", "record", pa.string(), nullable=True, share_key=True),
    "number": rf.Column("adapter", "record", pa.int16(), nullable=True, share_key=True),
    "shape": rf.Column("adapter", "record", pa.uint8(), (2,), share_key=True),
}


@pytest.mark.parametrize("kind", RECORD_KEYS)
@given(samples=sharing_samples(), fork=st.sampled_from(FORKS))
def test_record_share_keys_are_compared_whole(kind, samples, fork):
    choices = {"string": ["x", None, ""], "number": [1, None, 2], "shape": [[1, 2], [1, 3], [1, 2]]}
    values = [choices[kind][len(s["tokens"]) % 3] for s in samples]
    row = pack_row(batch_of(samples, with_column(RECORD_KEYS[kind]), adapter=values), fork=fork)
    allowed = [i if value is None else str(value) for i, value in enumerate(values)]
    assert structure(row) == packed_by_trie(samples, "tree", fork, lambda i, _: allowed[i])


def test_two_share_keys_and_the_group_all_count():
    key = rf.Column("adapter", "record", pa.string(), nullable=True, share_key=True)
    other = replace(key, name="prompt_hash")
    schema = rf.sample_schema(vocab_size=16, columns=["group_id", key, other])
    samples = [sample(1, 2, 3)] * 5
    batch = batch_of(
        samples, schema, group_id=list("aaaab"), adapter=list("xxxyx"), prompt_hash=list("uuvuu")
    )
    assert structure(pack_row(batch, within_group=True))["node_parents"] == [-1] * 4
    assert structure(pack_row(batch))["node_parents"] == [-1] * 3


MEDIA = {
    "string": (
        rf.Column("images", "record", pa.string(), nullable=True, media=True),
        [None, "", "x"],
    ),
    "number": (
        rf.Column("images", "record", pa.int64(), nullable=True, media=True),
        [None, None, 0],
    ),
    "token": (rf.Column("images", "token", pa.int32(), fill=-1, media=True), [-1, -1, 4]),
    "target": (rf.Column("images", "frame", pa.float32(), media=True), [[], [], [0.0]]),
}


@pytest.mark.parametrize("kind", MEDIA)
@given(samples=sharing_samples(), fork=st.sampled_from(FORKS))
def test_records_with_media_share_nothing_without_a_key(kind, samples, fork):
    column, choices = MEDIA[kind]
    names = [c for c in SCHEMA.names if c != "sample_id"]
    schema = rf.sample_schema(vocab_size=16, columns=[*names, column], root_axes=["frame"])
    which = [len(s["tokens"]) % 3 for s in samples]
    values = [choices[w] for w in which]
    if column.axis == "token":
        values = [[v] * len(s["tokens"]) for v, s in zip(values, samples, strict=True)]
    row = pack_row(batch_of(samples, schema, images=values), fork=fork)
    alone = [w == 2 for w in which]
    expected = packed_by_trie(samples, "tree", fork, lambda i, _: i if alone[i] else "all")
    assert structure(row) == expected
    keyed = with_column(rf.Column("k", "record", pa.int8(), share_key=True))
    keyed = rf.sample_schema(
        vocab_size=16, columns=[*names, column, rf.parse_schema(keyed)["k"]], root_axes=["frame"]
    )
    row = pack_row(batch_of(samples, keyed, images=values, k=[0] * len(samples)), fork=fork)
    assert structure(row) == packed_by_trie(samples, "tree", fork)


def test_a_share_key_elsewhere_is_an_error():
    schema = with_column(rf.Column("k", "target", pa.int8(), share_key=True))
    with pytest.raises(rf.PackingError, match="token or the record axis"):
        pack_row(batch_of([sample(1, 2)], schema, k=[[1]]))


def test_groups_are_needed_to_share_within_them():
    batch = batch_of([sample(1, 2)], rf.sample_schema(vocab_size=16, columns=[]))
    with pytest.raises(rf.PackingError, match="know the groups"):
        pack_row(batch, within_group=True)


def test_a_packed_row_cannot_be_packed():
    with pytest.raises(rf.SchemaMismatchError, match="only samples"):
        pack_row(pack_row(batch_of([sample(1, 2)])))


@pytest.mark.parametrize("option", ["packing", "fork", "null_advantage"])
def test_an_unknown_choice_is_an_error(option):
    with pytest.raises(rf.PackingError, match=f"{option} has no such choice"):
        pack_row(batch_of([sample(1, 2)]), **{option: "best"})


def test_nothing_scored_gives_a_row_that_is_empty_on_every_axis():
    report = PackReport()
    row = pack_row(batch_of([{"tokens": [1, 2], "mask": [0, 0]}]), report=report)
    validate(row)
    assert set(map(len, structure(row).values())) == {0}
    assert row.column("member_sample_id").to_pylist() == [[]]
    assert (report.samples, report.kept, report.without_target) == (1, 0, 1)


def test_grow_needs_no_token_axis():
    tokens = np.array([1, 2, 3, 1, 2, 9, 4], np.int32)
    order, shared = common_prefixes(Keys(tokens, tokens), [0, 3, 6], [3, 3, 1], "token")
    assert (order, shared) == ([0, 1, 2], [0, 2, 0])
    forest = grow(order, shared, [3, 3, 1])
    assert forest.node_parents.tolist() == [-1, 0, 0, -1]
    assert forest.leaves.tolist() == [1, 2, 3]
    assert common_prefixes(Keys(tokens, tokens), [0, 0], [0, 3], "token")[1] == [0, 0]
    assert chains([]).leaves.tolist() == []
