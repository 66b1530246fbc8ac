"""miles: its own sessions byte for byte, its rules, and tokens of the environment."""

import json
from pathlib import Path

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.adapters import miles
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.testing import assert_ragged_equal

DATA = Path(__file__).parents[1] / "data" / "miles"
VOCAB = 49152
IDS, OFFSETS = "rollout_sampling_mask_ids", "rollout_sampling_mask_offsets"


def session():
    return miles.decode_session((DATA / "samples.safetensors").read_bytes())


def converted(samples, vocab_size=10, **options):
    report = ConversionReport()
    batch = miles.to_samples(samples, vocab_size=vocab_size, report=report, **options)
    assert report.unbalanced() == []
    rf.validate(batch)
    return batch, report


def tool(**changes):
    """A prompt token, two generated ones, one of the tool between them, and a last one."""
    return {
        "index": 4,
        "group_index": 2,
        "tokens": [5, 6, 7, 8, 9],
        "response_length": 4,
        "loss_mask": [1, 0, 1, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25, 0.0],
        IDS: [2, 6, 7, 1, 3, 8, 9],
        OFFSETS: [0, 2, 3, 6, 7],
        "status": "completed",
        "weight_versions": ["3"],
        "reward": 0.5,
    } | changes


def test_sessions_come_back_byte_for_byte():
    data = (DATA / "samples.safetensors").read_bytes()
    samples, meta = miles.decode_session(data)
    assert meta == {"session_metadata": {"note": "real vLLM rollouts"}, "empty_reason": None}
    assert miles.encode_session(samples, meta) == data


