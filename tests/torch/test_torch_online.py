"""Rows packed from a log that is being written: groups, staleness, the cursor."""

import json
import threading
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format import LimitExceededError, StateMismatchError
from ragged_format.packing import unpack_row
from ragged_format.testing import rollouts
from ragged_format.torch import OnlineLoader
from ragged_format.torch.tail import Page, SourceTail, Tail


class Log:
    """The log of a server, in this process: pages by a cursor, waiting for more until closed."""

    identity = "log://test"

    def __init__(self, batches=(), *, closed=False):
        self.batches = list(batches)
        self.closed = closed
        self.reads = []
        self._changed = threading.Condition()

    def append(self, *batches):
        with self._changed:
            self.batches.extend(batches)
            self._changed.notify_all()

    def close(self):
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def read(self, after, *, wait_s):
        at = int(after or 0)
        self.reads.append(at)
        with self._changed:
            self._changed.wait_for(lambda: len(self.batches) > at or self.closed, wait_s)
            page = self.batches[at : at + 2]
            end = at + len(page)
            return Page(page, str(end), is_end=self.closed and end == len(self.batches))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.01
        return self.now


@pytest.fixture(scope="module")
def traffic():
    """80 samples in 20 groups of 4, of one batch each 5."""
    batch = rollouts(
        np.random.default_rng(5), num_samples=80, prompt_length=12, response_length=9,
        vocab_size=500, max_candidates=9, top_k=3, group_size=4,
    )  # fmt: skip
    return [batch.slice(start, 5) for start in range(0, 80, 5)]


def members(rows):
    return [name for row in rows for name in row.strings("member_sample_id")]


def every_id(batches):
    return [name for batch in batches for name in batch.column("sample_id").to_pylist()]


def loader_of(log, *, budget=120, **options):
    return OnlineLoader(log, budget, prefetch=0, clock=Clock(), **options)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_sample_is_delivered_once_in_rows_within_the_budget(traffic, rows, prefetch):
    assert isinstance(Log(), Tail)
    with OnlineLoader(Log(traffic, closed=True), 120, rows=rows, prefetch=prefetch) as loader:
        seen = []
        for number, step in enumerate(loader, 1):
            assert len(step) == rows
            assert all(row.num_rows == 1 for row in step)
            assert all(int(row.lengths("token")[0]) <= 120 for row in step)
            targets = sum(int(row.lengths("target").sum()) for row in step)
            assert {row.step_targets for row in step} == {targets}
            assert step[0].state == loader.state_dict()
            assert step[0].state["steps"] == number
            seen += members(step)
        assert sorted(seen) == sorted(every_id(traffic))
        assert loader.metrics.delivered == loader.metrics.read == 80
        assert loader.metrics.rows + loader.metrics.filler_rows == rows * loader.metrics.steps
        assert loader.state_dict()["pending"] == []
        assert list(loader) == []


def test_rows_hold_the_samples_that_they_name(traffic):
    by_id = {
        name: batch.slice(row, 1)
        for batch in traffic
        for row, name in enumerate(batch.column("sample_id").to_pylist())
    }
    for step in loader_of(Log(traffic, closed=True)):
        for row in step:
            expected = rf.concat([by_id[name] for name in members([row])])
            assert row["input_ids"].numel() <= 120
            assert row["member_lengths"].tolist() == [
                len(ids.as_py()) for ids in expected.column("input_ids")
            ]
            assert row["candidate_ids"].tolist() == [
                i for ids in expected.column("candidate_ids").to_pylist() for i in ids
            ]
    assert callable(unpack_row)


def test_missing_rows_are_empty_ones(traffic):
    (step,) = loader_of(Log(traffic[:1], closed=True), budget=10_000, rows=8)
    assert [row.is_filler for row in step] == [False] * 5 + [True] * 3
    assert all(row["input_ids"].tolist() == [0] for row in step[5:])


