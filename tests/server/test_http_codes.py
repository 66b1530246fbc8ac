import inspect

from ragged_format.errors import RaggedError
from ragged_server.http import errors as http_errors
from ragged_server.http.codes import CODES
from ragged_server.store import errors


def classes():
    found = {**vars(errors), **vars(http_errors)}
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value)
        and value.__module__.startswith("ragged_server")
        and name[0] != "_"
    }


def test_every_code_is_that_of_its_class():
    known = classes()
    assert {entry.error for entry in CODES.values()} == set(known) - {"HttpError"}
    for entry in CODES.values():
        assert known[entry.error].code == entry.code


def test_every_error_is_of_this_format():
    assert all(issubclass(cls, RaggedError) for cls in classes().values())
