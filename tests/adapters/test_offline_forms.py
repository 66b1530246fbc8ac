"""tinker, skycap, LlamaKD, Superior-Reasoning and random draws."""

import json
import math

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.adapters import draws, llamakd, skycap, superior_reasoning, tinker
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError


def convert(module, *payloads, report=None, **options):
    batch = module.to_samples(payloads, vocab_size=10, report=report, **options)
    rf.validate(batch)
    return batch


def refused(module, payload, code, **options):
    with pytest.raises(ConversionError) as info:
        convert(module, payload, **options)
    assert info.value.code == code


def test_tinker_lists():
    one = {
        "tokens": [5, 6, 7],
        "topk_prompt_logprobs": [None, [(1, -0.5), (6, -1.5)], [[7, -0.25], [2, None]]],
    }
    report = ConversionReport()
    batch = convert(tinker, one, report=report)
    assert batch.column("teacher_topk_counts").to_pylist() == [[2, 1]]
    assert batch.column("teacher_log_probs").to_pylist() == [[-1.5, -0.25]]
    assert report.head_entries.dropped == {"log_prob_null": 1}
    assert report.unbalanced() == []
    masked = convert(tinker, one | {"weights": [0, 0, 1]})
    assert masked.column("teacher_topk_ids").to_pylist() == [[7]]
    refused(tinker, one | {"topk_prompt_logprobs": [None, []]}, "RF-A006")
    refused(tinker, one | {"topk_prompt_logprobs": [None, [(1,)], []]}, "RF-A002")
    refused(tinker, one | {"topk_prompt_logprobs": [None, 3, []]}, "RF-A002")
    refused(tinker, one | {"topk_prompt_logprobs": 3}, "RF-A002")


TRACE = {
    "sample_id": "t", "token_ids": [5, 6, 3, 8], "loss_mask": [0, 1, 0, 1],
    "logprobs": [0.0, -0.5, 0.0, -0.25],
    "sampling_mask": {"ids": [6, 9, 8], "offsets": [0, 0, 2, 2, 3]},
}  # fmt: skip


def test_skycap_traces_come_back_equal(tmp_path):
    report = ConversionReport()
    batch = convert(skycap, TRACE, report=report)
    assert batch.column("candidate_counts").to_pylist() == [[2, 1]]
    assert report.unbalanced() == []
    assert skycap.to_traces(batch) == [TRACE]
    assert skycap.write([batch], str(tmp_path / "out.jsonl")) == {"traces": 1}
    assert json.loads((tmp_path / "out.jsonl").read_text()) == TRACE
    bare = {k: TRACE[k] for k in ("sample_id", "token_ids", "loss_mask")}
    assert skycap.to_traces(convert(skycap, bare)) == [bare]


def test_skycap_observations_are_empty_rows_and_trained_tokens_have_sets():
    lost = TRACE | {"sampling_mask": {"ids": [6, 9], "offsets": [0, 0, 2, 2, 2]}}
    refused(skycap, lost, "RF-A004")
    batch = convert(skycap, lost, on_missing_support="flag")
    assert batch.column("target_flags").to_pylist() == [[0, 1]]
    with pytest.raises(ConversionError, match="no place for some columns"):
        skycap.to_traces(batch)
    refused(skycap, TRACE | {"sampling_mask": {"ids": [6], "offsets": [0, 0, 1]}}, "RF-A006")
    refused(skycap, TRACE | {"sampling_mask": [[], [6]]}, "RF-A002")
    refused(skycap, TRACE | {"sampling_mask": {"ids": [6], "offsets": [0, 2]}}, "RF-A002")
    refused(skycap, TRACE, "RF-A011", on_missing_support="guess")


def block(length=4, k=3, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(10)[:k] for _ in range(length)]).astype(np.float32)
    values = -np.sort(rng.uniform(1.5, 4, (length, k)).astype(np.float32), axis=1)
    return {"inputs": rng.integers(0, 10, length), "targets": np.stack([ids, values], axis=1)}


def test_llamakd_blocks():
    one = block()
    report = ConversionReport()
    batch = convert(llamakd, one, report=report)
    assert batch.column("teacher_topk_ids").to_pylist() == [
        one["targets"][:3, 0].astype(int).reshape(-1).tolist()
    ]
    assert report.head_entries.dropped == {"beyond_end": 3}
    assert report.unbalanced() == []
    turned = one | {"targets": one["targets"][:, ::-1]}
    assert convert(llamakd, turned).equals(batch)
    assert convert(llamakd, one, ids_plane=0).equals(batch)
    refused(llamakd, one | {"targets": np.ones((4, 2, 3))}, "RF-A011")
    refused(llamakd, one | {"targets": np.ones((3, 2, 3))}, "RF-A006")
    own = convert(llamakd, one, position="own")
    assert own.column("teacher_topk_ids").to_pylist() == [
        one["targets"][1:, 0].astype(int).reshape(-1).tolist()
    ]
    logits = one | {"targets": one["targets"] * [[[1], [-1]]]}
    refused(llamakd, logits, "RF-A007", ids_plane=0)
    got = convert(llamakd, logits, ids_plane=0, values="logit")
    assert rf.parse_schema(got.schema)["teacher_topk_log_probs"].log_prob.value == "logit"


