"""One test for each public report about masks and log-probs that the adapter guards against."""

import numpy as np
import pytest
from support.vllm_rollouts import as_bytes, choice, entry, golden, record, recorded, stream

from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.validate import validate

TRUNCATED = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}


def error_of(records, **options):
    with pytest.raises(ConversionError) as caught:
        vllm.to_samples(records, vocab_size=49152, **options)
    return caught.value


@pytest.mark.parametrize("others", [[], [golden()]])
def test_a_mask_that_is_null_although_the_engine_has_the_field_is_lost(others):
    """vllm-project/vllm#53826: a sampling path dropped all masks, status 200."""
    lost = record(choice([3, 4], None), sampling=TRUNCATED, request_id="r2")
    error = error_of([*others, lost])
    assert error.code == "RF-A004"
    assert "--return-sampling-mask" in error.remedy


def test_a_response_without_the_field_claims_nothing_about_its_support():
    """vllm-project/vllm#53826: no field at all is an engine that has no masks."""
    bare = record(choice([3, 4], None))
    del bare["response"]["choices"][0]["sampling_mask"]
    batch = vllm.to_samples([bare], vocab_size=10)
    assert "candidate_counts" not in batch.schema.names
    asked = bare | {"request": bare["request"] | {"sampling_params": {
        "return_sampling_mask": True}}}  # fmt: skip
    assert error_of([asked]).code == "RF-A004"
    # One choice with a mask shows that the engine gives them.
    assert error_of([golden(), bare | {"request_id": "r2", "response": bare["response"] | {
        "request_id": "r2"}}]).code == "RF-A004"  # fmt: skip


def test_null_empty_and_single_sets_stay_apart():
    """vllm-project/vllm#53826: null is not [] and [] is not a set of one."""
    report = ConversionReport()
    vllm.to_samples(
        [record(choice([3, 4, 7], [None, [], [7]]))], vocab_size=10, report=report,
        on_missing_support="drop_target", on_invalid_support="drop_target",
    )  # fmt: skip
    assert report.targets.dropped == {"support_null": 1, "support_empty": 1}
    assert report.targets.stored == 1


def test_the_engines_empty_500_names_the_parameters_and_forbids_to_retry():
    """vllm-project/vllm 0.32.0: top_k or temperature missing gives status 500, message ""."""
    for broken in recorded("variants", "openai_endpoints"):
        if broken["http_status"] != 500:
            continue
        for form in (broken, as_bytes(broken)):
            error = error_of([form])
            assert error.code == "RF-A003"
            assert "top_k > 0" in error.what
            assert "temperature > 0" in error.what
            assert "do not retry" in error.remedy


def test_other_error_answers_say_what_the_engine_said():
    """vllm-project/vllm#5299, #16546: more log-probs than the cap."""
    (broken,) = recorded("variants", names=["error_logprobs65"])
    error = error_of([broken])
    assert error.code == "RF-A003"
    assert "greater than max allowed: 64" in error.got
    assert "retry" not in error.remedy


def test_an_error_event_within_a_stream_is_the_answer():
    """vllm-project/vllm#10234: the server fails in the middle of a stream."""
    first = golden()["response"]
    failed = {"error": {"message": "Out of range float values", "code": 400}}
    for text in (stream(first, failed), stream(first, failed, done=False)):
        error = error_of([golden() | {"response": text}])
        assert error.code == "RF-A003"
        assert "Out of range" in error.got


@pytest.mark.parametrize("name", [
    "chat_asks_mask", "chat_n4", "chat_stream", "completions_asks_mask", "completions_n4",
    "chat_render",
])  # fmt: skip
def test_endpoints_that_ignore_the_mask_are_named(name):
    """vllm-project/vllm#49577: the OpenAI endpoints accept return_sampling_mask and ignore it."""
    (answer,) = recorded("openai_endpoints", names=[name])
    for form in (answer, as_bytes(answer)):
        error = error_of([form])
        assert error.code == "RF-A009"
        assert "/inference/v1/generate" in error.remedy
        assert "--return-sampling-mask" in error.remedy


def test_ties_make_sets_wider_than_top_k():
    """sgl-project/sglang#35966, NovaSky-AI/SkyRL#2237: nothing is as wide as top_k."""
    records = recorded("variants", names=["p0_topk20_only", "topk2"])
    report = ConversionReport()
    batch = vllm.to_samples(records, vocab_size=49152, report=report)
    validate(batch)
    assert max(batch.column("candidate_counts").flatten().to_pylist()) > 20
    assert report.noted["sets_wider_than_top_k"] > 0
    assert not report.candidates.dropped


