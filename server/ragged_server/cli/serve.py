"""``ragged serve``: every setting is an option."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from ragged_format.cli.output import Json, Output, wrong_usage
from ragged_format.local_files import local_path
from ragged_server.settings import ServerSettings, as_toml, load_settings

__all__ = ["option_of", "serve"]

# Options whose name is not that of the setting.
_NAMES = {"schema_file": "--schema"}


def option_of(setting: str) -> str:
    """Return the option of a setting: its name without the unit.

    Examples
    --------
    >>> option_of("max_request_bytes"), option_of("grace_s"), option_of("schema_file")
    ('--max-request-bytes', '--grace', '--schema')
    """
    return _NAMES.get(setting) or "--" + setting.removesuffix("_s").replace("_", "-")


def _serve(
    ctx: typer.Context,
    directory: str,
    config: Path | None,
    *,
    print_config: bool,
    json: bool,
    **options: Any,
) -> None:
    """Take samples in over HTTP, store them durably, and let trainers read them.

    Every option is a setting, which the environment (RAGGED_MAX_REQUEST_BYTES) and the settings
    file (max_request_bytes) can give as well; the command line goes before both. Sizes may have a
    unit (64MiB), durations too (90s, 15m, 7d). Without API keys only this machine is served.
    """
    with wrong_usage(ctx):
        folder = local_path(directory)
        settings = load_settings(folder, config, **options)
    out = Output(ctx, json=json)
    if print_config:
        out.text(as_toml(settings).rstrip())
        out.result({"settings": settings.model_dump(mode="json", exclude={"keys"})})
        return
    from ragged_server.logs import configure
    from ragged_server.process.opening import opener

    configure(settings)

    def listening(url: str) -> None:
        out.text(f"serving {settings.dataset} at {url}")
        out.result({"url": url, "dataset": settings.dataset, "directory": str(folder)})

    if settings.workers > 1:
        from ragged_server.process.workers import serve_with_workers as run
    else:
        from ragged_server.process.serve import serve as run
    run(settings, opener(settings), on_listen=listening)


def _parameters() -> list[inspect.Parameter]:
    """Return the parameters of the command: the directory, the file, one option per setting."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    file = typer.Option("--config", metavar="FILE", help="TOML file with settings.")
    shown = typer.Option("--print-config", help="Print the settings that hold, and exit.")
    where = typer.Argument(metavar="DIR", help=_help("directory"))
    out = [
        inspect.Parameter("ctx", keyword, annotation=typer.Context),
        inspect.Parameter("directory", keyword, annotation=Annotated[str, where]),
        inspect.Parameter("config", keyword, default=None, annotation=Annotated[Path | None, file]),
        inspect.Parameter(
            "print_config", keyword, default=False, annotation=Annotated[bool, shown]
        ),
        inspect.Parameter("json", keyword, default=False, annotation=Json),
    ]
    for name in ServerSettings.model_fields:
        if name not in ServerSettings.NOT_OPTIONS:
            option = typer.Option(option_of(name), metavar="VALUE", help=_help(name))
            kind = Annotated[str | None, option]
            out.append(inspect.Parameter(name, keyword, default=None, annotation=kind))
    return out


def _help(name: str) -> str:
    field = ServerSettings.model_fields[name]
    text = field.description or ""
    value = field.default
    is_shown = "Default" not in text and value not in (None, "", ()) and not field.is_required()
    if isinstance(value, bool):
        value = str(value).lower()  # as it is written
    return f"{text} [{value}]" if is_shown else text


def serve(**arguments: Any) -> None:
    """Run the command; typer reads its parameters from the signature made below."""
    _serve(**arguments)


serve.__doc__ = _serve.__doc__
serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
serve.__annotations__ = {p.name: p.annotation for p in _parameters()}
