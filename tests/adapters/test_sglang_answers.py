"""Answers that SGLang's own code made, against a plain reading of their JSON."""

import base64
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from ragged_format.adapters import registry, sglang
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.parse import parse_schema
from ragged_format.validate import validate

DATA = Path(__file__).parent.parent / "data" / "sglang"
VOCAB = 49152
FLOAT32_MIN = -3.4028234663852886e38


def load(name):
    path = DATA / name
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(raw)


def stream():
    raw = gzip.decompress((DATA / "stream_cumulative_req0.jsonl.gz").read_bytes())
    return [json.loads(line) for line in raw.splitlines()]


def incremental(events):
    """Make lists deltas; the lengths beside them stay cumulative, as SGLang 0.5.23 has it."""
    out, before = [], 0
    for event in events:
        end = len(event["output_ids"])
        meta = {
            key: value[before:end] if key.startswith("output_") and type(value) is list else value
            for key, value in event["meta_info"].items()
        }
        out.append(event | {"output_ids": event["output_ids"][before:end], "meta_info": meta})
        before = end
    return out


def as_sse(events):
    return "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"


def convert(*records, **options):
    report = ConversionReport()
    batch = sglang.to_samples(records, **{"vocab_size": VOCAB} | options, report=report)
    validate(batch)
    assert report.unbalanced() == []
    return batch, report


def f32(values):
    return np.array(values, np.float32).tolist()


def plain(response):
    """The columns of one answer by loops over its tokens."""
    meta = response["meta_info"]
    out = {
        "sample_id": f"{meta['id']}/0",
        "finish_reason": meta["finish_reason"]["type"],
        "input_ids": response["prompt_token_ids"] + response["output_ids"],
        "candidate_counts": [], "candidate_ids": [], "rollout_log_probs": [],
        "candidate_log_probs": [], "topk_counts": [], "topk_ids": [], "topk_log_probs": [],
    }  # fmt: skip
    own = meta["output_token_sampling_logprobs"]
    for position, row in enumerate(meta["output_token_sampling_mask"]):
        order = sorted(range(len(row)), key=lambda i: row[i])
        out["candidate_counts"].append(len(row))
        out["candidate_ids"] += [row[i] for i in order]
        value = own[position]
        if isinstance(value, list):
            out["candidate_log_probs"] += [value[i] for i in order]
            value = value[row.index(response["output_ids"][position])]
        out["rollout_log_probs"].append(value)
    if "output_top_logprobs_shape" in meta:
        for key, dtype in (("val", "<f4"), ("idx", "<i4")):
            raw = base64.b64decode(meta[f"output_top_logprobs_{key}_flat_b64"])
            table = np.frombuffer(raw, dtype).reshape(meta["output_top_logprobs_shape"])
            out["topk_ids" if key == "idx" else "topk_log_probs"] = table.ravel().tolist()
        out["topk_counts"] = [table.shape[1]] * table.shape[0]
    for row in meta.get("output_top_logprobs") or ():
        out["topk_counts"].append(len(row))
        out["topk_ids"] += [entry[1] for entry in row]
        out["topk_log_probs"] += [entry[0] for entry in row]
    for key in ("rollout_log_probs", "candidate_log_probs", "topk_log_probs"):
        out[key] = f32(out[key])
    return {key: value for key, value in out.items() if value != []}


@pytest.mark.parametrize(
    "name", ["generate_req0.json", "generate_req1.json", "generate_req4_flat_b64.json"]
)
def test_answers_of_generate(name):
    response = load(name)
    batch, report = convert(response)
    [row] = batch.to_pylist()
    expected = plain(response)
    assert {key: row[key] for key in expected} == expected
    assert row.keys() - expected.keys() == {
        "group_id", "policy_version", "temperature", "provenance", "completion_mask",
    }  # fmt: skip
    assert report.candidates.taken == report.candidates.stored == len(row["candidate_ids"])
    assert report.head_entries.taken == report.head_entries.stored


@pytest.mark.parametrize("number", [0, 1, 4])
def test_masks_equal_the_arrays_inside_the_engine(number):
    name = {0: "generate_req0", 1: "generate_req1", 4: "generate_req4_flat_b64"}[number]
    batch, _ = convert(load(f"{name}.json"))
    [row] = batch.to_pylist()
    with np.load(DATA / "sampling_mask_chunks.npz") as arrays:
        lengths, ids, log_probs, output = (
            arrays[f"req{number}.{field}"]
            for field in ("lengths", "token_ids", "logprobs", "output_ids")
        )
    assert row["candidate_counts"] == lengths.tolist()
    assert row["input_ids"][-len(output) :] == output.tolist()
    owner = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((ids, owner))
    assert row["candidate_ids"] == ids[order].tolist()
    if number == 1:
        assert row["candidate_log_probs"] == log_probs[order].tolist()
    else:
        assert row["rollout_log_probs"] == log_probs.tolist()


def test_a_chat_completion_gives_what_generate_gives():
    chat, report = convert(load("chat_req0.json.gz"))
    direct, _ = convert(load("generate_req0.json"))
    for name in direct.schema.names:
        if name != "provenance":  # the chat names its model
            assert chat.column(name).equals(direct.column(name)), name
    assert report.unread["choice.logprobs"] == 1  # text only, and again in meta_info


