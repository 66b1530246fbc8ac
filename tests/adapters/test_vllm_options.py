"""Columns, schemas, identity, versions, record values: what a caller can ask for and bring."""

import json

import numpy as np
import pyarrow as pa
import pytest
from support.vllm_rollouts import choice, entry, golden, record

import ragged_format as rf
from ragged_format.adapters import read_record, vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, SchemaMismatchError
from ragged_format.validate import validate


def error_of(records, **options):
    with pytest.raises(ConversionError) as caught:
        vllm.to_samples(records, **{"vocab_size": 10, **options})
    return caught.value


def convert(*records, **options):
    batch = vllm.to_samples(records, **{"vocab_size": 10, **options})
    validate(batch)
    return batch


# Columns


def test_columns_are_exactly_those_asked_for():
    report = ConversionReport()
    names = ["candidate_counts", "candidate_ids"]
    batch = convert(golden(), columns=names, report=report)
    assert batch.schema.names == ["sample_id", "input_ids", "completion_mask", *names]
    assert batch.schema.equals(rf.sample_schema(vocab_size=10, columns=names), check_metadata=True)
    assert report.log_probs.dropped == {"column_not_wanted": 3}
    assert report.head_entries.dropped == {"column_not_wanted": 6}
    assert report.unbalanced() == []


def test_sets_that_are_not_wanted_may_be_lost():
    report = ConversionReport()
    batch = convert(record(choice([3], None)), columns=[], report=report)
    assert batch.num_rows == 1
    convert(golden(), columns=[], report=report)
    assert report.candidates.dropped == {"column_not_wanted": 6}
    assert report.unbalanced() == []


def test_columns_asked_for_are_there_although_no_record_has_them():
    batch = convert(
        record(choice([3], [[3]])),
        columns=["reward", "rollout_log_probs", "target_flags", "topk_counts", "topk_ids"],
    )
    row = batch.to_pylist()[0]
    assert (row["reward"], row["rollout_log_probs"], row["topk_counts"]) == (None, [0.0], [0])
    assert row["target_flags"] == [4 | 8]


def test_an_empty_head_is_no_fault_where_flags_are_not_wanted():
    report = ConversionReport()
    batch = convert(record(choice([3], [[3]])), columns=["topk_counts", "topk_ids"], report=report)
    assert batch.column("topk_counts").to_pylist() == [[0]]
    assert report.noted["head_missing"] == 1


@pytest.mark.parametrize("options", [
    {"columns": ["candidate_counts", "candidate_ids"], "on_missing_support": "flag"},
    {"columns": ["rollout_log_probs"]},
])  # fmt: skip
def test_a_flag_without_its_column_is_an_error(options):
    error = error_of([record(choice([3], None))], **options)
    assert error.code == "RF-A011"
    assert "target_flags" in error.remedy


def test_unknown_columns_are_refused():
    error = error_of([golden()], columns=["old_log_probs"])
    assert (error.code, error.where.column) == ("RF-A011", "old_log_probs")
    with pytest.raises(SchemaMismatchError):
        convert(golden(), columns=["no_such_column"])


def test_a_schema_is_the_exact_schema_of_the_result():
    schema = rf.sample_schema(
        vocab_size=10, columns=["target_flags", "topk_counts", "topk_ids", "rollout_log_probs"]
    )
    batch = vllm.to_samples([golden()], schema=schema)
    assert batch.schema.equals(schema, check_metadata=True)
    assert vllm.to_samples([], schema=schema).schema.equals(schema, check_metadata=True)


def test_float16_heads_are_stored_where_declared():
    half = rf.standard_column("topk_log_probs")
    half = rf.Column(half.name, half.axis, pa.float16(), log_prob=half.log_prob, fill=half.fill)
    batch = convert(golden(), columns=["topk_counts", "topk_ids", half])
    assert batch.column("topk_log_probs").type.value_type == pa.float16()
    assert batch.column("topk_log_probs")[0].as_py()[1] == -0.25


