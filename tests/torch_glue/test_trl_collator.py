"""The collator makes the batches of TRL 1.16's own collator, as tensors."""

import numpy as np
import pytest
import torch
from support.trl_data import load, queue_samples

import ragged_format as rf
from ragged_format.adapters import trl
from ragged_format.packing import pack_row
from ragged_format.torch.glue.trl import RolloutCollator

PLANNERS = {"token_budget_r2_b1024": 2, "fixed_count_r2_n8": 2, "token_budget_r1_b512": 1}
SAMPLES = trl.to_samples(queue_samples("trl/grpo_samples.npz", sets=False), vocab_size=49152)
BATCHES = load("trl_adapters/batches.npz")
DTYPES = {
    torch.float32: {"old_log_probs", "advantages", "global_n_tokens", "global_n_forward_tokens",
                    "mean_seq_len"},
    torch.int32: {"tree_cu_seqlens_q", "tree_cu_seqlens_k"},
}  # fmt: skip


@pytest.mark.parametrize("planner", PLANNERS)
def test_keys_shapes_dtypes_and_values_are_the_reference(planner):
    rows = load(f"trl/grpo_{planner}.npz")
    collate = RolloutCollator(pad_token_id=2, num_processes=PLANNERS[planner])
    numbers = sorted({key.split(".")[0] for key in rows})
    members = []
    for number in numbers:
        ranks = [rows[f"{number}.row{rank}.samples"] for rank in range(PLANNERS[planner])]
        members += [int(index) for rank in ranks for index in rank]
        packed = [pack_row(rf.take(SAMPLES, which), fork="transition") for which in ranks]
        got = collate([packed])
        prefix = f"{planner}.{number}.batch."
        expected = {k.removeprefix(prefix): v for k, v in BATCHES.items() if k.startswith(prefix)}
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            dtype = next((d for d, names in DTYPES.items() if name in names), torch.int64)
            assert got[name].dtype == dtype
            assert tuple(got[name].shape) == values.shape
            np.testing.assert_array_equal(got[name].numpy(), values)
    groups = SAMPLES.column("group_id").to_pylist()
    assert collate.groups_trained == {groups[index] for index in members}


@pytest.mark.parametrize("examples", [[], [[]], [["row"], ["row"]]])
def test_it_takes_one_micro_batch(examples):
    with pytest.raises(rf.SchemaMismatchError):
        RolloutCollator(pad_token_id=0)(examples)
