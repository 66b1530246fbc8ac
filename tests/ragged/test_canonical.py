"""Arrow data of other producers in canonical types: exact, or refused with the place."""

import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format.testing import (
    assert_ragged_equal,
    fill_batch,
    packed_batches,
    rollouts,
    sample_batches,
    variants,
)

TEXT = rf.Column("words", "token", pa.string())
WIDE = rf.Column("routes", "token", pa.float32(), shape=(2,))
FRAME = rf.Column("frame_ids", "frame", pa.int16())
NOTE = rf.Column("note", "record", pa.string())
PAIR = rf.Column("pair", "record", pa.int32(), shape=(2,))


@pytest.fixture(scope="module")
def batch():
    schema = rf.sample_schema(
        vocab_size=50, columns=["reward", "rollout_log_probs", TEXT, WIDE, NOTE, PAIR]
    )
    return fill_batch(schema, np.random.default_rng(0), [3, 0, 4, 1], scored=1.0)


def replaced(batch, name, array):
    """The table with one column swapped, types and all."""
    table = pa.Table.from_batches([batch])
    index = table.schema.get_field_index(name)
    return table.set_column(index, pa.field(name, array.type), [array])


def fails(error, code, batch, name, array, **place):
    """Canonical data is refused, and the error names the place."""
    with pytest.raises(error) as caught:
        rf.canonical(replaced(batch, name, array), batch.schema)
    assert caught.value.code == code
    assert caught.value.where == rf.Where(column=name, **place)
    assert caught.value.expected is not None
    return caught.value


def with_values(batch, name, values, type_):
    """The lists of a column with other values of another type in them."""
    offsets = np.cumsum([0] + [len(one) for one in batch.column(name).to_pylist()])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, type_))


# --- every form -----------------------------------------------------------------------------------


@given(batch=st.one_of(sample_batches(), packed_batches(sample_batches(max_rows=3))))
def test_every_form_of_a_batch(batch):
    for name, form in variants(batch).items():
        try:
            out = rf.canonical(form, batch.schema)
            assert_ragged_equal(out, batch, check_schema=True)
            out.validate(full=True)
            # 32-bit list offsets never survive (apache/arrow#25822).
            lists = [f for f in out.schema if pa.types.is_nested(f.type)]
            assert all(
                pa.types.is_large_list(f.type) or pa.types.is_fixed_size_list(f.type) for f in lists
            )
        except BaseException as err:
            err.add_note(f"form {name!r}")
            raise


@given(batch=sample_batches())
def test_forms_with_metadata_need_no_schema(batch):
    forms = variants(batch)
    for name in ("itself", "slice", "table", "chunks", "32-bit", "reversed"):
        got, expected = rf.canonical(forms[name]), batch
        if name == "reversed":
            expected = pa.Table.from_batches([batch]).select(batch.schema.names[::-1])
        assert_ragged_equal(got, expected)
        assert rf.parse_schema(got.schema).identity is not None


def test_what_is_canonical_is_not_copied(batch):
    out = rf.canonical(batch)
    mine, theirs = batch.column("input_ids"), out.column("input_ids")
    assert mine.values.buffers()[1].address == theirs.values.buffers()[1].address


def test_declared_nullability_is_mended_where_the_schema_decides(batch):
    """pola-rs/polars#18316: non-nullability is lost; the remedy of its error must work."""
    form = variants(batch)["nullable"]
    with pytest.raises(rf.SchemaMismatchError, match="canonical") as caught:
        rf.parse_schema(form.schema)
    assert caught.value.code == "RF-S005"
    got = rf.canonical(form.drop_columns(["note"]))
    assert got.schema.field("sample_id").nullable is False
    assert_ragged_equal(got, batch.drop_columns(["note"]), check_schema=True)


