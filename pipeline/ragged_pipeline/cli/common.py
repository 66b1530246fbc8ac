"""What the commands of jobs share: options, progress, lines of a result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ragged_format.cli.options import size_option
from ragged_format.cli.output import format_bytes, format_count
from ragged_format.record_files import STDIN
from ragged_pipeline import progress as job_progress
from ragged_pipeline.defaults import MEMORY, TASK_BYTES

if TYPE_CHECKING:
    from ragged_pipeline.runner import Result

__all__ = [
    "Engine",
    "Force",
    "Input",
    "Memory",
    "Mode",
    "OnDuplicate",
    "ShardBytes",
    "Target",
    "Workers",
    "WriteMode",
    "result_json",
    "result_lines",
    "shown_progress",
    "stdout_stream",
]

Mode = Literal["error", "append", "overwrite"]

Target = Annotated[str, typer.Argument(metavar="OUT", show_default=False, help="Dataset to write.")]
Input = Annotated[
    str,
    typer.Argument(
        metavar="IN", show_default=False, help="Dataset, file or stream; - reads stdin."
    ),
]
ShardBytes = Annotated[
    int, size_option("--shard-bytes", "Input that becomes one shard, about.", TASK_BYTES)
]
WriteMode = Annotated[
    Mode, typer.Option("--mode", help="What to do with a dataset that OUT already holds.")
]
OnDuplicate = Annotated[
    Literal["error", "keep"],
    typer.Option(
        "--on-duplicate",
        help="Samples of one id that come together, from several inputs or with --mode append.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Processes. Default: one per core."),
]
Memory = Annotated[
    int, size_option("--memory", "Anonymous memory of all processes together.", MEMORY)
]
Force = Annotated[
    bool, typer.Option("--force", help="Run again though the same job made OUT already.")
]
Engine = Annotated[
    Literal["local", "ray"],
    typer.Option("--engine", help="What runs the tasks: processes of this machine, or Ray."),
]


@contextmanager
def shown_progress(label: str) -> Iterator[Callable[[job_progress.Progress], None]]:
    """Show a bar with rate and time left on stderr, if that is a terminal; yields its callback."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(compact=True),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(label, total=None, rate="")

        def update(state: job_progress.Progress) -> None:
            number, stages = state.stages
            of = f" ({number}/{stages})" if stages > 1 else ""
            bar.update(
                task, description=f"{label}: {state.stage}{of}", total=state.total or None,
                completed=state.done, rate=f"{format_bytes(state.rate)}/s" if state.rate else "",
            )  # fmt: skip

        yield update


def result_json(result: Result) -> dict[str, Any]:
    """Return what every command of a job prints with ``--json``, besides its own figures."""
    return {
        "path": result.path, "records": result.rows, "shards": result.shards,
        "bytes": result.bytes, "tasks": result.tasks, "resumed": result.resumed,
        "unchanged": result.unchanged,
    }  # fmt: skip


def result_lines(result: Result) -> list[tuple[str, str]]:
    """Return the same for people."""
    lines = []
    if result.rows_in is not None:
        lines.append(("records", f"{format_count(result.rows_in)} → {format_count(result.rows)}"))
    lines.append(("shards", f"{format_count(result.shards)}, {format_bytes(result.bytes)}"))
    if result.unchanged:
        lines.append(("unchanged", "made by the same job earlier; --force makes it again"))
    elif result.resumed:
        lines.append(
            ("resumed", f"{format_count(result.resumed)} of {format_count(result.tasks)} tasks "
             "were finished by an interrupted run")
        )  # fmt: skip
    return lines


@contextmanager
def stdout_stream(target: str) -> Iterator[str]:
    """Yield where a job writes to: for ``-`` a temporary place, sent to stdout at the end."""
    if target != STDIN:
        yield target
        return
    import sys

    from ragged_format.dataset import Dataset
    from ragged_format.streams import write_stream

    with tempfile.TemporaryDirectory(prefix="ragged-") as folder:
        place = str(Path(folder) / "out")
        try:
            yield place
        except KeyboardInterrupt as err:
            # What the job says of its output is not true of this one.
            err.__notes__ = ["what is to go to standard output is not kept"]
            raise
        dataset = Dataset(place)
        write_stream(sys.stdout.buffer, dataset.batches(), dataset.schema)
