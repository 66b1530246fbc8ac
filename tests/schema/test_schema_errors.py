"""Every schema code is raised with its place, what was expected and what was found."""

import json

import pyarrow as pa
import pytest
from support.schema_edits import fails, with_field, with_header

import ragged_format as rf

I32, F32, TEXT = pa.int32(), pa.float32(), pa.string()
OPTIONAL = ["reward", "rollout_log_probs", "candidate_counts", "candidate_ids"]
OWN = [
    rf.Column("routes", "token", pa.int16(), shape=(2, 3)),
    rf.Column("counts", "token", I32, opens="piece"),
]


@pytest.fixture(scope="module")
def schema():
    return rf.sample_schema(vocab_size=100, columns=[*OPTIONAL, *OWN])


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
