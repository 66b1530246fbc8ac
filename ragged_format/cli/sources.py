"""Data of this format that a command reads: a dataset, a file or a stream."""

from __future__ import annotations

from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ragged_format.dataset import Dataset
from ragged_format.errors import Where
from ragged_format.sources import Source, open_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

__all__ = ["describe", "kind_of", "opened", "placed_batches"]


@contextmanager
def opened(path: str) -> Iterator[Source]:
    """Open a place, ``-`` for standard input, and close it again."""
    source: Any = open_source(path)
    with closing(source) if hasattr(source, "close") else nullcontext():
        yield source


def kind_of(source: Source) -> str:
    """Return what a source is, in a word."""
    if isinstance(source, Dataset):
        return "dataset"
    return "file" if source.is_random_access else "stream"


def describe(source: Source) -> dict[str, Any]:
    """Return kind and identity of a source as JSON values."""
    schema = source.ragged_schema
    return {
        "kind": kind_of(source),
        "profile": schema.profile,
        "format_version": ".".join(map(str, schema.version)),
        "vocab_size": schema.vocab_size,
    }


def placed_batches(source: Source, path: str) -> Iterator[tuple[Where, pa.RecordBatch]]:
    """Yield every batch of a source, verified, with its file and its index in that file."""
    if not isinstance(source, Dataset):
        for number, batch in enumerate(source.batches()):
            yield Where(file=path, batch=number), batch
        return
    batches = source.batches(verify=True)
    for shard in source.shards:
        rows = number = 0
        while rows < shard.rows:
            batch = next(batches)
            yield Where(file=f"{source.path}/{shard.name}", batch=number), batch
            rows += batch.num_rows
            number += 1
    for _ in batches:
        pass  # the last shard is compared with its trailer when the iteration ends
