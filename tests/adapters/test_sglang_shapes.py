"""Forms of other SGLang builds, and three tokens whose columns are written out by hand."""

import base64
import copy
import json
from pathlib import Path

import numpy as np
import pytest

from ragged_format.adapters import sglang
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.validate import validate

DATA = Path(__file__).parent.parent / "data" / "sglang"
REQUEST = {"input_ids": [1, 9690, 198, 2683]}
NAMES = [
    "01_unsorted_mask", "02_none_rows_and_length_list", "03_float32_min_floor",
    "04_cumulative_stream", "05_output_store_ref", "06_per_candidate_logprobs_key",
]  # fmt: skip
SETS = {"candidate_counts": [3, 1, 4], "candidate_ids": [5, 264, 911, 287, 9, 12, 30, 277]}


def load(number):
    return json.loads((DATA / "shape_by_documentation" / f"{NAMES[number - 1]}.json").read_text())


def convert(response, request=REQUEST, **options):
    report = ConversionReport()
    extra = {k: options.pop(k) for k in ("store",) if k in options}
    record = {"request": request, "response": response} | extra
    batch = sglang.to_samples([record], vocab_size=49152, report=report, **options)
    validate(batch)
    assert report.unbalanced() == []
    return batch.to_pylist()[0] if batch.num_rows else None, report


def test_unsorted_sets_are_sorted_and_counted():
    row, report = convert(load(1))
    assert {key: row[key] for key in SETS} == SETS
    assert row["rollout_log_probs"] == [-0.25, 0.0, -1.5]
    assert report.converted == {"sets_sorted": 2}


def test_a_null_row_is_a_lost_set_unless_a_policy_says_otherwise():
    """sgl-project/sglang#27408: rows of requests that did not ask are null in mixed batches."""
    with pytest.raises(ConversionError) as found:
        convert(load(2))
    assert (found.value.code, found.value.where.position) == ("RF-A004", 1)
    row, report = convert(load(2), on_missing_support="flag")
    assert row["candidate_counts"] == [2, 0, 1]
    assert row["target_flags"] == [0, 1 | 4, 0]
    assert row["rollout_log_probs"] == [-0.25, 0.0, 0.0]
    assert report.log_probs.dropped == {"log_prob_null": 1}
    row, _ = convert(load(2), on_missing_support="drop_target")
    assert row["completion_mask"] == [0, 0, 0, 0, 1, 0, 1]


def test_a_list_of_lengths_must_agree_with_the_rows():
    response = load(2)
    response["meta_info"]["output_token_sampling_mask_length"][1] = 1
    with pytest.raises(ConversionError) as found:
        convert(response)
    assert found.value.code == "RF-A006"


def test_the_least_float32_is_outside_the_set():
    """sgl-project/sglang#5761: the floor is counted and never stored."""
    response = load(3)
    # The probabilities of the first two invented lists sum to 1.002, which no sampler gives.
    with pytest.raises(ConversionError, match="sum to more than 1"):
        convert(response, logprobs_mode="raw", request=None)
    for row in response["meta_info"]["output_top_logprobs"]:
        row[-1][0] -= 0.1 if row[-1][0] > -9 else 0
    row, report = convert(response, logprobs_mode="raw", request=None)
    assert row["input_ids"] == [1, 9690, 198, 2683, 264, 287, 277]
    assert row["topk_counts"] == [2, 1, 2]
    assert row["topk_ids"] == [264, 5, 287, 30, 277]
    assert report.head_entries.to_dict() == {
        "taken": 6, "stored": 5, "dropped": {"float32_min": 1},
    }  # fmt: skip


@pytest.mark.parametrize("value", [None, float("nan"), "NaN", float("-inf"), "-Infinity", -9999.0])
def test_other_values_that_are_no_log_probs(value):
    """sgl-project/sglang#2955: -inf and NaN come as null, as text, or not as JSON at all."""
    response = load(3)
    response["meta_info"]["output_top_logprobs"][0][1][0] = value
    response["meta_info"]["output_top_logprobs"][2][1][0] = -2.0
    row, report = convert(response, logprobs_mode="raw")
    assert row["topk_counts"] == [1, 1, 2]
    kind = {None: "null", -9999.0: "minus_9999"}.get(value)
    if kind is None:
        kind = "nan" if "nan" in str(value).lower() else "minus_infinity"
    assert report.head_entries.dropped == {kind: 1, "float32_min": 1}


def test_what_its_writer_makes_of_non_finite_numbers():
    """sgl-project/sglang#5984: of -inf, NaN and the least float32 only the last stays a number."""
    values = json.loads((DATA / "non_finite.json").read_text())["a"]
    response = load(1)
    response["meta_info"]["output_token_sampling_logprobs"] = values[:3]
    row, report = convert(response)
    assert row["rollout_log_probs"] == [0.0, 0.0, 0.0]
    assert row["target_flags"] == [4, 4, 4]
    assert report.log_probs.dropped == {"log_prob_null": 2, "log_prob_float32_min": 1}


def test_a_cumulative_stream_is_its_last_event():
    row, _ = convert(load(4))
    assert {key: row[key] for key in SETS} == SETS


