"""Both fast readers of JSON text, and texts for them, beside ``json.loads``."""

import json

import numpy as np
from hypothesis import strategies as st
from support.vllm_rollouts import choice, entry, record

from ragged_format.adapters import _json, _scan
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


OWN = b'"token_id":3,"logprob":-0.5,"rank":1'
ENTRY = b"{" + OWN + b',"top_logprobs":[{' + OWN + b"}]}"
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