@pytest.mark.parametrize("options", [
    {"vocab_size": None},
    {"schema": rf.sample_schema(vocab_size=11, columns=[])},
    {"schema": rf.sample_schema(vocab_size=10, columns=[]), "columns": []},
    {"schema": rf.packed_schema(vocab_size=10, columns=[]), "vocab_size": None},
    {"logprobs_mode": "processed_logits"},
    {"on_missing_support": "ignore"},
    {"on_missing_log_prob": "full_vocab"},
    {"on_error": "ignore"},
    {"heads": -1},
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options):
    assert error_of([golden()], **options).code == "RF-A011"


@pytest.mark.parametrize("heads", [0, 1, 2])
def test_heads_are_cut_where_asked(heads):
    content = [entry(1, -1.0, 1, (2, -1.5, 2), (3, -2.0, 3))]
    out = record(choice([1], [[1, 2, 3]], content))
    report = ConversionReport()
    batch = convert(out, heads=heads, report=report)
    assert report.unbalanced() == []
    if heads == 0:
        assert "topk_counts" not in batch.schema.names
        assert report.head_entries.dropped == {"column_not_wanted": 3}
    else:
        assert batch.column("topk_ids").to_pylist() == [[1, 2, 3][:heads]]
        assert report.head_entries.dropped == {"beyond_limit": 3 - heads}


def test_heads_without_ranks_go_by_their_log_probs():
    content = [
        entry(2, -1.5, None, (1, -1.0, None), (3, -2.0, None)),
        entry(9, -5.0, None, (1, -1.0, None), (3, -2.0, None)),
    ]
    out = record(choice([2, 9], [[1, 2, 3], [1, 3, 9]], content))
    batch = convert(out)
    assert batch.column("topk_counts").to_pylist() == [[3, 2]]
    assert batch.column("topk_ids").to_pylist() == [[1, 2, 3, 1, 3]]


def test_heads_listed_in_another_order_are_put_in_rank_order():
    content = [entry(2, -1.5, 2, (3, -2.0, 3), (1, -1.0, 1))]
    batch = convert(record(choice([2], [[1, 2, 3]], content)))
    assert batch.column("topk_ids").to_pylist() == [[1, 2, 3]]


def test_lists_without_the_sampled_token_are_heads_as_they_are():
    best = [
        {"token_id": 1, "logprob": -1.0, "rank": 1},
        {"token_id": 3, "logprob": -2.0, "rank": 2},
    ]
    content = [{"token_id": 9, "logprob": -5.0, "rank": 7, "top_logprobs": best}]
    batch = convert(record(choice([9], [[1, 3, 9]], content)))
    assert batch.column("topk_ids").to_pylist() == [[1, 3]]


# Identity


def test_the_request_id_may_come_from_record_or_request():
    bare = golden()
    del bare["response"]["request_id"]
    assert error_of([bare]).code == "RF-A010"
    assert convert(bare | {"request_id": "a"}).column("sample_id").to_pylist() == ["a/0"]
    bare["request"]["request_id"] = "b"
    assert convert(bare).column("sample_id").to_pylist() == ["b/0"]


def test_a_response_converted_twice_is_refused():
    error = error_of([golden(), golden()])
    assert error.code == "RF-A010"
    assert "'r1/0', also in row 0" in error.got
    same = record(choice([3], [[3]], index=1), choice([4], [[4]], index=1))
    assert error_of([same]).code == "RF-A010"


def test_the_prompt_may_come_from_the_request():
    bare = golden()
    bare["response"]["prompt_token_ids"] = None
    assert convert(bare).column("input_ids").to_pylist() == [[5, 6, 3, 4, 7]]
    del bare["request"]["token_ids"]
    assert error_of([bare]).code == "RF-A010"
    assert error_of([record(choice([3], [[3]]), prompt=[])]).code == "RF-A010"


def test_a_record_without_a_request_converts():
    bare = {"response": golden()["response"]}
    row = convert(bare).to_pylist()[0]
    assert row["temperature"] is None
    assert row["provenance"] == '{"engine":"vllm","model":"m","sampling":{}}'


# Groups and record values


def test_groups_come_from_the_record_a_key_a_function_or_the_request():
    pair = record(choice([3], [[3]]), choice([4], [[4]], index=1), prompt_hash="p")
    assert convert(pair).column("group_id").to_pylist() == ["r1", "r1"]
    assert convert(golden()).column("group_id").to_pylist() == [None]
    assert convert(golden() | {"group_id": "g"}).column("group_id").to_pylist() == ["g"]
    assert convert(golden() | {"group_id": None}).column("group_id").to_pylist() == [None]
    assert convert(pair, group_id="prompt_hash").column("group_id").to_pylist() == ["p", "p"]
    by_prompt = convert(pair, group_id=lambda r: f"n{len(r['request']['token_ids'])}")
    assert by_prompt.column("group_id").to_pylist() == ["n2", "n2"]
    report = ConversionReport()
    convert(pair, group_id="no_such_key", report=report)
    assert report.noted["group_id_unknown"] == 2


def test_values_of_the_record_are_stored_one_for_all_or_one_per_choice():
    pair = record(
        choice([3], [[3]]), choice([4], [[4]], index=1),
        reward=[1.0, np.float32(0.5)], advantage=np.array([0.25, -0.25]), rollout_id="c",
        branch_index=[0, 1], env_name="math", metrics=[{"b": 1, "a": [2]}, '{"c": 3}'],
    )  # fmt: skip
    rows = convert(pair).to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 0.5]
    assert [row["advantage"] for row in rows] == [0.25, -0.25]
    assert [row["branch_index"] for row in rows] == [0, 1]
    assert [row["metrics"] for row in rows] == ['{"a":[2],"b":1}', '{"c": 3}']
    assert {row["rollout_id"] for row in rows} == {"c"}
    assert {row["env_name"] for row in rows} == {"math"}


