"""Every argument of every public function, given what it is not: a typed error with a remedy."""

import io
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.compact.files import CompactReader, CompactWriter, is_compact
from ragged_format.packing import (
    attention_mask,
    cu_seqlens,
    deal_rows,
    label_ids,
    pack_row,
    plan_rows,
    planning_columns,
    pred_order,
    tree_leave,
    unpack_row,
    varlen_index,
)
from ragged_format.testing import rollouts

BATCH = rollouts(np.random.default_rng(0), num_samples=4, prompt_length=5, response_length=5)
SCHEMA = BATCH.schema
ROW = pack_row(BATCH, fork="transition", null_advantage="keep")
TOKENS = rf.standard_column("input_ids")


class Nothing:
    """An object that can do nothing."""

    def __repr__(self):
        return "nothing"


NOTHING = Nothing()
WRONG = {
    "batch": [None, 5, "x", {}, [], [None], NOTHING],
    "arrow": [None, 5, "x", {}, NOTHING],
    "batches": [None, 5, "x", {}, [None], NOTHING],
    "schema": [None, 5, "x", {}, NOTHING],
    "path": [None, 5, 1.5, [], b"x", NOTHING],
    "source": [None, 5, 1.5, [], NOTHING],
    "integer": [1.5, "a", None, -1, [], NOTHING],
    "size": [1.5, "a", None, -1, 0, True, [], NOTHING],
    "number": ["a", None, [], -1, NOTHING],
    "columns": [5, "input_ids", [5], [None], ["nope"], NOTHING],
    "names": [5, "abc", [5], [None], NOTHING],
    "choice": [5, None, "nope", [], NOTHING],
    "indices": [1.5, "a", [1.5], ["a"], [None], None, [[0]], [[0], [1, 2]], [99], NOTHING],
    "text": [5, None, [], NOTHING],
    "function": [5, None, "x"],
    "row": [None, 5, "x", {}, [], [None], NOTHING, BATCH],
    "label": [1.5, "a", None, [], 1 << 63, NOTHING],
    "count": [1.5, "a", None, -1, 0, True, [], 1 << 63, NOTHING],
    "share": ["a", None, [], -1, float("nan"), NOTHING],
    "rows": [None, 5, "x", [None], ["a"], [[99]], [[-1]], [[0.5]], [[0, 0]], [[0], [0]], NOTHING],
    "url": ["s3://bucket/name", "memory://name", ""],
    "bytes": [None, 5, "x", NOTHING, b"", b"x"],
    "mapping": [5, "x", [1], {1: 2}],
    "where": [5, "x", {}],
}


def dataset(folder):
    with rf.Writer(folder / "data", SCHEMA) as writer:
        writer.write(BATCH)
    return rf.Dataset(folder / "data")


def file(folder):
    rf.write_file(folder / "data.arrow", BATCH)
    return folder / "data.arrow"


def compact(folder):
    with CompactWriter(folder / "data.arrow", SCHEMA) as writer:
        writer.write(BATCH)
    return folder / "data.arrow"


def stream(folder):
    rf.write_stream(folder / "data.arrows", BATCH)
    return folder / "data.arrows"


def write(writer, *values):
    with writer:
        writer.write(*values)


