"""Every script in examples/ runs in an empty directory and prints what its docstring says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(script, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    documented = ast.get_docstring(ast.parse(script.read_text())).partition("Prints:\n\n")[2]
    expected = [line.strip() for line in documented.splitlines() if line.strip()]
    assert expected == [line.strip() for line in done.stdout.splitlines() if line.strip()]
