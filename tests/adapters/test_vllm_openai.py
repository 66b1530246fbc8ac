"""Answers of vLLM's OpenAI endpoints, recorded and made by hand."""

import copy
import json

import numpy as np
import pytest
from support.vllm_rollouts import VOCAB_SIZE, as_bytes, recorded

from ragged_format.adapters import vllm, vllm_openai
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.validate import validate


def convert(*records, module=vllm_openai, **options):
    report = ConversionReport()
    batch = module.to_samples(records, **{"vocab_size": VOCAB_SIZE} | options, report=report)
    validate(batch)
    assert report.unbalanced() == []
    return batch, report


def one(name):
    [record] = recorded("openai_endpoints", names={name})
    return record


def completion(top, tokens=("a", "b", "c"), k=2, **fields):
    """Three generated tokens, ids 3, 4, 5, with lists by text or by id."""
    choice = {
        "index": 0, "text": "abc", "finish_reason": "length", "stop_reason": None,
        "token_ids": [3, 4, 5], "prompt_token_ids": [1, 2],
        "logprobs": {
            "text_offset": [0, 1, 2], "tokens": list(tokens),
            "token_logprobs": [-0.5, -2.5, -0.25], "top_logprobs": top,
        },
    } | fields  # fmt: skip
    response = {"id": "c1", "object": "text_completion", "model": "m", "choices": [choice]}
    return {"request": {"logprobs": k, "temperature": 0.5}, "response": response}


BY_ID = [
    {"token_id:3": -0.5, "token_id:9": -1.5},
    {"token_id:4": -2.5, "token_id:7": -0.25, "token_id:8": -2.0},  # K + 1: the sampled one third
    {"token_id:5": -0.25, "token_id:0": -9999.0},
]


@pytest.mark.parametrize("form", [lambda r: r, as_bytes])
@pytest.mark.parametrize("name", ["completions_n4", "chat_n4"])
def test_recorded_answers(name, form):
    record = one(name)
    batch, report = convert(form(record))
    rows = batch.to_pylist()
    assert len(rows) == 4
    for row, choice in zip(rows, record["response"]["choices"], strict=True):
        prompt = choice.get("prompt_token_ids") or record["response"]["prompt_token_ids"]
        assert row["input_ids"] == prompt + choice["token_ids"]
        assert row["group_id"] == record["response"]["id"]
        given = choice["logprobs"]
        values = given.get("token_logprobs") or [entry["logprob"] for entry in given["content"]]
        assert row["rollout_log_probs"] == np.array(values, np.float32).tolist()
    assert report.head_entries.dropped == {"text_only": report.head_entries.taken}
    assert "topk_ids" not in batch.schema.names


def test_a_recorded_stream_of_a_chat():
    record = one("chat_stream")
    whole = one("chat_asks_mask")["response"]
    batch, _ = convert(record)
    [row] = batch.to_pylist()
    # The same prompt and seedless sampler gave other tokens: lengths and mode are what is common.
    assert len(row["input_ids"]) == len(whole["prompt_token_ids"]) + 8
    assert sum(row["completion_mask"]) == 8
    assert row["finish_reason"] == "length"
    assert row["rollout_log_probs"][:2] == np.array(
        [-0.4249087870121002, -0.6365945339202881], np.float32
    ).tolist()  # fmt: skip


def test_entries_of_a_stream_add_up_to_the_whole_answer():
    record = one("completions_n4")
    response = record["response"]
    events = []
    for choice in response["choices"]:
        for n, token in enumerate(choice["token_ids"]):
            last = n == len(choice["token_ids"]) - 1
            given = {key: value[n : n + 1] for key, value in choice["logprobs"].items()}
            events.append({
                "index": choice["index"], "token_ids": [token], "logprobs": given, "text": "",
                "finish_reason": choice["finish_reason"] if last else None,
                "prompt_token_ids": None if n else choice["prompt_token_ids"],
            })  # fmt: skip
    events.sort(key=lambda event: event["index"] % 2)  # interleaved
    chunks = [{**response, "usage": None, "choices": [event]} for event in events]
    chunks.append({**response, "choices": []})
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    streamed, _ = convert(record | {"response": text})
    assert streamed.equals(convert(record)[0])


def test_a_request_for_sets_that_the_endpoint_ignores_is_told():
    """vllm-project/vllm#49577: the body flag is accepted and nothing comes back."""
    for name in ("completions_asks_mask", "chat_asks_mask"):
        record = one(name)
        with pytest.raises(ConversionError) as found:
            convert(record)
        assert found.value.code == "RF-A009"
        assert "/inference/v1/generate" in found.value.remedy
        batch, report = convert(record, on_missing_support="flag")
        assert report.flagged["support_missing"] == 8
        assert batch.column("candidate_counts").to_pylist() == [[0] * 8]


def test_an_empty_500_is_explained():
    for name in ("chat_temperature0", "completions_no_topk"):
        with pytest.raises(ConversionError, match="top_k > 0 and temperature > 0") as found:
            convert(one(name))
        assert found.value.code == "RF-A003"


