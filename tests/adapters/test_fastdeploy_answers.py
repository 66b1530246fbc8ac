"""FastDeploy's chat answers, in the forms of its protocol: whole and as streams."""

import json

import pytest

from ragged_format.adapters import fastdeploy, registry
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.validate import validate

SETS = [[3], [1, 4, 9], [2, 7]]
TOKENS = [3, 4, 7]
LOG_PROBS = [0.0, -1.5, -0.5]


def entry(log_prob):
    own = {"token": "x", "logprob": log_prob, "bytes": [120]}
    return own | {"top_logprobs": [dict(own)]}


def whole():
    message = {
        "role": "assistant", "content": "abc", "reasoning_content": None, "tool_calls": None,
        "prompt_token_ids": [5, 6], "completion_token_ids": TOKENS, "prompt_tokens": "p",
    }  # fmt: skip
    choice = {
        "index": 0, "message": message, "finish_reason": "stop", "sampling_mask": SETS,
        "logprobs": {"content": [entry(value) for value in LOG_PROBS], "refusal": None},
        "draft_logprobs": None, "prompt_logprobs": None, "speculate_metrics": None,
    }  # fmt: skip
    usage = {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [choice], "usage": usage,
    }  # fmt: skip


def stream(groups=((0,), (1, 2)), role=True):
    """One event per group of tokens; the first event names the role and has no set."""
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    events = []
    if role:
        delta = {"role": "assistant", "content": "", "prompt_token_ids": [5, 6],
                 "completion_token_ids": None}  # fmt: skip
        events.append({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})
    for group in groups:
        delta = {"content": "x", "prompt_token_ids": None,
                 "completion_token_ids": [TOKENS[i] for i in group]}  # fmt: skip
        events.append({
            "index": 0, "delta": delta, "sampling_mask": [SETS[i] for i in group],
            "logprobs": {"content": [entry(LOG_PROBS[i]) for i in group]}, "arrival_time": 0.1,
            "finish_reason": "stop" if 2 in group else None,
        })  # fmt: skip
    chunks = [base | {"choices": [event]} for event in events]
    chunks.append(base | {"choices": [], "usage": whole()["usage"]})
    return chunks


def sse(chunks):
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def convert(response, request=None, **options):
    report = ConversionReport()
    records = [{"request": request or {}, "response": response}]
    batch = fastdeploy.to_samples(records, vocab_size=10, report=report, **options)
    validate(batch)
    assert report.unbalanced() == []
    return batch, report


def test_a_whole_answer():
    batch, report = convert(whole(), {"temperature": 0.7, "top_p": 0.9})
    [row] = batch.to_pylist()
    assert row["input_ids"] == [5, 6, *TOKENS]
    assert row["candidate_counts"] == [1, 3, 2]
    assert row["candidate_ids"] == [3, 1, 4, 9, 2, 7]
    assert row["rollout_log_probs"] == LOG_PROBS
    assert row["finish_reason"] == "stop"
    assert row["temperature"] == 0.7
    assert json.loads(row["provenance"])["engine"] == "fastdeploy"
    assert report.head_entries.dropped == {"text_only": 3}


@pytest.mark.parametrize("groups", [((0,), (1, 2)), ((0,), (1,), (2,)), ((0, 1, 2),)])
@pytest.mark.parametrize("encode", [lambda text: text, str.encode])
def test_a_stream_whose_first_event_has_no_set(groups, encode):
    """PaddlePaddle/FastDeploy#6725: the role's event has no set, speculation gives several."""
    batch, _ = convert(encode(sse(stream(groups))))
    assert batch.equals(convert(whole())[0])


def test_an_event_that_lost_its_sets():
    chunks = stream(((0,), (1,), (2,)))
    del chunks[2]["choices"][0]["sampling_mask"]
    with pytest.raises(ConversionError) as found:
        convert(sse(chunks))
    assert (found.value.code, found.value.where.position) == ("RF-A004", 1)
    batch, _ = convert(sse(chunks), on_missing_support="flag")
    assert batch.column("candidate_counts").to_pylist() == [[1, 0, 2]]


def test_a_stream_that_was_cut():
    for text in (sse(stream()).removesuffix("data: [DONE]\n\n"), sse(stream(((0,), (1,))))):
        with pytest.raises(ConversionError) as found:
            convert(text)
        assert found.value.code == "RF-A008"


def test_the_whole_vocabulary_is_stored_as_it_is():
    response = whole()
    response["choices"][0]["sampling_mask"] = [list(range(10))] * 3
    response["choices"][0]["logprobs"] = None
    batch, report = convert(response)
    assert batch.column("candidate_counts").to_pylist() == [[10, 10, 10]]
    assert report.noted["full_vocabulary_targets"] == 0


def test_without_token_ids_there_is_no_sample():
    response = whole()
    del response["choices"][0]["message"]["completion_token_ids"]
    with pytest.raises(ConversionError) as found:
        convert(response)
    assert found.value.code == "RF-A010"
    assert "return_token_ids" in found.value.remedy


def test_an_error_answer():
    response = {"error": {"message": "Input text is too long", "code": 400}}
    with pytest.raises(ConversionError, match="refused the request") as found:
        convert(response)
    assert found.value.code == "RF-A003"
    assert "too long" in found.value.got


def test_the_registry_recognizes_them():
    assert registry.recognize(whole()) == ["fastdeploy"]
    assert registry.recognize({"response": sse(stream())}) == ["fastdeploy"]
