"""Compact shards against Parquet, Vortex and ArrayRecord: bytes, decoding, random access.

Three sets of rollouts: recorded ones of a real vLLM server, wide sets and one log-prob a token;
sets alone, of which two thirds hold one id; and such sets with log-probs and heads. Every format
gets all columns and gives all of them back.

Parquet is written with BYTE_STREAM_SPLIT for every number column and zstd, Vortex with its compact
options; both in one file. ArrayRecord holds one sample a record, as raw arrays under its own zstd,
which is the layout for which its random access is known. Decoding is timed to Arrow (ours, Parquet,
Vortex) with the files in the page cache and one thread.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ragged_format as rf
from benchmarks import shapes
from benchmarks.harness import (
    Figure,
    Settings,
    interleave,
    median_s,
    rate_text,
    speed_figure,
    time_text,
)
from ragged_format.lists import flat
from ragged_format.schema import RECORD

if TYPE_CHECKING:
    from ragged_format.writer import Encoding

__all__ = ["run"]

RECORDED = Path(__file__).parent / "data" / "recorded.arrow"
SAMPLES = 256
# Records of a stored batch when single samples are wanted from compact shards.
FEW = 1
WHOLE = "compact in one batch, opened anew"
BYTES_GOAL = 0.75
DECODE_GOAL = 0.5


def sets_alone(samples: int) -> pa.RecordBatch:
    """Return samples of which every token but the first has a candidate set, and nothing else."""
    rng = np.random.default_rng(shapes.SEED)
    lengths = np.clip(rng.lognormal(np.log(2_000), 0.7, samples), 256, 16_384).astype(int).tolist()
    batch = shapes.to_arrow(shapes.all_trained(lengths))
    schema = rf.sample_schema(
        vocab_size=shapes.VOCAB_SIZE, columns=["candidate_counts", "candidate_ids"]
    )
    return batch.select(schema.names).cast(schema)


def run(settings: Settings) -> list[Figure]:
    """Measure all sets of rollouts."""
    samples = 16 if settings.quick else SAMPLES
    recorded = rf.concat(list(rf.open_source(RECORDED).batches()))
    sets: dict[str, Callable[[], pa.RecordBatch]] = {
        "recorded": lambda: recorded,
        "sets alone": lambda: sets_alone(samples),
        "generated": lambda: shapes.to_arrow(shapes.many(samples)),
    }
    figures = []
    for name, make in sets.items():
        with tempfile.TemporaryDirectory() as scratch:
            figures += _figures(name, make(), Path(scratch), settings)
    return figures


def _figures(name: str, batch: pa.RecordBatch, scratch: Path, settings: Settings) -> list[Figure]:
    tokens = len(flat(batch.column("input_ids")).values)
    sizes: dict[str, int] = {}
    readers: dict[str, Callable[[], object]] = {}
    for peer, write in (("compact", _ours), ("Parquet", _parquet), ("Vortex", _vortex)):
        written = write(batch, scratch)
        if written is not None:
            sizes[peer], readers[peer] = written
    samples = interleave(readers, settings)
    ours = "compact"
    each = {peer: f"{size / tokens:.1f}" for peer, size in sizes.items()}
    figures = [
        Figure(
            f"{name}: bytes a token, all columns", f"compact {each['compact']}",
            f"{peer} {each[peer]}", sizes["compact"] / sizes[peer], BYTES_GOAL, at_most=True,
        )
        for peer in sizes if peer != "compact"
    ]  # fmt: skip
    rate = batch.nbytes / median_s(samples["compact"]) / 1e9
    figures.append(
        Figure(
            f"{name}: decode, canonical bytes a second of one core",
            f"compact {rate_text(batch.nbytes, samples['compact'])}",
            ", ".join(f"{p} {rate_text(batch.nbytes, samples[p])}" for p in sizes if p != ours),
            rate, DECODE_GOAL, unit=" GB/s",
        )
    )  # fmt: skip
    figures += [
        speed_figure(f"{name}: decode", samples["compact"], samples[peer], label=peer)
        for peer in sizes if peer != "compact"
    ]  # fmt: skip
    return figures + _random_access(name, batch, scratch, settings)


def _random_access(
    name: str, batch: pa.RecordBatch, scratch: Path, settings: Settings
) -> list[Figure]:
    single = _array_record(batch, scratch)
    if single is None:
        return [Figure(f"{name}: one sample at random", "-", "ArrayRecord: not installed")]
    size, peer = single
    contenders: dict[str, Callable[[], object]] = {"ArrayRecord": peer}
    stored: dict[str, int] = {}
    kinds: list[tuple[str, Encoding, int]] = [
        ("hot", "hot", 1024), ("compact", "compact", FEW), (WHOLE, "compact", 1024),
    ]  # fmt: skip
    for kind, encoding, rows in kinds:
        path = scratch / f"single-{kind}"
        with rf.Writer(path, batch.schema, encoding=encoding, batch_rows=rows) as writer:
            writer.write(batch)
        contenders[kind] = _at_random(path, batch.num_rows, anew=kind == WHOLE)
        stored[kind] = sum(shard.bytes for shard in rf.Dataset(path).shards)
    samples = interleave(contenders, settings)
    return [
        Figure(
            f"{name}: one sample at random, {kind}",
            f"{time_text(median_s(samples[kind]))}, {stored[kind] / 1e6:.2f} MB",
            f"ArrayRecord {time_text(median_s(samples['ArrayRecord']))}, {size / 1e6:.2f} MB",
            median_s(samples["ArrayRecord"]) / median_s(samples[kind]),
            None if kind == WHOLE else 1.0,
        )
        for kind, _, _ in kinds
    ]  # fmt: skip


def _at_random(path: Path, rows: int, *, anew: bool) -> Callable[[], object]:
    """Return what reads the next of all records; `anew`: with nothing kept of the last one."""
    order = np.random.default_rng(0).permutation(rows).tolist()
    turns = iter(range(1 << 60))
    dataset = rf.Dataset(path)
    return lambda: (rf.Dataset(path) if anew else dataset)[order[next(turns) % rows]]


def _ours(batch: pa.RecordBatch, scratch: Path) -> tuple[int, Callable[[], object]]:
    path = scratch / "ours"
    with rf.Writer(path, batch.schema, encoding="compact") as writer:
        writer.write(batch)

    def read() -> object:
        return list(rf.Dataset(path).batches())

    return sum(shard.bytes for shard in rf.Dataset(path).shards), read


def _parquet(batch: pa.RecordBatch, scratch: Path) -> tuple[int, Callable[[], object]]:
    path = scratch / "peer.parquet"
    table = pa.Table.from_batches([batch])
    split = [
        leaf
        for column, leaf in zip(batch.schema, _leaves(table), strict=True)
        if pa.types.is_primitive(_value_type(column.type))
        and _value_type(column.type).bit_width >= 16
    ]
    pq.write_table(
        table, path, compression="zstd", use_dictionary=False, use_byte_stream_split=split
    )

    def read() -> object:
        return pq.read_table(path, use_threads=False)

    return path.stat().st_size, read


def _leaves(table: pa.Table) -> list[str]:
    """Return the path of each column's values in Parquet."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.slice(0, 0), sink)
    schema = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [schema.column(i).path for i in range(len(schema))]


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_large_list(kind) else kind


