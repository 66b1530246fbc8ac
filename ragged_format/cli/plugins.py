"""Commands that other packages add to ``ragged``.

A package registers an entry point in the group ``ragged_format.commands``. Its name is the name of
the command; its object is a function, whose signature typer turns into arguments and options, or a
``typer.Typer`` with sub-commands::

    [project.entry-points."ragged_format.commands"]
    serve = "ragged_server.cli:serve"

The object's module is imported when its command runs and when ``ragged --help`` lists it, so heavy
imports belong inside the function. A module that fails to import breaks its own command only: the
listing says so, and every other command works.
"""

from __future__ import annotations

import inspect
import re
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import typer

from ragged_format.errors import MissingDependencyError, RaggedError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["GROUP", "discover", "load"]

GROUP = "ragged_format.commands"

# Of a requirement such as `httpx2>=2.16,<3; extra == "server"`.
_NAME = re.compile(r"[\w.-]+")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")


def discover(taken: Collection[str] = ()) -> tuple[dict[str, EntryPoint], list[str]]:
    """Return the registered commands by name, and a sentence for each one left out.

    Imports nothing. A name in `taken` belongs to a built-in command; of two packages that register
    one name, the first in the order of their entry points' values is used.
    """
    found: dict[str, EntryPoint] = {}
    left_out = []
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        if entry.name in taken:
            left_out.append(f"{entry.name!r} of {entry.value} is the name of a built-in command")
        elif entry.name not in found:
            found[entry.name] = entry
        elif found[entry.name].value != entry.value:
            left_out.append(
                f"{entry.name!r} of {entry.value} is registered by {found[entry.name].value}"
            )
    return found, left_out


def load(entry: EntryPoint) -> Any:
    """Import a registered command and return it as a typer command.

    Raises
    ------
    MissingDependencyError
        A module that it needs is not installed (``RF-D001``).
    RaggedError
        It fails to import in another way, or is neither a function nor a ``typer.Typer``.
    """
    try:
        target = entry.load()
    except ModuleNotFoundError as err:
        raise MissingDependencyError(
            f"the command {entry.name!r} needs a module that is not installed",
            expected=f"module {err.name!r}", got=f"{entry.value} fails to import",
            remedy=_how_to_install(entry, err.name or ""),
        ) from err  # fmt: skip
    except Exception as err:
        raise _broken(entry, f"{type(err).__name__}: {err}") from err
    if isinstance(target, typer.Typer):
        command: Any = typer.main.get_command(target)
    elif inspect.isfunction(target):
        app = typer.Typer(add_completion=False)
        app.command(entry.name)(target)
        command = typer.main.get_command(app)
    else:
        raise _broken(entry, f"a {type(target).__name__}, not a function or a typer.Typer")
    command.name = entry.name
    return command


def _how_to_install(entry: EntryPoint, module: str) -> str:
    """Return how the missing module is installed: by the smallest extra that requires it."""
    if entry.dist is None:
        return f"install {module}"
    wanted = module.partition(".")[0].replace("_", "-").lower()
    extras: dict[str, set[str]] = {}
    for requirement in entry.dist.requires or ():
        name, extra = _NAME.match(requirement), _EXTRA.search(requirement)
        if name and extra:
            extras.setdefault(extra[1], set()).add(name[0].replace("_", "-").lower())
    having = [extra for extra, names in extras.items() if wanted in names]
    if not having:
        return f"install {module}, which {entry.dist.name} needs here"
    smallest = min(having, key=lambda extra: len(extras[extra]))
    return f"pip install '{entry.dist.name}[{smallest}]'"


def _broken(entry: EntryPoint, got: str) -> RaggedError:
    package = entry.dist.name if entry.dist is not None else entry.module
    return RaggedError(
        f"the command {entry.name!r} of package {package!r} cannot be loaded",
        expected=f"{entry.value} in the group {GROUP}", got=got,
        remedy=f"reinstall or remove {package!r}; all other commands work",
    )  # fmt: skip
