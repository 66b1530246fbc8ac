"""The conformance vectors: this library passes them, and each shows its code alone."""

import io
import json
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import zstandard
from support.containers import model_digest, model_schema_digest
from support.rule_oracle import broken_codes

import ragged_format as rf
from ragged_format.codes import CODES
from ragged_format.compact.files import CompactReader
from ragged_format.digest import schema_digest
from ragged_format.schema import RECORD, type_name
from spec.vectors.generate import UNSHOWN, write_vectors

FOLDER = Path(__file__).parents[2] / "spec" / "vectors" / "v0"
VALID = sorted((FOLDER / "valid").glob("*.json"))
INVALID = sorted((FOLDER / "invalid").glob("*.json"))
valid = pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
COMPACT = [path for path in VALID if "compact" in path.stem]
# What readers that know nothing of the format see as records.
plain = pytest.mark.parametrize(
    "path", [path for path in VALID if path not in COMPACT], ids=lambda path: path.stem
)
invalid = pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
STRUCTURAL = {code for code, entry in CODES.items() if entry.level == "structural"}
FULL = {code for code, entry in CODES.items() if entry.level == "full"}


def facts_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def data_of(path):
    """Return the file or folder of a vector."""
    (found,) = [p for p in path.parent.glob(f"{path.stem}*") if (p != path and p.stem == path.stem)
                or p.name == f"{path.stem}.arrows.zst"]  # fmt: skip
    return found


def read(path, *, validate="full", verify=True):
    """Return all batches of a vector through the reader that it is for."""
    source = data_of(path)
    if source.is_dir():
        dataset = rf.Dataset(source)
        if verify:
            dataset.verify()
        if validate != "off":
            dataset.validate(validate)
        return list(dataset.batches())
    if "compact" in path.stem:
        batches = list(CompactReader(source, verify=verify).batches())
        for batch in batches:
            rf.validate(batch)
        return batches
    if source.suffix == ".arrow":
        return list(rf.read_file(source, validate=validate, verify=verify).batches())
    return list(rf.read_stream(source, validate=validate, verify=verify))


def as_json(batch):
    rows = batch.to_pylist()
    for column in rf.parse_schema(batch.schema):
        if column.type == pa.binary():
            assert column.axis == RECORD
            for row in rows:
                row[column.name] = None if row[column.name] is None else row[column.name].hex()
    return rows


# The generator


def test_generation_is_deterministic_and_current(tmp_path):
    write_vectors(tmp_path / "v0")
    made = {p.relative_to(tmp_path / "v0"): p for p in (tmp_path / "v0").rglob("*") if p.is_file()}
    kept = {p.relative_to(FOLDER): p for p in FOLDER.rglob("*") if p.is_file()}
    assert set(made) == set(kept)
    for name, path in made.items():
        assert path.read_bytes() == kept[name].read_bytes(), name


def test_vectors_stay_small():
    assert sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()) < 600_000


def test_every_code_has_a_vector_or_a_reason():
    shown = {facts_of(path)["code"] for path in INVALID}
    unshown = {code for code in CODES if code.startswith(tuple(UNSHOWN))}
    assert shown | unshown == set(CODES)
    assert not shown & unshown


# Valid vectors


@valid
def test_valid_vector_reads_as_stated(path):
    facts = facts_of(path)
    batches = read(path)
    assert [as_json(batch) for batch in batches] == [b["records"] for b in facts["batches"]]
    assert [rf.digest(batch).hex() for batch in batches] == [b["digest"] for b in facts["batches"]]
    source = rf.open_source(data_of(path))
    for _ in source.batches():  # to the end, which closes a stream
        pass
    schema = source.ragged_schema
    assert (schema.profile, schema.vocab_size) == (facts["profile"], facts["vocab_size"])
    columns = [[c.name, c.axis, type_name(c.type), list(c.shape)] for c in schema]
    assert columns == facts["columns"]
    assert schema_digest(source.schema).hex() == facts["schema_digest"]


@valid
def test_valid_vector_keeps_every_rule_by_the_oracle(path):
    for batch in read(path):
        assert broken_codes(batch, rf.parse_schema(batch.schema)) == set()


@valid
def test_digests_of_valid_vector_follow_the_definition(path):
    facts = facts_of(path)
    for batch, stated in zip(read(path), facts["batches"], strict=True):
        assert model_digest(batch).hex() == stated["digest"]
        assert model_schema_digest(batch.schema).hex() == facts["schema_digest"]


def test_first_offset_vector_begins_behind_a_value():
    batch = read(FOLDER / "valid" / "sample-first-offset.json", validate="off")[0]
    assert batch.column("input_ids").offsets[0].as_py() == 1


