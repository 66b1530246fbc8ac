"""Each policy, on each fault that it decides about."""

import copy

import pytest
from support.vllm_rollouts import choice, entry, golden, record

from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.rules import TargetFlag
from ragged_format.validate import validate


def two(mask, **fields):
    """Return a record whose first choice has `mask` for tokens 3, 4, 7, and a good second one."""
    good = choice([2], [[2]], index=1)
    return record(choice([3, 4, 7], mask, **fields), good)


# What the engine gave, the reason under which it is counted, and the place of the fault.
FAULTS = {
    "lost": (None, "support_null", "on_missing_support", "RF-A004", 0),
    "row lost": ([[3], None, [2, 7]], "support_null", "on_missing_support", "RF-A004", 1),
    "empty": ([[3], [], [2, 7]], "support_empty", "on_invalid_support", "RF-A005", 1),
    "twice": ([[3], [4, 4], [2, 7]], "support_duplicate_ids", "on_invalid_support", "RF-A005", 1),
    "twice, apart": (
        [[3], [4, 1, 4], [2, 7]], "support_duplicate_ids", "on_invalid_support", "RF-A005", 1,
    ),
    "outside": (
        [[3], [1, 9], [2, 7]], "support_sampled_outside", "on_invalid_support", "RF-A005", 1,
    ),
}  # fmt: skip
faults = pytest.mark.parametrize("fault", FAULTS)


def run(fault, policy):
    mask, reason, option, _, position = FAULTS[fault]
    report = ConversionReport()
    batch = vllm.to_samples([two(mask)], vocab_size=10, report=report, **{option: policy})
    validate(batch)
    assert report.unbalanced() == []
    bad = [0, 1, 2] if mask is None else [position]
    given = [len(row or ()) for row in mask or [[], [], []]]
    return batch.to_pylist(), report, reason, bad, given


@faults
def test_error_is_the_default_and_names_the_place(fault):
    mask, _, _, code, position = FAULTS[fault]
    with pytest.raises(ConversionError) as caught:
        vllm.to_samples([golden() | {"request_id": "x"}, two(mask) | {"response": two(mask)[
            "response"] | {"request_id": "r2"}}], vocab_size=10)  # fmt: skip
    assert caught.value.code == code
    assert caught.value.where.row == 1
    assert caught.value.where.column == "choices[0].sampling_mask"
    assert caught.value.where.position == position


@faults
def test_flag_keeps_the_target_and_says_that_its_set_is_missing(fault):
    rows, report, reason, bad, given = run(fault, "flag")
    assert rows[0]["completion_mask"] == [0, 0, 1, 1, 1]
    assert rows[0]["target_flags"] == [int(t in bad) for t in range(3)]
    assert rows[1]["target_flags"] == [0]
    assert rows[0]["candidate_counts"] == [0 if t in bad else given[t] for t in range(3)]
    assert report.flagged == {"support_missing": len(bad)}
    lost = sum(given[t] for t in bad)
    assert report.candidates.dropped == ({reason: lost} if lost else {})


@faults
def test_full_vocab_stores_no_set_and_no_flag(fault):
    rows, report, reason, bad, given = run(fault, "full_vocab")
    assert "target_flags" not in rows[0]
    assert rows[0]["candidate_counts"] == [0 if t in bad else given[t] for t in range(3)]
    assert report.noted["full_vocabulary_targets"] == len(bad)
    lost = sum(given[t] for t in bad)
    assert report.candidates.dropped == ({reason: lost} if lost else {})


@faults
def test_drop_target_keeps_the_token_unscored(fault):
    rows, report, reason, bad, given = run(fault, "drop_target")
    assert rows[0]["input_ids"] == [5, 6, 3, 4, 7]
    assert rows[0]["completion_mask"] == [0, 0] + [int(t not in bad) for t in range(3)]
    assert rows[0]["candidate_counts"] == [given[t] for t in range(3) if t not in bad]
    assert rows[1]["completion_mask"] == [0, 0, 1]
    assert report.targets.dropped == {reason: len(bad)}
    lost = sum(given[t] for t in bad)
    assert report.candidates.dropped == ({reason: lost} if lost else {})


