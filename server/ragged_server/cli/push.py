"""``ragged push``: samples go to a server until they are durable there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from ragged_format.cli.options import size_option
from ragged_format.cli.output import Json, Output, format_bytes, format_count, wrong_usage
from ragged_server.cli.options import CaFile, KeyFile, RetryFor, Url, Zstd, key_of, urls_of
from ragged_server.client import (
    IN_FLIGHT,
    MAX_BYTES,
    MAX_RECORDS,
    RETRY_FOR_S,
    Client,
    Pushed,
    Retries,
)

__all__ = ["push"]


def push(
    ctx: typer.Context,
    *,
    url: Url,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IN...",
            show_default=False,
            help="Datasets, files, streams or URLs; - reads a stream from standard input.",
        ),
    ],
    max_records: Annotated[
        int, typer.Option("--max-records", metavar="N", min=1, help="Most records of a request.")
    ] = MAX_RECORDS,
    max_bytes: Annotated[
        int, size_option("--max-bytes", "About the most of a request.", MAX_BYTES)
    ] = MAX_BYTES,
    in_flight: Annotated[
        int,
        typer.Option(
            "--in-flight", metavar="N", min=1, help="Requests under way; 1 keeps the order."
        ),
    ] = IN_FLIGHT,
    zstd: Zstd = None,
    retry_for: RetryFor = RETRY_FOR_S,
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    json: Json = False,
) -> None:
    """Send samples to a server and end when all of them are on its disk.

    Nothing is stored twice: after a failure, run the same command again. Engine output is converted
    on the way: ragged convert --from vllm rollouts.jsonl - | ragged push http://host:8080 -
    """
    out = Output(ctx, json=json)
    with wrong_usage(ctx):
        urls = urls_of(url)
    since = time.monotonic()
    total = Pushed()
    with Client(
        urls, key=key_of(key_file), zstd_level=zstd, retries=Retries(for_s=retry_for),
        verify=True if ca_file is None else ca_file,
    ) as client:  # fmt: skip
        for path in inputs:
            with (
                out.progress(f"pushing {path}") as advance,
                _noted(total, _Advances(advance)) as told,
            ):
                pushed = client.push(
                    path, max_records=max_records, max_bytes=max_bytes, in_flight=in_flight,
                    progress=told,
                )  # fmt: skip
            total = total.plus(pushed)
    seconds = time.monotonic() - since
    out.text(
        f"{format_count(total.stored)} stored, {format_count(total.duplicates)} already there, "
        f"in {format_count(total.requests)} request{'s' * (total.requests != 1)} "
        f"of {format_bytes(total.bytes)} ({seconds:.1f} s, {total.retries} retries)"
    )
    out.result(
        {
            "url": url,
            "inputs": inputs,
            "records": total.records,
            "stored": total.stored,
            "duplicates": total.duplicates,
            "requests": total.requests,
            "bytes": total.bytes,
            "retries": total.retries,
            "cursor": total.cursor,
            "seconds": seconds,
        }
    )


@contextmanager
def _noted(before: Pushed, told: _Advances) -> Iterator[_Advances]:
    """Have an interruption say what has arrived."""
    try:
        yield told
    except KeyboardInterrupt as err:
        records = format_count(before.records + told.records)
        err.add_note(
            f"{records} records are stored; to go on, run the same again: none is stored twice"
        )
        raise


class _Advances:
    """Turns totals into steps of a progress bar."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance
        self.records = 0

    def __call__(self, pushed: Pushed) -> None:
        self._advance(pushed.records - self.records)
        self.records = pushed.records
