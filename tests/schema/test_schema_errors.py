"""Every schema code is raised with its place, what was expected and what was found."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

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


def fails(error, code, call, *args, column=None, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    err = caught.value
    assert err.code == code, err
    assert err.where.column == column, err
    assert err.expected is not None, err
    assert isinstance(err, ValueError)
    return err


def with_header(schema, **changes):
    """The schema with metadata keys replaced, or removed where the value is None."""
    metadata = dict(schema.metadata)
    for key, value in changes.items():
        metadata.pop(f"{NAMESPACE}{key}".encode(), None)
        if value is not None:
            metadata[f"{NAMESPACE}{key}".encode()] = value
    return schema.with_metadata(metadata)


def with_field(schema, name, *, type_=None, nullable=None, **changes):
    """The schema with one field's type, nullability or metadata replaced."""
    index = schema.get_field_index(name)
    field = schema.field(index)
    metadata = dict(field.metadata)
    for key, value in changes.items():
        metadata.pop(f"{NAMESPACE}{key}".encode(), None)
        if value is not None:
            metadata[f"{NAMESPACE}{key}".encode()] = value
    field = pa.field(
        name,
        field.type if type_ is None else type_,
        nullable=field.nullable if nullable is None else nullable,
        metadata=metadata,
    )
    return schema.set(index, field)


# --- RF-S001, RF-S002: not ours -------------------------------------------------------------------


def test_s001_no_metadata():
    plain = pa.schema({"a": I32}, metadata={"pandas": "{}"})
    error = fails(rf.NotRaggedError, "RF-S001", rf.parse_schema, plain)
    assert error.got == ["pandas"]
    assert "version" in error.expected
    assert error.remedy
    assert fails(rf.NotRaggedError, "RF-S001", rf.parse_schema, pa.schema([])).got == []


@pytest.mark.parametrize("key", ["version", "profile", "vocab_size", "root_axes"])
def test_s001_a_key_is_missing(schema, key):
    error = fails(rf.NotRaggedError, "RF-S001", rf.parse_schema, with_header(schema, **{key: None}))
    assert key in error.expected or key in error.what


@pytest.mark.parametrize("version", ["", "1", "0.1.0", "a.b", "0.-1", "٣.1", "0." + "9" * 5000])
def test_s001_malformed_version(schema, version):
    error = fails(
        rf.NotRaggedError, "RF-S001", rf.parse_schema, with_header(schema, version=version)
    )
    assert error.got == version


@pytest.mark.parametrize("key", ["required_features", "root_axes"])
@pytest.mark.parametrize("text", ["", "[", "{}", '"token"', "[1]", "[" * 100_000, "[NaN]", "null"])
def test_s001_malformed_lists(schema, key, text):
    error = fails(rf.NotRaggedError, "RF-S001", rf.parse_schema, with_header(schema, **{key: text}))
    assert error.got == text


def test_s001_metadata_that_is_not_text(schema):
    fails(rf.NotRaggedError, "RF-S001", rf.parse_schema, with_header(schema, profile=b"\xff"))


def test_s002_unknown_profile(schema):
    error = fails(
        rf.NotRaggedError, "RF-S002", rf.parse_schema, with_header(schema, profile="rows")
    )
    assert (error.expected, error.got) == ("sample, packed", "rows")


# --- RF-V001, RF-V002 -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "2.3", "99.0"])
def test_v001_another_major_version(schema, version):
    broken = with_header(schema, version=version, profile=None)
    error = fails(rf.UnsupportedVersionError, "RF-V001", rf.parse_schema, broken)
    assert (error.expected, error.got) == ("0.x", version)


def test_v002_an_unknown_required_feature(schema):
    broken = with_header(schema, required_features='["quantum", "folding"]')
    error = fails(rf.UnsupportedFeatureError, "RF-V002", rf.parse_schema, broken)
    assert (error.expected, error.got) == ("no required features", ["quantum", "folding"])


# --- RF-S003: columns -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sample_id", "input_ids"])
def test_s003_a_required_column_is_missing(schema, name):
    broken = schema.remove(schema.get_field_index(name))
    error = fails(rf.SchemaMismatchError, "RF-S003", rf.parse_schema, broken, column=name)
    assert error.expected == name


def test_s003_unknown_standard_name():
    error = fails(
        rf.SchemaMismatchError, "RF-S003", rf.sample_schema, vocab_size=9, columns=["canditate_ids"]
    )
    assert error.got == "canditate_ids"
    assert "candidate_ids" in error.expected
    fails(rf.SchemaMismatchError, "RF-S003", rf.standard_column, "completion_mask", "packed")


# --- RF-S004: types -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "type_",
    [
        pa.bool_(), pa.timestamp("s"), pa.decimal128(5), pa.null(), pa.large_string(),
        pa.struct({"a": I32}), pa.list_(I32), "int32",
    ],
    ids=str,
)  # fmt: skip
def test_s004_value_types_of_declarations(type_):
    error = fails(rf.SchemaMismatchError, "RF-S004", rf.Column, "own", "token", type_, column="own")
    assert error.got == type_