@pytest.mark.parametrize(("fields", "code"), [
    ({"reward": [1.0]}, "RF-A006"),
    ({"reward": "good"}, "RF-A002"),
    ({"reward": float("nan")}, "RF-A002"),
    ({"branch_index": -1}, "RF-A002"),
    ({"branch_index": 1 << 40}, "RF-A002"),
    ({"env_name": 3}, "RF-A002"),
    ({"metrics": "[1]"}, "RF-A002"),
    ({"metrics": "{"}, "RF-A002"),
    ({"metrics": '{"a": NaN}'}, "RF-A002"),
    ({"metrics": {"a": float("nan")}}, "RF-A002"),
    ({"metrics": {"a": object()}}, "RF-A002"),
    ({"metrics": 7}, "RF-A002"),
    ({"request": {"sampling_params": {"temperature": -1.0}}}, "RF-A002"),
    ({"request": {"sampling_params": {"temperature": "hot"}}}, "RF-A002"),
    ({"request": {"sampling_params": {"min_p": float("inf")}}}, "RF-A002"),
])  # fmt: skip
def test_values_that_the_format_does_not_allow_are_refused(fields, code):
    pair = record(choice([3], [[3]]), choice([4], [[4]], index=1))
    error = error_of([golden() | {"response": golden()["response"] | {"request_id": "r0"}},
                      pair | fields])  # fmt: skip
    assert (error.code, error.where.row) == (code, 1)


def test_values_without_a_column_are_unread():
    report = ConversionReport()
    convert(golden() | {"reward": 1.0}, columns=[], report=report)
    assert report.unread["reward"] == 1
    assert report.unread["temperature"] == 1


def test_fields_of_the_response_without_a_place_are_unread():
    out = golden()
    out["response"] |= {"metrics": {"x": 1}, "kv_transfer_params": None}
    out["response"]["choices"][0] |= {"text": "abc", "routed_experts": "x"}
    report = ConversionReport()
    convert(out, columns=[], report=report)
    for key in ("response.metrics", "choice.text", "choice.routed_experts"):
        assert report.unread[key] == 1
    assert "response.kv_transfer_params" not in report.unread


