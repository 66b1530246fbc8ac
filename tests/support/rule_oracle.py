"""Every invariant of the format in plain Python over ``to_pylist()``, independent of the library.

:func:`broken_codes` returns all codes that a batch breaks, whatever the order in which the library
checks them. Rules that have no meaning where another one is broken are not evaluated.
"""

import json
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa

HEADS = {"top_k", "support"}


def broken_codes(batch, schema, seen_ids=()):
    """Return the set of codes that a batch breaks; only arrays that Arrow itself accepts."""
    rows = batch.to_pylist()
    codes = set()
    for row in rows:
        codes |= _nulls(row, schema)
    if codes:
        return codes
    for row in rows:
        codes |= _lengths(row, schema)
    if codes:
        return codes
    for row in rows:
        codes |= _values(row, schema)
        if schema.profile == "packed":
            codes |= _packed(row)
    if schema.profile == "sample":
        ids = [*seen_ids, *(row["sample_id"] for row in rows)]
        if len(set(ids)) < len(ids) or "" in ids:
            codes.add("RF-I006")
    return codes


def _nulls(row, schema):
    for column in schema:
        value = row[column.name]
        if column.axis == "record":
            items = [] if column.nullable and value is None else [value]
        else:
            if value is None:
                return {"RF-I002"}
            items = [] if column.nullable else value
        for item in items:
            if item is None or (column.shape and None in item):
                return {"RF-I002"}
    return set()


def _lengths(row, schema):
    codes = set()
    for axis in schema.axes.values():
        columns = [c.name for c in schema.on(axis.name)]
        if axis.counts is None:
            if len({len(row[name]) for name in columns}) > 1:
                codes.add("RF-I003")
            continue
        counts = row[axis.counts]
        if axis.mask and any(count not in (0, 1) for count in counts):
            codes.add("RF-I008")
        if not axis.mask and (any(count < 0 for count in counts) or sum(counts) >= 2**62):
            codes.add("RF-I004")
        if any(len(row[name]) != sum(counts) for name in columns):
            codes.add("RF-I005")
    return codes


def _segments(values, counts):
    out, at = [], 0
    for count in counts:
        out.append(values[at : at + count])
        at += count
    return out


def _scored(row, schema):
    if schema.profile == "packed":
        return row["target_ids"]
    mask = row["completion_mask"]
    return [t for t, scored in zip(row["input_ids"], mask, strict=True) if scored]


def _values(row, schema):
    codes = set()
    vocabulary = range(schema.vocab_size)
    packed = schema.profile == "packed"
    tokens = row["input_ids"] + (row["target_ids"] if packed else [])
    if any(token not in vocabulary for token in tokens):
        codes.add("RF-I007")
    if not packed and row["completion_mask"][:1] == [1]:
        codes.add("RF-I009")
    if any(flags >= 32 for flags in row.get("target_flags", [])):
        codes.add("RF-I010")
    for axis in schema.axes.values():
        kind = schema[axis.counts].head_kind if axis.counts else None
        if kind is not None and f"{axis.name}_ids" in row:
            codes |= _ids(row, schema, axis, kind)
    for column in schema:
        codes |= _numbers(row, schema, column)
    codes |= _flags(row)
    prefix = "member_" if packed else ""
    for name in ("metrics", "provenance"):
        if any(not _is_object(text) for text in _given(row, prefix + name)):
            codes.add("RF-I021")
    for name in ("temperature", "reward", "advantage"):
        for value in _given(row, prefix + name):
            if not math.isfinite(value) or (name == "temperature" and value < 0):
                codes.add("RF-I022")
    for name in ("branch_index", "token_offset"):
        if any(value < 0 for value in _given(row, prefix + name)):
            codes.add("RF-I023")
    return codes


def _given(row, name):
    """Return the values that are not null of a record or member column, if there is one."""
    value = row.get(name)
    items = value if isinstance(value, list) else [value]
    return [item for item in items if item is not None]


def _is_object(text):
    try:
        return isinstance(json.loads(text, parse_constant=lambda _: 1 / 0), dict)
    except (ValueError, ZeroDivisionError, RecursionError):
        return False


def _ids(row, schema, axis, kind):
    codes = set()
    ids, counts = row[f"{axis.name}_ids"], row[axis.counts]
    inside = all(0 <= i < schema.vocab_size for i in ids)
    if not inside:
        codes.add("RF-I011" if kind == "set" else "RF-I014")
    segments = _segments(ids, counts)
    if kind == "set":
        if any(list(s) != sorted(set(s)) for s in segments):
            codes.add("RF-I012")
        if schema[axis.counts].axis == "target":
            for token, segment in zip(_scored(row, schema), segments, strict=True):
                if segment and token not in segment:
                    codes.add("RF-I013")
    if kind in HEADS:
        if inside and any(len(set(s)) < len(s) for s in segments):
            codes.add("RF-I015")
        name = f"{axis.name}_log_probs"
        if name in schema and schema[name].log_prob and not schema[name].approximate:
            for segment in _segments(row[name], counts):
                if any(b > a for a, b in pairwise(segment)):
                    codes.add("RF-I016")
    return codes


