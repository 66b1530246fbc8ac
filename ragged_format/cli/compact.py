"""``ragged compact`` and ``ragged expand``: the same records in the other encoding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ragged_format.cli.output import Json, Output, format_bytes, format_count, grid, heading
from ragged_format.cli.sinks import Mode, open_sink
from ragged_format.cli.sources import opened
from ragged_format.dataset import Dataset
from ragged_format.record_files import STDIN

if TYPE_CHECKING:
    from ragged_format.sources import Source

__all__ = ["compact", "expand"]

Input = Annotated[
    str,
    typer.Argument(
        metavar="IN", show_default=False, help="Dataset, file or stream; - reads stdin."
    ),
]
Target = Annotated[str, typer.Argument(metavar="OUT", show_default=False, help="Dataset to write.")]
WriteMode = Annotated[
    Mode, typer.Option("--mode", help="What to do with a dataset that OUT already holds.")
]


def compact(
    ctx: typer.Context, path: Input, target: Target, mode: WriteMode = "error", json: Json = False
) -> None:
    """Write the same records in the compact encoding, for storage and transfer."""
    _rewrite(Output(ctx, json=json), path, target, mode, "compact")


def expand(
    ctx: typer.Context, path: Input, target: Target, mode: WriteMode = "error", json: Json = False
) -> None:
    """Write the same records uncompressed, for memory mapping and random access."""
    _rewrite(Output(ctx, json=json), path, target, mode, "hot")


def _rewrite(
    out: Output, path: str, target: str, mode: Mode, encoding: Literal["hot", "compact"]
) -> None:
    with opened(path) as source:
        with (
            out.progress("writing", source.num_rows) as advance,
            open_sink(target, source.schema, mode=mode, encoding=encoding) as sink,
        ):
            for batch in source.batches():
                sink.write(batch)
                advance(batch.num_rows)
        before = _size(source, path)
    written = Dataset(target)
    after = sum(shard.bytes for shard in written.shards)
    lines = [("records", format_count(written.num_rows)), ("bytes", format_bytes(after))]
    if before:
        lines.append(("before", f"{format_bytes(before)}, now {after / before:.0%}"))
    out.text(heading(f"{path} → {target}, {encoding}"), grid(lines))
    out.result({
        "path": target, "input": path, "encoding": encoding, "records": written.num_rows,
        "bytes": after, "input_bytes": before,
    })  # fmt: skip


def _size(source: Source, path: str) -> int | None:
    if isinstance(source, Dataset):
        return sum(shard.bytes for shard in source.shards)
    return None if path == STDIN or not Path(path).is_file() else Path(path).stat().st_size