# What is called, by name: for each argument its kind and the call.
CALLS = {
    "canonical(data)": ("arrow", lambda v, _: rf.canonical(v, SCHEMA)),
    "canonical(schema)": ("schema", lambda v, _: rf.canonical(NOTHING if v is None else BATCH, v)),
    "digest(batch)": ("batch", lambda v, _: rf.digest(v)),
    "record_digests(batch)": ("batch", lambda v, _: rf.record_digests(v)),
    "schema_digest(schema)": ("schema", lambda v, _: rf.schema_digest(v)),
    "parse_schema(schema)": ("schema", lambda v, _: rf.parse_schema(v)),
    "validate(data)": ("arrow", lambda v, _: rf.validate(v)),
    "validate(level)": ("choice", lambda v, _: rf.validate(BATCH, level=v)),
    "validate(where)": ("where", lambda v, _: rf.validate(BATCH, where=v)),
    "sample_schema(vocab_size)": ("size", lambda v, _: rf.sample_schema(vocab_size=v)),
    "sample_schema(columns)": ("columns", lambda v, _: rf.sample_schema(vocab_size=9, columns=v)),
    "sample_schema(root_axes)": ("names", lambda v, _: rf.sample_schema(vocab_size=9, root_axes=v)),
    "packed_schema(vocab_size)": ("size", lambda v, _: rf.packed_schema(vocab_size=v)),
    "packed_schema(columns)": ("columns", lambda v, _: rf.packed_schema(vocab_size=9, columns=v)),
    "packed_schema(root_axes)": ("names", lambda v, _: rf.packed_schema(vocab_size=9, root_axes=v)),
    "standard_column(name)": ("text", lambda v, _: rf.standard_column(v)),
    "standard_column(profile)": ("choice", lambda v, _: rf.standard_column("input_ids", v)),
    "Column(name)": ("text", lambda v, _: rf.Column(v, "token", pa.int8())),
    "Column(axis)": ("text", lambda v, _: rf.Column("own", v, pa.int8())),
    "Column(type)": ("schema", lambda v, _: rf.Column("own", "token", v)),
    "LogProb(mode)": ("choice", lambda v, _: rf.LogProb(v)),
    "RaggedSchema(profile)": (
        "choice", lambda v, _: rf.RaggedSchema(v, 9, [TOKENS], ["token"])
    ),
    "RaggedSchema(vocab_size)": (
        "size", lambda v, _: rf.RaggedSchema("sample", v, [TOKENS], ["token"])
    ),
    "RaggedSchema(columns)": ("names", lambda v, _: rf.RaggedSchema("sample", 9, v, ["token"])),
    "RaggedSchema(root_axes)": ("names", lambda v, _: rf.RaggedSchema("sample", 9, [TOKENS], v)),
    "RaggedSchema(required_features)": (
        "names",
        lambda v, _: rf.RaggedSchema("sample", 9, [TOKENS], ["token"], required_features=v),
    ),
    "RaggedSchema(metadata)": (
        "mapping", lambda v, _: rf.RaggedSchema("sample", 9, [TOKENS], ["token"], metadata=v)
    ),
    "RaggedSchema.select(names)": ("columns", lambda v, _: rf.parse_schema(SCHEMA).select(v)),
    "RaggedSchema[name]": ("text", lambda v, _: rf.parse_schema(SCHEMA)[v]),
    "take(batch)": ("batch", lambda v, _: rf.take(v, [0])),
    "take(indices)": ("indices", lambda v, _: rf.take(BATCH, v)),
    "take(axis)": ("choice", lambda v, _: rf.take(BATCH, [0], axis=v)),
    "take(lengths)": ("indices", lambda v, _: rf.take(BATCH, [0], axis="token", lengths=v)),
    "select(batch)": ("batch", lambda v, _: rf.select(v, "record", np.ones(4, bool))),
    "select(axis)": ("choice", lambda v, _: rf.select(BATCH, v, np.ones(4, bool))),
    "select(keep)": ("indices", lambda v, _: rf.select(BATCH, "record", v)),
    "select_targets(batch)": ("batch", lambda v, _: rf.select_targets(v, np.ones(4, bool))),
    "select_targets(keep)": ("indices", lambda v, _: rf.select_targets(BATCH, v)),
    "slice_axis(batch)": ("batch", lambda v, _: rf.slice_axis(v)),
    "slice_axis(start)": ("integer", lambda v, _: rf.slice_axis(BATCH, v)),
    "slice_axis(stop)": ("integer", lambda v, _: rf.slice_axis(BATCH, 0, -1 if v is None else v)),
    "slice_axis(axis)": ("choice", lambda v, _: rf.slice_axis(BATCH, axis=v)),
    "cut(batch)": ("batch", lambda v, _: rf.cut(v)),
    "cut(start)": ("integer", lambda v, _: rf.cut(BATCH, v)),
    "cut(stop)": ("integer", lambda v, _: rf.cut(BATCH, 0, -1 if v is None else v)),
    "join(batch)": ("batch", lambda v, _: rf.join(v, [4])),
    "join(counts)": ("indices", lambda v, _: rf.join(BATCH, v)),
    "concat(batches)": ("batch", lambda v, _: rf.concat(v)),
    "concat([batch])": ("batch", lambda v, _: rf.concat([v])),
    "concat([…, batch])": ("batch", lambda v, _: rf.concat([BATCH, v])),
    "concat(axis)": ("choice", lambda v, _: rf.concat([BATCH, BATCH], axis=v)),
    "encode_message(batch)": ("batch", lambda v, _: rf.encode_message(v)),
    "decode_message(message)": ("bytes", lambda v, _: rf.decode_message(v, SCHEMA)),
    "decode_message(schema)": (
        "schema", lambda v, _: rf.decode_message(rf.encode_message(BATCH), v)
    ),
    "decode_message(max_bytes)": (
        "size", lambda v, _: rf.decode_message(rf.encode_message(BATCH), SCHEMA, max_bytes=v)
    ),
    "open_source(source)": ("source", lambda v, _: rf.open_source(v)),
    "register_scheme(scheme)": ("text", lambda v, _: rf.register_scheme(v, rf.open_source)),
    "register_scheme(opener)": ("function", lambda v, _: rf.register_scheme("never", v)),
    "read_file(path)": ("path", lambda v, _: rf.read_file(v)),
    "read_file(columns)": ("columns", lambda v, at: rf.read_file(file(at), columns=v)),
    "FileReader(path)": ("path", lambda v, _: rf.FileReader(v)),
    "FileReader(columns)": ("columns", lambda v, at: rf.FileReader(file(at), columns=v)),
    "FileReader(validate)": ("choice", lambda v, at: rf.FileReader(file(at), validate=v)),
    "FileReader.batch(index)": ("integer", lambda v, at: rf.FileReader(file(at)).batch(v)),
    "FileReader.batches(columns)": (
        "columns", lambda v, at: list(rf.FileReader(file(at)).batches(columns=v))
    ),
    "FileWriter(path)": ("path", lambda v, _: rf.FileWriter(v, SCHEMA)),
    "FileWriter(schema)": ("schema", lambda v, at: rf.FileWriter(at / "new", v)),
    "FileWriter(validate)": (
        "choice", lambda v, at: rf.FileWriter(at / "new", SCHEMA, validate=v)
    ),
    "FileWriter.write(batch)": ("batch", lambda v, at: write(rf.FileWriter(at / "new", SCHEMA), v)),
    "FileWriter.write(metadata)": (
        "mapping", lambda v, at: write(rf.FileWriter(at / "new", SCHEMA), BATCH, v)
    ),
    "write_file(path)": ("path", lambda v, _: rf.write_file(v, BATCH)),
    "write_file(batches)": ("batches", lambda v, at: rf.write_file(at / "new", v)),
    "write_file(schema)": (
        "schema", lambda v, at: rf.write_file(at / "new", [] if v is None else BATCH, v)
    ),
    "StreamReader(source)": ("source", lambda v, _: rf.StreamReader(v)),
    "StreamReader(columns)": ("columns", lambda v, at: rf.StreamReader(stream(at), columns=v)),
    "StreamReader(validate)": ("choice", lambda v, at: rf.StreamReader(stream(at), validate=v)),
    "StreamReader(trailing)": ("choice", lambda v, at: rf.StreamReader(stream(at), trailing=v)),
    "StreamReader(max_message_bytes)": (
        "size", lambda v, at: rf.StreamReader(stream(at), max_message_bytes=v)
    ),
    "read_stream(source)": ("source", lambda v, _: rf.read_stream(v)),
    "StreamWriter(sink)": ("source", lambda v, _: rf.StreamWriter(v, SCHEMA)),
    "StreamWriter(schema)": ("schema", lambda v, _: rf.StreamWriter(io.BytesIO(), v)),
    "StreamWriter(validate)": (
        "choice", lambda v, _: rf.StreamWriter(io.BytesIO(), SCHEMA, validate=v)
    ),
    "StreamWriter.write(batch)": (
        "batch", lambda v, _: write(rf.StreamWriter(io.BytesIO(), SCHEMA), v)
    ),
    "StreamWriter.write(metadata)": (
        "mapping", lambda v, _: write(rf.StreamWriter(io.BytesIO(), SCHEMA), BATCH, v)
    ),
    "write_stream(sink)": ("source", lambda v, _: rf.write_stream(v, BATCH)),
    "write_stream(batches)": ("batches", lambda v, _: rf.write_stream(io.BytesIO(), v)),
    "write_stream(schema)": (
        "schema", lambda v, _: rf.write_stream(io.BytesIO(), [] if v is None else BATCH, v)
    ),
    "Writer(path)": ("path", lambda v, _: rf.Writer(v, SCHEMA)),
    "Writer(schema)": ("schema", lambda v, at: rf.Writer(at / "new", v)),
    "Writer(mode)": ("choice", lambda v, at: rf.Writer(at / "new", SCHEMA, mode=v)),
    "Writer(validate)": ("choice", lambda v, at: rf.Writer(at / "new", SCHEMA, validate=v)),
    "Writer(encoding)": ("choice", lambda v, at: rf.Writer(at / "new", SCHEMA, encoding=v)),
    "Writer(batch_rows)": ("size", lambda v, at: rf.Writer(at / "new", SCHEMA, batch_rows=v)),
    "Writer(batch_bytes)": ("size", lambda v, at: rf.Writer(at / "new", SCHEMA, batch_bytes=v)),
    "Writer(max_shard_bytes)": (
        "size", lambda v, at: rf.Writer(at / "new", SCHEMA, max_shard_bytes=v)
    ),
    "Writer(lineage)": ("where", lambda v, at: rf.Writer(at / "new", SCHEMA, lineage=v or 5)),
    "Writer.write(data)": ("batches", lambda v, at: write(rf.Writer(at / "new", SCHEMA), v)),
    "sweep(path)": ("path", lambda v, _: rf.sweep(v)),
    "sweep(grace_s)": ("number", lambda v, at: rf.sweep(dataset(at).path, grace_s=v)),
    "Dataset(path)": ("path", lambda v, _: rf.Dataset(v)),
    "Dataset(columns)": ("columns", lambda v, at: rf.Dataset(dataset(at).path, columns=v)),
    "Dataset(manifest)": ("where", lambda v, at: rf.Dataset(dataset(at).path, manifest=v)),
    "Dataset[index]": ("indices", lambda v, at: dataset(at)[v]),
    "Dataset.take(indices)": ("indices", lambda v, at: dataset(at).take(v)),
    "Dataset.take(columns)": ("columns", lambda v, at: dataset(at).take([0], columns=v)),
    "Dataset.batches(columns)": ("columns", lambda v, at: dataset(at).batches(columns=v)),
    "Dataset.batches(batch_size)": (
        "size", lambda v, at: dataset(at).batches(batch_size=0 if v is None else v)
    ),
    "Dataset.validate(level)": ("choice", lambda v, at: dataset(at).validate(v)),
}  # fmt: skip

