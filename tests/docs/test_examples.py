"""Every script in examples/ runs in an empty directory and prints what its docstring says."""

import ast
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def lines(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    documented = ast.get_docstring(ast.parse(script.read_text())).partition("Prints:\n\n")[2]
    assert lines(documented) == lines(capsys.readouterr().out)
