"""Plain Arrow readers see the same values, and of the trailer nothing but a batch without rows."""

import io

import pyarrow as pa
import pytest
from hypothesis import given, settings
from support.containers import small_batch, three_batches

import ragged_format as rf
from ragged_format.testing import assert_ragged_equal, in_sequence, packed_batches, sample_batches


def with_pyarrow(path, stream):
    with pa.memory_map(str(path)) as source:
        file = pa.ipc.open_file(source).read_all()
    return file, pa.ipc.open_stream(stream).read_all()


def with_polars(path, stream):
    polars = pytest.importorskip("polars")
    return polars.read_ipc(path), polars.read_ipc_stream(io.BytesIO(stream))


def with_lazy_polars(path, stream):
    polars = pytest.importorskip("polars")
    return (polars.scan_ipc(path).collect(),)


def with_nanoarrow(path, stream):
    nanoarrow_ipc = pytest.importorskip("nanoarrow.ipc")
    with nanoarrow_ipc.InputStream.from_readable(io.BytesIO(stream)) as source:
        return (pa.RecordBatchReader.from_stream(source).read_all(),)


def with_duckdb(path, stream):
    duckdb = pytest.importorskip("duckdb")
    tables = []
    for reader in (
        pa.ipc.open_file(pa.memory_map(str(path))).read_all(),
        pa.ipc.open_stream(stream),
    ):
        with duckdb.connect() as connection:
            connection.register("records", reader)
            tables.append(connection.sql("SELECT * FROM records").to_arrow_table())
    return tables


READERS = [with_pyarrow, with_polars, with_lazy_polars, with_nanoarrow, with_duckdb]


@pytest.fixture
def written(tmp_path):
    def write(batches):
        path = tmp_path / "a.arrow"
        sink = io.BytesIO()
        rf.write_file(path, batches)
        rf.write_stream(sink, batches)
        return path, sink.getvalue()

    return write


@pytest.mark.parametrize("read", READERS)
def test_foreign_readers_see_the_same_values(written, read):
    batches = three_batches()
    for table in read(*written(batches)):
        assert_ragged_equal(table, pa.Table.from_batches(batches))


@pytest.mark.parametrize("read", READERS)
def test_foreign_readers_see_packed_rows(written, read):
    packed = in_sequence(small_batch((4, 3, 5, 2)))
    for table in read(*written([packed, packed])):
        assert_ragged_equal(table, pa.Table.from_batches([packed, packed]))


@settings(max_examples=15)
@given(sample_batches() | packed_batches())
def test_foreign_readers_agree_on_any_batch(tmp_path_factory, batch):
    path = tmp_path_factory.mktemp("f") / "a.arrow"
    sink = io.BytesIO()
    rf.write_file(path, [batch, batch])
    rf.write_stream(sink, [batch, batch])
    expected = pa.Table.from_batches([batch, batch])
    readers = [with_pyarrow, with_polars, with_nanoarrow]
    for read in readers:
        for table in read(path, sink.getvalue()):
            assert_ragged_equal(table, expected)


def test_duckdb_counts_and_sums_without_the_trailer(written):
    duckdb = pytest.importorskip("duckdb")
    path, _ = written([small_batch((5, 0, 3), prefix=f"{i}-") for i in range(4)])
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    with duckdb.connect() as connection:
        connection.register("records", table)
        rows, tokens = connection.execute(
            "SELECT count(*), sum(len(input_ids)) FROM records"
        ).fetchone()
    assert (rows, tokens) == (12, 32)


def test_plain_arrow_keeps_our_metadata(written):
    batches = three_batches()
    path, stream = written(batches)
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        assert reader.schema.equals(batches[0].schema, check_metadata=True)
        assert reader.num_record_batches == 4
        last, metadata = reader.get_batch_with_custom_metadata(3)
    assert last.num_rows == 0
    assert set(metadata) == {b"ragged_format:trailer", b"ragged_format:trailer_checksum"}
    with pa.ipc.open_stream(stream) as reader:
        for batch in batches:
            got, metadata = reader.read_next_batch_with_custom_metadata()
            assert got.equals(batch)
            assert dict(metadata) == {b"ragged_format:digest": rf.digest(batch).hex().encode()}


def rewrite_with_pyarrow(table):
    """Another batch size, and lists with 32-bit offsets."""
    fields = []
    for field in table.schema:
        if pa.types.is_large_list(field.type):
            item = pa.field("element", field.type.value_type)
            field = pa.field(field.name, pa.list_(item))
        fields.append(field)
    sink = pa.BufferOutputStream()
    narrow = table.cast(pa.schema(fields))
    with pa.ipc.new_stream(sink, narrow.schema) as writer:
        writer.write_table(narrow, max_chunksize=2)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def rewrite_with_polars(table):
    polars = pytest.importorskip("polars")
    sink = io.BytesIO()
    polars.from_arrow(table).write_ipc(sink)
    return polars.read_ipc(io.BytesIO(sink.getvalue()))


def rewrite_with_duckdb(table):
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        connection.register("records", table)
        return connection.sql("SELECT * FROM records").to_arrow_table()


@pytest.mark.parametrize(
    "rewrite", [rewrite_with_pyarrow, rewrite_with_polars, rewrite_with_duckdb]
)
def test_digests_survive_a_rewrite_by_another_tool(rewrite):
    """pola-rs/polars#18316: metadata and nullability are lost; the content is not."""
    batches = three_batches()
    table = pa.Table.from_batches(batches)
    back = rf.canonical(rewrite(table), table.schema)
    assert rf.digest(back) == rf.digest(rf.concat(batches))
    rows = [bytes(row) for batch in batches for row in rf.record_digests(batch)]
    assert [bytes(row) for row in rf.record_digests(back)] == rows


def test_a_rewritten_stream_is_not_taken_for_ours():
    polars = pytest.importorskip("polars")
    sink = io.BytesIO()
    polars.from_arrow(pa.Table.from_batches(three_batches())).write_ipc_stream(sink)
    with pytest.raises(rf.NotRaggedError):
        rf.read_stream(sink.getvalue())
