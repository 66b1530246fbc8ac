"""What a vLLM response means, token by token in plain Python."""

import json
import struct


def float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def is_log_prob(value):
    return isinstance(value, int | float) and value == value and value > -9999.0


def head_of(content):
    """Return the longest run of ranks 1, 2, 3, … that a top-K list gives, as (id, log-prob)."""
    by_rank = {}
    for item in content["top_logprobs"]:
        if is_log_prob(item["logprob"]):
            by_rank[item["rank"]] = item
    run = []
    while (item := by_rank.get(len(run) + 1)) is not None:
        run.append((item["token_id"], float32(item["logprob"])))
    return run


def samples_of(record):
    """Return the samples of a record whose response is a dict, as plain Python values."""
    response, request = record["response"], record["request"]
    prompt = response["prompt_token_ids"] or request["token_ids"]
    sampling = request["sampling_params"]
    out = []
    for choice in response["choices"]:
        tokens = choice["token_ids"]
        content = (choice["logprobs"] or {}).get("content")
        by_id = content is not None and all("token_id" in item for item in content)
        log_probs, flags, head_counts, heads = [], [], [], []
        for position in range(len(tokens)):
            value = None if content is None else content[position]["logprob"]
            head = head_of(content[position]) if by_id else []
            log_probs.append(float32(value) if is_log_prob(value) else 0.0)
            flags.append((0 if is_log_prob(value) else 4) | (0 if head else 8))
            head_counts.append(len(head))
            heads.extend(head)
        provenance = {"engine": "vllm", "sampling": sampling}
        for key in ("model", "created", "output_mode"):
            if response.get(key) is not None:
                provenance[key] = response[key]
        if choice["stop_reason"] is not None:
            provenance["stop_reason"] = choice["stop_reason"]
        versions = [span["version"] for span in choice["weight_versions"]]
        out.append({
            "sample_id": f"{response['request_id']}/{choice['index']}",
            "group_id": response["request_id"] if len(response["choices"]) > 1 else None,
            "policy_version": min(map(int, versions)) if versions and all(
                version.isdigit() for version in versions
            ) else None,
            "temperature": sampling.get("temperature"),
            "finish_reason": choice["finish_reason"],
            "provenance": json.dumps(
                provenance, sort_keys=True, separators=(",", ":"), ensure_ascii=False
            ),
            "input_ids": prompt + tokens,
            "completion_mask": [0] * len(prompt) + [1] * len(tokens),
            "rollout_log_probs": log_probs,
            "target_flags": flags,
            "candidate_counts": [len(row) for row in choice["sampling_mask"] or []],
            "candidate_ids": [i for row in choice["sampling_mask"] or [] for i in row],
            "topk_counts": head_counts,
            "topk_ids": [token for token, _ in heads],
            "topk_log_probs": [value for _, value in heads],
        })  # fmt: skip
    return out
