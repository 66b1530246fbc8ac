"""`ragged inspect`: schema on axes, identity, distribution, records."""

import io
import json
from itertools import chain

import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.packing import pack_row

KEYS = {
    "command", "ok", "path", "kind", "profile", "format_version", "vocab_size",
    "required_features", "metadata", "dataset", "records", "tokens", "targets", "elements",
    "axes", "columns", "counts", "shown",
}  # fmt: skip
COLUMN_KEYS = {
    "name", "axis", "type", "shape", "fill", "nullable", "opens", "mask", "log_prob", "head_kind",
    "approximate", "share_key", "media",
}  # fmt: skip
COUNT_KEYS = {"elements", "total", "mean", "median", "p90", "p99", "max", "histogram"}


def test_keys_and_values_of_a_dataset(invoke_json, dataset, samples):
    found = invoke_json("inspect", dataset)
    assert set(found) == KEYS
    assert (found["kind"], found["profile"], found["vocab_size"]) == ("dataset", "sample", 500)
    own = rf.Dataset(dataset)
    assert found["dataset"]["generation"] == 2
    assert found["dataset"]["fingerprint"] == own.fingerprint
    assert found["dataset"]["lineage"] == {"made_by": "a test"}
    assert [s["rows"] for s in found["dataset"]["shards"]] == [10, 14]
    assert found["dataset"]["bytes"] == sum(s["bytes"] for s in found["dataset"]["shards"])
    assert [c["name"] for c in found["columns"]] == samples.schema.names
    assert all(set(c) == COLUMN_KEYS for c in found["columns"])
    assert {"name": "target", "parent": "token", "counts": "completion_mask", "mask": True} in (
        found["axes"]
    )
    counts = list(chain.from_iterable(samples["candidate_counts"].to_pylist()))
    assert set(found["counts"]["candidate"]) == COUNT_KEYS
    assert found["counts"]["candidate"]["total"] == sum(counts)
    assert sum(b["count"] for b in found["counts"]["candidate"]["histogram"]) == len(counts)
    assert found["shown"] == []


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_files_and_streams_have_no_dataset(invoke_json, invoke, tmp_path, samples, kind):
    path = tmp_path / "a"
    (rf.write_file if kind == "file" else rf.write_stream)(path, [samples])
    found = invoke_json("inspect", path)
    assert (found["kind"], found["dataset"], found["records"]) == (kind, None, 24)
    assert "shard" not in invoke("inspect", path).output


def test_text_draws_the_tree_of_axes(invoke, dataset):
    text = invoke("inspect", dataset).stdout
    axes = [line[:20].rstrip() for line in text.splitlines() if "─ " in line]
    assert axes == ["  └─ token", "     └─ target", "        ├─ candidate", "        └─ topk"]
    assert "float32  processed log-prob over the support" in text
    assert "opens target (0 or 1)" in text
    assert "2 shards, generation 2" in text
    assert "█" in text


def test_a_packed_row_is_found_by_its_member(invoke, invoke_json, tmp_path, samples):
    rows = [pack_row(samples.slice(0, 4)), pack_row(samples.slice(4, 4))]
    rf.write_file(tmp_path / "a.arrow", rows)
    sample_id = samples["sample_id"][6].as_py()
    found = invoke_json("inspect", tmp_path / "a.arrow", "--record", sample_id)
    assert [record["index"] for record in found["shown"]] == [1]
    text = invoke("inspect", tmp_path / "a.arrow", "--record", "0").stdout
    axes = [line[:20].rstrip() for line in text.splitlines() if "─ " in line]
    assert axes == [
        "  ├─ token", "  ├─ node", "  ├─ target", "  │  ├─ candidate", "  │  └─ topk",
        "  └─ member",
    ]  # fmt: skip
    assert "record 0" in text


def test_records_in_json_are_whole(invoke_json, dataset, samples):
    found = invoke_json("inspect", dataset, "--head", "2", "--record", "11")
    assert [record.pop("index") for record in found["shown"]] == [0, 1, 11]
    expected = samples.take([0, 1, 11]).to_pylist()
    assert found["shown"] == json.loads(json.dumps(expected))


def test_a_record_that_head_shows_is_shown_once(invoke_json, dataset):
    found = invoke_json("inspect", dataset, "--head", "2", "--record", "1")
    assert [record["index"] for record in found["shown"]] == [0, 1]


def test_an_id_comes_before_an_index_of_the_same_digits(invoke_json, tmp_path):
    schema = rf.sample_schema(vocab_size=9, columns=[])
    rows = [
        {"sample_id": name, "input_ids": [1], "completion_mask": [0]} for name in ("b", "0", "c")
    ]
    rf.write_file(tmp_path / "a", [pa.RecordBatch.from_pylist(rows, schema=schema)])
    for record, index in (("0", 1), ("2", 2), ("c", 2)):
        found = invoke_json("inspect", tmp_path / "a", "--record", record)
        assert [r["index"] for r in found["shown"]] == [index]


@pytest.mark.parametrize("record", ["24", "nobody", "", "-1"])
def test_a_record_that_is_not_there(invoke_json, dataset, record):
    found = invoke_json("inspect", dataset, f"--record={record}", exit_code=1)
    assert (found["code"], found["got"]) == ("RF-L002", record)


