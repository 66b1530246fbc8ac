"""slime: its own dumps value for value, its rules, and conversion to and from its relatives."""

import json
from pathlib import Path

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.adapters import miles, prime_rl, slime
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.testing import assert_ragged_equal

DATA = Path(__file__).parents[1] / "data" / "slime"
VOCAB = 49152
IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
PLAIN = ("tokens", "loss_mask", "rollout_log_probs", IDS, OFFSETS)


def dumped():
    arrays = np.load(DATA / "samples.npz")
    out = {}
    for key in arrays:
        number, _, name = key.partition(".")
        out.setdefault(int(number[1:]), {"index": int(number[1:])})[name] = arrays[key]
    return list(out.values())


def converted(samples, vocab_size=10, module=slime, **options):
    report = ConversionReport()
    batch = module.to_samples(samples, vocab_size=vocab_size, report=report, **options)
    assert report.unbalanced() == []
    rf.validate(batch)
    return batch, report


def tool(**changes):
    """A prompt token, two generated ones, one of the tool between them, and a last one."""
    return {
        "index": 4,
        "tokens": [5, 6, 7, 8, 9],
        "response_length": 4,
        "loss_mask": [1, 0, 1, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25, 0.0],
        IDS: [2, 6, 1, 3, 8, 9],
        OFFSETS: [0, 2, 2, 5, 6],
    } | changes


def test_samples_come_back():
    samples = dumped()
    batch, report = converted(samples, VOCAB)
    assert +report.unread == {}
    assert report.candidates.dropped == {}
    for mine, theirs in zip(slime.from_samples(batch), samples, strict=True):
        for name in PLAIN:
            np.testing.assert_array_equal(mine[name], theirs[name])
        assert mine["response_length"] == theirs["response_length"]


def test_dumps_come_back(tmp_path):
    found = list(slime.payloads(str(DATA / "rollout_0.pt")))
    batch, report = converted(found, VOCAB)
    assert batch.column("sample_id").to_pylist() == ["rollout_0/3", "rollout_0/12"]
    assert batch.column("finish_reason").to_pylist() == ["stop", "stop"]
    # Its version is "default", and reward and group are numbers.
    assert set(+report.unread) <= {"weight_versions", "prefix_cache_info"}
    assert slime.write([batch], str(tmp_path / "out")) == {"files": 1, "samples": 2}
    again = list(slime.payloads(str(tmp_path / "out" / "rollout_0.pt")))
    for mine, theirs in zip(again, found, strict=True):
        for name in (*PLAIN, "reward", "status", "group_index", "response_length"):
            assert type(mine[name]) is type(theirs[name])
            np.testing.assert_array_equal(mine[name], theirs[name])


def test_meta_info_holds_the_sets_of_the_turns():
    turns = json.loads((DATA / "meta_info_examples.json").read_text())["meta_info_of_last_sample"]
    (sample,) = [s for s in dumped() if s["index"] == 14]
    parts = [slime.decode_meta_info(turn) for turn in turns]
    np.testing.assert_array_equal(np.concatenate([p[IDS] for p in parts]), sample[IDS])
    counts = np.diff(sample[OFFSETS])[sample["loss_mask"] == 1]
    np.testing.assert_array_equal(np.concatenate([np.diff(p[OFFSETS]) for p in parts]), counts)
    for turn, part in zip(turns, parts, strict=True):
        assert slime.encode_meta_info(part).items() <= turn.items()


def test_meta_info_stands_in_for_the_sets():
    sample = tool(loss_mask=[1, 1, 1, 1], rollout_log_probs=[-0.5, 0.0, -0.25, 0.0])
    sample |= {IDS: [2, 6, 7, 1, 3, 8, 9], OFFSETS: [0, 2, 3, 6, 7]}
    meta = slime.encode_meta_info({k: np.int32(sample[k]) for k in (IDS, OFFSETS)})
    older = {k.replace("top_p_token", "top_p_kept_token"): v for k, v in meta.items()}
    bare = {k: v for k, v in sample.items() if k not in {IDS, OFFSETS}}
    expected, _ = converted([sample])
    for form in (meta, older):
        assert_ragged_equal(converted([bare | {"meta_info": form}])[0], expected)
    with pytest.raises(ConversionError, match="RF-A002"):
        converted([bare | {"meta_info": {"top_p_token_ids": "AAA"}}])