def test_provenance_says_where_a_sample_comes_from():
    out = golden()
    out["response"] |= {"created": 17, "output_mode": "tokens"}
    out["response"]["choices"][0]["stop_reason"] = "Ende"
    out["request"]["sampling_params"] = {"top_p": np.float64(0.5), "stop": ["é"]}
    facts = json.loads(convert(out, engine_version="0.32.0").to_pylist()[0]["provenance"])
    assert facts == {
        "engine": "vllm", "engine_version": "0.32.0", "model": "m", "created": 17,
        "output_mode": "tokens", "stop_reason": "Ende",
        "sampling": {"top_p": 0.5, "stop": ["é"]},
    }  # fmt: skip
    facts = json.loads(convert(out | {"engine_version": "1"}).to_pylist()[0]["provenance"])
    assert facts["engine_version"] == "1"


# Versions


def versioned(*spans, tokens=(3, 4, 7)):
    spans = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return record(choice(list(tokens), [[t] for t in tokens], weight_versions=spans))


def test_the_oldest_version_counts_and_each_target_has_its_own():
    row = convert(versioned(("12", 0, 2), ("11", 2, 3))).to_pylist()[0]
    assert (row["policy_version"], row["policy_versions"]) == (11, [12, 12, 11])
    one = convert(versioned(("12", 0, 3)))
    assert "policy_versions" not in one.schema.names
    assert one.column("policy_version").to_pylist() == [12]


def test_version_strings_are_mapped_or_unknown():
    report = ConversionReport()
    out = versioned(("base", 0, 2), ("step-1", 2, 3))
    mapping = {"base": 0, "step-1": 1}
    row = convert(out, policy_version=mapping, report=report).to_pylist()[0]
    assert (row["policy_version"], row["policy_versions"]) == (0, [0, 0, 1])
    assert report.converted["weight_version_mapped"] == 2
    report = ConversionReport()
    assert convert(out, report=report).column("policy_version").to_pylist() == [None]
    assert report.noted["policy_version_unknown"] == 1
    assert convert(out, policy_version=5).column("policy_version").to_pylist() == [5]


def test_a_version_unknown_in_part_is_unknown():
    report = ConversionReport()
    gap = versioned(("12", 0, 1), ("13", 2, 3))
    whole = versioned(("12", 0, 1), ("13", 1, 3))
    whole["response"]["request_id"] = "r2"
    batch = convert(gap, whole, report=report)
    assert batch.column("policy_version").to_pylist() == [None, 12]
    assert "policy_versions" not in batch.schema.names
    assert report.noted["policy_versions_left_out"] == 1
    short = versioned(("12", 0, 1))
    assert convert(short).column("policy_version").to_pylist() == [None]
    error = error_of([gap], columns=["policy_versions"])
    assert (error.code, error.where.position) == ("RF-A011", 1)


@pytest.mark.parametrize("spans", [
    [("1", 0, 4)], [("1", 2, 1)], [("1", 0, 2), ("2", 1, 3)], [("1", -1, 3)],
])  # fmt: skip
def test_spans_that_do_not_fit_the_tokens_are_refused(spans):
    assert error_of([versioned(*spans)]).code == "RF-A002"


def test_versions_of_another_shape_are_refused():
    for broken in (
        [{"version": "1"}], ["1"], [{"version": "1", "start": "0", "end": 1}], 5,
        [{"version": "1", "start": 0, "end": 1.0}], [{"version": "1", "start": -1, "end": 1}],
    ):  # fmt: skip
        assert error_of([record(choice([3], [[3]], weight_versions=broken))]).code == "RF-A002"


# Malformed input


