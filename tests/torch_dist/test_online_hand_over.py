"""One rank tails a log, plans and packs; every rank gets its row of every step."""

from support import rank_jobs

STOP_AT = 3  # as in conftest.py


def steps_of(pair):
    first, other = (rank["steps"] for rank in pair["online"])
    assert len(first) > STOP_AT
    return list(zip(first, other, strict=True))


def test_ranks_get_every_sample_once_over_a_stop(pair):
    ids = [name for step in steps_of(pair) for got in step for name in got["ids"]]
    expected = [n for batch in rank_jobs.online_samples() for n in batch["sample_id"].to_pylist()]
    assert sorted(ids) == sorted(expected)


def test_rows_fit_the_budget_before_and_after_it_changed(pair):
    tokens = [max(got["tokens"] for got in step) for step in steps_of(pair)]
    assert max(tokens[STOP_AT:]) <= 60 < max(tokens[:STOP_AT]) <= 120


def test_every_rank_can_save_the_state_of_a_step(pair):
    for number, (mine, other) in enumerate(steps_of(pair), 1):
        assert mine["state"] == other["state"]
        assert mine["state"]["steps"] == number


def test_a_rank_without_a_row_knows_it(pair):
    (first,), (other,) = (rank["lone"] for rank in pair["online"])
    assert (first["is_filler"], other["is_filler"]) == (False, True)
    assert (len(first["ids"]), other["tokens"]) == (1, 1)


def test_a_failure_of_the_planner_reaches_every_rank(pair):
    (name, text), (other, told) = (rank["error"] for rank in pair["online"])
    assert (name, other) == ("LimitExceededError", "HandOverError")
    assert "longer than a row" in text
    assert "longer than a row" in told
