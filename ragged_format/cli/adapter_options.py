"""Options of adapters on the command line, and the list of adapters."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from typer.core import TyperCommand

from ragged_format.cli.output import Output
from ragged_format.record_files import JSON_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ragged_format.adapters.registry import Adapter

__all__ = ["AdapterOptions", "ListingCommand", "chosen_options", "list_adapters"]

AdapterOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Another option of the adapter, its value JSON or a word; repeat for more.",
    ),
]


def chosen_options(
    ctx: typer.Context,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    extra: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the arguments for an adapter's function.

    Parameters
    ----------
    ctx : typer.Context
        Tells which options were written on the command line.
    function : callable
        ``to_samples`` or ``write``.
    given : mapping
        Values of the command's own options by argument name; ``None``, and defaults that the
        function does not take, are left out.
    extra : sequence of str, optional
        ``KEY=VALUE`` each.

    Raises
    ------
    typer.BadParameter
        The function does not take an option that was asked for.
    """
    from ragged_format.adapters.registry import option_names, required_options

    takes = option_names(function)
    out: dict[str, Any] = {}
    for name, value in given.items():
        source = ctx.get_parameter_source(name)
        if name in takes:
            if value is not None:
                out[name] = value
        elif source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(_not_taken(takes), param_hint=f"'--{name.replace('_', '-')}'")
    for text in extra or ():
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in takes:
            why = _not_taken(takes) if equals else "expected KEY=VALUE"
            raise typer.BadParameter(f"{text!r}: {why}", param_hint="'--option'")
        try:
            out[name] = json_module.loads(value)
        except ValueError:
            out[name] = value
    if lacking := [name for name in required_options(function) if name not in out]:
        raise typer.BadParameter(
            f"this adapter needs {', '.join(f'{name}=…' for name in lacking)}.",
            param_hint="'--option'",
        )
    return out


def _not_taken(takes: Sequence[str]) -> str:
    return f"this adapter does not take it. It takes: {', '.join(takes) or 'no options'}."


class ListingCommand(TyperCommand):
    """A command with ``--list``, which does not need the other arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``--json`` first: ``--list`` prints and exits when its turn comes."""
        if "--list" in args:
            args = sorted(args, key=lambda word: word != "--json")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def list_adapters(direction: Literal["reads", "writes"]) -> Callable[[typer.Context, bool], None]:
    """Return the callback of ``--list``, which prints the adapters of one direction and exits."""

    def show(ctx: typer.Context, asked: bool) -> None:
        if not asked:
            return
        from ragged_format.adapters.registry import all_adapters

        json = bool(ctx.meta.get("ragged_format.json"))
        out = Output(ctx, json=json)
        having = [a for a in all_adapters().values() if getattr(a, direction) is not None]
        rows = [_row(adapter, direction) for adapter in having]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        shown = [key for key in (rows[0] if rows else {"name": ""}) if key != "options"]
        for heading in shown:
            table.add_column(heading)
        for row in rows:
            table.add_row(*(row[key] for key in shown))
        out.text(table, "Options of each: --list --json")
        out.result({"adapters": rows})
        raise typer.Exit

    return show


def _row(adapter: Adapter, direction: str) -> dict[str, Any]:
    from ragged_format.adapters.registry import option_names

    row: dict[str, Any] = {"name": adapter.name, "title": adapter.title}
    if direction == "reads" and adapter.reads is not None:
        files = "JSON" if adapter.reads.suffixes == JSON_SUFFIXES else adapter.reads.suffixes
        row["files"] = files if isinstance(files, str) else " ".join(files) or "a directory"
        row["options"] = option_names(adapter.reads.to_samples)
    elif adapter.writes is not None:
        row["takes"] = f"{adapter.writes.profile} records".replace("any ", "")
        row["makes"] = adapter.writes.makes
        row["options"] = option_names(adapter.writes.write)
    return row
