"""``spec/08-http.md`` and the pages about the server say what the code does."""

import re
from pathlib import Path

from support.http_server import client

from ragged_format.codes import CODES as FORMAT_CODES
from ragged_server.cli.serve import option_of
from ragged_server.http import tail
from ragged_server.http.auth import SCOPES
from ragged_server.http.codes import CODES
from ragged_server.http.ingest import JSON_FORMS
from ragged_server.http.problems import STATUSES
from ragged_server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "spec" / "08-http.md").read_text(encoding="utf-8")


def test_codes_are_those_of_the_code():
    rows = re.findall(r"^\| (RF-H\d+) \| (\d+) \| `(\w+)` \| (.*) \|$", SPEC, re.MULTILINE)
    assert [(c.code, str(c.status), c.error, c.rule) for c in CODES.values()] == rows


def test_codes_are_not_those_of_the_format():
    assert not set(CODES) & set(FORMAT_CODES)


def test_statuses_are_those_of_the_code():
    table = SPEC[SPEC.index("| status | situation |") : SPEC.index("429 and 503 carry")]
    cells = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    assert {int(status) for cell in cells for status in cell.split(",")} == set(STATUSES)


def test_paths_are_those_of_the_server(tmp_path):
    with client(tmp_path) as c:
        declared = set(c.get("/openapi.json").json()["paths"])
    stated = set(re.findall(r"^\| `(/[^`]*)` \| (?:GET|POST) ", SPEC, re.MULTILINE))
    stated = {path.replace("CODE", "{code}") for path in stated} - {"/openapi.json"}
    assert stated <= declared


def test_names_in_the_text_are_those_of_the_code():
    assert f"`{tail.CURSOR_KEY}`" in SPEC
    assert f"at most {tail._MAX_CURSOR} characters" in SPEC
    for name in (*tail._PARAMETERS, *JSON_FORMS, *SCOPES):
        assert f"`{name}`" in SPEC


def test_the_table_of_settings_is_that_of_the_code():
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(--[\w-]+)` \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    expected = [
        (name, option_of(name), shown(field), field.description.replace("|", "\\|"))
        for name, field in ServerSettings.model_fields.items()
        if name not in ServerSettings.NOT_OPTIONS
    ]
    assert rows == expected


def shown(field):
    """A default as the table has it; one that depends on the machine is in the text."""
    value = field.default
    if value in (None, "", ()) or "Default" in field.description:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1024 and value % 1024 == 0:
        return f"{value >> 20} Mi" if value >= 1 << 20 else f"{value >> 10} Ki"
    return f"{value:g}" if isinstance(value, float) else str(value)
