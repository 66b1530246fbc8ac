"""prime-rl: its own files byte for byte, and hand-made rows in every form."""

from pathlib import Path

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.adapters import prime_rl
from ragged_format.adapters.prime_rl import MicroBatch, RoutedExperts, SamplingMask, TrainingSample
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.packing import pack_row
from ragged_format.testing import assert_ragged_equal
from ragged_format.torch import pad_ragged

DATA = Path(__file__).parents[1] / "data" / "prime_rl"
OLDER = {"generation": "kept_tokens"}


def i4(*values):
    return np.array(values, "<i4").tobytes()


def f4(*values):
    return np.array(values, "<f4").tobytes()


def six(**changes):
    """A row of six tokens, of which the fourth to sixth are scored; the first two are context."""
    fields = {
        "token_ids": [5, 6, 7, 3, 4, 9],
        "mask": [False, False, False, True, True, True],
        "logprobs": [0.0, 0.0, 0.0, 0.0, -0.5, -0.25],
        "temperatures": [0.5] * 6,
        "env_name": "math",
        "advantages": [0.0, 0.0, 0.0, 1.25, 1.25, 1.25],
        "sampling_mask": SamplingMask(i4(3, 4, 8, 1, 2, 9), i4(0, 0, 0, 1, 2, 3)),
    }
    return TrainingSample(**(fields | changes))


def converted(*items, **options):
    report = ConversionReport()
    batch = prime_rl.to_samples(items, vocab_size=10, report=report, **options)
    assert report.unbalanced() == []
    rf.validate(batch)
    return batch, report


@pytest.mark.parametrize("columns", [None, "schema"])
def test_training_samples_come_back_byte_for_byte(columns):
    data = (DATA / "dummy_training_samples.bin").read_bytes()
    items = prime_rl.decode(data)
    report = ConversionReport()
    samples = prime_rl.to_samples(items, vocab_size=49152, report=report)
    if columns == "schema":
        samples = prime_rl.to_samples(items, schema=samples.schema)
    rf.validate(samples)
    assert report.unbalanced() == []
    assert report.samples.stored == 3
    again = prime_rl.to_training_samples(samples)
    assert prime_rl.encode(again, **OLDER) == data


def test_micro_batches_of_all_ranks_come_back_byte_for_byte():
    first = None
    for rank in (0, 1):
        data = (DATA / f"dummy_rank_{rank}.bin").read_bytes()
        written = []
        for payload in prime_rl.payloads(str(DATA / f"dummy_rank_{rank}.bin")):
            report = ConversionReport()
            samples = prime_rl.to_samples([payload], vocab_size=49152, report=report)
            rf.validate(samples)
            assert report.unbalanced() == []
            if not samples.num_rows:
                assert report.samples.dropped == {"dummy_batch": 1}
                written.append(prime_rl.dummy_micro_batch(first))
                continue
            written.append(prime_rl.to_micro_batch(samples, pad_to_multiple_of=8))
            first = first or written[-1]
        assert prime_rl.encode(written, **OLDER) == data


def test_a_row_of_several_samples_agrees_with_the_decoded_arrays():
    (item,) = prime_rl.decode((DATA / "grpo_rank_1_last.bin").read_bytes())
    expected = np.load(DATA / "grpo_rank_1_last_decoded.npz")
    report = ConversionReport()
    samples = prime_rl.to_samples([item], vocab_size=49152, report=report)
    rf.validate(samples)
    ids = np.concatenate(samples.column("input_ids").to_numpy(zero_copy_only=False))
    assert report.tokens.dropped == {"padding": len(expected["input_ids"]) - len(ids)}
    np.testing.assert_array_equal(ids, expected["input_ids"][: len(ids)])
    scored = expected["loss_mask"]
    counts = np.concatenate(samples.column("candidate_counts").to_numpy(zero_copy_only=False))
    values = np.concatenate(samples.column("candidate_ids").to_numpy(zero_copy_only=False))
    np.testing.assert_array_equal(counts, expected["kept_tokens.counts"][scored])
    np.testing.assert_array_equal(values, expected["kept_tokens.ids"])
    # The trainer's dense form is our padding at its scored positions, and -1 elsewhere.
    dense = expected["tensor.kept_tokens"][0]
    import torch

    padded = pad_ragged(torch.from_numpy(values.copy()), torch.from_numpy(counts.copy()))
    np.testing.assert_array_equal(dense[scored], padded.numpy())
    assert (dense[~scored] == -1).all()
    back = prime_rl.to_micro_batch(samples, pad_to_multiple_of=8)
    data = (DATA / "grpo_rank_1_last.bin").read_bytes()
    assert prime_rl.encode([back], **OLDER) == data


