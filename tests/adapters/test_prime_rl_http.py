"""prime-rl's binary fields of answers: the same samples as from plain lists."""

import base64
import json

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.adapters import prime_rl, vllm
from ragged_format.errors import ConversionError
from ragged_format.testing import assert_ragged_equal


def b64(values, dtype):
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


def kept(*rows):
    ids = [i for row in rows for i in row]
    return {"ids": b64(ids, "<i4"), "counts": b64(list(map(len, rows)), "<i4")}


def compact(*rows):
    pairs = np.array([pair for row in rows for pair in row], [("id", "<u4"), ("value", "<f4")])
    return {
        "format": "u32-f32-le-v1",
        "data": base64.b64encode(pairs.tobytes()).decode(),
        "offsets": np.append(0, np.cumsum(list(map(len, rows)))).tolist(),
        "num_top_logprobs": 2,
    }


ROWS = [[3], [1, 4, 9]]
TOPS = [[(3, 0.0)], [(4, -1.0), (9, -0.75)]]


def plain():
    content = [
        {
            "token_id": row[0][0], "logprob": row[0][1],
            "top_logprobs": [{"token_id": i, "logprob": v} for i, v in row],
        }
        for row in TOPS
    ]  # fmt: skip
    choice = {"index": 0, "token_ids": [3, 4], "sampling_mask": ROWS}
    return {
        "request_id": "r", "prompt_token_ids": [5, 6],
        "choices": [choice | {"logprobs": {"content": content}}],
    }  # fmt: skip


def binary(**changes):
    response = plain()
    (choice,) = response["choices"]
    del choice["sampling_mask"], choice["logprobs"]
    choice |= {"kept_tokens": kept(*ROWS), "compact_logprobs": compact(*TOPS), "logprobs": None}
    choice |= changes
    return response


def converted(response):
    batch = vllm.to_samples([{"response": response}], vocab_size=10)
    rf.validate(batch)
    return batch


def test_binary_fields_give_the_samples_of_plain_ones():
    assert_ragged_equal(converted(prime_rl.expand_response(binary())), converted(plain()))


def test_a_null_mask_stays_a_lost_one():
    """PrimeIntellect-ai/prime-rl#3235: nothing captured is null, which is no full vocabulary."""
    with pytest.raises(ConversionError, match="RF-A004"):
        converted(prime_rl.expand_response(binary(kept_tokens=None)))
    with pytest.raises(ConversionError, match="RF-A004"):
        converted(prime_rl.expand_response(binary(kept_tokens=kept([3], []))))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"kept_tokens": kept([3])}, "RF-A006"),
        ({"kept_tokens": kept([3], [4], [5])}, "RF-A006"),
        ({"kept_tokens": kept([3], [4]) | {"ids": b64([3], "<i4")}}, "RF-A006"),
        ({"kept_tokens": {"ids": "AAA=", "counts": ""}}, "RF-A002"),
        ({"kept_tokens": {"ids": "?", "counts": ""}}, "RF-A002"),
        ({"kept_tokens": {"ids": b64([], "<i4"), "counts": b64([1, -1], "<i4")}}, "RF-A002"),
        ({"kept_tokens": {}}, "RF-A002"),
        ({"compact_logprobs": compact(*TOPS) | {"format": "u32-f64-le-v2"}}, "RF-A002"),
        ({"compact_logprobs": compact(TOPS[0])}, "RF-A006"),
        ({"compact_logprobs": compact(*TOPS) | {"offsets": [0, 1, 2]}}, "RF-A006"),
        ({"compact_logprobs": compact(*TOPS) | {"data": "AAAA"}}, "RF-A002"),
    ],
)
def test_malformed_fields_are_errors(change, code):
    with pytest.raises(ConversionError) as caught:
        prime_rl.expand_response(binary(**change))
    assert caught.value.code == code


def test_bytes_are_a_fraction_of_lists():
    """PrimeIntellect-ai/prime-rl#2809, #2608: sets travel as bytes, not as lists of numbers."""
    sets = np.arange(30000 * 5) % 150000
    counts = np.full(30000, 5)
    mask = prime_rl.SamplingMask(sets.astype("<i4").tobytes(), counts.astype("<i4").tobytes())
    item = prime_rl.TrainingSample([1], [False], [0.0], [1.0], "", sampling_mask=mask)
    lists = json.dumps(sets.reshape(-1, 5).tolist(), separators=(",", ":"))
    assert len(prime_rl.encode([item])) < 0.8 * len(lists)
