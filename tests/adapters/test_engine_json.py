"""The fast readers of JSON text against ``json.loads``, on any formatting and on damaged text."""

import json
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engine_json import ENTRY, by_scanner, by_simdjson, raised, same, small, texts
from support.vllm_rollouts import as_bytes, deltas, recorded

from ragged_format.adapters import _json, _scan
from ragged_format.adapters._values import LogProbs, Rows


def is_fast(text):
    """Return whether no reader leaves the text to ``json``, and all find the same lists."""
    try:
        values = raised(_scan.read_texts([text])[0]), _json._read_fast(text)
    except (ValueError, RecursionError):
        return False
    kinds = [list(map(type, big_lists(value))) for value in values]
    return kinds[0] == kinds[1]


def big_lists(value):
    if isinstance(value, Rows | LogProbs | np.ndarray):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from big_lists(item)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_recorded_responses_are_read_fast_and_equal(separators):
    slow = set()
    for item in recorded():
        if isinstance(item["response"], str):
            continue
        text = as_bytes(item, separators)["response"]
        same(text)
        if not is_fast(text):
            slow.add(item["name"])
    # simdjson counts brackets, and one in a text looks like that of a list.
    assert slow == {"text_mode_logprobs5"}
    for item in recorded("grpo_groups", "raw_prompts", "multi_turn"):
        assert is_fast(as_bytes(item, separators)["response"])


def test_whole_records_are_read_fast_and_equal():
    for item in recorded("grpo_groups", "multi_turn"):
        text = json.dumps(item).encode()
        assert is_fast(text)
        same(text)


@pytest.mark.parametrize("read_json", [by_scanner, by_simdjson])
def test_big_lists_become_arrays(read_json):
    value = read_json(json.dumps(small(), separators=(",", ":")).encode())
    chosen = value["choices"][0]
    assert isinstance(value["prompt_token_ids"], np.ndarray)
    assert isinstance(chosen["token_ids"], np.ndarray)
    assert isinstance(chosen["sampling_mask"], Rows)
    assert isinstance(chosen["logprobs"]["content"], LogProbs)
    csr = b'{"sampling_mask":{"token_ids":[3,1,4],"offsets":[0,1,3]}}'
    assert isinstance(read_json(csr)["sampling_mask"]["offsets"], np.ndarray)


