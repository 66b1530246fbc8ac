"""Axolotl's distillation rows: right-aligned lists, K + 1 entries, both versions."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.adapters import axolotl
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.lists import flat, to_numpy

DATA = Path(__file__).parents[1] / "data" / "axolotl_kd"
VOCAB = 49152
RULES = json.loads((DATA / "rules.json").read_text())


def real_rows(version=1):
    with np.load(DATA / "transformed.npz") as stored:
        rows = []
        for number, row in enumerate(axolotl.payloads(str(DATA / "rows_v1.jsonl"))):
            row |= {k: stored[f"row{number}.{k}"].tolist() for k in ("input_ids", "labels")}
            if version == 2:
                lists = row["logprobs"]
                row["target_token_ids"] = [
                    [int(e["token"].split(":")[1]) for e in part] for part in lists
                ]
                row["logprobs"] = [[e["logprob"] for e in part] for part in lists]
            rows.append(row)
    return rows


def convert(*rows, report=None, vocab_size=10, **options):
    batch = axolotl.to_samples(rows, vocab_size=vocab_size, report=report, **options)
    rf.validate(batch)
    return batch


@pytest.mark.parametrize("version", [1, 2])
def test_real_rows_keep_the_realised_token(version):
    """axolotl-ai-cloud/axolotl#2700: rows of K + 1 entries were cut, or broke the padding."""
    report = ConversionReport()
    rows = real_rows(version)
    batch = convert(*rows, report=report, vocab_size=VOCAB)
    assert report.unbalanced() == []
    sizes = [len(part) for row in rows for part in row["logprobs"]]
    assert to_numpy(flat(batch.column("teacher_topk_counts")).values).tolist() == sizes
    assert set(sizes) == {8, 9}
    # The realised token is in every head, so that its log-prob is known.
    assert "teacher_log_probs" in batch.schema.names
    assert batch.column("sample_id").to_pylist() == [f"rows_v1/{i}" for i in range(3)]
    back = axolotl.to_rows(batch, version=version)
    for mine, theirs in zip(back, rows, strict=True):
        for name in ("input_ids", "labels", "logprobs", *["target_token_ids"][: version - 1]):
            assert mine[name] == theirs[name], name


def test_versions_give_the_same_samples():
    assert convert(*real_rows(1), vocab_size=VOCAB).equals(convert(*real_rows(2), vocab_size=VOCAB))


def test_lists_are_at_the_positions_where_axolotl_puts_them():
    """vllm-project/vllm#5846: the first and last list show a shift by one."""
    batch = convert(*real_rows(), vocab_size=VOCAB)
    with np.load(DATA / "transformed.npz") as stored:
        for row in range(3):
            tables = {
                k: stored[f"row{row}.{k}"]
                for k in ("target_mask", "target_token_ids", "target_logprobs")
            }
            one = rf.take(batch, [row])
            mask = np.array(one.column("completion_mask")[0].as_py())
            np.testing.assert_array_equal(mask, tables["target_mask"][:, 0])
            counts = np.array(one.column("teacher_topk_counts")[0].as_py())
            first = np.cumsum(counts) - counts
            ids = np.array(one.column("teacher_topk_ids")[0].as_py())
            values = np.array(one.column("teacher_topk_log_probs")[0].as_py())
            slots = first[:, None] + np.arange(8)
            np.testing.assert_array_equal(ids[slots], tables["target_token_ids"][mask == 1])
            # Its values are those of the first eight, renormalised.
            eight = values[slots]
            eight -= np.log(np.exp(eight).sum(axis=1, keepdims=True))
            np.testing.assert_allclose(
                eight, tables["target_logprobs"][mask == 1], rtol=0, atol=1e-5
            )


def test_transformed_rows_are_read():
    with np.load(DATA / "transformed.npz") as stored:
        rows = [
            {k.split(".")[1]: stored[k] for k in stored.files if k.startswith(f"row{n}.")}
            for n in range(3)
        ]
    report = ConversionReport()
    batch = convert(*rows, report=report, vocab_size=VOCAB)
    assert report.head_entries.stored == report.head_entries.taken == 8 * 91
    # It dropped realised tokens, so that their log-prob is not known.
    assert report.noted["heads_without_realized_token"] > 0
    assert "teacher_log_probs" not in batch.schema.names
    uneven = dict(rows[0], target_token_ids=rows[0]["target_token_ids"][:, :7])
    with pytest.raises(ConversionError, match="tables of one shape"):
        convert(uneven, vocab_size=VOCAB)


