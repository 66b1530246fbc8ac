"""Rows of one process reach the others whole, each its own only, and failures reach everybody."""

import numpy as np
from support import rank_jobs
from support.ranks import run_ranks

from ragged_format.torch import RaggedBatch


def expected(row):
    return rank_jobs.content(RaggedBatch.from_arrow(row))


def same(got, want, *, besides=("step_targets", "state")):
    assert got.keys() == want.keys()
    for key in got.keys() - set(besides):
        if isinstance(got[key], dict):
            assert got[key].keys() == want[key].keys()
            for name, values in got[key].items():
                np.testing.assert_array_equal(values, want[key][name])
        else:
            assert got[key] == want[key]


def check_scattered(ranks, row_of, steps=3):
    for step in range(steps):
        rows = rank_jobs.packed_rows(1 + max(row_of), seed=step)
        targets = sum(len(row.column("target_ids")[0]) for row in rows)
        for rank, got in enumerate(ranks):
            batch, sent, received = got[step]
            same(batch, expected(rows[row_of[rank]]))
            assert batch["step_targets"] == targets
            arena = RaggedBatch.from_arrow(rows[row_of[rank]]).nbytes
            if rank == 0:
                assert received == 0
                assert sent == sum(other[step][2] for other in ranks[1:])
            else:
                # Its arena, the lengths and the schema; nothing of other rows.
                assert sent == 0
                assert arena < received < arena + 20_000
    assert all(got[steps][0] is None for got in ranks)


def test_each_of_two_ranks_receives_its_row_only(pair):
    check_scattered(pair["scattered"], [0, 1])


def test_ranks_of_one_group_receive_the_same_row():
    check_scattered(run_ranks(4, rank_jobs.scattered, 3, [0, 0, 1, 1]), [0, 0, 1, 1])


def test_a_stream_of_batches_keeps_order_state_and_ends(pair):
    ranks = pair["streamed"]
    for step, numbers in enumerate(zip(*ranks, strict=True)):
        for row, got in zip(rank_jobs.packed_rows(2, seed=step), numbers, strict=True):
            same(got, expected(row))
            assert got["state"] == {"step": step}
    assert [len(got) for got in ranks] == [3, 3]


def test_without_ahead_a_step_is_asked_for_when_the_one_before_is_done(pair):
    for rank, (steps, rest) in enumerate(pair["one by one"]):
        assert len(steps) == 3
        for step, got in enumerate(steps):
            same(got, expected(rank_jobs.packed_rows(2, seed=step)[rank]))
        (last,) = rest
        same(last, expected(rank_jobs.packed_rows(2, seed=9)[rank]))


def test_broadcast_gives_everybody_the_same(pair):
    (row,) = rank_jobs.packed_rows(1)
    for got, end in pair["broadcast"]:
        same(got, expected(row))
        assert end is None


def test_a_failure_of_the_source_is_one_everywhere(pair):
    first, other = pair["failing"]
    assert [error[0] for error in first[:4]] == [
        "KeyError", "LimitExceededError", "SchemaMismatchError", "LimitExceededError",
    ]  # fmt: skip
    assert [error[0] for error in other[:4]] == ["HandOverError"] * 4
    assert "RF-T002" in other[0][1]
    assert "planner" in other[0][1]
    assert first[4] == other[4] == 1


def test_the_source_does_not_wait_for_the_others(pair):
    assert pair["overlap"] == (1, 1)


def test_a_killed_source_is_an_error_not_a_hang():
    _, other = run_ranks(2, rank_jobs.source_dies, together=False)
    assert "RF-T002" in other
    assert "is gone" in other
