"""AsyncGRPO queue samples (TRL 1.16.0) in and out."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from support.trl_data import with_sets

import ragged_format as rf
from ragged_format.adapters import trl
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError

VOCAB = 49152
HEADS = [{}, {}, {3: -0.5, 7: -1.25, 8: -9999.0}, {4: -0.25, 1: -1.75}]


def sample(**changes):
    return {
        "input_ids": [5, 6, 3, 4], "completion_mask": [0, 0, 1, 1],
        "old_log_probs": [0.0, 0.0, -0.5, -0.25], "advantage": 0.5, "model_version": 3,
        "group_id": 2, "metrics": {"reward": 1.0}, "enqueued_at": 1000.5,
        "sampling_mask": [[], [], [3, 7], [4]],
    } | changes  # fmt: skip


def convert(*samples, report=None, **options):
    batch = trl.to_samples(samples, vocab_size=10, report=report, **options)
    rf.validate(batch)
    return batch


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in right.items():
        got = left[name]
        if isinstance(value, np.ndarray):
            assert got.dtype == value.dtype, name
            np.testing.assert_array_equal(got, value)
        else:
            assert got == value, name


def test_real_samples_come_back_equal():
    samples = with_sets()
    report = ConversionReport()
    batch = trl.to_samples(samples, vocab_size=VOCAB, report=report)
    rf.validate(batch)
    assert report.unbalanced() == []
    assert report.candidates.taken == report.candidates.stored == 24127
    assert report.candidates.dropped.total() == 0
    back = trl.to_queue_samples(batch, form="lists")
    for mine, theirs in zip(back, samples, strict=True):
        same(mine, theirs)
    # Of the realigned row, overwritten tokens are context and have neither set nor log-prob.
    assert report.targets.stored == sum(int(s["completion_mask"].sum()) for s in samples)


def test_arrays_and_lists_are_the_same_samples():
    lists = [sample(top_k=HEADS)]
    arrays = [sample(
        sampling_mask=np.array([3, 7, 4]), sampling_mask_counts=np.array([0, 0, 2, 1]),
        top_k_ids=np.array([[-1, -1, -1], [-1, -1, -1], [3, 7, 8], [4, 1, -1]]),
        top_k_log_probs=np.array(
            [[-np.inf] * 3, [-np.inf] * 3, [-0.5, -1.25, -9999.0], [-0.25, -1.75, -np.inf]],
            np.float32,
        ),
    )]  # fmt: skip
    table = [sample(sampling_mask=np.array([[-1, -1], [-1, -1], [3, 7], [4, -1]]), top_k=HEADS)]
    a, b, c = (convert(*samples) for samples in (lists, arrays, table))
    assert a.equals(b)
    assert a.equals(c)
    assert a.column("topk_ids").to_pylist() == [[3, 7, 4, 1]]
    out = trl.to_queue_samples(a)[0]
    np.testing.assert_array_equal(out["sampling_mask"], [3, 7, 4])
    np.testing.assert_array_equal(out["sampling_mask_counts"], [0, 0, 2, 1])
    np.testing.assert_array_equal(out["top_k_ids"], [[-1, -1], [-1, -1], [3, 7], [4, 1]])
    assert out["top_k_ids"].dtype == np.int64
    assert out["top_k_log_probs"].dtype == np.float32
    same(trl.to_queue_samples(convert(out))[0], out)


def test_objects_with_attributes_are_read_as_mappings_are():
    @dataclass(slots=True)
    class RolloutSample:
        input_ids: np.ndarray
        completion_mask: np.ndarray
        old_log_probs: np.ndarray
        advantage: float
        model_version: int
        group_id: int
        metrics: dict
        enqueued_at: float

    given = {k: v for k, v in sample().items() if k != "sampling_mask"}
    assert convert(RolloutSample(**given)).equals(convert(given))


def test_floors_are_dropped_and_counted():
    report = ConversionReport()
    convert(sample(top_k=HEADS), report=report)
    assert (report.head_entries.taken, report.head_entries.stored) == (5, 4)
    assert report.head_entries.dropped == {"log_prob_minus_9999": 1}


def test_entries_on_context_are_dropped_and_counted():
    """A realigned span becomes context; what its tokens had must not stay."""
    report = ConversionReport()
    batch = convert(
        sample(
            completion_mask=[0, 0, 0, 1], old_log_probs=[0, 0, -0.5, -0.25], top_k=HEADS
        ),
        report=report,
    )  # fmt: skip
    assert batch.column("candidate_ids").to_pylist() == [[4]]
    assert report.candidates.dropped == {"context": 2}
    assert report.log_probs.dropped == {"context": 1}
    assert report.head_entries.dropped == {"context": 3}
    assert report.unbalanced() == []


@pytest.mark.parametrize("lost", [[[], [], [], [4]], [None, None, None, [4]]])
def test_a_trained_token_without_a_set_is_no_full_vocabulary(lost):
    """vllm-project/vllm#53826: lost sets are empty or null."""
    with pytest.raises(ConversionError, match="no candidate set") as info:
        convert(sample(sampling_mask=lost))
    assert (info.value.code, info.value.where.position) == ("RF-A004", 2)
    flagged = convert(sample(sampling_mask=lost), on_missing_support="flag")
    assert flagged.column("target_flags").to_pylist() == [[1, 0]]
    report = ConversionReport()
    dropped = convert(sample(sampling_mask=lost), on_missing_support="drop_target", report=report)
    assert dropped.column("completion_mask").to_pylist() == [[0, 0, 0, 1]]
    assert report.targets.dropped == {"support_missing": 1}
    assert report.unbalanced() == []
    whole = convert(sample(sampling_mask=lost), on_missing_support="full_vocab")
    assert whole.column("candidate_counts").to_pylist() == [[0, 1]]
    none = convert(sample(sampling_mask=lost), on_missing_support="drop_sample")
    assert none.num_rows == 0