def test_an_abort_before_the_first_token_is_a_sample_without_targets():
    """vllm-project/vllm 0.32.0: null mask, empty content, no weight versions."""
    (zero,) = recorded("abort", names=["zero"])
    batch = vllm.to_samples([zero], vocab_size=49152)
    validate(batch)
    assert batch.num_rows == 1
    assert sum(batch.column("completion_mask")[0].as_py()) == 0
    assert batch.column("finish_reason").to_pylist() == ["abort"]


def test_a_sampled_token_outside_its_set_is_never_inserted():
    """sgl-project/sglang#35966: engines repaired such sets, which changes the mass."""
    wrong = record(choice([3, 4], [[3], [1, 9]]))
    assert error_of([wrong]).code == "RF-A005"
    batch = vllm.to_samples([wrong], vocab_size=10, on_invalid_support="flag")
    assert batch.column("candidate_ids").to_pylist() == [[3]]


def test_columns_of_unequal_length_are_refused():
    """huggingface/trl#5615, NVIDIA-NeMo/RL#1929: a table of another length than the tokens."""
    for broken in (
        choice([3, 4], [[3]]),
        choice([3, 4], [[3], [4], [5]]),
        choice([3, 4], [[3], [4]], [entry(3, 0.0, 1)]),
        choice([3, 4], [[3], [4]], sampling_mask_logprobs=[[0.0]]),
        choice([3, 4], [[3], [4]], [entry(3, 0.0, 1), entry(5, 0.0, 1)]),
    ):
        assert error_of([record(broken)]).code == "RF-A006"


@pytest.mark.parametrize("value", [None, "-Infinity", "-inf", -9999.0, -3.4028234663852886e38])
def test_every_way_to_write_minus_infinity_means_outside(value):
    """vllm-project/vllm#10234, #11073, sgl-project/sglang#5761: what JSON cannot hold."""
    content = [entry(3, -0.25, 1, (4, -1.75, 2), (8, value, 3), (9, value, 4))]
    report = ConversionReport()
    batch = vllm.to_samples([record(choice([3], [[3, 4]], content))], vocab_size=10, report=report)
    validate(batch)
    assert batch.column("topk_ids").to_pylist() == [[3, 4]]
    assert report.head_entries.stored == 2
    assert report.head_entries.dropped.total() == 2
    assert report.unbalanced() == []


def test_nan_is_counted_apart_from_minus_infinity():
    """NVIDIA-NeMo/RL#2962: max(nan, -9999) is nan."""
    content = [entry(3, -0.25, 1, (4, float("nan"), 2), (8, -9999.0, 3))]
    report = ConversionReport()
    batch = vllm.to_samples([record(choice([3], [[3, 4]], content))], vocab_size=10, report=report)
    validate(batch)
    assert report.head_entries.dropped == {"nan": 1, "minus_9999": 1}


def test_ranks_after_a_lost_entry_are_not_certain():
    """NVIDIA-NeMo/RL#2962: a hole in the ranks ends the head."""
    content = [entry(3, -0.25, 1, (4, float("nan"), 2), (8, -3.0, 3), (9, -4.0, 4))]
    report = ConversionReport()
    batch = vllm.to_samples(
        [record(choice([3], [[3, 4, 8, 9]], content))], vocab_size=10, report=report
    )
    assert batch.column("topk_ids").to_pylist() == [[3]]
    assert report.head_entries.dropped == {"nan": 1, "after_gap": 2}


def test_a_null_log_prob_is_missing_and_nothing_crashes():
    """huggingface/trl#6693, #5001, #3867: [null, -1.2]."""
    content = [entry(3, None, 1), entry(4, -1.2, 1)]
    batch = vllm.to_samples([record(choice([3, 4], [[3, 5], [4, 5]], content))], vocab_size=10)
    validate(batch)
    row = batch.to_pylist()[0]
    assert row["rollout_log_probs"] == [0.0, pytest.approx(-1.2)]
    assert row["target_flags"] == [4, 0]


def test_ids_of_floors_are_no_part_of_head_or_set():
    """vllm-project/vllm 0.32.0: a list wider than the set is filled with arbitrary low ids."""
    (wide,) = recorded("variants", names=["logprobs64"])
    batch = vllm.to_samples([wide], vocab_size=49152)
    row = batch.to_pylist()[0]
    at = 0
    sets = iter(row["candidate_ids"])
    for size, width in zip(row["topk_counts"], row["candidate_counts"], strict=True):
        head = set(row["topk_ids"][at : at + size])
        assert head <= {next(sets) for _ in range(width)}
        at += size


