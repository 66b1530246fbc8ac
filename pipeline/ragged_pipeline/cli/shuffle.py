"""``ragged shuffle``: all records in a random order that can be had again."""

from __future__ import annotations

from typing import Annotated

import typer

from ragged_format.cli.options import size_option
from ragged_format.cli.output import Json, Output, format_count, grid, heading
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
from ragged_pipeline.cli.spool import replayable
from ragged_pipeline.defaults import MEMORY, TASK_BYTES

__all__ = ["shuffle"]


def shuffle(
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            metavar="IN", show_default=False, help="Dataset, file or stream; - reads stdin."
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="OUT", show_default=False, help="Dataset to write; - writes a stream to stdout."
        ),
    ],
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Another seed gives another order.")
    ] = 0,
    keep_groups: Annotated[
        bool,
        typer.Option(
            "--keep-groups", help="Shuffle groups; records of one group_id stay together."
        ),
    ] = False,
    shard_bytes: Annotated[
        int, size_option("--shard-bytes", "Size of a shard, about.", TASK_BYTES)
    ] = TASK_BYTES,
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Write all records in a random order, which follows from seed and input alone."""
    from ragged_pipeline.jobs.shuffle import shuffle as run_shuffle

    out = Output(ctx, json=json, data_on_stdout=target == STDIN)
    with (
        replayable(path) as source,
        shown_progress("shuffling") as progress,
        stdout_stream(target) as place,
    ):
        done = run_shuffle(
            source, place, seed=seed, keep_groups=keep_groups, shard_bytes=shard_bytes, mode=mode,
            on_duplicate=on_duplicate, workers=workers, memory=memory, engine=engine,
            force=force, progress=progress,
        )  # fmt: skip
    out.text(heading(f"{format_count(done.rows)} records → {target}"), grid(result_lines(done)))
    out.result({
        **result_json(done), "path": target, "input": path, "seed": seed,
        "keep_groups": keep_groups,
    })  # fmt: skip
