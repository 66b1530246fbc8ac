"""What commands print: text for people, one JSON object for scripts, progress on a terminal."""

from __future__ import annotations

import errno
import math
from contextlib import contextmanager
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from ragged_format.errors import RaggedError, Where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

__all__ = [
    "Json",
    "Output",
    "as_ragged_error",
    "fail",
    "format_bytes",
    "format_count",
    "grid",
    "heading",
    "interrupted",
    "remember_words",
    "tell_wrong_usage",
    "wrong_usage",
]

_JSON = "ragged_format.json"
_DATA = "ragged_format.data_on_stdout"
_WORDS = "ragged_format.words"
_USAGE = "ragged_format.usage"
# A pipe has no width; wide enough that no table of ours wraps.
_PIPE_WIDTH = 120


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_JSON] = value
    return value


Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object instead of text.", is_eager=True, callback=_remember
    ),
]


class Output:
    """Where a command writes.

    Text goes to stdout. With ``--json`` the text is silent and stdout gets one JSON object. Where
    stdout carries data (``-`` as the output path) both go to stderr. Progress goes to stderr, and
    only if that is a terminal.

    Parameters
    ----------
    ctx : typer.Context
        Of the running command.
    json : bool
        The command's option of type :data:`Json`.
    data_on_stdout : bool
        The command writes its data to stdout.
    """

    def __init__(self, ctx: typer.Context, *, json: bool, data_on_stdout: bool = False) -> None:
        self.command = ctx.info_name
        self.json = json
        ctx.meta[_DATA] = data_on_stdout
        self._stderr = data_on_stdout
        self._console = _console(stderr=data_on_stdout)
        self._progress = _console(stderr=True)

    def text(self, *parts: RenderableType) -> None:
        """Print for people; silent with ``--json``."""
        if not self.json:
            for part in parts:
                _print(self._console, part)

    def result(self, data: Mapping[str, Any]) -> None:
        """Print the JSON object of the command if it is asked for."""
        if self.json:
            _print_json({"command": self.command, "ok": True, **data}, stderr=self._stderr)

    @contextmanager
    def progress(self, label: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
        """Show a progress bar; yields the function that advances it by a number of units."""
        bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
            *([TaskProgressColumn()] if total else [MofNCompleteColumn()]), TimeElapsedColumn(),
            console=self._progress, transient=True, disable=not self._progress.is_terminal,
        )  # fmt: skip
        with bar:
            task = bar.add_task(label, total=total)
            yield lambda units: bar.advance(task, units)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    return console


def _print(console: Console, part: RenderableType) -> None:
    if console.is_terminal:
        console.print(part, soft_wrap=isinstance(part, str | Text))
        return
    with console.capture() as captured:
        console.print(part, soft_wrap=isinstance(part, str | Text))
    # rich fills tables up with spaces.
    lines = [line.rstrip() for line in captured.get().splitlines()]
    typer.echo("\n".join(lines), err=console.stderr)


