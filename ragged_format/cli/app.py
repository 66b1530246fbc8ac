"""The command ``ragged`` itself: its commands, its exit codes, how it fails."""

from __future__ import annotations

import errno
import io
import re
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ragged_format import __version__
from ragged_format.cli import plugins
from ragged_format.cli.bench import bench
from ragged_format.cli.demo import demo
from ragged_format.cli.inspect import inspect
from ragged_format.cli.output import (
    as_ragged_error,
    fail,
    interrupted,
    remember_words,
    tell_wrong_usage,
)
from ragged_format.cli.sweep import sweep
from ragged_format.cli.validate import validate
from ragged_format.errors import MissingDependencyError, RaggedError
from ragged_format.schema import FORMAT_VERSION

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["app", "main"]

_EPILOG = """
Exit codes: 0 done; 1 the data is refused or found invalid, or a file cannot be read or written;
2 wrong usage; 130 interrupted.
""".replace("\n", " ").strip()


# Within a paragraph: typer keeps those of docstrings, which end elsewhere than on terminals.
_LINE_END = re.compile(r"(?<=[^\n])\n(?=[^\n\s*-])")
# A keyword argument with a word for its value, as library errors advise it.
_ARGUMENT = re.compile(r"\b(?P<name>[a-z_]+)=(?P<quote>['\"])(?P<value>\w+)(?P=quote)")


class _Commands(TyperGroup):
    """Built-in commands and those of the entry-point group; turns errors into exit codes."""

    @cached_property
    def _registered(self) -> tuple[dict[str, EntryPoint], list[str]]:
        return plugins.discover(self.commands)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *self._registered[0]]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = self._command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = _LINE_END.sub(" ", command.help)
        return command

    def _command(self, ctx: Any, cmd_name: str) -> Any:
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None or cmd_name not in self._registered[0]:
            return built_in
        entry = self._registered[0][cmd_name]
        try:
            return plugins.load(entry)
        except RaggedError as err:
            return _broken(entry.name, err)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        for sentence in self._registered[1]:
            typer.echo(f"warning: command left out: {sentence}", err=True)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        remember_words(ctx, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.TyperException as err:
            tell_wrong_usage(ctx, err)
            raise
        except RaggedError as err:
            err.remedy = self._in_options(ctx, err.remedy)
            raise fail(ctx, err) from err
        except OSError as err:
            if err.errno == errno.EPIPE:  # a reader such as `head` has enough: typer exits quietly
                raise
            raise fail(ctx, as_ragged_error(err)) from err
        except KeyboardInterrupt as err:
            raise interrupted(ctx, err) from err

    def _in_options(self, ctx: Any, remedy: str | None) -> str | None:
        """Return a remedy with Python arguments, as in ``mode='append'``, written as options."""
        command = self.get_command(ctx, ctx.invoked_subcommand) if ctx.invoked_subcommand else None
        names = {parameter.name for parameter in getattr(command, "params", ())}

        def option(found: re.Match[str]) -> str:
            name, value = found["name"], found["value"]
            if name in names:
                return f"--{name.replace('_', '-')} {value}"
            return f"--option {name}={value}" if "option" in names else found[0]

        return remedy and _ARGUMENT.sub(option, remedy)


def _broken(name: str, err: RaggedError) -> Any:
    """Return a command that stands for one that cannot be loaded and says so when it runs."""

    def run() -> None:
        raise err

    if isinstance(err, MissingDependencyError):
        text = f"(not available) {err.expected} is not installed: {err.remedy}"
    else:
        text = f"(broken) {err.what}: {err.got}"
    broken = typer.Typer(add_completion=False)
    broken.command(
        name,
        help=text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(run)
    return typer.main.get_command(broken)


app = typer.Typer(
    name="ragged",
    cls=_Commands,
    help="Convert, check, inspect and pack the ragged data of language-model rollouts.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"ragged-format {__version__}, format {'.'.join(map(str, FORMAT_VERSION))}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of the library and of the format.",
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
) -> None:
    """Take the options that precede a command."""


for _command in (validate, inspect, sweep, demo, bench):
    app.command()(_command)


def main() -> None:
    """Run ``ragged``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack some of our characters
    app(prog_name="ragged")
