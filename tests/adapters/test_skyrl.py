"""SkyRL: its replies and batches as equal sets, ties refused or counted, repairs in the open."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format.adapters import skyrl
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.testing import assert_ragged_equal

DATA = Path(__file__).parents[1] / "data" / "skyrl"
VOCAB = 49152
SUPPORT = "rollout_sample_support"


def recorded(name):
    arrays = np.load(DATA / f"{name}.npz")
    samples = []
    for number in range(8):
        prefix = f"s{number}."
        samples.append({k.removeprefix(prefix): arrays[k] for k in arrays if k.startswith(prefix)})
    batch = {k.removeprefix("batch."): arrays[k] for k in arrays if k.startswith("batch.")}
    batch[SUPPORT] = {key: batch.pop(f"{SUPPORT}.{key}") for key in ("values", "cu_seqlens")}
    return samples, batch


def converted(payloads, vocab_size=12, **options):
    report = ConversionReport()
    batch = skyrl.to_samples(payloads, vocab_size=vocab_size, report=report, **options)
    assert report.unbalanced() == []
    rf.validate(batch)
    return batch, report


def reply(*tables, token_ids=(6, 7), prompt=(5,), **choice):
    choices = [
        {"token_ids": list(token_ids), SUPPORT: skyrl.encode_support(np.int32(t))} | choice
        for t in tables
    ]
    return {"prompt_token_ids": list(prompt), "response": {"choices": choices}}


def sets(table):
    return [sorted(i for i in row if i >= 0) for row in table.tolist()]


def test_a_generate_reply_gives_the_engines_own_sets():
    samples, _ = recorded("support_k20")
    response = json.loads((DATA / "generate_response_k20.json").read_text())
    prompts = [s["prompt_token_ids"].tolist() for s in samples]
    record = {"request_id": "r", "prompt_token_ids": prompts, "response": response}
    batch, report = converted([record], VOCAB)
    assert batch.column("sample_id").to_pylist() == [f"r/{i}" for i in range(8)]
    for row, sample in enumerate(samples):
        got = batch.slice(row, 1).to_pylist()[0]
        assert got["candidate_counts"] == sample["vllm_mask_counts"].tolist()
        assert got["candidate_ids"] == sample["vllm_mask_ids"].tolist()
        np.testing.assert_array_equal(got["rollout_log_probs"], np.float32(sample["logprobs"]))
    assert report.converted["sets_sorted"] > 0
    out = skyrl.to_training_batch(batch, top_k=20)[SUPPORT]["values"]
    expected = np.concatenate([s["sample_support"] for s in samples])
    assert sets(out) == sets(expected)


def test_wire_form_comes_back_byte_for_byte():
    for choice in json.loads((DATA / "generate_response_k20.json").read_text())["choices"]:
        table = skyrl.decode_support(choice[SUPPORT])
        assert skyrl.encode_support(table) == choice[SUPPORT]


@pytest.mark.parametrize("name", ["support_k20", "support_k20_topp1"])
def test_training_batches_come_back(name):
    """NovaSky-AI/SkyRL#883: one padding side, responses of different lengths, sets as sets."""
    _, expected = recorded(name)
    batch, _ = converted([expected], VOCAB)
    got = skyrl.to_training_batch(batch, top_k=20)
    assert got.keys() == expected.keys()
    for key, array in expected.items():
        if key == SUPPORT:
            np.testing.assert_array_equal(got[key]["cu_seqlens"], array["cu_seqlens"])
            assert sets(got[key]["values"]) == sets(array["values"])
        else:
            assert got[key].dtype == array.dtype
            np.testing.assert_array_equal(got[key], array)


def test_a_slice_of_a_batch_is_a_slice_of_the_samples():
    arrays = np.load(DATA / "support_k20.npz")
    _, expected = recorded("support_k20")
    batch, _ = converted([expected], VOCAB)
    part = skyrl.to_training_batch(batch.slice(2, 3), top_k=20)[SUPPORT]
    assert sets(part["values"]) == sets(arrays["slice_2_5.values"])
    np.testing.assert_array_equal(part["cu_seqlens"], arrays["slice_2_5.cu_seqlens"])


@pytest.mark.parametrize("name", ["support_k20", "support_k20_topp1"])
def test_flat_log_probs_give_skyrls_table(name):
    for sample in recorded(name)[0]:
        ids, values = sample["flat_token_ids"], sample["flat_logprobs"]
        table, repaired = skyrl.support_from_flat(ids, values, 20)
        np.testing.assert_array_equal(table, sample["sample_support"])
        assert not repaired.any()