def test_batch_metadata_vector():
    path = FOLDER / "valid" / "sample-batch-metadata.json"
    reader = rf.read_stream(data_of(path))
    got = [{k.decode(): v.hex() for k, v in reader.metadata.items()} for _ in reader]
    assert got == facts_of(path)["metadata"]


def test_dataset_vector():
    dataset = rf.Dataset(FOLDER / "valid" / "dataset-two-shards")
    assert dataset.generation == 3
    assert dataset.lineage == {"source": "vectors", "runs": [1, 2.5, None]}
    assert dataset.take([2, 0]).column("sample_id").to_pylist() == ["c", "a"]


@pytest.mark.parametrize("path", COMPACT, ids=lambda path: path.stem)
def test_readers_of_plain_batches_refuse_compact_files(path):
    for file in list(path.parent.glob(f"{path.stem}/*1.arrow")) or [data_of(path)]:
        with pytest.raises(rf.UnsupportedFeatureError):
            rf.read_file(file)


# Valid vectors through readers that know nothing of the format


def plain_tables(path):
    """Return what plain Arrow sees: one table per file, the trailer a batch without rows."""
    source = data_of(path)
    if source.is_dir():
        names = [s["name"] for s in json.loads((source / "manifest.json").read_bytes())["shards"]]
        return [pa.ipc.open_file((source / name).read_bytes()).read_all() for name in names]
    data = source.read_bytes()
    if source.suffix == ".zst":
        decompressor = zstandard.ZstdDecompressor()
        data = decompressor.stream_reader(data, read_across_frames=True).read()
    is_file = source.suffix == ".arrow"
    return [(pa.ipc.open_file if is_file else pa.ipc.open_stream)(data).read_all()]


def expected_rows(path):
    return [row for batch in facts_of(path)["batches"] for row in batch["records"]]


@plain
def test_plain_arrow_reads_valid_vector(path):
    rows = []
    for table in plain_tables(path):
        table.validate(full=True)
        for batch in table.to_batches():
            rows += as_json(batch)
    assert rows == expected_rows(path)


@plain
def test_polars_reads_valid_vector(path):
    frames = []
    for table in plain_tables(path):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        frames.append(pl.read_ipc_stream(sink.getvalue()))
    source = data_of(path)
    if source.suffix == ".arrow":
        frames = [pl.read_ipc(source)]
    elif source.suffix == ".arrows":
        frames = [pl.read_ipc_stream(source)]
    rows = [_listed(row) for frame in frames for row in frame.to_dicts()]
    assert rows == expected_rows(path)


def _listed(value):
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, pl.Series | np.ndarray | list | tuple):
        return [_listed(item) for item in value]
    return value


@plain
def test_duckdb_reads_valid_vector(path):
    if any(kind == "float16" for _, _, kind, _ in facts_of(path)["columns"]):
        return  # a type that DuckDB 2.0 does not have
    rows = []
    for table in plain_tables(path):
        with duckdb.connect() as connection:
            connection.register("records", table)
            result = connection.execute("from records")
            names = [entry[0] for entry in result.description]
            rows += [dict(zip(names, _listed(row), strict=True)) for row in result.fetchall()]
    assert rows == expected_rows(path)


# Invalid vectors


@invalid
def test_invalid_vector_is_refused_with_its_code_and_place(path):
    facts = facts_of(path)
    with pytest.raises(rf.RaggedError) as info:
        read(path, verify=facts["verify"])
    error = info.value
    assert error.code == facts["code"]
    assert type(error).__name__ == CODES[error.code].error
    assert {key: getattr(error.where, key) for key in facts["where"]} == facts["where"]


@invalid
def test_unverified_faults_are_refused_by_verifying_readers_too(path):
    if facts_of(path)["verify"]:
        return
    with pytest.raises(rf.ChecksumError):
        read(path)


@invalid
def test_values_are_judged_by_validation_alone(path):
    """Containers of wrong values are whole: only validation, at the right level, refuses them."""
    code = facts_of(path)["code"]
    if code not in (STRUCTURAL | FULL) - {"RF-I001", "RF-I002"} or data_of(path).is_dir():
        return
    read(path, validate="off")
    if code in FULL:
        read(path, validate="structural")
    else:
        with pytest.raises(rf.InvariantError):
            read(path, validate="structural")
    batches = list(rf.read_stream(data_of(path)))
    with pytest.raises(rf.InvariantError) as info:
        rf.validate(pa.Table.from_batches(batches))
    assert info.value.code == code


@invalid
def test_values_break_this_rule_alone_by_the_oracle(path):
    code = facts_of(path)["code"]
    if code not in (STRUCTURAL | FULL) - {"RF-I001"} or data_of(path).is_dir():
        return
    (batch,) = [b for b in plain_tables(path)[0].to_batches() if b.num_rows]
    assert broken_codes(batch, rf.parse_schema(batch.schema)) == {code}