@pytest.mark.parametrize(
    "type_", [pa.list_(I32), pa.list_(I32, 3), I32, pa.list_view(I32)], ids=str
)
def test_s004_lists_are_large(schema, type_):
    broken = with_field(schema, "input_ids", type_=type_)
    error = fails(rf.SchemaMismatchError, "RF-S004", rf.parse_schema, broken, column="input_ids")
    assert "canonical" in error.remedy
    assert error.got == type_


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("input_ids", pa.int64()), ("completion_mask", pa.int8()), ("rollout_log_probs", F32),
        ("rollout_log_probs", pa.float16()), ("candidate_counts", pa.uint32()),
        ("candidate_ids", pa.list_(pa.field("item", I32, nullable=False), 2)),
    ],
)  # fmt: skip
def test_s004_standard_types(schema, name, type_):
    item = pa.field("item", type_, nullable=False)
    broken = with_field(schema, name, type_=pa.large_list(item))
    if type_ == rf.parse_schema(schema)[name].type:
        assert rf.parse_schema(broken) == rf.parse_schema(schema)
        return
    error = fails(rf.SchemaMismatchError, "RF-S004", rf.parse_schema, broken, column=name)
    assert error.got == type_


def test_s004_a_record_column_is_no_list(schema):
    broken = with_field(schema, "reward", type_=pa.large_list(pa.float64()))
    fails(rf.SchemaMismatchError, "RF-S004", rf.parse_schema, broken, column="reward")


@pytest.mark.parametrize("text", ["[7]", "[2, 2]", "[6, 1, 2]", "[]"])
def test_s004_shapes_of_another_width(schema, text):
    broken = with_field(schema, "routes", shape=text)
    error = fails(rf.SchemaMismatchError, "RF-S004", rf.parse_schema, broken, column="routes")
    assert error.got == json.loads(text)


@pytest.mark.parametrize("text", ["[1]", "[4]"])
def test_s004_a_shape_needs_a_fixed_size_list(schema, text):
    broken = with_field(schema, "counts", shape=text)
    fails(rf.SchemaMismatchError, "RF-S004", rf.parse_schema, broken, column="counts")


def test_shapes_default_to_the_width(schema):
    flat = rf.parse_schema(with_field(schema, "routes", shape=None))["routes"]
    assert (flat.shape, flat.width) == ((6,), 6)
    assert rf.parse_schema(schema)["routes"].shape == (2, 3)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"type": TEXT, "shape": (2,)}, {"type": I32, "shape": (0,)},
        {"type": I32, "shape": (2, -1)},
        {"type": I32, "shape": (2,), "axis": "record", "nullable": True},
        {"type": I32, "log_prob": rf.LogProb()}, {"type": TEXT, "log_prob": rf.LogProb()},
    ],
)  # fmt: skip
def test_s004_contradictions_of_declarations(kwargs):
    fails(
        rf.SchemaMismatchError, "RF-S004", rf.Column, "own", column="own",
        **{"axis": "token", **kwargs},
    )  # fmt: skip


# --- RF-S005: nullability -------------------------------------------------------------------------


def test_s005_lists_are_declared_non_null(schema):
    broken = with_field(schema, "input_ids", nullable=True)
    error = fails(rf.SchemaMismatchError, "RF-S005", rf.parse_schema, broken, column="input_ids")
    assert "canonical" in error.remedy


def test_s005_items_are_declared_non_null(schema):
    broken = with_field(schema, "input_ids", type_=pa.large_list(I32))
    fails(rf.SchemaMismatchError, "RF-S005", rf.parse_schema, broken, column="input_ids")
    fails(
        rf.SchemaMismatchError, "RF-S005", rf.Column, "own", "token", I32, nullable=True,
        column="own",
    )  # fmt: skip


@pytest.mark.parametrize(("name", "nullable"), [("sample_id", True), ("reward", False)])
def test_s005_standard_nullability(schema, name, nullable):
    broken = with_field(schema, name, nullable=nullable)
    error = fails(rf.SchemaMismatchError, "RF-S005", rf.parse_schema, broken, column=name)
    assert (error.expected, error.got) == (not nullable, nullable)


def test_members_may_be_null():
    column = rf.Column("member_note", "member", TEXT, nullable=True)
    schema = rf.parse_schema(rf.packed_schema(vocab_size=9, columns=[column]))
    assert schema["member_note"] == column


# --- RF-S006: axes --------------------------------------------------------------------------------


def test_s006_no_axis_declared(schema):
    field = pa.field("own", pa.large_list(I32), nullable=False, metadata={"note": "x"})
    error = fails(
        rf.SchemaMismatchError, "RF-S006", rf.parse_schema, schema.append(field), column="own"
    )
    assert error.got == ["note"]
    assert "axis" in error.expected