# What the functions of packing and the classes of compact files are given.
MORE_CALLS = {
    "CompactWriter(path)": ("path", lambda v, _: CompactWriter(v, SCHEMA)),
    "CompactWriter(url)": ("url", lambda v, _: CompactWriter(v, SCHEMA)),
    "CompactWriter(schema)": ("schema", lambda v, at: CompactWriter(at / "new", v)),
    "CompactWriter(validate)": (
        "choice", lambda v, at: CompactWriter(at / "new", SCHEMA, validate=v)
    ),
    "CompactWriter.write(batch)": (
        "batch", lambda v, at: write(CompactWriter(at / "new", SCHEMA), v)
    ),
    "CompactReader(path)": ("path", lambda v, _: CompactReader(v)),
    "CompactReader(url)": ("url", lambda v, _: CompactReader(v)),
    "CompactReader(columns)": ("columns", lambda v, at: CompactReader(compact(at), columns=v)),
    "CompactReader.batch(index)": ("integer", lambda v, at: CompactReader(compact(at)).batch(v)),
    "CompactReader.batches(columns)": (
        "columns", lambda v, at: list(CompactReader(compact(at)).batches(columns=v))
    ),
    "is_compact(path)": ("path", lambda v, _: is_compact(v)),
    "pack_row(samples)": ("batch", lambda v, _: pack_row(v)),
    "pack_row(packing)": ("choice", lambda v, _: pack_row(BATCH, packing=v)),
    "pack_row(fork)": ("choice", lambda v, _: pack_row(BATCH, fork=v)),
    "pack_row(null_advantage)": ("choice", lambda v, _: pack_row(BATCH, null_advantage=v)),
    "unpack_row(packed)": ("row", lambda v, _: unpack_row(v)),
    "plan_rows(samples)": ("batch", lambda v, _: plan_rows(v, 99)),
    "plan_rows(token_budget)": ("count", lambda v, _: plan_rows(BATCH, v)),
    "plan_rows(ranks)": ("count", lambda v, _: plan_rows(BATCH, 99, v)),
    "plan_rows(window)": ("count", lambda v, _: plan_rows(BATCH, 99, window=v)),
    "plan_rows(max_repeat)": ("share", lambda v, _: plan_rows(BATCH, 99, max_repeat=v)),
    "plan_rows(packing)": ("choice", lambda v, _: plan_rows(BATCH, 99, packing=v)),
    "plan_rows(fork)": ("choice", lambda v, _: plan_rows(BATCH, 99, fork=v)),
    "plan_rows(tail)": ("choice", lambda v, _: plan_rows(BATCH, 99, tail=v)),
    "deal_rows(samples)": ("batch", lambda v, _: deal_rows(v, [[0]], 99)),
    "deal_rows(rows)": ("rows", lambda v, _: deal_rows(BATCH, v, 99)),
    "deal_rows(token_budget)": ("count", lambda v, _: deal_rows(BATCH, [[0]], v)),
    "deal_rows(ranks)": ("count", lambda v, _: deal_rows(BATCH, [[0]], 99, v)),
    "deal_rows(tail)": ("choice", lambda v, _: deal_rows(BATCH, [[0]], 99, tail=v)),
    "planning_columns(schema)": ("schema", lambda v, _: planning_columns(v)),
    "label_ids(ignored)": ("label", lambda v, _: label_ids(ROW, ignored=v)),
    **{
        f"{call.__name__}(row)": ("row", lambda v, _, call=call: call(v))
        for call in (tree_leave, cu_seqlens, varlen_index, attention_mask, label_ids, pred_order)
    },
}  # fmt: skip


