"""The exact edges of tolerances, ids and counts; what is exempt; heads of one's own."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format import Column, LogProb
from ragged_format.rules import FLOAT16_MASS_TOLERANCE, LOG_PROB_TOLERANCE

BASE = {"sample_id": "a", "input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}
FLOATS = (np.float16, np.float32, np.float64)


def batch(columns, vocab_size=10, **values):
    schema = rf.sample_schema(vocab_size=vocab_size, columns=columns)
    arrays = []
    for field in schema:
        value = values.get(field.name, BASE.get(field.name))
        if pa.types.is_large_list(field.type) and isinstance(value, np.ndarray):
            items = pa.array(value, field.type.value_type)
            array = pa.LargeListArray.from_arrays(pa.array([0, len(items)]), items, type=field.type)
        else:
            array = pa.array([value], field.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def verdict(data):
    """Return the code that validation raises, None if the data is valid."""
    try:
        rf.validate(data)
    except rf.InvariantError as err:
        return err.code
    return None


def log_probs(dtype=np.float32, **changes):
    """Return a column of log-probs of one's own, of any type."""
    kind = pa.from_numpy_dtype(dtype)
    return Column("own_log_probs", "target", kind, **{"log_prob": LogProb(), **changes})


@pytest.mark.parametrize("dtype", FLOATS)
def test_log_prob_edge(dtype):
    edge = dtype(LOG_PROB_TOLERANCE)
    above = np.nextafter(edge, dtype(1))
    for value, code in ((dtype(0), None), (edge, None), (above, "RF-I018")):
        values = np.array([-1, value], dtype)
        assert verdict(batch([log_probs(dtype)], own_log_probs=values)) == code


def test_approximate_columns_and_logits_may_be_positive_but_not_infinite():
    for column in (log_probs(approximate=True), log_probs(log_prob=LogProb(value="logit"))):
        good = np.array([5.0, -3.0], np.float32)
        assert verdict(batch([column], own_log_probs=good)) is None
        bad = np.array([5.0, np.inf], np.float32)
        assert verdict(batch([column], own_log_probs=bad)) == "RF-I017"


def head(kind, dtype=np.float64, *, log_prob=None, approximate=False):
    return [
        Column("own_counts", "target", pa.int32(), opens="own", head_kind=kind),
        Column("own_ids", "own", pa.int32()),
        Column(
            "own_log_probs", "own", pa.from_numpy_dtype(dtype), approximate=approximate,
            log_prob=log_prob or LogProb(),
        ),
        Column("own_weights", "own", pa.float32()),
    ]  # fmt: skip


def head_batch(columns, values, ids=(2, 3)):
    values = np.asarray(values)
    return batch(
        columns, own_counts=[len(values), 0], own_ids=list(ids)[: len(values)],
        own_log_probs=values, own_weights=[1.0] * len(values),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["set", "top_k", "support"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_mass_edge(kind, dtype):
    tolerance = FLOAT16_MASS_TOLERANCE if dtype is np.float16 else LOG_PROB_TOLERANCE
    columns = head(kind, dtype)
    spacing = float(np.finfo(dtype).eps)
    for mass, code in (
        (1.0, None),
        (1 + tolerance - 2 * spacing, None),
        (1 + tolerance + 2 * spacing, "RF-I019"),
    ):
        values = np.log(np.array([mass / 2, mass / 2])).astype(dtype)
        assert verdict(head_batch(columns, values)) == code, mass
    assert verdict(head_batch(columns, np.zeros(1, dtype))) is None


def test_a_set_of_one_token_may_have_all_the_mass_within_tolerance():
    edge = np.array([LOG_PROB_TOLERANCE], np.float32)
    # exp(1e-4) is 1.000100005, above 1 + 1e-4: the mass is the sharper rule here.
    assert verdict(head_batch(head("set", np.float32), edge)) == "RF-I019"
    assert verdict(head_batch(head("set", np.float32), edge * 0.99)) is None


@pytest.mark.parametrize(
    ("columns", "exempt"),
    [
        (head("top_k"), {"RF-I024"}),
        (head("support"), {"RF-I024"}),
        (head("set"), {"RF-I016", "RF-I024"}),
        (head("draws"), {"RF-I015", "RF-I016", "RF-I019"}),
        (head("top_k", approximate=True), {"RF-I016", "RF-I018", "RF-I019", "RF-I024"}),
        (
            head("top_k", log_prob=LogProb(value="logit")),
            {"RF-I018", "RF-I019", "RF-I024"},
        ),
    ],
    ids=["top_k", "support", "set", "draws", "approximate", "logits"],
)
def test_what_each_kind_of_head_is_exempt_from(columns, exempt):
    wrong = {
        "RF-I015": head_batch(columns, [-2.0, -2.0], ids=(2, 2)),
        "RF-I016": head_batch(columns, [-2.0, -1.0]),
        "RF-I017": head_batch(columns, [-2.0, np.nan]),
        "RF-I018": head_batch(columns, [0.5]),
        "RF-I019": head_batch(columns, [-0.1, -0.1]),
        "RF-I024": batch(
            columns, own_counts=[1, 0], own_ids=[2], own_log_probs=np.array([-1.0]),
            own_weights=[0.0],
        ),
    }  # fmt: skip
    is_set = columns[0].head_kind == "set"
    for code, data in wrong.items():
        # Ids that ascend strictly are unique: the sharper rule of sets.
        name = "RF-I012" if is_set and code == "RF-I015" else code
        assert verdict(data) == (None if code in exempt else name)
    out = "RF-I011" if is_set else "RF-I014"
    assert verdict(head_batch(columns, [-2.0, -3.0], ids=(2, 10))) == out
    without_sampled = head_batch(columns, [-2.0, -3.0], ids=(3, 4))
    assert verdict(without_sampled) == ("RF-I013" if is_set else None)


def test_only_the_heads_own_log_probs_are_ordered():
    """Another model's log-probs at the same ids follow no order."""
    other = Column("other_log_probs", "own", pa.float32(), log_prob=LogProb())
    columns = [*head("top_k"), other]
    values = {
        "own_counts": [2, 0], "own_ids": [2, 3], "own_log_probs": np.array([-1.0, -2.0]),
        "own_weights": [1.0, 1.0],
    }  # fmt: skip
    assert verdict(batch(columns, **values, other_log_probs=[-2.0, -1.0])) is None
    assert verdict(batch(columns, **values, other_log_probs=[-0.1, -0.1])) == "RF-I019"


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int64(), pa.uint64()])
@pytest.mark.parametrize("head_kind", ["set", "top_k"])
def test_ids_of_any_integer_type(kind, head_kind):
    columns = [
        Column("own_counts", "target", pa.uint8(), opens="own", head_kind=head_kind),
        Column("own_ids", "own", kind),
    ]
    limit = 2**31
    ids = [2, 3, 100]
    data = batch(columns, limit, own_counts=[2, 1], own_ids=ids, input_ids=[0, 2, 100])
    assert verdict(data) is None
    data = batch(columns, limit, own_counts=[3, 0], own_ids=[2, 2, 3], input_ids=[0, 2, 1])
    assert verdict(data) == ("RF-I012" if head_kind == "set" else "RF-I015")
    if kind.bit_width == 64:
        ids = [2, limit - 1, limit]
        data = batch(columns, limit, own_counts=[3, 0], own_ids=ids, input_ids=[0, 2, 1])
        assert verdict(data) == ("RF-I011" if head_kind == "set" else "RF-I014")


