"""Errors carry their facts through text, JSON, processes and copies."""

import copy
import inspect
import json
import pickle

import pytest

import ragged_format as rf
from ragged_format import errors

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, rf.RaggedError)
]
WHERE = rf.Where(file="a.arrow", batch=1, row=2, column="candidate_ids", position=3)


def make(cls):
    return cls("it is so", code="RF-X001", where=WHERE, expected=[1], got={"a": 2}, remedy="do so")


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_copies_are_whole(cls, duplicate):
    error = make(cls)
    again = duplicate(error)
    assert type(again) is cls
    assert str(again) == str(error)
    assert again.to_dict() == error.to_dict()
    assert (again.where, again.expected, again.got) == (WHERE, [1], {"a": 2})
    assert again.args == ("it is so",)


@pytest.mark.parametrize("cls", CLASSES)
def test_text_of_errors(cls):
    assert str(make(cls)) == (
        "[RF-X001] it is so\n"
        "  where:    file 'a.arrow', batch 1, row 2, column 'candidate_ids', position 3\n"
        "  expected: [1]\n"
        "  got:      {'a': 2}\n"
        "  remedy:   do so"
    )
    assert str(cls("bare")) == f"[{cls.code}] bare"


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (rf.SchemaMismatchError, ValueError), (rf.NotRaggedError, ValueError),
        (rf.InvariantError, ValueError), (rf.CorruptError, OSError), (rf.TruncatedError, OSError),
        (rf.MissingShardError, FileNotFoundError), (rf.DatasetExistsError, FileExistsError),
        (rf.DatasetNotFoundError, FileNotFoundError), (rf.MissingDependencyError, ImportError),
        (rf.UnsupportedFeatureError, ValueError), (rf.LimitExceededError, ValueError),
        (rf.UnknownColumnError, KeyError), (rf.UnknownColumnError, ValueError),
        (rf.OutOfRangeError, IndexError),
    ],
)  # fmt: skip
def test_errors_are_also_builtin_ones(cls, builtin):
    with pytest.raises(builtin):
        raise make(cls)


def test_classes_have_codes_of_their_own():
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(code.startswith("RF-") for code in codes)
    assert all(cls.__name__ in errors.__all__ for cls in CLASSES)
    assert all(hasattr(rf, name) for name in errors.__all__)


def test_to_dict_is_json():
    assert json.loads(json.dumps(make(rf.InvariantError).to_dict())) == {
        "error": "InvariantError",
        "code": "RF-X001",
        "what": "it is so",
        "where": {
            "file": "a.arrow", "batch": 1, "row": 2, "column": "candidate_ids", "position": 3,
        },
        "expected": "[1]",
        "got": "{'a': 2}",
        "remedy": "do so",
    }  # fmt: skip
    bare = rf.RaggedError("bare").to_dict()
    assert (bare["where"], bare["expected"], bare["got"], bare["remedy"]) == ({}, None, None, None)


def test_zero_is_a_place_and_a_value():
    error = rf.InvariantError("x", where=rf.Where(row=0, position=0), expected=0, got=0)
    assert "row 0, position 0" in str(error)
    assert "got:      0" in str(error)
    assert error.to_dict()["where"] == {"row": 0, "position": 0}
    assert error.to_dict()["got"] == "0"


def test_callers_add_what_they_know():
    error = rf.InvariantError("x", where=rf.Where(row=2, batch=7))
    assert error.at(rf.Where(file="f", batch=1, column="c")) is error
    assert error.where == rf.Where(file="f", batch=7, row=2, column="c")


def test_places_in_words():
    assert str(rf.Where()) == "unknown place"
    assert str(rf.Where(row=0)) == "row 0"
    assert str(rf.Where(file="x y", position=3)) == "file 'x y', position 3"
    assert rf.Where(row=1).inside(rf.Where()) == rf.Where(row=1)
    with pytest.raises(AttributeError):
        rf.Where().row = 3