@pytest.mark.parametrize("make", [list, incremental], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("form", [list, as_sse, lambda e: as_sse(e).encode()])
def test_streams_give_what_the_whole_answer_gives(make, form):
    batch, _ = convert({"response": form(make(stream()))})
    assert batch.equals(convert(load("generate_req0.json"))[0])


def test_an_incremental_stream_whose_flat_lists_come_in_parts():
    whole = load("generate_req4_flat_b64.json")
    meta = whole["meta_info"]

    def part(begin, end):
        lists = {
            key: value[begin:end]
            for key, value in meta.items()
            if key.startswith("output_token") and type(value) is list
        }
        k = meta["output_top_logprobs_shape"][1]
        for key in ("output_top_logprobs_val_flat_b64", "output_top_logprobs_idx_flat_b64"):
            raw = base64.b64decode(meta[key])[begin * k * 4 : end * k * 4]
            lists[key] = base64.b64encode(raw).decode()
        lists["output_top_logprobs_shape"] = [end - begin, k]
        done = meta["finish_reason"] if end == 24 else None
        mine = meta | lists | {"finish_reason": done, "completion_tokens": end}
        mine["output_token_sampling_mask_length"] = end
        return whole | {"output_ids": whole["output_ids"][begin:end], "meta_info": mine}

    batch, _ = convert({"response": [part(0, 7), part(7, 8), part(8, 24)]})
    assert batch.equals(convert(whole)[0])


def test_a_stream_that_ends_early_is_refused():
    events = stream()[:-1]
    with pytest.raises(ConversionError, match="not complete") as found:
        convert({"response": events})
    assert found.value.code == "RF-A008"
    with pytest.raises(ConversionError, match="not complete"):
        convert({"response": as_sse(stream()).removesuffix("data: [DONE]\n\n")})


def test_events_that_were_lost_are_noticed():
    events = incremental(stream())
    del events[2]
    with pytest.raises(ConversionError) as found:
        convert({"response": events})
    assert found.value.code == "RF-A006"


def test_raw_log_probs_instead():
    response = load("generate_req0.json")
    batch, report = convert(response, logprobs_mode="raw")
    given = [row[0] for row in response["meta_info"]["output_token_logprobs"]]
    assert batch.column("rollout_log_probs").to_pylist() == [f32(given)]
    assert report.unread["meta_info.output_token_sampling_logprobs"] == 1


def test_columns_are_declared_in_the_mode_of_their_values():
    schema = parse_schema(convert(load("generate_req0.json"))[0].schema)
    modes = {c.name: (c.log_prob.mode, c.log_prob.normalizer) for c in schema if c.log_prob}
    assert modes == {
        "rollout_log_probs": ("processed", "support"),
        "topk_log_probs": ("raw", "vocabulary"),
    }


def test_a_request_without_mask_has_raw_log_probs_only():
    response = load("generate_req0.json")
    meta = {k: v for k, v in response["meta_info"].items() if "sampling" not in k}
    bare = response | {"meta_info": meta}
    with pytest.raises(ConversionError) as found:
        convert(bare)
    assert found.value.code == "RF-A007"
    batch, _ = convert(bare, logprobs_mode="raw")
    assert "candidate_ids" not in batch.schema.names
    asked = {"response": bare, "request": {"return_sampling_mask": True}}
    with pytest.raises(ConversionError) as found:
        convert(asked, logprobs_mode="raw")
    assert found.value.code == "RF-A004"


def test_a_set_over_the_limit_of_the_server():
    """sgl-project/sglang#36631: the whole request fails, and the error says why."""
    refused, *_ = load("overflow_finish_reasons.json")
    meta = {"id": "a", "finish_reason": refused["finish_reason"], "completion_tokens": 0}
    record = {"response": {"output_ids": [], "meta_info": meta}}
    with pytest.raises(ConversionError, match="larger than the engine's limit") as found:
        convert(record)
    assert found.value.code == "RF-A003"
    batch, report = convert(record, load("generate_req0.json"), on_error="skip")
    assert batch.num_rows == 1
    assert report.responses.dropped == {"RF-A003": 1}
    http = {"response": {"error": {"message": refused["finish_reason"]["message"], "code": 400}}}
    with pytest.raises(ConversionError, match="larger than the engine's limit"):
        convert(http)


def test_the_registry_recognizes_them():
    for name in ("generate_req0.json", "chat_req0.json.gz"):
        assert registry.recognize({"response": load(name)}) == ["sglang"]
        assert registry.recognize(load(name)) == ["sglang"]
    assert registry.recognize({"response": as_sse(stream())}) == ["sglang"]


def test_one_request_with_several_sequences_is_a_group():
    one = load("generate_req0.json")
    two = one | {"meta_info": one["meta_info"] | {"id": "other"}}
    batch, _ = convert({"request": {"rid": "both"}, "response": [one, two], "reward": [0.5, 1.0]})
    assert batch.column("sample_id").to_pylist() == ["req0/0", "other/0"]
    assert batch.column("group_id").to_pylist() == ["both", "both"]
    assert batch.column("reward").to_pylist() == [0.5, 1.0]


def test_routed_experts_are_raw_base64_whose_shape_the_caller_knows():
    """sgl-project/sglang#20964: the last token's experts are missing, no more and no less."""
    one = load("generate_req0.json")
    tokens = len(one["prompt_token_ids"]) + len(one["output_ids"])
    experts = np.arange((tokens - 1) * 6, dtype="<i4").reshape(tokens - 1, 3, 2) % 7

    def having(array):
        encoded = base64.b64encode(array.tobytes()).decode()
        return one | {"meta_info": one["meta_info"] | {"routed_experts": encoded}}

    batch, _ = convert(having(experts), experts_shape=(3, 2))
    stored = np.array(batch.column("routed_experts").to_pylist()[0]).reshape(tokens, 3, 2)
    assert np.array_equal(stored[:-1], experts)
    assert (stored[-1] == -1).all()
    with pytest.raises(ConversionError) as found:
        convert(having(experts[:-1]), experts_shape=(3, 2))
    assert found.value.code == "RF-A006"
    _, report = convert(having(experts))
    assert report.unread["meta_info.routed_experts"] == 1
