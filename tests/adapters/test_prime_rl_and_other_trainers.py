"""Any samples, in the form of each trainer and back: what it can hold comes back."""

import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings

import ragged_format as rf
from ragged_format.adapters import miles, prime_rl, skyrl, slime, transfer_queue, verifiers
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, MissingDependencyError
from ragged_format.packing import pack_row
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


MESSAGES = {
    "prime_rl": lambda: prime_rl.decode(b"\x90"),
    "prime_rl structs": lambda: prime_rl.TrainingSample,
    "transfer_queue": lambda: transfer_queue.decode(b"\1\0\0\0\x0c\0\0\0\1\0\0\0\x80"),
    "verifiers": lambda: verifiers.write([], "nowhere"),
    "slime": lambda: list(slime.payloads("nowhere.pt")),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_missing_packages_are_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "ragged_format.adapters._prime_rl_structs", raising=False)
    # A from-import would find the module on its package.
    monkeypatch.delattr("ragged_format.adapters._prime_rl_structs", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install ragged-format\["):
        MESSAGES[name]()


def test_the_recorded_set_is_the_only_source():
    """PrimeIntellect-ai/prime-rl#2601, #1965: truncation is not computed again from log-probs."""
    values = np.log(np.float32([0.05, 0.5, 0.45]))
    mask = prime_rl.SamplingMask(
        np.array([2, 4, 6], "<i4").tobytes(), np.array([0, 3], "<i4").tobytes(), values.tobytes()
    )
    # The sampled 2 is the tail that a top-p of 0.9 would cut.
    item = prime_rl.TrainingSample(
        [5, 2], [False, True], [0.0, float(values[0])], [1.0] * 2, "e", sampling_mask=mask
    )
    batch = prime_rl.to_samples([item], vocab_size=8)
    assert batch.column("candidate_ids").to_pylist() == [[2, 4, 6]]
    assert prime_rl.to_training_samples(batch) == [item]


def test_nulls_of_json_writers_are_missing_log_probs():
    """NovaSky-AI/SkyRL#2082, #2083: orjson writes NaN and infinities as null."""
    support = skyrl.encode_support(np.int32([[6], [7]]))
    logprobs = {"content": [{"logprob": 0.0}, {"logprob": None}]}
    choice = {"token_ids": [6, 7], "logprobs": logprobs, "rollout_sample_support": support}
    record = {"prompt_token_ids": [5], "response": {"choices": [choice]}}
    report = ConversionReport()
    batch = skyrl.to_samples([record], vocab_size=8, report=report)
    assert batch.column("target_flags").to_pylist() == [[0, 4]]
    assert report.log_probs.dropped == {"log_prob_null": 1}


def test_a_large_vocabulary_costs_nothing():
    """PrimeIntellect-ai/prime-rl#3431, #3464: nothing has the width of the vocabulary."""
    batch = rollouts(np.random.default_rng(1), num_samples=4, vocab_size=1000, columns=COLUMNS)
    routes = {name: route(batch) for name, (_, route) in ROUTES.items()}
    for name, payloads in routes.items():
        tracemalloc.start()
        ROUTES[name][0].to_samples(payloads, vocab_size=2**31 - 1, logprobs_mode="raw")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**24, name


def test_batches_for_trainers_are_arrays():
    """NovaSky-AI/SkyRL#982: nested lists of ids are what makes such batches slow to send."""
    batch = rollouts(np.random.default_rng(1), num_samples=4, vocab_size=1000, columns=COLUMNS)
    out = skyrl.to_training_batch(batch, top_k=600)
    support = out.pop("rollout_sample_support")
    assert {type(value) for value in (*out.values(), *support.values())} == {np.ndarray}


def one_target(**columns):
    row = {"sample_id": "a", "input_ids": [5, 6], "completion_mask": [0, 1]} | columns
    schema = rf.sample_schema(vocab_size=VOCAB, columns=list(columns))
    return pa.RecordBatch.from_pylist([row], schema=schema)


EXPORTS = {
    "prime_rl": lambda batch: prime_rl.to_training_samples(batch, temperature=1.0),
    "miles": miles.from_samples,
    "slime": slime.from_samples,
    "skyrl": lambda batch: skyrl.to_training_batch(batch, top_k=4),
    "transfer_queue": transfer_queue.from_samples,
    "verifiers": verifiers.from_samples,
}


@pytest.mark.parametrize("name", EXPORTS)
def test_packed_rows_are_not_samples(name):
    batch = one_target(rollout_log_probs=[-0.5])
    if name == "prime_rl":
        prime_rl.to_micro_batch(pack_row(batch), temperature=1.0)
    with pytest.raises(ConversionError, match="unpack the rows"):
        EXPORTS[name](pack_row(batch))


@pytest.mark.parametrize("name", EXPORTS)
def test_columns_without_a_place_are_named(name):
    batch = one_target(rollout_log_probs=[-0.5], policy_versions=[3])
    with pytest.raises(ConversionError, match=r"got: +policy_versions"):
        EXPORTS[name](batch)


@pytest.mark.parametrize("name", EXPORTS)
def test_flagged_targets_are_refused(name):
    """PrimeIntellect-ai/prime-rl#2979: a set that is missing is not written as none."""
    batch = one_target(
        rollout_log_probs=[-0.5], target_flags=[1], candidate_counts=[0], candidate_ids=[]
    )
    with pytest.raises(ConversionError, match=r"got: +support_missing"):
        EXPORTS[name](batch)


def test_values_that_a_form_needs_from_all_samples():
    rows = [
        {"sample_id": s, "input_ids": [5, 6], "completion_mask": [0, 1],
         "rollout_log_probs": [-0.5], "advantage": a, "reward": a}
        for s, a in (("a", 1.0), ("b", None))
    ]  # fmt: skip
    names = ["rollout_log_probs", "advantage", "reward"]
    batch = pa.RecordBatch.from_pylist(
        rows, schema=rf.sample_schema(vocab_size=VOCAB, columns=names)
    )
    with pytest.raises(ConversionError, match="with and without advantage"):
        prime_rl.to_micro_batch(batch, temperature=1.0)
    with pytest.raises(ConversionError, match="some samples have a reward"):
        skyrl.to_training_batch(batch, top_k=4)
    advantages = [s.advantages for s in prime_rl.to_training_samples(batch, temperature=1.0)]
    assert advantages == [[0.0, 1.0], None]


def test_a_response_that_misses_a_scored_token_is_an_error():
    own = rf.Column("response_length", "record", pa.int64(), nullable=True)
    row = {"sample_id": "a", "input_ids": [5, 6], "completion_mask": [0, 1], "response_length": 0}
    batch = pa.RecordBatch.from_pylist(
        [row], schema=rf.sample_schema(vocab_size=VOCAB, columns=[own])
    )
    with pytest.raises(ConversionError, match="the response holds every scored token"):
        slime.from_samples(batch)


def test_a_field_of_some_samples_is_an_error():
    items = [
        prime_rl.TrainingSample([5, 6], [False, True], [0.0, -1.0], [1.0] * 2, "e", **extra)
        for extra in ({}, {"ref_logprobs": [0.0, -2.0]})
    ]
    with pytest.raises(ConversionError, match="for all samples of a call or for none"):
        prime_rl.to_samples(items, vocab_size=VOCAB)
    batch = prime_rl.to_samples(items, vocab_size=VOCAB, columns=["rollout_log_probs"])
    assert batch.num_rows == 2


@pytest.mark.parametrize("module", [miles, slime, skyrl, prime_rl], ids=lambda m: m.__name__)
def test_other_payloads_are_errors(module):
    with pytest.raises(ConversionError, match="RF-A002"):
        module.to_samples([7], vocab_size=VOCAB)


def test_values_by_token_where_a_record_column_was_asked_for():
    item = prime_rl.TrainingSample(
        [5, 6, 7], [False, True, True], [0.0, -1.0, -1.0], [1.0] * 3, "e",
        advantages=[0.0, 1.0, 2.0],
    )  # fmt: skip
    with pytest.raises(ConversionError, match="ask for the column 'advantages'"):
        prime_rl.to_samples([item], vocab_size=VOCAB, columns=["advantage"])
    batch = prime_rl.to_samples([item], vocab_size=VOCAB, columns=["advantages"])
    assert batch.column("advantages").to_pylist() == [[1.0, 2.0]]


def test_dumps_of_other_things_are_errors(tmp_path):
    place = tmp_path / "x.pt"
    for content in (b"", b"nothing", None):
        if content is None:
            torch.save({"samples": 3}, place)
        else:
            place.write_bytes(content)
        with pytest.raises(ConversionError, match="RF-A002"):
            list(slime.payloads(str(place)))


def test_rows_written_to_many_ranks_and_none(tmp_path):
    assert prime_rl.write([], str(tmp_path / "none"), world_size=2)["rows"] == 0
    assert (tmp_path / "none" / "rank_1.bin").read_bytes() == b"\x90"
    rows = [pack_row(one_target(rollout_log_probs=[-0.5]))] * 40
    prime_rl.write(rows, str(tmp_path / "many"), temperature=1.0)
    assert len(prime_rl.decode((tmp_path / "many" / "rank_0.bin").read_bytes())) == 40
    with pytest.raises(ConversionError, match="at least one rank"):
        prime_rl.write([], str(tmp_path / "x"), world_size=0)
