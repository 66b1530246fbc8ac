"""Event streams: deltas put together, and what a cut or mixed-up stream is called."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.vllm_rollouts import choice, deltas, entry, record, recorded, stream

from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.validate import validate


def pair():
    """Return a record of two choices of unequal length with heads."""
    one = choice(
        [3, 4, 7], [[3], [1, 4, 9], [2, 7]],
        [entry(3, 0.0, 1), entry(4, -1.5, 2, (9, -0.5, 1)), entry(7, -0.5, 1, (2, -1.5, 2))],
    )  # fmt: skip
    two = choice([8], [[0, 8]], [entry(8, -0.5, 1)], index=1, finish_reason="length")
    return record(one, two, sampling={"n": 2, "logprobs": 2, "temperature": 1.0})


def error_of(text):
    with pytest.raises(ConversionError) as caught:
        vllm.to_samples([pair() | {"response": text}], vocab_size=10)
    return caught.value


def test_interleaved_choices_are_put_together():
    out = pair()
    usage = {"prompt_tokens": 2, "completion_tokens": 4}
    streamed = out | {"response": stream(*deltas(out["response"], usage=usage))}
    whole, parts = ConversionReport(), ConversionReport()
    expected = vllm.to_samples([out], vocab_size=10, report=whole)
    batch = vllm.to_samples([streamed], vocab_size=10, report=parts)
    validate(batch)
    assert batch.equals(expected)
    assert parts == whole


@pytest.mark.parametrize("change", [
    lambda t: t.replace("\n", "\r\n"),
    lambda t: t.replace("\n", "\r"),
    lambda t: "\ufeff" + t,
    lambda t: ": ping\n\n" + t,
    lambda t: t.replace("data: ", "event: x\nid: 3\ndata:"),
    lambda t: t.rstrip("\n"),
    lambda t: t.replace('"choices"', '\ndata: "choices"'),
])  # fmt: skip
def test_the_forms_of_event_streams_are_one(change):
    out = pair()
    text = change(stream(*deltas(out["response"])))
    expected = vllm.to_samples([out], vocab_size=10)
    for form in (text, text.encode()):
        assert vllm.to_samples([out | {"response": form}], vocab_size=10).equals(expected)


def test_a_stream_cut_anywhere_is_truncated_or_an_error_never_shorter():
    (out,) = recorded("abort", names=["mid_stream"])
    text = out["response"].rstrip("\n")
    for end in [*range(20, len(text), 997), *range(len(text) - 20, len(text))]:
        with pytest.raises(ConversionError) as caught:
            vllm.to_samples([out | {"response": text[:end]}], vocab_size=49152)
        assert caught.value.code == "RF-A008"


def test_an_empty_stream_is_truncated():
    assert error_of("data: [DONE]\n\n").code == "RF-A008"
    assert error_of(": ping\n\n").code == "RF-A008"
    assert error_of("data: [DON").code == "RF-A008"
    assert error_of("data: {\n\n").code == "RF-A008"
    assert error_of("data: [1]\n\n").code == "RF-A008"


def test_events_after_the_end_are_refused():
    text = stream(*deltas(pair()["response"]))
    assert error_of(text + text).code == "RF-A008"


def test_a_choice_that_never_finished_is_truncated():
    events = deltas(pair()["response"])
    error = error_of(stream(*events[:-1]))
    assert error.code == "RF-A008"
    assert "choice 0" in error.expected


def test_usage_tells_that_an_event_is_missing():
    events = deltas(pair()["response"], usage={"prompt_tokens": 2, "completion_tokens": 4})
    assert error_of(stream(*events[:1], *events[2:])).code == "RF-A006"


def test_events_of_two_requests_are_refused():
    events = deltas(pair()["response"])
    events[1] = events[1] | {"request_id": "other"}
    assert error_of(stream(*events)).code == "RF-A006"


@pytest.mark.parametrize("event", [
    3, "{", '{"a":1},{"a":1}', {"choices": [3]}, {"choices": [{"token_ids": [1]}]},
])  # fmt: skip
def test_events_that_the_engine_never_sends_are_malformed(event):
    events = deltas(pair()["response"])
    text = stream(*events[:1], event, *events[1:])
    if isinstance(event, str):
        text = text.replace(json.dumps(event), event)
    assert error_of(text).code == "RF-A002"


def test_cumulative_lists_are_refused():
    events = deltas(pair()["response"])
    first = events[0]["choices"][0]
    events[2]["choices"][0]["sampling_mask"] = [*first["sampling_mask"], [1, 4, 9]]
    assert error_of(stream(*events)).code == "RF-A006"
    events = deltas(pair()["response"])
    events[2]["choices"][0]["logprobs"] = {"content": [entry(3, 0.0, 1), entry(4, -1.5, 2)]}
    assert error_of(stream(*events)).code == "RF-A006"


def test_a_delta_without_its_set_loses_the_sets_of_its_tokens_only():
    events = deltas(pair()["response"])
    events[2]["choices"][0]["sampling_mask"] = None
    text = stream(*events)
    error = error_of(text)
    assert (error.code, error.where.position) == ("RF-A004", 1)
    report = ConversionReport()
    batch = vllm.to_samples(
        [pair() | {"response": text}], vocab_size=10, on_missing_support="drop_target",
        report=report,
    )  # fmt: skip
    assert batch.column("candidate_counts").to_pylist() == [[1, 2], [2]]
    assert report.unbalanced() == []


def test_a_delta_without_log_probs_loses_those_of_its_tokens_only():
    events = deltas(pair()["response"])
    events[2]["choices"][0]["logprobs"] = None
    batch = vllm.to_samples([pair() | {"response": stream(*events)}], vocab_size=10)
    assert batch.column("target_flags").to_pylist() == [[0, 4 | 8, 0], [0]]


def test_text_is_no_part_of_samples():
    events = deltas(pair()["response"])
    for event in events:
        event["choices"][0]["text"] = "ab"
    report = ConversionReport()
    vllm.to_samples([pair() | {"response": stream(*events)}], vocab_size=10, report=report)
    assert report.unread == {"choice.text": 2}


@given(st.data())
def test_chunks_of_any_size_in_any_order_of_choices_give_the_same(data):
    out = pair()
    queues = []
    for whole in out["response"]["choices"]:
        size = len(whole["token_ids"])
        cuts = sorted(data.draw(st.sets(st.integers(1, size)), label="cuts") | {size})
        content = whole["logprobs"]["content"]
        queues.append([
            whole | {
                "token_ids": whole["token_ids"][a:b], "sampling_mask": whole["sampling_mask"][a:b],
                "logprobs": {"content": content[a:b]},
                "finish_reason": whole["finish_reason"] if b == size else None,
                "weight_versions": whole["weight_versions"] if b == size else None,
            }
            for a, b in zip([0, *cuts], cuts, strict=False)
        ])  # fmt: skip
    order = data.draw(st.permutations(
        [number for number, queue in enumerate(queues) for _ in queue]
    ), label="order")  # fmt: skip
    head = {key: out["response"][key] for key in ("request_id", "model", "prompt_token_ids")}
    events = [head | {"choices": [queues[number].pop(0)]} for number in order]
    batch = vllm.to_samples([out | {"response": stream(*events)}], vocab_size=10)
    assert batch.equals(vllm.to_samples([out], vocab_size=10))
    assert np.all(batch.column("sample_id").to_pylist() == ["r1/0", "r1/1"])
