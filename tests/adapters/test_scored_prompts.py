"""Prompts that a teacher scored, by own position: three tokens by hand, then real ones."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from support.vllm_rollouts import VOCAB_SIZE, recorded

import ragged_format as rf
from ragged_format.adapters import sglang, vllm, vllm_openai
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.parse import parse_schema
from ragged_format.validate import validate

SGLANG = Path(__file__).parent.parent / "data" / "sglang"
IDS = [1, 9690, 198]
# As the engine gave them for K = 1: the realised token is ranked 143, then first.
ROWS = [
    None,
    {
        "9690": {"logprob": -7.75, "rank": 143, "decoded_token": "system"},
        "29": {"logprob": -1.0, "rank": 1, "decoded_token": "-"},
    },
    {"198": {"logprob": -0.5, "rank": 1, "decoded_token": "\n"}},
]
EXPECTED = {
    "input_ids": IDS, "completion_mask": [0, 1, 1],
    "teacher_topk_counts": [1, 1], "teacher_topk_ids": [29, 198],
    "teacher_topk_log_probs": [-1.0, -0.5], "teacher_log_probs": [-7.75, -0.5],
    "teacher_id": "m",
}  # fmt: skip


def generate():
    return {
        "request_id": "r", "model": "m", "prompt_token_ids": IDS, "prompt_logprobs": ROWS,
        "choices": [{"index": 0, "token_ids": [7], "sampling_mask": [[7]], "logprobs": None}],
    }  # fmt: skip


def completions():
    choice = {"index": 0, "text": "x", "token_ids": [7], "prompt_token_ids": IDS,
              "prompt_logprobs": ROWS, "logprobs": None, "finish_reason": "length"}  # fmt: skip
    return {"id": "r", "object": "text_completion", "model": "m", "choices": [choice]}


def chat():
    out = completions() | {"object": "chat.completion", "prompt_token_ids": IDS}
    choice = out["choices"][0]
    del choice["prompt_token_ids"], choice["prompt_logprobs"], choice["text"]
    return out | {"prompt_logprobs": ROWS}


def sglang_answer():
    # SGLang's lists are the K best; the realised token's own value stands apart.
    meta = {
        "id": "r", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 3,
        "input_token_logprobs": [[None, 1, None], [-7.75, 9690, None], [-0.5, 198, None]],
        "input_top_logprobs": [None, [[-1.0, 29, None]], [[-0.5, 198, None]]],
        "output_token_logprobs": [[-0.5, 7, None]],
    }  # fmt: skip
    return {"output_ids": [7], "prompt_token_ids": IDS, "meta_info": meta, "model": "m"}


FORMS = {
    "generate": (vllm, generate), "completions": (vllm_openai, completions),
    "chat": (vllm_openai, chat), "sglang": (sglang, sglang_answer),
}  # fmt: skip


def f32(values):
    return np.array(list(values), np.float32).tolist()


def convert(module, *records, **options):
    report = ConversionReport()
    options = {"vocab_size": VOCAB_SIZE, "targets": "prompt"} | options
    batch = module.to_samples(records, report=report, **options)
    validate(batch)
    assert report.unbalanced() == []
    return batch, report


@pytest.mark.parametrize("form", FORMS)
def test_heads_are_of_their_own_position(form):
    """vllm-project/vllm#5846: entry i scores token i, the first token has none."""
    module, make = FORMS[form]
    batch, report = convert(module, {"response": make()})
    [row] = batch.to_pylist()
    assert {key: row[key] for key in EXPECTED} == EXPECTED
    assert report.log_probs.stored == 2
    beyond = {} if form == "sglang" else {"sampled_beyond_head": 1}
    assert report.head_entries.dropped == beyond


@pytest.mark.parametrize("form", FORMS)
def test_targets_begin_where_the_record_says(form):
    module, make = FORMS[form]
    batch, report = convert(module, {"response": make(), "completion_start": 2})
    [row] = batch.to_pylist()
    assert row["completion_mask"] == [0, 0, 1]
    assert row["teacher_topk_ids"] == [198]
    assert row["teacher_log_probs"] == [-0.5]
    assert report.head_entries.dropped == {"context": 1 if form == "sglang" else 2}
    assert report.log_probs.dropped == {"context": 1}
    for start in (0, 4, "1"):
        with pytest.raises(ConversionError) as found:
            convert(module, {"response": make(), "completion_start": start})
        assert found.value.code == "RF-A002"


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_are_asked_for(form):
    module, make = FORMS[form]
    names = ["teacher_topk_counts", "teacher_topk_ids"]
    batch, _ = convert(module, {"response": make()}, columns=names)
    assert set(names) < set(batch.schema.names)
    assert "teacher_log_probs" not in batch.schema.names
    schema = convert(module, {"response": make()})[0].schema
    again, _ = convert(module, {"response": make()}, schema=schema, vocab_size=None)
    assert again.schema == schema
    small = rf.sample_schema(vocab_size=VOCAB_SIZE, columns=["teacher_log_probs"])
    if module is not sglang:  # its prompt log-probs are raw, which the standard column is not
        with pytest.raises(ConversionError):
            convert(module, {"response": make()}, schema=small, logprobs_mode="raw")
    with pytest.raises(ConversionError) as found:
        convert(module, {"response": make()}, targets="both")
    assert found.value.code == "RF-A011"


