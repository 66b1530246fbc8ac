"""Stored teacher heads at equal K: size per token and decode speed, ours against DistillKit's.

The peer is DistillKit's format, not its code: Parquet as its writer makes it, with exact float32
values, and with its recommended lossy configuration. What decodes its bytes here is our own exact
reader (`ragged_format.adapters._distillkit_codec`), so that both sides run numpy; its torch decoder
is not timed. Both sides begin at files in the page cache and end at arrays of ids and log-probs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import ragged_format as rf
from benchmarks.harness import Figure, Settings, interleave, rate_text, speed_figure
from ragged_format.adapters import distillkit
from ragged_format.adapters._distillkit_codec import Codec, pack_bits
from ragged_format.lists import flat, offsets_of, to_list, to_numpy

__all__ = ["heads", "recommended", "run", "samples_of"]

VOCAB_SIZE = 151_936
SIZES = (50, 128, 512)
TOKENS = 4_096
LENGTH = 512
SEED = 7
EXACT_K = 16
TERMS = (0, 1, 2, 3, 4, "sqrt")


def heads(
    k: int, tokens: int, vocab_size: int = VOCAB_SIZE
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return ids and log-probs of `tokens` heads, (tokens, k): a power law over ranks with noise.

    Ids are distinct in a head and skewed over the vocabulary, as those of text are.
    """
    rng = np.random.default_rng(SEED)
    # More than k of them, of which the first k that differ stay.
    drawn = np.expm1(rng.random((tokens, 3 * k)) * np.log(vocab_size + 1)).astype(np.int64)
    ids = np.empty((tokens, k), np.int32)
    for row, candidates in enumerate(np.minimum(drawn, vocab_size - 1)):
        different = candidates[np.sort(np.unique(candidates, return_index=True)[1])][:k]
        spare = np.setdiff1d(np.arange(2 * k), different)[: k - len(different)]
        ids[row] = np.concatenate([different, spare])
    slope = rng.uniform(1.0, 2.5, (tokens, 1))
    logits = -slope * np.log(np.arange(1, k + 1)) + rng.normal(0, 0.1, (tokens, k))
    logits = -np.sort(-logits, axis=1)
    mass = rng.uniform(0.8, 0.999, (tokens, 1))
    values = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) + np.log(mass)
    return ids, values.astype(np.float32)


def samples_of(
    ids: npt.NDArray[np.int32],
    values: npt.NDArray[np.float32],
    kind: pa.DataType,
    vocab_size: int = VOCAB_SIZE,
) -> pa.RecordBatch:
    """Return sequences of `LENGTH` targets with these heads, the log-probs of type `kind`."""
    column = replace(rf.standard_column("teacher_topk_log_probs"), type=kind)
    schema = rf.sample_schema(
        vocab_size=vocab_size, columns=["teacher_topk_counts", "teacher_topk_ids", column]
    )
    tokens, k = ids.shape
    rows = tokens // LENGTH
    rng = np.random.default_rng(SEED)
    lengths = np.full(rows, LENGTH + 1)
    mask = np.tile(np.arange(LENGTH + 1) > 0, rows).astype(np.uint8)
    per_row = offsets_of(np.full(rows, LENGTH))
    flat_columns: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]] = {
        "input_ids": (rng.integers(0, vocab_size, len(mask)), offsets_of(lengths)),
        "completion_mask": (mask, offsets_of(lengths)),
        "teacher_topk_counts": (np.full(tokens, k), per_row),
        "teacher_topk_ids": (ids.reshape(-1), per_row * k),
        "teacher_topk_log_probs": (
            values.reshape(-1).astype(kind.to_pandas_dtype()), per_row * k
        ),
    }  # fmt: skip
    parsed = rf.parse_schema(schema)
    arrays = [pa.array([f"s{n}" for n in range(rows)])]
    arrays += [to_list(*flat_columns[name], parsed[name]) for name in schema.names[1:]]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def recommended(values: npt.NDArray[np.float32]) -> tuple[Codec, npt.NDArray[np.uint8]]:
    """Return DistillKit's recommended lossy configuration, and the bytes of (n, k) log-probs."""
    k = values.shape[1]
    codec = Codec(VOCAB_SIZE, k, EXACT_K, "bfloat16", TERMS, delta_encoding=False, normalize_t=True)
    high = (np.ascontiguousarray(values[:, :EXACT_K]).view(np.uint32) >> 16).astype("<u2")
    at = np.linspace(0, 1, k - EXACT_K)
    curve = np.stack([np.sqrt(at) if t == "sqrt" else at ** int(t) for t in TERMS], axis=1)
    fitted = np.linalg.lstsq(curve, values[:, EXACT_K:].T.astype(np.float64))[0]
    coefficients = np.ascontiguousarray(fitted.T.astype("<f4"))
    return codec, np.concatenate([high.view(np.uint8), coefficients.view(np.uint8)], axis=1)


def run(settings: Settings) -> list[Figure]:
    """Measure K = 50, 128 and 512: bytes of one target with its token, seconds to decode all."""
    figures = []
    for k in SIZES[:1] if settings.quick else SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            figures += _figures(k, Path(scratch), settings)
    return figures


