"""The summary of counts against plain Python."""

import io
import statistics
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ragged_format.cli.histogram import Counts, histogram_table

COUNT_LISTS = st.lists(st.lists(st.integers(0, 5000), max_size=30), max_size=5)


def summary(parts):
    counts = Counts()
    for part in parts:
        counts.add(np.array(part, np.int32))
    return counts


@given(COUNT_LISTS)
def test_summary_agrees_with_plain_python(parts):
    counts = summary(parts)
    flat = sorted(chain.from_iterable(parts))
    assert counts.elements == len(flat)
    assert counts.total == sum(flat)
    assert counts.max == max(flat, default=0)
    assert counts.median == (statistics.median_low(flat) if flat else 0)
    assert counts.mean == (statistics.fmean(flat) if flat else 0)
    for share in (0.0, 0.9, 0.99, 1.0):
        below = [c for c in flat if sum(x <= c for x in flat) >= share * len(flat)]
        assert counts.quantile(share) == min(below, default=0)


@given(COUNT_LISTS)
def test_bins_are_powers_of_two_and_hold_every_count_once(parts):
    counts = summary(parts)
    flat = list(chain.from_iterable(parts))
    bins = counts.bins()
    assert sum(n for _, _, n in bins) == len(flat)
    assert [n for low, high, n in bins] == [
        sum(low <= c <= high for c in flat) for low, high, _ in bins
    ]
    assert all(high in (0, low) or low == high // 2 + 1 for low, high, _ in bins)


def rendered(counts, **options):
    console = Console(width=100, color_system=None, file=io.StringIO())
    console.print(histogram_table(counts, **options))
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_table_has_a_bar_for_each_bin():
    lines = rendered(summary([[0, 0, 3, 4, 4], [5, 100]]), zero="0 (full)")
    assert lines[0][:4] == ["0", "(full)", "2", "28.6%"]
    assert lines[2] == ["3-4", "3", "42.9%", "█" * 36]
    assert lines[-1] == ["65-128", "1", "14.3%", "█" * 12]


def test_a_run_of_empty_bins_is_one_line():
    assert [line[0] for line in rendered(summary([[1, 5, 100, 101]]))] == [
        "1",
        "…",
        "5-8",
        "…",
        "65-128",
    ]
    assert [line[0] for line in rendered(summary([[3, 9]]))] == ["…", "3-4", "5-8", "9-16"]


def test_a_rare_bin_is_visible():
    assert rendered(summary([[1] * 10_000, [2]]))[1][-1] == "▏"


def test_no_counts_no_lines():
    assert rendered(summary([])) == [] or rendered(summary([])) == [[]]