def test_member_items_stay_nullable():
    note = rf.Column("member_note", "member", pa.string(), nullable=True)
    schema = rf.packed_schema(vocab_size=9, columns=[note, "member_reward"])
    row = {name: [] for name in schema.names} | {"member_note": [None, "a"]}
    packed = pa.RecordBatch.from_pylist([row], schema=schema)
    for form in variants(packed).values():
        assert_ragged_equal(rf.canonical(form, schema), packed, check_schema=True)
    assert rf.canonical(packed).schema.equals(schema, check_metadata=True)


# --- other producers ------------------------------------------------------------------------------


def test_polars_frames_in_and_out(batch):
    """pola-rs/polars#18316, pola-rs/polars#17418: metadata and non-null are lost on the way."""
    pl = pytest.importorskip("polars")
    frame = pl.from_arrow(pa.Table.from_batches([batch]))
    assert not frame.to_arrow().schema.metadata
    for data in (frame, frame.to_arrow()):
        assert_ragged_equal(rf.canonical(data, batch.schema), batch, check_schema=True)
    assert_ragged_equal(rf.canonical(frame[1:3], batch.schema), batch[1:3])
    assert_ragged_equal(rf.canonical(frame.slice(2), batch.schema), batch[2:])
    with pytest.raises(rf.NotRaggedError):
        rf.canonical(frame)


def test_polars_explode_with_empty_lists(batch):
    """pola-rs/polars#4107, #14381, #18421: empty lists vanished or turned into nulls.

    Both options are passed, the rows are numbered, and the lists are the same afterwards.
    """
    pl = pytest.importorskip("polars")
    frame = pl.from_arrow(pa.table({"ids": batch.column("input_ids")})).with_row_index()
    exploded = frame.explode("ids", empty_as_null=True, keep_nulls=True).drop_nulls()
    again = (
        frame.select("index")
        .join(exploded.group_by("index", maintain_order=True).agg("ids"), on="index", how="left")
        .sort("index")
        .with_columns(pl.col("ids").fill_null([]))
    )
    schema = rf.sample_schema(vocab_size=50, columns=[])
    parts = {"sample_id": batch.column("sample_id"), "input_ids": again["ids"].to_arrow()}
    parts["completion_mask"] = batch.column("completion_mask")
    out = rf.canonical(pa.table(parts), schema)
    assert out.column("input_ids").to_pylist() == batch.column("input_ids").to_pylist()


def test_polars_slices_with_an_empty_list():
    """pola-rs/polars#4108: a slice of lists with an empty one among them was wrong."""
    pl = pytest.importorskip("polars")
    lists = [[1], [2], [3], [4], [], [6]]
    frame = pl.DataFrame({
        "sample_id": [str(i) for i in range(6)],
        "input_ids": pl.Series(lists, dtype=pl.List(pl.Int32)),
        "completion_mask": pl.Series([[0] * len(v) for v in lists], dtype=pl.List(pl.UInt8)),
    })  # fmt: skip
    schema = rf.sample_schema(vocab_size=9, columns=[])
    out = rf.canonical(frame.slice(2, 4), schema)
    assert out.column("input_ids").to_pylist() == [[3], [4], [], [6]]


@pytest.mark.parametrize("views", [False, True])
def test_duckdb_relations(batch, views):
    """DuckDB names the list child after the column and may export list views."""
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(f"SET arrow_output_list_view={str(views).lower()}")
        table = pa.Table.from_batches([batch])
        connection.register("source", table)
        result = connection.sql("SELECT * FROM source").to_arrow_table()
        assert result.schema.field("input_ids").type != batch.schema.field("input_ids").type
        assert_ragged_equal(rf.canonical(result, batch.schema), batch, check_schema=True)
        half = connection.sql("SELECT * FROM source LIMIT 2 OFFSET 1").to_arrow_table()
        assert_ragged_equal(rf.canonical(half, batch.schema), batch[1:3], check_schema=True)


def test_nanoarrow_streams_and_arrays(batch):
    nanoarrow = pytest.importorskip("nanoarrow")
    stream = nanoarrow.ArrayStream(batch)
    assert_ragged_equal(rf.canonical(stream), batch, check_schema=True)
    assert_ragged_equal(
        rf.canonical(nanoarrow.c_array(batch), batch.schema), batch, check_schema=True
    )


