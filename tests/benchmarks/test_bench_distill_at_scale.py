"""The data of the run from end to end, and its last step on little of it."""

import json

import numpy as np
import pytest

import ragged_format as rf
from benchmarks import distill, distill_at_scale


@pytest.fixture
def batches(monkeypatch):
    monkeypatch.setattr(distill_at_scale, "FILE_TOKENS", 1024)
    monkeypatch.setattr(distill_at_scale, "BLOCK_TOKENS", 512)
    return list(distill_at_scale._batches(2048, 20))


def test_heads_are_valid_and_all_different(batches):
    whole = rf.concat(batches)
    rf.validate(whole)
    heads = whole.column("teacher_topk_ids").flatten().to_numpy().reshape(-1, 20)
    values = whole.column("teacher_topk_log_probs").flatten().to_numpy().reshape(-1, 20)
    assert len(heads) == 2048
    assert len(np.unique(values, axis=0)) == len(values)
    assert len(np.unique(heads, axis=0)) > 512


def test_every_target_is_loaded(batches, tmp_path, capsys):
    with rf.Writer(tmp_path / "data", batches[0].schema, encoding="compact") as writer:
        for batch in batches:
            writer.write(batch)
    distill_at_scale._train(str(tmp_path / "data"))
    facts = json.loads(capsys.readouterr().out)
    assert facts["targets"] == 2048
    assert facts["steps"] == 1
    assert facts["loss"] > 0
    assert distill.LENGTH + 1 <= distill_at_scale.TOKEN_BUDGET
