"""The plainest packed batches: samples end to end, nothing shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.lists import flat, offsets_of, ranges, segment_sums, to_list
from ragged_format.parse import parse_schema
from ragged_format.profiles import packed_from_sample
from ragged_format.ragged import join, take

__all__ = ["in_sequence"]


def in_sequence(samples: pa.RecordBatch, runs: npt.ArrayLike | None = None) -> pa.RecordBatch:
    """Return samples as packed records that hold runs of them end to end.

    The obvious construction, one node per sample, as data for tests: use
    :mod:`ragged_format.packing` to plan rows and to share prefixes.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        Valid batch of profile ``sample``; samples without targets are left out.
    runs : (g,) int, optional
        Samples in each packed record, each >= 1, summing to the samples with targets. Default:
        all in one record.

    Examples
    --------
    >>> from ragged_format.testing import rollouts
    >>> samples = rollouts(np.random.default_rng(0), num_samples=3, columns=[])
    >>> in_sequence(samples, [2, 1]).column("member_sample_id").to_pylist()
    [['s-0', 's-1'], ['s-2']]
    """
    mask, offsets = flat(samples.column("completion_mask"))
    scored = mask.to_numpy() != 0
    samples = take(samples, np.flatnonzero(segment_sums(scored, offsets)))
    if runs is None:
        runs = [samples.num_rows] if samples.num_rows else []
    members = np.asarray(runs, np.int64)
    first_member = offsets_of(members)
    mask, offsets = flat(samples.column("completion_mask"))
    scored = mask.to_numpy() != 0
    lengths, targets = np.diff(offsets), segment_sums(scored, offsets)
    # Tokens before each sample within its packed record.
    before = offsets[:-1] - np.repeat(offsets[first_member[:-1]], members)
    positions = ranges(np.zeros_like(lengths), lengths)
    index = ranges(np.zeros_like(members), members)
    structure: dict[str, tuple[Any, Any]] = {
        "position_ids": (positions, offsets[first_member]),
        "node_lengths": (lengths, first_member),
        "node_parents": (np.full(len(lengths), -1), first_member),
        "pred_index": ((positions + np.repeat(before, lengths))[scored] - 1, None),
        "target_ids": (flat(samples.column("input_ids")).numpy()[scored], None),
        "member_index": (np.repeat(index, targets), None),
        "member_leaf": (index, first_member),
        "member_lengths": (lengths, first_member),
    }
    target_offsets = offsets_of(targets)[first_member]
    joined = join(samples, members)
    packed = packed_from_sample(parse_schema(samples.schema))
    arrays = []
    for column in packed:
        if column.name in structure:
            values, bounds = structure[column.name]
            array = to_list(values, target_offsets if bounds is None else bounds, column)
        elif column.axis == "member" and column.opens is not None:
            # An own root axis of the samples: its lengths are those of any column on it.
            on_axis = packed.on(column.opens)
            counts = flat(samples.column(on_axis[0].name)).lengths if on_axis else 0 * lengths
            array = to_list(counts, first_member, column)
        elif column.axis == "member":
            source = samples.column(column.name.removeprefix("member_"))
            array = to_list(source, first_member, column)
        else:
            array = joined.column(column.name)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=packed.to_arrow())