def test_s006_a_standard_column_elsewhere(schema):
    broken = with_field(schema, "rollout_log_probs", axis="token")
    error = fails(
        rf.SchemaMismatchError, "RF-S006", rf.parse_schema, broken, column="rollout_log_probs"
    )
    assert (error.expected, error.got) == ("target", "token")
    declared = rf.Column("rollout_log_probs", "token", F32, log_prob=rf.LogProb())
    fails(
        rf.SchemaMismatchError, "RF-S006", rf.sample_schema, vocab_size=9, columns=[declared],
        column="rollout_log_probs",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes"),
    [("completion_mask", {"mask": "false"}), ("candidate_counts", {"mask": "true"})],
)
def test_s006_a_standard_column_of_another_kind(schema, name, changes):
    broken = with_field(schema, name, **changes)
    error = fails(rf.SchemaMismatchError, "RF-S006", rf.parse_schema, broken, column=name)
    assert "mask" in error.what


def test_s006_a_standard_column_opens_its_own_axis(schema):
    broken = with_field(schema, "candidate_counts", opens="set")
    fails(rf.SchemaMismatchError, "RF-S006", rf.parse_schema, broken, column="candidate_ids")
    less = broken.remove(broken.get_field_index("candidate_ids"))
    error = fails(
        rf.SchemaMismatchError, "RF-S006", rf.parse_schema, less, column="candidate_counts"
    )
    assert (error.expected, error.got) == ("candidate", "set")


def test_s006_nothing_opens_the_axis():
    own = rf.Column("own", "frame", I32)
    error = fails(
        rf.SchemaMismatchError, "RF-S006", rf.sample_schema, vocab_size=9, columns=[own],
        column="own",
    )  # fmt: skip
    assert (error.expected, error.got) == ("one of record, token, target", "frame")


@pytest.mark.parametrize(("opens", "by"), [("token", None), ("target", "completion_mask"),
                                           ("record", "record")])  # fmt: skip
def test_s006_an_axis_opened_twice(opens, by):
    own = rf.Column("own", "token", I32, opens=opens)
    error = fails(
        rf.SchemaMismatchError, "RF-S006", rf.sample_schema, vocab_size=9, columns=[own],
        column="own",
    )  # fmt: skip
    assert error.got == by
    assert "opened twice" in error.what


def test_s006_axes_that_open_each_other():
    columns = [rf.Column("a", "y", I32, opens="x"), rf.Column("b", "x", I32, opens="y")]
    error = fails(
        rf.SchemaMismatchError, "RF-S006", rf.sample_schema, vocab_size=9, columns=columns,
        column="a",
    )  # fmt: skip
    assert "open each other" in error.what


@pytest.mark.parametrize(
    "kwargs",
    [
        {"type": F32, "opens": "x"}, {"type": TEXT, "opens": "x"},
        {"type": I32, "opens": "x", "axis": "record"}, {"type": I32, "opens": "x", "shape": (2,)},
        {"type": I32, "mask": True},
    ],
)  # fmt: skip
def test_s006_what_counts_can_be(kwargs):
    fails(
        rf.SchemaMismatchError, "RF-S006", rf.Column, "own", column="own",
        **{"axis": "token", **kwargs},
    )  # fmt: skip


@pytest.mark.parametrize("root_axes", [["token"], ["record"], ["a", "a"], [""]])
def test_s006_names_of_root_axes(root_axes):
    fails(
        rf.SchemaMismatchError, "RF-S006", rf.sample_schema, vocab_size=9, columns=[],
        root_axes=root_axes,
    )  # fmt: skip


@pytest.mark.parametrize("text", ["[]", '["target"]', '["node", "token"]', '["token", "token"]'])
def test_s006_root_axes_of_the_profile(schema, text):
    fails(rf.SchemaMismatchError, "RF-S006", rf.parse_schema, with_header(schema, root_axes=text))


# --- RF-S007, RF-S008 -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"), [("input_ids", "0"), ("rollout_log_probs", "-1.0"), ("completion_mask", "1")]
)
def test_s007_standard_fills(schema, name, text):
    broken = with_field(schema, name, fill=text)
    error = fails(rf.SchemaMismatchError, "RF-S007", rf.parse_schema, broken, column=name)
    assert error.got == json.loads(text)


def test_s008_a_column_asked_for_twice():
    error = fails(
        rf.SchemaMismatchError, "RF-S008", rf.sample_schema, vocab_size=9,
        columns=["reward", "group_id", "reward"],
    )  # fmt: skip
    assert error.got == ["reward"]


def test_s008_two_fields_of_one_name(schema):
    error = fails(
        rf.SchemaMismatchError, "RF-S008", rf.parse_schema, schema.append(schema.field("reward"))
    )
    assert error.got == ["reward"]


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
        (rf.sample_schema(vocab_size=9, columns=["group_id"]), "a column"),
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
