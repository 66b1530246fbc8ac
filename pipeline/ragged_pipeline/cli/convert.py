"""``ragged convert``: another system's files become a dataset."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from ragged_format.cli.adapter_options import (
    AdapterOptions,
    ListingCommand,
    chosen_options,
    list_adapters,
)
from ragged_format.cli.options import size_option
from ragged_format.cli.output import Json, Output, format_count, grid, heading
from ragged_format.codes import CODES
from ragged_format.errors import ConversionError
from ragged_format.record_files import STDIN
from ragged_pipeline.cli.common import (
    Engine,
    Force,
    Memory,
    OnDuplicate,
    Workers,
    WriteMode,
    result_json,
    result_lines,
    shown_progress,
    stdout_stream,
)
from ragged_pipeline.defaults import CONVERT_BYTES, MEMORY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ragged_format.adapters.registry import Reader

__all__ = ["app", "convert", "report_renderables"]

Policy = Literal["error", "flag", "full_vocab", "drop_target", "drop_sample"]

app = typer.Typer(add_completion=False)


@app.command(cls=ListingCommand)
def convert(
    ctx: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IN",
            show_default=False,
            help="Files or directories: JSON or JSON lines, also .gz or .zst (- reads stdin), "
            "Parquet, a saved Hugging Face dataset, or the adapter's own files.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="OUT", show_default=False, help="Dataset to write; - writes a stream to stdout."
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="Whose data it is, e.g. vllm; --list names all. Default: the first record tells.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            metavar="N",
            min=1,
            help="The model's vocab_size (config.json); can exceed the tokenizer's.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="A,B,…",
            help="Optional columns wanted. Default: those that the records have.",
        ),
    ] = None,
    logprobs_mode: Annotated[
        Literal["processed", "raw"],
        typer.Option("--logprobs-mode", help="What the engine's --logprobs-mode was."),
    ] = "processed",
    on_missing_support: Annotated[
        Policy,
        typer.Option(
            "--on-missing-support", help="Where a candidate set was asked for and is lost."
        ),
    ] = "error",
    on_invalid_support: Annotated[
        Policy,
        typer.Option("--on-invalid-support", help="Where a candidate set contradicts itself."),
    ] = "error",
    on_error: Annotated[
        Literal["raise", "skip"],
        typer.Option("--on-error", help="Records that cannot be read, e.g. error answers."),
    ] = "raise",
    options: AdapterOptions = None,
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    task_bytes: Annotated[
        int, size_option("--task-bytes", "Input that becomes one shard, about.", CONVERT_BYTES)
    ] = CONVERT_BYTES,
    workers: Workers = None,
    memory: Memory = MEMORY,
    runner: Engine = "local",
    force: Force = False,
    _listed: Annotated[
        bool,
        typer.Option(
            "--list",
            is_eager=True,
            callback=list_adapters("reads"),
            help="List what can be read, and exit.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Convert another system's data to a dataset of samples, and report what became of everything.

    Nothing is committed unless all of the input converts.
    """  # fmt: skip
    from ragged_pipeline.conversion import convert as convert_files
    from ragged_pipeline.conversion import detect_adapter
    from ragged_pipeline.foreign import find_foreign

    out = Output(ctx, json=json, data_on_stdout=target == STDIN)
    if engine is None:
        engine = detect_adapter(inputs)
    reader = _reader(engine)
    if vocab_size is None and reader.needs_vocab_size:
        raise typer.BadParameter(
            "it must be given; it is vocab_size in the model's config.json",
            param_hint="'--vocab-size'",
        )
    given: dict[str, Any] = {
        "vocab_size": vocab_size, "logprobs_mode": logprobs_mode, "on_error": on_error,
        "columns": None if columns is None else [name for name in columns.split(",") if name],
        "on_missing_support": on_missing_support, "on_invalid_support": on_invalid_support,
    }  # fmt: skip
    chosen = chosen_options(ctx, reader.to_samples, given, options)
    with shown_progress("converting") as progress, stdout_stream(target) as place:
        done = convert_files(
            inputs, place, adapter=engine, options=chosen, mode=mode, workers=workers,
            memory=memory, engine=runner, force=force, on_duplicate=on_duplicate,
            task_bytes=task_bytes, progress=progress, stdin=sys.stdin.buffer,
        )  # fmt: skip
    report = done.figures["report"]
    out.text(
        heading(f"{format_count(done.rows)} samples → {target}"), *report_renderables(report),
        grid(result_lines(done)),
    )  # fmt: skip
    out.result({
        **result_json(done), "path": target, "report": report,
        "inputs": [file.shown for file in find_foreign(reader, inputs)],
    })  # fmt: skip


def _reader(name: str) -> Reader:
    from ragged_format.adapters import registry
    from ragged_format.adapters.conversion import engine_names

    try:
        return registry.choose_reader(name)
    except ConversionError as err:
        raise typer.BadParameter(
            f"{err.what}: {name!r}. Supported: {', '.join(engine_names())}.", param_hint="'--from'"
        ) from None


def report_renderables(report: Mapping[str, Any]) -> list[Table | Text]:
    """Return a conversion report: what was taken, stored and dropped, and everything noted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("  ", "in", "stored", "dropped", ""):
        table.add_column(name, justify="left" if name in ("  ", "") else "right")
    rest: list[tuple[str, str]] = []
    codes: dict[str, str] = {}
    for key, part in report.items():
        label = key.replace("_", " ")
        if "taken" in part:
            why = ", ".join(f"{reason} {format_count(n)}" for reason, n in part["dropped"].items())
            dropped = part["taken"] - part["stored"]
            codes |= {code: CODES[code].rule for code in part["dropped"] if code in CODES}
            table.add_row(
                f"  {label}", format_count(part["taken"]), format_count(part["stored"]),
                format_count(dropped) if dropped else "", Text(why, style="yellow"),
            )  # fmt: skip
        else:
            rest += [(label, f"{reason}: {format_count(n)}") for reason, n in part.items()]
    labels = [label if label != before else "" for label, before in _with_previous(rest)]
    notes = [*codes.items()]  # the rule that was broken
    notes += [(label, text) for label, (_, text) in zip(labels, rest, strict=True)]
    return [table, grid(notes)] if notes else [table]


def _with_previous(rows: list[tuple[str, str]]) -> list[tuple[str, str | None]]:
    names = [label for label, _ in rows]
    return list(zip(names, [None, *names], strict=False))
