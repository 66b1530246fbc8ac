"""Which reader of JSON text is used, with many texts, in threads, and where extras are missing."""

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.engine_json import (
    ENTRY,
    OWN,
    by_scanner,
    by_simdjson,
    canon,
    outcome,
    same,
    small,
)
from support.vllm_rollouts import as_bytes, recorded

from ragged_format import adapters
from ragged_format.adapters import _entries, _json, _scan, _simd
from ragged_format.adapters._json import read_json
from ragged_format.adapters._values import LogProbs, Rows, plain


def test_everything_is_the_same_without_extras(monkeypatch):
    texts = [
        as_bytes(item)["response"]
        for item in recorded("triton_topk_kernel", "abort")
        if isinstance(item["response"], dict)
    ]
    expected = [outcome(by_scanner, text) for text in texts]
    assert [outcome(read_json, text) for text in texts] == expected
    monkeypatch.setattr(_simd, "simdjson", None)
    assert [outcome(read_json, text) for text in texts] == expected
    assert isinstance(read_json(texts[0])["choices"][0]["logprobs"]["content"], LogProbs)
    for number in (b"-1e400", b"true", b"36893488147419103232", b"-0.5,", b"1" * 5000, b"-0.25"):
        same(b'{"logprobs":{"content":[' + ENTRY.replace(b"-0.5", number) + b"]}}")
    same(b'{"logprobs":{"content":"x"},"content":3}')


def test_the_package_works_where_simdjson_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "simdjson", None)
    name = _simd.__name__
    monkeypatch.delitem(sys.modules, name)
    fresh = __import__(name, fromlist=["doubles"])
    assert not fresh.is_available()
    assert fresh.doubles(b"1,2").tolist() == [1.0, 2.0]


def test_the_package_works_where_numba_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("_machine", "_scan", "_scan_numbers", "_scan_walk"):
        monkeypatch.delitem(sys.modules, f"{adapters.__name__}.{name}")
    monkeypatch.delattr(adapters, "_scan")
    assert _json._scanner.__wrapped__() is None
    monkeypatch.setattr(_json, "_scanner", lambda: None)
    monkeypatch.setattr(_json, "_WORTH_SCANNING", 0)
    assert isinstance(read_json(json.dumps(small()).encode())["choices"][0]["sampling_mask"], Rows)


def test_big_texts_are_scanned():
    text = json.dumps({"sampling_mask": [[10**8]], "x": "y" * _json._WORTH_SCANNING}).encode()
    assert read_json(text)["sampling_mask"] == [[10**8]]  # simdjson would make rows of it


@pytest.mark.parametrize("read", [by_scanner, by_simdjson])
def test_threads_read_at_once(read):
    text = json.dumps(small()).encode()
    expected = canon(read(text))
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda _: canon(read(text)), range(40)))
    assert values == [expected] * 40


@pytest.fixture(params=["numba", "simdjson"])
def reader(request, monkeypatch):
    monkeypatch.setattr(_json, "_WORTH_SCANNING", 0 if request.param == "numba" else sys.maxsize)


def bad(texts):
    return [isinstance(value, ValueError) for value in _json.read_many(texts)]


def test_many_texts_are_read_as_each_alone(reader):
    texts = [
        as_bytes(item)["response"]
        for item in recorded("triton_topk_kernel", "openai_endpoints")
        if isinstance(item["response"], dict)
    ]
    assert [canon(v) for v in _json.read_many(texts)] == [canon(json.loads(t)) for t in texts]
    odd = b'{"sampling_mask":[[1],null]}'
    wide = b'{"logprobs":{"content":[' + ENTRY + b"]}}"
    wider = wide.replace(b'"top_logprobs":[', b'"top_logprobs":[{' + OWN + b"},")
    mixed = [odd, *texts, wide, wider, odd]
    assert [canon(v) for v in _json.read_many(mixed)] == [canon(json.loads(t)) for t in mixed]


def test_a_bad_text_among_many_spoils_no_other(reader):
    good = b'{"token_ids":[1,2]}'
    assert bad([good, b'{"token_ids":[1,}', good]) == [False, True, False]
    assert bad([good, b"", good, b"[1]"]) == [False, True, False, False]
    assert bad([good + b"," + good, good]) == [True, False]
    assert bad([b'{"a":[{}', b'{}]},{"b":3}']) == [True, True]
    assert bad([b'{"a":' * 100_000 + b"}" * 100_000, good]) == [True, False]
    assert _json.read_many([]) == []


def test_values_of_the_fast_reader_go_back_to_json():
    rows = Rows(np.array([3, 1, 4]), np.array([1, 2]))
    assert (
        json.dumps([rows, np.arange(2), np.float64(0.5)], default=plain)
        == "[[[3], [1, 4]], [0, 1], 0.5]"
    )
    with pytest.raises(TypeError):
        json.dumps(object(), default=plain)


def test_values_stay_as_they_are_when_buffers_are_used_again():
    texts = [json.dumps({"sampling_mask": [[n, n + 1]] * 50}).encode() for n in range(20)]
    first = _scan.read_texts(texts[:10])
    expected = [canon(value) for value in first]
    _scan.read_texts(texts[10:])
    second = _scan.read_texts(texts[10:])
    assert [canon(value) for value in first] == expected
    rows = first[3]["sampling_mask"]
    del first
    third = _scan.read_texts(texts[10:])
    assert rows.values.tolist() == [3, 4] * 50
    assert [canon(v) for v in second] == [canon(v) for v in third] != expected
    assert len(_scan._rooms.kept) <= _scan._KEPT_ROOMS


def test_windows_of_one_width_are_made_once():
    assert _entries._windows(3) is _entries._windows(3)


def test_records_are_not_changed():
    item = small()
    before = copy.deepcopy(item)
    canon(item)
    assert item == before
