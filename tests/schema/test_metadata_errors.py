"""Values of metadata and declarations that are not allowed, and schemas that must agree."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest
from support.schema_edits import fails, with_field, with_header

import ragged_format as rf
from ragged_format.schema import NAMESPACE, RaggedSchema

I32, F32, TEXT = pa.int32(), pa.float32(), pa.string()
OPTIONAL = ["reward", "rollout_log_probs", "candidate_counts", "candidate_ids"]
OWN = [
    rf.Column("routes", "token", pa.int16(), shape=(2, 3)),
    rf.Column("counts", "token", I32, opens="piece"),
]


@pytest.fixture(scope="module")
def schema():
    return rf.sample_schema(vocab_size=100, columns=[*OPTIONAL, *OWN])


# --- RF-S009: values of metadata ------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "0", "-1", "1.0", "many", "٣", "1e3", "9" * 5000])
def test_s009_vocab_size(schema, text):
    broken = with_header(schema, vocab_size=text)
    error = fails(rf.SchemaMismatchError, "RF-S009", rf.parse_schema, broken)
    assert str(error.got) == text


@pytest.mark.parametrize("size", [0, -3, True, 1.5, "9", None])
def test_s009_vocab_size_of_a_declaration(size):
    fails(rf.SchemaMismatchError, "RF-S009", rf.sample_schema, vocab_size=size, columns=[])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("counts", {"mask": "yes"}), ("counts", {"fill": "zero"}), ("counts", {"fill": "1.5"}),
        ("counts", {"fill": "1_0"}), ("counts", {"fill": "+1"}), ("counts", {"fill": "01"}),
        ("counts", {"fill": "1e999"}), ("counts", {"fill": "true"}),
        ("routes", {"shape": "[true,6]"}),
        ("routes", {"shape": "6"}), ("routes", {"shape": "[6.0]"}), ("routes", {"shape": '["6"]'}),
        ("routes", {"shape": "["}), ("routes", {"shape": "null"}), ("routes", {"fill": "99999"}),
        ("rollout_log_probs", {"log_prob": "{"}), ("rollout_log_probs", {"log_prob": "[]"}),
        ("rollout_log_probs", {"log_prob": '{"mode": "cooked"}'}),
        ("rollout_log_probs", {"log_prob": '{"mode": []}'}),
        ("rollout_log_probs", {"log_prob": '{"later": 1}'}),
        ("rollout_log_probs", {"log_prob": '{"temperature": 0}'}),
        ("rollout_log_probs", {"log_prob": '{"temperature": true}'}),
        ("rollout_log_probs", {"log_prob": '{"temperature": NaN}'}),
        ("rollout_log_probs", {"log_prob": "[" * 100_000}),
        ("candidate_counts", {"head_kind": "sets"}), ("routes", {"head_kind": "set"}),
        ("routes", {"share_key": "1"}), ("routes", {"media": ""}), ("routes", {"approximate": "?"}),
    ],
)  # fmt: skip
def test_s009_field_metadata(schema, name, changes):
    broken = with_field(schema, name, **changes)
    error = fails(rf.SchemaMismatchError, "RF-S009", rf.parse_schema, broken, column=name)
    (key,) = changes
    assert key.replace("_", " ") in error.what.replace("_", " ")


def test_s009_field_metadata_that_is_not_text(schema):
    broken = with_field(schema, "routes", axis=b"\xff")
    fails(rf.SchemaMismatchError, "RF-S009", rf.parse_schema, broken, column="routes")


@pytest.mark.parametrize(
    ("type_", "fill"),
    [
        (pa.int8(), 128), (pa.uint8(), -1), (I32, 0.5), (I32, 2**31), (F32, 1e300),
        (pa.float16(), 1e6), (F32, float("nan")), (F32, float("inf")), (I32, float("nan")),
        (I32, "0"), (I32, True), (TEXT, 0), (pa.binary(), 0.0),
    ],
)  # fmt: skip
def test_s009_fills_that_the_type_cannot_hold(type_, fill):
    error = fails(
        rf.SchemaMismatchError, "RF-S009", rf.Column, "own", "token", type_, fill=fill, column="own"
    )
    assert repr(error.got) == repr(fill)


@pytest.mark.parametrize("text", ["3", "3.0", "3e0", " 3"])
def test_any_json_text_of_a_fill_is_read(schema, text):
    assert repr(rf.parse_schema(with_field(schema, "counts", fill=text))["counts"].fill) == "3"


def test_fills_become_numbers_of_their_column():
    assert repr(rf.Column("own", "token", F32, fill=-1).fill) == "-1.0"
    assert repr(rf.Column("own", "token", I32, fill=3.0).fill) == "3"
    assert rf.Column("own", "token", TEXT).fill is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"mode": "cooked"}, {"normalizer": "top"}, {"value": "odds"}, {"temperature": 0.0},
        {"temperature": -1.0}, {"temperature": float("inf")}, {"temperature": "1"},
    ],
)  # fmt: skip
def test_s009_log_prob_modes(kwargs):
    error = fails(rf.SchemaMismatchError, "RF-S009", rf.LogProb, **kwargs)
    assert [error.got] == list(kwargs.values())


def test_log_prob_modes_round_trip():
    mode = rf.LogProb("raw", "vocabulary", "logit", temperature=0.7)
    assert rf.LogProb.from_json(json.loads(json.dumps(mode.to_json()))) == mode
    assert rf.LogProb.from_json({}) == rf.LogProb()


@pytest.mark.parametrize("kind", ["sets", "top_k"])
def test_s009_head_kinds(kind):
    opens = "x" if kind == "sets" else None
    fails(
        rf.SchemaMismatchError, "RF-S009", rf.Column, "own", "token", I32, opens=opens,
        head_kind=kind, column="own",
    )  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [("candidate_counts", "top_k"), ("topk_counts", "set")])
def test_s009_a_set_stays_a_set(name, kind):
    ids = name.replace("counts", "ids")
    column = replace(rf.standard_column(name), head_kind=kind)
    error = fails(
        rf.SchemaMismatchError, "RF-S009", rf.sample_schema, vocab_size=9, columns=[column, ids],
        column=name,
    )  # fmt: skip
    assert error.got == kind


def test_s006_the_parts_of_an_own_head_lie_on_its_axis():
    counts = rf.Column("draft_counts", "target", I32, opens="draft", head_kind="top_k")
    ids = rf.Column("draft_ids", "target", I32, fill=-1)
    error = fails(
        rf.SchemaMismatchError, "RF-S006", rf.sample_schema, vocab_size=9, columns=[counts, ids],
        column="draft_ids",
    )  # fmt: skip
    assert (error.expected, error.got) == ("draft", "target")


def test_s009_standard_log_probs_have_a_mode():
    plain = rf.Column("rollout_log_probs", "target", F32, fill=-30000.0)
    fails(
        rf.SchemaMismatchError, "RF-S009", rf.sample_schema, vocab_size=9, columns=[plain],
        column="rollout_log_probs",
    )  # fmt: skip
    loud = rf.Column("loss_weights", "target", F32, fill=0.0, log_prob=rf.LogProb())
    fails(
        rf.SchemaMismatchError, "RF-S009", rf.sample_schema, vocab_size=9, columns=[loud],
        column="loss_weights",
    )  # fmt: skip


def test_s009_metadata_that_would_replace_our_own(schema):
    parsed = rf.parse_schema(schema)
    error = fails(
        rf.SchemaMismatchError, "RF-S009", RaggedSchema, "sample", 9, list(parsed), ["token"],
        metadata={NAMESPACE + "version": "9.9", "note": "x"},
    )  # fmt: skip
    assert error.got == [NAMESPACE + "version"]


# --- RF-S010 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (rf.sample_schema(vocab_size=8, columns=["reward"]), "vocab_size"),
        (rf.sample_schema(vocab_size=9, columns=["reward"], root_axes=["x"]), "root_axes"),
        (rf.packed_schema(vocab_size=9, columns=[]), "profile"),
        (rf.sample_schema(vocab_size=9, columns=["group_id"]), "without reward, with group_id"),
        (rf.sample_schema(vocab_size=9, columns=["reward", rf.Column("z", "token", I32)]),
         "their columns"),
    ],
)  # fmt: skip
def test_s010_names_the_first_difference(other, what):
    from ragged_format.canonical import require_same

    mine = rf.parse_schema(rf.sample_schema(vocab_size=9, columns=["reward"]))
    require_same(mine, rf.parse_schema(rf.sample_schema(vocab_size=9, columns=["reward"])))
    where = rf.Where(file="b.arrow")
    with pytest.raises(rf.SchemaMismatchError, match=what) as caught:
        require_same(mine, rf.parse_schema(other), where)
    assert (caught.value.code, caught.value.where) == ("RF-S010", where)
    assert caught.value.expected != caught.value.got


def test_s010_says_what_differs_in_a_column():
    from ragged_format.canonical import require_same

    mine, other = (
        rf.parse_schema(rf.sample_schema(vocab_size=9, columns=[rf.Column("z", "token", kind)]))
        for kind in (I32, pa.int64())
    )
    with pytest.raises(rf.SchemaMismatchError) as caught:
        require_same(mine, other)
    error = caught.value
    assert (error.where.column, error.expected, error.got) == ("z", "type int32", "type int64")
