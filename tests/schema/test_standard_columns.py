"""The standard columns, written out once more by hand."""

from dataclasses import replace

import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.profiles import REQUIRED, ROOT_AXES, STANDARD

I32, I64, F32, F64 = pa.int32(), pa.int64(), pa.float32(), pa.float64()
NEVER = None

# name: (axis, type, fill on padding or None on the record axis, nullable)
SAMPLE = {
    "sample_id": ("record", pa.string(), None, False),
    "group_id": ("record", pa.string(), None, True),
    "rollout_id": ("record", pa.string(), None, True),
    "branch_index": ("record", I32, None, True),
    "policy_version": ("record", I64, None, True),
    "temperature": ("record", F64, None, True),
    "reward": ("record", F64, None, True),
    "advantage": ("record", F64, None, True),
    "finish_reason": ("record", pa.string(), None, True),
    "teacher_id": ("record", pa.string(), None, True),
    "env_name": ("record", pa.string(), None, True),
    "metrics": ("record", pa.string(), None, True),
    "provenance": ("record", pa.string(), None, True),
    "token_offset": ("record", I64, None, True),
    "input_ids": ("token", I32, -1, False),
    "completion_mask": ("token", pa.uint8(), 0, False),
    "loss_weights": ("target", F32, 0.0, False),
    "rollout_log_probs": ("target", F32, -30000.0, False),
    "old_log_probs": ("target", F32, -30000.0, False),
    "ref_log_probs": ("target", F32, -30000.0, False),
    "advantages": ("target", F32, 0.0, False),
    "policy_versions": ("target", I64, -1, False),
    "target_flags": ("target", pa.uint8(), 0, False),
    "candidate_counts": ("target", I32, 0, False),
    "candidate_ids": ("candidate", I32, -1, False),
    "candidate_log_probs": ("candidate", F32, -30000.0, False),
    "topk_counts": ("target", I32, 0, False),
    "topk_ids": ("topk", I32, -1, False),
    "topk_log_probs": ("topk", F32, -30000.0, False),
    "teacher_topk_counts": ("target", I32, 0, False),
    "teacher_topk_ids": ("teacher_topk", I32, -1, False),
    "teacher_topk_log_probs": ("teacher_topk", F32, -30000.0, False),
    "teacher_log_probs": ("target", F32, -30000.0, False),
    "topk_weights": ("topk", F32, 0.0, False),
    "teacher_topk_weights": ("teacher_topk", F32, 0.0, False),
}
ON_REQUEST = {"token_offset", "topk_weights", "teacher_topk_weights"}
OPENED = {
    "completion_mask": "target",
    "candidate_counts": "candidate",
    "topk_counts": "topk",
    "teacher_topk_counts": "teacher_topk",
}
PACKED_STRUCTURE = {
    "input_ids": ("token", I32, -1, False),
    "position_ids": ("token", I32, 0, False),
    "node_lengths": ("node", I32, 0, False),
    "node_parents": ("node", I32, -1, False),
    "pred_index": ("target", I32, -1, False),
    "target_ids": ("target", I32, -1, False),
    "member_index": ("target", I32, -1, False),
    "member_leaf": ("member", I32, -1, False),
    "member_lengths": ("member", I32, 0, False),
}
PACKED = PACKED_STRUCTURE | {
    ("member_" + name if axis == "record" else name): (
        "member" if axis == "record" else axis, type_, fill, nullable,
    )
    for name, (axis, type_, fill, nullable) in SAMPLE.items()
    if name not in {"input_ids", "completion_mask"}
}  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "name", "expected"),
    [("sample", *item) for item in SAMPLE.items()] + [("packed", *item) for item in PACKED.items()],
)
def test_standard_column(profile, name, expected):
    column = rf.standard_column(name, profile)
    axis, type_, fill, nullable = expected
    assert (column.name, column.axis, column.type) == (name, axis, type_)
    assert column.nullable == nullable
    assert column.opens == (OPENED.get(name) if profile == "sample" or name in PACKED else None)
    assert column.mask == (name == "completion_mask")
    assert column.shape == ()
    field = column.field()
    if axis == "record":
        assert field.type == type_
        assert field.nullable == nullable
    else:
        item = pa.field("item", type_, nullable=nullable)
        assert field.type.equals(pa.large_list(item), check_metadata=True)
        assert not field.nullable
        if not pa.types.is_string(type_) and axis != "member":
            assert column.fill == fill
            assert type(column.fill) is (float if pa.types.is_floating(type_) else int)


def test_no_further_standard_columns():
    assert list(STANDARD["sample"]) == list(SAMPLE)
    assert set(STANDARD["packed"]) == set(PACKED)


def test_log_prob_columns_are_processed_over_the_support():
    for profile in ("sample", "packed"):
        for name, column in STANDARD[profile].items():
            assert (column.log_prob == rf.LogProb()) == name.endswith("log_probs"), name
    assert rf.LogProb().to_json() == {
        "mode": "processed", "normalizer": "support", "value": "log_prob",
    }  # fmt: skip


