"""Any samples, in the form of each trainer and back: what it can hold comes back."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

import ragged_format as rf
from ragged_format.adapters import miles, prime_rl, skyrl, slime, transfer_queue, verifiers
from ragged_format.adapters.report import ConversionReport
from ragged_format.testing import assert_ragged_equal, rollouts, sample_batches

COLUMNS = ["rollout_log_probs", "candidate_counts", "candidate_ids"]
KEPT = ["input_ids", "completion_mask", *COLUMNS]
VOCAB = 32


def via_prime_rl(batch):
    return prime_rl.decode(prime_rl.encode(prime_rl.to_training_samples(batch, temperature=1.0)))


def via_miles(batch):
    samples, _ = miles.decode_session(miles.encode_session(miles.from_samples(batch, partial=True)))
    return [sample | {"index": number} for number, sample in enumerate(samples)]


def via_skyrl(batch):
    return [skyrl.to_training_batch(batch, top_k=600)]


def via_transfer_queue(batch):
    return [transfer_queue.encode(sample) for sample in transfer_queue.from_samples(batch)]


ROUTES = {
    "prime_rl": (prime_rl, via_prime_rl),
    "miles": (miles, via_miles),
    "slime": (slime, slime.from_samples),
    "skyrl": (skyrl, via_skyrl),
    "transfer_queue": (transfer_queue, via_transfer_queue),
    "verifiers": (verifiers, verifiers.from_samples),
}
# Sets of the trainers that say "none" where ours say "the full vocabulary".
LENIENT = {"on_missing_support": "full_vocab", "on_invalid_support": "full_vocab"}


def there_and_back(name, batch, vocab_size):
    module, route = ROUTES[name]
    report = ConversionReport()
    # Made-up log-probs are not those of the sets.
    out = module.to_samples(
        route(batch), vocab_size=vocab_size, logprobs_mode="raw", report=report, **LENIENT
    )
    assert report.unbalanced() == []
    rf.validate(out)
    return out


def assert_kept(out, batch):
    """Check every column; without a target, forms that leave empty fields out have no columns."""
    assert out.num_rows == batch.num_rows
    for name in KEPT:
        expected = batch.column(name).to_pylist()
        if name in out.schema.names:
            assert out.column(name).to_pylist() == expected, name
        else:
            assert not any(map(sum, expected)), name


@pytest.mark.parametrize("name", ROUTES)
@given(batch=sample_batches(rf.sample_schema(vocab_size=VOCAB, columns=COLUMNS), min_rows=1))
@settings(max_examples=40)
def test_any_samples_come_back(name, batch):
    assert_kept(there_and_back(name, batch, VOCAB), batch)


@pytest.mark.parametrize("name", ROUTES)
def test_conversations_come_back(name):
    batch = rollouts(
        np.random.default_rng(0), num_samples=6, vocab_size=1000, columns=COLUMNS, turns=3,
        prompt_length=20, response_length=30,
    )  # fmt: skip
    out = there_and_back(name, batch, 1000)
    assert_ragged_equal(out.select(KEPT), _raw(batch).select(KEPT))


def _raw(batch):
    """Return the batch with its log-probs declared raw, as the conversions were told."""
    column = replace(
        rf.standard_column("rollout_log_probs"), log_prob=rf.LogProb("raw", "vocabulary")
    )
    schema = rf.sample_schema(vocab_size=1000, columns=[column, *COLUMNS[1:]])
    return pa.RecordBatch.from_arrays([batch.column(n) for n in schema.names], schema=schema)
