"""AsyncDistillation rows (TRL 1.16.0): tables of K + 1 columns, and teachers' replies."""

import gzip
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from support.trl_data import DATA, load

import ragged_format as rf
from ragged_format.adapters import trl_distill
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError

VOCAB = 49152
STORED = load("trl_adapters/distill_k8.npz")


def real_rows():
    bounds = STORED["row_offsets"]
    out = []
    for row in range(len(bounds) - 1):
        span = slice(bounds[row], bounds[row + 1])
        out.append({
            "input_ids": STORED["input_ids"][span].astype(np.int64),
            "completion_mask": STORED["completion_mask"][span].astype(np.int64),
            "teacher_topk_ids": STORED["teacher_topk_ids"][span].astype(np.int64),
            "teacher_topk_logprobs": STORED["teacher_topk_logprobs"][span],
            "teacher_id": str(STORED["teacher_id"][row]),
            "prompt_id": int(STORED["prompt_id"][row]),
            "model_version": int(STORED["model_version"][row]),
        })  # fmt: skip
    return out


def test_real_rows_come_back_equal():
    rows = real_rows()
    report = ConversionReport()
    batch = trl_distill.to_samples(rows, vocab_size=VOCAB, report=report)
    rf.validate(batch)
    assert report.unbalanced() == []
    assert report.head_entries.taken == report.head_entries.stored
    for mine, theirs in zip(trl_distill.to_rows(batch, width=9), rows, strict=True):
        for name, value in mine.items():
            assert value.dtype == theirs[name].dtype
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    # The realised token is in every head, so that its log-prob is known.
    assert "teacher_log_probs" in batch.schema.names


def test_real_replies_give_the_rows_that_trl_made_of_them():
    with gzip.open(DATA / "trl_adapters" / "distill_teacher_responses.jsonl.gz", "rt") as lines:
        replies = [json.loads(line) for line in lines]
    payloads = [
        {
            "input_ids": reply["prompt"], "response": reply["response"],
            "completion_mask": [0] * reply["prompt_len"] + [1] * reply["completion_len"],
        }
        for reply in replies
    ]  # fmt: skip
    report = ConversionReport()
    batch = trl_distill.to_samples(payloads, vocab_size=VOCAB, report=report)
    rf.validate(batch)
    assert report.unbalanced() == []
    assert report.head_entries.dropped["context"] > 0
    expected = trl_distill.to_samples(real_rows(), vocab_size=VOCAB)
    for name in ("input_ids", "teacher_topk_counts", "teacher_topk_ids", "teacher_topk_log_probs"):
        assert batch.column(name).equals(expected.column(name)), name
    # As a client has them that parses nothing.
    for text_of in (json.dumps, lambda reply: json.dumps(reply).encode()):
        unparsed = [payload | {"response": text_of(payload["response"])} for payload in payloads]
        assert trl_distill.to_samples(unparsed, vocab_size=VOCAB).equals(batch)


@pytest.mark.parametrize(
    ("prefix", "numbered"), [("batch", ("math", "code")), ("tb0", ())], ids=["fixed", "budget"]
)
def test_collator_batches_are_the_reference_batches(prefix, numbered):
    batch = trl_distill.to_samples(real_rows(), vocab_size=VOCAB)
    expected = {
        key.removeprefix(f"{prefix}."): value
        for key, value in STORED.items()
        if key.startswith(f"{prefix}.")
    }
    rows, order = expected.pop("rows"), expected.pop("samples")
    chosen = [order[rows == rank].tolist() for rank in range(2)]
    got = trl_distill.to_micro_batch(batch, chosen, pad_token_id=2, teachers=numbered, width=9)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        float_ = name in ("teacher_topk_logprobs", "mean_seq_len") or name.startswith("global")
        assert got[name].dtype == (np.float32 if float_ else np.int64)
        np.testing.assert_array_equal(got[name], value, err_msg=name)


