"""The public generators give valid, deterministic data with the shapes that they promise."""

import contextlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import ragged_format as rf
import ragged_format.testing as generated
from ragged_format.lists import flat
from ragged_format.ragged import axis_view
from ragged_format.testing import (
    assert_ragged_equal,
    fill_batch,
    packed_batches,
    rollouts,
    sample_batches,
    schemas,
    variants,
)
from ragged_format.testing.generate import distinct_ids
from ragged_format.validate import validate


@given(batch=sample_batches())
def test_drawn_samples_are_valid(batch):
    validate(batch)


@given(batch=packed_batches())
def test_drawn_packed_rows_are_valid(batch):
    validate(batch)


@given(schema=schemas(own_columns=0))
def test_standard_schemas(schema):
    standard = rf.sample_schema(vocab_size=9).names
    more = {"token_offset", "topk_weights", "teacher_topk_weights"}
    assert set(schema.names) <= {*standard, *more}


def lengths(batch, axis="token"):
    return np.diff(axis_view(batch, axis).record_offsets).tolist()


def opens_below_own(schema):
    standard = {"record", "token", "target", "candidate", "topk", "teacher_topk", "draft"}
    return any(axis.parent not in standard for axis in schema.axes.values())


SCHEMA_KINDS = {
    "advantages float64": lambda s: s["advantages"].type == pa.float64(),
    "advantages float32": lambda s: s["advantages"].type == pa.float32(),
    "float16 head": lambda s: s["topk_log_probs"].type == pa.float16(),
    "float16 teacher head": lambda s: s["teacher_topk_log_probs"].type == pa.float16(),
    "draws": lambda s: "topk_weights" in s and s["topk_counts"].head_kind == "draws",
    "shape on the record": lambda s: any(c.shape and c.axis == "record" for c in s),
    "shape below": lambda s: any(c.shape and c.axis != "record" for c in s),
    "root axis": lambda s: "frame" in s.axes,
    "axis on an own axis": opens_below_own,
    "own mask": lambda s: any(c.mask and c.name != "completion_mask" for c in s),
    "own nullable": lambda s: any(c.nullable and c.name.startswith("own") for c in s),
    "own text below": lambda s: any(c.axis != "record" and c.type == pa.string() for c in s),
    "approximate": lambda s: any(c.approximate for c in s),
    "raw": lambda s: any(c.log_prob is not None and c.log_prob.mode == "raw" for c in s),
    "metadata": lambda s: bool(s.metadata),
    "own set": lambda s: s["draft_counts"].head_kind == "set",
    "own head": lambda s: s["draft_counts"].head_kind == "top_k",
    "own draws": lambda s: "draft_weights" in s,
    "tiny vocabulary": lambda s: s.vocab_size == 1,
}
BATCH_KINDS = {
    "empty": lambda b: b.num_rows == 0,
    "single": lambda b: b.num_rows == 1 and lengths(b) != [0],
    "some empty records": lambda b: 0 in lengths(b) and max(lengths(b)) > 0,
    "equal lengths": lambda b: b.num_rows > 2 and len(set(lengths(b))) == 1 and lengths(b)[0] > 1,
    "no targets": lambda b: max(lengths(b), default=0) > 1 and sum(lengths(b, "target")) == 0,
    "targets everywhere": lambda b: b.num_rows > 1 and min(lengths(b, "target")) > 0,
    "nulls": lambda b: b.column("reward").null_count > 0,
    "flags": lambda b: flat(b.column("target_flags")).numpy().any(),
    "empty sets": lambda b: 0 in np.diff(axis_view(b, "candidate").parent_offsets),
    "wide sets": lambda b: max(np.diff(axis_view(b, "candidate").parent_offsets), default=0) > 3,
}


def occur(kinds, strategy, examples):
    """Return the kinds of which no example is drawn."""
    missing = dict(kinds)

    @settings(max_examples=examples, derandomize=True, phases=[Phase.generate], database=None)
    @given(value=strategy)
    def draw(value):
        for name, holds in list(missing.items()):
            with contextlib.suppress(rf.SchemaMismatchError):
                if holds(value):
                    del missing[name]

    draw()
    return list(missing)


def test_every_kind_of_schema_occurs():
    assert not occur(SCHEMA_KINDS, schemas().map(rf.parse_schema), 300)