def test_ids_at_the_edges_of_the_vocabulary():
    columns = ["candidate_counts", "candidate_ids"]
    data = batch(columns, 4, candidate_counts=[4, 0], candidate_ids=[0, 1, 2, 3])
    assert verdict(data) is None
    data = batch(columns, 3, candidate_counts=[2, 0], candidate_ids=[0, 2], input_ids=[0, 2, 2])
    assert verdict(data) is None


def test_equal_ids_in_neighboring_sets_and_heads_are_fine():
    columns = ["candidate_counts", "candidate_ids", "topk_counts", "topk_ids", "topk_log_probs"]
    data = batch(
        columns, candidate_counts=[2, 1], candidate_ids=[2, 9, 3], topk_counts=[1, 2],
        topk_ids=[3, 3, 2], topk_log_probs=[-2.0, -0.5, -1.0],
    )  # fmt: skip
    assert verdict(data) is None


def test_empty_sets_between_full_ones():
    columns = ["candidate_counts", "candidate_ids"]
    values = {"input_ids": [0, 2, 3, 4, 5], "completion_mask": [0, 1, 1, 1, 1]}
    data = batch(columns, **values, candidate_counts=[0, 2, 0, 1], candidate_ids=[3, 9, 5])
    assert verdict(data) is None
    data = batch(columns, **values, candidate_counts=[0, 2, 0, 1], candidate_ids=[3, 9, 4])
    assert verdict(data) == "RF-I013"
    data = batch(columns, **values, candidate_counts=[0, 2, 0, 1], candidate_ids=[9, 3, 5])
    assert verdict(data) == "RF-I012"


def test_a_set_below_another_axis_scores_no_token():
    columns = [
        Column("own_counts", "token", pa.int32(), opens="own", head_kind="set"),
        Column("own_ids", "own", pa.int32()),
    ]
    assert verdict(batch(columns, own_counts=[1, 0, 2], own_ids=[9, 7, 8])) is None
    assert verdict(batch(columns, own_counts=[1, 0, 2], own_ids=[9, 8, 7])) == "RF-I012"


def test_log_probs_of_fixed_shape_and_on_the_record_axis():
    pair = log_probs(shape=(2,))
    assert verdict(batch([pair], own_log_probs=[[-1.0, -1.0], [-1.0, -0.5]])) is None
    with pytest.raises(rf.InvariantError) as info:
        rf.validate(batch([pair], own_log_probs=[[-1.0, -1.0], [-1.0, 0.5]]))
    assert (info.value.code, info.value.where.position) == ("RF-I018", 1)
    assert info.value.got == [-1.0, 0.5]
    total = Column("total", "record", pa.float16(), nullable=True, log_prob=LogProb())
    assert verdict(batch([total], total=None)) is None
    assert verdict(batch([total], total=np.float16(0.5))) == "RF-I018"
    assert verdict(batch([total], total=np.float16(-np.inf))) == "RF-I017"


