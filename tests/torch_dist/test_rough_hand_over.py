"""Hand-overs that are misused, left early or too slow: an error or the next step, never a hang."""

import pytest
from support import rank_jobs, rough_rank_jobs
from support.ranks import run_ranks

import ragged_format as rf
from ragged_format.torch.distributed import scatter_rows


@pytest.fixture(scope="module")
def rough():
    jobs = [
        ("left early", rough_rank_jobs.left_early, ()),
        ("refused", rough_rank_jobs.refused, ()),
        ("empty shard", rough_rank_jobs.empty_shard, ()),
    ]
    first, second = run_ranks(2, rank_jobs.in_turn, jobs)
    return {name: (first[name], second[name]) for name in first}


def test_loops_that_are_left_early_are_followed_by_others(rough):
    assert rough["left early"] == ([True] * 6, [True] * 6)


def test_misuse_is_a_typed_error_on_every_rank(rough):
    first, other = rough["refused"]
    assert first.pop("not a member") is None
    assert first.pop("works") == other.pop("works") == 1
    assert set(first) | {"not a member"} == set(other)
    assert all(error is not None and error[1] for error in first.values())
    gone_wrong = {"no stream", "no step", "no state"}
    assert {name for name, error in other.items() if error[0] == "HandOverError"} == gone_wrong


def test_a_rank_may_hold_none_of_the_vocabulary(rough):
    assert rough["empty shard"] == ([True] * 24, [True] * 24)


def test_a_source_that_is_too_slow_is_an_error_everywhere():
    assert run_ranks(2, rough_rank_jobs.slow_source, together=False) == ["HandOverError"] * 2


def test_without_a_process_group_the_error_names_the_call():
    with pytest.raises(rf.SchemaMismatchError, match="init_process_group"):
        scatter_rows([])
