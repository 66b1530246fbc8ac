"""The recorded vLLM responses of ``tests/data/vllm``, and small ones made for a test."""

import gzip
import json
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent.parent / "data" / "vllm" / "rollouts.jsonl.gz"
VOCAB_SIZE = 49152


@cache
def _lines():
    return gzip.decompress(DATA.read_bytes()).splitlines()


def recorded(*categories, names=None):
    """Return new records of these categories; ``response`` is a dict or the text of a stream."""
    out = []
    for line in _lines():
        record = json.loads(line)
        if categories and record["category"] not in categories:
            continue
        if names is not None and record["name"] not in names:
            continue
        if "response_text" in record:
            record["response"] = record.pop("response_text")
        out.append(record)
    return out


def as_bytes(record, separators=(",", ":")):
    """Return the record with its response as JSON text or stream bytes."""
    response = record["response"]
    if not isinstance(response, str):
        response = json.dumps(response, separators=separators)
    return record | {"response": response.encode()}


def entry(token_id, logprob, rank, *others):
    """Return one element of the log-prob content; `others` follow the token in its list."""
    own = {"token_id": token_id, "logprob": logprob, "rank": rank}
    rest = [{"token_id": i, "logprob": p, "rank": r} for i, p, r in others]
    return own | {"top_logprobs": [dict(own), *rest]}


def choice(token_ids, mask, content=None, index=0, **fields):
    """Return a choice as the generate endpoint has it."""
    return {
        "index": index,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": mask,
        "weight_versions": [{"version": "7", "start": 0, "end": len(token_ids or ())}],
        "logprobs": None if content is None else {"content": content},
    } | fields


def record(*choices, prompt=(5, 6), request_id="r1", sampling=None, **fields):
    """Return a record of these choices."""
    return {
        "request": {"token_ids": list(prompt), "sampling_params": sampling or {"temperature": 1.0}},
        "response": {
            "request_id": request_id,
            "model": "m",
            "prompt_token_ids": list(prompt),
            "choices": list(choices),
        },
    } | fields


def golden():
    """Return three tokens at K = 2: a sampled token of rank 5, then a floor."""
    content = [
        entry(3, 0.0, 1, (8, -9999.0, 2)),
        entry(4, -2.5, 5, (9, -0.25, 1)),
        entry(7, -0.6931471824645996, 1, (0, -9999.0, 2)),
    ]
    return record(
        choice([3, 4, 7], [[3], [1, 4, 9], [2, 7]], content),
        sampling={"temperature": 0.5, "top_k": 2, "logprobs": 2},
    )


def stream(*events, done=True):
    """Return the text of an event stream of these chunks."""
    data = [json.dumps(event, separators=(",", ":")) for event in events]
    return "".join(f"data: {text}\n\n" for text in [*data, *(["[DONE]"] if done else [])])


def deltas(response, *, usage=None):
    """Return the events in which the engine streams a response: a token each, choices in turn."""
    queues = []
    for whole in response["choices"]:
        content = (whole["logprobs"] or {}).get("content")
        parts = [
            whole
            | {
                "token_ids": [whole["token_ids"][t]],
                "sampling_mask": whole["sampling_mask"] and [whole["sampling_mask"][t]],
                "logprobs": content and {"content": [content[t]]},
                "finish_reason": None,
                "weight_versions": None,
            }
            for t in range(len(whole["token_ids"]))
        ]
        last = {"finish_reason": whole["finish_reason"], "stop_reason": whole["stop_reason"]}
        last["weight_versions"] = whole["weight_versions"]
        if parts:
            parts[-1] |= last
        else:
            parts = [whole | last]
        queues.append(parts)
    order = [
        queue[step]
        for step in range(max(map(len, queues)))
        for queue in queues
        if step < len(queue)
    ]
    head = {key: response[key] for key in ("request_id", "model")}
    events = [head | {"usage": None, "choices": [part]} for part in order]
    events[0]["prompt_token_ids"] = response["prompt_token_ids"]
    if usage is not None:
        events.append(head | {"usage": usage, "choices": []})
    return events