def test_six_tokens_by_hand():
    """engines.md 8, item 6: counts cover the whole row, with 0 on context."""
    batch, report = converted(six())
    (row,) = batch.to_pylist()
    assert row == {
        "sample_id": "prime_rl/0",
        "temperature": 0.5,
        "advantage": 1.25,
        "env_name": "math",
        "input_ids": [5, 6, 7, 3, 4, 9],
        "completion_mask": [0, 0, 0, 1, 1, 1],
        "rollout_log_probs": [0.0, -0.5, -0.25],
        "candidate_counts": [1, 2, 3],
        "candidate_ids": [3, 4, 8, 1, 2, 9],
    }
    assert (report.candidates.taken, report.candidates.stored) == (6, 6)


def test_six_tokens_cut_at_four():
    """engines.md 8, item 6: prime-rl cuts ids by the sum of the counts that stay; so does cut."""
    cut = six(
        token_ids=[5, 6, 7, 3], mask=[False, False, False, True], logprobs=[0.0] * 4,
        temperatures=[0.5] * 4, advantages=[0.0, 0.0, 0.0, 1.25],
        sampling_mask=SamplingMask(i4(3), i4(0, 0, 0, 1)),
    )  # fmt: skip
    whole, _ = converted(six())
    assert prime_rl.to_training_samples(rf.cut(whole, stop=4)) == [cut]


def test_six_tokens_padded_to_a_multiple_of_eight():
    """engines.md 8, item 6: padding has id 1, no set, and lengthens the last sample."""
    batch, _ = converted(six())
    row = prime_rl.to_micro_batch(batch, pad_to_multiple_of=8)
    assert row.input_ids == [5, 6, 7, 3, 4, 9, 1, 1]
    assert row.position_ids == [0, 1, 2, 3, 4, 5, 0, 1]
    assert (row.sequence_lengths, row.seq_lens) == ([8], [8])
    assert row.env_names == ["math"] * 6 + ["", ""]
    assert row.sampling_mask == SamplingMask(i4(3, 4, 8, 1, 2, 9), i4(0, 0, 0, 1, 2, 3, 0, 0))
    again, report = converted(row)
    assert report.tokens.dropped == {"padding": 2}
    assert_ragged_equal(again.drop_columns("sample_id"), batch.drop_columns("sample_id"))


def test_a_sample_without_sets_packed_with_one_that_has_them():
    """engines.md 8, item 6: the sample without a mask gets counts of 0."""
    items = [six(), six(sampling_mask=None)]
    with pytest.raises(ConversionError, match="RF-A004"):
        converted(*items)
    batch, report = converted(*items, on_missing_support="full_vocab")
    assert batch.column("candidate_counts").to_pylist() == [[1, 2, 3], [0, 0, 0]]
    assert report.noted["full_vocabulary_targets"] == 3
    row = prime_rl.to_micro_batch(batch)
    assert row.sampling_mask.counts == i4(0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0)
    assert prime_rl.to_training_samples(batch) == items
    again, _ = converted(row, on_missing_support="full_vocab")
    assert_ragged_equal(again.drop_columns("sample_id"), batch.drop_columns("sample_id"))
    # A row of which no sample has sets has no mask at all.
    alone, _ = converted(six(sampling_mask=None))
    assert prime_rl.to_micro_batch(alone).sampling_mask is None


def test_rows_over_the_cap_are_counted():
    """PrimeIntellect-ai/prime-rl#2979, #3235: a trained token with count 0 is not passed over."""
    lost = six(sampling_mask=SamplingMask(i4(3, 1, 2, 9), i4(0, 0, 0, 1, 0, 3)))
    with pytest.raises(ConversionError) as caught:
        converted(lost)
    assert caught.value.code == "RF-A004"
    assert (caught.value.where.column, caught.value.where.position) == ("sampling_mask", 4)
    batch, report = converted(lost, on_missing_support="flag")
    assert batch.column("target_flags").to_pylist() == [[0, 1, 0]]
    assert report.flagged["support_missing"] == 1
    with pytest.raises(ConversionError, match="cannot say that a target lacks something"):
        prime_rl.to_training_samples(batch)


