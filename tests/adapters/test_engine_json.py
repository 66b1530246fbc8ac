"""The fast readers of JSON text against ``json.loads``, on any formatting and on damaged text."""

import copy
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.vllm_rollouts import as_bytes, choice, deltas, entry, record, recorded

from ragged_format import adapters
from ragged_format.adapters import _entries, _json, _scan, _simd
from ragged_format.adapters._json import read_json
from ragged_format.adapters._values import LogProbs, Rows, as_ids, as_log_probs, as_rows, plain
from ragged_format.errors import ConversionError, Where


def place(_position=None, /):
    return Where()


def canon(value, key=None):
    """Return a value with its lists as the adapter reads them, whichever reader made them."""
    reads = {
        "token_ids": (as_ids, as_rows), "prompt_token_ids": (as_ids,), "offsets": (as_ids,),
        "sampling_mask": (as_rows,), "content": (as_log_probs,),
    }  # fmt: skip
    if key in reads and not isinstance(value, str | dict):
        for read in reads[key]:
            try:
                return flat(read(value, place))
            except ConversionError:
                continue
        return plain(value) if isinstance(value, Rows | np.ndarray) else value
    if isinstance(value, dict):
        return {k: canon(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [canon(item) for item in value]
    return repr(value)  # NaN is equal to itself, and 1 is not 1.0


def flat(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Rows):
        null = None if value.null is None else value.null.tolist()
        return [value.values.tolist(), value.counts.tolist(), null]
    assert isinstance(value, LogProbs)
    entries = [
        repr(column.tolist())
        for column in (
            value.entries.ids, value.entries.log_probs, value.entries.null, value.entries.ranks,
        )
    ]  # fmt: skip
    ids = None if value.ids is None else value.ids.tolist()
    own = [ids, repr(value.values.tolist()), value.null.tolist(), value.counts.tolist()]
    return [*own, entries, value.text_entries]


def outcome(read, text):
    try:
        return canon(read(text))
    except ValueError:
        return "not JSON"


def by_scanner(text):
    [value] = _json._read_scanned(_scan.read_texts, [text])
    return raised(value)


def by_simdjson(text):
    return raised(_json._read_alone(text))


def raised(value):
    if isinstance(value, ValueError):
        raise value
    return value


def same(text):
    expected = outcome(json.loads, text)
    assert outcome(by_scanner, text) == expected, text
    assert outcome(by_simdjson, text) == expected, text


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


def small():
    """Return a response that exercises each kind of list, short enough to damage everywhere."""
    one = choice(
        [3, 4], [[0, 3], [4, 10, 100]],
        [
            entry(3, -0.07181357592344284, 1, (0, -3.0994415283203125e-06, 2)),
            entry(4, -9999.0, 100, (10, -1e-05, 1)),
        ],
    )  # fmt: skip
    return record(one, choice([7], [[7]], [entry(7, 0.0, 1, (0, -9999.0, 2))], index=1))["response"]


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


OWN = b'"token_id":3,"logprob":-0.5,"rank":1'
ENTRY = b"{" + OWN + b',"top_logprobs":[{' + OWN + b"}]}"


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


numbers = st.one_of(
    st.integers(0, 200), st.sampled_from([0, 1.0, 1e2, -1, True, None, 2**40, 2**70, 0.5, "1"])
)
log_probs = st.one_of(
    st.floats(-20, 0),
    st.floats(width=32, max_value=0),
    st.sampled_from([0, -1, None, -9999.0, "x"]),
)
good = st.integers(0, 50_000)
entries = st.fixed_dictionaries({"token_id": good, "logprob": log_probs, "rank": good})


def tokens_of(width):
    lists = st.lists(entries, min_size=width, max_size=width)
    return st.builds(lambda own, top: own | {"top_logprobs": top}, entries, lists)


contents = st.integers(1, 4).flatmap(lambda width: st.lists(tokens_of(width), max_size=4))
masks = st.one_of(
    st.lists(st.lists(good, min_size=1, max_size=5), max_size=5),
    st.lists(st.lists(numbers, max_size=3), max_size=3),
    st.lists(st.one_of(st.none(), st.lists(good, max_size=3)), max_size=3),
)
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.text(max_size=6),
                st.sampled_from(["token_ids", "sampling_mask", "content", "logprobs", "offsets"]),
            ),
            inner, max_size=3,
        ),
    ),
    max_leaves=12,
)  # fmt: skip
choices = st.fixed_dictionaries(
    {
        "index": st.integers(0, 3),
        "token_ids": st.one_of(st.lists(good, max_size=6), st.lists(numbers, max_size=4)),
        "sampling_mask": masks,
        "logprobs": st.one_of(
            st.none(), st.fixed_dictionaries({"content": contents}), st.dictionaries(
                st.sampled_from(["content", "x"]), contents, max_size=2)
        ),
    },
    optional={"text": st.text(max_size=20), "x": junk, 'a"b\\': junk},
)  # fmt: skip
documents = st.fixed_dictionaries(
    {"prompt_token_ids": st.lists(good, max_size=5), "choices": st.lists(choices, max_size=3)},
    optional={"x": junk},
)


@st.composite
def texts(draw):
    """Return a document in some formatting: spaces, key order, escapes, number formats."""
    value = draw(documents)
    if draw(st.booleans()):
        value = shuffled(value, draw(st.randoms(use_true_random=False)))
    comma = draw(st.sampled_from([",", ", ", " ,", ",\n", ",  "]))
    colon = draw(st.sampled_from([":", ": ", " :", ":\t"]))
    text = json.dumps(
        value, separators=(comma, colon), indent=draw(st.sampled_from([None, None, None, 0, 2])),
        ensure_ascii=draw(st.booleans()),
    )  # fmt: skip
    return text.encode("utf-8", "surrogatepass")


def shuffled(value, rng):
    if isinstance(value, dict):
        items = [(key, shuffled(item, rng)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return [shuffled(item, rng) for item in value]
    return value


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