@faults
def test_drop_sample_leaves_the_others(fault):
    rows, report, reason, _, given = run(fault, "drop_sample")
    assert [row["sample_id"] for row in rows] == ["r1/1"]
    assert report.samples.dropped == {reason: 1}
    assert report.tokens.dropped == {reason: 5}
    assert report.targets.dropped == {reason: 3}
    assert report.candidates.dropped == ({reason: sum(given)} if sum(given) else {})


def test_log_probs_and_heads_of_dropped_targets_are_counted():
    out = golden()
    out["response"]["choices"][0]["sampling_mask"][0] = None
    report = ConversionReport()
    batch = vllm.to_samples([out], vocab_size=10, on_missing_support="drop_target", report=report)
    validate(batch)
    assert report.unbalanced() == []
    assert report.log_probs.to_dict() == {
        "taken": 3, "stored": 2, "dropped": {"support_null": 1},
    }  # fmt: skip
    assert report.head_entries.to_dict() == {
        "taken": 6, "stored": 2,
        "dropped": {"minus_9999": 2, "sampled_beyond_head": 1, "support_null": 1},
    }  # fmt: skip


def test_policies_can_differ_and_the_first_reason_counts():
    masks = [[3], None, [2]]
    out = two(masks)
    report = ConversionReport()
    batch = vllm.to_samples(
        [out], vocab_size=10, on_missing_support="drop_sample", on_invalid_support="drop_target",
        report=report,
    )  # fmt: skip
    assert batch.num_rows == 1
    assert report.targets.dropped == {"support_null": 3}
    report = ConversionReport()
    batch = vllm.to_samples(
        [out], vocab_size=10, on_missing_support="drop_target", on_invalid_support="drop_sample",
        report=report,
    )  # fmt: skip
    assert report.samples.dropped == {"support_sampled_outside": 1}
    assert report.unbalanced() == []


def test_a_flag_of_a_dropped_target_makes_no_column():
    masks = [[3], None, [2]]
    batch = vllm.to_samples(
        [two(masks)], vocab_size=10, on_missing_support="flag", on_invalid_support="drop_sample"
    )
    assert "target_flags" not in batch.schema.names


def test_sets_that_came_in_another_order_are_sorted_and_counted():
    """SGLang and some vLLM builds list the sampled token, or the likeliest, first."""
    report = ConversionReport()
    batch = vllm.to_samples([two([[3], [9, 4, 1], [7, 2]])], vocab_size=10, report=report)
    validate(batch)
    assert batch.column("candidate_ids")[0].as_py() == [3, 1, 4, 9, 2, 7]
    assert report.converted["sets_sorted"] == 2


def log_probs(*values):
    content = [entry(i, value, 1) for i, value in zip([3, 4, 7], values, strict=True)]
    return record(choice([3, 4, 7], [[3], [4, 5], [6, 7]], content))


MISSING = {
    "null": None,
    "nan": float("nan"),
    "minus_infinity": float("-inf"),
    "minus_9999": -9999.0,
    "float32_min": -3.4028235e38,
}
kinds = pytest.mark.parametrize("kind", MISSING)


@kinds
def test_a_missing_log_prob_is_zero_and_flagged(kind):
    report = ConversionReport()
    out = log_probs(0.0, MISSING[kind], -0.5)
    batch = vllm.to_samples([out], vocab_size=10, report=report)
    validate(batch)
    row = batch.to_pylist()[0]
    assert row["rollout_log_probs"] == [0.0, 0.0, -0.5]
    assert row["target_flags"] == [0, TargetFlag.LOG_PROB_MISSING, 0]
    assert report.flagged == {"log_prob_missing": 1}
    assert report.log_probs.to_dict() == {
        "taken": 3, "stored": 2, "dropped": {f"log_prob_{kind}": 1},
    }  # fmt: skip