def test_rows_of_more_than_top_k_ids_are_refused_or_counted():
    """engines.md 8, item 8: a row of top_k + 2 ids (ties) is never cut silently."""
    samples, _ = recorded("support_k20_topp1")
    counts = np.concatenate([s["vllm_mask_counts"] for s in samples])
    assert (np.count_nonzero(counts > 20), (counts - 20)[counts > 20].sum()) == (94, 135)
    whole = rf.sample_schema(vocab_size=12, columns=["candidate_counts", "candidate_ids"])
    row = {
        "sample_id": "a", "input_ids": [5, 6, 7], "completion_mask": [0, 1, 1],
        "candidate_counts": [4, 1], "candidate_ids": [1, 2, 3, 6, 7],
    }  # fmt: skip
    import pyarrow as pa

    batch = pa.RecordBatch.from_pylist([row], schema=whole)
    with pytest.raises(ConversionError, match="would lose ids") as caught:
        skyrl.to_training_batch(batch, top_k=2)
    assert (caught.value.where.row, caught.value.where.position) == (0, 0)
    report = ConversionReport()
    cut = skyrl.to_training_batch(batch, top_k=2, lossy=True, report=report)
    assert sets(cut[SUPPORT]["values"]) == [[1, 6], [7]]
    assert report.candidates.dropped == {"beyond_top_k": 2}
    assert report.converted == {"sets_cut": 1}
    assert report.unbalanced() == []
    assert sets(skyrl.to_training_batch(batch, top_k=4)[SUPPORT]["values"]) == [[1, 2, 3, 6], [7]]


def test_a_lossy_cut_keeps_the_likeliest():
    import pyarrow as pa

    names = ["candidate_counts", "candidate_ids", "candidate_log_probs"]
    row = {
        "sample_id": "a", "input_ids": [5, 6], "completion_mask": [0, 1],
        "candidate_counts": [4], "candidate_ids": [1, 2, 3, 6],
        "candidate_log_probs": [-3.0, -2.0, -1.0, -4.0],
    }  # fmt: skip
    batch = pa.RecordBatch.from_pylist([row], schema=rf.sample_schema(vocab_size=12, columns=names))
    with pytest.raises(ConversionError, match=r"got: +candidate_log_probs"):
        skyrl.to_training_batch(batch, top_k=4)
    cut = skyrl.to_training_batch(batch, top_k=3, lossy=True)
    assert sets(cut[SUPPORT]["values"]) == [[2, 3, 6]]


def test_repairs_are_told():
    """SkyRL#2237: a sampled id that is missing from its row replaces the weakest member."""
    case = json.loads((DATA / "rules.json").read_text())["repair: sampled id absent from the row"]
    ids = np.array(case["flat_token_ids_rows"]).reshape(-1)
    values = np.array([float(v) for row in case["flat_logprobs_rows"] for v in row])
    table, repaired = skyrl.support_from_flat(ids, values, 3)
    assert table.tolist() == case["support"]
    assert repaired.tolist() == [True, False, True]
    # In the table alone a repair looks like a full row whose last id was sampled: noted.
    batch, report = converted([reply([[5, 9, 7], [5, 9, -1]], token_ids=(7, 5), prompt=(1,))])
    assert report.noted["sets_perhaps_repaired"] == 1
    assert report.noted["sets_of_full_width"] == 1
    assert batch.column("candidate_ids").to_pylist() == [[5, 7, 9, 5, 9]]