@pytest.mark.parametrize("stop_at", range(0, 30, 3))
def test_resuming_delivers_the_rest_exactly_once(traffic, stop_at):
    log = Log(traffic, closed=True)
    first = loader_of(log, rows=2, group_size=4)
    state, seen = first.state_dict(), []
    for number, step in enumerate(first):
        if number == stop_at:
            break
        seen += members(step)
        state = json.loads(json.dumps(step[0].state))
        undelivered = set(every_id(traffic)) - set(seen)
        before = every_id(traffic[: int(state["cursor"] or 0)])
        assert not undelivered & set(before), "the cursor passed a sample"
        assert set(state["pending"]) <= undelivered
    second = loader_of(log, budget=150, rows=3)
    second.load_state_dict(state)
    rest = [name for step in second for name in members(step)]
    assert sorted(seen + rest) == sorted(every_id(traffic))
    assert log.reads[-1] >= int(state["cursor"] or 0)


def test_groups_wait_until_they_are_complete(traffic):
    log = Log(traffic[:2])
    loader = loader_of(log, group_size=4, budget=60, window=1, max_wait_s=0.5)
    ids = every_id(traffic)
    group_of = dict(zip(
        ids, [g for b in traffic for g in b.column("group_id").to_pylist()], strict=True
    ))  # fmt: skip
    seen = members(next(iterator := iter(loader)))
    log.append(*traffic[2:])
    log.close()
    while len(seen) < 80:
        counts = Counter(group_of[name] for name in loader.state_dict()["pending"])
        assert not any(group_of[name] in counts and counts[group_of[name]] == 4 for name in seen)
        seen += members(next(iterator))
    assert loader.metrics.groups_timed_out == 0


@pytest.mark.parametrize("on_timeout", ["release", "drop"])
def test_a_group_that_stays_incomplete(traffic, on_timeout):
    whole = rf.concat(traffic)
    missing_one = whole.slice(0, 7)
    log = Log([missing_one], closed=False)
    loader = loader_of(
        log, group_size=4, group_timeout_s=0.3, on_timeout=on_timeout, max_wait_s=0.5
    )
    seen = []
    log.close() if on_timeout == "release" else None
    iterator = iter(loader)
    seen += members(next(iterator))
    log.close()
    seen += [name for step in iterator for name in members(step)]
    expected = every_id([missing_one])
    assert sorted(seen) == sorted(expected if on_timeout == "release" else expected[:4])
    assert loader.metrics.groups_timed_out == 1
    assert loader.metrics.dropped_timeout == (0 if on_timeout == "release" else 3)
    assert loader.state_dict()["pending"] == []
    assert loader.state_dict()["cursor"] == "1"


def test_too_old_samples_are_left_out_and_counted(traffic):
    whole = rf.concat(traffic).slice(0, 12)
    versions = pa.array([5, 9, None, 10] * 3, pa.int64())
    index = whole.schema.get_field_index("policy_version")
    batch = whole.set_column(index, whole.schema.field("policy_version"), versions)
    loader = loader_of(Log([batch], closed=True), max_staleness=1, current_version=lambda: 10)
    seen = [name for step in loader for name in members(step)]
    ids = every_id([batch])
    assert sorted(seen) == sorted(name for n, name in enumerate(ids) if n % 4)
    metrics = loader.metrics.to_json()
    assert (metrics["dropped_stale"], metrics["unknown_version"]) == (3, 3)
    assert (metrics["max_staleness"], metrics["sum_staleness"]) == (1, 3)
    assert metrics["delivered"] + metrics["dropped_stale"] == metrics["read"] == 12


