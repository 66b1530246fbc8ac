"""The columns of packed rows: views, members, token columns, own axes, and what is counted."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefix_trie import SCHEMA, batch_of, sharing_samples, structure

import ragged_format as rf
from ragged_format.lists import flat, to_numpy
from ragged_format.packing import PackReport, pack, pack_row
from ragged_format.testing import rollouts, sample_batches
from ragged_format.validate import validate

TWO = [
    {"tokens": [5, 6, 7, 1], "mask": [0, 0, 1, 1]},
    {"tokens": [5, 6, 7, 2], "mask": [0, 0, 0, 1]},
]
NONE = {"tokens": [5, 6], "mask": [0, 0]}


@given(batch=sample_batches(max_length=6), fork=st.sampled_from(["token", "transition"]))
def test_any_valid_batch_packs_into_a_valid_row(batch, fork):
    report = PackReport()
    row = pack_row(batch, fork=fork, null_advantage="keep", report=report)
    validate(row)
    scored = [sum(mask) for mask in batch.column("completion_mask").to_pylist()]
    assert report.samples == report.kept + report.without_target == batch.num_rows
    assert report.without_target == scored.count(0)
    assert report.targets == sum(scored) == len(row.column("pred_index")[0])
    assert report.unique_tokens == len(row.column("input_ids")[0])
    assert report.tokens == sum(row.column("member_lengths")[0].as_py())


@given(batch=sample_batches(max_length=6))
def test_target_columns_are_the_samples_end_to_end(batch):
    row = pack_row(batch, null_advantage="keep")
    schema = rf.parse_schema(batch.schema)
    for axis in schema.below("target"):
        for column in schema.on(axis):
            joined = flat(batch.column(column.name)).values
            kept = flat(row.column(column.name)).values
            # NaN, which own columns may hold, equals nothing.
            assert kept.equals(joined) or to_numpy(kept).tobytes() == to_numpy(joined).tobytes()


def test_target_and_member_columns_are_views():
    batch = batch_of(TWO)
    row = pack_row(batch)
    for name in ("rollout_log_probs", "candidate_counts", "candidate_ids"):
        assert address(row.column(name)) == address(batch.column(name))
    member = row.column("member_sample_id").values
    assert member.buffers()[2].address == batch.column("sample_id").buffers()[2].address


def address(array):
    return to_numpy(flat(array).values).__array_interface__["data"][0]


def test_values_of_shared_targets_stay_apart():
    samples = [{"tokens": [1, 2, 3], "mask": [0, 1, 1]}] * 3
    row = pack_row(batch_of(samples))
    assert structure(row)["pred_index"] == [0, 1] * 3
    log_probs = row.column("rollout_log_probs")[0].as_py()
    assert len(set(log_probs)) == len(log_probs) == 6


def test_samples_without_a_target_leave_no_trace_but_a_count():
    batch = batch_of([NONE, TWO[0], NONE, TWO[1], NONE])
    report = PackReport()
    row = pack_row(batch, report=report)
    assert row.column("member_sample_id").to_pylist() == [["s1", "s3"]]
    assert structure(row) == structure(pack_row(batch_of(TWO)))
    assert report.to_dict() == {
        "rows": 1, "samples": 5, "kept": 2, "without_target": 3, "tokens": 8, "unique_tokens": 5,
        "targets": 3, "null_advantages": 0, "conflicts": {}, "packing_ratio": 1.6,
    }  # fmt: skip


def test_a_report_adds_up_over_rows():
    report = PackReport()
    assert report.packing_ratio == 1.0
    for _ in range(2):
        pack_row(batch_of([*TWO, NONE]), report=report)
    assert (report.rows, report.samples, report.kept, report.without_target) == (2, 6, 4, 2)


def test_a_null_advantage_is_an_error_unless_allowed_by_name():
    batch = batch_of([NONE, *TWO], advantage=[None, 0.5, None])
    with pytest.raises(rf.PackingError, match="no advantage") as caught:
        pack_row(batch)
    assert caught.value.code == "RF-P001"
    assert caught.value.where == rf.Where(row=2, column="advantage")
    report = PackReport()
    row = pack_row(batch, null_advantage="keep", report=report)
    assert row.column("member_advantage").to_pylist() == [[0.5, None]]
    assert report.null_advantages == 1


def test_the_advantage_of_a_sample_without_target_may_be_null():
    row = pack_row(batch_of([NONE, *TWO], advantage=[None, 0.5, 1.5]))
    assert row.column("member_advantage").to_pylist() == [[0.5, 1.5]]


def test_only_the_columns_that_samples_have_are_created():
    batch = batch_of(TWO, rf.sample_schema(vocab_size=16, columns=["reward"]), reward=[1.0, None])
    names = pack_row(batch).schema.names
    assert [n for n in names if n.startswith("member_")] == [
        "member_index", "member_leaf", "member_lengths", "member_sample_id", "member_reward",
    ]  # fmt: skip
    assert "candidate_counts" not in names


def extended(*columns, root_axes=()):
    names = [c for c in SCHEMA.names if c != "sample_id"]
    return rf.sample_schema(vocab_size=16, columns=[*names, *columns], root_axes=root_axes)


EXPERTS = rf.Column("routed_experts", "token", pa.int16(), (2, 1), fill=-1)


def test_a_shared_token_takes_the_first_value_that_is_there():
    # The last token of a sample was never forwarded, so that its row is all fill.
    samples = [
        {"tokens": [5, 6], "mask": [0, 1]},
        {"tokens": [5, 6, 7], "mask": [0, 0, 1]},
        {"tokens": [5, 6, 7, 8], "mask": [0, 0, 0, 1]},
    ]
    batch = batch_of(
        samples,
        extended(EXPERTS),
        routed_experts=[
            [[1, 1], [-1, -1]],
            [[2, 2], [3, -1], [-1, -1]],
            [[1, 1], [3, -1], [4, 4], [-1, -1]],
        ],
    )
    report = PackReport()
    row = pack_row(batch, report=report)
    assert row.column("routed_experts").to_pylist() == [[[1, 1], [3, -1], [4, 4], [-1, -1]]]
    # One token of one member differs: [2, 2] instead of [1, 1].
    assert report.conflicts == {"routed_experts": 1}
    alone = PackReport()
    assert pack_row(batch, "sequence", report=alone).column("routed_experts").to_pylist()[0] == (
        [value for values in batch.column("routed_experts").to_pylist() for value in values]
    )
    assert alone.conflicts == {}


TOKEN_COLUMNS = [
    rf.Column("entropy", "token", pa.float32()),
    rf.Column("piece", "token", pa.string()),
    EXPERTS,
    rf.Column("label_counts", "token", pa.int8(), opens="label"),
    rf.Column("label", "label", pa.int16()),
    rf.Column("note_counts", "label", pa.uint8(), opens="note"),
    rf.Column("note", "note", pa.string()),
]


@given(samples=sharing_samples(), seed=st.integers(0, 999))
def test_token_columns_and_what_they_open_against_plain_python(samples, seed):
    rng = np.random.default_rng(seed)
    schema = extended(*TOKEN_COLUMNS)
    values = {column.name: [] for column in TOKEN_COLUMNS}
    tokens = []  # per sample: the value of each column at each token, nested
    for s in samples:
        length = len(s["tokens"])
        entropy = rng.choice([0.0, 1.5, np.nan], length, p=[0.4, 0.4, 0.2])
        piece = rng.choice(["", "a"], length).tolist()
        experts = rng.choice([[-1, -1], [1, -1], [2, 2]], length).tolist() if length else []
        labels = [[rng.choice(["p", "q"], rng.integers(0, 2)).tolist() for _ in range(n)]
                  for n in rng.integers(0, 3, length)]  # fmt: skip
        values["entropy"].append(entropy.tolist())
        values["piece"].append(piece)
        values["routed_experts"].append(experts)
        values["label_counts"].append([len(notes) for notes in labels])
        flat_labels = [note for notes in labels for note in notes]
        values["label"].append([len(note) for note in flat_labels])
        values["note_counts"].append([len(note) for note in flat_labels])
        values["note"].append([text for note in flat_labels for text in note])
        tokens.append({"entropy": entropy.tolist(), "piece": piece, "routed_experts": experts,
                       "label_counts": labels})  # fmt: skip
    report = PackReport()
    row = pack_row(batch_of(samples, schema, **values), report=report)
    validate(row)
    shown = structure(row)
    kept = [t for t, s in zip(tokens, samples, strict=True) if any(s["mask"])]
    routes = _routes(shown)
    empty = {"entropy": 0.0, "piece": None, "routed_experts": [-1, -1], "label_counts": []}
    chosen, conflicts = {}, dict.fromkeys(empty, 0)
    for name, fill in empty.items():
        chosen[name] = [None] * len(shown["input_ids"])
        for route, member in zip(routes, kept, strict=True):
            for packed, value in zip(route, member[name], strict=True):
                if chosen[name][packed] is None or _same(chosen[name][packed], fill):
                    chosen[name][packed] = value
        for route, member in zip(routes, kept, strict=True):
            for packed, value in zip(route, member[name], strict=True):
                differs = not _same(value, chosen[name][packed])
                conflicts[name] += differs and not _same(value, fill)
    assert report.conflicts == {name: count for name, count in conflicts.items() if count}
    assert row.column("piece")[0].as_py() == chosen["piece"]
    assert row.column("routed_experts")[0].as_py() == chosen["routed_experts"]
    np.testing.assert_array_equal(row.column("entropy")[0].as_py(), chosen["entropy"])
    labels = chosen["label_counts"]
    assert row.column("label_counts")[0].as_py() == [len(notes) for notes in labels]
    assert row.column("note_counts")[0].as_py() == [len(n) for notes in labels for n in notes]
    assert row.column("note")[0].as_py() == [t for notes in labels for n in notes for t in n]


def _same(a, b):
    return a == b or (a != a and b != b)  # NaN equals itself here


def _routes(row):
    starts = np.cumsum(row["node_lengths"]) - row["node_lengths"]
    routes = []
    for leaf in row["member_leaf"]:
        route, node = [], leaf
        while node >= 0:
            first = int(starts[node])
            route = [*range(first, first + row["node_lengths"][node]), *route]
            node = row["node_parents"][node]
        routes.append(route)
    return routes


def test_an_axis_of_ones_own_is_opened_by_the_members():
    frame = rf.Column("frame", "frames", pa.int16())
    marks = rf.Column("mark_counts", "frames", pa.int16(), opens="marks")
    mark = rf.Column("mark", "marks", pa.float32())
    schema = extended(frame, marks, mark, root_axes=["frames", "unused"])
    batch = batch_of(
        [NONE, *TWO], schema, frame=[[1], [2, 3], [4]], mark_counts=[[1], [0, 2], [1]],
        mark=[[0.5], [1.5, 2.5], [3.5]],
    )  # fmt: skip
    row = pack_row(batch)
    validate(row)
    assert row.column("frame").to_pylist() == [[2, 3, 4]]
    assert row.column("member_frames_counts").to_pylist() == [[2, 1]]
    assert row.column("member_unused_counts").to_pylist() == [[0, 0]]
    assert row.column("mark_counts").to_pylist() == [[0, 2, 1]]
    assert row.column("mark").to_pylist() == [[1.5, 2.5, 3.5]]


def test_a_scored_first_token_is_an_error():
    samples = [NONE, TWO[0], {"tokens": [], "mask": []}, {"tokens": [3, 4], "mask": [1, 0]}]
    with pytest.raises(rf.InvariantError) as caught:
        pack_row(batch_of(samples))
    assert caught.value.code == "RF-I009"
    assert caught.value.where == rf.Where(row=3, column="completion_mask", position=0)


@pytest.mark.parametrize(
    ("column", "value", "code", "row"),
    [
        ("completion_mask", [[0, 0, 1], [0, 0, 0, 1, 0]], "RF-I003", 0),
        ("rollout_log_probs", [[-0.5], [-0.5, -0.5]], "RF-I005", 0),
        ("candidate_ids", [[1, 2, 3], [1, 2, 3]], "RF-I005", 0),
    ],
)
def test_lengths_that_contradict_each_other_are_an_error(column, value, code, row):
    with pytest.raises(rf.InvariantError) as caught:
        pack_row(batch_of(TWO, **{column: value}))
    assert caught.value.code == code
    assert (caught.value.where.row, caught.value.where.column) == (row, column)


def test_a_row_has_a_largest_size(monkeypatch):
    monkeypatch.setattr(pack, "MAX_TOKENS", 7)
    with pytest.raises(rf.LimitExceededError, match="at most"):
        pack_row(batch_of(TWO))


def test_schemas_are_worked_out_once():
    layouts = pack.layout_of(SCHEMA)
    for size in range(20, 30):
        pack.layout_of(rf.sample_schema(vocab_size=size))
    assert pack.layout_of(SCHEMA) is not layouts
    assert pack.layout_of(SCHEMA) is pack.layout_of(SCHEMA)


def test_realistic_rollouts_pack_and_keep_metadata():
    batch = rollouts(np.random.default_rng(3), num_samples=16, turns=3)
    batch = batch.replace_schema_metadata({**batch.schema.metadata, b"run": b"7"})
    row = pack_row(batch)
    validate(row)
    assert row.schema.metadata[b"run"] == b"7"
    assert row.num_rows == 1


@pytest.mark.parametrize(
    ("type_", "shape"),
    [(pa.int16(), (4,)), (pa.int64(), (3,)), (pa.uint8(), (3,)), (pa.float32(), (2, 1))],
    ids=str,
)
def test_conflicts_of_fixed_shapes_are_counted_element_by_element(type_, shape):
    rng = np.random.default_rng(7)
    width = int(np.prod(shape))
    column = rf.Column("state", "token", type_, shape, fill=0)
    tokens = [int(t) for t in rng.integers(0, 16, 1500)]
    samples = [{"tokens": [*tokens, last], "mask": [0] * 1500 + [1]} for last in (1, 2, 3)]
    shared = rng.integers(1, 5, (1501, width)).astype(type_.to_pandas_dtype())
    if pa.types.is_floating(type_):
        shared[::3, 0] = np.nan
    states = [shared.copy() for _ in samples]
    states[1][::100, -1] += 1
    states[2][7] = 0  # all fill: not there, so that it does not conflict
    states[2][50:60, 0] += 2
    batch = batch_of(samples, extended(column), state=[state.tolist() for state in states])
    report = PackReport()
    row = pack_row(batch, report=report)
    nan = np.isnan(shared[:1500].astype(float))
    changed = [(s[:1500] != shared[:1500]) & ~nan for s in states]
    changed[2][7] = False
    assert report.conflicts == {"state": sum(int(c.any(axis=1).sum()) for c in changed)}
    kept = np.array(row.column("state")[0].as_py())
    np.testing.assert_array_equal(kept[:1500], shared[:1500])