@pytest.mark.parametrize("broken", [
    [1],
    {"response": None},
    {"response": []},
    {"response": {"request_id": "r"}},
    {"response": {"choices": "x"}},
    {"response": {"choices": [3], "request_id": "r", "prompt_token_ids": [1]}},
    {"response": "{"},
    {"response": b"\xff\xfe\xfd"},
    {"response": "[" * 100_000},
    record(choice(None, None)),
    record(choice("ab", None)),
    record(choice([True], [[1]])),
    record(choice([1.5], [[1]])),
    record(choice(["1"], [[1]])),
    record(choice([1 << 70], [[1]])),
    record(choice([3], "x")),
    record(choice([3], [3])),
    record(choice([3], {3: 4})),
    record(choice([3], {"token_ids": [3], "offsets": [0, 2]})),
    record(choice([3], {"token_ids": [3], "offsets": [1, 1]})),
    record(choice([3, 4], {"token_ids": [3, 4], "offsets": [0, 3, 2]})),
    record(choice([3], {"token_ids": [3], "offsets": []})),
    record(choice([3], [[3]], logprobs="x")),
    record(choice([3], [[3]], ["x"])),
    record(choice([3], [[3]], [{"token_id": 3, "logprob": 0.0, "top_logprobs": 5}])),
    record(choice([3], [[3]], [{"token_id": 3, "logprob": 0.0, "top_logprobs": [5]}])),
    record(choice([3], [[3]], [entry(3, "low", 1)])),
    record(choice([3], [[3]], [entry(3, True, 1)])),
    record(choice([3], [[3]], [entry(3, 10**400, 1)])),
    record(choice([3], [[3]], [entry("3", 0.0, 1)])),
    record(choice([3], [[3]], index="0")),
    record(choice([3], [[3]], sampling_mask_logprobs=[["x"]])),
])  # fmt: skip
def test_what_the_engine_never_sends_is_malformed(broken):
    error = error_of([broken])
    assert error.code == "RF-A002"
    assert error.where.row == 0


def test_numbers_written_as_floats_are_ids():
    out = record(choice([3.0], [[1e0, 3.0]], [entry(3.0, 0, 1.0, (1, -1e3, 2))]))
    batch = convert(out)
    assert batch.column("candidate_ids").to_pylist() == [[1, 3]]
    assert batch.column("topk_ids").to_pylist() == [[3, 1]]


def test_arrays_are_taken_as_they_are():
    out = golden()
    chosen = out["response"]["choices"][0]
    for kind in (np.int64, np.int32):
        chosen["token_ids"] = np.array([3, 4, 7], kind)
        chosen["sampling_mask"] = [np.array(row, kind) for row in ([3], [1, 4, 9], [2, 7])]
        assert convert(out).column("candidate_ids").to_pylist() == [[3, 1, 4, 9, 2, 7]]
    chosen["token_ids"] = [np.int64(3), np.int64(4), np.int64(7)]
    assert convert(out).num_rows == 1
    chosen["token_ids"] = np.array([3.0, 4.0, 7.0])
    assert error_of([out]).code == "RF-A002"


def test_lines_of_records_may_be_read_with_their_arrays():
    line = json.dumps(golden() | {"reward": 1.0}).encode()
    assert convert(read_record(line)).equals(convert(json.loads(line)))


def test_usage_counts_the_tokens():
    out = golden()
    out["response"]["usage"] = {"prompt_tokens": 2, "completion_tokens": 3}
    convert(out)
    for key in ("prompt_tokens", "completion_tokens"):
        out["response"]["usage"][key] += 1
        assert error_of([out]).code == "RF-A006"
        out["response"]["usage"][key] = None
        convert(out)


def test_errors_name_the_source_of_the_record():
    broken = record(choice([3], None))
    assert error_of([broken | {"name": "n"}]).where.file == "n"
    assert error_of([broken | {"name": "n", "source": "s.jsonl"}]).where.file == "s.jsonl"


def test_skipping_counts_records_by_the_code_of_their_error():
    report = ConversionReport()
    failed = {"request": {}, "response": {"error": {"message": "no", "code": 400}}}
    gone = {"request": {}, "response": {"detail": "Not Found"}, "http_status": 404}
    batch = convert(failed, golden(), {"response": "{"}, gone, on_error="skip", report=report)
    assert batch.num_rows == 1
    assert report.responses.to_dict() == {
        "taken": 4, "stored": 1, "dropped": {"RF-A002": 1, "RF-A003": 2},
    }  # fmt: skip
    assert report.unbalanced() == []
    assert error_of([failed]).code == "RF-A003"
    assert "404" in error_of([gone]).got
