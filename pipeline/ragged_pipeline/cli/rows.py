"""``ragged filter``, ``dedupe``, ``advantages``, ``merge`` and ``reshard``: jobs on records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragged_format.cli.output import Json, Output, format_count, grid, heading
from ragged_format.record_files import STDIN
from ragged_pipeline.cli.common import (
    Engine,
    Force,
    Input,
    Memory,
    OnDuplicate,
    ShardBytes,
    Workers,
    WriteMode,
    result_json,
    result_lines,
    shown_progress,
    stdout_stream,
)
from ragged_pipeline.cli.spool import replayable
from ragged_pipeline.defaults import MEMORY, TASK_BYTES

if TYPE_CHECKING:
    from ragged_pipeline.runner import Result

__all__ = ["advantages", "dedupe", "filter_command", "merge", "reshard"]

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="IN", show_default=False, help="Datasets, files or streams, in order."),
]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT", show_default=False, help="Dataset to write; - writes a stream to stdout."
    ),
]
SortBy = Annotated[
    str | None,
    typer.Option(
        "--sort-by", metavar="A,B,…", help="Record columns or lengths, as token_length, to sort by."
    ),
]
Descending = Annotated[bool, typer.Option("--descending", help="Sort the largest first.")]
BatchRows = Annotated[
    int, typer.Option("--batch-rows", metavar="N", min=1, help="Records of a stored batch.")
]


def filter_command(
    ctx: typer.Context,
    path: Input,
    target: Out,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Condition over record columns and lengths: 'reward > 0 and token_length < 4096'.",
        ),
    ] = None,
    min_policy_version: Annotated[
        int | None,
        typer.Option("--min-policy-version", metavar="N", help="Drop what older policies sampled."),
    ] = None,
    finish_reason: Annotated[
        list[str] | None,
        typer.Option("--finish-reason", metavar="NAME", help="Keep this one; repeat for more."),
    ] = None,
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Keep the records for which all conditions hold; count the others by reason."""
    from ragged_pipeline.api import filter_dataset

    _run(
        ctx, filter_dataset, [path], target, "filtering", json=json, where=where,
        min_policy_version=min_policy_version, finish_reasons=finish_reason or None, mode=mode,
        on_duplicate=on_duplicate, workers=workers, memory=memory, engine=engine, force=force,
    )  # fmt: skip


def dedupe(
    ctx: typer.Context,
    paths: Inputs,
    target: Out,
    by: Annotated[
        Literal["sample_id", "record", "tokens", "prompt", "completion"],
        typer.Option("--by", help="In what records must be equal to be duplicates."),
    ] = "sample_id",
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Keep the first of records that are equal in one respect."""
    from ragged_pipeline.api import dedupe as run

    _run(
        ctx, run, paths, target, "comparing", json=json, by=by, mode=mode,
        on_duplicate=on_duplicate, workers=workers, memory=memory, engine=engine, force=force,
    )  # fmt: skip


def advantages(
    ctx: typer.Context,
    path: Input,
    target: Out,
    baseline: Annotated[
        Literal["mean", "leave_one_out"],
        typer.Option("--baseline", help="Of the group, or of the others in it."),
    ] = "mean",
    scale: Annotated[
        Literal["std", "none"],
        typer.Option("--scale", help="Divide by the group's standard deviation, or not."),
    ] = "std",
    eps: Annotated[
        float, typer.Option("--eps", min=0, help="Added to the standard deviation.")
    ] = 1e-6,
    single: Annotated[
        Literal["zero", "reward", "error"],
        typer.Option("--single", help="Advantage in a group of one conversation."),
    ] = "zero",
    null_reward: Annotated[
        Literal["error", "skip"],
        typer.Option("--null-reward", help="A record without reward."),
    ] = "error",
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Set the advantage of every sample: its reward relative to its group, over all shards."""
    from ragged_pipeline.api import advantages as run

    _run(
        ctx, run, [path], target, "normalizing", json=json, baseline=baseline, scale=scale, eps=eps,
        single=single, null_reward=null_reward, mode=mode, on_duplicate=on_duplicate,
        workers=workers, memory=memory, engine=engine, force=force,
    )  # fmt: skip


def merge(
    ctx: typer.Context,
    paths: Inputs,
    target: Out,
    sort_by: SortBy = None,
    descending: Descending = False,
    shard_bytes: ShardBytes = TASK_BYTES,
    batch_rows: BatchRows = 1024,
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the records of several inputs, one after the other, as one dataset."""
    from ragged_pipeline.api import merge as run

    _run(
        ctx, run, paths, target, "merging", json=json, sort_by=_listed(sort_by),
        descending=descending, shard_bytes=shard_bytes, batch_rows=batch_rows, mode=mode,
        on_duplicate=on_duplicate, workers=workers, memory=memory, engine=engine, force=force,
    )  # fmt: skip


def reshard(
    ctx: typer.Context,
    path: Input,
    target: Out,
    sort_by: SortBy = None,
    descending: Descending = False,
    shard_bytes: ShardBytes = TASK_BYTES,
    batch_rows: BatchRows = 1024,
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the same records in other shards and batches."""
    from ragged_pipeline.api import merge as run

    _run(
        ctx, run, [path], target, "writing", json=json, sort_by=_listed(sort_by),
        descending=descending, shard_bytes=shard_bytes, batch_rows=batch_rows, mode=mode,
        on_duplicate=on_duplicate, workers=workers, memory=memory, engine=engine, force=force,
    )  # fmt: skip


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else [name for name in names.split(",") if name]


def _run(
    ctx: typer.Context,
    job: Callable[..., Result],
    paths: Sequence[str],
    target: str,
    label: str,
    *,
    json: bool,
    **options: Any,
) -> None:
    """Run a job from places, ``-`` among them, to a dataset or standard output, and print it.

    The `options` are those of the job and of its run.
    """
    out = Output(ctx, json=json, data_on_stdout=target == STDIN)
    with ExitStack() as stack:
        places = [stack.enter_context(replayable(path)) for path in paths]
        progress = stack.enter_context(shown_progress(label))
        place = stack.enter_context(stdout_stream(target))
        result = job(places, place, **options, progress=progress)
    out.text(
        heading(f"{format_count(result.rows)} records → {target}"),
        grid([*result_lines(result), *figure_lines(result.figures)]),
    )  # fmt: skip
    out.result({**result_json(result), "path": target, "inputs": paths, "figures": result.figures})


def figure_lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return counts for people, reasons below what they are reasons of."""
    lines: list[tuple[str, str]] = []
    for name, value in figures.items():
        label = name.replace("_", " ")
        if isinstance(value, Mapping):
            lines += [(label, f"{reason}: {format_count(n)}") for reason, n in value.items()]
        else:
            lines.append((label, format_count(value)))
    return lines
