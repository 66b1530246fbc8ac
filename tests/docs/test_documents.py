"""Every code block and command of README and docs runs as written.

The blocks of one page run in order in one empty directory: ```python in one namespace, ```console
line by line (the lines after a command are its expected output, `...` stands for
anything). Commands that install or clone are checked against pyproject and Makefile instead.
"""

import doctest
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragged_format.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md")),
]  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "text", "toml", "json"}
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:ragged_format|spec|docs|tests|benchmarks|examples)/[\w./-]*)`")
NOT_RUN = re.compile(r"^(git clone|cd|pip install|python3? -m venv|make) ?")


def blocks(page):
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text())]


def commands(text):
    """Split a console block into (command, expected output)."""
    out = []
    for line in text.splitlines():
        if line.startswith("$ "):
            out.append((line[2:], []))
        elif out and out[-1][0].endswith("\\"):
            out[-1] = (out[-1][0] + "\n" + line, [])
        else:
            out[-1][1].append(line)
    return [(command.split("  #")[0].rstrip(), "\n".join(want)) for command, want in out]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_has_known_languages_and_live_links(page):
    assert {language for language, _ in blocks(page)} <= LANGUAGES
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name(page)} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert anchor in slugs, f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page):
    for path in PATH.findall(page.read_text()):
        assert (ROOT / path).exists(), f"{name(page)} names {path}"


RUN = [page for page in PAGES if {"python", "console"} & {language for language, _ in blocks(page)}]


@pytest.mark.parametrize("page", RUN, ids=name)
def test_page_runs_as_written(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for language, text in blocks(page):
        if language == "python":
            run_python(text, page, namespace, capsys)
        elif language == "console":
            for command, want in commands(text):
                run_command(command, want)


def run_python(text, page, namespace, capsys):
    """Run a block; `#` comments that follow `print(...)` are its expected output."""
    capsys.readouterr()
    exec(compile(text, str(page), "exec"), namespace)
    want = re.findall(r"^\s*print\(.*\)  # (.*)$", text, re.MULTILINE)
    if want:
        same("\n".join(want), capsys.readouterr().out)


def run_command(command, want):
    if match := NOT_RUN.match(command):
        check_command(match[1], command)
        return
    if command.startswith("ragged ") and not re.search(r"[|<>&;$\\]", command):
        done = CliRunner().invoke(app, shlex.split(command)[1:])  # a process takes longer to start
        status, shown = done.exit_code, done.stdout
        errors = done.stderr or repr(done.exception)
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True,
            env={**os.environ, "PATH": path}, timeout=60,
        )  # fmt: skip
        status, shown, errors = done.returncode, done.stdout, done.stderr
    assert status == 0, f"$ {command}\n{shown}{errors}"
    if want:
        same(want, shown)


def check_command(program, command):
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in shlex.split(command)[1:]:
            assert "=" in word or re.search(rf"^{word}:", makefile, re.MULTILINE), command
    if program == "pip install":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        for listed in re.findall(r"\[([\w,]+)\]", command):
            assert set(listed.split(",")) <= set(extras), command


def same(want, got):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    want, got = want.strip() + "\n", got.strip() + "\n"
    assert doctest.OutputChecker().check_output(want, got, flags), f"expected:\n{want}\ngot:\n{got}"