def test_columns_named_like_those_of_the_other_profile_are_ordinary():
    names = ["target_ids", "member_index", "node_lengths", "position_ids", "member_metrics"]
    columns = [Column(name, "token", pa.string()) for name in names]
    data = batch(columns, **{name: ["x"] * 3 for name in names})
    assert verdict(data) is None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"name": "own_ids", "type": pa.string()}, "RF-S004"),
        ({"name": "own_ids", "type": pa.float32()}, "RF-S004"),
        ({"name": "own_ids", "type": pa.int32(), "shape": (2,)}, "RF-S004"),
        ({"name": "own_ids", "type": pa.int32(), "axis": "target"}, "RF-S006"),
        ({"name": "own_log_probs", "type": pa.int32()}, "RF-S004"),
        ({"name": "own_weights", "type": pa.string()}, "RF-S004"),
    ],
)
def test_parts_of_a_head_are_declared_as_such(changes, code):
    counts = Column("own_counts", "target", pa.int32(), opens="own", head_kind="draws")
    part = Column(**{"axis": "own", **changes})
    with pytest.raises(rf.SchemaMismatchError) as info:
        rf.sample_schema(vocab_size=10, columns=[counts, part])
    assert (info.value.code, info.value.where.column) == (code, part.name)
    # Without the kind the names mean nothing.
    rf.sample_schema(vocab_size=10, columns=[replace(counts, head_kind=None), part])


@pytest.mark.parametrize(("name", "kind"), [("candidate_counts", "top_k"), ("topk_counts", "set")])
def test_standard_sets_and_heads_stay_what_they_are(name, kind):
    column = replace(rf.standard_column(name), head_kind=kind)
    with pytest.raises(rf.SchemaMismatchError) as info:
        rf.sample_schema(vocab_size=10, columns=[column])
    assert (info.value.code, info.value.where.column) == ("RF-S009", name)


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1, 2**70])
def test_vocabulary_sizes_that_ids_cannot_reach(vocab_size):
    with pytest.raises(rf.SchemaMismatchError) as info:
        rf.sample_schema(vocab_size=vocab_size)
    assert info.value.code == "RF-S009"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", "null", '"x"', "{}{}", '{"a":NaN}', '{"a":-Infinity}', "[" * 100_000],
)
def test_texts_that_are_no_json_object(text):
    assert verdict(batch(["metrics"], metrics=text)) == "RF-I021"


@pytest.mark.parametrize("text", ["{}", ' {"a": [1, {"b": null}]} ', '{"a":' + "9" * 5000 + "}"])
def test_json_objects(text):
    assert verdict(batch(["metrics"], metrics=text)) is None
    assert verdict(batch(["metrics"], metrics=None)) is None


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()])
def test_counts_whose_sum_wraps_around(kind):
    counts = Column("own_counts", "token", kind, opens="own")
    wide = (2**64 if pa.types.is_unsigned_integer(kind) else 2**63) - 1
    values = np.array([wide, wide, 4], kind.to_pandas_dtype())
    for columns, items in (
        ([counts], {}),
        (
            [counts, Column("items", "own", pa.int8())],
            {"items": np.zeros(2, np.int8)},
        ),
    ):
        assert verdict(batch(columns, own_counts=values, **items)) == "RF-I004"


def test_flags_allow_what_is_absent():
    columns = [
        "target_flags", "rollout_log_probs", "candidate_counts", "candidate_ids", "topk_counts",
        "topk_ids", "teacher_topk_counts", "teacher_topk_ids", "teacher_log_probs",
    ]  # fmt: skip
    absent = {
        "rollout_log_probs": [0.0, -1.0], "candidate_counts": [0, 1], "candidate_ids": [3],
        "topk_counts": [0, 1], "topk_ids": [3], "teacher_topk_counts": [0, 1],
        "teacher_topk_ids": [3], "teacher_log_probs": [0.0, -1.0],
    }  # fmt: skip
    for flags in (31, 1, 2, 4, 8, 16, 0):
        assert verdict(batch(columns, target_flags=[flags, 0], **absent)) is None
        wanted = None if flags == 0 else "RF-I020"
        assert verdict(batch(columns, target_flags=[0, flags], **absent)) == wanted


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=300), st.integers(0, 3))
def test_mass_of_a_set_does_not_depend_on_its_neighbors(values, times):
    """Sums come from differences of a running total: rounding must not add up to a breach."""
    head_values = np.sort(np.array(values))[::-1] - np.log(np.exp(values).sum())
    width = len(head_values)
    columns = head("top_k")[:3]
    count = 2 + 50 * times
    data = batch(
        columns, 1000, input_ids=[0] + [1] * count, completion_mask=[0] + [1] * count,
        own_counts=[width] * count, own_ids=np.tile(np.arange(width), count),
        own_log_probs=np.tile(np.minimum(head_values, 0), count),
    )  # fmt: skip
    assert verdict(data) is None
