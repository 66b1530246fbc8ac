"""Engine JSON to validated Arrow: ours against `json.loads` and a loop over tokens.

Our compiled code is loaded, and where it is not on disk yet made, before anything is timed.
"""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ragged_format as rf
from benchmarks.harness import Figure, Settings, interleave, median_ratio, rate_text, raw
from benchmarks.reference.convert import convert
from ragged_format.adapters import vllm
from ragged_format.lists import flat

__all__ = ["run"]

VOCAB_SIZE = 49_152
# Real responses of vLLM 0.32.0 that the tests use as well.
DATA = Path(__file__).parent.parent / "tests" / "data" / "vllm"
HEAD_SIZE = 20
# Bytes of JSON in one timed call.
BYTES = 3_000_000
# The recorded answers are short, 65 tokens a choice. Joined ones have choices of at least so many
# tokens, and so many choices.
JOINED_TOKENS = 1_000
JOINED_CHOICES = 4

Record = dict[str, Any]


def run(settings: Settings) -> list[Figure]:
    """Convert all responses of one kind per call; rates are of JSON bytes on one core."""
    recorded = read_records(DATA)
    one = [record for record in recorded if head_size(record) == 1]
    wide = [record for record in recorded if head_size(record) == HEAD_SIZE]
    cases = (
        Case("masks only", [without_log_probs(joined(one))], 0, 8.0),
        Case("one log-prob per token", [joined(one)], 0, 5.0),
        Case(f"K = {HEAD_SIZE}", [joined(wide)], HEAD_SIZE, 3.0),
        Case("as recorded, masks only", [without_log_probs(record) for record in one], 0, None),
        Case("as recorded, one log-prob per token", one, 0, None),
        Case(f"as recorded, K = {HEAD_SIZE}", wide, HEAD_SIZE, None),
    )
    return [_figure(case, settings) for case in cases]


class Case(NamedTuple):
    """Responses of one kind, and the entries of the heads that both sides make of them."""

    name: str
    records: list[Record]
    heads: int
    goal: float | None


def _figure(case: Case, settings: Settings) -> Figure:
    inputs = repeated(case.records, 100_000 if settings.quick else BYTES)
    payloads = [record["response"] for record in inputs]
    size = sum(map(len, payloads))

    def ours() -> None:
        rf.validate(vllm.to_samples(inputs, vocab_size=VOCAB_SIZE, heads=case.heads))

    def peer() -> None:
        for payload in payloads:
            convert(payload, case.heads)

    check_same(inputs, payloads)
    samples = interleave({"ours": ours, "peer": peer, "json": lambda: _load(payloads)}, settings)
    return Figure(
        f"{case.name}, {size / len(payloads) / 1e3:.0f} kB a response",
        rate_text(size, samples["ours"]),
        f"json.loads + loop {rate_text(size, samples['peer'])} (json.loads alone "
        f"{rate_text(size, samples['json'])})",
        median_ratio(samples["peer"], samples["ours"]),
        case.goal,
        median_ratio(samples["peer"], samples["ours"], "wall"),
        details=raw(ours=samples["ours"], peer=samples["peer"]),
    )


def repeated(records: list[Record], size: int) -> list[Record]:
    """Return the records with their responses as JSON bytes, again and again under new ids.

    At least `size` bytes in all; the engine's own compact form.
    """
    out: list[Record] = []
    total = 0
    while total < size:
        for record in records:
            response = record["response"]
            response = response | {"request_id": f"{response['request_id']}-{len(out)}"}
            payload = json.dumps(response, separators=(",", ":")).encode()
            out.append({"request": record["request"], "response": payload})
            total += len(payload)
    return out


def _load(payloads: list[bytes]) -> None:
    for payload in payloads:
        json.loads(payload)


def read_records(folder: Path) -> list[Record]:
    """Return the recorded requests and whole JSON responses of the generate endpoint."""
    out = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            record = json.loads(line)
            response = record.get("response")
            if isinstance(response, dict) and response.get("choices") and head_size(record):
                out.append({"request": record["request"], "response": response})
    return out


def head_size(record: Record) -> int:
    """Return the log-probs per token that were asked for and came; 0 for none."""
    size = (record["request"].get("sampling_params") or {}).get("logprobs") or 0
    response = record["response"]
    whole = all(c.get("sampling_mask") and c.get("logprobs") for c in response["choices"])
    by_id = whole and response["output_mode"] == "tokens"  # in text mode heads have no ids
    return int(size) if by_id and response.get("prompt_token_ids") else 0


def joined(records: list[Record]) -> Record:
    """Return one response whose choices are recorded choices end to end."""
    pool = itertools.cycle([choice for r in records for choice in r["response"]["choices"]])
    first = records[0]
    choices = []
    for index in range(JOINED_CHOICES):
        tokens: list[int] = []
        masks: list[list[int]] = []
        content: list[Any] = []
        while len(tokens) < JOINED_TOKENS:
            part = next(pool)
            tokens += part["token_ids"]
            masks += part["sampling_mask"]
            content += part["logprobs"]["content"]
        version = part["weight_versions"][-1] | {"start": 0, "end": len(tokens)}
        choices.append(
            part
            | {
                "index": index,
                "token_ids": tokens,
                "sampling_mask": masks,
                "logprobs": {"content": content},
                "weight_versions": [version],
            }
        )
    generated = sum(len(choice["token_ids"]) for choice in choices)
    usage = first["response"]["usage"]
    usage = usage | {
        "completion_tokens": generated,
        "total_tokens": usage["prompt_tokens"] + generated,
    }
    response = first["response"] | {"choices": choices, "usage": usage}
    return {"request": first["request"], "response": response}


def without_log_probs(record: Record) -> Record:
    """Return the record as the engine gives it where no log-probs are asked for."""
    params = {k: v for k, v in record["request"]["sampling_params"].items() if k != "logprobs"}
    choices = [choice | {"logprobs": None} for choice in record["response"]["choices"]]
    return {
        "request": record["request"] | {"sampling_params": params},
        "response": record["response"] | {"choices": choices},
    }


def check_same(inputs: list[Record], payloads: list[bytes]) -> None:
    """Raise unless ours and the baseline give the same tokens, sets and log-probs."""
    batch = vllm.to_samples(inputs, vocab_size=VOCAB_SIZE)
    expected = [arrays for payload in payloads for arrays in convert(payload)]
    names = {
        "input_ids": "input_ids",
        "completion_mask": "completion_mask",
        "candidate_ids": "candidate_ids",
        "candidate_counts": "candidate_counts",
        "rollout_log_probs": "log_probs",
    }
    for name, theirs in names.items():
        if theirs not in expected[0]:
            continue
        ours = flat(batch.column(name)).numpy()
        if not np.array_equal(ours, np.concatenate([arrays[theirs] for arrays in expected])):
            raise RuntimeError(f"ours and the baseline differ in {name}")
