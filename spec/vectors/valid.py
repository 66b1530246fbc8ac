"""The valid vectors: data that every reader accepts, with the values that it must return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import zstandard

import ragged_format as rf
from ragged_format import Column, LogProb
from ragged_format.digest import digest
from spec.vectors.breaches import DRAWS, PACKED, SAMPLE, VOCAB_SIZE, Record, bare
from spec.vectors.build import Metadata, Tree, container, dataset, int64s, replaced, shard
from spec.vectors.compact import compact_file


@dataclass(frozen=True)
class Valid:
    """One valid vector: logical batches, and the bytes that hold them."""

    name: str
    description: str
    schema: pa.Schema
    batches: tuple[pa.RecordBatch, ...]
    data: bytes | Tree
    metadata: tuple[Metadata, ...] = ()


Encode = Callable[[pa.Schema, Sequence[pa.RecordBatch]], bytes]


def _valid(
    name: str,
    description: str,
    schema: pa.Schema,
    *batches: Sequence[Record],
    encode: Encode = container,
) -> Valid:
    made = tuple(
        pa.RecordBatch.from_pylist([_only(r, schema) for r in rows], schema=schema)
        for rows in batches
    )
    return Valid(name, description, schema, made, encode(schema, made))


def _only(record: Record, schema: pa.Schema) -> Record:
    return {name: record.get(name) for name in schema.names}


def full(*columns: str | Column, root_axes: Sequence[str] = ()) -> pa.Schema:
    """Return a schema whose fields declare everything, as this library's do."""
    return rf.sample_schema(vocab_size=VOCAB_SIZE, columns=columns, root_axes=root_axes)


def sample(*columns: str | Column) -> pa.Schema:
    """Return a schema whose standard columns rely on their names alone."""
    return bare(full(*columns))


def named(sample_id: str, **changes: object) -> Record:
    return {**SAMPLE, "sample_id": sample_id, **changes}


SETS = ("rollout_log_probs", "candidate_counts", "candidate_ids", "candidate_log_probs")
NO_TARGETS: Record = {
    **{name: [] for name, value in SAMPLE.items() if isinstance(value, list)},
    **{name: [] for name in ("old_log_probs", "ref_log_probs", "policy_versions")},
    "input_ids": [3, 4],
    "completion_mask": [0, 0],
}
NO_TOKENS: Record = {**NO_TARGETS, "completion_mask": [], "input_ids": []}
NOTHING: Record = {
    "input_ids": [], "position_ids": [], "node_lengths": [], "node_parents": [], "pred_index": [],
    "target_ids": [], "member_index": [], "rollout_log_probs": [], "member_sample_id": [],
    "member_reward": [], "member_metrics": [], "member_leaf": [], "member_lengths": [],
}  # fmt: skip
SEQUENCES: Record = {
    "input_ids": [1, 2, 3, 1, 4], "position_ids": [0, 1, 2, 0, 1], "node_lengths": [3, 2],
    "node_parents": [-1, -1], "pred_index": [0, 1, 3], "target_ids": [2, 3, 4],
    "member_index": [0, 0, 1], "rollout_log_probs": [-0.5, -0.25, -1.0],
    "member_sample_id": ["e", "f"], "member_reward": [1.0, -1.0], "member_metrics": [None, None],
    "member_leaf": [0, 1], "member_lengths": [3, 2],
}  # fmt: skip
# One token per node but the first; a member ends inside the tree, two have the same tokens.
DEEP: Record = {
    "input_ids": [1, 2, 3, 4, 5, 6], "position_ids": [0, 1, 2, 3, 3, 2],
    "node_lengths": [2, 1, 1, 1, 1], "node_parents": [-1, 0, 1, 1, 0],
    "pred_index": [2, 1, 2, 2, 1, 0], "target_ids": [4, 3, 5, 5, 6, 2],
    "member_index": [0, 1, 1, 2, 3, 4],
    "rollout_log_probs": [-0.5, -0.25, -1.0, -1.0, -2.0, -3.0],
    "member_sample_id": ["g", "h", "i", "j", "k"], "member_reward": [None] * 5,
    "member_metrics": [None] * 5, "member_leaf": [2, 3, 3, 4, 1],
    "member_lengths": [4, 4, 4, 3, 3],
}  # fmt: skip


