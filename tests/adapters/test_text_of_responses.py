"""Text that UTF-8 cannot hold is refused with its place."""

import pytest

import ragged_format as rf
from ragged_format.adapters import vllm

HALF_A_PAIR = rb'"\ud83d"'


@pytest.mark.parametrize("key", [b"request_id", b"finish_reason"])
@pytest.mark.parametrize("kind", [bytes, str])
def test_half_of_a_surrogate_pair(key, kind):
    fields = {b"request_id": b'"r"', b"finish_reason": b'"stop"'} | {key: HALF_A_PAIR}
    text = (
        b'{"request_id":%s,"prompt_token_ids":[1],"choices":[{"index":0,"token_ids":[2],'
        b'"sampling_mask":[[2]],"finish_reason":%s,"logprobs":null}]}'
        % (fields[b"request_id"], fields[b"finish_reason"])
    )
    record = {"request": {}, "response": text if kind is bytes else text.decode()}
    with pytest.raises(rf.ConversionError) as caught:
        vllm.to_samples([record], vocab_size=10)
    assert caught.value.code.startswith("RF-A")
