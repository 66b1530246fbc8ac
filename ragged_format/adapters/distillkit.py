"""DistillKit's stored teacher heads: Parquet with a compression configuration.

Row t of a sequence describes the distribution that predicts token t + 1 (predictor position), so a
sequence of L tokens has L - 1 rows of k slots. They become heads of the tokens that they predict.
Values of lossy configurations are declared approximate; those of exact ones are written back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ragged_format.adapters import _plain_yaml as plain_yaml
from ragged_format.adapters._arguments import records_of
from ragged_format.adapters._build import Columns, Draft, check_options
from ragged_format.adapters._distillkit_codec import Codec, LegacyCodec, read_config
from ragged_format.adapters._export import Samples, refuse_loss
from ragged_format.adapters._tables import HeadRows, pad_rows
from ragged_format.adapters._teacher import (
    add_teacher,
    heads_of_targets,
    shorter_heads,
    stored_heads,
    teacher_mode,
)
from ragged_format.adapters._values import malformed
from ragged_format.adapters.positions import own_to_predictor, predictor_to_own
from ragged_format.adapters.registry import Adapter, Reader, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, flat, offsets_of, to_numpy

__all__ = ["ADAPTER", "from_samples", "payloads", "to_samples", "write"]

CONFIG_NAMES = ("compression_config.yaml", "legacy_logit_compression.yaml")
# Sequences of one payload.
_CHUNK = 64


def payloads(path: str) -> Iterator[dict[str, Any]]:
    """Yield the sequences of a data set in chunks, each with the configuration.

    Parameters
    ----------
    path : str
        Directory of Parquet files with ``compression_config.yaml`` (or
        ``legacy_logit_compression.yaml``), or one such file beside its configuration.

    Raises
    ------
    ConversionError
        There is no Parquet file, or no configuration (``RF-A011``).
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    files = sorted(folder.glob("*.parquet")) if Path(path).is_dir() else [Path(path)]
    config = next((folder / name for name in CONFIG_NAMES if (folder / name).exists()), None)
    if not files or config is None:
        raise ConversionError(
            "a DistillKit data set has Parquet files and a configuration", code="RF-A011",
            where=Where(file=path), expected=" or ".join(CONFIG_NAMES),
            got="no Parquet file" if not files else "no configuration",
        )  # fmt: skip
    settings = plain_yaml.parse(config.read_text(), Where(file=str(config)))
    for file in files:
        first = 0
        with pq.ParquetFile(file) as source:
            for rows in source.iter_batches(_CHUNK):
                yield {"rows": rows, "config": settings, "file": str(file), "first_row": first}
                first += rows.num_rows