def test_long_values_are_cut_and_sets_stand_by_target(invoke, tmp_path):
    schema = rf.sample_schema(
        vocab_size=99,
        columns=["provenance", "reward", "candidate_counts", "candidate_ids",
                 rf.Column("empty_counts", "target", pa.int32(), opens="empty"),
                 rf.Column("kept", "record", pa.float64(), nullable=True)],
    )  # fmt: skip
    row = {
        "sample_id": "a", "provenance": json.dumps({"text": "x" * 200}), "reward": None,
        "kept": 1.5, "input_ids": list(range(12)), "completion_mask": [0] + [1] * 11,
        "candidate_counts": [2] + [0] * 10, "candidate_ids": [1, 5], "empty_counts": [0] * 11,
    }  # fmt: skip
    with rf.Writer(tmp_path / "a", schema) as writer:
        writer.write(pa.RecordBatch.from_pylist([row], schema=schema))
    lines = invoke("inspect", tmp_path / "a", "--head", "1").stdout.splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines[lines.index("record 0") + 1 :])
    assert shown["candidate_ids"] == "[1 5] [] [] [] … (11)"
    assert shown["input_ids"] == "0 1 2 3 4 5 6 7 8 9 … (12)"
    assert shown["reward"] == "null"
    assert shown["provenance"].endswith("…")
    assert "  0 (full)  10  90.9%" in "\n".join(lines)
    assert "empty elements per target" in "\n".join(lines)


def test_many_shards_are_counted_not_listed(invoke, tmp_path, samples):
    with rf.Writer(tmp_path / "a", samples.schema, batch_rows=2, max_shard_bytes=1) as writer:
        writer.write(samples)
    text = invoke("inspect", tmp_path / "a").stdout
    assert text.count(".arrow  2 records") == 10
    assert "… 2 more" in text


def test_declarations_are_described(invoke, tmp_path):
    schema = rf.sample_schema(
        vocab_size=9,
        columns=[
            rf.Column("routed", "token", pa.int16(), shape=(2, 3), share_key=True),
            rf.Column("image", "record", pa.binary(), nullable=True, media=True),
            rf.Column("draw_counts", "target", pa.int32(), opens="draw", head_kind="draws"),
            rf.Column("draw_ids", "draw", pa.int32()),
            rf.Column("draw_weights", "draw", pa.float32()),
            rf.Column(
                "halves", "target", pa.float16(), approximate=True,
                log_prob=rf.LogProb("raw", "vocabulary", "logit", temperature=0.5),
            ),
        ],
        root_axes=["frame"],
    ).with_metadata(None)  # fmt: skip
    schema = schema.with_metadata({**rf.sample_schema(
        vocab_size=9, columns=[], root_axes=["frame"]).metadata, b"run": b"7"})  # fmt: skip
    sink = io.BytesIO()
    rf.write_stream(sink, [], schema)
    text = invoke("inspect", "-", stdin=sink.getvalue()).stdout
    for words in (
        "int16[2][3]  share key", "binary       nullable, media", "opens draw, draws",
        "float16      raw logit over the vocabulary, at temperature 0.5, approximate",
        "metadata    run = 7", "└─ frame",
    ):  # fmt: skip
        assert words in text


def test_broken_lists_are_an_error_and_no_crash(invoke_json, tmp_path, samples, monkeypatch):
    """Decreasing offsets crash readers that trust them (apache/arrow#37733 and the like)."""
    offsets = pa.array([0, 3, 1, 4], pa.int64())
    schema = rf.sample_schema(vocab_size=9, columns=[])
    values = [pa.array(["a", "b", "c"])]
    for name in ("input_ids", "completion_mask"):
        kind = schema.field(name).type
        values.append(
            pa.LargeListArray.from_arrays(offsets, pa.array([0] * 4, kind.value_type), type=kind)
        )
    batch = pa.RecordBatch.from_arrays(values, schema=schema)
    monkeypatch.setattr(
        "ragged_format.cli.sources.open_source",
        lambda path: type("Source", (), {
            "ragged_schema": rf.parse_schema(schema), "num_rows": None,
            "batches": lambda self, columns: [batch],
        })(),
    )  # fmt: skip
    assert invoke_json("inspect", "x", "--head", "2", exit_code=1)["code"] == "RF-I001"


def test_the_lineage_is_a_line_for_each_job(invoke, samples, tmp_path):
    jobs = [
        {"job": "convert", "options": {"adapter": "vllm", "options": {"vocab_size": 9}}},
        {"job": "merge", "options": {}, "figures": {"many": "x" * 1000}},
        {"job": "filter", "options": {"where": "y" * 1000}},
    ]  # fmt: skip
    for n, lineage in enumerate(({"jobs": jobs, "made_by": "a test"}, {"jobs": "odd"})):
        with rf.Writer(tmp_path / str(n), samples.schema, lineage=lineage) as writer:
            writer.write(samples)
    shown = invoke("inspect", tmp_path / "0").output
    assert "convert, adapter vllm, vocab_size 9\n" in shown
    assert "merge\n" in shown
    assert "made_by = a test" in shown
    assert "x" * 9 not in shown
    assert shown.count("y") < 400
    assert "jobs = odd" in invoke("inspect", tmp_path / "1").output