CASES = json.loads((DATA / "trl_adapters" / "distill_parse_cases.json").read_text())
# What TRL passes on, or stops at, and the format drops and counts.
DROPPED = {
    "nan": {"log_prob_nan": 1}, "all_nan": {"log_prob_nan": 1},
    "neg_inf": {"log_prob_minus_infinity": 1}, "floor": {"log_prob_minus_9999": 1},
    "null_logprob": {"log_prob_null": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parse_cases(name):
    """huggingface/trl#6693: NaN and null entries of teachers."""
    case = CASES[name]
    if name == "realized_first_rank5":  # its made-up probabilities sum to 1.005
        case = json.loads(json.dumps(case).replace("-0.1", "-0.2"))
    report = ConversionReport()
    sample = {
        "input_ids": [1, 5], "completion_mask": [0, 1], "prompt_logprobs": [None, case["input"]]
    }  # fmt: skip
    batch = trl_distill.to_samples([sample], vocab_size=10, report=report)
    rf.validate(batch)
    assert report.head_entries.dropped == DROPPED.get(name, {})
    assert report.unbalanced() == []
    ids = batch.column("teacher_topk_ids")[0].as_py()
    values = batch.column("teacher_topk_log_probs")[0].as_py()
    theirs = case.get("output", [[], []])
    kept = [(i, np.float32(v)) for i, v in zip(*theirs, strict=True) if float(v) > -9999]
    assert list(zip(ids, values, strict=True)) == kept
    flags = batch.column("target_flags")[0].as_py() if "target_flags" in batch.schema.names else [0]
    assert flags == [0 if kept else 16]


def rows_of(ids, log_probs, tokens=(5, 6, 3)):
    return {
        "input_ids": np.array(tokens), "completion_mask": np.array([0, 1, 1]),
        "teacher_topk_ids": np.array(ids), "teacher_topk_logprobs": np.array(log_probs, np.float32),
    }  # fmt: skip


INF = np.inf


def test_rows_of_k_and_of_k_plus_one_and_null_rows():
    """engines: a row with K entries, one with K + 1, a null row, a NaN and a -inf entry."""
    sample = rows_of([[-1] * 3, [7, 8, 6], [-1] * 3], [[-INF] * 3, [-0.5, -1.5, -3.0], [-INF] * 3])
    batch = trl_distill.to_samples([sample], vocab_size=10)
    rf.validate(batch)
    assert batch.column("teacher_topk_counts").to_pylist() == [[3, 0]]
    assert batch.column("target_flags").to_pylist() == [[0, 16]]
    back = trl_distill.to_rows(batch)[0]
    np.testing.assert_array_equal(back["teacher_topk_ids"], sample["teacher_topk_ids"])
    np.testing.assert_array_equal(back["teacher_topk_logprobs"], sample["teacher_topk_logprobs"])
    report = ConversionReport()
    odd = rows_of(
        [[-1] * 3, [6, 7, 8], [3, 4, -1]], [[-INF] * 3, [-0.5, np.nan, -INF], [-1, -2, -INF]]
    )
    batch = trl_distill.to_samples([odd], vocab_size=10, report=report)
    assert batch.column("teacher_topk_counts").to_pylist() == [[1, 2]]
    assert report.head_entries.dropped == {"log_prob_nan": 1, "log_prob_minus_infinity": 1}


def test_the_realised_token_is_put_in_where_its_log_prob_is_known():
    schema = rf.sample_schema(
        vocab_size=10,
        columns=["teacher_topk_counts", "teacher_topk_ids", "teacher_topk_log_probs",
                 "teacher_log_probs"],
    )  # fmt: skip
    row = {
        "sample_id": "a", "input_ids": [5, 6, 3], "completion_mask": [0, 1, 1],
        "teacher_topk_counts": [2, 1], "teacher_topk_ids": [7, 8, 3],
        "teacher_topk_log_probs": [-0.5, -3.0, -0.25], "teacher_log_probs": [-1.5, -0.25],
    }  # fmt: skip
    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    counts = Counter()
    out = trl_distill.to_rows(batch, counts=counts)[0]
    assert out["teacher_topk_ids"].tolist() == [[-1] * 3, [7, 6, 8], [3, -1, -1]]
    assert out["teacher_topk_logprobs"][1].tolist() == [-0.5, -1.5, -3.0]
    assert counts["realized_inserted"] == 1
    bare = batch.select(batch.schema.names[:-1])
    with pytest.raises(ConversionError, match="realised token in every head") as info:
        trl_distill.to_rows(bare)
    assert (info.value.where.row, info.value.where.position) == (0, 1)
    left = trl_distill.to_rows(bare, lossy=True, counts=counts)[0]
    assert left["teacher_topk_ids"].tolist() == [[-1], [-1], [3]]
    assert counts["heads_left_out"] == 1
    with pytest.raises(ConversionError, match="longer than the table"):
        trl_distill.to_rows(batch, width=2)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        ({"response": {"choices": [{"text": ""}]}}, "RF-A009"),
        ({"response": "x"}, "RF-A002"),
        ({"response": b"[]"}, "RF-A009"),
        ({"prompt_logprobs": [None, {}]}, "RF-A006"),
        ({"prompt_logprobs": [None, [1], {}]}, "RF-A002"),
        ({"prompt_logprobs": [None, {"a": {"logprob": -1.0}}, {}]}, "RF-A002"),
        ({"prompt_logprobs": "x"}, "RF-A002"),
        ({"prompt_logprobs": [None, {"3": -1.0}, {}]}, "RF-A002"),
        (rows_of([[-1], [6]], [[-INF], [-1]]), "RF-A006"),
        (rows_of([[-1], [6], [3]], [[-INF], [-1], [0.5]]), "RF-A007"),
        (rows_of([[-1] * 2, [6, 6], [3, -1]], [[-INF] * 2, [-1, -2], [-1, -INF]]), "RF-A005"),
        (rows_of([[-1], [6], [3]], [[-INF] * 2, [-1] * 2, [-1] * 2]), "RF-A006"),
    ],
)
def test_malformed_rows_are_refused(payload, code):
    """NVIDIA-NeMo/RL#1929: a top-K table of another length than the tokens."""
    sample = {"input_ids": [5, 6, 3], "completion_mask": [0, 1, 1]} | payload
    with pytest.raises(ConversionError) as info:
        trl_distill.to_samples([sample], vocab_size=10)
    assert info.value.code == code