def test_every_public_name_is_called():
    """Errors, results and constants take no arguments of callers."""
    plain = {"Axis", "RaggedWarning", "Source", "TargetFlag", "Where"}
    called = {name.partition("(")[0].partition("[")[0].partition(".")[0] for name in CALLS}
    functions = {
        name for name in rf.__all__ if not name.endswith("Error") and name not in plain
    }  # fmt: skip
    assert functions == called


@pytest.mark.parametrize("name", CALLS | MORE_CALLS)
def test_what_an_argument_is_not(tmp_path, name):
    kind, call = (CALLS | MORE_CALLS)[name]
    for number, value in enumerate(WRONG[kind]):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(rf.RaggedError) as caught:
            call(value, place)
        error = caught.value
        told = [error.expected is not None, error.got is not None, bool(error.remedy)]
        assert all(told), f"{value!r}: {error}"


@pytest.mark.parametrize(
    "call",
    [
        rf.digest, rf.encode_message, rf.cut, rf.slice_axis, partial(rf.take, indices=[0, 1]),
        partial(rf.select, axis="record", keep=np.ones(4, bool)), partial(rf.join, counts=[4]),
    ],
    ids=lambda call: getattr(call, "__name__", None) or call.func.__name__,
)  # fmt: skip
def test_a_table_is_the_batch_that_it_holds(call):
    table = pa.Table.from_batches([BATCH.slice(0, 1), BATCH.slice(1)])
    assert call(table) == call(BATCH)
