"""Reports about the cost of moving candidate sets between processes."""

import json
import sys

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.adapters import vllm
from ragged_format.testing import assert_ragged_equal, rollouts


def response(width, tokens=40):
    """The text of one answer whose sets all have `width` ids."""
    sets = [list(range(width)) for _ in range(tokens)]
    choice = {
        "index": 0, "token_ids": [0] * tokens, "sampling_mask": sets, "finish_reason": "stop",
        "logprobs": None,
    }  # fmt: skip
    return json.dumps({"request_id": "r", "prompt_token_ids": [1], "choices": [choice]}).encode()


def calls_of(function):
    """Python and C functions that are called while `function` runs."""
    count = 0

    def profile(*_):
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_conversion_does_not_touch_candidates_one_by_one():
    """vllm-project/vllm#28171, vllm-project/vllm#4699, vllm-project/vllm#14300."""
    texts = {width: response(width) for width in (50, 500)}

    def convert(width):
        return vllm.to_samples([{"request": {}, "response": texts[width]}], vocab_size=1000)

    assert len(convert(500)["candidate_ids"][0]) == 40 * 500
    few, many = (calls_of(lambda width=width: convert(width)) for width in (50, 500))
    assert many < few + 1000 < 40 * 500


def test_a_record_crosses_a_queue_as_one_buffer():
    """ray-project/ray#38399, ray-project/ray#46853: pickling lists of ints was the slow part."""
    sizes = {}
    for length in (100, 10_000):
        batch = rollouts(np.random.default_rng(0), num_samples=1, response_length=length)
        message = rf.encode_message(batch)
        assert memoryview(message).nbytes < 1.1 * batch.nbytes + 4096
        assert_ragged_equal(rf.decode_message(message, batch.schema), batch)
        sizes[length] = calls_of(lambda batch=batch: rf.encode_message(batch))
    assert sizes[10_000] == sizes[100]


@pytest.mark.parametrize("limit", [1 << 14, 1 << 16])
def test_what_is_stored_is_cut_into_bounded_batches(tmp_path, limit):
    """ray-project/ray#12650: one object beyond a limit of the serializer could not be moved."""
    batch = rollouts(np.random.default_rng(0), num_samples=64, prompt_length=50)
    with rf.Writer(tmp_path / "data", batch.schema, batch_bytes=limit) as writer:
        writer.write(batch)
    dataset = rf.Dataset(tmp_path / "data")
    parts = list(dataset.batches())
    largest = max(batch.slice(i, 1).nbytes for i in range(batch.num_rows))
    assert max(part.nbytes for part in parts) <= max(limit, largest) * 1.1 + 4096
    assert len(parts) > 1
    assert_ragged_equal(rf.concat(parts), batch)
