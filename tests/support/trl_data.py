"""Samples of TRL's queue, read from the stored arrays."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "data"


def load(path):
    with np.load(DATA / path) as stored:
        return {name: stored[name] for name in stored.files}


def queue_samples(path, *, sets=True, metrics=None):
    """Return the stored samples with the dtypes of the reference, sets as lists per token."""
    stored = load(path)
    offsets = stored["row_offsets"]
    starts = np.concatenate([[0], np.cumsum(stored["sampling_mask_counts"])])
    out = []
    for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
        sample = {
            "prompt": [], "completion": [],
            "input_ids": stored["input_ids"][begin:end].astype(np.int64),
            "completion_mask": stored["completion_mask"][begin:end].astype(np.int64),
            "old_log_probs": stored["old_log_probs"][begin:end],
            "advantage": float(stored["advantage"][row]),
            "model_version": int(stored.get("model_version", np.zeros(99))[row]),
            "group_id": int(stored["group_id"][row]),
            "metrics": metrics[row] if metrics else {},
            "enqueued_at": float(stored.get("enqueued_at", np.zeros(99))[row]),
        }  # fmt: skip
        if sets:
            sample["sampling_mask"] = [
                stored["sampling_mask_ids"][starts[p] : starts[p + 1]].tolist()
                for p in range(begin, end)
            ]
        out.append(sample)
    return out


def with_sets():
    metrics = json.loads((DATA / "trl_adapters" / "queue_samples.json").read_text())["metrics"]
    return queue_samples("trl_adapters/queue_samples.npz", metrics=metrics)
