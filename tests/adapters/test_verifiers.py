"""verifiers: recorded traces, masks that never get lost, and forks of the graph."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ragged_format as rf
from ragged_format.adapters import verifiers
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError

DATA = Path(__file__).parents[1] / "data" / "verifiers"
VOCAB = 49152


def array(*values):
    return verifiers.encode_array(np.array(values, np.int32))


def mask(*rows):
    return {"ids": array(*[i for row in rows for i in row]), "counts": array(*map(len, rows))}


def node(parent, token_ids, sampled=0, **fields):
    """A node that sampled its last tokens."""
    context = len(token_ids) - sampled
    return {
        "parent": parent,
        "sampled": sampled > 0,
        "token_ids": token_ids,
        "mask": [False] * context + [True] * sampled,
        "logprobs": [],
    } | fields


def recorded():
    """The nodes of the recorded conversations, with the masks and log-probs of their branches."""
    conversations = json.loads((DATA / "nodes_record.json").read_text())["nodes"]
    arrays = np.load(DATA / "branches.npz")
    for number, nodes in enumerate(conversations):
        branch = {
            k.removeprefix(f"c{number}.branch0."): arrays[k]
            for k in arrays if k.startswith(f"c{number}.")
        }  # fmt: skip
        starts = np.append(0, np.cumsum(branch["sampling_mask.counts"]))
        begin = 0
        for one in nodes:
            end = begin + len(one["token_ids"])
            scored = np.array(one["mask"], bool)
            if scored.any():
                one["logprobs"] = branch["logprobs"][begin:end][scored].tolist()
                one["sampling_mask"] = {
                    "ids": array(*branch["sampling_mask.ids"][starts[begin] : starts[end]]),
                    "counts": array(*branch["sampling_mask.counts"][begin:end][scored]),
                }
            else:
                one["sampling_mask"] = None
            begin = end
        yield nodes, branch


def converted(traces, vocab_size=12, **options):
    report = ConversionReport()
    batch = verifiers.to_samples(traces, vocab_size=vocab_size, report=report, **options)
    assert report.unbalanced() == []
    rf.validate(batch)
    return batch, report


def test_branches_of_recorded_conversations(tmp_path):
    traces = list(recorded())
    place = tmp_path / "nodes.msgpack"
    place.write_bytes(msgspec.msgpack.encode([nodes for nodes, _ in traces]))
    batch, report = converted(verifiers.payloads(str(place)), VOCAB)
    assert batch.column("sample_id").to_pylist() == [f"nodes/{i}/0" for i in range(3)]
    assert +report.unread == {}
    for row, (nodes, branch) in enumerate(traces):
        got = batch.slice(row, 1).to_pylist()[0]
        scored = branch["mask"]
        assert got["input_ids"] == branch["token_ids"].tolist()
        assert got["completion_mask"] == scored.astype(int).tolist()
        assert got["rollout_log_probs"] == branch["logprobs"][scored].tolist()
        assert got["candidate_counts"] == branch["sampling_mask.counts"][scored].tolist()
        assert got["candidate_ids"] == branch["sampling_mask.ids"].tolist()
        # Written back, the nodes that have tokens are the same.
        (back,) = verifiers.from_samples(batch.slice(row, 1))
        names = ("token_ids", "mask", "logprobs", "sampling_mask", "sampled")
        theirs = [{k: one[k] for k in names} for one in nodes if one["token_ids"]]
        assert [{k: one[k] for k in names} for one in back] == theirs


def test_files_come_back_byte_for_byte(tmp_path):
    batch, _ = converted([nodes for nodes, _ in recorded()], VOCAB)
    assert verifiers.write([batch], str(tmp_path / "a")) == {"traces": 3, "nodes": 9}
    again, _ = converted(verifiers.payloads(str(tmp_path / "a")), VOCAB)
    verifiers.write([again], str(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_json_records_have_no_masks():
    nodes = json.loads((DATA / "nodes_record.json").read_text())["nodes"]
    batch, report = converted(nodes, VOCAB)
    assert "candidate_ids" not in batch.schema.names
    assert report.converted["log_probs_rounded"] > 0


def test_a_fork_is_two_samples():
    nodes = [
        node(None, [5, 6, 7], 2, logprobs=[-0.5, 0.0], sampling_mask=mask([2, 6], [7])),
        node(0, [8, 9], 1, logprobs=[-0.25], sampling_mask=mask([3, 9])),
        node(0, [8, 4], 1, logprobs=[-0.75], sampling_mask=mask([1, 4, 5])),
    ]
    batch, _ = converted([{"id": "t", "nodes": nodes, "reward": 1}])
    assert batch.column("sample_id").to_pylist() == ["t/0", "t/1"]
    assert batch.column("rollout_id").to_pylist() == ["t", "t"]
    assert batch.column("branch_index").to_pylist() == [0, 1]
    assert batch.column("reward").to_pylist() == [1.0, 1.0]
    assert batch.column("input_ids").to_pylist() == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 4]]
    assert batch.column("completion_mask").to_pylist() == [[0, 1, 1, 0, 1]] * 2
    assert batch.column("candidate_ids").to_pylist() == [[2, 6, 7, 3, 9], [2, 6, 7, 1, 4, 5]]


def test_a_mask_of_a_wrong_number_of_rows_is_an_error():
    """verifiers drops it without a word, and then trains over the full vocabulary."""
    assert json.loads((DATA / "rules.json").read_text())["one row short"] is None
    short = node(None, [5, 6, 7], 2, logprobs=[-0.5, 0.0], sampling_mask=mask([2, 6]))
    with pytest.raises(ConversionError) as caught:
        converted([[short]])
    assert caught.value.code == "RF-A006"
    assert caught.value.where.column == "nodes[0].sampling_mask.counts"


def test_an_empty_row_is_a_missing_set():
    lost = node(None, [5, 6, 7], 2, logprobs=[-0.5, 0.0], sampling_mask=mask([2, 6], []))
    with pytest.raises(ConversionError, match="RF-A004"):
        converted([[lost]])
    batch, report = converted([[lost]], on_missing_support="full_vocab")
    assert batch.column("candidate_counts").to_pylist() == [[2, 0]]
    assert report.noted["full_vocabulary_targets"] == 1


def test_a_sampling_node_without_a_mask_is_a_missing_set():
    nodes = [
        node(None, [5, 6], 1, logprobs=[-0.5], sampling_mask=mask([2, 6])),
        node(0, [8, 9], 1, logprobs=[-0.25], sampling_mask=None),
    ]
    with pytest.raises(ConversionError, match="RF-A004"):
        converted([nodes])


def test_values_of_sampled_tokens_come_back():
    one = node(
        None, [5, 6, 7], 2, logprobs=[-0.5, 0.0], sampling_mask=mask([2, 6], [7]),
        advantages=[0.5, -0.5], reference_logprobs=[-1.0, -2.0], trainer_logprobs=[-0.25, -4.0],
        entropies=[1.0, 2.0],
    )  # fmt: skip
    batch, report = converted([[one]])
    assert batch.column("advantages").to_pylist() == [[0.5, -0.5]]
    assert batch.column("ref_log_probs").to_pylist() == [[-1.0, -2.0]]
    assert batch.column("old_log_probs").to_pylist() == [[-0.25, -4.0]]
    assert +report.unread == {"entropies": 1}
    ((back,),) = verifiers.from_samples(batch)
    del one["entropies"]
    assert back == one


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ([node(1, [5])], "RF-A002"),
        ([node(None, [5]) | {"mask": []}], "RF-A006"),
        ([node(None, [5, 6], 1, logprobs=[-1.0, -1.0])], "RF-A006"),
        ([node(None, [5, 6], 1, sampling_mask={"ids": array(6)})], "RF-A002"),
        ([node(None, [5, 6], 1, sampling_mask={"ids": "Bg==", "counts": "AQ=="})], "RF-A002"),
        ([node(None, [5, 6], 1, sampling_mask={"ids": array(6, 7), "counts": array(1)})],
         "RF-A006"),
        ([node(None, [5, 6], 1, sampling_mask={"ids": array(), "counts": array(-1)})], "RF-A002"),
        ([node(None, [5, 6], 2)], "RF-A006"),
        (["x"], "RF-A002"),
        ("nodes", "RF-A002"),
    ],
)  # fmt: skip
def test_malformed_traces_are_errors(nodes, code):
    with pytest.raises(ConversionError) as caught:
        converted([nodes])
    assert caught.value.code == code


def test_other_files_are_errors(tmp_path):
    place = tmp_path / "x.msgpack"
    for data in (b"\xc1", b"\x01"):
        place.write_bytes(data)
        with pytest.raises(ConversionError, match="RF-A002"):
            list(verifiers.payloads(str(place)))