def test_a_store_reference_is_refused_unless_its_arrays_are_there():
    response = load(5)
    payload = response.pop("_payload_of_the_handle_base64")
    with pytest.raises(ConversionError, match="output store that was not read") as found:
        convert(response)
    assert found.value.code == "RF-A001"
    raw = {key: base64.b64decode(value) for key, value in payload.items()}
    arrays = {
        key: np.frombuffer(value, "<f4" if key.endswith("logprobs") else "<i4")
        for key, value in raw.items()
    }
    for store in (payload, raw, arrays):
        row, _ = convert(response, store=store)
        assert {key: row[key] for key in SETS} == SETS
        assert row["rollout_log_probs"] == [-0.25, 0.0, -1.5]
    short = arrays | {"output_token_sampling_logprobs": np.zeros(2, np.float32)}
    with pytest.raises(ConversionError) as found:
        convert(response, store=short)
    assert found.value.code == "RF-A006"


def test_log_probs_of_candidates_and_a_flag_of_temperature():
    response = load(6)
    with pytest.raises(ConversionError) as found:
        convert(response)
    assert (found.value.code, found.value.got) == ("RF-A007", "temperature_scaled")
    row, report = convert(response, head_mode="temperature_scaled", heads=0)
    assert {key: row[key] for key in SETS} == SETS
    expected = [-2.0, -0.25, -2.5, 0.0, -1.9, -2.6, -0.7, -1.5]
    assert row["candidate_log_probs"] == np.array(expected, np.float32).tolist()
    assert report.head_entries.dropped == {"column_not_wanted": 6}


def test_sets_in_the_form_of_an_engine_that_slime_patches():
    response = load(1)
    meta = response["meta_info"]
    rows = meta.pop("output_token_sampling_mask")
    own = meta.pop("output_token_sampling_logprobs")
    ids = [i for row in rows for i in row]
    offsets = np.cumsum([0, *map(len, rows)])
    meta["top_p_token_ids"] = base64.b64encode(np.array(ids, "<i4").tobytes()).decode()
    meta["top_p_token_offsets"] = base64.b64encode(offsets.astype("<i4").tobytes()).decode()
    meta["top_p_log_probs"] = base64.b64encode(np.array(own, "<f4").tobytes()).decode()
    row, _ = convert(response)
    assert {key: row[key] for key in SETS} == SETS
    assert row["rollout_log_probs"] == [-0.25, 0.0, -1.5]


def test_a_greedy_request_has_sets_of_one():
    response = load(1)
    response["meta_info"]["output_token_sampling_mask"] = [[264], [287], [277]]
    response["meta_info"]["output_token_sampling_logprobs"] = [0.0, 0.0, 0.0]
    row, report = convert(response, {**REQUEST, "sampling_params": {"temperature": 0, "top_k": 1}})
    assert row["candidate_ids"] == [264, 287, 277]
    assert row["temperature"] == 0.0
    assert report.converted == {}


def test_a_rebuilt_mask_without_the_sampled_token_is_not_repaired():
    """sgl-project/sglang#35966: a set that lacks the sampled token is a fault, never mended."""
    response = load(1)
    response["meta_info"]["output_token_sampling_mask"][0] = [5, 911]
    with pytest.raises(ConversionError, match="sampled token is not in its candidate set"):
        convert(response)
    row, report = convert(response, on_invalid_support="flag")
    assert row["candidate_counts"] == [0, 1, 4]
    assert report.candidates.dropped == {"support_sampled_outside": 2}


FAULTS = {
    "mask one row short": lambda m: m["output_token_sampling_mask"].pop(),
    "log-probs one short": lambda m: m["output_token_sampling_logprobs"].pop(),
    "length of another": lambda m: m.update(output_token_sampling_mask_length=4),
    "tokens lost": lambda m: m.update(completion_tokens=5),
    "another prompt": lambda m: m.update(prompt_tokens=5),
    "top lists one short": lambda m: m.update(output_top_logprobs=[[], []]),
    "log-probs of others": lambda m: m.update(
        output_token_logprobs=[[-1.0, 264, None], [-1.0, 1, None], [-1.0, 277, None]]
    ),
    "candidates not parallel": lambda m: m.update(
        output_token_sampling_mask_logprobs=[[-1.0], [0.0], [-1.0] * 4]
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_lists_that_are_not_aligned_are_refused(fault):
    """NovaSky-AI/SkyRL#883, verl-project/verl#7514: parts of one answer never shift."""
    response = copy.deepcopy(load(1))
    FAULTS[fault](response["meta_info"])
    with pytest.raises(ConversionError) as found:
        convert(response)
    assert found.value.code == "RF-A006"


def test_prompts_that_disagree_are_refused():
    with pytest.raises(ConversionError) as found:
        convert(load(3), {"input_ids": [1, 2, 3, 4]}, logprobs_mode="raw")
    assert found.value.code == "RF-A006"
    with pytest.raises(ConversionError) as found:
        convert(load(1), {})
    assert found.value.code == "RF-A010"


def test_an_abort_of_the_user_is_a_sample_of_what_there_is():
    response = load(1)
    response["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort by user"}
    row, _ = convert(response)
    assert row["finish_reason"] == "abort"
    assert json.loads(row["provenance"])["stop_reason"] == "Abort by user"
    meta = {"id": "x", "finish_reason": {"type": "abort"}, "completion_tokens": 0}
    row, _ = convert({"output_ids": [], "meta_info": meta})
    assert row["completion_mask"] == [0, 0, 0, 0]