def test_parquet_names_the_list_child_element(batch, tmp_path):
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_batches([batch]), tmp_path / "a.parquet", row_group_size=2)
    table = pq.read_table(tmp_path / "a.parquet")
    assert_ragged_equal(rf.canonical(table, batch.schema), batch, check_schema=True)


def test_an_exporter_of_one_array(batch):
    class Exporter:
        def __arrow_c_array__(self, requested_schema=None):
            return batch.__arrow_c_array__(requested_schema)

    assert_ragged_equal(rf.canonical(Exporter()), batch, check_schema=True)


@pytest.mark.parametrize("data", [None, [1], {"a": [1]}, b"ARROW1"])
def test_what_is_no_arrow_data(data):
    with pytest.raises(rf.SchemaMismatchError, match="not Arrow data") as caught:
        rf.canonical(data)
    assert caught.value.got == type(data).__name__


def test_text_in_any_encoding(batch):
    note = batch.column("note")
    words = batch.column("words")
    for wide in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        inner = words.flatten()
        inner = inner.dictionary_encode() if pa.types.is_dictionary(wide) else inner.cast(wide)
        table = replaced(batch, "words", pa.LargeListArray.from_arrays(words.offsets, inner))
        array = note.dictionary_encode() if pa.types.is_dictionary(wide) else note.cast(wide)
        index = table.schema.get_field_index("note")
        table = table.set_column(index, pa.field("note", array.type), [array])
        assert_ragged_equal(rf.canonical(table, batch.schema), batch, check_schema=True)
        described = pa.schema(
            [f.with_metadata(batch.schema.field(f.name).metadata) for f in table.schema],
            metadata=batch.schema.metadata,
        )
        got = rf.canonical(pa.table(dict(zip(table.column_names, table.columns, strict=True)),
                                    schema=described))  # fmt: skip
        assert got.schema.field("words").type == batch.schema.field("words").type


# --- exact or refused -----------------------------------------------------------------------------


def test_casts_that_keep_every_value(batch):
    size = len(batch.column("input_ids").flatten())
    ids = with_values(batch, "input_ids", batch.column("input_ids").flatten(), pa.int64())
    mask = batch.column("completion_mask").flatten().cast(pa.bool_())
    table = replaced(batch, "input_ids", ids)
    flags = with_values(batch, "completion_mask", mask, pa.bool_())
    table = table.set_column(table.schema.get_field_index("completion_mask"), "completion_mask",
                             [flags])  # fmt: skip
    routes = pa.FixedSizeListArray.from_arrays(pa.array([0.5] * 2 * size, pa.float64()), 2)
    wide = pa.LargeListArray.from_arrays(batch.column("routes").offsets, routes)
    table = table.set_column(table.schema.get_field_index("routes"), "routes", [wide])
    reward = pa.array([1, None, 2, 3], pa.int8())
    table = table.set_column(table.schema.get_field_index("reward"), "reward", [reward])
    out = rf.canonical(table, batch.schema)
    assert out.schema.equals(batch.schema, check_metadata=True)
    assert out.column("input_ids").equals(batch.column("input_ids"))
    assert out.column("completion_mask").equals(batch.column("completion_mask"))
    assert out.column("reward").to_pylist() == [1.0, None, 2.0, 3.0]
    assert out.column("routes").flatten().flatten().unique().to_pylist() == [0.5]


def test_a_column_of_nulls_is_of_any_type(batch):
    out = rf.canonical(replaced(batch, "reward", pa.nulls(4)), batch.schema)
    assert out.column("reward").equals(pa.nulls(4, pa.float64()))
    fails(rf.InvariantError, "RF-I002", batch, "note", pa.nulls(4), row=0)


