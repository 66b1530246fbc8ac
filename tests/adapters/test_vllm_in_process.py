"""Results of `LLM.generate` as vLLM's Python objects, which are told by their attributes."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from support.vllm_rollouts import VOCAB_SIZE, recorded

from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.validate import validate


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs:
    start_indices: list = field(default_factory=list)
    end_indices: list = field(default_factory=list)
    token_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    ranks: list = field(default_factory=list)
    decoded_tokens: list = field(default_factory=list)

    def append(self, entries):
        self.start_indices.append(len(self.token_ids))
        for id_, value, rank in entries:
            self.token_ids.append(id_)
            self.logprobs.append(value)
            self.ranks.append(rank)
            self.decoded_tokens.append(None)
        self.end_indices.append(len(self.token_ids))

    def __len__(self):
        return len(self.start_indices)


@dataclass
class SamplingMask:
    token_ids: list
    offsets: list | None = None


# The engine's rows: the sampled token, then the K = 2 best.
ROWS = [
    [(3, -0.25, 1), (3, -0.25, 1), (8, -1.75, 2)],
    [(4, -2.5, 5), (9, -0.25, 1), (1, -2.0, 2)],
    [(7, 0.0, 1), (7, 0.0, 1), (0, float("-inf"), 2)],
]
MASK = [[3, 8], [1, 4, 9], [7]]
EXPECTED = {
    "sample_id": "r1/0", "input_ids": [5, 6, 3, 4, 7], "completion_mask": [0, 0, 1, 1, 1],
    "rollout_log_probs": [-0.25, -2.5, 0.0],
    "candidate_counts": [2, 3, 1], "candidate_ids": [3, 8, 1, 4, 9, 7],
    "topk_counts": [2, 2, 1], "topk_ids": [3, 8, 9, 1, 7],
    "topk_log_probs": [-0.25, -1.75, -0.25, -2.0, 0.0],
}  # fmt: skip


def dicts(rows=ROWS):
    return [{id_: Logprob(value, rank) for id_, value, rank in row} for row in rows]


def flat(rows=ROWS):
    out = FlatLogprobs()
    for row in rows:
        out.append(row)
    return out


def output(logprobs=None, mask=None, **fields):
    part = SimpleNamespace(
        index=0, text="abc", token_ids=[3, 4, 7], cumulative_logprob=None, logprobs=logprobs,
        finish_reason="stop", stop_reason=None, routed_experts=None, sampling_mask=mask,
    )  # fmt: skip
    return SimpleNamespace(
        request_id="r1", prompt="p", prompt_token_ids=[5, 6], prompt_logprobs=None,
        outputs=[part], finished=True, **fields,
    )  # fmt: skip


def convert(*records, **options):
    report = ConversionReport()
    batch = vllm.to_samples(records, **{"vocab_size": 10} | options, report=report)
    validate(batch)
    assert report.unbalanced() == []
    return batch, report


MASKS = {
    "nested object": SamplingMask(MASK),
    "csr": SamplingMask([3, 8, 1, 4, 9, 7], [0, 2, 5, 6]),
    "csr arrays": SamplingMask(np.array([3, 8, 1, 4, 9, 7], np.int32), np.array([0, 2, 5, 6])),
    "list": MASK,
}


@pytest.mark.parametrize("make", [dicts, flat])
@pytest.mark.parametrize("mask", MASKS)
def test_every_form_gives_the_columns_written_out_by_hand(make, mask):
    batch, report = convert(output(make(), MASKS[mask]))
    [row] = batch.to_pylist()
    assert {key: row[key] for key in EXPECTED} == EXPECTED
    twice = {"repeats_sampled": 2} if make is flat else {}
    assert report.head_entries.dropped == {
        "minus_infinity": 1, "sampled_beyond_head": 1, **twice,
    }  # fmt: skip
    assert report.noted["heads_one_short"] == 0


def test_a_record_with_its_request():
    record = {
        "request": {"sampling_params": {"temperature": 0.5, "top_k": 2, "logprobs": 2}},
        "response": output(dicts(), MASKS["list"]), "reward": 1.0,
    }  # fmt: skip
    [row] = convert(record)[0].to_pylist()
    assert (row["temperature"], row["reward"]) == (0.5, 1.0)


def test_without_masks_and_log_probs():
    [row] = convert(output())[0].to_pylist()
    assert not {"candidate_ids", "rollout_log_probs", "topk_ids"} & row.keys()


def test_an_object_without_the_mask_attribute_is_of_an_older_build():
    old = output(dicts())
    del old.outputs[0].sampling_mask
    assert "candidate_ids" not in convert(old)[0].schema.names


def test_a_mask_that_was_asked_for_and_is_none_is_lost():
    """vllm-project/vllm#53826: None where a set was asked for is not "no truncation"."""
    record = {"request": {"sampling_params": {"return_sampling_mask": True}}, "response": output()}
    with pytest.raises(ConversionError) as found:
        convert(record)
    assert found.value.code == "RF-A004"


