"""Every argument of every adapter, given what it is not: a typed error with a remedy."""

import inspect

import pytest

import ragged_format as rf
from ragged_format.adapters import registry

READERS = {name: adapter.reads for name, adapter in registry.all_adapters().items()}
CONVERT = {name: reader.to_samples for name, reader in READERS.items() if reader is not None}


class Nothing:
    """An object that can do nothing."""

    def __repr__(self):
        return "nothing"


PAYLOADS = [None, 5, "x", b"x", {}, {"input_ids": [1]}, Nothing(), [5], [None], ["x"], [Nothing()]]
WRONG = {
    "vocab_size": ["a", 1.5, -1, 0, []],
    "columns": [5, "input_ids", [5], ["nope"]],
    "schema": ["x", 5, {}],
    "report": [5, "x", []],
    "logprobs_mode": [5, "nope", []],
    "on_error": [5, "nope", []],
    "on_missing_support": [5, "nope", []],
    "on_invalid_support": [5, "nope", []],
    "on_missing_log_prob": [5, "nope", []],
    "heads": ["a", -1, 1.5],
    "policy_version": ["a", 1.5],
    "targets": [5, "nope"],
    "teacher_temperature": ["a", -1],
}


def parameters(name):
    return inspect.signature(CONVERT[name]).parameters


def sized(name):
    return {"vocab_size": 100} if "vocab_size" in parameters(name) else {}


@pytest.mark.parametrize("name", CONVERT)
def test_payloads_that_are_none(name):
    for payloads in PAYLOADS:
        with pytest.raises(rf.RaggedError) as caught:
            CONVERT[name](payloads, **sized(name))
        assert caught.value.expected is not None, payloads


@pytest.mark.parametrize(
    ("name", "option"), [(n, o) for n in CONVERT for o in WRONG if o in parameters(n)]
)
def test_options_that_are_none(name, option):
    for value in WRONG[option]:
        with pytest.raises(rf.RaggedError) as caught:
            CONVERT[name]([], **sized(name) | {option: value})
        assert caught.value.expected is not None, value