def to_samples(
    payloads: Iterable[Mapping[str, Any]],
    vocab_size: int | None = None,
    *,
    columns: Columns = None,
    schema: pa.Schema | None = None,
    logprobs_mode: Literal["processed", "raw"] = "raw",
    teacher_temperature: float | None = None,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return stored heads as one batch of samples, one per sequence (or packed segment).

    Guarantees: every slot is stored or counted in `report`. Unfilled slots hold -inf and an
    arbitrary id: they are dropped and counted. Scored are the tokens that a row predicts; where
    ``attention_mask`` numbers the segments of a packed sequence, each is a sample, and rows that
    predict the first token of the next one are dropped and counted.

    Parameters
    ----------
    payloads : iterable of mappings
        As :func:`payloads` yields them: ``rows`` (a record batch with ``input_ids`` and
        ``compressed_logprobs`` with ``bytepacked_indices``, or ``packed_indices`` with
        ``exact_values`` and ``coeffs``, or ``top_values`` with ``token_ids``) and ``config``.
    vocab_size : int, optional
        Of the model. ``None``: the configuration's ``d``, which can be one more.
    columns, schema
        As in :func:`ragged_format.adapters.vllm.to_samples`.
    logprobs_mode : {"raw", "processed"}
        What the teacher's log-probs were.
    teacher_temperature : float, optional
        For the column's metadata.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        ``RF-A002`` malformed, ``RF-A005`` ids outside the vocabulary, ``RF-A006`` lengths that
        disagree, ``RF-A011`` options that do not fit.

    Examples
    --------
    Ids 3 and 9 of 11 in four bits each, and two exact values:

    >>> rows = pa.record_batch(
    ...     {
    ...         "input_ids": [[5, 3]],
    ...         "bytepacked_indices": [[[0x39]]],
    ...         "compressed_logprobs": [[[0, 0, 0, 191, 0, 0, 0, 192]]],
    ...     }
    ... )
    >>> config = {"d": 11, "k": 2, "exact_k": 2, "delta_encoding": False}
    >>> batch = to_samples([{"rows": rows, "config": config}])
    >>> batch.column("teacher_topk_ids").to_pylist()
    [[3, 9]]
    >>> batch.column("teacher_topk_log_probs").to_pylist()
    [[-0.5, -2.0]]
    """
    items = list(records_of(payloads))
    for row, item in enumerate(items):
        if not _recognizes(item):
            malformed(
                "a payload has rows and their configuration", Where(row=row),
                "what distillkit.payloads yields", item,
            )  # fmt: skip
    mode = teacher_mode(logprobs_mode, teacher_temperature)
    codecs = [read_config(item["config"]) if item.get("config") else None for item in items]
    if vocab_size is None and schema is None:
        vocab_size = max((codec.d for codec in codecs if codec is not None), default=None)
    vocab_size = check_options(vocab_size, columns, schema)
    counts = ConversionReport()
    parts = [_Sequences(item, codec, counts) for item, codec in zip(items, codecs, strict=True)]
    ids = [segment for part in parts for segment in part.segments]
    masks = [mask for part in parts for mask in part.masks]
    wheres = [where for part in parts for where in part.wheres]
    draft = Draft(ids, masks, wheres, vocab_size, counts)
    draft.records["sample_id"] = [name for part in parts for name in part.names]
    none = HeadRows(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    heads = [part.heads for part in parts] or [none]
    joined = HeadRows(
        np.concatenate([head.counts for head in heads]),
        np.concatenate([head.ids for head in heads]),
        np.concatenate([head.log_probs for head in heads]),
    )
    heads_here, _ = heads_of_targets(draft, joined)
    exact = all(codec is None or codec.is_exact for codec in codecs)
    add_teacher(draft, heads_here, mode, "compressed_logprobs", approximate=not exact)
    batch = draft.finish(columns, schema)
    counts.add_to(report)
    return batch


class _Sequences:
    """The sequences of one payload, cut into segments, with heads by own position."""

    def __init__(
        self,
        item: Mapping[str, Any],
        codec: Codec | LegacyCodec | None,
        report: ConversionReport,
    ) -> None:
        rows = item["rows"]
        file = item.get("file")
        first = int(item.get("first_row", 0))
        self._where = Where(file=file)
        tokens, offsets = flat(_column(rows, "input_ids", self._where))
        ids = to_numpy(tokens).astype(np.int64)
        report.responses.taken += rows.num_rows
        report.responses.stored += rows.num_rows
        table_ids, table_values, row_offsets = self._decoded(rows, codec)
        lengths, positions = np.diff(offsets), np.diff(row_offsets)
        wrong = (positions > np.maximum(lengths - 1, 0)) & (positions > 0)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ConversionError(
                "a sequence has fewer rows than tokens", code="RF-A006",
                where=Where(file, row=first + row, column="compressed_logprobs"),
                expected=f"at most {max(int(lengths[row]) - 1, 0)}", got=int(positions[row]),
            )  # fmt: skip
        width = table_ids.shape[1]
        by_predictor = np.zeros(len(ids), np.int64)
        at = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
        by_predictor[at < np.repeat(positions, lengths)] = width
        own = predictor_to_own(by_predictor, offsets, fill=0)
        self.heads = HeadRows(own, table_ids.reshape(-1), table_values.reshape(-1))
        self._cut(rows, ids, offsets, own, file, first, report)

    def _cut(
        self,
        rows: pa.RecordBatch,
        ids: Int64,
        offsets: Int64,
        own: Int64,
        file: str | None,
        first: int,
        report: ConversionReport,
    ) -> None:
        """Cut the tokens where the segment number changes; number 0 is padding."""
        numbers = np.ones(len(ids), np.int64)
        if "attention_mask" in rows.schema.names:
            values, bounds = flat(rows.column("attention_mask"))
            if not np.array_equal(bounds, offsets):
                raise ConversionError(
                    "attention_mask has one entry per token", code="RF-A006",
                    where=Where(file, column="attention_mask"), expected=len(ids), got=len(values),
                )  # fmt: skip
            numbers = to_numpy(values).astype(np.int64)
        starts = np.zeros(len(ids), bool)
        starts[offsets[:-1][offsets[:-1] < offsets[1:]]] = True
        starts[1:] |= numbers[1:] != numbers[:-1]
        begins = np.flatnonzero(starts)
        ends = np.append(begins[1:], len(ids))
        owner = np.searchsorted(offsets, begins, side="right") - 1
        keep = numbers[begins] != 0
        padding = np.repeat(~keep, ends - begins)
        report.noted["padding_tokens"] += int(padding.sum())
        report.head_entries.taken += int(own[padding].sum())
        report.head_entries.drop("padding", int(own[padding].sum()))
        self.heads = self.heads.keep(np.repeat(~padding, own))
        self.heads = HeadRows(own[~padding], self.heads.ids, self.heads.log_probs)
        self.segments = [ids[a:b] for a, b in zip(begins[keep], ends[keep], strict=True)]
        self.masks = [own[a:b] > 0 for a, b in zip(begins[keep], ends[keep], strict=True)]
        for mask in self.masks:
            report.noted["rows_across_segments"] += bool(mask[0])
            mask[0] = False
        sequences = (owner[keep] + first).tolist()
        several = "attention_mask" in rows.schema.names
        stem = Path(file).stem if file else "distillkit"
        self.wheres = [Where(file, row=row) for row in sequences]
        seen: Counter[int] = Counter()
        self.names = []
        for row in sequences:
            self.names.append(f"{stem}/{row}/{seen[row]}" if several else f"{stem}/{row}")
            seen[row] += 1

    def _decoded(
        self, rows: pa.RecordBatch, codec: Codec | LegacyCodec | None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Int64]:
        """Return ids and values, (positions, k) each, and the positions of each sequence."""
        names = set(rows.schema.names)
        if isinstance(codec, Codec) and {"compressed_logprobs", "bytepacked_indices"} <= names:
            raw, bounds = self._bytes(rows, "compressed_logprobs", codec.value_bytes)
            packed, others = self._bytes(rows, "bytepacked_indices", codec.index_bytes)
            self._same(bounds, others)
            return codec.ids(packed).astype(np.int64), codec.log_probs(raw), bounds
        if isinstance(codec, LegacyCodec) and {"packed_indices", "exact_values"} <= names:
            words, bounds = self._table(rows, "packed_indices")
            exact, others = self._table(rows, "exact_values", codec.exact_k)
            self._same(bounds, others)
            coefficients, others = self._table(rows, "coeffs")
            self._same(bounds, others)
            values = codec.log_probs(exact, coefficients)
            return codec.ids(words.astype(np.uint64)).astype(np.int64), values, bounds
        if {"top_values", "token_ids"} <= names:
            table, bounds = self._table(rows, "token_ids")
            values, others = self._table(rows, "top_values", table.shape[1])
            self._same(bounds, others)
            return table.astype(np.int64), values.astype(np.float64), bounds
        raise ConversionError(
            "the columns are not those of DistillKit, or not of this configuration",
            code="RF-A002", where=self._where,
            expected="compressed_logprobs and bytepacked_indices with compression_config.yaml, "
            "packed_indices, exact_values and coeffs with legacy_logit_compression.yaml, or "
            "top_values and token_ids", got=", ".join(rows.schema.names),
        )  # fmt: skip

    def _bytes(
        self, rows: pa.RecordBatch, name: str, width: int
    ) -> tuple[npt.NDArray[np.uint8], Int64]:
        table, bounds = self._table(rows, name, width)
        # Readers without the writer's schema make wider integers of them.
        narrow = table.astype(np.uint8)
        if narrow.dtype != table.dtype and (narrow != table).any():
            raise ConversionError(
                "packed bytes are below 256", code="RF-A002",
                where=Where(self._where.file, column=name), expected="0 to 255",
                got=table.max(),
            )  # fmt: skip
        return narrow, bounds

    def _table(
        self, rows: pa.RecordBatch, name: str, width: int | None = None
    ) -> tuple[npt.NDArray[Any], Int64]:
        """Return a list<list<number>> column as one table and the offsets of the sequences."""
        inner, bounds = flat(_column(rows, name, self._where))
        values, offsets = flat(inner)
        sizes = np.diff(offsets)
        width = int(sizes[0]) if width is None and len(sizes) else width or 0
        if (sizes != width).any():
            first = int(np.argmax(sizes != width))
            row = int(np.searchsorted(bounds, first, side="right")) - 1
            raise ConversionError(
                "a position has as many elements as the configuration says", code="RF-A006",
                where=Where(self._where.file, row=row, column=name,
                            position=first - int(bounds[row])),
                expected=width, got=int(sizes[first]),
            )  # fmt: skip
        return to_numpy(values).reshape(len(sizes), width), bounds

    def _same(self, bounds: Int64, others: Int64) -> None:
        if not np.array_equal(bounds, others):
            raise ConversionError(
                "ids and log-probs are of the same positions", code="RF-A006", where=self._where,
                expected=bounds.tolist()[:8], got=others.tolist()[:8],
            )  # fmt: skip


def _column(rows: pa.RecordBatch, name: str, where: Where) -> pa.Array:
    if name not in rows.schema.names:
        raise ConversionError(
            "a DistillKit data set has this column", code="RF-A002",
            where=Where(where.file, column=name), expected=name, got=", ".join(rows.schema.names),
        )  # fmt: skip
    return rows.column(name)


def from_samples(
    samples: pa.RecordBatch,
    *,
    k: int,
    d: int | None = None,
    exact_dtype: Literal["float32", "float64"] = "float32",
    lossy: bool = False,
    counts: Counter[str] | None = None,
) -> tuple[pa.Table, dict[str, Any]]:
    """Return samples as DistillKit's table in an exact configuration, and that configuration.

    Unfilled slots hold -inf and id 0; tokens without a head have a row of such slots.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Profile ``sample`` with ``teacher_topk_*``, validated.
    k : int
        Slots of a position.
    d : int, optional
        Size of the ids' domain; ``None``: the vocabulary.
    exact_dtype : {"float32", "float64"}
    lossy : bool
        Cut longer heads, and leave out columns without a place, instead of refusing.
    counts : Counter, optional
        Receives what was left out.

    Raises
    ------
    ConversionError
        Something would be lost (``RF-A001``).
    """
    carried = {
        "input_ids", "completion_mask", "teacher_topk_counts", "teacher_topk_ids",
        "teacher_topk_log_probs", "teacher_log_probs", "target_flags",
    }  # fmt: skip
    refuse_loss(samples, carried, to="DistillKit", lossy=lossy, counts=counts)
    parts = Samples(samples)
    codec = Codec(d or parts.schema.vocab_size, k, k, exact_dtype, delta_encoding=False)
    heads, _ = shorter_heads(stored_heads(parts), k, parts, lossy=lossy, counts=counts)
    by_predictor = own_to_predictor(parts.token_counts(heads.counts), parts.offsets, fill=0)
    ids = pad_rows(heads.ids, by_predictor, k, 0, np.int64)
    values = pad_rows(heads.log_probs, by_predictor, k, -np.inf, np.float64)
    lengths = np.diff(parts.offsets)
    # The last token of a sequence predicts nothing and has no row.
    keep = np.ones(len(parts.ids), bool)
    keep[parts.offsets[1:][lengths > 0] - 1] = False
    bounds = offsets_of(np.maximum(lengths - 1, 0))
    table = pa.table({
        "input_ids": _lists(parts.ids.astype(np.uint64), parts.offsets),
        "compressed_logprobs": _byte_lists(codec.pack_log_probs(values[keep]), bounds),
        "bytepacked_indices": _byte_lists(codec.pack_ids(ids[keep]), bounds),
    })  # fmt: skip
    return table, codec.to_config()


def _lists(values: npt.NDArray[Any], offsets: Int64) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def _byte_lists(table: npt.NDArray[np.uint8], bounds: Int64) -> pa.Array:
    inner = _lists(table.reshape(-1), np.arange(len(table) + 1) * table.shape[1])
    lists = pa.LargeListArray.from_arrays(pa.array(bounds), inner)
    return lists.cast(pa.list_(pa.list_(pa.uint8())))


def write(
    batches: Iterable[pa.RecordBatch],
    path: str,
    *,
    k: int,
    d: int | None = None,
    exact_dtype: Literal["float32", "float64"] = "float32",
    lossy: bool = False,
) -> dict[str, int]:
    """Write samples as a directory of Parquet files with ``compression_config.yaml``.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``; one file each.
    path : str
        Directory to make.
    k, d, exact_dtype, lossy
        As in :func:`from_samples`.
    """
    folder = Path(path)
    folder.mkdir()
    counts: Counter[str] = Counter()
    config: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        table, config = from_samples(
            batch, k=k, d=d, exact_dtype=exact_dtype, lossy=lossy, counts=counts
        )
        pq.write_table(table.cast(_STORED), folder / f"data_{number}.parquet")
        counts["sequences"] += batch.num_rows
    (folder / CONFIG_NAMES[0]).write_text(plain_yaml.dump(config))
    return dict(counts)


_BYTES = pa.list_(pa.list_(pa.uint8()))
_STORED = pa.schema([
    ("input_ids", pa.list_(pa.uint64())), ("compressed_logprobs", _BYTES),
    ("bytepacked_indices", _BYTES),
])  # fmt: skip


def _recognizes(payload: Any) -> bool:
    return isinstance(payload, Mapping) and isinstance(payload.get("rows"), pa.RecordBatch)


ADAPTER = Adapter(
    name="distillkit",
    title="DistillKit, Parquet with compression_config.yaml",
    reads=Reader(
        to_samples=to_samples, payloads=payloads, suffixes=(".parquet",), window=4,
        needs_vocab_size=False, recognizes=_recognizes,
    ),
    writes=Writer(
        write=write, profile="sample",
        makes="a directory of Parquet files and compression_config.yaml (exact values)",
    ),
)  # fmt: skip