def test_lists_by_id_have_k_or_k_plus_one_entries():
    """huggingface/trl#6705: of K + 1 entries the sampled token's is beyond the K best."""
    batch, report = convert(completion(BY_ID))
    [row] = batch.to_pylist()
    assert row["topk_counts"] == [2, 2, 1]
    assert row["topk_ids"] == [3, 9, 7, 8, 5]
    assert row["topk_log_probs"] == [-0.5, -1.5, -0.25, -2.0, -0.25]
    assert report.head_entries.dropped == {"minus_9999": 1, "sampled_beyond_head": 1}
    assert report.noted["heads_one_short"] == 0


def test_k_of_one():
    top = [{"token_id:3": -0.5}, {"token_id:4": -2.5, "token_id:7": -0.25}, {"token_id:5": -0.25}]
    [row] = convert(completion(top, k=1))[0].to_pylist()
    assert (row["topk_counts"], row["topk_ids"]) == ([1, 1, 1], [3, 7, 5])


def test_k_of_zero_gives_no_heads():
    top = [{"token_id:3": -0.5}, {"token_id:4": -2.5}, {"token_id:5": -0.25}]
    batch, report = convert(completion(top, k=0))
    assert "topk_ids" not in batch.schema.names
    assert report.head_entries.dropped == {"column_not_wanted": 3}


def test_tokens_as_ids_stand_in_for_token_ids():
    record = completion(BY_ID, tokens=["token_id:3", "token_id:4", "token_id:5"])
    expected, _ = convert(record)
    del record["response"]["choices"][0]["token_ids"]
    assert convert(record)[0].equals(expected)
    record["response"]["choices"][0]["logprobs"]["tokens"][1] = "token_id:9"
    record["response"]["choices"][0]["token_ids"] = [3, 4, 5]
    with pytest.raises(ConversionError) as found:
        convert(record)
    assert (found.value.code, found.value.where.position) == ("RF-A006", 1)


def test_text_without_ids_is_refused():
    record = completion([{"a": -0.5}] * 3)
    del record["response"]["choices"][0]["token_ids"]
    with pytest.raises(ConversionError, match="generated tokens are not known") as found:
        convert(record)
    assert found.value.code == "RF-A010"
    record = completion([{"a": -0.5}] * 3)
    del record["response"]["choices"][0]["prompt_token_ids"]
    with pytest.raises(ConversionError, match="prompt's tokens are not known"):
        convert(record)
    record["request"]["prompt"] = [1, 2]
    assert convert(record)[0].column("input_ids").to_pylist() == [[1, 2, 3, 4, 5]]


def test_texts_of_two_ids_collide():
    """vllm-project/vllm#44319, vllm-project/vllm#44504: an entry by text may stand for two ids."""
    top = [{"true": -0.5}, {"b": -2.5, "x": -0.25}, {"5": -0.25, "6": -3.0}]
    batch, report = convert(completion(top, k=2))
    assert "topk_ids" not in batch.schema.names
    assert report.head_entries.to_dict() == {"taken": 5, "stored": 0, "dropped": {"text_only": 5}}
    assert report.noted["top_lists_short"] == 1


def test_a_null_log_prob_is_flagged():
    """huggingface/trl#6693: null where a number should be."""
    record = completion(None)
    record["response"]["choices"][0]["logprobs"]["token_logprobs"][1] = None
    batch, report = convert(record)
    assert batch.column("target_flags").to_pylist() == [[0, 4, 0]]
    assert report.log_probs.dropped == {"log_prob_null": 1}


@pytest.mark.parametrize(
    ("field", "value"), [("token_logprobs", [-1.0]), ("top_logprobs", [{"token_id:3": -1.0}])]
)
def test_lists_of_another_length_are_refused(field, value):
    record = completion(copy.deepcopy(BY_ID))
    record["response"]["choices"][0]["logprobs"][field] = value
    with pytest.raises(ConversionError) as found:
        convert(record)
    assert found.value.code == "RF-A006"


def test_a_chat_of_a_server_that_adds_sets():
    """Some servers that derive from vLLM put sampling_mask beside token_ids."""
    record = one("chat_n4")
    for choice in record["response"]["choices"]:
        choice["sampling_mask"] = [[token] for token in choice["token_ids"]]
        for entry in choice["logprobs"]["content"]:
            entry["logprob"] = 0.0
    batch, _ = convert(record)
    counts = batch.column("candidate_counts").to_pylist()
    assert counts == [[1] * len(c["token_ids"]) for c in record["response"]["choices"]]


@pytest.mark.parametrize("module", [vllm, vllm_openai])
def test_answers_of_the_other_endpoint_are_refused(module):
    [generated] = recorded("variants", names={"prompt_logprobs1"}) or [None]
    record = one("chat_n4") if module is vllm else generated
    if record is None:
        pytest.skip("not among the recorded parts")
    with pytest.raises(ConversionError) as found:
        convert(record, module=module)
    assert found.value.code == "RF-A009"


def test_a_rendered_request_is_no_answer():
    with pytest.raises(ConversionError) as found:
        convert(one("chat_render"))
    assert found.value.code == "RF-A009"