def test_a_tool_token_by_hand():
    batch, _ = converted([tool()])
    (row,) = batch.to_pylist()
    assert row["completion_mask"] == [0, 1, 0, 1, 1]
    assert row["candidate_counts"] == [2, 3, 1]
    assert row["candidate_ids"] == [2, 6, 1, 3, 8, 9]
    (back,) = slime.from_samples(batch)
    assert [back[name].tolist() for name in PLAIN] == [tool()[name] for name in PLAIN]


# What slime does with inputs, and what conversion does with them.
RULES = {
    "empty row for a trainable token": ({IDS: [2, 6, 9], OFFSETS: [0, 2, 2, 2, 3]}, "RF-A004"),
    "sampled id absent": ({IDS: [2, 6, 1, 3, 4, 9]}, "RF-A005"),
    "offsets not from 0": ({OFFSETS: [1, 2, 2, 5, 6]}, "RF-A006"),
    "offsets too short": ({OFFSETS: [0, 2, 5, 6]}, "RF-A006"),
    "ids without offsets": ({OFFSETS: None}, "RF-A002"),
    "second turn has a mask, first had none": ({OFFSETS: [0, 5]}, "RF-A006"),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_refused(name):
    assert name in json.loads((DATA / "rules.json").read_text())
    changes, code = RULES[name]
    with pytest.raises(ConversionError) as caught:
        converted([tool(**changes)])
    assert caught.value.code == code


def test_an_empty_row_of_a_trained_token_may_say_full_vocabulary():
    sample = tool(**RULES["empty row for a trainable token"][0])
    batch, report = converted([sample], on_missing_support="full_vocab")
    assert report.noted["full_vocabulary_targets"] == 1
    (back,) = slime.from_samples(batch)
    assert back[OFFSETS].tolist() == [0, 2, 2, 2, 3]


def test_missing_log_probs_do_not_become_zeros():
    """vime#70: a missing log-prob of a trained token is flagged, and not written as 0.0."""
    batch, report = converted([tool(rollout_log_probs=[-0.5, None, None, 0.0])])
    assert batch.column("target_flags").to_pylist() == [[0, 4, 0]]
    assert report.log_probs.dropped == {"log_prob_null": 1}
    with pytest.raises(ConversionError, match=r"got: +log_prob_missing"):
        slime.from_samples(batch)
    with pytest.raises(ConversionError, match="RF-A007"):
        converted([tool(rollout_log_probs=[-0.5, None, None, 0.0])], on_missing_log_prob="error")


def test_miles_slime_prime_rl_and_back():
    """engines.md 8, item 7: lossless where the loss mask tells observations apart."""
    first = {k: v for k, v in tool().items() if k not in {IDS, OFFSETS}} | {
        "rollout_sampling_mask_ids": [2, 6, 7, 1, 3, 8, 9],
        "rollout_sampling_mask_offsets": [0, 2, 3, 6, 7],
    }
    ours, _ = converted([first], module=miles)
    (as_slime,) = slime.from_samples(ours)
    assert as_slime[IDS].tolist() == tool()[IDS]
    assert as_slime[OFFSETS].tolist() == tool()[OFFSETS]
    from_slime, _ = converted([as_slime])
    (as_prime,) = prime_rl.to_training_samples(from_slime, temperature=1.0)
    counts = np.frombuffer(as_prime.sampling_mask.counts, "<i4")
    assert counts.tolist() == [0, 2, 0, 3, 1]
    from_prime, _ = converted([as_prime], module=prime_rl)
    (back,) = miles.from_samples(from_prime)
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        assert back[name].tolist() == first[name]
    assert back["rollout_sampling_mask_ids"].tolist() == [2, 6, 7, 1, 3, 8, 9]
    assert back["rollout_sampling_mask_offsets"].tolist() == [0, 2, 3, 6, 7]


def test_without_a_loss_mask_observations_cannot_be_told():
    """engines.md 8, item 7: an empty row without a mask is a trained token that lacks its set."""
    with pytest.raises(ConversionError, match="RF-A004"):
        converted([tool(loss_mask=None)])


def test_recorded_conversations_survive_the_tour():
    """engines.md 8, item 7, on recorded conversations with user turns as observations."""
    samples = dumped()
    ours, _ = converted(samples, VOCAB)
    via_miles, report = converted(miles.from_samples(ours), VOCAB, module=miles)
    assert report.candidates.dropped["observation_token"] == 66
    items = prime_rl.to_training_samples(via_miles, temperature=1.0)
    via_prime, _ = converted(items, VOCAB, module=prime_rl)
    for mine, theirs in zip(slime.from_samples(via_prime), samples, strict=True):
        for name in PLAIN:
            np.testing.assert_array_equal(mine[name], theirs[name])