def entry(token, value):
    return {"token": f"token_id:{token}", "logprob": value}


def row(*lists, **more):
    return {"input_ids": [7, 5, 6], "labels": [-100, 5, 6], "logprobs": list(lists)} | more


def test_lists_cover_the_last_tokens():
    batch = convert(row([entry(6, -0.5)]))
    assert batch.column("teacher_topk_counts").to_pylist() == [[0, 1]]
    assert batch.column("target_flags").to_pylist() == [[16, 0]]
    bare = {k: v for k, v in row([entry(6, -0.5)]).items() if k != "labels"}
    assert convert(bare).column("completion_mask").to_pylist() == [[0, 0, 1]]
    with pytest.raises(ConversionError, match="at most one list per token"):
        convert(row([], [], [], []))


def test_the_rules_that_axolotl_has_for_odd_rows():
    assert RULES["None row inside"].startswith("TypeError")
    none = convert(row(None, [entry(6, -0.5)]))
    assert none.column("target_flags").to_pylist() == [[16, 0]]
    lists = [[entry(5, -0.2), entry(6, -2.1), entry(7, -4.0)], [entry(6, -0.2), entry(5, -2.1)]]
    assert convert(row(*lists)).column("teacher_topk_counts").to_pylist() == [[3, 2]]
    report = ConversionReport()
    unsorted = convert(row([entry(7, -4.0), entry(5, -0.2)], [entry(6, -0.1)]), report=report)
    assert unsorted.column("teacher_topk_ids").to_pylist() == [[5, 7, 6]]
    assert report.converted["teacher_heads_sorted"] == 1
    report = ConversionReport()
    convert(
        row([entry(5, 0.0), entry(6, -math.inf)], [{"token": "the", "logprob": -1.0}]),
        report=report,
    )
    assert report.head_entries.dropped == {"log_prob_minus_infinity": 1, "text_only": 1}
    assert report.unbalanced() == []


def test_impossible_masses_are_refused():
    """axolotl-ai-cloud/axolotl#2692: a distillation loss below zero."""
    with pytest.raises(ConversionError, match="sum to more than 1"):
        convert(row([entry(5, -0.1), entry(6, -0.5)], [entry(6, -1.0)]))
    with pytest.raises(ConversionError, match="positive"):
        convert(row([entry(5, 0.1)], []))


def test_rows_of_messages_need_their_template():
    given = {"messages": [{"role": "user", "content": "x"}], "logprobs": [[entry(6, -0.5)]]}
    with pytest.raises(ConversionError, match="no tokens") as info:
        convert(given)
    assert info.value.code == "RF-A010"
    report = ConversionReport()
    made = convert(
        given, tokenize=lambda _: {"input_ids": [7, 6], "labels": [-100, 6]}, report=report
    )
    assert made.column("teacher_log_probs").to_pylist() == [[-0.5]]
    assert report.unread["messages"] == 1


@pytest.mark.parametrize(
    "lists",
    ["x", [{"token": 1}], [["a"]], [[{"token": "token_id:x", "logprob": -1.0}]],
     [[{"token": "token_id:1", "logprob": "y"}]]],
)  # fmt: skip
def test_malformed_lists_are_refused(lists):
    with pytest.raises(ConversionError) as info:
        convert(row() | {"logprobs": lists})
    assert info.value.code == "RF-A002"


def test_files(tmp_path):
    batch = convert(*real_rows(), vocab_size=VOCAB)
    counts = axolotl.write([batch], str(tmp_path / "out.jsonl"))
    assert counts["rows"] == 3
    assert counts["uneven_rows"] == 2
    again = convert(*axolotl.payloads(str(tmp_path / "out.jsonl")), vocab_size=VOCAB)
    assert again.equals(batch)
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    with pytest.raises(ConversionError, match="a line is an object"):
        next(axolotl.payloads(str(tmp_path / "bad.jsonl")))
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ConversionError, match="a line is JSON"):
        next(axolotl.payloads(str(tmp_path / "bad.jsonl")))
    none = batch.select(["sample_id", "input_ids", "completion_mask"])
    with pytest.raises(ConversionError, match="holds a teacher's heads"):
        axolotl.to_rows(none, counts=Counter())
    uneven = row() | {"logprobs": [[-1.0]], "target_token_ids": [[1, 2]]}
    with pytest.raises(ConversionError, match="lists of one shape"):
        convert(uneven)
