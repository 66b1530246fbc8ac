"""``ragged compact`` and ``ragged expand``: the same records in the other encoding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ragged_format.cli.output import Json, Output, format_bytes, format_count, grid, heading
from ragged_format.errors import DatasetNotFoundError
from ragged_format.record_files import STDIN
from ragged_pipeline.cli.common import (
    Engine,
    Force,
    Input,
    Memory,
    Mode,
    OnDuplicate,
    ShardBytes,
    Target,
    Workers,
    WriteMode,
    result_json,
    result_lines,
    shown_progress,
)
from ragged_pipeline.cli.spool import replayable
from ragged_pipeline.defaults import MEMORY, TASK_BYTES

if TYPE_CHECKING:
    from ragged_pipeline.runner import Result

__all__ = ["compact", "expand"]


def compact(
    ctx: typer.Context,
    path: Input,
    target: Target,
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    shard_bytes: ShardBytes = TASK_BYTES,
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the same records in the compact encoding, for storage and transfer."""
    _rewrite(
        Output(ctx, json=json), path, target, "compact", mode=mode, shard_bytes=shard_bytes,
        on_duplicate=on_duplicate, workers=workers, memory=memory, engine=engine, force=force,
    )  # fmt: skip


def expand(
    ctx: typer.Context,
    path: Input,
    target: Target,
    mode: WriteMode = "error",
    on_duplicate: OnDuplicate = "error",
    shard_bytes: ShardBytes = TASK_BYTES,
    workers: Workers = None,
    memory: Memory = MEMORY,
    engine: Engine = "local",
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the same records uncompressed, for memory mapping and random access."""
    _rewrite(
        Output(ctx, json=json), path, target, "hot", mode=mode, shard_bytes=shard_bytes,
        on_duplicate=on_duplicate, workers=workers, memory=memory, engine=engine, force=force,
    )  # fmt: skip


def _rewrite(
    out: Output, path: str, target: str, encoding: Literal["hot", "compact"], *, mode: Mode,
    **running: Any,
) -> None:  # fmt: skip
    from ragged_pipeline.jobs import recode

    job = recode.compact if encoding == "compact" else recode.expand
    with (
        replayable(path) as source,
        shown_progress("writing") as progress,
    ):
        done: Result = job(source, target, mode=mode, progress=progress, **running)
    before = _size(path)
    lines = [("records", format_count(done.rows)), ("bytes", format_bytes(done.bytes))]
    if before:
        lines.append(("before", f"{format_bytes(before)}, now {done.bytes / before:.0%}"))
    out.text(heading(f"{path} → {target}, {encoding}"), grid([*lines, *result_lines(done)[1:]]))
    out.result({
        **result_json(done), "path": target, "input": path, "encoding": encoding,
        "input_bytes": before,
    })  # fmt: skip


def _size(path: str) -> int | None:
    """Return the bytes of a dataset or of a file; ``None`` for a stream."""
    if path == STDIN:
        return None
    if Path(path).is_file():
        return Path(path).stat().st_size
    from ragged_format.dataset import Dataset

    try:
        return sum(shard.bytes for shard in Dataset(path).shards)
    except DatasetNotFoundError:
        return None