def _numbers(row, schema, column):
    axis = schema.axes.get(column.axis)
    counts = axis.counts if axis else None
    kind = schema[counts].head_kind if counts else None
    weights = kind is not None and column.name == f"{column.axis}_weights"
    named = column.name in ("loss_weights", "advantages")
    if column.log_prob is None and not weights and not named:
        return set()
    codes = set()
    values = _given(row, column.name) if column.axis in ("record", "member") else row[column.name]
    scalars = [number for value in values for number in value] if column.shape else values
    if not all(math.isfinite(number) for number in scalars):
        return {"RF-I017"}
    if weights and kind == "draws" and any(number <= 0 for number in scalars):
        codes.add("RF-I024")
    mode = column.log_prob
    if mode is None or mode.value == "logit" or column.approximate:
        return codes
    # The bound is rounded to the type of the column, as its values are.
    bound = float(np.array(1e-4, column.type.to_pandas_dtype()))
    if any(number > bound for number in scalars):
        codes.add("RF-I018")
    if kind in {"set", *HEADS} and not column.shape:
        limit = 1 + (5e-3 if pa.types.is_float16(column.type) else 1e-4)
        for segment in _segments(values, row[counts]):
            if sum(min(math.exp(min(v, 700)), 1e300) for v in segment) > limit:
                codes.add("RF-I019")
    return codes


def _flags(row):
    absent = {
        "candidate_counts": 1 | 2, "topk_counts": 8, "teacher_topk_counts": 16,
        "teacher_log_probs": 16, "rollout_log_probs": 4,
    }  # fmt: skip
    for name, bits in absent.items():
        for flags, value in zip(row.get("target_flags", []), row.get(name, []), strict=False):
            if flags & bits and value != 0:
                return {"RF-I020"}
    return set()


def _packed(row):
    codes = set()
    lengths, parents = row["node_lengths"], row["node_parents"]
    if any(length < 1 for length in lengths):
        codes.add("RF-I030")
    if sum(lengths) != len(row["input_ids"]):
        codes.add("RF-I031")
    if not _preorder(parents):
        codes.add("RF-I032")
    leaves, members = row["member_leaf"], range(len(row["member_leaf"]))
    if not all(leaf in range(len(lengths)) for leaf in leaves):
        codes.add("RF-I037")
    if not all(member in members for member in row["member_index"]):
        codes.add("RF-I035")
    if not all(position in range(len(row["input_ids"])) for position in row["pred_index"]):
        codes.add("RF-I034")
    if not codes & {"RF-I032", "RF-I037"}:
        childless = set(range(len(lengths))) - set(parents) - set(leaves)
        if childless:
            codes.add("RF-I041")
    if codes & {"RF-I030", "RF-I031", "RF-I032"}:
        return codes
    starts = [sum(lengths[:node]) for node in range(len(lengths))]
    tokens_of = [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=True)]
    paths = []
    for parent, own in zip(parents, tokens_of, strict=True):
        paths.append((paths[parent] if parent >= 0 else []) + own)
    position = {path[i]: i for path in paths for i in range(len(path))}
    if [position[token] for token in range(len(position))] != row["position_ids"]:
        codes.add("RF-I033")
    if "RF-I037" in codes:
        return codes
    wrong = [len(paths[leaf]) for leaf in leaves] != row["member_lengths"]
    if wrong:
        codes.add("RF-I038")
    if codes & {"RF-I033", "RF-I034", "RF-I035"}:
        return codes
    keys = [
        (member, position[token])
        for member, token in zip(row["member_index"], row["pred_index"], strict=True)
    ]
    if any(b <= a for a, b in pairwise(keys)):
        codes.add("RF-I036")
    if wrong:
        return codes
    for member, token, target in zip(
        row["member_index"], row["pred_index"], row["target_ids"], strict=True
    ):
        path = paths[leaves[member]]
        if token not in path[:-1]:
            codes.add("RF-I039")
        elif row["input_ids"][path[path.index(token) + 1]] != target:
            codes.add("RF-I040")
    return codes


def _preorder(parents):
    path = []
    for node, parent in enumerate(parents):
        if parent == -1:
            path = []
        elif parent not in path:
            return False
        else:
            path = path[: path.index(parent) + 1]
        path.append(node)
    return True