@pytest.mark.parametrize("text", [
    b'{"token_ids":[]}',
    b'{"token_ids":[ ]}',
    b'{"token_ids":[1,2,]}',
    b'{"token_ids":[,1]}',
    b'{"token_ids":[1 2]}',
    b'{"token_ids":[1,[2]]}',
    b'{"token_ids":[1,2}',
    b'{"token_ids":[1,2',
    b'{"token_ids":["a]b",1]}',
    b'{"token_ids":[true]}',
    b'{"token_ids":[1.0,2e1]}',
    b'{"token_ids":[01]}',
    b'{"token_ids":[-0,-1]}',
    b'{"token_ids":[9223372036854775807,9223372036854775808]}',
    b'{"token_ids":[1],"token_ids":[2]}',
    b'{"token_ids" : [1]}',
    b'{"token_ids":"~ragged-list~i0","prompt_token_ids":[1]}',
    b'{"x":"~ragged-list~i0","prompt_token_ids":[1]}',
    b'{"x":"\\"token_ids\\":[1]","token_ids":[1]}',
    b'{"x\\"token_ids":[1],"token_ids":[1]}',
    b'{"\\"token_ids":[1,2]}',
    b'{"x":"\\\\","token_ids":[1]}',
    b'{"sampling_mask":[]}',
    b'{"sampling_mask":[[]]}',
    b'{"sampling_mask":[[],[1]]}',
    b'{"sampling_mask":[[1],[]]}',
    b'{"sampling_mask":[[1],null,[2]]}',
    b'{"sampling_mask":[[0],[0,1],[0]]}',
    b'{"sampling_mask":[[05]]}',
    b'{"sampling_mask":[[-1]]}',
    b'{"sampling_mask":[[-0]]}',
    b'{"sampling_mask":[[1,-0]]}',
    b'{"sampling_mask":[[1,-2]]}',
    b'{"sampling_mask":[[0.0]]}',
    b'{"sampling_mask":[[0e1],[9]]}',
    b'{"sampling_mask":[[9],[9,0]]}',
    b'{"sampling_mask":[[1],[2]]]}',
    b'{"sampling_mask":[[1]],[[2]]}',
    b'{"sampling_mask":[[1],[2]],"x":[[3]]}',
    b'{"sampling_mask":[[1]2],[3]]}',
    b'{"sampling_mask":[[1],2,[3]]}',
    b'{"sampling_mask":[[1],[2,[3]]]}',
    b'{"sampling_mask":[[[1]]]}',
    b'{"sampling_mask":[[1] ,[2]]}',
    b'{"sampling_mask":[[1], [2]]}',
    b'{"sampling_mask":[[1],[2] ]}',
    b'{"sampling_mask":[ [1],[2]]}',
    b'{"sampling_mask":[[1,\n2]]}',
    b'{"sampling_mask":[[ 1]]}',
    b'{"sampling_mask":[[1],[4294967299]]}',
    b'{"sampling_mask":[[4294967299],[1]]}',
    b'{"sampling_mask":[[1],[2]]',
    b'{"sampling_mask":[[1],[2',
    b'[{"sampling_mask":[[1]]},[[2]]]',
    b'{"sampling_mask":[[1],[2]]}x',
    b'{"logprobs":{"content":[]}}',
    b'{"logprobs":{"content":[{}]}}',
    b'{"logprobs":{"content":null}}',
    b"",
    b"null",
    b"[1,2",
])  # fmt: skip
def test_odd_lists_are_what_json_says(text):
    same(text)


@pytest.mark.parametrize(("old", "new"), [
    (b'"rank":1,', b'"rank":1.0,'),
    (b'"rank":1,', b'"rank":1e2,'),
    (b'"rank":1,', b'"rank":1E2,'),
    (b'"rank":1,', b'"rank":1.5,'),
    (b'"rank":1,', b'"rank":null,'),
    (b'"rank":1,', b'"rank":"1",'),
    (b'"rank":1,', b'"rank":[1],'),
    (b'"rank":1,', b'"rank":1 ,'),
    (b'"rank":1,', b'"rank":,'),
    (b'"rank":1,', b'"rank":1,"x":2,'),
    (b'"rank":1,', b'"rank":100,'),
    (b'"rank":1,', b'"rank":12345678901234567890,'),
    (b'"rank":1,', b'"rank":9007199254740993,'),
    (b'"token_id":3', b'"token_ie":3'),
    (b'"token_id":3', b'"tokek_id":3'),
    (b'"token_id":3', b'"token_id" :3'),
    (b'"token_id":3', b'"token_id":-3'),
    (b'"token_id":3', b'"token_id":true'),
    (b'"token_id":3', b'"token_id":{}'),
    (b'"logprob":-0.5', b'"logprob":0'),
    (b'"logprob":-0.5', b'"logprob":-5e-1'),
    (b'"logprob":-0.5', b'"logprob":-5E-1'),
    (b'"logprob":-0.5', b'"logprob":-5e-01'),
    (b'"logprob":-0.5', b'"logprob":null'),
    (b'"logprob":-0.5', b'"logprob":NaN'),
    (b'"logprob":-0.5', b'"logprob":-Infinity'),
    (b'"logprob":-0.5', b'"logprob":"-Infinity"'),
    (b'"logprob":-0.5', b'"logprob":-.5'),
    (b'"logprob":-0.5', b'"logprob":-1e400'),
    (b'"logprob":-0.5', b'"logprob":-0.1_2'),
    (b'"logprob":-0.5', b'"logprob":-0.5:1'),
    (b'"logprob":-0.5', b'"logprob":-0.5abc'),
    (b'"logprob":-0.5', b'"logprob":-0.5,6'),
    (b'"logprob":-0.5', b'"logprob":-0.5 6'),
    (b'"logprob":-0.5', b'"logprob":-4.9406564584124654e-324'),
    (b'"logprob":-0.5', b'"logprob":-0.10000000149011612'),
    (b'"logprob":-0.5', b'"logprob":-0.100000001490116119384765625'),
    (b'"logprob"', b'"logprod"'),
    (b'"top_logprobs"', b'"tap_logprobs"'),
    (b'"top_logprobs":[', b'"top_logprobs": ['),
    (b'"top_logprobs":[', b'"top_logprobs":[[],'),
    (b'"top_logprobs":[', b'"top_logprobs":[{"token_id":3,"logprob":-0.5,"rank":1},'),
    (b"}]}", b"}] }"),
    (b"}]}", b"}],}"),
    (b"}]}", b"}]],}"),
    (b"}]}", b'}],"x":1}'),
    (b"}]}", b'},{"token_id":3,"logprob":-0.5,"rank":1}]}'),
])  # fmt: skip
@pytest.mark.parametrize("copies", [1, 3])
def test_odd_entries_are_what_json_says(old, new, copies):
    for count in (1, -1):
        broken = ENTRY.replace(old, new, count)
        for parts in ([broken] * copies, [ENTRY, broken, ENTRY], [broken, ENTRY]):
            same(b'{"logprobs":{"content":[' + b",".join(parts) + b"]}}")


