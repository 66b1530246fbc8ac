"""The baseline of conversion reads what a response says, and inputs stay real responses."""

import json

import numpy as np
import pytest

from benchmarks import convert
from benchmarks.reference.convert import convert as baseline
from ragged_format.adapters import vllm


@pytest.fixture(scope="module")
def recorded():
    return convert.read_records(convert.DATA)


def test_baseline_gives_tokens_sets_and_heads():
    entry = {"token_id": 7, "logprob": -0.5, "rank": 1}
    other = {"token_id": 9, "logprob": -1.5, "rank": 2}
    floor = {"token_id": 1, "logprob": -9999.0, "rank": 3}
    response = {
        "prompt_token_ids": [3, 4],
        "choices": [
            {
                "token_ids": [7, 9],
                "sampling_mask": [[7, 9], [9]],
                "logprobs": {
                    "content": [
                        entry | {"top_logprobs": [entry, other]},
                        other | {"logprob": 0.0, "top_logprobs": [other, floor]},
                    ]
                },
            },
            {"token_ids": [], "sampling_mask": None, "logprobs": None},
        ],
    }
    first, empty = baseline(json.dumps(response).encode(), head_size=2)
    assert first["input_ids"].tolist() == [3, 4, 7, 9]
    assert first["completion_mask"].tolist() == [0, 0, 1, 1]
    assert first["candidate_ids"].tolist() == [7, 9, 9]
    assert first["candidate_counts"].tolist() == [2, 1]
    assert first["log_probs"].tolist() == [-0.5, 0.0]
    assert first["topk_ids"].tolist() == [[7, 9], [9, 1]]
    assert first["topk_log_probs"].tolist() == [[-0.5, -1.5], [-1.5, -9999.0]]
    assert empty["candidate_counts"].tolist() == []
    assert "log_probs" not in empty


@pytest.mark.parametrize("size", [1, 20])
def test_joined_and_repeated_responses_convert_to_the_recorded_tokens(recorded, size):
    records = [record for record in recorded if convert.head_size(record) == size]
    inputs = convert.repeated([convert.joined(records)], size=2_000)
    convert.check_same(inputs, [record["response"] for record in inputs])
    batch = vllm.to_samples(inputs, vocab_size=convert.VOCAB_SIZE)
    assert batch.num_rows == len(inputs) * convert.JOINED_CHOICES
    first = batch.column("input_ids")[0].as_py()
    choice = records[0]["response"]["choices"][0]["token_ids"]
    prompt = records[0]["response"]["prompt_token_ids"]
    assert first[: len(prompt) + len(choice)] == prompt + choice


def test_dropping_log_probs_leaves_the_sets(recorded):
    record = next(record for record in recorded if convert.head_size(record) == 1)
    (plain,) = convert.repeated([convert.without_log_probs(record)], size=1)
    with_log_probs, without = (
        baseline(json.dumps(record["response"]).encode()),
        baseline(plain["response"]),
    )
    for a, b in zip(with_log_probs, without, strict=True):
        assert np.array_equal(a["candidate_ids"], b["candidate_ids"])
        assert "log_probs" in a
        assert "log_probs" not in b
