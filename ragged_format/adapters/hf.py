"""Hugging Face ``datasets``: a directory that ``datasets.load_from_disk`` opens.

The directory holds Arrow streams and two small JSON files; the library itself is not needed to
write it. Columns keep their names and types: lists are ``LargeList`` there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import xxhash

from ragged_format.adapters.registry import Adapter, Writer
from ragged_format.arguments import check_size
from ragged_format.digest import digest

if TYPE_CHECKING:
    from typing import IO

__all__ = ["ADAPTER", "write"]

FILE_BYTES = 500 << 20


def write(
    batches: Iterable[pa.RecordBatch], path: str, *, file_bytes: int = FILE_BYTES
) -> dict[str, int]:
    """Write records as a directory that ``datasets.load_from_disk`` opens.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Of one schema.
    path : str
        Directory to make.
    file_bytes : int
        Bytes of one Arrow stream, about.

    Returns
    -------
    dict of str to int
        ``records`` and ``files``.
    """
    check_size("file_bytes", file_bytes)
    folder = Path(path)
    folder.mkdir()
    counts = {"records": 0, "files": 0}
    parts: list[Path] = []
    # The library keys its caches by the fingerprint: it follows from the content.
    fingerprint = xxhash.xxh3_64()
    sink: IO[bytes] | None = None
    writer: Any = None
    try:
        for batch in batches:
            if writer is None:
                parts.append(folder / f"part-{len(parts):05d}")
                sink = parts[-1].open("wb")
                writer = pa.ipc.new_stream(sink, batch.schema)
            if batch.num_rows:
                writer.write_batch(batch)
                fingerprint.update(digest(batch))
            counts["records"] += batch.num_rows
            if sink is not None and sink.tell() >= file_bytes:
                writer.close()
                sink.close()
                writer = sink = None
    finally:
        if writer is not None:
            writer.close()
        if sink is not None:
            sink.close()
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for part, name in zip(parts, names, strict=True):
        part.rename(folder / name)
    counts["files"] = len(parts)
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint.hexdigest(), "_format_columns": None, "_format_kwargs": {},
        "_format_type": None, "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    # Without features: they are those of the Arrow schema.
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "description": ""}))
    return counts


ADAPTER = Adapter(
    name="hf",
    title="Hugging Face datasets",
    writes=Writer(write=write, profile="any", makes="a directory for datasets.load_from_disk"),
)
