"""Breaches of every invariant: a good record, and one that breaks exactly one rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

import ragged_format as rf
from ragged_format import Column, LogProb
from ragged_format.profiles import STANDARD

VOCAB_SIZE = 100
INFINITY = math.inf
NAN = math.nan
Record = dict[str, Any]


@dataclass(frozen=True)
class Breach:
    """One way to break one rule.

    `good` is a valid record; `bad` breaks the rule `code` and no other, at `column` and `position`.
    """

    code: str
    name: str
    schema: pa.Schema
    good: Record
    bad: Record
    column: str
    position: int | None = None

    @property
    def stem(self) -> str:
        return f"{self.code}-{self.name}"

    def batch(self, *records: Record) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist(list(records), schema=self.schema)


# Two targets (the tokens 8 and 9), one candidate set, one head.
SAMPLE: Record = {
    "sample_id": "good",
    "group_id": "g",
    "branch_index": 0,
    "temperature": 1.0,
    "reward": 0.5,
    "advantage": None,
    "metrics": '{"turns":1}',
    "provenance": None,
    "token_offset": 0,
    "input_ids": [5, 7, 8, 9],
    "completion_mask": [0, 0, 1, 1],
    "loss_weights": [1.0, 0.5],
    "rollout_log_probs": [-0.5, -1.5],
    "advantages": [0.5, -0.5],
    "target_flags": [0, 0],
    "candidate_counts": [3, 0],
    "candidate_ids": [2, 8, 30],
    "candidate_log_probs": [-3.0, -0.5, -1.5],
    "topk_counts": [2, 1],
    "topk_ids": [8, 2, 9],
    "topk_log_probs": [-0.5, -3.0, -0.25],
    "topk_weights": [2.0, 1.0, 3.0],
    "teacher_topk_counts": [0, 2],
    "teacher_topk_ids": [9, 4],
    "teacher_topk_log_probs": [-0.5, -2.0],
    "teacher_log_probs": [-0.75, -0.5],
}

# Two members share the node [1, 2]; each then has a node of its own, of which it scores a part.
PACKED: Record = {
    "input_ids": [1, 2, 3, 4, 5],
    "position_ids": [0, 1, 2, 3, 2],
    "node_lengths": [2, 2, 1],
    "node_parents": [-1, 0, 0],
    "pred_index": [1, 2, 1],
    "target_ids": [3, 4, 5],
    "member_index": [0, 0, 1],
    "rollout_log_probs": [-0.5, -0.25, -1.0],
    "member_sample_id": ["a", "b"],
    "member_reward": [0.5, None],
    "member_metrics": [None, "{}"],
    "member_leaf": [1, 2],
    "member_lengths": [4, 3],
}


def _edit(record: Record, edits: Record) -> Record:
    """Return `record` with values replaced; a key ``column:i`` replaces one element."""
    out = dict(record)
    for key, value in edits.items():
        name, _, element = key.partition(":")
        if element:
            out[name] = [*out[name][: int(element)], value, *out[name][int(element) + 1 :]]
        else:
            out[name] = value
    return out


def bare(schema: pa.Schema) -> pa.Schema:
    """Leave out declarations that standard names imply: it makes the vectors much smaller."""
    parsed = rf.parse_schema(schema)
    fields = [
        field.remove_metadata() if parsed[field.name] == STANDARD[parsed.profile].get(field.name)
        else field
        for field in schema
    ]  # fmt: skip
    return pa.schema(fields, metadata=schema.metadata)


def sample(
    code: str,
    name: str,
    at: str | tuple[str, int],
    edits: Record,
    *columns: str | Column,
    good: Record | None = None,
) -> Breach:
    """Return a breach of profile ``sample`` with these optional columns only."""
    schema = bare(rf.sample_schema(vocab_size=VOCAB_SIZE, columns=columns))
    base = {key: (good or {}).get(key, SAMPLE.get(key)) for key in schema.names}
    column, position = (at, None) if isinstance(at, str) else at
    bad = _edit(base, {"sample_id": "bad", **edits})
    return Breach(code, name, schema, base, bad, column, position)


def packed(
    code: str, name: str, at: str | tuple[str, int | None], edits: Record, *columns: str
) -> Breach:
    """Return a breach of profile ``packed`` with these optional columns only."""
    schema = bare(rf.packed_schema(vocab_size=VOCAB_SIZE, columns=columns))
    base = {key: PACKED[key] for key in schema.names}
    column, position = (at, None) if isinstance(at, str) else at
    bad = _edit(base, {"member_sample_id": ["c", "d"], **edits})
    return Breach(code, name, schema, base, bad, column, position)


def _with(name: str, **changes: Any) -> Column:
    return replace(rf.standard_column(name), **changes)


SET = ("candidate_counts", "candidate_ids")
SET_LOG_PROBS = (*SET, "candidate_log_probs")
TOPK = ("topk_counts", "topk_ids", "topk_log_probs")
DRAWS = (_with("topk_counts", head_kind="draws"), *TOPK[1:], "topk_weights")
TEACHER = ("teacher_topk_counts", "teacher_topk_ids", "teacher_topk_log_probs")
# A set of one's own on a root axis of one's own, to show that rules follow axes, not names.
OWN_MASK = Column("kept_mask", "target", pa.int8(), opens="kept", mask=True)
OWN_COUNTS = Column("kin_counts", "token", pa.int64(), opens="kin", head_kind="support")
OWN_IDS = Column("kin_ids", "kin", pa.uint16())
OWN_LOG_PROBS = Column("kin_log_probs", "kin", pa.float64(), log_prob=LogProb("raw", "vocabulary"))
OWN: Record = {
    "kept_mask": [0, 1],
    "kin_counts": [2, 0, 0, 1],
    "kin_ids": [4, 1, 9],
    "kin_log_probs": [-1.0, -1.0, -0.125],
}
KIN = (OWN_COUNTS, OWN_IDS, OWN_LOG_PROBS)
IMAGE = Column("image_size", "record", pa.int32(), shape=(2,))


def _own(code: str, name: str, at: tuple[str, int], edits: Record, *columns: Column) -> Breach:
    return sample(code, name, at, edits, *columns, good={**SAMPLE, **OWN})


BREACHES: tuple[Breach, ...] = (
    # Structure
    sample("RF-I002", "record", "sample_id", {"sample_id": None}),
    sample("RF-I002", "list", "input_ids", {"input_ids": None}),
    sample("RF-I002", "item", ("input_ids", 2), {"input_ids:2": None}),
    sample("RF-I002", "item-below", ("candidate_ids", 0), {"candidate_ids:0": None}, *SET),
    sample("RF-I002", "fixed-size", "image_size", {"image_size": [3, None]}, IMAGE,
           good={**SAMPLE, "image_size": [3, 4]}),
    sample("RF-I003", "token", "completion_mask", {"completion_mask": [0, 0, 1, 1, 0]}),
    packed("RF-I003", "member", "member_sample_id", {"member_sample_id": ["c"]}),
    sample("RF-I004", "set", ("candidate_counts", 1), {"candidate_counts": [4, -1]}, *SET),
    _own("RF-I004", "own", ("kin_counts", 0), {"kin_counts": [-1, 3, 1, 0]}, *KIN),
    _own("RF-I004", "wraps", ("kin_counts", 0), {"kin_counts": [2**62, 2**62, 2**62, 2**62]},
         OWN_COUNTS),
    sample("RF-I005", "target", "rollout_log_probs", {"rollout_log_probs": [-0.5]},
           "rollout_log_probs"),
    sample("RF-I005", "set", "candidate_ids", {"candidate_counts": [1, 0]}, *SET),
    sample("RF-I005", "head", "topk_log_probs", {"topk_log_probs": [-0.5, -3.0]}, *TOPK),
    sample("RF-I008", "two", ("completion_mask", 2), {"completion_mask:2": 2}),
    _own("RF-I008", "negative", ("kept_mask", 0), {"kept_mask:0": -1}, OWN_MASK),
    # Records
    sample("RF-I006", "twice", "sample_id", {"sample_id": "good"}),
    sample("RF-I006", "empty", "sample_id", {"sample_id": ""}),
    sample("RF-I007", "above", ("input_ids", 0), {"input_ids:0": VOCAB_SIZE}),
    sample("RF-I007", "negative", ("input_ids", 1), {"input_ids:1": -1}),
    sample("RF-I009", "scored", ("completion_mask", 0), {"completion_mask:0": 1}),
    sample("RF-I010", "bit-5", ("target_flags", 1), {"target_flags:1": 32}, "target_flags"),
    # Candidate sets
    sample("RF-I011", "above", ("candidate_ids", 2), {"candidate_ids:2": VOCAB_SIZE}, *SET),
    sample("RF-I011", "negative", ("candidate_ids", 0), {"candidate_ids:0": -1}, *SET),
    sample("RF-I012", "unsorted", ("candidate_ids", 2), {"candidate_ids": [2, 30, 8]}, *SET),
    sample("RF-I012", "twice", ("candidate_ids", 2), {"candidate_ids": [2, 8, 8]}, *SET),
    sample("RF-I013", "lacking", ("candidate_counts", 0), {"candidate_ids:1": 9}, *SET),
    # Heads
    sample("RF-I014", "above", ("topk_ids", 2), {"topk_ids:2": VOCAB_SIZE}, *TOPK),
    sample("RF-I014", "negative", ("teacher_topk_ids", 1), {"teacher_topk_ids:1": -1}, *TEACHER),
    _own("RF-I014", "own", ("kin_ids", 1), {"kin_ids:1": 65535}, *KIN),
    sample("RF-I015", "twice", ("topk_ids", 1), {"topk_ids:1": 8}, *TOPK),
    _own("RF-I015", "own", ("kin_ids", 1), {"kin_ids:1": 4}, *KIN),
    sample("RF-I016", "rising", ("topk_log_probs", 1), {"topk_log_probs": [-3.0, -0.5, -0.25]},
           *TOPK),
    _own("RF-I016", "own", ("kin_log_probs", 1), {"kin_log_probs:1": -0.875}, *KIN),
    # Numbers
    sample("RF-I017", "nan", ("rollout_log_probs", 0), {"rollout_log_probs:0": NAN},
           "rollout_log_probs"),
    sample("RF-I017", "set", ("candidate_log_probs", 2), {"candidate_log_probs:2": -INFINITY},
           *SET_LOG_PROBS),
    sample("RF-I017", "approximate", ("teacher_log_probs", 1), {"teacher_log_probs:1": INFINITY},
           _with("teacher_log_probs", approximate=True)),
    sample("RF-I017", "weight", ("loss_weights", 0), {"loss_weights:0": NAN}, "loss_weights"),
    sample("RF-I017", "advantage", ("advantages", 1), {"advantages:1": INFINITY}, "advantages"),
    sample("RF-I018", "positive", ("rollout_log_probs", 1), {"rollout_log_probs:1": 0.125},
           "rollout_log_probs"),
    sample("RF-I019", "set", ("candidate_log_probs", 0),
           {"candidate_log_probs": [-1.5, -0.125, -1.5]}, *SET_LOG_PROBS),
    sample("RF-I019", "head", ("topk_log_probs", 0), {"topk_log_probs:1": -0.5}, *TOPK),
    sample("RF-I019", "half", ("topk_log_probs", 0), {"topk_log_probs": [-0.6875, -0.6875, -1.0]},
           *TOPK[:2], _with("topk_log_probs", type=pa.float16())),
    sample("RF-I020", "set", ("candidate_counts", 0), {"target_flags:0": 1}, "target_flags", *SET),
    sample("RF-I020", "log-prob", ("rollout_log_probs", 1), {"target_flags:1": 4}, "target_flags",
           "rollout_log_probs"),
    sample("RF-I020", "teacher", ("teacher_log_probs", 0), {"target_flags:0": 16}, "target_flags",
           "teacher_log_probs"),
    sample("RF-I021", "list", "metrics", {"metrics": "[]"}, "metrics"),
    sample("RF-I021", "broken", "provenance", {"provenance": "{"}, "provenance"),
    sample("RF-I021", "nan", "metrics", {"metrics": '{"kl":NaN}'}, "metrics"),
    packed("RF-I021", "member", ("member_metrics", 1), {"member_metrics:1": "1"}, "member_metrics"),
    sample("RF-I022", "reward", "reward", {"reward": NAN}, "reward"),
    sample("RF-I022", "advantage", "advantage", {"advantage": -INFINITY}, "advantage"),
    sample("RF-I022", "temperature", "temperature", {"temperature": -1.0}, "temperature"),
    packed("RF-I022", "member", ("member_reward", 1), {"member_reward:1": INFINITY},
           "member_reward"),
    sample("RF-I023", "branch", "branch_index", {"branch_index": -1}, "branch_index"),
    sample("RF-I023", "offset", "token_offset", {"token_offset": -1}, "token_offset"),
    sample("RF-I024", "zero", ("topk_weights", 1), {"topk_weights:1": 0.0}, *DRAWS),
    # Packed records
    packed("RF-I030", "empty", ("node_lengths", 1),
           {"node_lengths": [2, 0, 2, 1], "node_parents": [-1, 0, 1, 0], "member_leaf": [2, 3]}),
    packed("RF-I031", "short", ("node_lengths", None), {"node_lengths:1": 1}),
    packed("RF-I031", "none", ("node_lengths", None), {"node_lengths": [], "node_parents": [],
           "member_leaf": [], "member_lengths": [], "member_sample_id": [], "pred_index": [],
           "target_ids": [], "member_index": []}),
    packed("RF-I032", "later", ("node_parents", 1), {"node_parents:1": 2}),
    packed("RF-I032", "below", ("node_parents", 0), {"node_parents:0": -2}),
    packed("RF-I032", "order", ("node_parents", 3),
           {"input_ids": [1, 2, 3, 4, 5, 6], "position_ids": [0, 1, 2, 3, 0, 2],
            "node_lengths": [2, 2, 1, 1], "node_parents": [-1, 0, -1, 0],
            "member_sample_id": ["c", "d", "e"], "member_leaf": [1, 2, 3],
            "member_lengths": [4, 1, 3], "pred_index": [1, 2], "target_ids": [3, 4],
            "member_index": [0, 0]}),
    packed("RF-I033", "flat", ("position_ids", 4), {"position_ids:4": 4}),
    packed("RF-I034", "above", ("pred_index", 1), {"pred_index:1": 5}),
    packed("RF-I034", "negative", ("pred_index", 0), {"pred_index:0": -1}),
    packed("RF-I035", "above", ("member_index", 2), {"member_index:2": 2}),
    packed("RF-I035", "negative", ("member_index", 0), {"member_index:0": -1}),
    packed("RF-I036", "member", ("member_index", 1),
           {"member_index": [1, 0, 0], "pred_index": [1, 1, 2], "target_ids": [5, 3, 4]}),
    packed("RF-I036", "position", ("pred_index", 1),
           {"pred_index": [2, 1, 1], "target_ids": [4, 3, 5]}),
    packed("RF-I036", "twice", ("pred_index", 1),
           {"pred_index": [1, 1, 1], "target_ids": [3, 3, 5]}),
    packed("RF-I037", "above", ("member_leaf", 1), {"member_leaf:1": 3}),
    packed("RF-I037", "negative", ("member_leaf", 0), {"member_leaf:0": -1}),
    packed("RF-I038", "long", ("member_lengths", 1), {"member_lengths:1": 5}),
    packed("RF-I039", "other-branch", ("pred_index", 2), {"pred_index:2": 2}),
    packed("RF-I039", "last-token", ("pred_index", 2), {"pred_index:2": 4}),
    packed("RF-I040", "token", ("target_ids", 0), {"target_ids:0": 4}),
    packed("RF-I040", "branch", ("target_ids", 2), {"target_ids:2": 3}),
    packed("RF-I041", "leaf", ("node_parents", 2),
           {"member_leaf": [1, 1], "member_lengths": [4, 4], "member_index": [0, 1, 1],
            "pred_index": [1, 1, 2], "target_ids": [3, 3, 4]}),
)  # fmt: skip
