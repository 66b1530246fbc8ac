"""Rows of TRL's AsyncGRPO trainer (1.16.0) on real rollouts, and ours of the same samples."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.prefix_trie import ancestors, structure

import ragged_format as rf
from ragged_format.lists import offsets_of, ranges, to_list
from ragged_format.packing import pack_row, plan_rows, unpack_row
from ragged_format.packing.attention import label_ids, tree_leave, varlen_index
from ragged_format.testing import assert_ragged_equal
from ragged_format.validate import validate

DATA = Path(__file__).parent.parent / "data" / "trl"
PLANNERS = ("token_budget_r2_b1024", "fixed_count_r2_n8", "token_budget_r1_b512", "one_row")
SCHEMA = rf.sample_schema(
    vocab_size=49152,
    columns=["group_id", "policy_version", "advantage", "old_log_probs", "candidate_counts",
             "candidate_ids"],
)  # fmt: skip


def real_samples():
    stored = np.load(DATA / "grpo_samples.npz")
    offsets = stored["row_offsets"]
    # The reference describes every token; targets are the trained ones (never the first).
    scored = stored["completion_mask"] != 0
    targets = offsets_of(scored.astype(np.int64))[offsets]
    counts = stored["sampling_mask_counts"]
    starts = np.cumsum(counts) - counts
    ids = stored["sampling_mask_ids"][ranges(starts[scored], counts[scored].astype(np.int64))]
    columns = rf.parse_schema(SCHEMA)
    arrays = {
        "sample_id": pa.array([f"row{i}" for i in range(len(offsets) - 1)]),
        "group_id": pa.array([str(g) for g in stored["group_id"]]),
        "policy_version": pa.array(stored["model_version"]),
        "advantage": pa.array(stored["advantage"]),
    }
    for name, values, bounds in (
        ("input_ids", stored["input_ids"], offsets),
        ("completion_mask", stored["completion_mask"], offsets),
        ("old_log_probs", stored["old_log_probs"][scored], targets),
        ("candidate_counts", counts[scored], targets),
        ("candidate_ids", ids, offsets_of(counts[scored])[targets]),
    ):
        arrays[name] = to_list(values, bounds, columns[name])
    batch = pa.RecordBatch.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)
    # Sets wider than 16 ids are not in the copy, so that count 0 also stands for these.
    validate(batch)
    return batch


SAMPLES = real_samples()


def reference_rows():
    for planner in PLANNERS:
        stored = np.load(DATA / f"grpo_{planner}.npz")
        names = sorted({key.rsplit(".", 1)[0] for key in stored.files})
        for name in names:
            keys = [key for key in stored.files if key.rsplit(".", 1)[0] == name]
            row = {key.rsplit(".", 1)[1]: stored[key] for key in keys}
            yield pytest.param(row, id=f"{planner}-{name}")


@pytest.mark.parametrize("reference", list(reference_rows()))
def test_transition_rows_are_the_reference_rows(reference):
    members = rf.take(SAMPLES, reference["samples"])
    row = pack_row(members, fork="transition")
    validate(row)
    shown = structure(row)
    assert shown["input_ids"] == reference["input_ids"].tolist()
    assert shown["position_ids"] == reference["position_ids"].tolist()
    assert shown["pred_index"] == reference["token_index"].tolist()
    assert shown["member_index"] == reference["segment_id"].tolist()
    assert label_ids(row).tolist() == reference["shift_labels"].tolist()
    # Its label of a target's position is the target.
    assert reference["shift_labels"][shown["pred_index"]].tolist() == shown["target_ids"]
    np.testing.assert_array_equal(
        row.column("old_log_probs")[0].as_py(), reference["old_log_probs"]
    )
    advantages = np.array(row.column("member_advantage")[0].as_py(), np.float32)
    np.testing.assert_array_equal(advantages[shown["member_index"]], reference["advantages"])
    index = varlen_index(row)
    np.testing.assert_array_equal(index.kv_index, reference["tree_kv_index"])
    np.testing.assert_array_equal(index.cu_seqlens_q, reference["tree_cu_seqlens_q"])
    np.testing.assert_array_equal(index.cu_seqlens_k, reference["tree_cu_seqlens_k"])
    longest = [index.max_seqlen_q, index.max_seqlen_k]
    assert longest == reference["tree_max_seqlens"].tolist()


@pytest.mark.parametrize("reference", list(reference_rows()))
def test_token_rows_have_the_same_targets_on_fewer_tokens(reference):
    members = rf.take(SAMPLES, reference["samples"])
    row = pack_row(members, fork="token")
    validate(row)
    shown = structure(row)
    assert len(shown["input_ids"]) <= len(reference["input_ids"])
    seen = ancestors(shown)
    theirs = _reference_ancestors(reference)
    assert len(shown["pred_index"]) == len(reference["token_index"])
    for mine, other, target in zip(
        shown["pred_index"], reference["token_index"], shown["target_ids"], strict=True
    ):
        context = [shown["input_ids"][i] for i in seen[mine]]
        assert context == reference["input_ids"][theirs[other]].tolist()
        assert target == reference["shift_labels"][other]
    np.testing.assert_array_equal(
        row.column("old_log_probs")[0].as_py(), reference["old_log_probs"]
    )
    assert_ragged_equal(unpack_row(row), members, check_schema=True)


def _reference_ancestors(reference):
    """Return what each token sees, from the reference's own gather index."""
    seen = {}
    q, k = reference["tree_cu_seqlens_q"], reference["tree_cu_seqlens_k"]
    for segment in range(len(q) - 1):
        keys = reference["tree_kv_index"][k[segment] : k[segment + 1]]
        for token in range(q[segment], q[segment + 1]):
            seen[token] = keys[: len(keys) - (q[segment + 1] - 1 - token)]
    return seen


@pytest.mark.parametrize("reference", list(reference_rows()))
def test_load_is_the_reference_load(reference):
    leave = tree_leave(pack_row(rf.take(SAMPLES, reference["samples"]), fork="transition"))
    # Each token is seen by its subtree.
    assert int((leave - np.arange(len(leave))).sum()) == int(reference["load"])
    plan = plan_rows(rf.take(SAMPLES, reference["samples"]), 100_000, fork="transition")
    assert plan.load.tolist() == [int(reference["load"])]
    assert plan.targets.tolist() == [int(reference["trained"])]


def test_a_prefix_shared_by_all_samples_forks_where_the_reference_forks():
    reference = np.load(DATA / "grpo_one_row.npz")
    assert len(reference["mb0.row0.input_ids"]) == 4496
    plan = plan_rows(SAMPLES, 100_000, fork="transition")
    assert (plan.unique_tokens.tolist(), plan.tokens.tolist()) == ([4496], [6334])
    fewer = plan_rows(SAMPLES, 100_000, fork="token")
    assert fewer.unique_tokens[0] <= 4496
    assert len(structure(pack_row(SAMPLES))["input_ids"]) == fewer.unique_tokens[0]


def test_no_sample_is_lost_where_the_reference_loses_its_last_row():
    """huggingface/trl: the micro-batch that is open when samples end is never trained."""
    emitted = np.load(DATA / "grpo_token_budget_r2_b1024.npz")
    theirs = np.concatenate([emitted[key] for key in emitted.files if key.endswith(".samples")])
    assert len(set(theirs.tolist())) < 40 - 10  # ten samples were too old for it
    plan = plan_rows(SAMPLES, 1024, 2, fork="transition")
    assert sorted(np.concatenate(plan.rows).tolist()) == list(range(40))
    assert plan.metrics()["missing_rows"] == 0
    assert (plan.unique_tokens <= 1024).all()
