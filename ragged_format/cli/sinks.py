"""Where a command writes data of this format: a dataset, or a stream on standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from ragged_format.record_files import STDIN
from ragged_format.streams import StreamWriter
from ragged_format.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

__all__ = ["Mode", "open_sink"]

Mode = Literal["error", "append", "overwrite"]


def open_sink(
    target: str,
    schema: pa.Schema,
    *,
    mode: Mode,
    lineage: Mapping[str, Any] | None = None,
    encoding: Literal["hot", "compact"] = "hot",
) -> Writer | StreamWriter:
    """Return a writer, a context manager that validates fully, and commits when it is left.

    Raises
    ------
    DatasetExistsError
        Mode "error", and there is a dataset (``RF-C009``).
    """
    if target == STDIN:
        return StreamWriter(sys.stdout.buffer, schema, validate="full")
    return Writer(target, schema, mode=mode, lineage=lineage, encoding=encoding)
