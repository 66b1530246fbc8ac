"""Streams as inputs of jobs, which read their input more than once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragged_format.cli.sources import opened
from ragged_format.files import write_file

__all__ = ["replayable"]


@contextmanager
def replayable(path: str) -> Iterator[str]:
    """Yield a place with the records of `path` that can be read again and again.

    That is `path` itself, unless it is a stream (``-`` is the one on standard input): that is
    written to a temporary file, which is removed afterwards.
    """
    with opened(path) as source:
        if source.is_random_access:
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="ragged-") as folder:
            file = Path(folder) / "input.arrow"
            write_file(file, source.batches(), source.schema)
            yield str(file)