@pytest.mark.parametrize("value", [0.1, 1e300, 16777217.0])
def test_floats_are_not_rounded(batch, value):
    size = len(batch.column("rollout_log_probs").flatten())
    values = [float("nan")] * (size - 1) + [value]
    array = with_values(batch, "rollout_log_probs", values, pa.float64())
    rows = batch.column("rollout_log_probs").to_pylist()
    row = max(i for i, one in enumerate(rows) if one)
    error = fails(
        rf.SchemaMismatchError, "RF-S004", batch, "rollout_log_probs", array,
        row=row, position=len(rows[row]) - 1,
    )  # fmt: skip
    assert str(value) in error.got
    assert "round" in error.remedy


def test_floats_of_fixed_size_are_not_rounded(batch):
    values = np.zeros(16)
    values[7] = 0.1
    routes = pa.FixedSizeListArray.from_arrays(pa.array(values), 2)
    array = pa.LargeListArray.from_arrays(batch.column("routes").offsets, routes)
    # Elements 0 to 2 are those of record 0; element 3 is the first of record 2.
    fails(rf.SchemaMismatchError, "RF-S004", batch, "routes", array, row=2, position=0)


@pytest.mark.parametrize("value", [2049, 100_000])
def test_integers_are_not_rounded_to_halves(value):
    half = rf.Column("half", "record", pa.float16())
    schema = rf.sample_schema(vocab_size=9, columns=[half])
    batch = fill_batch(schema, np.random.default_rng(0), [1, 1])
    fails(rf.SchemaMismatchError, "RF-S004", batch, "half", pa.array([1, value]), row=1)
    out = rf.canonical(replaced(batch, "half", pa.array([1, 2048])), schema)
    assert out.column("half").to_pylist() == [1.0, 2048.0]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("input_ids", pa.array([[2**31], [], [], []])),
        ("input_ids", pa.array([[1.5], [], [], []])),
        ("completion_mask", pa.array([[-1], [], [], []])),
        ("reward", pa.array([2**60 + 1, 0, 0, 0])),
        ("note", pa.array([b"\xff", b"", b"", b""])),
    ],
)
def test_values_that_do_not_fit(batch, name, array):
    fails(rf.SchemaMismatchError, "RF-S004", batch, name, array)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("note", pa.array([1, 2, 3, 4])),
        ("reward", pa.array(["1", "2", "3", "4"])),
        ("reward", pa.array([0, 1, 2, 3], pa.timestamp("s"))),
        ("input_ids", pa.array([["1"], [], [], []])),
        ("input_ids", pa.array([1, 2, 3, 4])),
        ("input_ids", pa.array([[[1]], [], [], []])),
        ("reward", pa.array([[1.0]] * 4)),
        ("routes", pa.array([[[1.0]], [], [], []])),
        ("routes", pa.array([[[1.0, 2.0, 3.0]], [], [], []], pa.list_(pa.list_(pa.float32(), 3)))),
        ("pair", pa.array([1, 2, 3, 4])),
    ],
)
def test_values_of_another_kind(batch, name, array):
    """Arrow parses text as numbers, and dates as integers, without a word."""
    error = fails(rf.SchemaMismatchError, "RF-S004", batch, name, array)
    assert error.got is not None


# --- nulls ----------------------------------------------------------------------------------------


def test_null_lists_are_refused(batch):
    """apache/arrow#37733, scikit-hep/awkward#624: also over values that the null hides."""
    hidden = pa.LargeListArray.from_arrays(
        [0, 1, 3, 3, 4],
        pa.array([1, 2, 3, 4], pa.int32()),
        mask=pa.array([False, True, False, False]),
    )
    fails(rf.InvariantError, "RF-I002", batch, "input_ids", hidden, row=1)
    plain = pa.array([[1], [2], [3], None], pa.list_(pa.int32()))
    fails(rf.InvariantError, "RF-I002", batch, "input_ids", plain, row=3)


