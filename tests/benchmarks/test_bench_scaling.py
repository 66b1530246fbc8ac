"""What many tokens cost, from what jobs were measured at."""

from benchmarks.scaling import costs, manifest_cost


def test_costs_are_per_token_at_the_largest_scale():
    run = {"bytes": 400, "cpu": 2.0, "anonymous": 7, "written": 90, "made": 60, "tokens": 10}
    small = dict.fromkeys(run, 1)
    figures = [
        {"name": "pack: anonymous memory, largest to smallest", "details": {"4": small, "16": run}},
        {"name": "pack: throughput, 16x to 1x of 1 MB", "details": {}},
    ]
    want = {"cpu": 0.2, "read": 40.0, "spilled": 3.0, "made": 6.0, "anonymous": 7}
    assert costs(figures) == {"pack": want}


def test_a_manifest_of_many_shards_is_written_and_read(tmp_path):
    few, many = (manifest_cost(n, tmp_path / str(n))["bytes"] for n in (10, 1000))
    assert 100 * 990 < many - few < 300 * 990