@kinds
def test_a_missing_log_prob_is_an_error_where_asked(kind):
    with pytest.raises(ConversionError, match="no log-prob") as caught:
        vllm.to_samples(
            [log_probs(0.0, MISSING[kind], -0.5)], vocab_size=10, on_missing_log_prob="error"
        )
    assert caught.value.code == "RF-A007"
    assert caught.value.where.position == 1


def test_a_missing_log_prob_drops_its_target_or_sample_where_asked():
    out = log_probs(0.0, None, -0.5)
    report = ConversionReport()
    rows = vllm.to_samples(
        [out], vocab_size=10, on_missing_log_prob="drop_target", report=report
    ).to_pylist()
    assert rows[0]["completion_mask"] == [0, 0, 1, 0, 1]
    assert rows[0]["rollout_log_probs"] == [0.0, -0.5]
    assert report.targets.dropped == report.log_probs.dropped == {"log_prob_null": 1}
    report = ConversionReport()
    batch = vllm.to_samples([out], vocab_size=10, on_missing_log_prob="drop_sample", report=report)
    assert batch.num_rows == 0
    assert report.log_probs.dropped == {"log_prob_null": 3}
    assert report.unbalanced() == []


def test_log_probs_that_only_some_requests_asked_for_are_missing_in_the_others():
    bare = record(choice([3], [[3]]), request_id="r2")
    batch = vllm.to_samples([log_probs(0.0, -1.0, -0.5), bare], vocab_size=10)
    validate(batch)
    assert batch.column("target_flags").to_pylist() == [[0, 0, 0], [4]]
    assert batch.column("rollout_log_probs").to_pylist()[1] == [0.0]


def test_log_probs_that_were_requested_and_lost_are_flagged():
    bare = record(choice([3], [[3]]), sampling={"temperature": 1.0, "logprobs": 0})
    batch = vllm.to_samples([bare], vocab_size=10)
    assert batch.column("target_flags").to_pylist() == [[4]]


def test_candidate_log_probs_are_parallel_and_follow_the_order():
    out = record(choice([3, 4], [[3], [9, 4]], sampling_mask_logprobs=[[0.0], [-0.25, -1.625]]))
    batch = vllm.to_samples([out], vocab_size=10)
    validate(batch)
    assert batch.column("candidate_ids").to_pylist() == [[3, 4, 9]]
    assert batch.column("candidate_log_probs").to_pylist() == [[0.0, -1.625, -0.25]]


def test_a_candidate_without_log_prob_spoils_its_set():
    out = record(choice([3, 4], [[3], [4, 9]], sampling_mask_logprobs=[[0.0], [-0.25, -9999.0]]))
    with pytest.raises(ConversionError, match="a candidate has no log-prob"):
        vllm.to_samples([out], vocab_size=10)
    report = ConversionReport()
    batch = vllm.to_samples([out], vocab_size=10, on_invalid_support="flag", report=report)
    assert batch.column("candidate_log_probs").to_pylist() == [[0.0]]
    assert report.candidates.dropped == {"support_log_prob_missing": 2}


def test_sets_without_log_probs_among_some_that_have_them_are_spoilt():
    with_mass = record(choice([3], [[3]], sampling_mask_logprobs=[[0.0]]))
    without = record(choice([4], [[4, 9]]), request_id="r2")
    with pytest.raises(ConversionError, match="a candidate has no log-prob") as caught:
        vllm.to_samples([with_mass, without], vocab_size=10)
    assert caught.value.where.row == 1


def test_a_failed_call_leaves_the_report_alone():
    report = ConversionReport()
    with pytest.raises(ConversionError):
        vllm.to_samples([golden(), two(None)], vocab_size=10, report=report)
    assert report == ConversionReport()


def test_a_mapping_receives_the_counts_added_up():
    counts = {}
    one = golden()
    vllm.to_samples([one], vocab_size=10, report=counts)
    first = copy.deepcopy(counts)
    vllm.to_samples([one], vocab_size=10, report=counts)
    assert first["targets"] == {"taken": 3, "stored": 3, "dropped": {}}
    assert counts["targets"] == {"taken": 6, "stored": 6, "dropped": {}}
    assert counts["head_entries"]["dropped"]["minus_9999"] == 4
