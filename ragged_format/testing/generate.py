"""Valid sample batches of any schema from a random generator, vectorised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.lists import Int64, offsets_of, segment_sums, to_list
from ragged_format.parse import parse_schema
from ragged_format.schema import RECORD, Column, RaggedSchema

__all__ = ["distinct_ids", "fill_batch", "log_probs"]

Values = npt.NDArray[Any]

# Bits of target_flags with the columns that hold nothing (count 0, value 0.0) where one is set.
FLAGS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ("candidate_counts",)),
    (2, ("candidate_counts",)),
    (4, ("rollout_log_probs",)),
    (8, ("topk_counts",)),
    (16, ("teacher_topk_counts", "teacher_log_probs")),
)
FLAG_BITS = {
    name: sum(bit for bit, names in FLAGS if name in names)
    for _, columns in FLAGS
    for name in columns
}
_STRINGS = ("", "a", "ragged", "é", "語彙", "\U0001f40d", "x" * 40)
_FINISH = ("stop", "length", "abort")
# Below 1, so that rounding to float16 cannot push the mass of a head above 1.
_MASS = 0.9


def fill_batch(
    schema: pa.Schema,
    rng: np.random.Generator,
    lengths: npt.ArrayLike,
    *,
    given: Mapping[str, Values] | None = None,
    scored: float = 0.5,
    max_width: int = 6,
    flagged: float = 0.1,
    nulls: float = 0.25,
    prefix: str = "s",
) -> pa.RecordBatch:
    """Return a valid batch of the ``sample`` profile with these token lengths.

    Every rule of the format holds: ids in range, sets ascending with the sampled token in them,
    heads ordered, unique and of a mass below 1, flags that agree with the counts.

    Parameters
    ----------
    schema : pyarrow.Schema
        Schema of profile ``sample``, with any standard and own columns.
    rng : numpy.random.Generator
        Source of all values; equal states give equal batches.
    lengths : (n,) int
        Tokens of each record; 0 is allowed.
    given : mapping of str to ndarray, optional
        Flat values of columns that are not to be drawn. Counts need the columns of their axis too.
    scored : float
        Share of the tokens that are targets; the first token never is.
    max_width : int
        Largest candidate set, head and own count.
    flagged : float
        Share of the targets that carry each flag, where the schema has ``target_flags``.
    nulls : float
        Share of nulls in nullable record columns.
    prefix : str
        Start of the sample ids, for ids that are unique over several batches.

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=50, columns=["candidate_counts", "candidate_ids"])
    >>> batch = fill_batch(schema, np.random.default_rng(0), [3, 0])
    >>> batch.column("sample_id").to_pylist(), [len(ids) for ids in batch["input_ids"].to_pylist()]
    (['s-0', 's-1'], [3, 0])
    """
    token_lengths = np.asarray(lengths, np.int64)
    declared = parse_schema(schema)
    draw = _Draw(declared, rng, dict(given or {}), scored, max_width, flagged, nulls, prefix)
    return draw.batch(token_lengths)


class _Draw:
    """The state of one draw: flat values by column, record offsets by axis."""

    def __init__(
        self, schema: RaggedSchema, rng: np.random.Generator, values: dict[str, Any],
        scored: float, max_width: int, flagged: float, nulls: float, prefix: str,
    ) -> None:  # fmt: skip
        self.schema = schema
        self.rng = rng
        self.values = values
        self.scored = scored
        self.max_width = max_width
        self.flagged = flagged
        self.nulls = nulls
        self.prefix = prefix
        self.offsets: dict[str, Int64] = {}

    def batch(self, token_lengths: Int64) -> pa.RecordBatch:
        rows = len(token_lengths)
        roots = [axis.name for axis in self.schema.children(RECORD)]
        for name in roots:
            lengths = token_lengths if name == "token" else self.rng.integers(0, 4, rows)
            self.offsets[name] = offsets_of(lengths)
        for name in [axis for root in roots for axis in self.schema.below(root)]:
            self.fill_axis(name)
        for column in self.schema.on(RECORD):
            if column.name not in self.values:
                self.values[column.name] = self.record_values(column, rows)
        arrays = [
            _scalars(self.values[column.name], column)
            if column.axis == RECORD
            else to_list(self.values[column.name], self.offsets[column.axis], column)
            for column in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema.to_arrow())

    def fill_axis(self, axis: str) -> None:
        offsets = self.offsets[axis]
        if axis == "target":
            self.fill_targets(int(offsets[-1]))
        for column in self.schema.on(axis):
            if column.name not in self.values:
                self.values[column.name] = self.axis_values(column, offsets)
            if column.opens is not None:
                counts = np.asarray(self.values[column.name], np.int64)
                self.offsets[column.opens] = offsets_of(segment_sums(counts, offsets))

    def fill_targets(self, size: int) -> None:
        """Draw what belongs together: flags, sets with the sampled token, heads."""
        sampled = self.values["input_ids"][self.values["completion_mask"] != 0]
        flags = self.draw_flags(size) if "target_flags" in self.schema else np.zeros(size, np.uint8)
        self.values.setdefault("target_flags", flags)
        flags = self.values["target_flags"]
        for axis in self.schema.children("target"):
            counts = self.schema[str(axis.counts)]
            if counts.head_kind is not None and counts.name not in self.values:
                missing = flags & FLAG_BITS.get(counts.name, 0) != 0
                self.fill_head(axis.name, counts, missing, sampled)
        for name in ("rollout_log_probs", "teacher_log_probs"):
            if name in self.schema and name not in self.values:
                drawn = -self.rng.exponential(1.0, size)
                self.values[name] = np.where(flags & FLAG_BITS[name] != 0, 0.0, drawn)

    def fill_head(self, axis: str, column: Column, missing: Values, sampled: Values) -> None:
        """Draw a set, ascending with the sampled token in it, or a head, likeliest first."""
        rng, vocab = self.rng, self.schema.vocab_size
        high = min(self.max_width, np.iinfo(column.type.to_pandas_dtype()).max)
        counts = rng.integers(0, high, len(sampled), endpoint=True)
        counts[missing] = 0
        is_set = column.head_kind == "set"
        counts, ids = distinct_ids(rng, counts, vocab, include=sampled if is_set else None)
        values = log_probs(rng, counts)
        if not is_set:
            owner = np.repeat(np.arange(len(counts)), counts)
            ids = ids[np.lexsort((rng.random(len(ids)), owner))]
            values = values[np.lexsort((-values, owner))]
        self.values[column.name] = counts
        self.values[f"{axis}_ids"], self.values[f"{axis}_log_probs"] = ids, values

    def draw_flags(self, size: int) -> Values:
        flags = np.zeros(size, np.uint8)
        for bit, columns in FLAGS:
            if any(name in self.schema for name in columns):
                flags |= np.where(self.rng.random(size) < self.flagged, bit, 0).astype(np.uint8)
        # A support that is missing is not also too large.
        return np.where((flags & 3) == 3, flags & ~np.uint8(2), flags).astype(np.uint8)

    def axis_values(self, column: Column, offsets: Int64) -> Values:
        rng, size = self.rng, int(offsets[-1])
        if column.name == "input_ids":
            return rng.integers(0, self.schema.vocab_size, size, dtype=np.int32)
        if column.name == "completion_mask":
            mask: Values = (rng.random(size) < self.scored).astype(np.uint8)
            mask[offsets[:-1][np.diff(offsets) > 0]] = 0
            return mask
        if column.mask:
            return rng.integers(0, 2, size).astype(column.type.to_pandas_dtype())
        if column.opens is not None:
            high = min(self.max_width, np.iinfo(column.type.to_pandas_dtype()).max)
            return rng.integers(0, high, size, endpoint=True)
        if column.name == f"{column.axis}_weights":
            return rng.integers(1, 5, size).astype(np.float32)
        if column.name == "loss_weights":
            return rng.choice(np.array([0.0, 0.5, 1.0], np.float32), size)
        if column.name == "policy_versions":
            return rng.integers(0, 5, size)
        if column.log_prob is not None:
            drawn: Values = -rng.exponential(1.0, (size, *_flat_shape(column)))
            return drawn
        own: Values = _own_values(column, size, rng, special=column.name != "advantages")
        return own

    def record_values(self, column: Column, rows: int) -> Any:
        rng, name = self.rng, column.name
        values: Any
        if name == "sample_id":
            return [f"{self.prefix}-{i}" for i in range(rows)]
        if name == "policy_version" and "policy_versions" in self.values:
            return _oldest(self.values["policy_versions"], self.offsets["target"])
        if name in {"group_id", "rollout_id", "teacher_id", "env_name"}:
            values = [f"{name[:-3]}-{i // 2}" for i in range(rows)]
        elif name == "finish_reason":
            values = [_FINISH[i] for i in rng.integers(0, len(_FINISH), rows)]
        elif name in {"metrics", "provenance"}:
            values = [f'{{"{name}": {i}}}' for i in range(rows)]
        elif name in {"branch_index", "policy_version", "token_offset"}:
            values = rng.integers(0, 5, rows)
        elif name == "temperature":
            values = rng.choice([0.5, 0.7, 1.0], rows)
        else:
            values = _own_values(column, rows, rng, special=name not in {"reward", "advantage"})
        if not column.nullable:
            return values
        return pa.array(values, column.type, mask=rng.random(rows) < self.nulls)


def _scalars(values: Any, column: Column) -> pa.Array:
    if isinstance(values, pa.Array):
        return values.cast(column.arrow_type)
    if column.shape:
        child = pa.array(np.ascontiguousarray(values).reshape(-1), column.type)
        return pa.FixedSizeListArray.from_arrays(child, type=column.arrow_type)
    return pa.array(values, column.type)


def _flat_shape(column: Column) -> tuple[int, ...]:
    return (column.width,) if column.shape else ()


def _oldest(versions: Values, offsets: Int64) -> pa.Array:
    versions = np.asarray(versions, np.int64)
    full = np.diff(offsets) > 0
    oldest = np.zeros(len(full), np.int64)
    if full.any():
        oldest[full] = np.minimum.reduceat(versions, offsets[:-1][full])
    return pa.array(oldest, mask=~full)


def _own_values(column: Column, size: int, rng: np.random.Generator, *, special: bool) -> Any:
    """Draw any values that the type holds, its extremes among them."""
    shape = (size, *_flat_shape(column))
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        pool = pa.array(_STRINGS).cast(column.type)
        return pool.take(pa.array(rng.integers(0, len(pool), size)))
    dtype = column.type.to_pandas_dtype()
    if pa.types.is_integer(column.type):
        info = np.iinfo(dtype)
        drawn = rng.integers(0, 100, shape).astype(dtype)
        ends = rng.choice(np.array([info.min, info.max], dtype), shape)
        return np.where(rng.random(shape) < 0.1, ends, drawn)
    numbers = rng.normal(0.0, 1.0, shape).astype(dtype)
    if special:
        odd = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 0.0], dtype), shape)
        numbers = np.where(rng.random(shape) < 0.1, odd, numbers)
    return numbers


def distinct_ids(
    rng: np.random.Generator,
    counts: npt.ArrayLike,
    vocab_size: int,
    *,
    include: Values | None = None,
    ids: Values | None = None,
) -> tuple[Int64, Int64]:
    """Draw ascending sets of ids with at most these counts, one set per entry.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of the ids.
    counts : (m,) int
        Ids drawn for each set; repeats fall out, so the set can be smaller, but not empty.
    vocab_size : int
        Ids are below it.
    include : (m,) int, optional
        An id that each set with a count above 0 contains.
    ids : (sum of counts,) int, optional
        Ids to use instead of uniform ones.

    Returns
    -------
    counts : (m,) int64
        Size of each set.
    ids : (t,) int64
        The sets end to end, strictly ascending in each.
    """
    wanted = np.asarray(counts, np.int64)
    total = int(wanted.sum())
    drawn = rng.integers(0, vocab_size, total) if ids is None else np.array(ids, np.int64)
    if include is not None:
        full = wanted > 0
        drawn[(np.cumsum(wanted) - wanted)[full]] = np.asarray(include, np.int64)[full]
    owner = np.repeat(np.arange(len(wanted)), wanted)
    keys = np.sort(owner * vocab_size + drawn)
    keys = keys[np.diff(keys, prepend=-1) > 0]
    return np.bincount(keys // vocab_size, minlength=len(wanted)), keys % vocab_size


def log_probs(rng: np.random.Generator, counts: npt.ArrayLike, *, mass: float = _MASS) -> Values:
    """Draw log-probs, (t,) float64, that sum to `mass` in each segment of these counts."""
    segments = np.asarray(counts, np.int64)
    logits: Values = rng.exponential(2.0, int(segments.sum()))
    full = segments[segments > 0]
    if not len(full):
        return logits
    sums = np.add.reduceat(np.exp(logits - logits.max()), np.cumsum(full) - full)
    logits -= logits.max() + np.repeat(np.log(sums), full) - np.log(mass)
    return logits