def _vortex(batch: pa.RecordBatch, scratch: Path) -> tuple[int, Callable[[], object]] | None:
    try:
        import vortex
    except ImportError:
        return None
    path = str(scratch / "peer.vortex")
    # Without non-null declarations, which its lists do not carry through Arrow.
    table = pa.Table.from_batches([batch]).cast(
        pa.schema([pa.field(field.name, _nullable(field.type)) for field in batch.schema])
    )
    vortex.io.VortexWriteOptions.compact().write(table, path)

    def read() -> object:
        return vortex.open(path).to_arrow().read_all()

    return Path(path).stat().st_size, read


def _nullable(kind: pa.DataType) -> pa.DataType:
    return pa.large_list(kind.value_type) if pa.types.is_large_list(kind) else kind


def _array_record(batch: pa.RecordBatch, scratch: Path) -> tuple[int, Callable[[], object]] | None:
    try:
        from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
    except ImportError:
        return None
    path = str(scratch / "peer.array_record")
    names = [c.name for c in rf.parse_schema(batch.schema) if c.axis != RECORD]
    columns = {name: flat(batch.column(name)) for name in names}
    types = {name: column.numpy().dtype for name, column in columns.items()}
    plain = [name for name in batch.schema.names if name not in names]
    rows = batch.select(plain).to_pylist()
    writer = ArrayRecordWriter(path, "group_size:1,zstd")
    for row, record in enumerate(rows):
        arrays = [
            column.numpy()[column.offsets[row] : column.offsets[row + 1]]
            for column in columns.values()
        ]
        head = json.dumps([record, [len(a) for a in arrays]]).encode()
        body = b"".join(a.tobytes() for a in arrays)
        writer.write(len(head).to_bytes(4, "little") + head + body)
    writer.close()
    reader = ArrayRecordReader(path, "readahead_buffer_size:0")
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    turns = iter(range(1 << 60))

    def read() -> dict[str, Any]:
        data = reader.read([order[next(turns) % len(rows)]])[0]
        start = 4 + int.from_bytes(data[:4], "little")
        record, lengths = json.loads(data[4:start])
        for name, length in zip(names, lengths, strict=True):
            record[name] = np.frombuffer(data, types[name], length, start)
            start += length * types[name].itemsize
        return dict(record)

    return Path(path).stat().st_size, read
