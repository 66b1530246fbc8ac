"""The rules of full validation, one per code, over a structurally valid view."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.lists import to_numpy
from ragged_format.rules_packed import PACKED_RULES
from ragged_format.view import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragged_format.lists import Int64
    from ragged_format.schema import Axis, Column
    from ragged_format.view import View

__all__ = [
    "FLOAT16_MASS_TOLERANCE",
    "FULL_RULES",
    "LOG_PROB_TOLERANCE",
    "TargetFlag",
    "count_held",
    "first_with_repeat",
]

# Rounding of float32 log-softmax over a large vocabulary stays well below this.
LOG_PROB_TOLERANCE = 1e-4
FLOAT16_MASS_TOLERANCE = 5e-3
FLAG_BITS = 5
# Elements of a table that is sorted at once: fits the cache.
_TABLE_SIZE = 1 << 18
_PART_SIZE = 1 << 15
# Values that are compared sooner in Python than by calls of Arrow.
_FEW = 64
# Characters of a text whose outcome is remembered.
_SHORT = 4096


class TargetFlag:
    """Bits of ``target_flags``."""

    SUPPORT_MISSING = 1
    SUPPORT_OVERFLOW = 2
    LOG_PROB_MISSING = 4
    HEAD_MISSING = 8
    TEACHER_MISSING = 16


# Target columns that hold 0 where any of the bits is set.
_ABSENT = {
    "candidate_counts": TargetFlag.SUPPORT_MISSING | TargetFlag.SUPPORT_OVERFLOW,
    "topk_counts": TargetFlag.HEAD_MISSING,
    "teacher_topk_counts": TargetFlag.TEACHER_MISSING,
    "teacher_log_probs": TargetFlag.TEACHER_MISSING,
    "rollout_log_probs": TargetFlag.LOG_PROB_MISSING,
}
_FINITE = ("loss_weights", "advantages")


def _packed(view: View) -> bool:
    return view.schema.profile == "packed"


def _record_columns(view: View, *names: str) -> Iterator[tuple[str, str]]:
    """Yield (standard name, name of its column) of record columns that the data has."""
    for name in names:
        column = f"member_{name}" if _packed(view) else name
        if column in view.schema:
            yield name, column


def _in_vocabulary(view: View, code: str, column: str, what: str) -> None:
    values = view.values(column)
    if not len(values):
        return
    if values.dtype.kind == "i":
        # Without their sign, negative numbers are the largest: one pass instead of two.
        largest = int(values.view(f"u{values.itemsize}").max())
        is_outside = largest >= min(view.schema.vocab_size, 1 << (8 * values.itemsize - 1))
    else:
        is_outside = bool(values.min() < 0 or values.max() >= view.schema.vocab_size)
    if is_outside:
        bad = (values < 0) | (values >= view.schema.vocab_size)
        view.forbid(code, what, column, bad, f"0 <= id < {view.schema.vocab_size}")


def sample_ids(view: View) -> None:
    """RF-I006, within the batch."""
    ids = view.elements("sample_id")
    if len(ids) <= _FEW:
        names = ids.to_pylist()
        if all(names) and len(set(names)) == len(names):
            return
    empty = to_numpy(pc.binary_length(ids)) == 0
    view.forbid("RF-I006", "a sample_id is empty", "sample_id", empty, "an id of its own")
    if len(ids) < 2:
        return
    numbers = to_numpy(ids.dictionary_encode().indices)
    _, firsts = np.unique(numbers, return_index=True)
    if len(firsts) < len(numbers):
        again = int(np.setdiff1d(np.arange(len(numbers)), firsts)[0])
        view.fail_at(
            "RF-I006", "a sample_id is not unique", "sample_id", again,
            expected="an id that no other record has",
            got=f"{ids[again].as_py()!r}, also at row {firsts[numbers[again]]}",
        )  # fmt: skip


def token_ids(view: View) -> None:
    """RF-I007."""
    for name in ("input_ids", "target_ids") if _packed(view) else ("input_ids",):
        _in_vocabulary(view, "RF-I007", name, "a token id is outside the vocabulary")


def first_token_unscored(view: View) -> None:
    """RF-I009."""
    offsets = view.records["token"]
    firsts = offsets[:-1][offsets[1:] > offsets[:-1]]
    scored = view.values("completion_mask")[firsts]
    if scored.any():
        view.fail_at(
            "RF-I009", "the first token of a record is scored", "completion_mask",
            int(firsts[np.argmax(scored)]), expected=0,
        )  # fmt: skip


def flag_bits(view: View) -> None:
    """RF-I010."""
    if "target_flags" in view.schema:
        view.forbid(
            "RF-I010", "a target flag is unknown", "target_flags",
            view.values("target_flags") >= 1 << FLAG_BITS, f"< {1 << FLAG_BITS}",
        )  # fmt: skip


def _headed(view: View, *, sets: bool) -> Iterator[tuple[Axis, Column]]:
    """Yield (axis, counts column) of every candidate set, or of every head, that has ids."""
    for axis in view.schema.axes.values():
        kind = _head_kind(view, axis.name)
        if axis.counts and kind and (kind == "set") == sets and _ids(axis.name) in view.schema:
            yield axis, view.schema[axis.counts]


def _head_kind(view: View, axis: str) -> str | None:
    opened = view.schema.axes.get(axis)
    return view.schema[opened.counts].head_kind if opened and opened.counts else None


def _ids(axis: str) -> str:
    return f"{axis}_ids"


def set_ids_in_vocabulary(view: View) -> None:
    """RF-I011."""
    for axis, _ in _headed(view, sets=True):
        what = "an id of a candidate set is outside the vocabulary"
        _in_vocabulary(view, "RF-I011", _ids(axis.name), what)


def _inside(pairs: npt.NDArray[np.bool_], offsets: Int64) -> npt.NDArray[np.bool_]:
    """Return `pairs`, (t - 1,) for neighbors, with those of different segments set to false."""
    starts = offsets[1:-1]
    pairs[starts[(starts > 0) & (starts <= len(pairs))] - 1] = False
    return pairs


def sets_ascend(view: View) -> None:
    """RF-I012."""
    for axis, _ in _headed(view, sets=True):
        ids = _ids(axis.name)
        values, offsets = view.values(ids), view.parents[axis.name]
        falls = _inside(values[1:] <= values[:-1], offsets)
        if falls.any():
            first = int(np.argmax(falls)) + 1
            view.fail_at(
                "RF-I012", "a candidate set is not strictly ascending", ids, first,
                expected=f"> {values[first - 1]}",
            )  # fmt: skip


def sampled_tokens(view: View) -> npt.NDArray[Any]:
    """Return the token that each target scores, (m,), in target order."""
    if _packed(view):
        return view.values("target_ids")
    scored: npt.NDArray[Any] = view.values("input_ids")[view.values("completion_mask") != 0]
    return scored


def sets_hold_sampled(view: View) -> None:
    """RF-I013."""
    for axis, counts in _headed(view, sets=True):
        if counts.axis != "target":
            continue
        values, offsets = view.values(_ids(axis.name)), view.parents[axis.name]
        sampled, lengths = sampled_tokens(view), np.diff(offsets)
        if count_held(values, offsets, sampled) == np.count_nonzero(lengths):
            continue  # ids are unique in a set, so each has at most one hit
        hits = np.flatnonzero(np.repeat(sampled, lengths) == values)
        held = np.zeros(len(lengths), bool)
        held[np.searchsorted(offsets, hits, side="right") - 1] = True
        missing = ~held & (lengths > 0)
        if missing.any():
            first = int(np.argmax(missing))
            view.fail_at(
                "RF-I013", "a candidate set lacks the sampled token", counts.name, first,
                expected=f"a set with {sampled[first]}",
                got=values[offsets[first] : offsets[first + 1]][:8].tolist(),
            )  # fmt: skip


def count_held(values: npt.NDArray[Any], offsets: Int64, wanted: npt.NDArray[Any]) -> int:
    """Return how many of the values, (t,), equal the one that is wanted, (n,), in their segment."""
    lengths = np.diff(offsets)
    if len(values) <= _PART_SIZE:
        return int(np.count_nonzero(np.repeat(wanted, lengths) == values))
    # Parts that fit the cache: whole, the repeated values would go to memory and back.
    bounds = offsets.searchsorted(np.arange(0, len(values), _PART_SIZE))
    count = 0
    for begin, end in pairwise([*bounds.tolist(), len(lengths)]):
        part = values[offsets[begin] : offsets[end]]
        hits = np.repeat(wanted[begin:end], lengths[begin:end]) == part
        count += int(np.count_nonzero(hits))
    return count


def head_ids_in_vocabulary(view: View) -> None:
    """RF-I014."""
    for axis, _ in _headed(view, sets=False):
        what = "an id of a head is outside the vocabulary"
        _in_vocabulary(view, "RF-I014", _ids(axis.name), what)


def head_ids_unique(view: View) -> None:
    """RF-I015."""
    for axis, counts in _headed(view, sets=False):
        if counts.head_kind == "draws":
            continue
        values, offsets = view.values(_ids(axis.name)), view.parents[axis.name]
        head = first_with_repeat(values, offsets)
        if head is not None:
            start = int(offsets[head])
            ids = values[start : offsets[head + 1]]
            _, firsts = np.unique(ids, return_index=True)
            again = np.setdiff1d(np.arange(len(ids)), firsts)
            view.fail_at(
                "RF-I015", "an id is twice in one head", _ids(axis.name), start + int(again[0]),
                expected="unique ids",
            )  # fmt: skip


def first_with_repeat(values: npt.NDArray[Any], offsets: Int64) -> int | None:
    """Return the first segment that holds a value twice; values are not negative.

    Segments of about equal length are sorted together as rows of a table, which is several times
    faster than one sort of all pairs (segment, value).
    """
    lengths = np.diff(offsets)
    signed = np.int32 if np.can_cast(values.dtype, np.int32) else np.int64
    found: list[int] = []
    width = 2
    while width < 2 * lengths.max(initial=1):
        segments = np.flatnonzero((lengths > width // 2) & (lengths <= width))
        step = max(1, _TABLE_SIZE // width)
        for start in range(0, len(segments), step):
            rows = segments[start : start + step]
            column = np.arange(width)
            index = np.minimum(offsets[rows][:, None] + column, len(values) - 1)
            table = values[index].astype(signed, copy=False)
            # Padding that differs from all values and from other padding.
            np.copyto(table, -1 - column, where=column >= lengths[rows][:, None], casting="unsafe")
            table.sort(axis=1)
            twice = (table[:, 1:] == table[:, :-1]).any(axis=1)
            if twice.any():
                found.append(int(rows[np.argmax(twice)]))
                break
        width *= 2
    return min(found, default=None)


def heads_descend(view: View) -> None:
    """RF-I016."""
    for axis, counts in _headed(view, sets=False):
        name = f"{axis.name}_log_probs"
        ordered = name in view.schema and view.schema[name].log_prob is not None
        if counts.head_kind == "draws" or not ordered or view.schema[name].approximate:
            continue
        values = view.values(name)
        rises = _inside(values[1:] > values[:-1], view.parents[axis.name])
        if rises.any():
            first = int(np.argmax(rises)) + 1
            view.fail_at(
                "RF-I016", "the log-probs of a head increase", name, first,
                expected=f"<= {values[first - 1]}",
            )  # fmt: skip


def _weighs(view: View, column: Column) -> bool:
    """Return whether `column` is the weights column of a set or head."""
    return column.name == f"{column.axis}_weights" and _head_kind(view, column.axis) is not None


def numbers_finite(view: View) -> None:
    """RF-I017."""
    for column in view.schema:
        wanted = column.log_prob is not None or column.name in _FINITE or _weighs(view, column)
        if wanted and pa.types.is_floating(column.type):
            bad = ~np.isfinite(view.values(column.name))
            view.forbid("RF-I017", "a value is not finite", column.name, bad, "a finite number")


def _log_probs(view: View) -> Iterator[Column]:
    """Yield the columns of exact log-probs (no logits)."""
    for column in view.schema:
        mode = column.log_prob
        if mode is not None and mode.value == "log_prob" and not column.approximate:
            yield column


def log_probs_not_positive(view: View) -> None:
    """RF-I018."""
    for column in _log_probs(view):
        bad = view.values(column.name) > LOG_PROB_TOLERANCE
        what = "a log-prob is positive"
        view.forbid("RF-I018", what, column.name, bad, f"<= {LOG_PROB_TOLERANCE}")


def mass(view: View) -> None:
    """RF-I019."""
    for column in _log_probs(view):
        if column.shape or _head_kind(view, column.axis) in {None, "draws"}:
            continue
        offsets = view.parents[column.axis]
        half = pa.types.is_float16(column.type)
        tolerance = FLOAT16_MASS_TOLERANCE if half else LOG_PROB_TOLERANCE
        starts = offsets[:-1][offsets[1:] > offsets[:-1]]
        if not len(starts):
            continue
        totals = np.add.reduceat(np.exp(view.values(column.name), dtype=np.float64), starts)
        bad = totals > 1 + tolerance
        if bad.any():
            first = int(np.argmax(bad))
            view.fail_at(
                "RF-I019", "the probabilities of one set or head sum to more than 1", column.name,
                int(starts[first]), expected=f"sum <= {1 + tolerance}",
                got=f"sum {totals[first]}",
            )  # fmt: skip


def missing_is_absent(view: View) -> None:
    """RF-I020."""
    if "target_flags" not in view.schema:
        return
    bits = view.values("target_flags")
    for column, mask in _ABSENT.items():
        if column in view.schema:
            bad = ((bits & mask) != 0) & (view.values(column) != 0)
            what = "a target flag says missing, but the value is there"
            view.forbid("RF-I020", what, column, bad, 0)


def json_objects(view: View) -> None:
    """RF-I021."""
    for _, column in _record_columns(view, "metrics", "provenance"):
        elements = view.elements(column)
        texts = (
            set(elements.to_pylist()) if len(elements) <= _FEW else elements.unique().to_pylist()
        )
        broken = [text for text in texts if not _is_json_object(text)]
        if broken:
            bad = pc.is_in(elements, pa.array(broken, elements.type))
            bad = bad.to_numpy(zero_copy_only=False)
            view.forbid("RF-I021", "text is not a JSON object", column, bad, "a JSON object")


def _is_json_object(text: str | None) -> bool:
    if text is None:
        return True
    return _parses(text) if len(text) > _SHORT else _parses_short(text)


def _parses(text: str) -> bool:
    try:
        value = _JSON.decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


# All records of a run have the same provenance.
_parses_short = lru_cache(maxsize=64)(_parses)


def _no_constant(text: str) -> float:
    msg = f"{text} is not JSON"
    raise ValueError(msg)


# Any number is fine as a float: no limit on digits, and NaN is not JSON.
_JSON = json.JSONDecoder(parse_int=float, parse_constant=_no_constant)


def record_numbers(view: View) -> None:
    """RF-I022."""
    for name, column in _record_columns(view, "temperature", "reward", "advantage"):
        values = view.values(column)
        bad = ~np.isfinite(values)
        expected = "a finite number or null"
        if name == "temperature":
            bad |= values < 0
            expected = "a finite number >= 0 or null"
        view.forbid("RF-I022", "a number is not allowed", column, bad, expected)


def record_naturals(view: View) -> None:
    """RF-I023."""
    for _, column in _record_columns(view, "branch_index", "token_offset"):
        bad = view.values(column) < 0
        view.forbid("RF-I023", "a number is negative", column, bad, ">= 0 or null")


def draws_have_weight(view: View) -> None:
    """RF-I024."""
    for column in view.schema:
        if _weighs(view, column) and _head_kind(view, column.axis) == "draws":
            bad = view.values(column.name) <= 0
            view.forbid("RF-I024", "the weight of a draw is not positive", column.name, bad, "> 0")


FULL_RULES: tuple[Rule, ...] = (
    Rule("RF-I006", sample_ids, profile="sample"),
    Rule("RF-I007", token_ids),
    Rule("RF-I009", first_token_unscored, profile="sample"),
    Rule("RF-I010", flag_bits),
    Rule("RF-I011", set_ids_in_vocabulary),
    Rule("RF-I012", sets_ascend),
    Rule("RF-I013", sets_hold_sampled),
    Rule("RF-I014", head_ids_in_vocabulary),
    Rule("RF-I015", head_ids_unique, after=("RF-I014",)),
    Rule("RF-I016", heads_descend),
    Rule("RF-I017", numbers_finite),
    Rule("RF-I018", log_probs_not_positive, after=("RF-I017",)),
    Rule("RF-I019", mass, after=("RF-I017",)),
    Rule("RF-I020", missing_is_absent),
    Rule("RF-I021", json_objects),
    Rule("RF-I022", record_numbers),
    Rule("RF-I023", record_naturals),
    Rule("RF-I024", draws_have_weight, after=("RF-I017",)),
    *PACKED_RULES,
)
