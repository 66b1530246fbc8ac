"""`ragged` as a program: help, versions, exit codes, pipes, terminals."""

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ragged_format as rf
from ragged_format.cli import output
from ragged_format.cli.output import as_ragged_error, format_bytes

RAGGED = Path(sys.executable).parent / "ragged"


def ragged(*words, **options):
    return subprocess.run(
        [RAGGED, *map(str, words)], capture_output=True, timeout=60, **options
    )  # fmt: skip


def test_help_lists_the_commands_and_exit_codes(invoke):
    done = invoke("--help")
    assert done.exit_code == 0
    for word in ("convert", "validate", "inspect", "pack", "demo", "bench", "Exit codes"):
        assert word in done.output
    assert invoke("-h").output == done.output


def test_no_command_shows_help(invoke):
    assert "Commands" in invoke().output


@pytest.mark.parametrize("command", ["convert", "validate", "inspect", "pack", "demo", "bench"])
def test_every_command_explains_itself(invoke, command):
    done = invoke(command, "--help")
    assert done.exit_code == 0
    assert "--json" in done.output


def test_version(invoke):
    version = ".".join(map(str, rf.schema.FORMAT_VERSION))
    assert invoke("--version").output == f"ragged-format {rf.__version__}, format {version}\n"


@pytest.mark.parametrize("words", [("unpack",), ("validate",), ("--what",), ("inspect", "a", "b")])
def test_wrong_usage_exits_with_2(invoke, words):
    done = invoke(*words)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Usage: " in done.stderr


def test_heavy_packages_are_not_imported_before_they_are_needed(dataset):
    code = (
        "import sys; sys.argv[1:] = ['validate', sys.argv[1]]\n"
        "from ragged_format.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'polars', 'datasets', 'simdjson'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, dataset], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_processes_in_a_pipe(dataset):
    data = ragged("pack", dataset, "-", "--token-budget", "90").stdout
    done = ragged("validate", "-", "--json", input=data)
    assert done.returncode == 0
    assert json.loads(done.stdout)["profile"] == "packed"


def test_errors_have_no_traceback_and_no_color_in_a_pipe(tmp_path):
    done = ragged("validate", tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stdout == b""
    text = done.stderr.decode()
    assert text.startswith("error: [RF-C008] ")
    assert "remedy" in text or "expected" in text
    assert "\x1b" not in text
    assert "Traceback" not in text


def test_text_in_a_pipe_has_no_color_and_no_spaces_at_line_ends(dataset):
    text = ragged("inspect", dataset, "--head", "1").stdout.decode()
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def in_terminal(*words, **environment):
    """Run `ragged` in a pseudo-terminal and return what it showed."""
    main, sub = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **environment}
    env = {name: value for name, value in env.items() if value is not None}
    with subprocess.Popen(
        [RAGGED, *map(str, words)], stdin=sub, stdout=sub, stderr=sub, env=env, close_fds=True
    ) as process:
        os.close(sub)
        shown = b""
        while True:
            try:
                part = os.read(main, 1 << 16)
            except OSError:  # Linux: the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(main)
    return process.returncode, shown.decode()


def test_a_terminal_has_color_and_progress(dataset):
    code, shown = in_terminal("validate", dataset, NO_COLOR=None)
    assert code == 0
    assert "\x1b[1;32mvalid" in shown
    assert "validating" in shown


def test_no_color_is_heeded(dataset):
    code, shown = in_terminal("validate", dataset, NO_COLOR="1")
    assert code == 0
    assert "valid" in shown
    assert "32m" not in shown


def test_a_reader_that_has_enough_ends_the_program_quietly(dataset):
    done = subprocess.run(
        ["bash", "-c", f"{RAGGED} inspect {dataset} --head 24 | head -c 10"],
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == b""


def test_an_interrupt_exits_with_130(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(
        [RAGGED, "validate", fifo], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        with fifo.open("wb"):  # waits until the program reads
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 130


def test_errors_of_the_system_name_the_file():
    err = as_ragged_error(PermissionError(13, "Permission denied", "/root/x"))
    assert (err.code, err.where.file) == ("PermissionError", "/root/x")
    assert "Permission denied" in str(err)
    assert as_ragged_error(OSError("odd")).what.endswith("odd")
    own = rf.TruncatedError("cut")
    assert as_ragged_error(own) is own


def test_a_full_disk_is_an_error_like_others(dataset):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [RAGGED, "pack", str(dataset), "-"], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_numbers_that_json_lacks_are_text(capsys):
    output._print_json({"a": [float("nan"), {"b": float("-inf")}], "c": b"x"}, stderr=False)
    assert json.loads(capsys.readouterr().out) == {"a": ["nan", {"b": "-inf"}], "c": "b'x'"}


def test_bytes_in_words():
    assert [format_bytes(10.0**n) for n in (0, 3, 6, 9, 12, 15)] == [
        "1 B", "1.00 kB", "1.00 MB", "1.00 GB", "1.00 TB", "1,000.00 TB",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["sweep", "push", "tail", "report"])
def test_paragraphs_of_help_wrap_where_the_terminal_does(command):
    """Line ends of docstrings are none there."""
    done = ragged(command, "--help", env={**os.environ, "COLUMNS": "60"})
    text = "\n".join(line.strip() for line in done.stdout.decode().splitlines())
    above = text.partition("\n\u256d")[0].strip()
    paragraphs = [part.split("\n") for part in above.split("\n\n")]
    assert len(paragraphs) == 3
    for lines in paragraphs:
        assert lines == textwrap.wrap(" ".join(lines), 58, break_on_hyphens=False)
