"""A head whose vocabulary is sharded over processes gives the results of the whole one."""

import numpy as np
import pytest
from support import rank_jobs


@pytest.mark.parametrize("over", ["support", "vocabulary"])
def test_sharding_by_ids_changes_nothing(pair, over):
    seeds = range(3)
    ranks = pair[f"head over {over}"]
    number = 0
    for seed in seeds:
        case = rank_jobs.head_case(seed)
        whole = rank_jobs.head_results(case, case["weight"], case["bias"], over)
        for _ in range(4):
            mine = [rank[number] for rank in ranks]
            number += 1
            for part in mine:
                for value, expected in zip(part[:4], whole[:4], strict=True):
                    np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10)
            for which in (4, 5):
                joined = np.concatenate([part[which] for part in mine])
                np.testing.assert_allclose(joined, whole[which], rtol=1e-10, atol=1e-10)