def test_what_counted_axes_hold():
    kinds = {n: c.head_kind for n, c in STANDARD["sample"].items() if c.head_kind is not None}
    assert kinds == {
        "candidate_counts": "set", "topk_counts": "top_k", "teacher_topk_counts": "top_k",
    }  # fmt: skip


def test_the_default_schema_has_all_but_the_exceptions():
    schema = rf.sample_schema(vocab_size=7)
    assert schema.names == [name for name in SAMPLE if name not in ON_REQUEST]
    packed = rf.packed_schema(vocab_size=7)
    off = ON_REQUEST | {"member_" + name for name in ON_REQUEST}
    assert packed.names == [name for name in STANDARD["packed"] if name not in off]


def test_required_columns():
    assert REQUIRED["sample"] == ("sample_id", "input_ids", "completion_mask")
    assert set(REQUIRED["packed"]) == {*PACKED_STRUCTURE, "member_sample_id"}
    assert rf.sample_schema(vocab_size=7, columns=[]).names == list(REQUIRED["sample"])
    assert set(rf.packed_schema(vocab_size=7, columns=[]).names) == set(REQUIRED["packed"])


@pytest.mark.parametrize("name", [n for n in SAMPLE if SAMPLE[n][0] in {"record", "target"}])
def test_exactly_the_columns_that_are_named(name):
    names = rf.sample_schema(vocab_size=7, columns=[name]).names
    assert set(names) == {*REQUIRED["sample"], name}
    assert names == sorted(names, key=list(SAMPLE).index)


def test_the_order_of_asking_does_not_matter():
    asked = ["topk_ids", "reward", "topk_counts", rf.Column("own", "token", I32)]
    schema = rf.sample_schema(vocab_size=7, columns=asked)
    assert schema.names == [
        "sample_id", "reward", "input_ids", "completion_mask", "topk_counts", "topk_ids", "own",
    ]  # fmt: skip
    assert schema.equals(rf.sample_schema(vocab_size=7, columns=asked[::-1]), check_metadata=True)


def test_required_columns_may_be_declared_otherwise():
    shared = replace(rf.standard_column("input_ids"), share_key=True)
    schema = rf.parse_schema(rf.sample_schema(vocab_size=7, columns=[shared]))
    assert schema["input_ids"].share_key
    assert list(schema.columns) == list(REQUIRED["sample"])


def test_axes_of_the_sample_profile():
    schema = rf.parse_schema(rf.sample_schema(vocab_size=7))
    parents = {axis.name: (axis.parent, axis.counts, axis.mask) for axis in schema.axes.values()}
    assert parents == {
        "token": ("record", None, False),
        "target": ("token", "completion_mask", True),
        "candidate": ("target", "candidate_counts", False),
        "topk": ("target", "topk_counts", False),
        "teacher_topk": ("target", "teacher_topk_counts", False),
    }
    assert schema.below("target") == ["target", "candidate", "topk", "teacher_topk"]
    assert schema.below("token") == ["token", *schema.below("target")]
    assert [schema.root_of(axis) for axis in ("record", "token", "topk")] == [
        "record", "token", "token",
    ]  # fmt: skip
    assert [axis.name for axis in schema.children("record")] == ["token"]
    assert [c.name for c in schema.on("topk")] == ["topk_ids", "topk_log_probs"]


def test_axes_of_the_packed_profile():
    schema = rf.parse_schema(rf.packed_schema(vocab_size=7))
    assert schema.root_axes == ROOT_AXES["packed"] == ("token", "node", "target", "member")
    assert [axis.name for axis in schema.axes.values() if axis.parent == "record"] == list(
        schema.root_axes
    )
    assert schema.axes["candidate"].parent == "target"


@pytest.mark.parametrize(
    ("name", "type_"),
    [("advantages", F64), ("topk_log_probs", pa.float16()),
     ("teacher_topk_log_probs", pa.float16())],
)  # fmt: skip
def test_alternative_types(name, type_):
    column = replace(rf.standard_column(name), type=type_)
    counts = [] if name == "advantages" else [name.replace("log_probs", "counts")]
    schema = rf.parse_schema(rf.sample_schema(vocab_size=7, columns=[*counts, column]))
    assert schema[name].type == type_
    assert rf.parse_schema(schema.to_arrow()) == schema


def test_select_adds_the_counts_that_axes_need():
    schema = rf.parse_schema(rf.sample_schema(vocab_size=7))
    part = schema.select(["candidate_log_probs", "reward"])
    assert list(part.columns) == [
        "reward", "completion_mask", "candidate_counts", "candidate_log_probs",
    ]  # fmt: skip
    assert (part.vocab_size, part.root_axes) == (7, ("token",))


def test_looking_up_columns():
    schema = rf.parse_schema(rf.sample_schema(vocab_size=7, columns=[]))
    assert "input_ids" in schema
    assert "reward" not in schema
    assert repr(schema) == (
        "RaggedSchema('sample', vocab_size=7, ['sample_id', 'input_ids', 'completion_mask'])"
    )
    with pytest.raises(rf.SchemaMismatchError, match="no such column") as caught:
        schema["reward"]
    assert caught.value.code == "RF-S003"
    assert len({schema, rf.parse_schema(schema.to_arrow())}) == 1
    assert schema != "schema"