def test_sampled_token_outside_its_set_is_refused():
    """sgl-project/sglang#36630 and NovaSky-AI/SkyRL#2237 repaired such sets."""
    bad = [[], [], [7, 8], [4]]
    with pytest.raises(ConversionError, match="not in its candidate set"):
        convert(sample(sampling_mask=bad))
    report = ConversionReport()
    convert(sample(sampling_mask=bad), on_invalid_support="flag", report=report)
    assert report.candidates.dropped == {"support_sampled_outside": 2}
    assert report.unbalanced() == []


def test_unsorted_sets_are_sorted_and_repeats_refused():
    report = ConversionReport()
    batch = convert(sample(sampling_mask=[[], [], [7, 3], [4]]), report=report)
    assert batch.column("candidate_ids").to_pylist() == [[3, 7, 4]]
    assert report.converted["sets_sorted"] == 1
    with pytest.raises(ConversionError, match="twice"):
        convert(sample(sampling_mask=[[], [], [3, 3], [4]]))


def test_null_and_nan_log_probs_are_missing():
    """huggingface/trl#6693, #5001, #3867: a null or NaN log-prob spoiled the loss.

    Placeholders hide them: 1.0 (allenai/open-instruct#1817), a silent 0.0 (vime#70). Here the
    target is flagged.
    """
    report = ConversionReport()
    batch = convert(sample(old_log_probs=[0.0, 0.0, None, math.nan]), report=report)
    assert batch.column("rollout_log_probs").to_pylist() == [[0.0, 0.0]]
    assert batch.column("target_flags").to_pylist() == [[4, 4]]
    assert report.log_probs.dropped == {"log_prob_null": 1, "log_prob_nan": 1}
    assert report.unbalanced() == []
    with pytest.raises(ConversionError, match="no log-prob"):
        convert(sample(old_log_probs=[0, 0, None, -1]), on_missing_log_prob="error")


def test_a_trained_first_token_is_no_target():
    report = ConversionReport()
    batch = convert(
        sample(completion_mask=[1, 0, 1, 1], sampling_mask=[[5], [], [3, 7], [4]]), report=report
    )
    assert batch.column("completion_mask").to_pylist() == [[0, 0, 1, 1]]
    assert report.targets.dropped == {"first_token": 1}
    assert report.candidates.dropped == {"context": 1}
    assert report.unbalanced() == []


def test_nan_metrics_survive():
    report = ConversionReport()
    batch = convert(sample(metrics={"reward": math.nan, "a": 0.25}), report=report)
    assert report.converted["nan_metrics"] == 1
    metrics = trl.to_queue_samples(batch)[0]["metrics"]
    assert math.isnan(metrics["reward"])
    assert metrics["a"] == 0.25


def test_messages_are_kept_on_request():
    talk = {"prompt": [{"role": "user", "content": "Hi"}], "completion": []}
    report = ConversionReport()
    assert trl.to_queue_samples(convert(sample(**talk), report=report))[0]["prompt"] == []
    assert report.unread["prompt"] == 1
    kept = convert(sample(**talk), keep_messages=True)
    assert trl.to_queue_samples(kept)[0]["prompt"] == talk["prompt"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"old_log_probs": [0.0, 0.0, -0.5]}, "RF-A006"),
        ({"completion_mask": [0, 0, 1]}, "RF-A006"),
        ({"completion_mask": [0, 0, 2, 1]}, "RF-A002"),
        ({"sampling_mask": [[3, 7], [4]]}, "RF-A006"),
        ({"input_ids": [5, 6, 3, 10]}, "RF-A005"),
        ({"input_ids": None}, "RF-A002"),
        ({"sampling_mask": [[], [], [3, 10], [4]]}, "RF-A005"),
        ({"old_log_probs": [0.0, 0.0, 0.5, -0.25]}, "RF-A007"),
        ({"top_k": [{}, {}, {3: -0.1, 7: -0.1}, {}]}, "RF-A007"),
        ({"top_k": [{}, {}, {3: "x"}, {}]}, "RF-A002"),
        ({"top_k": [{}, {}, [3], {}]}, "RF-A002"),
        ({"metrics": [1]}, "RF-A002"),
        ({"group_id": None, "advantage": "x"}, None),
    ],
)
def test_malformed_samples_are_refused(changes, code):
    with pytest.raises((ConversionError, ValueError)) as info:
        convert(sample(**changes))
    assert code in (None, getattr(info.value, "code", None))