def test_turns_are_separate_targets():
    """PrimeIntellect-ai/prime-rl#1402: each turn's values stay with its tokens."""
    item = six(
        mask=[False, True, False, False, True, True], logprobs=[0, -1.0, 0, 0, -0.5, -0.25],
        advantages=[0, 1.0, 0, 0, 2.0, 2.0],
        sampling_mask=SamplingMask(i4(6, 7, 4, 9), i4(0, 2, 0, 0, 1, 1)),
    )  # fmt: skip
    with pytest.raises(ConversionError, match="has a log-prob other than 0"):
        converted(item)
    batch, _ = converted(item, logprobs_mode="raw")
    (row,) = batch.to_pylist()
    assert row["completion_mask"] == [0, 1, 0, 0, 1, 1]
    assert row["rollout_log_probs"] == [-1.0, -0.5, -0.25]
    assert (row["candidate_counts"], row["candidate_ids"]) == ([2, 1, 1], [6, 7, 4, 9])
    assert row["advantages"] == [1.0, 2.0, 2.0]
    assert prime_rl.to_training_samples(batch) == [item]


def test_every_optional_field_comes_back():
    mask = SamplingMask(i4(3, 4, 8, 1, 2, 9), i4(0, 0, 0, 1, 2, 3), f4(0, -0.5, -1, -2, -2, -0.5))
    experts = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    item = six(
        sampling_mask=mask, ref_logprobs=[0, 0, 0, -0.125, -0.5, -3.0],
        rl_weights=[0, 0, 0, 1.0, 0.5, 0.25], ce_weights=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        ref_kl_weights=[0.0] * 6, trace_id="t", branch_index=2,
        routed_experts=RoutedExperts(experts.tobytes(), [6, 2, 2], "uint8"),
        temperatures=[1.0, 1.0, 1.0, 0.5, 0.7, 0.5],
    )  # fmt: skip
    batch, report = converted(item)
    assert batch.column("sample_id").to_pylist() == ["t/2"]
    assert batch.schema.field("routed_experts").type.value_type.list_size == 4
    assert +report.unread == {}
    assert prime_rl.to_training_samples(batch) == [item]
    data = prime_rl.encode([item])
    assert prime_rl.decode(data) == [item]
    with pytest.raises(ConversionError, match="trace ids"):
        prime_rl.encode([item], **OLDER)
    item.trace_id = item.branch_index = None
    with pytest.raises(ConversionError, match="log-probs of candidates"):
        prime_rl.encode([item], **OLDER)


def test_values_of_tokens_that_are_not_scored_are_counted():
    item = six(logprobs=[0.0, -9.0, 0.0, 0.0, -0.5, -0.25], mm_kwargs={"pixels": 1})
    item.sampling_mask = SamplingMask(i4(8, 3, 4, 8, 1, 2, 9), i4(1, 0, 0, 1, 2, 3))
    _, report = converted(item)
    assert +report.unread == {"logprobs of unscored tokens": 1, "mm_kwargs": 1}
    assert report.candidates.dropped == {"token_not_scored": 1}


def test_packed_rows_become_one_file_per_rank(tmp_path):
    items = prime_rl.decode((DATA / "dummy_training_samples.bin").read_bytes())
    samples = prime_rl.to_samples(items, vocab_size=49152)
    rows = [pack_row(samples.slice(i, 1), packing="sequence") for i in range(3)]
    counts = prime_rl.write(
        rows, str(tmp_path / "out"), world_size=2, pad_to_multiple_of=8, **OLDER
    )
    assert counts == {"rows": 3, "dummy_batches": 1, "tokens": 568}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["rank_0.bin", "rank_1.bin"]
    ranks = [prime_rl.decode((tmp_path / "out" / f"rank_{r}.bin").read_bytes()) for r in (0, 1)]
    plain = [prime_rl.to_micro_batch(row, pad_to_multiple_of=8) for row in rows]
    assert ranks[0] == [plain[0], plain[2]]
    assert ranks[1] == [plain[1], prime_rl.dummy_micro_batch(plain[0])]


def test_a_tree_is_written_out_as_sequences():
    batch, _ = converted(six(), six(token_ids=[5, 6, 7, 3, 4, 2]))
    tree = pack_row(batch)
    assert prime_rl.to_micro_batch(tree) == prime_rl.to_micro_batch(batch)