def test_tinker_cookbook_822_what_staleness_does_to_lengths_is_counted():
    """thinking-machines-lab/tinker-cookbook#822: stale samples are the long ones, unseen."""
    schema = rf.sample_schema(vocab_size=9, columns=["policy_version"])
    lengths = [2, 3, 4, 5, 8, 9, 16, 2, 4, 5, 9]
    fresh = [True] * 4 + [False] * 3 + [True, False, True, True]
    records = [
        {
            "sample_id": f"s{number}", "input_ids": [1] * length,
            "completion_mask": [0] + [1] * (length - 1), "policy_version": 9 if is_fresh else 7,
        }
        for number, (length, is_fresh) in enumerate(zip(lengths, fresh, strict=True))
    ]  # fmt: skip
    batch = pa.RecordBatch.from_pylist(records, schema=schema)
    loader = loader_of(Log([batch], closed=True), max_staleness=1, current_version=lambda: 9)
    seen = [name for step in loader for name in members(step)]
    assert sorted(seen) == sorted(f"s{n}" for n, is_fresh in enumerate(fresh) if is_fresh)
    metrics = loader.metrics
    assert metrics.stale_by_length == {4: 1, 8: 1, 16: 2}
    assert metrics.delivered_by_length == {2: 2, 4: 2, 8: 2, 16: 1}
    assert sum(metrics.stale_by_length.values()) == metrics.dropped_stale
    assert sum(metrics.delivered_by_length.values()) == metrics.delivered
    assert json.loads(json.dumps(metrics.to_json()))["stale_by_length"] == {
        "4": 1, "8": 1, "16": 2,
    }  # fmt: skip


def test_long_and_unscored_samples_and_duplicates(traffic):
    whole = rf.concat(traffic)
    longest = max(len(ids.as_py()) for ids in whole.column("input_ids"))
    with pytest.raises(LimitExceededError, match="longer than a row"):
        list(loader_of(Log([whole], closed=True), budget=longest - 1))
    loader = loader_of(
        Log([whole, whole.slice(0, 3)], closed=True), budget=longest - 1, on_oversize="drop"
    )
    seen = [name for step in loader for name in members(step)]
    assert len(seen) == loader.metrics.delivered < 80
    assert loader.metrics.delivered + loader.metrics.dropped_oversize == 80
    assert loader.metrics.duplicates == 3
    plain = rf.sample_schema(vocab_size=9, columns=[])
    unscored = {"sample_id": "x", "input_ids": [1, 2], "completion_mask": [0, 0]}
    scored = {"sample_id": "y", "input_ids": [1, 2], "completion_mask": [0, 1]}
    batch = pa.RecordBatch.from_pylist([unscored, scored], schema=plain)
    loader = loader_of(Log([batch], closed=True), group_size=2)
    assert [members(step) for step in loader] == [["y"]]
    assert loader.metrics.without_target == 1


def test_any_source_is_a_log_that_ends(traffic, tmp_path):
    with rf.Writer(tmp_path / "data", traffic[0].schema) as writer:
        for batch in traffic:
            writer.write(batch)
    rf.write_stream(tmp_path / "s.arrows", traffic)
    for place in (tmp_path / "data", tmp_path / "s.arrows"):
        loader = loader_of(place, rows=2)
        iterator = iter(loader)
        seen = members(next(iterator)) + members(next(iterator))
        again = loader_of(place)
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        seen += [name for step in again for name in members(step)]
        assert sorted(seen) == sorted(every_id(traffic))
    with pytest.raises(StateMismatchError, match="ends before"):
        SourceTail(tmp_path / "s.arrows").read("99", wait_s=0)


def test_closing_ends_a_thread_that_waits_for_samples(traffic):
    loader = OnlineLoader(Log(traffic), 120, max_wait_s=0.1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(StateMismatchError, match="under way"):
        loader.load_state_dict(loader.state_dict())
    loader.close()
    assert list(iterator) == []
    rest = iter(loader)
    assert members(next(rest))
    del rest, iterator
    assert all("ragged-" not in thread.name for thread in threading.enumerate())


def test_states_and_options_that_do_not_fit(traffic):
    loader = loader_of(Log(traffic, closed=True))
    for wrong in ({}, {**loader.state_dict(), "log": "log://other"}):
        with pytest.raises(StateMismatchError):
            loader.load_state_dict(wrong)
    for options in (
        {"budget": 0}, {"rows": 0}, {"group_size": 0}, {"on_timeout": "wait"}, {"window": 0},
        {"max_staleness": 3}, {"on_oversize": "cut"},
    ):  # fmt: skip
        with pytest.raises(LimitExceededError):
            loader_of(Log(), **options)