def test_some_samples_with_sets_and_some_without_are_two_calls():
    plain = sample()
    del plain["sampling_mask"]
    with pytest.raises(ConversionError, match="all samples of a call or in none") as info:
        convert(sample(), plain)
    assert info.value.where.row == 1


def test_columns_and_schema_choose():
    report = ConversionReport()
    batch = convert(sample(), columns=["advantage", "candidate_counts", "candidate_ids"],
                    report=report)  # fmt: skip
    assert set(batch.schema.names) == {
        "sample_id", "input_ids", "completion_mask", "advantage", "candidate_counts",
        "candidate_ids",
    }  # fmt: skip
    assert report.log_probs.dropped == {"not_wanted": 2}
    assert report.unbalanced() == []
    full = convert(sample())
    again = trl.to_samples([sample()], schema=full.schema)
    assert again.equals(full)


def test_fields_that_are_not_read_are_reported():
    """NousResearch/atropos#456: fields were collected, and the loader left them out silently."""
    report = ConversionReport()
    convert(sample(images=["x"], nothing=None), report=report)
    assert report.unread == {"images": 1}


def test_what_trl_cannot_hold_is_refused():
    """huggingface/trl#2215: a further column was dropped on the way to the loss."""
    schema = rf.sample_schema(
        vocab_size=10, columns=["advantage", "policy_version", "group_id", "loss_weights"]
    )
    row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1], "advantage": 1.0,
           "policy_version": 1, "group_id": "7", "loss_weights": [0.5]}  # fmt: skip
    import pyarrow as pa

    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    with pytest.raises(ConversionError, match="no place for some columns") as info:
        trl.to_queue_samples(batch)
    assert info.value.got == "loss_weights"
    assert len(trl.to_queue_samples(batch, lossy=True)) == 1
    for changes, what in (
        ({"advantage": None}, "null"), ({"group_id": "g"}, "numbers its groups"),
        ({"policy_version": None}, "null"),
    ):  # fmt: skip
        bad = pa.RecordBatch.from_pylist([row | {"loss_weights": [1.0]} | changes], schema=schema)
        with pytest.raises(ConversionError, match=what):
            trl.to_queue_samples(bad)


def test_heads_are_never_cut_silently():
    """axolotl-ai-cloud/axolotl#2700: rows of more than K entries."""
    batch = convert(sample(top_k=HEADS))
    with pytest.raises(ConversionError, match="longer than the table"):
        trl.to_queue_samples(batch, top_k=1)
    from collections import Counter

    counts = Counter()
    cut = trl.to_queue_samples(batch, top_k=1, lossy=True, counts=counts)[0]
    assert cut["top_k_ids"].tolist() == [[-1], [-1], [3], [4]]
    assert counts["head_entries_cut"] == 2
    wide = trl.to_queue_samples(batch, top_k=4)[0]
    assert wide["top_k_ids"].shape == (4, 4)


def test_options_that_do_not_fit_are_refused():
    schema = convert(sample()).schema
    for options in (
        {"columns": [], "schema": schema, "vocab_size": 10}, {},
        {"schema": schema, "vocab_size": 9},
        {"vocab_size": 10, "on_missing_log_prob": "full_vocab"},
        {"vocab_size": 10, "columns": ["ref_log_probs"]},
        {"vocab_size": 10, "columns": ["candidate_counts"], "on_missing_support": "flag",
         "lost": True},
    ):  # fmt: skip
        given = sample(sampling_mask=[[], [], [], [4]]) if options.pop("lost", None) else sample()
        with pytest.raises(ConversionError) as info:
            trl.to_samples([given], **options)
        assert info.value.code == "RF-A011"
    raw = convert(sample(), logprobs_mode="raw").schema
    with pytest.raises(ConversionError, match="declared otherwise") as info:
        trl.to_samples([sample()], schema=raw)
    assert info.value.code == "RF-A007"
    with pytest.raises(ConversionError, match="not of its column's type"):
        convert(sample(model_version=2**70))


def test_tensors_of_torch_are_read_without_copies_of_types():
    import torch

    given = sample(
        input_ids=torch.tensor([5, 6, 3, 4]), completion_mask=torch.tensor([0, 0, 1, 1]),
        old_log_probs=torch.tensor([0, 0, -0.5, -0.25], dtype=torch.bfloat16),
    )  # fmt: skip
    assert convert(given).equals(convert(sample()))


def test_log_probs_that_the_trainer_recomputed_go_out_where_there_are_no_others():
    import pyarrow as pa

    schema = rf.sample_schema(
        vocab_size=10, columns=["old_log_probs", "advantage", "policy_version", "group_id"]
    )
    row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1], "advantage": 1.0,
           "policy_version": 1, "group_id": "7", "old_log_probs": [-0.5]}  # fmt: skip
    out = trl.to_queue_samples(pa.RecordBatch.from_pylist([row], schema=schema))[0]
    assert out["old_log_probs"].tolist() == [0.0, -0.5]
