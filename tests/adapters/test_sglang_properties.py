"""Random SGLang answers in every form give what a loop over their tokens gives."""

import base64
import json
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragged_format.adapters import sglang
from ragged_format.adapters.report import ConversionReport
from ragged_format.validate import validate

VOCAB = 20


def log_soft(weights):
    total = np.log(sum(weights))
    return [float(np.log(w) - total) for w in weights]


def answer(seed, tokens, k, per_candidate):
    """An answer, and its columns."""
    pick = random.Random(seed)
    ids, mask, masses, own, top = [], [], [], [], []
    for _ in range(tokens):
        kept = pick.sample(range(VOCAB), pick.randint(1, 6))
        mass = log_soft([pick.random() + 0.1 for _ in kept])
        at = pick.randrange(len(kept))
        ids.append(kept[at])
        mask.append(kept)
        masses.append(mass)
        own.append(mass[at])
        best = sorted(zip(mass, kept, strict=True), reverse=True)[:k]
        top.append([[value, id_, None] for value, id_ in best])
        while len(top[-1]) < k:
            other = next(i for i in range(VOCAB) if i not in [e[1] for e in top[-1]])
            top[-1].append([pick.choice([-3.4028234663852886e38, float("-inf")]), other, None])
    meta = {
        "id": f"s{seed}", "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": 2, "completion_tokens": tokens, "weight_version": "7",
        "output_token_sampling_mask": mask,
        "output_token_sampling_logprobs": masses if per_candidate else own,
        "output_token_sampling_mask_length": tokens,
        "output_token_logprobs": [[v, i, None] for v, i in zip(own, ids, strict=True)],
        "output_top_logprobs": top,
    }  # fmt: skip
    order = [sorted(range(len(row)), key=row.__getitem__) for row in mask]
    expected = {
        "input_ids": [1, 2, *ids],
        "candidate_counts": [len(row) for row in mask],
        "candidate_ids": [row[i] for row, o in zip(mask, order, strict=True) for i in o],
        "topk_counts": [sum(e[0] > -1e30 for e in row) for row in top],
        "topk_ids": [e[1] for row in top for e in row if e[0] > -1e30],
        "rollout_log_probs": np.array(own, np.float32).tolist(),
    }
    if per_candidate:
        flat = [row[i] for row, o in zip(masses, order, strict=True) for i in o]
        expected["candidate_log_probs"] = np.array(flat, np.float32).tolist()
    return {"output_ids": ids, "prompt_token_ids": [1, 2], "meta_info": meta}, expected


def flattened(response, encode):
    meta = dict(response["meta_info"])
    top = meta.pop("output_top_logprobs")
    table = np.array([[e[0] for e in row] for row in top], "<f4").reshape(len(top), -1)
    names = np.array([[e[1] for e in row] for row in top], "<i4").reshape(len(top), -1)
    meta["output_top_logprobs_shape"] = list(table.shape)
    meta["output_top_logprobs_null_prefix"] = 0
    for key, array in (("val", table), ("idx", names)):
        name = f"output_top_logprobs_{key}_flat"
        if encode:
            meta[name + "_b64"] = base64.b64encode(array.tobytes()).decode()
            meta[name + "_b64_dtype"] = str(array.dtype)
        else:
            meta[name] = array.ravel().tolist()
    return response | {"meta_info": meta}


def events(response, cuts, cumulative):
    out, before = [], 0
    total = len(response["output_ids"])
    for end in [*cuts, total]:
        begin = 0 if cumulative else before
        meta = {
            key: value[begin:end] if key.startswith("output_") and type(value) is list else value
            for key, value in response["meta_info"].items()
        }
        meta |= {"completion_tokens": end, "output_token_sampling_mask_length": end}
        if end < total:
            meta["finish_reason"] = None
        out.append(response | {"output_ids": response["output_ids"][begin:end], "meta_info": meta})
        before = end
    return out


def convert(response, **options):
    report = ConversionReport()
    batch = sglang.to_samples([{"response": response}], vocab_size=VOCAB, report=report, **options)
    validate(batch)
    assert report.unbalanced() == []
    return batch, report


@given(
    seed=st.integers(0, 2**32), tokens=st.integers(1, 8), k=st.integers(1, 8),
    per_candidate=st.booleans(), data=st.data(),
)  # fmt: skip
def test_every_form_gives_what_a_loop_gives(seed, tokens, k, per_candidate, data):
    response, expected = answer(seed, tokens, k, per_candidate)
    batch, report = convert(response)
    [row] = batch.to_pylist()
    assert {key: row[key] for key in expected} == expected
    assert row["policy_version"] == 7
    assert report.head_entries.taken == tokens * k
    assert report.head_entries.dropped.total() == tokens * k - sum(expected["topk_counts"])

    for encode in (True, False):  # float32 in this form
        flat, _ = convert(flattened(response, encode))
        for name in expected:
            assert flat.column(name).equals(batch.column(name)), name
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens))) - {tokens})
    for cumulative in (True, False):
        parts = events(response, cuts, cumulative)
        text = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
        for form in (parts, text, text.encode()):
            assert convert(form)[0].equals(batch), (cumulative, cuts)


@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_answers_of_a_batch_are_converted_together_as_alone(seed, sizes):
    responses = [answer(seed + n, size, 3, False)[0] for n, size in enumerate(sizes)]
    together, _ = convert(responses)
    for n, response in enumerate(responses):
        alone, _ = convert(response)
        own = together.slice(n, 1)
        for name in alone.schema.names:
            if name != "group_id":
                assert own.column(name).to_pylist() == alone.column(name).to_pylist()