@pytest.mark.parametrize(
    ("change", "code", "column"),
    [
        ({"mask": [True] + [False] * 5}, "RF-A006", "mask"),
        ({"logprobs": [0.0] * 5}, "RF-A006", "logprobs"),
        ({"token_ids": [5, 6, 7, 3, 4, 10]}, "RF-A005", "token_ids"),
        ({"sampling_mask": SamplingMask(i4(3), i4(0, 0, 0, 1, 2, 3))}, "RF-A006",
         "sampling_mask.ids"),
        ({"sampling_mask": SamplingMask(i4(3), i4(0, 0, 0, 1))}, "RF-A006",
         "sampling_mask.counts"),
        ({"sampling_mask": SamplingMask(b"", i4(0, 0, 0, 1, -1, 0))}, "RF-A002", "sampling_mask"),
        ({"sampling_mask": SamplingMask(i4(4, 4, 8, 1, 2, 9), i4(0, 0, 0, 1, 2, 3))}, "RF-A005",
         "sampling_mask"),
        ({"sampling_mask": SamplingMask(i4(3, 4, 4, 1, 2, 9), i4(0, 0, 0, 1, 2, 3))}, "RF-A005",
         "sampling_mask"),
        ({"routed_experts": RoutedExperts(b"abcde", [5, 1, 1], "uint8")}, "RF-A006",
         "routed_experts"),
        ({"routed_experts": RoutedExperts(b"abcde", [6, 1, 1], "uint8")}, "RF-A002",
         "routed_experts"),
    ],
)  # fmt: skip
def test_contradictions_are_errors(change, code, column):
    with pytest.raises(ConversionError) as caught:
        converted(six(**change))
    assert (caught.value.code, caught.value.where.column) == (code, column)
    assert caught.value.where.row == 0


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"sequence_lengths": [5]}, "sequence_lengths"),
        ({"position_ids": [0, 1, 2, 4, 4, 5]}, "position_ids"),
        ({"env_names": ["a"] * 5 + ["b"]}, None),
    ],
)
def test_rows_that_contradict_themselves_are_errors(change, column):
    batch, _ = converted(six())
    row = prime_rl.to_micro_batch(batch)
    for name, value in change.items():
        setattr(row, name, value)
    with pytest.raises(ConversionError) as caught:
        converted(row)
    assert caught.value.where.column == column


def test_what_the_structs_cannot_hold_is_named():
    batch, _ = converted(six())
    with pytest.raises(ConversionError, match=r"(?s)temperature.*remedy: +pass temperature="):
        prime_rl.to_training_samples(batch.drop_columns("temperature"))
    given = prime_rl.to_training_samples(batch.drop_columns("temperature"), temperature=0.5)
    assert given == prime_rl.to_training_samples(batch)
    with pytest.raises(ConversionError, match="rollout_log_probs"):
        prime_rl.to_training_samples(batch.drop_columns("rollout_log_probs"))
    column = rf.standard_column("old_log_probs")
    wide = batch.append_column(column.field(), batch.column("rollout_log_probs"))
    with pytest.raises(ConversionError, match=r"got: +old_log_probs"):
        prime_rl.to_training_samples(wide)


@pytest.mark.parametrize("data", [b"", b"\x81", b"\xc0", b"\x91\x92\x01\x02", b"\x91\xa1a"])
def test_other_bytes_are_errors(data):
    with pytest.raises(ConversionError, match="RF-A002"):
        prime_rl.decode(data)


def test_other_payloads_are_errors():
    with pytest.raises(ConversionError, match="RF-A002"):
        converted({"token_ids": []})
    with pytest.raises(ConversionError, match="RF-A011"):
        prime_rl.encode([six()], generation="x")


def test_floors_are_flagged_and_counted():
    item = six(logprobs=[0.0, 0.0, 0.0, 0.0, -9999.0, None])
    batch, report = converted(item)
    assert batch.column("target_flags").to_pylist() == [[0, 4, 4]]
    assert report.log_probs.dropped == {"log_prob_minus_9999": 1, "log_prob_null": 1}


def test_structs_are_arrays_by_position():
    assert MicroBatch.__struct_fields__[:9] == (
        "input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids",
        "sequence_lengths", "temperatures", "env_names", "seq_lens",
    )  # fmt: skip
    assert prime_rl.encode([six()])[:2] == b"\x91\x9e"