def _figures(k: int, scratch: Path, settings: Settings) -> list[Figure]:
    tokens = 2 * LENGTH if settings.quick else TOKENS
    ids, values = heads(k, tokens)
    exact = samples_of(ids, values, pa.float32())
    rf.validate(exact)
    half = samples_of(ids, values, pa.float16())
    stored: tuple[tuple[str, pa.RecordBatch, Literal["hot", "compact"]], ...] = (
        ("hot", exact, "hot"), ("compact", exact, "compact"), ("half", half, "compact")
    )  # fmt: skip
    for name, batch, encoding in stored:
        with rf.Writer(str(scratch / name), batch.schema, encoding=encoding) as writer:
            writer.write(batch)
    distillkit.write([exact], str(scratch / "theirs"), k=k)
    lossy, raw_values = recommended(values)
    table = distillkit.from_samples(exact, k=k)[0]
    _write_lossy(table, raw_values, ids, scratch / "lossy.parquet")

    sizes = {
        name: _bytes(scratch / name) / tokens
        for name in ("hot", "compact", "half", "theirs", "lossy.parquet")
    }
    exact_codec = Codec(VOCAB_SIZE, k, k, delta_encoding=False)
    contenders: dict[str, Callable[[], object]] = {
        "hot": lambda: _ours(scratch / "hot"),
        "compact": lambda: _ours(scratch / "compact"),
        "theirs": lambda: _theirs(scratch / "theirs" / "data_0.parquet", exact_codec),
        "lossy": lambda: _theirs(scratch / "lossy.parquet", lossy),
    }
    _check(ids, values, contenders)
    samples = interleave(contenders, settings)
    canonical = tokens * k * 8
    return [
        Figure(
            f"K = {k}: bytes a token, exact float32",
            f"compact {sizes['compact']:.0f} (hot {sizes['hot']:.0f})",
            f"Parquet, exact {sizes['theirs']:.0f}",
            sizes["theirs"] / sizes["compact"],
        ),
        Figure(
            f"K = {k}: bytes a token, float16 against its lossy curve",
            f"compact {sizes['half']:.0f}, ids exact, values to 2^-11",
            f"Parquet, recommended {sizes['lossy.parquet']:.0f}, values to "
            f"{_error(values, lossy, raw_values):.2g} nats",
            sizes["lossy.parquet"] / sizes["half"],
        ),
        speed_figure(
            f"K = {k}: decode compact", samples["compact"], samples["theirs"],
            label="its exact bytes, by our reader",
            note=f" ({rate_text(canonical, samples['theirs'])})",
        ),
        speed_figure(
            f"K = {k}: decode hot", samples["hot"], samples["theirs"],
            label="its exact bytes, by our reader",
        ),
        speed_figure(
            f"K = {k}: decode compact, against its lossy form", samples["compact"],
            samples["lossy"], label="its lossy bytes, by our reader",
        ),
    ]  # fmt: skip


def _write_lossy(
    table: pa.Table, raw: npt.NDArray[np.uint8], ids: npt.NDArray[np.int32], path: Path
) -> None:
    packed = pack_bits(ids, 18)
    columns = {"input_ids": table.column("input_ids")}
    for name, part in (("compressed_logprobs", raw), ("bytepacked_indices", packed)):
        inner = pa.ListArray.from_arrays(
            pa.array((np.arange(len(part) + 1) * part.shape[1]).astype(np.int32)),
            pa.array(part.reshape(-1)),
        )
        bounds = np.arange(len(part) // LENGTH + 1) * LENGTH
        columns[name] = pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), inner)
    pq.write_table(pa.table(columns), path)


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return sum(file.stat().st_size for file in files)


def _ours(path: Path) -> tuple[Any, Any]:
    """Return ids and log-probs of all heads, end to end, every byte read."""
    batches = list(rf.Dataset(str(path)).batches())
    pairs = [
        [to_numpy(flat(batch.column(f"teacher_topk_{part}")).values) for batch in batches]
        for part in ("ids", "log_probs")
    ]
    # Hot columns are mapped: copying reads them.
    return np.concatenate(pairs[0]), np.concatenate(pairs[1])


def _theirs(path: Path, codec: Codec) -> tuple[Any, Any]:
    table = pq.read_table(path, use_threads=False)
    out = []
    for name, size, decode in (
        ("bytepacked_indices", codec.index_bytes, codec.ids),
        ("compressed_logprobs", codec.value_bytes, codec.log_probs),
    ):
        inner = flat(table.column(name)).values
        out.append(decode(to_numpy(flat(inner).values).reshape(-1, size)))
    return out[0].astype(np.int32), out[1].astype(np.float32)


def _check(
    ids: npt.NDArray[np.int32],
    values: npt.NDArray[np.float32],
    contenders: dict[str, Callable[[], Any]],
) -> None:
    for name, call in contenders.items():
        got_ids, got = call()
        assert np.array_equal(got_ids.reshape(ids.shape), ids), name
        if name != "lossy":
            assert np.array_equal(got.reshape(values.shape), values), name


def _error(values: npt.NDArray[np.float32], codec: Codec, raw: npt.NDArray[np.uint8]) -> float:
    return float(np.abs(codec.log_probs(raw) - values).max())
