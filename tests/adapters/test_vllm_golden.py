"""Three tokens whose columns are written out by hand, in every form that the engine sends."""

import copy
import json
from types import SimpleNamespace

import pytest
from support.vllm_rollouts import choice, deltas, golden, record, stream

import ragged_format as rf
from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.validate import validate

EXPECTED = {
    "sample_id": "r1/0",
    "group_id": None,
    "policy_version": 7,
    "temperature": 0.5,
    "finish_reason": "stop",
    "provenance": '{"engine":"vllm","model":"m",'
    '"sampling":{"logprobs":2,"temperature":0.5,"top_k":2}}',
    "input_ids": [5, 6, 3, 4, 7],
    "completion_mask": [0, 0, 1, 1, 1],
    "rollout_log_probs": [0.0, -2.5, -0.6931471824645996],
    "candidate_counts": [1, 3, 2],
    "candidate_ids": [3, 1, 4, 9, 2, 7],
    "topk_counts": [1, 1, 1],
    "topk_ids": [3, 9, 7],
    "topk_log_probs": [0.0, -0.25, -0.6931471824645996],
}


def csr():
    out = golden()
    out["response"]["choices"][0]["sampling_mask"] = {
        "token_ids": [3, 1, 4, 9, 2, 7], "offsets": [0, 1, 4, 6],
    }  # fmt: skip
    return out


def nested_object():
    out = golden()
    mask = out["response"]["choices"][0]["sampling_mask"]
    out["response"]["choices"][0]["sampling_mask"] = {"token_ids": mask}
    return out


def text(make, **layout):
    out = make()
    return out | {"response": json.dumps(out["response"], **layout)}


def streamed(**layout):
    out = golden()
    events = deltas(out["response"])
    return out | {"response": stream(*events, **layout)}


FORMS = {
    "nested": golden,
    "csr": csr,
    "nested object": nested_object,
    "csr text": lambda: text(csr, separators=(",", ":")),
    "text": lambda: text(golden, separators=(",", ":")),
    "text with spaces": lambda: text(golden),
    "text with indent": lambda: text(golden, indent=1),
    "sorted keys": lambda: text(golden, sort_keys=True),
    "stream": streamed,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_columns_written_out_by_hand(form):
    report = ConversionReport()
    batch = vllm.to_samples([FORMS[form]()], vocab_size=10, report=report)
    validate(batch)
    assert batch.to_pylist() == [EXPECTED]
    assert report.head_entries.to_dict() == {
        "taken": 6, "stored": 3, "dropped": {"minus_9999": 2, "sampled_beyond_head": 1},
    }  # fmt: skip
    assert report.candidates.to_dict() == {"taken": 6, "stored": 6, "dropped": {}}
    assert report.noted == {
        "heads_one_short": 1, "sets_wider_than_top_k": 1, "group_id_unknown": 1,
    }  # fmt: skip
    assert report.unbalanced() == []


@pytest.mark.parametrize("encode", [str.encode, lambda t: bytearray(t.encode()), str])
def test_text_may_be_bytes_or_str(encode):
    out = text(golden)
    out["response"] = encode(out["response"])
    assert vllm.to_samples([out], vocab_size=10).to_pylist() == [EXPECTED]


def test_the_engines_python_object_is_accepted():
    out = golden()
    chosen = out["response"]["choices"][0]
    chosen["sampling_mask"] = SimpleNamespace(token_ids=chosen["sampling_mask"])
    assert vllm.to_samples([out], vocab_size=10).to_pylist() == [EXPECTED]
    chosen["sampling_mask"] = SimpleNamespace(token_ids=[3, 1, 4, 9, 2, 7], offsets=[0, 1, 4, 6])
    assert vllm.to_samples([out], vocab_size=10).to_pylist() == [EXPECTED]


def test_a_choice_without_tokens_is_a_record_without_targets():
    aborted = choice(
        [], None, [], finish_reason="abort", weight_versions=[], routed_experts=None
    )  # fmt: skip
    batch = vllm.to_samples([golden(), record(aborted, request_id="r2")], vocab_size=10)
    validate(batch)
    row = batch.to_pylist()[1]
    assert row["input_ids"] == [5, 6]
    assert row["completion_mask"] == [0, 0]
    assert row["candidate_counts"] == row["rollout_log_probs"] == row["topk_ids"] == []
    assert (row["finish_reason"], row["policy_version"]) == ("abort", None)


def test_an_abort_within_a_stream_ends_without_a_set():
    out = golden()
    events = deltas(out["response"])
    last = events[-1]["choices"][0]
    events[-1]["choices"][0] = last | {"finish_reason": None, "weight_versions": None}
    end = {"token_ids": [], "sampling_mask": None, "logprobs": {"content": []}}
    events.append(copy.deepcopy(events[-1]))
    events[-1]["choices"][0] = last | end | {"finish_reason": "abort"}
    batch = vllm.to_samples([out | {"response": stream(*events)}], vocab_size=10)
    assert batch.to_pylist() == [EXPECTED | {"finish_reason": "abort"}]


def test_choices_are_records_of_one_group():
    one, two = choice([3], [[3]], index=0), choice([4, 2], [[4], [1, 2]], index=1)
    batch = vllm.to_samples([record(one, two)], vocab_size=10)
    assert batch.column("sample_id").to_pylist() == ["r1/0", "r1/1"]
    assert batch.column("group_id").to_pylist() == ["r1", "r1"]
    assert batch.column("candidate_ids").to_pylist() == [[3], [4, 1, 2]]
    assert "rollout_log_probs" not in batch.schema.names


def test_sets_the_vocabulary_wide_are_kept():
    whole = list(range(300))
    batch = vllm.to_samples([record(choice([5], [whole]))], vocab_size=300)
    assert batch.column("candidate_ids").to_pylist() == [whole]


def test_no_records_give_an_empty_batch():
    report = {}
    batch = vllm.to_samples([], vocab_size=10, report=report)
    assert batch.num_rows == 0
    assert report["responses"]["taken"] == 0
    rf.validate(batch)
