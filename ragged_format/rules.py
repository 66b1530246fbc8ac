"""The rules of full validation, one function each, over a structurally valid view."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import InvariantError, Where
from ragged_format.rules_packed import PACKED_RULES
from ragged_format.schema import RECORD, Axis, Column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ragged_format.lists import Int64
    from ragged_format.view import View

__all__ = ["FULL_RULES", "LOG_PROB_TOLERANCE", "TargetFlag"]

# Rounding of float32 log-softmax over a large vocabulary stays well below this.
LOG_PROB_TOLERANCE = 1e-4
FLOAT16_MASS_TOLERANCE = 5e-3
FLAG_BITS = 5


class TargetFlag:
    """Bits of ``target_flags``."""

    SUPPORT_MISSING = 1
    SUPPORT_OVERFLOW = 2
    LOG_PROB_MISSING = 4
    HEAD_MISSING = 8
    TEACHER_MISSING = 16


# Counts column that must be 0 where any of the bits is set.
_ABSENT_COUNTS = {
    "candidate_counts": TargetFlag.SUPPORT_MISSING | TargetFlag.SUPPORT_OVERFLOW,
    "topk_counts": TargetFlag.HEAD_MISSING,
    "teacher_topk_counts": TargetFlag.TEACHER_MISSING,
}
_RECORD_FLOATS = ("temperature", "reward", "advantage")
_RECORD_NATURALS = ("branch_index", "token_offset")
_RECORD_JSON = ("metrics", "provenance")
_FINITE = ("loss_weights", "advantages")


def _in_vocabulary(view: View, code: str, column: str, what: str) -> None:
    values = view.values(column)
    if len(values) and (values.min() < 0 or values.max() >= view.schema.vocab_size):
        bad = (values < 0) | (values >= view.schema.vocab_size)
        view.forbid(code, what, column, bad, f"0 <= id < {view.schema.vocab_size}")


def token_ids(view: View) -> None:
    """RF-I007."""
    for name in ("input_ids", "target_ids"):
        if name in view.lists:
            _in_vocabulary(view, "RF-I007", name, "a token id is outside the vocabulary")


def first_token_unscored(view: View) -> None:
    """RF-I009."""
    if "completion_mask" not in view.lists:
        return
    offsets = view.records["token"]
    firsts = offsets[:-1][offsets[1:] > offsets[:-1]]
    scored = view.values("completion_mask")[firsts]
    if scored.any():
        view.fail_at(
            "RF-I009", "the first token of a record is scored", "completion_mask",
            int(firsts[np.argmax(scored)]), expected=0, got=1,
        )  # fmt: skip


def _headed(view: View, *, sets: bool) -> Iterator[tuple[Axis, Column, str]]:
    """Yield (axis, counts column, ids column) of every candidate set, or of every head."""
    for axis in view.schema.axes.values():
        if axis.counts is None:
            continue
        counts = view.schema[axis.counts]
        ids = f"{axis.name}_ids"
        wanted = counts.head_kind is not None and (counts.head_kind == "set") == sets
        if wanted and ids in view.lists:
            yield axis, counts, ids


def sampled_tokens(view: View) -> npt.NDArray[Any] | None:
    """Return the token that each target scores, (m,), in target order."""
    if "target_ids" in view.lists:
        return view.values("target_ids")
    if "completion_mask" in view.lists:
        scored: npt.NDArray[Any] = view.values("input_ids")[view.values("completion_mask") != 0]
        return scored
    return None


def candidate_sets(view: View) -> None:
    """RF-I011, RF-I012, RF-I013."""
    for axis, counts, ids in _headed(view, sets=True):
        _in_vocabulary(view, "RF-I011", ids, "an id of a candidate set is outside the vocabulary")
        values, offsets = view.values(ids), view.parents[axis.name]
        if len(values) > 1:
            falls = values[1:] <= values[:-1]
            starts = offsets[1:-1]
            falls[starts[(starts > 0) & (starts < len(values))] - 1] = False
            if falls.any():
                first = int(np.argmax(falls)) + 1
                view.fail_at(
                    "RF-I012", "a candidate set is not strictly ascending", ids, first,
                    expected=f"> {values[first - 1]}", got=values[first],
                )  # fmt: skip
        sampled = sampled_tokens(view)
        if sampled is None or counts.axis != "target":
            continue
        lengths = np.diff(offsets)
        hits = np.flatnonzero(np.repeat(sampled, lengths) == values)
        if len(hits) != np.count_nonzero(lengths):
            held = np.zeros(len(lengths), bool)
            held[np.searchsorted(offsets, hits, side="right") - 1] = True
            first = int(np.argmax(~held & (lengths > 0)))
            view.fail_at(
                "RF-I013", "a candidate set lacks the sampled token", counts.name, first,
                expected=f"a set with {sampled[first]}",
                got=values[offsets[first] : offsets[first + 1]][:8].tolist(),
            )  # fmt: skip


def heads(view: View) -> None:
    """RF-I014, RF-I015, RF-I016."""
    for axis, counts, ids in _headed(view, sets=False):
        _in_vocabulary(view, "RF-I014", ids, "an id of a head is outside the vocabulary")
        if counts.head_kind == "draws":
            continue
        offsets = view.parents[axis.name]
        values = view.values(ids)
        owner = np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets))
        key = owner * view.schema.vocab_size + values
        ordered = np.sort(key)
        if (ordered[1:] == ordered[:-1]).any():
            twice = ordered[1:][ordered[1:] == ordered[:-1]][0]
            first = int(np.flatnonzero(key == twice)[1])
            view.fail_at(
                "RF-I015", "an id is twice in one head", ids, first,
                expected="unique ids", got=values[first],
            )  # fmt: skip
        for column in view.schema.on(axis.name):
            if column.log_prob is not None and not column.approximate:
                _non_increasing(view, column.name, owner)


def _non_increasing(view: View, column: str, owner: Int64) -> None:
    values = view.values(column)
    rises = (values[1:] > values[:-1]) & (owner[1:] == owner[:-1])
    if rises.any():
        first = int(np.argmax(rises)) + 1
        view.fail_at(
            "RF-I016", "the log-probs of a head increase", column, first,
            expected=f"<= {values[first - 1]}", got=values[first],
        )  # fmt: skip


def log_probs(view: View) -> None:
    """RF-I017, RF-I018, RF-I024."""
    for column in view.schema:
        if column.axis == RECORD or column.shape:
            continue
        drawn = column.name.endswith("_weights") and column.axis in view.schema.axes
        if column.log_prob is None and column.name not in _FINITE and not drawn:
            continue
        if not pa.types.is_floating(column.type):
            continue
        values = view.values(column.name)
        finite = np.isfinite(values)
        if not finite.all():
            view.forbid("RF-I017", "a value is not finite", column.name, ~finite, "a finite number")
        mode = column.log_prob
        if mode is not None and mode.value == "log_prob" and not column.approximate:
            view.forbid(
                "RF-I018", "a log-prob is positive", column.name,
                values > LOG_PROB_TOLERANCE, f"<= {LOG_PROB_TOLERANCE}",
            )  # fmt: skip
        if _head_kind(view, column) == "draws" and drawn:
            view.forbid(
                "RF-I024", "the weight of a draw is not positive", column.name, values <= 0, "> 0"
            )


def _head_kind(view: View, column: Column) -> str | None:
    axis = view.schema.axes[column.axis]
    return None if axis.counts is None else view.schema[axis.counts].head_kind


def mass(view: View) -> None:
    """RF-I019."""
    for column in view.schema:
        mode = column.log_prob
        if mode is None or mode.value != "log_prob" or column.approximate or column.axis == RECORD:
            continue
        if _head_kind(view, column) in (None, "draws"):
            continue
        offsets = view.parents[column.axis]
        half = pa.types.is_float16(column.type)
        tolerance = FLOAT16_MASS_TOLERANCE if half else LOG_PROB_TOLERANCE
        sums = np.zeros(int(offsets[-1]) + 1)
        np.cumsum(np.exp(view.values(column.name), dtype=np.float64), out=sums[1:])
        totals = sums[offsets[1:]] - sums[offsets[:-1]]
        bad = totals > 1 + tolerance
        if bad.any():
            target = int(np.argmax(bad))
            view.fail_at(
                "RF-I019", "the probabilities of one set or head sum to more than 1", column.name,
                int(offsets[target]), expected=f"<= {1 + tolerance}", got=totals[target],
            )  # fmt: skip


def flags(view: View) -> None:
    """RF-I010, RF-I020."""
    if "target_flags" not in view.lists:
        return
    bits = view.values("target_flags")
    view.forbid(
        "RF-I010", "a target flag is unknown", "target_flags", bits >= 1 << FLAG_BITS,
        f"< {1 << FLAG_BITS}",
    )  # fmt: skip
    absent = [*_ABSENT_COUNTS.items(), ("rollout_log_probs", TargetFlag.LOG_PROB_MISSING)]
    for column, mask in absent:
        if column in view.lists:
            bad = ((bits & mask) != 0) & (view.values(column) != 0)
            view.forbid(
                "RF-I020", "a target flag says missing, but the value is there", column, bad, 0
            )


def record_values(view: View) -> None:
    """RF-I021, RF-I022, RF-I023."""
    prefix = "member_" if view.schema.profile == "packed" else ""
    for name in _RECORD_FLOATS:
        for column, values, offsets in _record_column(view, prefix + name):
            floats = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)
            bad = ~np.isfinite(floats)
            expected = "a finite number or null"
            if name == "temperature":
                bad |= floats < 0
                expected = "a finite number >= 0 or null"
            _forbid_record(
                "RF-I022", "a number is not allowed", column, values, offsets, bad, expected
            )
    for name in _RECORD_NATURALS:
        for column, values, offsets in _record_column(view, prefix + name):
            bad = pc.fill_null(values, 0).to_numpy(zero_copy_only=False) < 0
            _forbid_record(
                "RF-I023", "a number is negative", column, values, offsets, bad, ">= 0 or null"
            )
    for name in _RECORD_JSON:
        for column, values, offsets in _record_column(view, prefix + name):
            broken = [text for text in values.unique().to_pylist() if not _is_json_object(text)]
            if broken:
                bad = pc.is_in(values, pa.array(broken, values.type))
                bad = bad.to_numpy(zero_copy_only=False)
                _forbid_record(
                    "RF-I021",
                    "text is not a JSON object",
                    column,
                    values,
                    offsets,
                    bad,
                    "a JSON object or null",
                )


def _record_column(view: View, name: str) -> Iterator[tuple[str, pa.Array, Int64 | None]]:
    if name in view.lists:
        yield name, view.lists[name].values, view.lists[name].offsets
    elif name in view.schema:
        yield name, view.batch.column(name), None


def _forbid_record(
    code: str,
    what: str,
    column: str,
    values: pa.Array,
    offsets: Int64 | None,
    bad: npt.NDArray[np.bool_],
    expected: str,
) -> None:
    if not bad.any():
        return
    first = int(np.argmax(bad))
    row, position = (first, None) if offsets is None else (
        int(np.searchsorted(offsets, first, side="right")) - 1, None
    )  # fmt: skip
    if offsets is not None:
        position = first - int(offsets[row])
    raise InvariantError(
        what, code=code, where=Where(row=row, column=column, position=position),
        expected=expected, got=values[first].as_py(),
    )  # fmt: skip


def _is_json_object(text: str | None) -> bool:
    if text is None:
        return True
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


FULL_RULES: tuple[Callable[[View], None], ...] = (
    token_ids,
    first_token_unscored,
    candidate_sets,
    heads,
    log_probs,
    mass,
    flags,
    record_values,
    *PACKED_RULES,
)
