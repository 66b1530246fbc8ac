"""``ragged tail``: the samples of a server, as far as they go or as they come."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, BinaryIO, Protocol

import pyarrow.compute as pc
import typer
from rich.text import Text

from ragged_format.cli.options import size_option
from ragged_format.cli.output import Json, Output, format_count, wrong_usage
from ragged_format.errors import DatasetNotFoundError, Where
from ragged_format.local_files import create
from ragged_format.streams import StreamWriter
from ragged_server.cli.options import CaFile, KeyFile, RetryFor, Url, Zstd, key_of, urls_of
from ragged_server.client import RETRY_FOR_S, WAIT_S, Client, Page, Retries, Share

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["tail"]

_STDOUT = "-"
# Columns of one value a record that a line shows after id and lengths, where they are there.
_SHOWN = ("group_id", "policy_version", "reward", "finish_reason")


def tail(
    ctx: typer.Context,
    *,
    url: Url,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="CURSOR", help="Start behind it. Default: the oldest."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Wait for what is yet to come, until interrupted."),
    ] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Share of the records.")] = 0,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Number of shares.")] = 1,
    min_policy_version: Annotated[
        int | None, typer.Option("--min-policy-version", metavar="N", help="Leave out older ones.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write a stream, which appears when it is complete; - writes to stdout.",
        ),
    ] = None,
    cursor_file: Annotated[
        Path | None,
        typer.Option(
            "--cursor-file",
            metavar="FILE",
            help="Start behind the cursor in it, and keep there what was written.",
        ),
    ] = None,
    max_bytes: Annotated[int | None, size_option("--max-bytes", "Size of one read.")] = None,
    zstd: Zstd = None,
    retry_for: RetryFor = RETRY_FOR_S,
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    json: Json = False,
) -> None:
    """Print the samples of a server, or write them as a stream; with -f as they come.

    The last line, or the JSON object, has the cursor from which the next call goes on. Interrupting
    a followed tail (Ctrl-C, SIGTERM) completes its output and is no failure.
    """
    out = Output(ctx, json=json, data_on_stdout=output == _STDOUT)
    start = _start(after, cursor_file)
    with wrong_usage(ctx):
        urls = urls_of(url)
        share = Share(rank, world_size, min_policy_version)
    with Client(
        urls, key=key_of(key_file), zstd_level=zstd, retries=Retries(for_s=retry_for),
        verify=True if ca_file is None else ca_file,
    ) as client:  # fmt: skip
        pages = client.tail(start, follow=follow, wait_s=WAIT_S, max_bytes=max_bytes, share=share)
        cursor, records = start, 0
        with _sink_of(output, out) as sink:
            try:
                for page in _until_interrupted(pages) if follow else pages:
                    sink.write(page.batches)
                    cursor, records = page.cursor, records + page.records
                    if cursor_file is not None and not sink.is_held_back:
                        _save(cursor_file, cursor)
            except KeyboardInterrupt as err:
                err.add_note(
                    f"{output} is not written"
                    if sink.is_held_back
                    else f"{format_count(records)} records came; to go on, pass --after {cursor}"
                )
                raise
            if not records:
                page = client.read(start, max_bytes=1, share=share)
                sink.end_empty(page.schema, url)
                cursor = start or page.cursor
    if cursor_file is not None and cursor is not None:
        _save(cursor_file, cursor)
    out.text(f"{format_count(records)} record{'s' * (records != 1)}; cursor {cursor}")
    out.result({"url": url, "records": records, "after": start, "cursor": cursor, "output": output})


def _start(after: str | None, cursor_file: Path | None) -> str | None:
    if cursor_file is None or not cursor_file.exists():
        return after
    if after is not None:
        raise typer.BadParameter(
            f"{cursor_file} has a cursor already", param_hint="--after with --cursor-file"
        )
    return cursor_file.read_text().strip() or None


def _save(file: Path, cursor: str) -> None:
    with create(file) as new:
        new.write(f"{cursor}\n".encode())


class _Stopped(Exception):  # noqa: N818 - no error
    """A signal came while there was nothing to do."""


def _until_interrupted(pages: Iterator[Page]) -> Iterator[Page]:
    """Yield the pages until SIGINT or SIGTERM; what is being written is written to its end.

    A second signal does what it does elsewhere.
    """
    asked = waiting = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()
        if waiting:
            raise _Stopped

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not asked:
            waiting = True
            page = next(pages, None)
            waiting = False
            if page is None:
                return
            yield page
    except _Stopped:
        return
    finally:
        restore()


class _Sink(Protocol):
    """Where the samples go; a context manager."""

    is_held_back: bool  # nothing can be seen of it before it is complete

    def write(self, batches: Sequence[pa.RecordBatch]) -> None: ...
    def end_empty(self, schema: pa.Schema | None, url: str) -> None: ...


@contextmanager
def _sink_of(output: str | None, out: Output) -> Iterator[_Sink]:
    if output is None:
        yield _Lines(out)
        return
    with ExitStack() as stack:
        yield _Stream(sys.stdout.buffer if output == _STDOUT else output, stack)


class _Stream:
    """A stream, which begins when its schema is known."""

    def __init__(self, target: str | BinaryIO, stack: ExitStack) -> None:
        self.is_held_back = isinstance(target, str)
        self._target = target
        self._stack = stack
        self._writer: StreamWriter | None = None

    def write(self, batches: Sequence[pa.RecordBatch]) -> None:
        for batch in batches:
            if self._writer is None:
                self._begin(batch.schema)
            if self._writer is not None:
                self._writer.write(batch)
        if not isinstance(self._target, str):
            self._target.flush()

    def end_empty(self, schema: pa.Schema | None, url: str) -> None:
        if schema is None:
            raise DatasetNotFoundError(
                "the server has no samples yet, and so no schema", where=Where(file=url),
                expected="a log with samples", got="an empty one",
                remedy="push samples, or start the server with --schema",
            )  # fmt: skip
        self._begin(schema)

    def _begin(self, schema: pa.Schema) -> None:
        self._writer = self._stack.enter_context(StreamWriter(self._target, schema))


class _Lines:
    """One line a record."""

    is_held_back = False

    def __init__(self, out: Output) -> None:
        self._out = out

    def write(self, batches: Sequence[pa.RecordBatch]) -> None:
        for batch in batches:
            tokens = pc.list_value_length(batch.column("input_ids")).to_pylist()
            names = [name for name in _SHOWN if name in batch.schema.names]
            shown = batch.select(["sample_id", *names]).to_pylist()
            lines = [
                "  ".join(
                    [
                        row["sample_id"],
                        f"{length} tokens",
                        *(f"{name}={row[name]}" for name in names if row[name] is not None),
                    ]
                )
                for row, length in zip(shown, tokens, strict=True)
            ]
            self._out.text(*([Text("\n".join(lines))] if lines else []))

    def end_empty(self, schema: pa.Schema | None, url: str) -> None:
        pass
