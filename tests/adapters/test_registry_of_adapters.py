"""The registry: what takes part, what it says, whose form a payload has."""

import inspect
import json

import pytest
from support.vllm_rollouts import as_bytes, recorded

from ragged_format.adapters import registry
from ragged_format.errors import ConversionError, Where

ADAPTERS = registry.all_adapters()
READERS = {name: a.reads for name, a in ADAPTERS.items() if a.reads is not None}
# Of the options, those that may be given without their name too; elsewhere vocab_size.
POSITIONAL = {"vllm": ["vocab_size", "on_missing_support"]}
WRITERS = {name: a.writes for name, a in ADAPTERS.items() if a.writes is not None}


def test_adapters_are_named_by_their_modules():
    assert {"vllm", "vllm_openai", "sglang", "fastdeploy"} <= set(ADAPTERS)
    assert list(ADAPTERS) == sorted(ADAPTERS)
    assert not {"report", "registry", "positions"} & set(ADAPTERS)
    for name, adapter in ADAPTERS.items():
        assert adapter.name == name
        assert adapter.reads or adapter.writes
        assert adapter.title


@pytest.mark.parametrize("name", READERS)
def test_readers_have_the_common_interface(name):
    reader = READERS[name]
    parameters = inspect.signature(reader.to_samples).parameters
    assert "report" in parameters
    assert ("vocab_size" in parameters) or not reader.needs_vocab_size
    payloads, *options = parameters.values()
    assert payloads.kind is payloads.POSITIONAL_OR_KEYWORD
    positional = [option.name for option in options if option.kind is not option.KEYWORD_ONLY]
    assert positional == POSITIONAL.get(name, ["vocab_size"] if "vocab_size" in parameters else [])
    assert set(registry.option_names(reader.to_samples)) == {o.name for o in options} - {"report"}
    assert reader.window > 0
    if reader.payloads is None:
        assert reader.suffixes == registry.JSON_SUFFIXES


@pytest.mark.parametrize("name", WRITERS)
def test_writers_have_the_common_interface(name):
    first, second, *options = inspect.signature(WRITERS[name].write).parameters.values()
    assert (first.name, second.name) == ("batches", "path")
    assert all(option.kind is option.KEYWORD_ONLY for option in options)
    assert WRITERS[name].profile in ("sample", "packed", "any")
    assert WRITERS[name].makes


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "payload",
    [None, 5, "text", b"\x00", [], [1], {}, {"response": None}, {"response": b"{"},
     {"choices": None}, {"choices": []}, {"response": {"choices": [None]}},
     {"response": {"object": 5, "choices": [{"message": 5, "delta": []}]}}],
    ids=repr,
)  # fmt: skip
def test_recognizers_take_anything(name, payload):
    if READERS[name].recognizes is not None:
        assert READERS[name].recognizes(payload) in (True, False)


@pytest.mark.parametrize("form", [lambda record: record, as_bytes])
def test_recorded_answers_are_recognized(form):
    seen = set()
    for record in recorded():
        found = registry.recognize(form(record))
        is_text = isinstance(record["response"], str)
        if record["http_status"] != 200 or record["path"].endswith("render"):
            assert found == []
        else:
            is_generate = record["path"] == "/inference/v1/generate"
            assert found == ["vllm" if is_generate else "vllm_openai"], record["name"]
        seen.add((record["path"], is_text))
    assert len(seen) > 3


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConversionError) as found:
        registry.choose_reader("vlm")
    assert found.value.code == "RF-A001"
    assert "vllm" in found.value.expected
    with pytest.raises(ConversionError) as found:
        registry.choose_writer("vllm")
    assert found.value.remedy == "it can only be read"


def test_what_an_unknown_payload_is_made_of():
    error = registry.unrecognized({"a": 1, "b": {"c": 2}}, Where(row=3))
    assert error.code == "RF-A001"
    assert error.got == "an object of a, b {c}"
    assert error.where.row == 3
    assert registry.unrecognized([1], Where()).got == "list"


def test_a_payload_of_another_form_is_named():
    [record] = recorded("openai_endpoints", names={"chat_n4"})
    error = registry.unrecognized(record, Where(), expected="vllm")
    assert error.got == "vllm_openai"
    assert "--from vllm_openai" in error.remedy


def test_a_stream_is_recognized_by_its_first_event():
    [record] = recorded("openai_endpoints", names={"chat_stream"})
    assert registry.recognize(record) == ["vllm_openai"]
    assert registry.recognize({"response": json.dumps({"no": "stream"})}) == []
