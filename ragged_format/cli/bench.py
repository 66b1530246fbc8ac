"""``ragged bench``: the benchmarks of the source tree, beside the peers that are installed."""

from __future__ import annotations

import json as json_text
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

import ragged_format as rf
from ragged_format.cli.output import Json, Output
from ragged_format.errors import MissingDependencyError, RaggedError

__all__ = ["bench"]


def bench(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Benchmarks, such as pack or compact; all of them if none is named, which takes "
            "many minutes.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small inputs, few rounds.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each comparison; more are steadier.")
    ] = None,
    json: Json = False,
) -> None:
    """Time and size this library beside its peers, on this machine.

    Needs a clone of the source, installed from there (make bench-setup), and a quiet machine.
    """
    out = Output(ctx, json=json)
    root = _source_tree()
    _check_names(root, names or [])
    words = [*(names or ()), *(["--quick"] if quick else [])]
    words += ["--rounds", str(rounds)] if rounds else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # A process of its own: it sets up threads and memory before numpy is imported.
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "benchmarks", *words, "--json", report],
            cwd=root, stdout=subprocess.DEVNULL if json else None, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RaggedError(
                "a benchmark failed", code="RF-D001", expected="exit status 0",
                got=done.returncode, remedy="install its peers with: make bench-setup",
            )  # fmt: skip
        out.result(json_text.loads(report.read_text()))


def _check_names(root: Path, names: list[str]) -> None:
    if not names:
        return
    code = "from benchmarks.__main__ import BENCHMARKS; print(*BENCHMARKS)"
    found = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    if unknown := [name for name in names if name not in found]:
        raise typer.BadParameter(
            f"no such benchmark: {', '.join(unknown)}. There are {', '.join(found)}.",
            param_hint="NAME",
        )


def _source_tree() -> Path:
    root = Path(rf.__file__).resolve().parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise MissingDependencyError(
            "the benchmarks are part of the source, not of the installed package",
            expected=f"a folder benchmarks in {root}", got="none",
            remedy="clone the repository, and run make bench-setup there",
        )  # fmt: skip
    return root