def test_every_kind_of_batch_occurs():
    assert not occur(BATCH_KINDS, sample_batches(rf.sample_schema(vocab_size=64)), 100)


def test_failures_shrink():
    schema = rf.sample_schema(vocab_size=8, columns=[])
    small = find(sample_batches(schema), lambda batch: sum(lengths(batch)) >= 3)
    assert lengths(small) == [3]


def test_bounds_of_batches():
    schema = rf.sample_schema(vocab_size=8, columns=["candidate_counts", "candidate_ids"])

    @given(batch=sample_batches(schema, min_rows=1, max_rows=2, max_length=3, max_width=2,
                                prefix="mine"))  # fmt: skip
    def check(batch):
        assert 1 <= batch.num_rows <= 2
        assert max(lengths(batch)) <= 3
        assert max(np.diff(axis_view(batch, "candidate").parent_offsets), default=0) <= 2
        assert batch.column("sample_id").to_pylist() == [f"mine-{i}" for i in range(len(batch))]

    check()


@given(schema=schemas(), seed=st.integers(0, 2**32 - 1))
def test_equal_seeds_give_equal_batches(schema, seed):
    one, two = (fill_batch(schema, np.random.default_rng(seed), [3, 0, 5]) for _ in range(2))
    assert one.schema.equals(schema, check_metadata=True)
    assert_ragged_equal(one, two, check_schema=True)


def test_given_columns_are_kept():
    schema = rf.sample_schema(vocab_size=9, columns=["reward", "rollout_log_probs"])
    given_ = {"input_ids": np.array([7, 8, 0]), "completion_mask": np.array([0, 1, 0])}
    batch = fill_batch(
        schema, np.random.default_rng(0), [2, 1], given={**given_, "reward": [1.0, 2.0]}
    )
    validate(batch)
    assert batch.column("input_ids").to_pylist() == [[7, 8], [0]]
    assert batch.column("reward").to_pylist() == [1.0, 2.0]


def test_sets_are_ascending_and_contain_what_they_must():
    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 9, 200)
    include = rng.integers(0, 30, 200)
    counts, ids = distinct_ids(rng, wanted, 30, include=include)
    assert ((counts == 0) == (wanted == 0)).all()
    assert (counts <= wanted).all()
    for one, token in zip(np.split(ids, np.cumsum(counts)[:-1]), include, strict=True):
        assert one.tolist() == sorted(set(one.tolist()))
        assert not len(one) or token in one


# --- rollouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {}, {"num_samples": 0}, {"num_samples": 1}, {"columns": None}, {"columns": []},
        {"turns": 4, "num_samples": 20, "group_size": 5}, {"vocab_size": 4}, {"top_k": 1},
        {"group_size": 1, "turns": 2}, {"mean_candidates": 1.0}, {"max_candidates": 2},
    ],
    ids=str,
)  # fmt: skip
def test_rollouts_are_valid(options):
    batch = rollouts(np.random.default_rng(0), **options)
    validate(batch)
    assert batch.num_rows == options.get("num_samples", 32)


def test_rollouts_are_deterministic():
    one, two = (rollouts(np.random.default_rng(7), turns=2) for _ in range(2))
    assert_ragged_equal(one, two, check_schema=True)
    assert not one.equals(rollouts(np.random.default_rng(8), turns=2))


def test_rollouts_are_ragged():
    """huggingface/trl#5615: a helper that drew equal lengths hid a bug."""
    batch = rollouts(np.random.default_rng(0))
    for axis in ("token", "target", "candidate", "topk"):
        assert len(set(lengths(batch, axis))) > 16


def test_widths_of_rollouts_have_a_heavy_tail():
    batch = rollouts(np.random.default_rng(0), num_samples=200)
    counts = np.diff(axis_view(batch, "candidate").parent_offsets)
    assert counts.min() == 1
    assert 2.5 < counts.mean() < 3.5
    assert counts.max() > 256
    assert (counts == 1).mean() > 0.5
    heads = np.diff(axis_view(batch, "topk").parent_offsets)
    assert (heads == np.minimum(counts, 20)).all()
    assert 0.10 < heads.mean() / 20 < 0.14