def test_superior_reasoning_rows():
    row = {"sample_uuid": "u", "token_ids": [5, 6, 7], "logprobs": [-0.5, None, -9999.0]}
    report = ConversionReport()
    batch = convert(superior_reasoning, row, report=report)
    assert batch.column("sample_id").to_pylist() == ["u"]
    assert batch.column("teacher_log_probs").to_pylist() == [[0.0, 0.0]]
    assert batch.column("target_flags").to_pylist() == [[16, 16]]
    assert report.log_probs.dropped == {
        "first_token": 1, "log_prob_null": 1, "log_prob_minus_9999": 1
    }  # fmt: skip
    assert report.unbalanced() == []
    known = row | {"prompt_token_ids": [1, 2], "logprobs": [-0.5, -0.25, -0.125]}
    batch = convert(superior_reasoning, known)
    assert batch.column("completion_mask").to_pylist() == [[0, 0, 1, 1, 1]]
    assert batch.column("teacher_log_probs").to_pylist() == [[-0.5, -0.25, -0.125]]
    refused(superior_reasoning, row | {"logprobs": [-0.5]}, "RF-A006")
    refused(superior_reasoning, row | {"logprobs": [-0.5, 0.5, -1]}, "RF-A007")
    refused(superior_reasoning, row | {"sample_uuid": None}, "RF-A002")


DRAWS = {
    "input_ids": [5, 6, 7], "completion_mask": [0, 1, 1],
    "draw_ids": [[], [6, 1, 6], [7]], "draw_weights": [[], [0.25, 0.5, 0.25], [1.0]],
    "draw_log_probs": [[], [-0.5, -1.5, -0.5], [-0.25]],
}  # fmt: skip


def test_draws_keep_their_order_and_repeats(tmp_path):
    """Sparse Logit Sampling: repeats of an id are draws of their own."""
    report = ConversionReport()
    batch = convert(draws, DRAWS, report=report)
    counts = rf.parse_schema(batch.schema)["teacher_topk_counts"]
    assert counts.head_kind == "draws"
    assert batch.column("teacher_topk_ids").to_pylist() == [[6, 1, 6, 7]]
    assert batch.column("teacher_topk_weights").to_pylist() == [[0.25, 0.5, 0.25, 1.0]]
    assert report.unbalanced() == []
    out = draws.to_rows(batch)[0]
    assert out["draw_ids"].tolist() == [[-1] * 3, [6, 1, 6], [7, -1, -1]]
    assert out["draw_weights"].tolist() == [[0] * 3, [0.25, 0.5, 0.25], [1, 0, 0]]
    assert convert(draws, out).equals(batch)
    assert draws.write([batch], str(tmp_path / "out"))["samples"] == 1
    early = draws.to_rows(batch, position="predictor")[0]
    assert early["draw_ids"].tolist() == [[6, 1, 6], [7, -1, -1], [-1] * 3]
    assert convert(draws, early, position="predictor").equals(batch)


def test_draws_with_counts_only():
    plain = {k: v for k, v in DRAWS.items() if k not in ("draw_weights", "draw_log_probs")}
    batch = convert(draws, plain | {"draw_counts": [[], [2, 1, 1], [4]]})
    assert "teacher_topk_log_probs" not in batch.schema.names
    assert batch.column("teacher_topk_weights").to_pylist() == [[2.0, 1.0, 1.0, 4.0]]
    back = draws.to_rows(batch)[0]
    assert "draw_log_probs" not in back
    for changes, code in (
        ({"draw_counts": [[], [2, 0, 1], [4]]}, "RF-A002"),
        ({"draw_counts": [[], [2, math.nan, 1], [4]]}, "RF-A002"),
        ({"draw_counts": [[], [2, 1], [4]]}, "RF-A006"),
        ({"draw_counts": [[], [2, 1, 1]]}, "RF-A006"),
        ({"draw_counts": [[], [2, 1, 1], [4]], "draw_ids": [[], [6, 1, 10], [7]]}, "RF-A005"),
        (DRAWS | {"draw_log_probs": [[], [-0.5, -1.5, -math.inf], [-0.25]]}, "RF-A007"),
    ):
        refused(draws, plain | changes, code)
    top = convert(tinker, {"tokens": [5, 6], "topk_prompt_logprobs": [None, [(6, -0.5)]]})
    with pytest.raises(ConversionError, match="no draws"):
        draws.to_rows(top, lossy=True)


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        ({"tokens": [1], "topk_prompt_logprobs": [None]}, "tinker"), (TRACE, "skycap"),
        ({"inputs": [1], "targets": []}, "llamakd"), (DRAWS, "draws"),
        ({"sample_uuid": "u", "token_ids": [1], "logprobs": [0.0]}, "superior_reasoning"),
        ({"input_ids": [1], "completion_mask": [0], "old_log_probs": [0.0], "advantage": 1.0},
         "trl"),
        ({"input_ids": [1], "completion_mask": [0], "teacher_topk_ids": [[]]}, "trl_distill"),
        ({"messages": [], "logprobs": [[{"token": "token_id:1", "logprob": -1.0}]]}, "axolotl"),
    ],
)  # fmt: skip
def test_forms_are_told_apart(payload, name):
    from ragged_format.adapters.registry import recognize

    assert recognize(payload) == [name]