def _first_offset(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> bytes:
    """Write lists that begin behind an unused value: Arrow's own writer never does."""
    grown: list[Record] = []
    for row in batches[0].to_pylist():
        first = {"input_ids": [99], "completion_mask": [1]} if not grown else {}
        grown.append({k: (first.get(k, []) + v if k in first else v) for k, v in row.items()})
    batch = pa.RecordBatch.from_pylist(grown, schema=schema)
    lengths = [len(row["input_ids"]) for row in grown]
    old = int64s(0, lengths[0], sum(lengths))
    data = container(schema, [batch], digests=_digests(batches))
    return replaced(data, old, int64s(1) + old[8:], count=2)


def _digests(batches: Sequence[pa.RecordBatch]) -> list[bytes]:
    return [digest(batch) for batch in batches]


def _compressed(method: str) -> Encode:
    return lambda schema, batches: container(schema, batches, compression=method)


def _file(compression: str | None = None) -> Encode:
    return lambda schema, batches: container(schema, batches, file=True, compression=compression)


def _zstd_frames(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> bytes:
    """Two frames, cut inside a message."""
    data = container(schema, batches)
    compressor = zstandard.ZstdCompressor(level=3)
    middle = len(data) // 2 + 1
    return compressor.compress(data[:middle]) + compressor.compress(data[middle:])


def _next_minor() -> pa.Schema:
    """Return a schema as version 0.2 could have it, with columns and keys unknown to 0.1."""
    counts = Column("novel_counts", "target", pa.int32(), opens="novel")
    schema = full("rollout_log_probs", counts, Column("novel_values", "novel", pa.float32()))
    fields = []
    for field in schema:
        extra = {"ragged_format:novel_flag": "7"} if field.name.startswith("novel") else {}
        fields.append(field.with_metadata({**field.metadata, **extra}))
    extra = {"ragged_format:version": "0.2", "ragged_format:novel": "yes"}
    return pa.schema(fields, metadata={**schema.metadata, **extra})


def _unknown_metadata() -> pa.Schema:
    schema = full("reward")
    fields = [f.with_metadata({**f.metadata, "team:unit": "points"}) for f in schema]
    extra = {"team:run": "7", "ragged_format:hint": "unknown but optional", "é": "語"}
    return pa.schema(fields, metadata={**schema.metadata, **extra})


OWN = (
    Column("image_size", "record", pa.int32(), shape=(2,)),
    Column("blob", "record", pa.binary(), nullable=True),
    Column("routed_experts", "token", pa.int16(), shape=(2, 2), fill=-1),
    Column("words", "token", pa.string()),
    Column("kin_counts", "token", pa.uint8(), opens="kin", head_kind="top_k"),
    Column("kin_ids", "kin", pa.int64(), fill=-1),
    Column("kin_log_probs", "kin", pa.float64(), log_prob=LogProb("raw", "vocabulary")),
    Column("kept_mask", "target", pa.int8(), opens="kept", mask=True),
    Column("kept_notes", "kept", pa.uint16()),
    Column("frame_times", "frame", pa.float64()),
    Column("box_counts", "frame", pa.int32(), opens="box"),
    Column("boxes", "box", pa.float32(), shape=(4,)),
)
OWN_FIRST: Record = {
    "image_size": [640, 480], "blob": b"\x00\xff",
    "routed_experts": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [-1, -1, -1, -1]],
    "words": ["The", "", "é", "語"], "kin_counts": [1, 0, 2, 0], "kin_ids": [7, 0, 99],
    "kin_log_probs": [-0.5, -0.75, -1.5], "kept_mask": [0, 1], "kept_notes": [65535],
    "frame_times": [0.0, 0.04, 0.08], "box_counts": [1, 0, 2],
    "boxes": [[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]],
}  # fmt: skip
OWN_SECOND: Record = {
    **NO_TOKENS, "image_size": [0, 0], "blob": None, "routed_experts": [], "words": [],
    "kin_counts": [], "kin_ids": [], "kin_log_probs": [], "kept_mask": [], "kept_notes": [],
    "frame_times": [1.5], "box_counts": [0], "boxes": [],
}  # fmt: skip
ALL = (
    *(name for name in SAMPLE if name not in ("sample_id", "input_ids", "completion_mask")
      and not name.endswith("_weights")),
    "loss_weights", "rollout_id", "policy_version", "finish_reason", "teacher_id", "env_name",
    "old_log_probs", "ref_log_probs", "policy_versions",
)  # fmt: skip
ALL_VALUES: Record = {
    "rollout_id": "r", "policy_version": 12, "finish_reason": "stop", "teacher_id": None,
    "env_name": "math", "old_log_probs": [-0.5, -1.25], "ref_log_probs": [-0.75, -1.5],
    "policy_versions": [12, 13],
}  # fmt: skip
NULLS: Record = {f.name: None for f in sample(*ALL) if f.nullable}
HALF = (
    *("topk_counts", "topk_ids"),
    replace(rf.standard_column("topk_log_probs"), type=pa.float16()),
    *("teacher_topk_counts", "teacher_topk_ids"),
    replace(rf.standard_column("teacher_topk_log_probs"), type=pa.float16()),
    replace(rf.standard_column("advantages"), type=pa.float64()),
)
ROUGH = replace(rf.standard_column("teacher_topk_log_probs"), approximate=True)
LOGITS = replace(rf.standard_column("topk_log_probs"), log_prob=LogProb("raw", value="logit"))
TUNED = LogProb("processed", "vocabulary", temperature=0.7)


def _packed(*columns: str | Column) -> pa.Schema:
    names = ("rollout_log_probs", "member_reward", "member_metrics")
    return bare(rf.packed_schema(vocab_size=VOCAB_SIZE, columns=[*names, *columns]))


def _with_own_axis() -> Valid:
    """Return a packed record whose members open an axis of the samples' own."""
    counts = Column("member_frame_counts", "member", pa.int32(), opens="frame")
    schema = _packed(Column("frame_times", "frame", pa.float64()), counts)
    record = {**PACKED, "member_frame_counts": [2, 1], "frame_times": [0.0, 0.5, 0.25]}
    text = "Members open an axis that samples open themselves."
    return _valid("packed-own-axis", text, schema, [record])


def _with_batch_metadata() -> Valid:
    schema = sample()
    batches = tuple(
        pa.RecordBatch.from_pylist([_only(named(name), schema)], schema=schema) for name in "ab"
    )
    metadata = ({b"cursor": b"17", b"team:note": b""}, {b"raw": b"\x00\xff"})
    data = container(schema, batches, metadata=metadata)
    text = "Batches carry custom metadata of the writer, bytes that are not text among it."
    return Valid("sample-batch-metadata", text, schema, batches, data, metadata)


def _dataset() -> Valid:
    """Return a dataset of two shards, and a file that its manifest does not list."""
    schema = sample("reward")
    batches = tuple(
        pa.RecordBatch.from_pylist([_only(named(i), schema) for i in ids], schema=schema)
        for ids in ("ab", "c")
    )
    shards = [shard(number, batch) for number, batch in enumerate(batches)]
    tree = dataset(schema, *shards, lineage={"source": "vectors", "runs": [1, 2.5, None]})
    tree["shard-00000000deadbeef-00009.arrow"] = b"of nobody"
    text = "A dataset of two shards; a file that the manifest does not list is nobody's."
    return Valid("dataset-two-shards", text, schema, batches, tree)


HEADS = ("topk_counts", "topk_ids", "topk_log_probs")
# The sampled token 8 is not in its head, so that its log-prob is kept; 50 is in no set.
LACKING: Record = {
    "topk_counts": [2, 1], "topk_ids": [2, 50, 9], "topk_log_probs": [-1.5, -2.5, -1.5],
    "candidate_counts": [4, 1], "candidate_ids": [0, 2, 8, 99, 9],
    "candidate_log_probs": [-3.0, -1.5, -0.5, -4.0, 0.0],
}  # fmt: skip
PACKED_SETS: Record = {
    "candidate_counts": [2, 0, 3], "candidate_ids": [3, 9, 4, 5, 99],
    "topk_counts": [1, 1, 2], "topk_ids": [9, 4, 5, 9], "topk_log_probs": [-1.0, -0.25, -1.0, -3.0],
}  # fmt: skip


def _compact() -> list[Valid]:
    """Return compact files that use every transform, and a dataset in both encodings."""
    sets = sample(*SETS, *HEADS)
    first = named("a", rollout_log_probs=[-0.5, -0.25])
    rows: tuple[list[Record], ...] = (
        [first, named("b", **NO_TARGETS), named("c", **LACKING)], [], [named("d", **NO_TOKENS)],
    )  # fmt: skip
    pair = sample(*SETS), [named("a"), named("b")], [named("c", **NO_TARGETS)]
    hot, cold = _valid("", "", *pair).batches
    shards = shard(0, hot), shard(1, cold, compact=compact_file(cold.schema, [cold]))
    tree = dataset(hot.schema, *shards)
    return [
        _valid("compact-sample", "A compact file with every transform, and empty batches.", sets,
               *rows, encode=compact_file),
        _valid("compact-packed", "A compact file of packed records with sets and heads.",
               _packed("candidate_counts", "candidate_ids", *HEADS),
               [{**PACKED, **PACKED_SETS}], encode=compact_file),
        _valid("compact-own-columns", "A compact file of own columns on own axes.",
               full(*OWN, root_axes=["frame"]),
               [named("a", **OWN_FIRST), named("b", **OWN_SECOND)], encode=compact_file),
        Valid("dataset-compact", "A dataset of a hot and a compact shard.", hot.schema,
              (hot, cold), tree),
    ]  # fmt: skip


def valid_vectors() -> list[Valid]:
    """Return all valid vectors, by name."""
    extremes = {
        "sample_id": "é語\U0001f40d", "group_id": "", "policy_version": -(2**63),
        "input_ids": [0, 99, 0, 99], "candidate_counts": [1, 2], "candidate_ids": [0, 0, 99],
        "candidate_log_probs": [0.0, -30000.0, 0.00009], "rollout_log_probs": [-0.0, 0.0],
    }  # fmt: skip
    flagged = {
        "target_flags": [1 | 8, 2 | 4 | 16], "candidate_counts": [0, 0], "candidate_ids": [],
        "candidate_log_probs": [], "topk_counts": [0, 1], "topk_ids": [9], "topk_log_probs": [-0.5],
        "rollout_log_probs": [-0.5, 0.0], "teacher_topk_counts": [1, 0], "teacher_topk_ids": [4],
        "teacher_topk_log_probs": [-0.5], "teacher_log_probs": [-0.75, 0.0],
    }  # fmt: skip
    batches: tuple[list[Record], ...] = (
        [named("a"), named("b", **NO_TARGETS)], [], [named("c", **NO_TOKENS)], [named("d")],
    )  # fmt: skip
    return [
        _valid("sample-zero-batches", "A stream of no batches: schema and trailer only.",
               full(*SETS)),
        _valid("sample-zero-rows", "A batch without records, before the trailer.", full(*SETS),
               []),
        _valid("sample-empty-records", "Records without tokens, and without targets.",
               full(*SETS), [named("a", **NO_TOKENS), named("b", **NO_TARGETS)]),
        _valid("sample-one-record", "The three required columns only.", full(), [named("a")]),
        _valid("sample-all-columns", "Every standard column but weights; then every null allowed.",
               full(*ALL), [named("a", **ALL_VALUES),
                              named("b", **{**ALL_VALUES, **NO_TARGETS, **NULLS})]),
        _valid("sample-many-batches", "Several batches, one of them empty; bare fields.",
               sample(*SETS), *batches),
        _valid("sample-first-offset", "Lists whose first offset is 1.", sample(),
               [named("a", input_ids=[5, 6], completion_mask=[0, 1]),
                named("b", input_ids=[7], completion_mask=[0])], encode=_first_offset),
        _valid("sample-lz4", "Buffers compressed with LZ4.", sample(*SETS), *batches,
               encode=_compressed("lz4")),
        _valid("sample-zstd", "Buffers compressed with zstd.", sample(*SETS), *batches,
               encode=_compressed("zstd")),
        _valid("sample-in-zstd-frames", "The whole stream inside two zstd frames.",
               sample(*SETS), *batches, encode=_zstd_frames),
        _valid("sample-unknown-metadata", "Unknown optional keys, of others and of this format.",
               _unknown_metadata(), [named("a")]),
        _valid("sample-next-minor", "Version 0.2 with a column and keys that 0.1 does not know.",
               _next_minor(), [named("a", novel_counts=[2, 0], novel_values=[1.5, -2.0])]),
        _valid("sample-own-columns", "Own columns of all kinds, on own axes, one a root axis.",
               full(*OWN, root_axes=["frame"]),
               [named("a", **OWN_FIRST), named("b", **OWN_SECOND)]),
        _valid("sample-flags", "Every flag set, and what it calls missing absent.",
               sample("target_flags", *SETS, "topk_counts", "topk_ids", "topk_log_probs",
                      "teacher_topk_counts", "teacher_topk_ids", "teacher_topk_log_probs",
                      "teacher_log_probs"), [named("a", **flagged)]),
        _valid("sample-float16", "Heads in float16, per-token advantages in float64.",
               sample(*HALF),
               [named("a", topk_counts=[1, 2], topk_ids=[8, 9, 2],
                      topk_log_probs=[-0.1000366, -0.69287109375, -0.69287109375])]),
        _valid("sample-draws", "A head of random draws: repeated ids, in no order, with weights.",
               sample(*DRAWS), [named("a", topk_ids=[8, 8, 9], topk_log_probs=[-3.0, -0.5, 0.0],
                                      topk_weights=[2.0, 0.5, 1.0])]),
        _valid("sample-approximate", "A lossy head: positive, rising, of too much mass.",
               sample("teacher_topk_counts", "teacher_topk_ids", ROUGH),
               [named("a", teacher_topk_log_probs=[-0.25, 0.125])]),
        _valid("sample-logits", "A head of logits.", sample("topk_counts", "topk_ids", LOGITS),
               [named("a", topk_log_probs=[12.5, 9.0, -1.0])]),
        _valid("sample-log-prob-modes", "Log-probs over the vocabulary, at one temperature.",
               sample(replace(rf.standard_column("rollout_log_probs"), log_prob=TUNED)),
               [named("a")]),
        _valid("sample-support-head", "A head of the whole candidate set.",
               sample(replace(rf.standard_column("topk_counts"), head_kind="support"), "topk_ids",
                      "topk_log_probs"), [named("a")]),
        _valid("sample-extremes", "Smallest and largest ids, log-probs at the edges, odd text.",
               sample("group_id", "policy_version", *SETS), [{**SAMPLE, **extremes}]),
        _valid("packed-tree", "Members share prefixes; one ends inside the tree; one empty record.",
               _packed(), [PACKED, NOTHING, DEEP]),
        _valid("packed-sequence", "Members end to end, nothing shared.", _packed(), [SEQUENCES]),
        _with_own_axis(),
        _with_batch_metadata(),
        _valid("file-sample", "A file of several batches.", sample(*SETS), *batches,
               encode=_file()),
        _valid("file-sample-zstd", "A file with compressed buffers.", sample(*SETS), *batches,
               encode=_file("zstd")),
        _valid("file-packed", "A file of packed records.", _packed(), [PACKED, NOTHING], [],
               encode=_file()),
        _valid("file-zero-batches", "A file of no batches.", sample(), encode=_file()),
        _dataset(),
        *_compact(),
    ]  # fmt: skip
