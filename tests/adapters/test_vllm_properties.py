"""Generated responses against the plain loop: any sets, heads, versions, any form of text."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vllm_oracle import samples_of
from support.vllm_rollouts import VOCAB_SIZE, deltas, stream

import ragged_format as rf
from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.validate import validate

COLUMNS = [
    "group_id", "policy_version", "temperature", "finish_reason", "provenance",
    "rollout_log_probs", "target_flags", "candidate_counts", "candidate_ids",
    "topk_counts", "topk_ids", "topk_log_probs",
]  # fmt: skip
V = 50


@st.composite
def positions(draw, k):
    """Return (sampled token, its set, its log-prob content) as the engine's sampler gives them."""
    width = draw(st.integers(1, 6))
    ranked = draw(st.permutations(range(V)))[:width]
    # Dyadic probabilities are exact, so that the log-probs of a set of one are 0.
    weights = np.array([2.0**-i for i in range(width)])
    log_probs = np.log(weights / weights.sum()).astype(np.float32).astype(float).tolist()
    at = draw(st.integers(0, width - 1))
    table = [
        {"token_id": token, "logprob": value, "rank": rank}
        for rank, (token, value) in enumerate(zip(ranked, log_probs, strict=True), 1)
    ]
    # Lists wider than the set are filled up with floors.
    floors = [token for token in range(V) if token not in ranked][: max(k - width, 0)]
    table += [
        {"token_id": token, "logprob": -9999.0, "rank": width + 1 + i}
        for i, token in enumerate(floors)
    ]
    own = table[at]
    others = [item for item in table if item is not own][: max(k, 1) - 1]
    return ranked[at], sorted(ranked), own | {"top_logprobs": [dict(own), *others]}


@st.composite
def responses(draw):
    k = draw(st.sampled_from([None, 0, 1, 2, 5]))
    n = draw(st.integers(1, 3))
    prompt = draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=4))
    choices = []
    for index in range(n):
        drawn = draw(st.lists(positions(k or 0), max_size=5))
        size = len(drawn)
        cut = draw(st.integers(0, size))
        versions = [("3", 0, cut), (draw(st.sampled_from(["4", "default"])), cut, size)]
        choices.append({
            "index": index,
            "finish_reason": draw(st.sampled_from(["stop", "length"])) if size else "abort",
            "stop_reason": draw(st.sampled_from([None, "x", 28])),
            "token_ids": [token for token, _, _ in drawn],
            "routed_experts": None,
            "sampling_mask": [ids for _, ids, _ in drawn] or None,
            "weight_versions": [
                {"version": v, "start": a, "end": b} for v, a, b in versions if a < b
            ],
            "logprobs": None if k is None else {"content": [content for _, _, content in drawn]},
        })  # fmt: skip
    sampling = {"temperature": draw(st.sampled_from([0.5, 1.0])), "n": n, "top_k": 3}
    if k is not None:
        sampling["logprobs"] = k
    identity = draw(st.text(st.characters(codec="ascii", categories=["L"]), min_size=1))
    return {
        "request": {"token_ids": prompt, "sampling_params": sampling},
        "response": {
            "request_id": identity, "model": "m", "created": 3, "usage": None,
            "prompt_token_ids": prompt, "output_mode": "tokens", "choices": choices,
        },
    }  # fmt: skip


def forms(record):
    response = record["response"]
    yield record
    yield record | {"response": json.dumps(response, separators=(",", ":")).encode()}
    yield record | {"response": json.dumps(response).encode()}
    yield record | {"response": json.dumps(response, indent=1, sort_keys=True)}


@settings(max_examples=60)
@given(responses())
def test_generated_responses_are_what_a_loop_over_tokens_gives(record):
    expected = samples_of(record)
    for form in forms(record):
        report = ConversionReport()
        batch = vllm.to_samples([form], vocab_size=V, columns=COLUMNS, report=report)
        validate(batch)
        assert report.unbalanced() == []
        assert batch.to_pylist() == [
            {name: sample[name] for name in batch.schema.names} for sample in expected
        ]


@settings(max_examples=40)
@given(responses())
def test_generated_streams_give_the_same_samples(record):
    response = record["response"]
    text = stream(*(event | {"created": 3, "output_mode": "tokens"} for event in deltas(response)))
    batch = vllm.to_samples([record], vocab_size=V, columns=COLUMNS)
    streamed = vllm.to_samples(
        [record | {"response": text.encode()}], vocab_size=V, columns=COLUMNS
    )
    assert streamed.equals(batch)


@settings(max_examples=40)
@given(st.lists(responses(), min_size=1, max_size=4))
def test_inferred_columns_hold_what_asked_for_ones_do_and_calls_add_up(records):
    for number, record in enumerate(records):
        record["response"]["request_id"] += f"-{number}"
    together, apart = ConversionReport(), ConversionReport()
    batch = vllm.to_samples(records, vocab_size=V, report=together)
    validate(batch)
    asked = vllm.to_samples(records, vocab_size=V, columns=COLUMNS)
    # Flags also say what the further columns lack.
    for name in set(batch.schema.names) & set(asked.schema.names) - {"target_flags"}:
        assert batch.column(name).equals(asked.column(name))
    parts = [vllm.to_samples([r], schema=batch.schema, report=apart) for r in records]
    assert rf.concat(parts).equals(batch)
    assert together.unbalanced() == apart.unbalanced() == []
    for ledger in ("responses", "samples", "tokens", "targets", "candidates", "log_probs"):
        assert getattr(apart, ledger) == getattr(together, ledger)


@settings(max_examples=60)
@given(
    responses(),
    st.sampled_from(["flag", "full_vocab", "drop_target", "drop_sample"]),
    st.sampled_from(["flag", "full_vocab", "drop_target", "drop_sample"]),
    st.sampled_from(["flag", "drop_target", "drop_sample"]),
    st.randoms(use_true_random=False),
)
def test_whatever_is_broken_the_result_is_valid_and_the_report_adds_up(
    record, missing, invalid, no_log_prob, rng
):
    for choice in record["response"]["choices"]:
        for position in range(len(choice["token_ids"])):
            fault = rng.choice(["none", "lost", "empty", "outside", "twice", "null", "nan"])
            if fault == "lost":
                choice["sampling_mask"][position] = None
            elif fault == "empty":
                choice["sampling_mask"][position] = []
            elif fault == "outside":
                token = choice["token_ids"][position]
                row = choice["sampling_mask"][position]
                choice["sampling_mask"][position] = [i for i in row if i != token] or [
                    (token + 1) % V
                ]
            elif fault == "twice":
                choice["sampling_mask"][position] *= 2
            elif choice["logprobs"] is not None and fault in ("null", "nan"):
                entry = choice["logprobs"]["content"][position]
                entry["logprob"] = None if fault == "null" else float("nan")
    report = ConversionReport()
    batch = vllm.to_samples(
        [record], vocab_size=V, on_missing_support=missing, on_invalid_support=invalid,
        on_missing_log_prob=no_log_prob, report=report,
    )  # fmt: skip
    validate(batch)
    assert report.unbalanced() == []
    assert report.samples.stored == batch.num_rows
    stored = {
        "tokens": "input_ids", "candidates": "candidate_ids", "head_entries": "topk_ids",
    }  # fmt: skip
    for ledger, column in stored.items():
        if column in batch.schema.names:
            assert getattr(report, ledger).stored == len(batch.column(column).flatten())
    masks = batch.column("completion_mask").flatten().to_pylist()
    assert report.targets.stored == sum(masks)


def test_the_vocabulary_of_the_recordings_is_that_of_the_demo():
    assert VOCAB_SIZE == 49152
