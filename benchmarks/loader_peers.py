"""Other loaders that shuffle, resume and share an epoch out, on the same samples.

Each gets its samples as flat arrays, one for each list column, which is the layout that suits it
best: a nested list per target is up to a hundred times slower to read. Its epoch yields samples, or
batches of its own making, as torch tensors with the sample id; nothing is collated further.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ragged_format import parse_schema
from ragged_format.lists import flat
from ragged_format.schema import RECORD

__all__ = ["PEERS", "views"]

Epoch = Callable[[], int]


def _list_columns(batch: pa.RecordBatch) -> list[str]:
    return [column.name for column in parse_schema(batch.schema) if column.axis != RECORD]


def _items(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield every sample as its id and one array for each list column."""
    names = _list_columns(batch)
    columns = [flat(batch.column(name)) for name in names]
    arrays = [column.numpy() for column in columns]
    ids = batch.column("sample_id").to_pylist()
    for row in range(batch.num_rows):
        item: dict[str, Any] = {"sample_id": ids[row]}
        for name, array, column in zip(names, arrays, columns, strict=True):
            item[name] = array[column.offsets[row] : column.offsets[row + 1]]
        yield item


def views(batch: pa.RecordBatch, folder: Path, size: int) -> Epoch:
    """Return an epoch of slices of ready tensors over memory-mapped arrays; it moves no bytes.

    What remains of a loader that knows where everything is and hands out views, one tensor for each
    column of each sample.
    """
    tensors = []
    for name in _list_columns(batch):
        values, offsets = flat(batch.column(name))
        path = folder / f"{name}.npy"
        np.save(path, values.to_numpy(zero_copy_only=True))
        mapped = torch.from_numpy(np.load(path, mmap_mode="r+"))
        tensors.append((name, mapped, offsets.tolist()))
    ids = batch.column("sample_id").to_pylist()
    epochs = iter(range(1 << 30))

    def epoch() -> int:
        order = np.random.default_rng(next(epochs)).permutation(len(ids)).tolist()
        count = 0
        for start in range(0, len(order), size):
            made = []
            for row in order[start : start + size]:
                item = {
                    name: tensor[offsets[row] : offsets[row + 1]]
                    for name, tensor, offsets in tensors
                }
                item["sample_id"] = ids[row]
                made.append(item)
            count += len(made)
        return count

    return epoch


def hf_torch(batch: pa.RecordBatch, folder: Path, size: int) -> Epoch:
    """Hugging Face datasets, map style, shuffled, torch format."""
    dataset = _hf(batch, folder).with_format("torch")
    epochs = iter(range(1 << 30))

    def epoch() -> int:
        shuffled = dataset.shuffle(seed=next(epochs), keep_in_memory=True)
        return sum(len(part["sample_id"]) for part in shuffled.iter(batch_size=size))

    return epoch


def hf_arrow(batch: pa.RecordBatch, folder: Path, size: int) -> Epoch:
    """Return the same in arrow format, the flat columns of a batch made tensors by hand."""
    dataset = _hf(batch, folder).with_format("arrow")
    names = _list_columns(batch)
    epochs = iter(range(1 << 30))

    def epoch() -> int:
        count = 0
        shuffled = dataset.shuffle(seed=next(epochs), keep_in_memory=True)
        for table in shuffled.iter(batch_size=size):
            made = []
            for name in names:
                values, offsets = flat(table.column(name))
                made.append((_tensor(values.to_numpy(zero_copy_only=True)), _tensor(offsets)))
            count += len(table.column("sample_id").to_pylist())
        return count

    return epoch


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _hf(batch: pa.RecordBatch, folder: Path) -> Any:
    import datasets

    names = ["sample_id", *_list_columns(batch)]
    columns = {name: batch.column(name) for name in names}
    # Many record batches, as a writer that streams makes them.
    table = pa.table(columns).replace_schema_metadata(None)
    table = pa.Table.from_batches(table.to_batches(max_chunksize=256))
    datasets.disable_progress_bars()
    if not folder.exists():
        datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder))


def litdata(batch: pa.RecordBatch, folder: Path, size: int) -> Epoch:
    """LitData: StreamingDataset with shuffle behind its StreamingDataLoader."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, item in enumerate(_items(batch)):
        writer[number] = {
            name: value if isinstance(value, str) else torch.tensor(value)
            for name, value in item.items()
        }
    writer.done()
    writer.merge(1)
    dataset = StreamingDataset(str(folder), shuffle=True, seed=1)
    loader = StreamingDataLoader(dataset, batch_size=size, num_workers=0, collate_fn=list)
    return lambda: sum(len(part) for part in loader)


def mosaic(batch: pa.RecordBatch, folder: Path, size: int) -> Epoch:
    """MosaicML Streaming: StreamingDataset with shuffle behind its StreamingDataLoader."""
    # Parts that need other libraries and are not used.
    for name in ("text", "vision", "multimodal"):
        sys.modules.setdefault(f"streaming.{name}", types.ModuleType(f"streaming.{name}"))
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    columns = {"sample_id": "str"}
    items = _items(batch)
    first = next(items)
    columns |= {n: f"ndarray:{v.dtype.name}" for n, v in first.items() if n != "sample_id"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for item in (first, *items):
            writer.write(item)
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=size)

    def collate(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {n: v if isinstance(v, str) else _tensor(v) for n, v in part.items()} for part in parts
        ]

    loader = StreamingDataLoader(dataset, batch_size=size, num_workers=0, collate_fn=collate)
    return lambda: sum(len(part) for part in loader)


def grain(batch: pa.RecordBatch, folder: Path, size: int) -> Epoch:
    """Grain over ArrayRecord files, uncompressed, samples pickled as numpy arrays."""
    from array_record.python import array_record_module
    from grain.python import ArrayRecordDataSource, MapDataset, ReadOptions

    path = f"{folder}.array_record"
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1,uncompressed")
    for item in _items(batch):
        writer.write(pickle.dumps(item, protocol=5))
    writer.close()

    def decode(record: bytes) -> dict[str, Any]:
        item = pickle.loads(record)
        return {n: v if isinstance(v, str) else torch.from_numpy(v) for n, v in item.items()}

    source = MapDataset.source(ArrayRecordDataSource([path])).seed(1).shuffle().map(decode)
    # In the calling thread: the threads that it can read ahead with cost CPU time as well.
    options = ReadOptions(num_threads=0, prefetch_buffer_size=0)

    def epoch() -> int:
        batches = source.batch(size, batch_fn=list).to_iter_dataset(read_options=options)
        return sum(len(part) for part in batches)

    return epoch


PEERS: dict[str, Callable[[pa.RecordBatch, Path, int], Epoch]] = {
    "datasets (torch)": hf_torch,
    "datasets (arrow)": hf_arrow,
    "litdata": litdata,
    "mosaicml-streaming": mosaic,
    "grain": grain,
}
