"""`ragged validate`: what is valid, what is not, and how it says so."""

import io
import os

import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.cli.totals import Totals

KEYS = {
    "command", "ok", "path", "kind", "profile", "format_version", "vocab_size",
    "records", "tokens", "targets", "elements", "seconds",
}  # fmt: skip
ERROR_KEYS = {"command", "ok", "error", "code", "what", "where", "expected", "got", "remedy"}


def stream_of(batch, **options):
    sink = io.BytesIO()
    rf.write_stream(sink, [batch.slice(0, 5), batch.slice(5)], **options)
    return sink.getvalue()


def places(tmp_path, dataset, samples):
    rf.write_file(tmp_path / "a.arrow", [samples])
    (tmp_path / "a.arrows").write_bytes(stream_of(samples))
    return {"dataset": dataset, "file": tmp_path / "a.arrow", "stream": tmp_path / "a.arrows"}


@pytest.mark.parametrize("kind", ["dataset", "file", "stream"])
def test_valid_data_of_every_kind(invoke, invoke_json, tmp_path, dataset, samples, kind):
    path = places(tmp_path, dataset, samples)[kind]
    found = invoke_json("validate", path)
    assert set(found) == KEYS
    assert found["kind"] == kind
    assert found["records"] == found["elements"]["record"] == 24
    assert found["tokens"] == sum(map(len, samples["input_ids"].to_pylist()))
    assert found["targets"] == sum(map(len, samples["candidate_counts"].to_pylist()))
    assert found["elements"]["candidate"] == sum(map(len, samples["candidate_ids"].to_pylist()))
    text = invoke("validate", path).stdout
    assert text.startswith(f"valid: {path}\n")
    assert f"24 records, {found['tokens']:,} tokens, {found['targets']:,} targets" in text
    assert ("manifest" in text) == (kind == "dataset")


def test_a_stream_on_standard_input(invoke_json, samples):
    found = invoke_json("validate", "-", stdin=stream_of(samples))
    assert (found["kind"], found["records"]) == ("stream", 24)


def test_data_without_records_is_valid(invoke_json, tmp_path):
    with rf.Writer(tmp_path / "empty", rf.sample_schema(vocab_size=9)):
        pass
    assert invoke_json("validate", tmp_path / "empty")["records"] == 0


def broken(batch):
    """The samples with one id outside the vocabulary in the second stored batch."""
    rows = batch.to_pylist()
    rows[7]["input_ids"][0] = 500
    return pa.RecordBatch.from_pylist(rows, schema=batch.schema)


def test_an_invalid_value_is_named_by_code_and_place(invoke, invoke_json, tmp_path, samples):
    (tmp_path / "a.arrows").write_bytes(stream_of(broken(samples)))
    done = invoke("validate", tmp_path / "a.arrows")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: [RF-I007]")
    found = invoke_json("validate", tmp_path / "a.arrows", exit_code=1)
    assert set(found) == ERROR_KEYS
    assert (found["error"], found["code"]) == ("InvariantError", "RF-I007")
    assert found["where"] == {
        "file": str(tmp_path / "a.arrows"), "batch": 1, "row": 2, "column": "input_ids",
        "position": 0,
    }  # fmt: skip


def test_an_invalid_value_in_a_dataset_is_named_by_its_shard(invoke_json, tmp_path, samples):
    path = tmp_path / "data"
    for mode, part in (("error", samples.slice(10)), ("append", broken(samples).slice(0, 10))):
        with rf.Writer(path, samples.schema, mode=mode, validate="off", batch_rows=4) as writer:
            writer.write(part)
    found = invoke_json("validate", path, exit_code=1)
    assert found["where"] == {
        "file": str(path / rf.Dataset(path).shards[1].name), "batch": 1, "row": 3,
        "column": "input_ids", "position": 0,
    }  # fmt: skip


def test_an_id_that_two_shards_have_is_found(invoke_json, tmp_path, samples):
    path = tmp_path / "data"
    for mode in ("error", "append"):
        with rf.Writer(path, samples.schema, mode=mode) as writer:
            writer.write(samples.slice(0, 3))
    found = invoke_json("validate", path, exit_code=1)
    assert found["code"] == "RF-I006"
    assert found["where"]["file"] == str(path / rf.Dataset(path).shards[1].name)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda data: data[:-8], "RF-C003"),
        (lambda data: data[: len(data) // 2], "RF-C002"),
        (lambda data: b"", "RF-C002"),
        (lambda data: b"{}\n" + data, "RF-S001"),
        (lambda data: data[:-2000] + b"\x7f" + data[-1999:], "RF-C"),
    ],
    ids=["no end mark", "half", "empty", "not arrow", "changed"],
)
def test_damaged_streams(invoke_json, tmp_path, samples, spoil, code):
    (tmp_path / "a.arrows").write_bytes(spoil(stream_of(samples)))
    found = invoke_json("validate", tmp_path / "a.arrows", exit_code=1)
    assert found["code"].startswith(code)
    assert invoke_json("validate", "-", stdin=spoil(stream_of(samples)), exit_code=1)["code"]


def test_a_shard_that_changed_or_is_gone(invoke_json, tmp_path, samples):
    path = tmp_path / "data"
    with rf.Writer(path, samples.schema) as writer:
        writer.write(samples)
    shard = path / rf.Dataset(path).shards[0].name
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert invoke_json("validate", path, exit_code=1)["code"] == "RF-C004"
    shard.unlink()
    assert invoke_json("validate", path, exit_code=1)["code"] == "RF-C006"


def test_arrow_data_that_is_not_of_this_format(invoke_json, tmp_path):
    table = pa.table({"a": [1]})
    with pa.ipc.new_stream(str(tmp_path / "a.arrows"), table.schema) as writer:
        writer.write_table(table)
    assert invoke_json("validate", tmp_path / "a.arrows", exit_code=1)["code"] == "RF-S001"


@pytest.mark.parametrize("command", ["validate", "inspect"])
def test_places_where_nothing_is(invoke_json, tmp_path, command):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "folder", tmp_path / "folder" / "below"):
        found = invoke_json(command, path, exit_code=1)
        assert (found["error"], found["code"]) == ("DatasetNotFoundError", "RF-C008")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(invoke_json, tmp_path, samples):
    path = tmp_path / "a.arrows"
    path.write_bytes(stream_of(samples))
    path.chmod(0)
    assert invoke_json("validate", path, exit_code=1)["error"] == "PermissionError"


def test_totals_count_every_axis_of_own_schemas():
    schema = rf.sample_schema(
        vocab_size=9,
        columns=[
            rf.Column("name", "frame", pa.string()),
            rf.Column("pixels", "frame", pa.uint8(), shape=(2, 2)),
            rf.Column("box_counts", "frame", pa.int32(), opens="box"),
        ],
        root_axes=["frame", "unused"],
    )
    row = {
        "sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1],
        "name": ["x", "y"], "pixels": [[0] * 4] * 2, "box_counts": [3, 0],
    }  # fmt: skip
    totals = Totals(rf.parse_schema(schema))
    totals.add(pa.RecordBatch.from_pylist([row, row | {"sample_id": "b"}], schema=schema))
    assert totals.columns == ["box_counts", "completion_mask", "pixels"]
    assert totals.elements == {"record": 2, "token": 4, "target": 2, "frame": 4, "box": 6}
    assert list(totals.counts) == ["box"]