def test_k_entries_with_the_sampled_first_are_k_minus_one_of_the_head():
    """vllm-project/vllm 0.32.0: the K-th candidate is cut where the sampled rank exceeds K."""
    low = entry(9, -5.0, 27, (1, -0.5, 1), (2, -1.5, 2))
    high = entry(2, -1.5, 2, (1, -0.5, 1), (4, -2.5, 3))
    single = entry(9, -5.0, 27)
    best = entry(1, -0.5, 1)
    nearly = entry(9, -5.0, 3, (1, -0.5, 1), (2, -1.5, 2))
    tokens = [9, 2, 9, 1, 9]
    sets = [[1, 2, 4, 9]] * 5
    report = ConversionReport()
    batch = vllm.to_samples(
        [record(choice(tokens, sets, [low, high, single, best, nearly]))], vocab_size=10,
        report=report,
    )  # fmt: skip
    validate(batch)
    row = batch.to_pylist()[0]
    assert row["topk_counts"] == [2, 3, 0, 1, 3]
    assert row["topk_ids"] == [1, 2, 1, 2, 4, 1, 1, 2, 9]
    assert row["target_flags"] == [0, 0, 8, 0, 0]
    assert report.head_entries.dropped == {"sampled_beyond_head": 2}
    assert report.noted["heads_one_short"] == 2


def test_k_plus_one_entries_with_the_sampled_token_twice_are_accepted():
    """huggingface/trl#6705: the engine's own rows hold the sampled token twice."""
    doubled = entry(2, -1.5, 2, (1, -0.5, 1), (2, -1.5, 2), (4, -2.5, 3))
    report = ConversionReport()
    batch = vllm.to_samples(
        [record(choice([2], [[1, 2, 4]], [doubled]))], vocab_size=10, report=report
    )
    assert batch.column("topk_ids").to_pylist() == [[1, 2, 4]]
    assert report.head_entries.dropped == {"repeats_sampled": 1}


def test_ties_rank_the_sampled_token_last_of_its_equals():
    """vllm-project/vllm: the sampled rank counts all values that are not below its own."""
    tied = entry(2, -1.5, 3, (1, -1.0, 1), (4, -1.5, 3), (5, -3.0, 4))
    batch = vllm.to_samples([record(choice([2], [[1, 2, 4, 5]], [tied]))], vocab_size=10)
    validate(batch)
    assert batch.column("topk_ids").to_pylist() == [[1, 2, 4, 5]]


def test_tokens_known_by_their_text_only_are_lost_and_counted():
    """vllm-project/vllm#44319, #44504, #48674: two ids decode to one string."""
    item = {"token": " a", "logprob": -0.5, "bytes": [32, 97]}
    content = [item | {"top_logprobs": [item, {"token": " b", "logprob": -1.5, "bytes": []}]}]
    report = ConversionReport()
    batch = vllm.to_samples(
        [record(choice([3], [[3, 4]], content), golden()["response"]["choices"][0] | {"index": 1})],
        vocab_size=10, report=report,
    )  # fmt: skip
    assert batch.column("rollout_log_probs").to_pylist()[0] == [-0.5]
    assert batch.column("topk_counts").to_pylist()[0] == [0]
    assert report.head_entries.dropped["text_only"] == 2


def test_ids_within_texts_are_read():
    """vllm-project/vllm: older builds write token_id:123 as the token."""
    item = {"token": "token_id:3", "logprob": -0.5, "rank": 1}
    other = {"token": "token_id:4", "logprob": -1.5, "rank": 2}
    content = [item | {"top_logprobs": [item, other]}]
    batch = vllm.to_samples([record(choice([3], [[3, 4]], content))], vocab_size=10)
    assert batch.column("topk_ids").to_pylist() == [[3, 4]]
    other["token"] = "token_id:x4"
    report = ConversionReport()
    vllm.to_samples([record(choice([3], [[3, 4]], content))], vocab_size=10, report=report)
    assert report.head_entries.dropped == {"text_only": 2}


def test_raw_values_called_processed_are_refused():
    """vllm-project/vllm#9453: the only token of a set has log-prob 0 after truncation."""
    raw = record(choice([3, 4], [[3], [4, 5]], [entry(3, -0.8, 1), entry(4, -1.2, 2)]))
    error = error_of([raw])
    assert error.code == "RF-A007"
    assert error.where.position == 0
    assert "logprobs_mode='raw'" in error.remedy
    batch = vllm.to_samples([raw], vocab_size=10, logprobs_mode="raw")
    validate(batch)
    field = batch.schema.field("rollout_log_probs")
    assert b'"mode":"raw"' in field.metadata[b"ragged_format:log_prob"]


@pytest.mark.parametrize("says", ["raw", "raw_logprobs", "processed_logits"])
def test_records_of_another_mode_do_not_mix(says):
    """vllm-project/vllm#9453: users compared raw and processed values."""
    error = error_of([golden() | {"logprobs_mode": says}])
    assert error.code == "RF-A007"
    for same in ("processed", "processed_logprobs"):
        vllm.to_samples([golden() | {"logprobs_mode": same}], vocab_size=10)


