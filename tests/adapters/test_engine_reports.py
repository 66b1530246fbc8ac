"""Public reports about engines' answers, each as the smallest answer that shows it."""

import base64
import copy
import io
import json

import numpy as np
import pytest
from support.vllm_rollouts import choice, golden, record

from ragged_format.adapters import sglang, vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.validate import validate


def convert(module, payload, **options):
    report = ConversionReport()
    batch = module.to_samples([payload], vocab_size=10, report=report, **options)
    validate(batch)
    assert report.unbalanced() == []
    return batch.to_pylist()[0], report


def sglang_answer(**fields):
    meta = {"id": "a", "finish_reason": {"type": "stop"}} | fields
    return {"output_ids": [3, 4], "prompt_token_ids": [5, 6], "meta_info": meta}


def test_entries_with_one_text_stay_two():
    """sgl-project/sglang#32290, vllm-project/vllm#48674: ids, not texts, tell entries apart."""
    lists = [[[-0.5, 3, "true"], [-1.5, 8, "true"]], [[-0.5, 4, "\ufffd"], [-1.5, 9, "\ufffd"]]]
    tokens = [[-0.5, 3, "true"], [-0.5, 4, "\ufffd"]]
    answer = sglang_answer(output_token_logprobs=tokens, output_top_logprobs=lists)
    row, _ = convert(sglang, answer, logprobs_mode="raw")
    assert row["topk_ids"] == [3, 8, 4, 9]


def test_a_log_prob_of_one_is_no_log_prob():
    """allenai/open-instruct#1817: 1.0 stands for "invalid" there; here it is impossible."""
    answer = sglang_answer(output_token_logprobs=[[-0.5, 3, None], [1.0, 4, None]])
    with pytest.raises(ConversionError, match="positive") as found:
        convert(sglang, answer, logprobs_mode="raw")
    assert (found.value.code, found.value.where.position) == ("RF-A007", 1)


def test_null_of_a_writer_that_has_no_nan():
    """NovaSky-AI/SkyRL#2082, NovaSky-AI/SkyRL#2083: NaN and -inf arrive as null: missing."""
    answer = sglang_answer(output_token_logprobs=[[-0.5, 3, None], [None, 4, None]])
    row, report = convert(sglang, answer, logprobs_mode="raw")
    assert row["rollout_log_probs"] == [-0.5, 0.0]
    assert row["target_flags"] == [0, 4]
    assert report.log_probs.dropped == {"log_prob_null": 1}


@pytest.mark.parametrize("policy", ["error", "flag", "drop_target"])
def test_a_sampled_token_that_rounding_put_outside(policy):
    """PrimeIntellect-ai/prime-rl#2601, PrimeIntellect-ai/prime-rl#1965: the recorded set is the
    only source; where it lacks the token, nothing is recomputed or inserted.
    """
    answer = sglang_answer(output_token_sampling_mask=[[3, 5], [5, 9]])
    if policy == "error":
        with pytest.raises(ConversionError, match="sampled token is not in"):
            convert(sglang, answer)
        return
    row, report = convert(sglang, answer, on_invalid_support=policy)
    assert row["candidate_ids"] == [3, 5]
    assert report.candidates.dropped == {"support_sampled_outside": 2}


def test_a_set_that_the_engine_cut():
    """sgl-project/sglang#34037: a bounded set is flagged as such and not stored."""
    mask = {"output_token_sampling_mask": [[3], [9, 4, 1]]}
    answer = sglang_answer(**mask, output_token_sampling_mask_truncated=[False, True])
    with pytest.raises(ConversionError, match="cut at the engine's limit") as found:
        convert(sglang, answer)
    assert found.value.where.position == 1
    row, report = convert(sglang, answer, on_invalid_support="flag")
    assert row["candidate_counts"] == [1, 0]
    assert row["target_flags"] == [0, 2]
    assert report.flagged["support_overflow"] == 1
    assert report.candidates.dropped == {"support_overflow": 3}
    answer["meta_info"]["output_token_sampling_mask_truncated"] = [False, False]
    assert convert(sglang, answer)[0]["candidate_counts"] == [1, 3]
    for bad in ([True], [0, 1], "no"):
        answer["meta_info"]["output_token_sampling_mask_truncated"] = bad
        with pytest.raises(ConversionError):
            convert(sglang, answer)


def test_flat_log_probs_give_what_objects_give_in_fewer_bytes():
    """vllm-project/vllm#57442: one number per token where no list was asked for."""
    ids = [3, 4] * 128
    mask = [[3], [4, 9]] * 128
    content = [
        {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []}
        for i, p in zip(ids, [0.0, -0.5] * 128, strict=True)
    ]
    objects = record(choice(ids, mask, content))
    plain = choice(ids, mask)
    plain["token_logprobs"] = [entry["logprob"] for entry in content]
    flat = record(plain)
    first, second = convert(vllm, objects)[0], convert(vllm, flat)[0]
    assert first["rollout_log_probs"] == second["rollout_log_probs"] == [0.0, -0.5] * 128
    lists = [json.dumps(value) for value in (content, plain["token_logprobs"])]
    assert len(lists[0]) > 5 * len(lists[1])
    plain["token_logprobs"].pop()
    with pytest.raises(ConversionError) as found:
        convert(vllm, flat)
    assert found.value.code == "RF-A006"


def test_experts_that_lack_the_prompt():
    """vllm-project/tpu-inference#3583, vllm-project/vllm#35744: a row for every token but the last,
    or the answer is refused.
    """
    answer = golden()
    tokens = len(answer["response"]["prompt_token_ids"]) + 3
    for rows, good in ((tokens - 1, True), (tokens, False), (2, False)):
        buffer = io.BytesIO()
        np.save(buffer, np.zeros((rows, 2, 1), np.uint8))
        one = copy.deepcopy(answer)
        encoded = base64.b64encode(buffer.getvalue()).decode()
        one["response"]["choices"][0]["routed_experts"] = encoded
        if good:
            assert len(convert(vllm, one)[0]["routed_experts"]) == tokens
            continue
        with pytest.raises(ConversionError) as found:
            convert(vllm, one)
        assert found.value.code == "RF-A006"