def test_damaged_text_is_what_json_says():
    rng = random.Random(7)
    text = json.dumps(small(), separators=(",", ":")).encode()
    assert is_fast(text)
    alphabet = b'[]{},:"\\ 0159-+.eEtn_~\n\xff'
    for position in range(len(text)):
        for byte in rng.sample(alphabet, 2):
            same(text[:position] + bytes([byte]) + text[position + 1 :])
        same(text[:position] + bytes([rng.choice(alphabet)]) + text[position:])
        same(text[:position] + text[position + 1 :])
        same(text[:position])


@settings(max_examples=100)
@given(texts())
@example(b'{"prompt_token_ids":[1],"choices":[],"x":{"token_ids":[[1]],"offsets":[2]}}')
def test_generated_text_is_what_json_says(text):
    same(text)


@given(st.lists(st.lists(st.integers(0, 2**32)), min_size=1))
def test_rows_of_any_ids_are_read_fast(lists):
    text = json.dumps({"sampling_mask": lists}).encode()
    largest = max((item for row in lists for item in row), default=0)
    dtypes = {by_simdjson: np.int32 if largest < 2**31 else np.int64, by_scanner: np.int32}
    for read, dtype in dtypes.items():
        rows = read(text)["sampling_mask"]
        if read is by_scanner and largest >= 10**8:  # no vocabulary is so large
            assert rows == lists
            continue
        assert isinstance(rows, Rows)
        assert rows.values.tolist() == [item for row in lists for item in row]
        assert rows.counts.tolist() == [len(row) for row in lists]
        assert rows.values.dtype == dtype


@given(
    st.integers(1, 5), st.lists(st.floats(-1e30, 0, allow_subnormal=False), min_size=6, max_size=30)
)
def test_entries_of_any_log_probs_are_read_exactly(width, values):
    size = len(values) // (width + 1)
    content = []
    source = iter(values)
    for token in range(size):
        top = [
            {"token_id": token * 7 + i, "logprob": next(source), "rank": i * i + 1}
            for i in range(width)
        ]
        content.append(
            {"token_id": token, "logprob": next(source), "rank": 5} | {"top_logprobs": top}
        )
    text = json.dumps({"logprobs": {"content": content}}, separators=(",", ":")).encode()
    if size:
        assert is_fast(text)
    same(text)


def test_streams_are_read_as_one_document():
    events = deltas(small())
    text = json.dumps(events, separators=(",", ":")).encode()
    assert is_fast(text)
    same(text)
