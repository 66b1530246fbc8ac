"""Options that are sizes take a number of bytes or a unit, on every command."""

import pytest
import typer.main
from typer.testing import CliRunner

from ragged_format.cli import app, options

COMMANDS = [
    "advantages", "compact", "convert", "dedupe", "expand", "filter", "merge", "pack", "push",
    "reshard", "shuffle", "split", "tail",
]  # fmt: skip


def sizes_of(name):
    command = typer.main.get_command(app).get_command(None, name)
    return [p for p in command.params if p.name.endswith(("bytes", "memory"))]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_size_takes_units(name):
    found = sizes_of(name)
    assert found
    for option in found:
        assert option.metavar == "SIZE"
        assert option.type_descriptor.parameter_info.parser is options.size
        assert option.default is None or isinstance(option.default, int)


def test_no_command_with_a_size_is_left_out():
    group = typer.main.get_command(app)
    assert [name for name in sorted(group.list_commands(None)) if sizes_of(name)] == [
        *sorted([*COMMANDS, "serve"])
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("65536", 65536), ("64MiB", 64 << 20), ("64 mib", 64 << 20), ("1.5GB", 1_500_000_000),
        ("2k", 2000), ("2Ki", 2048), ("3B", 3), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes(text, number):
    assert options.size(text) == number


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5", "2XB", ""])
def test_what_is_no_size_is_wrong_usage(text, tmp_path):
    for words in (
        ["merge", "in", str(tmp_path / "out"), f"--memory={text}"],
        ["merge", "in", str(tmp_path / "out"), f"--shard-bytes={text}"],
        ["push", "http://127.0.0.1:1", "in", f"--max-bytes={text}"],
        ["tail", "http://127.0.0.1:1", f"--max-bytes={text}"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert "64MiB" in done.stderr


def test_the_help_shows_defaults_as_they_are_written():
    wide = CliRunner(env={"COLUMNS": "200"})
    assert "[default: 2GiB]" in wide.invoke(app, ["merge", "--help"]).stdout
    assert "[default: 16MiB]" in wide.invoke(app, ["push", "--help"]).stdout
