"""Times are taken in turn and the table says what was measured."""

import gc
import json

import pytest

from benchmarks import environment
from benchmarks.harness import (
    Figure,
    Sample,
    Settings,
    format_table,
    interleave,
    median_ratio,
    speed_figure,
    total,
)

SETTINGS = Settings(rounds=4, slice_s=0, quick=True)


def test_contenders_take_turns_and_the_order_rotates():
    calls = []
    collecting = []

    def contender(name):
        def call():
            calls.append(name)
            collecting.append(gc.isenabled())

        return call

    samples = interleave({name: contender(name) for name in "abc"}, SETTINGS)
    assert [len(part) for part in samples.values()] == [4, 4, 4]
    assert "".join(calls[6:]) == "abcbcacababc"  # two calls each come first, to calibrate
    assert not any(collecting[6:])
    assert gc.isenabled()


def test_collection_is_restored_when_a_contender_fails():
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 // 0}, SETTINGS)
    assert gc.isenabled()


def test_ratio_is_the_median_of_the_rounds_ratios():
    slow = [Sample(10, 20), Sample(40, 20), Sample(12, 60)]
    fast = [Sample(1, 1), Sample(10, 1), Sample(1, 1)]
    assert median_ratio(slow, fast) == 10
    assert median_ratio(slow, fast, "wall") == 20
    assert total(slow, fast)[1] == Sample(50, 21)


def test_figure_states_whether_its_goal_is_met():
    assert Figure("a", "1", "2", 3.0, 2.0).met is True
    assert Figure("a", "1", "2", 1.0, 2.0).met is False
    assert Figure("a", "1", "2", 1.0, 2.0, at_most=True).met is True
    assert Figure("a", "1", "peer: not installed", goal=2.0).met is None
    assert Figure("a", "1", "2", 1.0).met is None


def test_table_and_json_hold_every_figure():
    slow, fast = [Sample(0.5, 0.5)], [Sample(0.001, 0.001)]
    figures = [
        speed_figure("pack", fast, slow, label="peer", note=" (old)", goal=400),
        Figure("bytes", "0.4 MB", "peer 3 MB", 0.4, 0.3, unit=" MB", at_most=True),
        Figure("other", "1 ms", "peer: not installed", goal=2.0),
    ]
    lines = format_table(figures).splitlines()
    assert len(lines) == 5
    assert [part.strip() for part in lines[2].split("|")] == [
        "pack", "1 ms", "peer 500 ms (old)", "500x", "500x", "≥ 400x", "yes",
    ]  # fmt: skip
    assert [part.strip() for part in lines[3].split("|")][3:] == ["0.4 MB", "-", "≤ 0.3 MB", "NO"]
    assert [part.strip() for part in lines[4].split("|")][2:] == [
        "peer: not installed", "-", "-", "≥ 2x", "-",
    ]  # fmt: skip
    assert json.loads(json.dumps([figure.to_json() for figure in figures]))[0]["met"] is True


def test_environment_names_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(environment, "_PACKAGES", ("numpy", "no-such-package"))
    versions = environment.describe()["versions"]
    assert versions["no-such-package"] == "not installed"
    assert versions["numpy"][0].isdigit()


def test_a_miss_by_little_does_not_print_as_the_goal():
    miss = Figure("imbalance", "1.0413", "bound 1.0405", 1.00077, 1.0, at_most=True)
    row = [part.strip() for part in format_table([miss]).splitlines()[2].split("|")]
    assert row[3:] == ["1.0008x", "-", "≤ 1x", "NO"]