def test_log_probs_of_rollouts_agree():
    batch = rollouts(np.random.default_rng(0), num_samples=8)
    sampled = flat(batch.column("input_ids")).numpy()[
        flat(batch.column("completion_mask")).numpy() != 0
    ]
    bounds = axis_view(batch, "candidate").parent_offsets
    ids = flat(batch.column("candidate_ids")).numpy()
    values = flat(batch.column("candidate_log_probs")).numpy()
    own = flat(batch.column("rollout_log_probs")).numpy()
    ranks = []
    for j, token in enumerate(sampled):
        inside = slice(bounds[j], bounds[j + 1])
        assert values[inside][ids[inside] == token] == own[j]
        assert abs(np.exp(values[inside], dtype=np.float64).sum() - 1) < 1e-4
        if bounds[j + 1] - bounds[j] > 1:
            ranks.append((values[inside] > own[j]).sum())
    # The token is a draw from its set: often the likeliest, not always.
    assert 0.3 < np.mean(np.array(ranks) == 0) < 0.95


def test_rollouts_share_prompts_and_turns():
    batch = rollouts(np.random.default_rng(0), num_samples=24, group_size=8, turns=3)
    rows = batch.to_pylist()
    shared = 0
    for row in rows:
        others = [r for r in rows if r["group_id"] == row["group_id"] and r is not row]
        prompt = row["completion_mask"].index(1)
        assert all(other["input_ids"][:prompt] == row["input_ids"][:prompt] for other in others)
        shared += any(other["input_ids"][: prompt + 1] == row["input_ids"][: prompt + 1]
                      and other["rollout_id"] == row["rollout_id"] for other in others)  # fmt: skip
        starts = np.diff(row["completion_mask"], prepend=0) == 1
        assert starts.sum() == 3
    assert len({row["group_id"] for row in rows}) == 3
    assert shared > 6
    keys = [(row["rollout_id"], row["branch_index"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {"stop", "length"} >= {row["finish_reason"] for row in rows}


@pytest.mark.parametrize(
    "options", [{"num_samples": -1}, {"group_size": 0}, {"turns": 0}, {"prompt_length": 0}]
)
def test_sizes_that_make_no_sense(options):
    with pytest.raises(rf.LimitExceededError, match="positive"):
        rollouts(np.random.default_rng(0), **options)


# --- forms ----------------------------------------------------------------------------------------


def test_forms_are_what_they_say():
    batch = rollouts(np.random.default_rng(0), num_samples=4)
    forms = variants(batch)
    assert forms["slice"].column("input_ids").offset == 1
    assert len(forms["slice"].column("input_ids").values) > len(flat(batch["input_ids"]).values)
    shifted = forms["first offset"].column("input_ids")
    assert shifted.offset == 0
    assert shifted.offsets[0].as_py() > 0
    tail = forms["unused tail"].column("input_ids")
    assert tail.offsets[0].as_py() == 0
    assert tail.offsets[-1].as_py() < len(tail.values)
    assert forms["chunks"].column("input_ids").num_chunks == 9
    assert pa.types.is_list(forms["32-bit"].schema.field("input_ids").type)
    assert all(field.nullable for field in forms["nullable"].schema)
    assert forms["bare"].schema.metadata is None
    assert all(field.metadata is None for field in forms["bare"].schema)
    assert forms["reversed"].schema.names == batch.schema.names[::-1]
    assert forms["itself"] is batch
    for name, form in variants(batch, same_schema=True).items():
        assert form.schema.equals(batch.schema, check_metadata=True), name
    assert variants(batch.slice(0, 0))["no chunks"].column("input_ids").num_chunks == 0


def test_forms_without_polars(monkeypatch):
    batch = rollouts(np.random.default_rng(0), num_samples=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "polars" not in variants(batch)


def test_generators_need_no_hypothesis():
    code = """
import sys
sys.modules["hypothesis"] = None
import ragged_format.testing as t
import numpy as np
t.assert_ragged_equal(t.rollouts(np.random.default_rng(0)), t.rollouts(np.random.default_rng(0)))
try:
    t.sample_batches
except ImportError as error:
    assert type(error).__name__ == "MissingDependencyError", type(error)
    assert error.remedy == "pip install hypothesis"
    assert error.code == "RF-D001"
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_of_the_package():
    assert sorted(generated.__all__) == generated.__all__
    assert all(hasattr(generated, name) for name in generated.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = generated.nothing