def _print_json(data: Mapping[str, Any], *, stderr: bool) -> None:
    try:
        text = dumps(data, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = dumps(_finite(data), ensure_ascii=False, allow_nan=False, default=str)
    typer.echo(text, err=stderr)


def _finite(value: Any) -> Any:
    """Return JSON values with NaN and infinities, which JSON lacks, as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_ADVICE = {
    errno.ENOSPC: "make room, and run the command again",
    errno.EDQUOT: "make room, and run the command again",
    errno.EFBIG: "raise the limit of file sizes, or write smaller files",
    errno.EROFS: "write to another place",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def as_ragged_error(err: OSError) -> RaggedError:
    """Return an error of the operating system in the form in which commands print errors."""
    if isinstance(err, RaggedError):
        return err
    name = None if err.filename is None else str(err.filename)
    wrapped = RaggedError(
        f"the operating system refused: {err.strerror or err}", code=type(err).__name__,
        where=Where(file=name), remedy=_ADVICE.get(err.errno or 0),
    )  # fmt: skip
    wrapped.__cause__ = err
    return wrapped


def fail(ctx: typer.Context, err: RaggedError) -> typer.Exit:
    """Print an error as text on stderr, and as JSON where that is asked for; returns the exit.

    Its code is 1, of errors inside :func:`wrong_usage` 2.
    """
    done = typer.Exit(2 if ctx.meta.get(_USAGE) else 1)
    name = type(err.__cause__ or err).__name__ if type(err) is RaggedError else type(err).__name__
    if ctx.meta.get(_JSON):
        data = {"command": ctx.invoked_subcommand, "ok": False, **err.to_dict(), "error": name}
        _print_json(data, stderr=bool(ctx.meta.get(_DATA)))
        if ctx.meta.get(_DATA):
            return done
    text = Text.assemble(("error:", "bold red"), f" {err}")
    _print(_console(stderr=True), text)
    return done


@contextmanager
def wrong_usage(ctx: typer.Context) -> Iterator[None]:
    """Have errors inside the block end the command as wrong options do, with exit code 2.

    For arguments and settings that the command checks itself, before it touches any data.
    """
    ctx.meta[_USAGE] = True
    yield
    ctx.meta[_USAGE] = False


def remember_words(ctx: typer.Context, words: Sequence[str]) -> None:
    """Keep the words of the command line for :func:`tell_wrong_usage`."""
    ctx.meta[_WORDS] = tuple(words)


def tell_wrong_usage(ctx: typer.Context, err: typer.TyperException) -> None:
    """Print wrong usage as JSON where that is asked for; its text and exit code 2 are typer's."""
    words = ctx.meta.get(_WORDS, ())
    # What is wrong may keep the option from being read.
    options = words[: words.index("--")] if "--" in words else words
    if not (ctx.meta.get(_JSON) or "--json" in options):
        return
    command = ctx.invoked_subcommand
    message = err.format_message() if hasattr(err, "format_message") else str(err)
    remedy = f"see ragged {command} --help" if command else "see ragged --help"
    _print_failure(ctx, "UsageError", message, remedy)


def interrupted(ctx: typer.Context, err: KeyboardInterrupt) -> typer.Exit:
    """Say on stderr, and as JSON where that is asked for, that Ctrl-C came; returns exit 130.

    The notes of the exception say what was kept and how to go on.
    """
    notes = "; ".join(getattr(err, "__notes__", ()))
    if ctx.meta.get(_JSON):
        _print_failure(ctx, "KeyboardInterrupt", "interrupted", notes or None)
    text = Text.assemble(("interrupted", "bold yellow"), f": {notes}" if notes else "")
    _print(_console(stderr=True), text)
    return typer.Exit(130)


def _print_failure(ctx: typer.Context, error: str, what: str, remedy: str | None) -> None:
    """Print what is no error of this library as JSON, with the keys that those have."""
    data: dict[str, Any] = {
        "command": ctx.invoked_subcommand, "ok": False, "error": error, "code": None, "what": what,
        "where": {}, "expected": None, "got": None, "remedy": remedy,
    }  # fmt: skip
    _print_json(data, stderr=bool(ctx.meta.get(_DATA)))


def heading(text: str) -> Text:
    """Return a section heading."""
    return Text(text, style="bold")


def grid(rows: Sequence[tuple[str, RenderableType]], *, indent: int = 2) -> Table:
    """Return label-value lines, aligned."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(" " * indent + label, value)
    return table


def format_count(number: float) -> str:
    """Return a number with thousands separators.

    Examples
    --------
    >>> format_count(49152), format_count(3.14159)
    ('49,152', '3.14')
    """
    return f"{number:,}" if isinstance(number, int) else f"{number:,.2f}"


def format_bytes(number: float) -> str:
    """Return a number of bytes in decimal units.

    Examples
    --------
    >>> format_bytes(512), format_bytes(1_536_000), format_bytes(2_000)
    ('512 B', '1.54 MB', '2.00 kB')
    """
    if number < 1000:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.2f} {unit}"
    return f"{number / 1000:,.2f} TB"