def test_samples_of_a_session_come_back():
    samples, meta = session()
    batch, report = converted(samples, VOCAB)
    assert report.candidates.dropped == {"observation_token": 34}
    assert +report.unread == {}
    back = miles.from_samples(batch)
    again, _ = miles.decode_session(miles.encode_session(back, meta))
    for mine, theirs in zip(again, samples, strict=True):
        for name in ("tokens", "loss_mask", "rollout_log_probs", IDS, OFFSETS):
            assert mine[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(mine[name], theirs[name])
        for name in ("response_length", "status", "nulls"):
            assert mine[name] == theirs[name]


def test_training_data_gives_the_same_samples():
    arrays = np.load(DATA / "train_data.npz")
    data = {}
    for key in arrays:
        name, _, part = key.partition(".")
        if part == "values":
            bounds = np.cumsum(arrays[f"{name}.lengths"])[:-1]
            data[name] = [row.tolist() for row in np.split(arrays[key], bounds)]
        elif not part:
            data[name] = arrays[key].tolist()
    data["weight_versions"] = [["default"]] * 4
    batch, _ = converted([data], VOCAB)
    expected, _ = converted(session()[0], VOCAB)
    names = [n for n in expected.schema.names if n != "sample_id"]
    assert batch.column("reward").to_pylist() == data["raw_reward"]
    assert_ragged_equal(batch.select(names), expected.select(names))


def test_sets_are_those_of_the_tensor_parallel_masks():
    masks = np.load(DATA / "local_mask_sample12.npz")
    batch, _ = converted(session()[0][3:], VOCAB)
    (sample,) = miles.from_samples(batch)
    rows = np.repeat(np.arange(sample["response_length"]), np.diff(sample[OFFSETS]))
    for rank in range(4):
        mine = (sample[IDS] >= rank * 12288) & (sample[IDS] < (rank + 1) * 12288)
        pairs = np.stack([rows[mine], sample[IDS][mine] - rank * 12288], axis=1)
        np.testing.assert_array_equal(pairs, masks[f"tp{rank}.nonzero"])


def test_a_tool_token_by_hand():
    batch, report = converted([tool()])
    (row,) = batch.to_pylist()
    assert row == {
        "sample_id": "miles/4",
        "group_id": "2",
        "policy_version": 3,
        "reward": 0.5,
        "finish_reason": "stop",
        "input_ids": [5, 6, 7, 8, 9],
        "completion_mask": [0, 1, 0, 1, 1],
        "rollout_log_probs": [-0.5, -0.25, 0.0],
        "candidate_counts": [2, 3, 1],
        "candidate_ids": [2, 6, 1, 3, 8, 9],
        "response_length": 4,
    }
    assert report.candidates.dropped == {"observation_token": 1}
    (back,) = miles.from_samples(batch)
    for name, value in tool().items():
        if name != "index":
            mine = back[name].tolist() if isinstance(back[name], np.ndarray) else back[name]
            assert mine == value


def test_a_response_that_begins_with_an_observation_keeps_its_length():
    sample = tool(loss_mask=[0, 0, 1, 1], rollout_log_probs=[0.0, 0.0, -0.25, 0.0])
    sample |= {IDS: [6, 7, 1, 3, 8, 9], OFFSETS: [0, 1, 2, 5, 6]}
    batch, _ = converted([sample])
    (back,) = miles.from_samples(batch)
    assert back["response_length"] == 4
    assert back[OFFSETS].tolist() == sample[OFFSETS]
    # Without the column the response is what begins with the first scored token.
    (shorter,) = miles.from_samples(batch.drop_columns("response_length"))
    assert shorter["response_length"] == 2
    assert shorter[OFFSETS].tolist() == [0, 3, 4]


def test_an_abort_without_tokens_is_a_sample():
    aborted = {"tokens": [5], "response_length": 0, "loss_mask": [], "status": "aborted"}
    batch, _ = converted([aborted])
    assert batch.column("completion_mask").to_pylist() == [[0]]
    assert miles.from_samples(batch)[0]["status"] == "aborted"


# What miles does with inputs, and what conversion does with them.
RULES = {
    "empty row": ({IDS: [7, 1, 3, 8, 9], OFFSETS: [0, 0, 1, 4, 5]}, "RF-A005"),
    "None row": (
        {IDS: None, OFFSETS: None, "rollout_sampling_masks": [None, [7], [1, 3, 8], [9]]},
        "RF-A004",
    ),
    "sampled id absent": ({IDS: [2, 4, 7, 1, 3, 8, 9]}, "RF-A005"),
    "row count mismatch": ({OFFSETS: [0, 2, 3, 7]}, "RF-A006"),
    "duplicate ids in row": ({IDS: [2, 6, 7, 1, 8, 8, 9]}, "RF-A005"),
    "per-candidate log-probs (list rows)": (
        {"rollout_log_probs": [[-0.5], [0.0], [-1.0], [0.0]]},
        "RF-A002",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_refused(name):
    """sgl-project/sglang#35966: a set without the sampled id is refused, never repaired."""
    assert name in json.loads((DATA / "rules.json").read_text())
    changes, code = RULES[name]
    with pytest.raises(ConversionError) as caught:
        converted([tool(**changes)])
    assert caught.value.code == code


def test_unsorted_rows_are_sorted_and_counted():
    assert json.loads((DATA / "rules.json").read_text())["unsorted row"] == "accepted"
    batch, report = converted([tool(**{IDS: [6, 2, 7, 8, 1, 3, 9]})])
    assert report.converted["sets_sorted"] == 2
    assert batch.column("candidate_ids").to_pylist() == [[2, 6, 1, 3, 8, 9]]


def test_samples_of_a_batch_all_have_sets():
    lone = {k: v for k, v in tool(index=5).items() if k not in {IDS, OFFSETS}}
    with pytest.raises(ConversionError, match="RF-A004"):
        converted([tool(), lone])
    batch, _ = converted([tool(), lone], on_missing_support="full_vocab")
    with pytest.raises(ConversionError, match="needs a set for every trained token"):
        miles.from_samples(batch)
    partial = miles.from_samples(batch, partial=True)
    assert partial[1][OFFSETS].tolist() == [0, 0, 1, 1, 1]
    assert partial[1][IDS].tolist() == [7]


def test_nested_rows_of_older_builds():
    nested = tool(rollout_sampling_mask=[[2, 6], [7], [1, 3, 8], [9]])
    del nested[IDS], nested[OFFSETS]
    assert_ragged_equal(converted([nested])[0], converted([tool()])[0])


def test_log_probs_of_candidates_and_heads_come_back():
    values = np.log(np.array([0.25, 0.5, 1, 0.125, 0.25, 0.5, 1], np.float32))
    table = [[6, 2, -1], [-1, -1, -1], [8, 3, 1], [9, -1, -1]]
    heads = [[-0.5, -1.5, -np.inf], [-np.inf] * 3, [-0.5, -1.5, -2.5], [0.0, -np.inf, -np.inf]]
    sample = tool(
        rollout_sampling_mask_log_probs=values.tolist(), rollout_topk_token_ids=np.int32(table),
        rollout_topk_log_probs=np.float32(heads), teacher_log_probs=[-1.0, 0.0, -2.0, -3.0],
    )  # fmt: skip
    batch, report = converted([sample])
    assert batch.column("topk_counts").to_pylist() == [[2, 3, 1]]
    assert batch.column("topk_ids").to_pylist() == [[6, 2, 8, 3, 1, 9]]
    assert batch.column("teacher_log_probs").to_pylist() == [[-1.0, -2.0, -3.0]]
    assert report.head_entries.stored == 6
    (back,) = miles.from_samples(batch)
    for name in ("rollout_topk_token_ids", "rollout_topk_log_probs", "teacher_log_probs"):
        np.testing.assert_array_equal(back[name], sample[name])
    np.testing.assert_array_equal(back["rollout_sampling_mask_log_probs"], values)
    with pytest.raises(ConversionError, match="wider than the table"):
        miles.from_samples(batch, top_k=2)
    wide = miles.from_samples(batch, top_k=5)[0]["rollout_topk_token_ids"]
    assert wide.shape == (4, 5)


def test_log_probs_that_float32_rounds_are_counted():
    _, report = converted([tool(rollout_log_probs=[-0.1, 0.0, -0.25, 0.0])])
    assert report.converted["log_probs_rounded"] == 1


def test_values_without_a_place_are_counted():
    sample = tool(
        rollout_log_probs=[-0.5, -4.0, -0.25, 0.0], response="text", metadata={"a": {}},
        weight_versions=["3", "4"],
    )  # fmt: skip
    sample |= {IDS: [2, 6, 0, 7, 1, 3, 8, 9], OFFSETS: [0, 2, 4, 7, 8]}
    batch, report = converted([sample])
    assert +report.unread == {"response": 1, "rollout_log_probs of unscored tokens": 1}
    assert report.candidates.dropped == {"token_not_scored": 2}
    assert report.noted["samples_over_weight_updates"] == 1
    assert batch.column("policy_version").to_pylist() == [3]


def test_files_and_directories(tmp_path):
    found = list(miles.payloads(str(DATA / "samples.safetensors")))
    assert [s["sample_id"] for s in found] == [f"samples/{i}" for i in range(4)]
    batch, _ = converted(found, VOCAB)
    counts = miles.write([batch, batch.slice(0, 1)], str(tmp_path / "out"))
    assert counts == {"files": 2, "samples": 5}
    again = [s for p in sorted((tmp_path / "out").iterdir()) for s in miles.payloads(str(p))]
    assert len(again) == 5
    np.testing.assert_array_equal(again[4][IDS], found[0][IDS])


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_cut_sessions_are_errors(cut, tmp_path):
    data = (DATA / "samples.safetensors").read_bytes()
    place = tmp_path / "cut.safetensors"
    place.write_bytes(data[:cut])
    with pytest.raises(ConversionError) as caught:
        list(miles.payloads(str(place)))
    assert (caught.value.code, caught.value.where.file) == ("RF-A002", str(place))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"response_length": 9}, "RF-A006"),
        ({"response_length": None}, "RF-A002"),
        ({"tokens": None}, "RF-A002"),
        ({"loss_mask": [1, 0, 2, 1]}, "RF-A002"),
        ({"loss_mask": [1, 0, 1]}, "RF-A006"),
        ({OFFSETS: None}, "RF-A002"),
        ({OFFSETS: [0, 3, 2, 6, 7]}, "RF-A006"),
        ({"rollout_log_probs": [-0.5]}, "RF-A006"),
        ({"rollout_sampling_mask_log_probs": [0.0]}, "RF-A006"),
    ],
)
def test_malformed_samples_are_errors(change, code):
    with pytest.raises(ConversionError) as caught:
        converted([tool(**change)])
    assert caught.value.code == code