def test_a_schema_of_another_mode_does_not_mix():
    """vllm-project/vllm#9453."""
    raw = vllm.to_samples([golden()], vocab_size=10, logprobs_mode="raw").schema
    assert error_of([golden()], schema=raw).code == "RF-A011"  # another vocabulary
    with pytest.raises(ConversionError) as caught:
        vllm.to_samples([golden()], schema=raw)
    assert caught.value.code == "RF-A007"


def test_more_log_probs_than_the_vocabulary_has_ids_are_accepted():
    """vllm-project/vllm#5299: K > V gives fewer entries."""
    content = [entry(0, -0.5, 1, (1, -1.5, 2))]
    out = record(
        choice(
            [0],
            [[0, 1]],
            content,
        ),
        prompt=[1],
        sampling={"logprobs": 20},
    )
    batch = vllm.to_samples([out], vocab_size=2)
    assert batch.column("topk_counts").to_pylist() == [[2]]


def test_positive_log_probs_are_logits_and_refused():
    """axolotl-ai-cloud/axolotl#2692: losses went negative."""
    own = record(choice([3], [[3, 4]], [entry(3, 1.5, 1)]))
    assert error_of([own]).code == "RF-A007"
    other = record(choice([3], [[3, 4]], [entry(3, -1.5, 2, (4, 2.5, 1))]))
    assert error_of([other]).code == "RF-A007"
    infinite = record(choice([3], [[3, 4]], [entry(3, float("inf"), 1)]))
    assert error_of([infinite]).code == "RF-A007"


def test_probabilities_that_sum_to_more_than_one_are_refused():
    """axolotl-ai-cloud/axolotl#2692: the mass of a head is at most 1."""
    heavy = record(choice([3], [[3, 4]], [entry(3, -0.1, 1, (4, -0.1, 2))]))
    assert error_of([heavy]).code == "RF-A007"
    heavy = record(choice([3], [[3, 4]], sampling_mask_logprobs=[[-0.1, -0.1]]))
    assert error_of([heavy]).code == "RF-A007"


def test_ranks_and_log_probs_that_contradict_each_other_are_refused():
    """axolotl-ai-cloud/axolotl#2692: order is part of the data."""
    swapped = record(choice([3], [[3, 4]], [entry(3, -2.5, 1, (4, -0.5, 2))]))
    assert error_of([swapped]).code == "RF-A007"


def test_unused_ids_outside_the_vocabulary_are_refused():
    """arcee-ai/DistillKit: unfilled slots hold arbitrary ids."""
    for broken in (
        choice([3], [[3, 60000]]),
        choice([3], [[-1, 3]]),
        choice([3], [[3, 4]], [entry(3, -0.5, 1, (60000, -9999.0, 2))]),
        choice([60000], [[60000]]),
    ):
        assert error_of([record(broken)]).code == "RF-A005"
    outside = error_of([record(choice([3], [[3]]), prompt=[60000])])
    assert (outside.code, outside.where.column) == ("RF-A005", "prompt_token_ids")
    twice = choice([3], [[3, 4]], [entry(3, -0.5, 1, (4, -1.5, 2), (4, -1.5, 3))])
    assert error_of([record(twice)]).code == "RF-A005"


def test_responses_join_their_requests_by_content_not_by_order():
    """NovaSky-AI/SkyRL#883: masks were fetched by batch position."""
    one = golden()
    one["request"]["token_ids"] = [5, 7]
    assert error_of([one]).code == "RF-A006"


def test_log_probs_are_never_padded_with_zero_in_silence():
    """radixark/vime#70: a zero is a log-prob."""
    short = record(choice([3, 4], [[3], [4]], [entry(3, 0.0, 1), {"token_id": 4, "rank": 1}]))
    report = ConversionReport()
    batch = vllm.to_samples([short], vocab_size=10, report=report)
    assert batch.column("target_flags").to_pylist() == [[0, 4]]
    assert report.log_probs.dropped == {"log_prob_null": 1}


def test_a_vocabulary_wide_set_costs_four_bytes_an_id():
    """vllm-project/vllm#54901, PrimeIntellect-ai/prime-rl#3431: no table as wide as V."""
    wide = list(range(50000))
    tokens = [7] * 4
    batch = vllm.to_samples([record(choice(tokens, [wide, [7], [7], [7]]))], vocab_size=50000)
    assert batch.nbytes < 4 * 50000 + 2000
    assert np.array_equal(batch.column("candidate_ids")[0].values.to_numpy()[:50000], wide)
