"""``ragged convert``: an engine's responses in files become a dataset."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from ragged_format.cli.adapter_options import AdapterOptions, chosen_options, list_adapters
from ragged_format.cli.engines import (
    Conversion,
    WiderSchemaError,
    detect,
    engine_names,
    find_files,
)
from ragged_format.cli.inputs import STDIN, total_bytes
from ragged_format.cli.output import Json, Output, format_count, grid, heading
from ragged_format.cli.sinks import Mode, open_sink
from ragged_format.codes import CODES
from ragged_format.dataset import Dataset
from ragged_format.errors import ConversionError, DatasetNotFoundError, Where
from ragged_format.validate import UniqueIds

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragged_format.adapters.registry import Reader
    from ragged_format.adapters.report import ConversionReport

__all__ = ["convert", "convert_to", "report_renderables"]

Policy = Literal["error", "flag", "full_vocab", "drop_target", "drop_sample"]


def convert(
    ctx: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IN",
            show_default=False,
            help="Files or directories: JSON or JSON lines, also .gz or .zst (- reads stdin), or "
            "the adapter's own files.",
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
    mode: Annotated[
        Mode, typer.Option("--mode", help="What to do with a dataset that OUT already holds.")
    ] = "error",
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
    out = Output(ctx, json=json, data_on_stdout=target == STDIN)
    if engine is None:
        engine = detect(inputs)
    reader = _reader(engine)
    if vocab_size is None and reader.needs_vocab_size:
        raise typer.BadParameter("it must be known", param_hint="'--vocab-size'")
    files = find_files(reader, inputs)
    given: dict[str, Any] = {
        "vocab_size": vocab_size, "logprobs_mode": logprobs_mode, "on_error": on_error,
        "columns": None if columns is None else [name for name in columns.split(",") if name],
        "on_missing_support": on_missing_support, "on_invalid_support": on_invalid_support,
    }  # fmt: skip
    conversion = Conversion(
        reader, files, chosen_options(ctx, reader.to_samples, given, options), name=engine
    )
    lineage = {"converted_from": engine, "inputs": files}
    with out.progress("converting", total_bytes(files)) as advance:
        done = convert_to(target, conversion, advance, mode=mode, lineage=lineage)
    report, rows = done.report, done.report.samples.stored
    out.text(heading(f"{format_count(rows)} samples → {target}"), *report_renderables(report))
    out.result({"path": target, "inputs": files, "records": rows, "report": report.to_dict()})


def _reader(name: str) -> Reader:
    from ragged_format.adapters import registry

    try:
        return registry.choose_reader(name)
    except ConversionError as err:
        raise typer.BadParameter(
            f"{err.what}: {name!r}. Supported: {', '.join(engine_names())}.", param_hint="'--from'"
        ) from None


def convert_to(
    target: str,
    conversion: Conversion,
    advance: Callable[[int], None],
    *,
    mode: Mode = "error",
    lineage: dict[str, Any] | None = None,
) -> Conversion:
    """Run a conversion into a dataset, or into a stream on standard output for ``-``.

    Returns the conversion that was carried out: where a later record has columns that the first
    ones lack, everything is converted again with all columns.

    Raises
    ------
    ConversionError
        The columns change in the middle of input or output that cannot be had twice.
    InvariantError
        Two samples have one id (``RF-I006``).
    """
    conversion, existing = _with_existing(target, conversion, mode)
    try:
        _run(target, conversion, advance, mode, lineage, existing)
    except WiderSchemaError:
        if target == STDIN or STDIN in conversion.files:
            raise ConversionError(
                "later records have columns that the first ones lack", code="RF-A011",
                expected="the same columns in all records of a pipe", got="other columns",
                remedy="name the columns: --columns A,B,…",
            ) from None  # fmt: skip
        conversion = conversion.widest()
        _run(target, conversion, advance, mode, lineage, existing)
    return conversion


def _with_existing(
    target: str, conversion: Conversion, mode: Mode
) -> tuple[Conversion, Dataset | None]:
    """Return the conversion into the columns of the dataset that it is appended to."""
    if mode != "append" or target == STDIN:
        return conversion, None
    try:
        existing = Dataset(target)
    except DatasetNotFoundError:
        return conversion, None
    if "columns" not in conversion.options:
        conversion = replace(conversion, schema=existing.schema)
    return conversion, existing


def _run(
    target: str,
    conversion: Conversion,
    advance: Callable[[int], None],
    mode: Mode,
    lineage: dict[str, Any] | None,
    existing: Dataset | None,
) -> None:
    ids = UniqueIds()
    if existing is not None:
        for number, batch in enumerate(existing.batches(columns=["sample_id"])):
            ids.add(batch.column("sample_id"), Where(file=target, batch=number))
    batches = conversion.batches(advance)
    first = next(batches, None)
    if first is None:
        raise ConversionError(
            "the input has no records", expected="at least one", got="none",
            where=Where(file=", ".join(conversion.files)),
        )  # fmt: skip
    with open_sink(target, first.schema, mode=mode, lineage=lineage) as sink:
        for number, batch in enumerate(chain([first], batches)):
            ids.add(batch.column("sample_id"), Where(batch=number))
            sink.write(batch)


def report_renderables(report: ConversionReport) -> list[Table | Text]:
    """Return a conversion report: what was taken, stored and dropped, and everything noted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("  ", "in", "stored", "dropped", ""):
        table.add_column(name, justify="left" if name in ("  ", "") else "right")
    rest: list[tuple[str, str]] = []
    codes: dict[str, str] = {}
    for key, part in report.to_dict().items():
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