def test_null_items_are_refused(batch):
    array = pa.array([[1], [], [2, None, 3], [None]], pa.list_(pa.int32()))
    fails(rf.InvariantError, "RF-I002", batch, "input_ids", array, row=2, position=1)
    chunked = pa.chunked_array([array[:2], array[2:]])
    table = pa.Table.from_batches([batch])
    index = table.schema.get_field_index("input_ids")
    table = table.set_column(index, pa.field("input_ids", array.type), chunked)
    with pytest.raises(rf.InvariantError) as caught:
        rf.canonical(table, batch.schema)
    assert caught.value.where == rf.Where(column="input_ids", row=2, position=1)


@pytest.mark.parametrize("items", [[[1.0, 2.0], None], [[1.0, 2.0], [None, 3.0]]])
def test_nulls_in_fixed_size_elements_are_refused(batch, items):
    array = pa.array([[], items, [], []], pa.large_list(pa.list_(pa.float32(), 2)))
    fails(rf.InvariantError, "RF-I002", batch, "routes", array, row=1, position=1)
    pairs = pa.array([[1, 2], [3, 4], [None, 5], [6, 7]], pa.list_(pa.int32(), 2))
    fails(rf.InvariantError, "RF-I002", batch, "pair", pairs, row=2)


def test_null_values_of_records_are_refused(batch):
    fails(rf.InvariantError, "RF-I002", batch, "sample_id", pa.array(["a", "b", None, "d"]), row=2)


# --- columns --------------------------------------------------------------------------------------


def test_columns_that_are_missing_or_too_many(batch):
    table = pa.Table.from_batches([batch])
    for data in (
        table.drop_columns(["reward"]),
        table.append_column("more", pa.nulls(4)),
        table.append_column("reward", pa.nulls(4)),
    ):
        with pytest.raises(rf.SchemaMismatchError, match="has the columns") as caught:
            rf.canonical(data, batch.schema)
        assert caught.value.code == "RF-S003"
        assert caught.value.got != caught.value.expected


def test_text_beyond_2_gib(batch, monkeypatch):
    """hiyouga/LlamaFactory#7526, #6606, Tencent/AngelSlim#246: joined text overflows offsets."""

    def overflow(_array):
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(sys.modules["ragged_format.canonical"], "flat", overflow)
    with pytest.raises(rf.LimitExceededError, match="offset overflow") as caught:
        rf.canonical(batch)
    assert caught.value.code == "RF-L001"
    assert caught.value.where.column == "input_ids"


# --- buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1, 3, 4])
def test_misaligned_buffers(batch, shift):
    """apache/arrow#32276, apache/arrow-rs#4255: bodies at odd addresses broke zero-copy readers."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    raw = sink.getvalue().to_pybytes()
    moved = pa.py_buffer(b"\0" * shift + raw).slice(shift)
    options = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.Any)
    got = pa.ipc.open_stream(moved, options=options).read_next_batch()
    addresses = [b.address for c in got.columns for b in c.buffers() if b is not None]
    assert any(address % 8 for address in addresses)
    assert_ragged_equal(rf.canonical(got), batch, check_schema=True)
    assert_ragged_equal(rf.take(got, [2, 0]), rf.take(batch, [2, 0]))
    assert_ragged_equal(rf.cut(got, stop=2), rf.cut(batch, stop=2))


def test_nested_lists_over_several_batches(batch):
    """lance-format/lance#7538, lance-format/lance#4713: offsets of later batches were not moved."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for start in range(4):
            writer.write_batch(batch.slice(start, 1))
    table = pa.ipc.open_stream(sink.getvalue()).read_all()
    assert table.column("routes").num_chunks == 4
    assert_ragged_equal(rf.canonical(table), batch, check_schema=True)
    assert_ragged_equal(rf.canonical(table.slice(1, 2)), batch[1:3])


def test_tables_with_nan_are_compared_by_our_own_equality():
    """``Table.equals`` is false where there is NaN."""
    batch = rollouts(np.random.default_rng(0), num_samples=2, columns=["reward"])
    with_nan = batch.set_column(1, batch.schema.field("reward"), pa.array([float("nan"), 1.0]))
    assert not with_nan.equals(with_nan)
    assert_ragged_equal(with_nan, with_nan, check_schema=True)
