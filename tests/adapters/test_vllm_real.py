"""All recorded responses, against an independent loop over tokens."""

import gzip
import json
from importlib import resources

import pytest
from support.vllm_oracle import samples_of
from support.vllm_rollouts import VOCAB_SIZE, as_bytes, recorded

import ragged_format as rf
from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.validate import validate

CATEGORIES = (
    "abort", "float32_model", "grpo_groups", "multi_turn", "raw_prompts", "triton_topk_kernel",
    "variants",
)  # fmt: skip
EVERYTHING = [
    "group_id", "policy_version", "temperature", "finish_reason", "provenance",
    "rollout_log_probs", "target_flags", "candidate_counts", "candidate_ids",
    "topk_counts", "topk_ids", "topk_log_probs",
]  # fmt: skip


def convertible(category):
    records = recorded(category)
    return [r for r in records if r["http_status"] == 200 and isinstance(r["response"], dict)]


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("form", ["dict", "bytes", "spaced bytes"])
def test_every_value_is_what_a_loop_over_tokens_gives(category, form):
    records = convertible(category)
    inputs = {
        "dict": records,
        "bytes": [as_bytes(r) for r in records],
        "spaced bytes": [as_bytes(r, (", ", ": ")) for r in records],
    }[form]
    report = ConversionReport()
    batch = vllm.to_samples(inputs, vocab_size=VOCAB_SIZE, columns=EVERYTHING, report=report)
    validate(batch)
    expected = [sample for record in records for sample in samples_of(record)]
    for row, want in zip(batch.to_pylist(), expected, strict=True):
        for name, value in row.items():
            assert value == want[name], (row["sample_id"], name)
    assert report.unbalanced() == []
    assert report.responses.stored == len(records)


def test_streams_give_what_their_tokens_say():
    for record in recorded("abort", "variants", names={
        "mid_stream", "stream_n1_tokens", "stream_n2_text_usage",
    }):  # fmt: skip
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in record["response"].splitlines()
            if line.startswith("data: {")
        ]
        found = [c for chunk in chunks for c in chunk["choices"]]
        whole = {}
        for delta in found:
            into = whole.setdefault(delta["index"], {
                "index": delta["index"], "token_ids": [], "sampling_mask": [],
                "logprobs": {"content": []}, "stop_reason": None,
            })  # fmt: skip
            into["token_ids"] += delta["token_ids"]
            into["sampling_mask"] += delta["sampling_mask"] or []
            into["logprobs"]["content"] += delta["logprobs"]["content"]
            for key in ("finish_reason", "weight_versions"):
                into[key] = delta[key] or into.get(key)
        first = chunks[0]
        response = {
            "request_id": first["request_id"], "prompt_token_ids": first["prompt_token_ids"],
            "output_mode": first["output_mode"], "choices": [whole[i] for i in sorted(whole)],
        }  # fmt: skip
        expected = samples_of(record | {"response": response})
        batch = vllm.to_samples([as_bytes(record)], vocab_size=VOCAB_SIZE, columns=EVERYTHING)
        validate(batch)
        assert batch.to_pylist() == expected


def test_everything_recorded_is_converted_or_explained():
    records = [as_bytes(record) for record in recorded()]
    report = ConversionReport()
    batch = vllm.to_samples(records, vocab_size=VOCAB_SIZE, on_error="skip", report=report)
    validate(batch)
    assert report.unbalanced() == []
    # 7 error answers, and 6 answers of endpoints without candidate sets.
    assert report.responses.to_dict() == {
        "taken": 61, "stored": 48, "dropped": {"RF-A003": 7, "RF-A009": 6},
    }  # fmt: skip
    whole = sum(len(r["response"]["choices"]) for c in CATEGORIES for r in convertible(c))
    streamed = 1 + 1 + 2
    assert report.samples.stored == batch.num_rows == whole + streamed
    for ledger in (report.samples, report.tokens, report.targets, report.candidates):
        assert not ledger.dropped
    assert set(report.head_entries.dropped) == {"minus_9999", "sampled_beyond_head", "text_only"}
    assert report.unread.keys() == {
        "choice.text", "response.prompt_logprobs", "record.category", "record.path",
        "record.messages", "record.aborted_after_s",
    }  # fmt: skip


def test_one_call_or_many_with_one_schema_give_the_same():
    records = [as_bytes(r) for r in recorded("grpo_groups", "multi_turn", "variants")
               if r["http_status"] == 200]  # fmt: skip
    together, apart = ConversionReport(), ConversionReport()
    whole = vllm.to_samples(records, vocab_size=VOCAB_SIZE, report=together)
    parts = [vllm.to_samples([r], schema=whole.schema, report=apart) for r in records]
    assert rf.concat(parts).equals(whole)
    assert apart == together


def test_the_demo_has_groups_of_eight_and_conversations():
    path = resources.files("ragged_format") / "demo_data" / "rollouts.jsonl.gz"
    records = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    report = ConversionReport()
    batch = vllm.to_samples(records, vocab_size=VOCAB_SIZE, report=report)
    validate(batch)
    groups = batch.column("group_id").value_counts()
    sizes = sorted(count.as_py() for count in groups.field("counts"))
    assert sizes == [3] * 6 + [8] * 7
    assert report.unbalanced() == []
    assert not report.unread


def test_conversations_of_the_demo_continue_their_prompts():
    path = resources.files("ragged_format") / "demo_data" / "rollouts.jsonl.gz"
    records = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    rows = vllm.to_samples(records, vocab_size=VOCAB_SIZE).to_pylist()
    by_turn = {}
    for row in rows:
        if row["rollout_id"] is not None:
            by_turn.setdefault(row["rollout_id"], {})[row["branch_index"]] = row["input_ids"]
    assert len(by_turn) == 6
    for turns in by_turn.values():
        shared = [a == b for a, b in zip(turns[0], turns[1], strict=False)]
        assert sum(shared) > 20
