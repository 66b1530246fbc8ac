"""Engine JSON to arrays as trainers do it today: parse everything, then loop over tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

__all__ = ["convert"]


def convert(payload: bytes, head_size: int = 0) -> list[dict[str, Any]]:
    """Return one dict of arrays per choice of an engine's response; nothing is checked.

    Parameters
    ----------
    payload : bytes
        JSON of a ``/inference/v1/generate`` response.
    head_size : int
        Entries of the top-K table; 0 for none.

    Returns
    -------
    list of dict
        ``input_ids``, ``completion_mask``, ``candidate_ids`` end to end and ``candidate_counts``;
        ``log_probs`` where the response has them; ``topk_ids`` and ``topk_log_probs``,
        (tokens, head_size), where a table is asked for.
    """
    response = json.loads(payload)
    prompt = response["prompt_token_ids"]
    out = []
    for choice in response["choices"]:
        tokens = choice["token_ids"]
        masks = choice["sampling_mask"] or []
        arrays: dict[str, Any] = {
            "input_ids": np.array(prompt + tokens, np.int32),
            "completion_mask": np.array([0] * len(prompt) + [1] * len(tokens), np.uint8),
            "candidate_ids": np.array([id_ for mask in masks for id_ in mask], np.int32),
            "candidate_counts": np.array([len(mask) for mask in masks], np.int32),
        }
        if choice["logprobs"] is not None:
            content = choice["logprobs"]["content"]
            arrays["log_probs"] = np.array([entry["logprob"] for entry in content], np.float32)
            if head_size:
                heads = [entry["top_logprobs"] for entry in content]
                ids = [[item["token_id"] for item in head] for head in heads]
                log_probs = [[item["logprob"] for item in head] for head in heads]
                shape = (len(heads), head_size)
                arrays["topk_ids"] = np.array(ids, np.int32).reshape(shape)
                arrays["topk_log_probs"] = np.array(log_probs, np.float32).reshape(shape)
        out.append(arrays)
    return out