# What SkyRL does with tables of three tokens, and what conversion does with them.
RULES = {
    "-1 in the middle": ([[6, -1, 2], [7, -1, -1]], "RF-A002"),
    "-2": ([[6, -2, -2], [7, -1, -1]], "RF-A002"),
    "duplicate ids": ([[6, 6, -1], [7, -1, -1]], "RF-A005"),
    "all -1": ([[6, -1, -1], [-1, -1, -1]], "RF-A004"),
    "row count != response length": ([[6, -1, -1]], "RF-A006"),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_refused(name):
    assert name in json.loads((DATA / "rules.json").read_text())
    table, code = RULES[name]
    with pytest.raises(ConversionError) as caught:
        converted([reply(table)])
    assert caught.value.code == code


def test_other_types_on_the_wire_are_refused():
    assert "int64 on the wire" in json.loads((DATA / "rules.json").read_text())
    record = reply([[6, -1], [7, -1]])
    record["response"]["choices"][0][SUPPORT]["dtype"] = "int64"
    with pytest.raises(ConversionError, match="RF-A002"):
        converted([record])
    record["response"]["choices"][0][SUPPORT] |= {"dtype": "int32", "shape": [2, 3]}
    with pytest.raises(ConversionError, match="RF-A006"):
        converted([record])


def test_a_token_without_support_is_missing_by_policy():
    record = reply([[6, 2, -1], [-1, -1, -1]])
    batch, report = converted([record], on_missing_support="full_vocab")
    assert batch.column("candidate_counts").to_pylist() == [[2, 0]]
    assert report.noted["full_vocabulary_targets"] == 1
    lost = reply([[6, 2, -1], [7, -1, -1]])
    lost["response"]["choices"][0][SUPPORT] = None
    with pytest.raises(ConversionError, match="RF-A004"):
        converted([lost])


def test_observations_have_rows_of_padding():
    batch = {
        "sequences": np.array([[5, 6, 7, 8]]),
        "attention_mask": np.ones((1, 4), np.int64),
        "response_mask": np.ones((1, 3), np.int64),
        "loss_masks": np.array([[1, 0, 1]], np.float32),
        "rewards": np.array([[0, 0, 2]], np.float32),
        SUPPORT: {
            "values": np.int32([[6, 2], [-1, -1], [8, -1]]), "cu_seqlens": np.int32([0, 3]),
        },
    }  # fmt: skip
    ours, _ = converted([batch])
    assert ours.column("completion_mask").to_pylist() == [[0, 1, 0, 1]]
    assert ours.column("candidate_ids").to_pylist() == [[2, 6, 8]]
    assert ours.column("reward").to_pylist() == [2.0]
    back = skyrl.to_training_batch(ours, top_k=2)
    assert sets(back[SUPPORT]["values"]) == [[2, 6], [], [8]]
    spread = batch | {"rewards": np.array([[1, 0, 2]], np.float32)}
    with pytest.raises(ConversionError, match="ask for the column"):
        converted([spread], columns=["reward", "response_length"])
    ours, _ = converted([spread])
    np.testing.assert_array_equal(
        skyrl.to_training_batch(ours, top_k=2)["rewards"], spread["rewards"]
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"attention_mask": np.array([[1, 1, 1, 0]])}, "RF-A002"),
        ({"response_mask": np.array([[1, 1, 0]])}, "RF-A006"),
        ({"loss_masks": np.ones((1, 4))}, "RF-A006"),
        ({"sequences": None}, "RF-A002"),
        ({SUPPORT: {"values": np.int32([[6, 2]]), "cu_seqlens": np.int32([0, 3])}}, "RF-A006"),
        ({SUPPORT: {"values": np.int32([[6, 2]])}}, "RF-A002"),
    ],
)
def test_batches_that_contradict_themselves_are_errors(change, code):
    batch = {
        "sequences": np.array([[5, 6, 7, 8]]), "attention_mask": np.ones((1, 4), np.int64),
        "response_mask": np.ones((1, 3), np.int64), "loss_masks": np.ones((1, 3)),
        SUPPORT: {"values": np.int32([[6], [7], [8]]), "cu_seqlens": np.int32([0, 3])},
    }  # fmt: skip
    converted([batch])
    with pytest.raises(ConversionError) as caught:
        converted([batch | change])
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"response": {"choices": []}}, "RF-A010"),
        ({"prompt_token_ids": [1], "response": {}}, "RF-A002"),
        ({"prompt_token_ids": [1], "response": {"choices": [{}]}}, "RF-A002"),
        ({"prompt_token_ids": [[1]], "response": {"choices": []}}, "RF-A006"),
        ([], "RF-A002"),
    ],
)
def test_other_payloads_are_errors(record, code):
    with pytest.raises(ConversionError) as caught:
        converted([record])
    assert caught.value.code == code


@given(st.data())
def test_tables_of_any_sets_come_back(data):
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    records, tables = [], []
    for number, length in enumerate(lengths):
        tokens = data.draw(st.lists(st.integers(0, 11), min_size=length, max_size=length))
        table = np.full((length, 5), -1, np.int32)
        for row, token in enumerate(tokens):
            others = data.draw(st.sets(st.integers(0, 11), max_size=4)) - {token}
            ids = data.draw(st.permutations([token, *others]))
            table[row, : len(ids)] = ids
        tables.append(table)
        records.append(reply(table, token_ids=tokens) | {"request_id": f"r{number}"})
    batch, _ = converted(records)
    out = skyrl.to_training_batch(batch, top_k=5)
    assert sets(out[SUPPORT]["values"]) == sets(np.concatenate(tables))
    again, _ = converted([out | {"sample_id": "x"}])
    names = [n for n in again.schema.names if n not in {"sample_id", "reward"}]
    assert_ragged_equal(again.select(names), batch.select(names))


def test_files(tmp_path):
    _, expected = recorded("support_k20")
    batch, _ = converted([expected], VOCAB)
    counts = skyrl.write([batch, batch], str(tmp_path / "out"), top_k=20)
    assert counts == {"files": 2, "sets_cut": 0, "ids_left_out": 0}
    arrays = np.load(sorted((tmp_path / "out").iterdir())[1])
    np.testing.assert_array_equal(arrays["sequences"], expected["sequences"])
    assert sets(arrays[f"{SUPPORT}.values"]) == sets(expected[SUPPORT]["values"])