def test_log_probs_of_zero_give_the_sampled_token_only():
    rows = [row[:1] for row in ROWS]
    for make in (dicts, flat):
        batch, report = convert(output(make(rows)))
        assert batch.column("rollout_log_probs").to_pylist() == [[-0.25, -2.5, 0.0]]
        assert "topk_ids" not in batch.schema.names
        assert report.head_entries.dropped == {"column_not_wanted": 3}


def test_log_probs_of_another_length_are_refused():
    for given in (dicts(ROWS[:2]), flat(ROWS[:2])):
        with pytest.raises(ConversionError):
            convert(output(given))


def test_routed_experts_are_an_array():
    one = output()
    one.outputs[0].routed_experts = experts = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    stored = convert(one)[0].column("routed_experts").to_pylist()[0]
    assert np.array_equal(np.array(stored).reshape(5, 2, 2)[:-1], experts)
    one.outputs[0].routed_experts = experts[:-1]
    with pytest.raises(ConversionError) as found:
        convert(one)
    assert found.value.code == "RF-A006"


def test_a_prompt_that_a_teacher_scored():
    one = output()
    one.prompt_token_ids = [2, 3, 4, 7]
    one.prompt_logprobs = [None, *dicts()]
    expected, _ = convert(one, targets="prompt")
    [row] = expected.to_pylist()
    assert row["completion_mask"] == [0, 1, 1, 1]
    assert row["teacher_topk_ids"] == EXPECTED["topk_ids"]
    assert row["teacher_log_probs"] == EXPECTED["rollout_log_probs"]
    one.prompt_logprobs = flat([[], *ROWS])
    assert convert(one, targets="prompt")[0].equals(expected)


def test_recorded_answers_as_objects_give_what_their_json_gives():
    [record] = recorded("variants", names={"p0_topk20_only"}) or [None]
    if record is None:
        record = recorded("grpo_groups")[0]
    response = record["response"]
    parts = []
    for choice in response["choices"]:
        lists = [
            {e["token_id"]: Logprob(e["logprob"], e["rank"]) for e in entry["top_logprobs"]}
            for entry in choice["logprobs"]["content"]
        ]
        mask = SamplingMask(copy.deepcopy(choice["sampling_mask"]))
        names = ("index", "token_ids", "finish_reason", "stop_reason", "routed_experts")
        fields = {name: choice[name] for name in names}
        parts.append(SimpleNamespace(logprobs=lists, sampling_mask=mask, **fields))
    whole = SimpleNamespace(
        request_id=response["request_id"], prompt_token_ids=response["prompt_token_ids"],
        prompt_logprobs=None, outputs=parts,
    )  # fmt: skip
    ours, _ = convert({"request": record["request"], "response": whole}, vocab_size=VOCAB_SIZE)
    theirs, _ = convert(record, vocab_size=VOCAB_SIZE)
    for name in ours.schema.names:
        if name not in ("provenance", "policy_version"):
            assert ours.column(name).equals(theirs.column(name)), name