def test_more_entries_than_the_vocabulary_has_are_not_expected():
    """K above the size of a small vocabulary gives fewer entries, which is no error."""
    one = {"input_ids": [0, 1], "completion_mask": [0, 1],
           "prompt_logprobs": [None, {"1": {"logprob": -0.5, "rank": 1},
                                      "0": {"logprob": -1.0, "rank": 2}}]}  # fmt: skip
    batch = trl_distill.to_samples([one], vocab_size=2)
    assert batch.column("teacher_topk_counts").to_pylist() == [[2]]
    assert trl_distill.to_rows(batch, width=21)[0]["teacher_topk_ids"].shape == (2, 21)


def test_files_and_teachers(tmp_path):
    batch = trl_distill.to_samples(real_rows()[:2], vocab_size=VOCAB)
    assert trl_distill.write([batch], str(tmp_path / "out"))["samples"] == 2
    with np.load(tmp_path / "out" / "sample-000001.npz") as stored:
        assert stored["teacher_topk_ids"].shape[1] == 9
    with pytest.raises(ConversionError, match="not among those named"):
        trl_distill.to_micro_batch(batch, [[0, 1]], pad_token_id=2, teachers=["other"])
    none = rf.sample_schema(vocab_size=10, columns=[])
    bare = pa.RecordBatch.from_pylist(
        [{"sample_id": "a", "input_ids": [1], "completion_mask": [0]}], schema=none
    )
    with pytest.raises(ConversionError, match="holds a teacher's heads"):
        trl_distill.to_rows(bare)
