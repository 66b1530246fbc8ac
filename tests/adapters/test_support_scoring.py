"""Scoring recorded sets: we agree with float64 and three trainers, and refuse where they differ."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import ragged_format as rf
from ragged_format.adapters import miles, prime_rl
from ragged_format.adapters.prime_rl import SamplingMask, TrainingSample
from ragged_format.errors import ConversionError, InvariantError
from ragged_format.torch import support_log_probs

DATA = dict(np.load(Path(__file__).parents[1] / "data" / "support_scoring" / "support_scoring.npz"))
ALTERED = {k.removeprefix("altered."): int(v) for k, v in DATA.items() if k.startswith("altered.")}
PLAIN = np.setdiff1d(np.arange(len(DATA["labels"])), list(ALTERED.values()))
ROWS = np.split(DATA["candidate_ids"], np.cumsum(DATA["candidate_counts"])[:-1])
VOCAB = len(DATA["weight"])
TOLERANCE = 2e-6


@pytest.fixture(scope="module", params=["t", "t1"])
def scored(request):
    """Our scores of the rows that nobody altered, at one temperature for each row or at 1."""
    ids = np.concatenate([np.sort(ROWS[row]) for row in PLAIN])
    temperature = torch.from_numpy(DATA["temperature"][PLAIN]) if request.param == "t" else 1.0
    log_probs, entropy = support_log_probs(
        torch.from_numpy(DATA["hidden"]), torch.from_numpy(DATA["weight"]),
        torch.from_numpy(PLAIN), torch.from_numpy(DATA["labels"][PLAIN].astype(np.int64)),
        torch.from_numpy(ids), torch.from_numpy(DATA["candidate_counts"][PLAIN]),
        temperature=temperature,
    )  # fmt: skip
    return request.param, log_probs.numpy(), entropy.numpy()


def test_agrees_with_float64(scored):
    """huggingface/trl#6789: log-probs over the recorded set, not over the vocabulary."""
    which, log_probs, entropy = scored
    expected = DATA[f"check64.{which}.logprobs"][PLAIN]
    np.testing.assert_allclose(log_probs, expected, rtol=0, atol=TOLERANCE)
    # A difference of two sums of the size of the logits, so float32 leaves fewer digits.
    expected = DATA[f"check64.{which}.entropy_support"][PLAIN]
    np.testing.assert_allclose(entropy, expected, rtol=0, atol=1e-5)


SYSTEMS = {
    "t": ["prime_rl.fused.logprobs", "prime_rl.vanilla.logprobs"],
    "t1": ["skyrl.t1.logprobs", "skyrl.t1.from_logits.logprobs", "miles.t1.logprobs"],
}


def test_agrees_with_the_trainers(scored):
    which, log_probs, entropy = scored
    for name in SYSTEMS[which]:
        np.testing.assert_allclose(log_probs, DATA[name][PLAIN], rtol=0, atol=2 * TOLERANCE)
    if which == "t1":
        skyrl = DATA["skyrl.t1.entropy_over_support"][PLAIN]
        np.testing.assert_allclose(entropy, skyrl, rtol=0, atol=1e-5)


def test_one_set_gives_one_ratio():
    """huggingface/trl#6880, #6945: identical logits and sets give a ratio of exactly 1."""
    arguments = [torch.from_numpy(DATA[k]) for k in ("hidden", "weight")]
    row = int(PLAIN[0])
    target = torch.tensor([int(DATA["labels"][row])])
    ids = torch.from_numpy(np.sort(ROWS[row]))
    counts, where = torch.tensor([len(ids)]), torch.tensor([row])
    one, _ = support_log_probs(*arguments, where, target, ids, counts)
    two, _ = support_log_probs(*arguments, where, target, ids, counts)
    assert torch.exp(one - two).item() == 1.0


def sample(row):
    """One target with the set of a row."""
    context = 0
    return [context, int(DATA["labels"][row])], ROWS[row].astype(np.int32)


def as_batch(row):
    tokens, ids = sample(row)
    schema = rf.sample_schema(vocab_size=VOCAB, columns=["candidate_counts", "candidate_ids"])
    values = {
        "sample_id": "a", "input_ids": tokens, "completion_mask": [0, 1],
        "candidate_counts": [len(ids)], "candidate_ids": np.sort(ids).tolist(),
    }  # fmt: skip
    return pa.RecordBatch.from_pylist([values], schema=schema)


def from_prime_rl(row):
    tokens, ids = sample(row)
    mask = SamplingMask(ids.tobytes(), np.array([0, len(ids)], "<i4").tobytes())
    item = TrainingSample(tokens, [False, True], [0.0, -0.5], [1.0] * 2, "e", sampling_mask=mask)
    return prime_rl.to_samples([item], vocab_size=VOCAB)


def from_miles(row):
    tokens, ids = sample(row)
    return miles.to_samples(
        [{
            "tokens": tokens, "response_length": 1, "rollout_sampling_mask_ids": ids,
            "rollout_sampling_mask_offsets": [0, len(ids)],
        }],
        vocab_size=VOCAB,
    )  # fmt: skip


# prime-rl scores a label outside its set over the full vocabulary, SkyRL against a normalizer
# without it, miles as -inf; an id that is there twice counts twice in prime-rl and SkyRL.
@pytest.mark.parametrize(
    ("case", "rule", "code"),
    [
        ("label_absent", "RF-I013", "RF-A005"),
        ("duplicate_first_id", "RF-I012", "RF-A005"),
        ("emptied", None, "RF-A004"),
    ],
)
def test_rows_that_the_trainers_score_differently_are_refused(case, rule, code):
    row = ALTERED[case]
    with pytest.raises(ConversionError) as caught:
        from_prime_rl(row)
    assert caught.value.code == code
    with pytest.raises(ConversionError, match="RF-A005"):
        from_miles(row)
    batch = as_batch(row)
    if rule is None:
        rf.validate(batch)  # no set and no flag: the full vocabulary, which a policy must choose
        return
    with pytest.raises(InvariantError) as broken:
        rf.validate(batch)
    assert broken.value.code == rule
    assert abs(float(DATA["miles.t1.logprobs"][row]) - float(DATA["skyrl.t1.logprobs"][row])) > 1e-2


def test_the_head_refuses_a_label_outside_its_set():
    row = ALTERED["label_absent"]
    with pytest.raises(rf.RaggedError, match="set"):
        support_log_probs(
            torch.from_numpy(DATA["hidden"]), torch.from_numpy(DATA["weight"]),
            torch.tensor([row]), torch.tensor([int(DATA["labels"][row])]),
            torch.from_numpy(np.sort(ROWS[row])), torch.tensor([len(ROWS[row])]),
        )  # fmt: skip