@pytest.mark.parametrize("form", FORMS)
def test_the_teacher_scores_over_the_vocabulary(form):
    module, make = FORMS[form]
    schema = parse_schema(convert(module, {"response": make()})[0].schema)
    for name in ("teacher_log_probs", "teacher_topk_log_probs"):
        assert schema[name].log_prob.normalizer == "vocabulary"
        assert schema[name].log_prob.mode == ("raw" if form == "sglang" else "processed")


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_that_was_not_scored(form):
    module, make = FORMS[form]
    response = json.loads(
        json.dumps(make()).replace("prompt_logprobs", "other").replace("input_t", "o")
    )
    with pytest.raises(ConversionError, match="was not scored") as found:
        convert(module, {"response": response})
    assert found.value.code == "RF-A007"


def test_a_list_per_token_no_more_and_no_less():
    response = generate() | {"prompt_logprobs": ROWS[:2]}
    with pytest.raises(ConversionError) as found:
        convert(vllm, {"response": response})
    assert found.value.code == "RF-A006"


def test_a_position_without_scores_is_flagged():
    """huggingface/trl#6693: null in the middle is missing, not 0.0 and not an error."""
    rows = [ROWS[0], None, ROWS[2]]
    batch, report = convert(vllm, {"response": generate() | {"prompt_logprobs": rows}})
    [row] = batch.to_pylist()
    assert row["target_flags"] == [16, 0]
    assert row["teacher_topk_counts"] == [0, 1]
    assert row["teacher_log_probs"] == [0.0, -0.5]
    assert report.flagged["log_prob_missing"] == 1


@pytest.mark.parametrize("value", [-9999.0, None, float("-inf")])
def test_floors_and_nulls_are_no_candidates(value):
    """huggingface/trl#5001: -9999, -inf and null of a teacher are outside, not candidates."""
    rows = [*ROWS[:2], {"198": {"logprob": -0.5, "rank": 1}, "3": {"logprob": value, "rank": 2}}]
    batch, report = convert(vllm, {"response": generate() | {"prompt_logprobs": rows}})
    assert batch.column("teacher_topk_counts").to_pylist() == [[1, 1]]
    assert report.head_entries.dropped.total() == 2


def test_a_recorded_prompt():
    [record] = recorded("variants", names={"prompt_logprobs1"})
    batch, report = convert(vllm, record)
    [row] = batch.to_pylist()
    rows = record["response"]["prompt_logprobs"][1:]
    ids = record["response"]["prompt_token_ids"]
    assert row["input_ids"] == ids
    best = []
    for entries in rows:
        ordered = sorted(entries.items(), key=lambda item: item[1]["rank"])
        # The realised token closes the run where its rank does.
        best += [item for n, item in enumerate(ordered, 1) if item[1]["rank"] == n]
    assert row["teacher_topk_ids"] == [int(id_) for id_, _ in best]
    assert row["teacher_topk_log_probs"] == f32(entry["logprob"] for _, entry in best)
    own = [r[str(id_)]["logprob"] for r, id_ in zip(rows, ids[1:], strict=True)]
    assert row["teacher_log_probs"] == f32(own)
    assert report.head_entries.taken == sum(map(len, rows))


@pytest.mark.parametrize(
    "name", ["generate_req0.json", "generate_req4_flat_b64.json", "chat_req0.json.gz"]
)
def test_prompts_of_sglang(name):
    raw = (SGLANG / name).read_bytes()
    response = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    batch, _ = convert(sglang, response)
    [row] = batch.to_pylist()
    body = response["choices"][0] if "choices" in response else response
    meta = body["meta_info"]
    assert row["input_ids"] == body["prompt_token_ids"]
    own = [value for value, *_ in meta["input_token_logprobs"][1:]]
    assert row["teacher_log_probs"] == f32(own)
    k = 4 if "flat" in name else 5
    assert row["teacher_topk_counts"] == [k] * (len(row["input_ids"]) - 1)
    if "flat" not in name:
        lists = meta["input_top_logprobs"][1:]
        assert row["teacher_topk_ids"] == [entry[1] for entries in lists for entry in entries]
