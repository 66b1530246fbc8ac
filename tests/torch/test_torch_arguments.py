"""Every argument of the plugin, given what it is not: a typed error with a remedy."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import tensor

import ragged_format as rf
import ragged_format.torch as rt
from ragged_format.testing import rollouts

BATCH = rollouts(np.random.default_rng(0), num_samples=4, prompt_length=5, response_length=5)
ROWS = rt.RaggedBatch.from_arrow(BATCH)
DATASET = rt.RaggedDataset(BATCH)


class Nothing:
    """An object that can do nothing."""

    def __repr__(self):
        return "nothing"


NOTHING = Nothing()
WRONG = {
    "arrow": [None, 5, "x", {}, [], [None], NOTHING],
    "batch": [None, 5, "x", {}, NOTHING],
    "batches": [None, 5, "x", [], [None], [5], NOTHING],
    "source": [None, 5, NOTHING, [None], [5], []],
    "path": [None, 5, 1.5, [], NOTHING],
    "integer": [1.5, "a", None, -1, True, [], NOTHING],
    "optional integer": [1.5, "a", -1, True, [], NOTHING],
    "seed": [1.5, "a", None, True, []],
    "number": ["a", None, [], NOTHING],
    "optional number": ["a", [], NOTHING],
    "columns": [5, "input_ids", [5], [None], [], ["nope"], NOTHING],
    "name": [5, None, NOTHING, "nope", []],
    "choice": [5, None, "nope", [], NOTHING],
    "index": [1.5, "a", [1.5], None, [], 99, -99, NOTHING],
    "indices": [
        1.5, "a", [1.5], ["a"], [None], None, [[0]], [[0], [1, 2]], [99], [-1], [2**70], [True],
        NOTHING,
    ],
    "tensor": [None, 5, "x", [1], NOTHING],
    "counts": ["x", 5, [1.5], ["a"], [[1]], [-1, 4], NOTHING],
    "device": [5.5, "nope", "cuda:99", torch.device("cuda:99"), NOTHING],
    "function": [5, None, "x"],
    "state": [5, None, "x", [1], {}, {"kind": 1}],
    "states": [5, None, "x", [], [5], [None], {}],
    "weights": [5, "ab", [1], ["a", "b"], [-1, 1], [1.5, None], [0, 0], NOTHING],
    "dtype": [5, "float32", NOTHING],
}  # fmt: skip

FLOATS = tensor([-1.0, -2.0])
COUNTS = tensor([1, 1])
PAD = {"values": tensor([1, 2, 3]), "counts": tensor([1, 2])}
SETS = {
    "hidden": torch.ones(3, 4), "weight": torch.ones(7, 4), "pred_index": tensor([0, 1]),
    "target_ids": tensor([1, 2]), "candidate_ids": tensor([1, 3, 2]),
    "candidate_counts": tensor([2, 1]),
}  # fmt: skip
HEADS = {**SETS, "head_ids": tensor([1, 2]), "head_counts": COUNTS}
CLIP = {"log_probs": FLOATS, "old_log_probs": FLOATS, "advantages": FLOATS}
CENTRE = {
    "log_probs": FLOATS, "rollout_log_probs": FLOATS, "advantages": FLOATS,
    "head_log_probs": FLOATS, "head_rollout_log_probs": FLOATS, "head_counts": COUNTS,
    "weights": "mis",
}  # fmt: skip
KL = {"head_log_probs": FLOATS, "teacher_log_probs": FLOATS, "head_counts": COUNTS}


def data(folder):
    with rf.Writer(folder / "data", BATCH.schema) as writer:
        writer.write(BATCH)
    return folder / "data"


def cached(folder, **options):
    far = data(folder)
    options = {"fetch": lambda name, path: shutil.copyfile(far / name, path)} | options
    options = {"directory": folder / "near", "max_bytes": 1 << 20} | options
    return rt.CachedDataset(options.pop("fetch"), options.pop("directory"), **options)


def function(call, base, **kinds):
    """The calls of one function, one for each argument of a kind."""

    def with_one(name):
        return lambda value, _: list(call(**base | {name: value}))

    return {
        f"{call.__name__}({name})": (kind.replace("_", " "), with_one(name))
        for name, kind in kinds.items()
    }


def loader(cls, **kinds):
    def with_one(name):
        return lambda value, _: cls(BATCH, **{name: value})

    return {
        f"{cls.__name__}({name})": (kind.replace("_", " "), with_one(name))
        for name, kind in kinds.items()
    }


def online(**kinds):
    def with_one(name):
        return lambda value, at: rt.OnlineLoader(at / "d", **{"token_budget": 99} | {name: value})

    return {f"OnlineLoader({name})": (kind, with_one(name)) for name, kind in kinds.items()}


def tensors(names, **others):
    return dict.fromkeys(names, "tensor") | others


READING = {
    "batch_size": "optional_integer", "token_budget": "optional_integer", "columns": "columns",
    "shuffle": "choice", "block_size": "integer", "window": "integer", "seed": "seed",
    "rank": "integer", "world_size": "integer", "replicas": "integer", "tail": "choice",
    "max_decoded_bytes": "integer",
}  # fmt: skip
SCORING = {
    "temperature": "number", "bias": "optional_number", "logit_scale": "number",
    "soft_cap": "optional_number", "on_outside": "choice", "host_counts": "counts",
    "vocab_start": "integer", "out_dtype": "dtype", "chunk_elements": "integer",
    "kernel": "choice",
}  # fmt: skip
BATCH_NAMES = ["__getitem__", "valid", "strings", "padded", "buckets"]
BATCH_AXES = [
    "offsets", "lengths", "lengths_host", "counts", "counts_host", "rows", "width", "padded_mask",
]  # fmt: skip

CALLS = {
    "RaggedBatch.from_arrow(data)": ("arrow", lambda v, _: rt.RaggedBatch.from_arrow(v)),
    "RaggedBatch.from_arrow([…, data])": (
        "batch", lambda v, _: rt.RaggedBatch.from_arrow([BATCH, v])
    ),
    "RaggedBatch.from_arrow(columns)": (
        "columns", lambda v, _: rt.RaggedBatch.from_arrow(BATCH, v)
    ),
    "RaggedBatch.collate(batches)": ("batches", lambda v, _: rt.RaggedBatch.collate(v)),
    "RaggedBatch.collate([…, batch])": ("batch", lambda v, _: rt.RaggedBatch.collate([ROWS, v])),
    **{
        f"RaggedBatch.{name}(name)": ("name", lambda v, _, name=name: getattr(ROWS, name)(v))
        for name in BATCH_NAMES + BATCH_AXES
    },
    "RaggedBatch.chunks(name)": ("name", lambda v, _: ROWS.chunks(v, 2)),
    "RaggedBatch.chunks(rows)": ("integer", lambda v, _: ROWS.chunks("candidate_ids", v)),
    "RaggedBatch.padded(width)": (
        "optional integer", lambda v, _: ROWS.padded("candidate_ids", v)
    ),
    "RaggedBatch.padded(fill)": (
        "optional number", lambda v, _: ROWS.padded("candidate_ids", fill=v)
    ),
    "RaggedBatch.padded(multiple_of)": (
        "optional integer", lambda v, _: ROWS.padded("candidate_ids", multiple_of=v)
    ),
    "RaggedBatch.padded_mask(width)": (
        "optional integer", lambda v, _: ROWS.padded_mask("candidate", v)
    ),
    "RaggedBatch.buckets(fill)": (
        "optional number", lambda v, _: ROWS.buckets("candidate_ids", v)
    ),
    "RaggedBatch.width(multiple_of)": (
        "optional integer", lambda v, _: ROWS.width("candidate", v)
    ),
    "RaggedBatch.to(device)": ("device", lambda v, _: ROWS.to(v)),
    "RaggedLoader(source)": ("source", lambda v, _: rt.RaggedLoader(v)),
    **loader(rt.RaggedLoader, **READING, prefetch="integer", device="device"),
    "RaggedLoader.set_epoch(epoch)": ("integer", lambda v, _: rt.RaggedLoader(BATCH).set_epoch(v)),
    "RaggedLoader.load_state_dict(state)": (
        "state", lambda v, _: rt.RaggedLoader(BATCH).load_state_dict(v)
    ),
    "RaggedIterable(source)": ("source", lambda v, _: rt.RaggedIterable(v)),
    **loader(rt.RaggedIterable, **READING),
    "RaggedIterable.set_epoch(epoch)": (
        "integer", lambda v, _: rt.RaggedIterable(BATCH).set_epoch(v)
    ),
    "RaggedIterable.load_state_dict(state)": (
        "state", lambda v, _: rt.RaggedIterable(BATCH).load_state_dict(v)
    ),
    "RaggedDataset(source)": ("source", lambda v, _: rt.RaggedDataset(v)),
    **loader(rt.RaggedDataset, columns="columns", max_decoded_bytes="integer"),
    "RaggedDataset[index]": ("index", lambda v, _: DATASET[v]),
    "RaggedDataset.__getitems__(indices)": ("indices", lambda v, _: DATASET.__getitems__(v)),
    "Mixture(sources)": ("source", lambda v, _: rt.RaggedLoader(rt.Mixture(v))),
    "Mixture([…, source])": ("source", lambda v, _: rt.RaggedLoader(rt.Mixture([BATCH, v]))),
    "Mixture(weights)": ("weights", lambda v, _: rt.Mixture([BATCH, BATCH], weights=v)),
    "Mixture(num_rows)": ("optional integer", lambda v, _: rt.Mixture([BATCH], num_rows=v)),
    "CachedDataset(fetch)": ("function", lambda v, at: cached(at, fetch=v)),
    "CachedDataset(directory)": ("path", lambda v, at: cached(at, directory=v)),
    "CachedDataset(max_bytes)": ("integer", lambda v, at: cached(at, max_bytes=v)),
    "OnlineLoader(source)": ("path", lambda v, _: rt.OnlineLoader(v, 99)),
    **online(
        token_budget="integer", rows="integer", packing="choice", fork="choice",
        null_advantage="choice", group_size="optional integer", group_timeout_s="number",
        on_timeout="choice", on_oversize="choice", window="integer", max_wait_s="number",
        prefetch="integer", clock="function",
    ),
    "OnlineLoader(max_staleness)": (
        "integer",
        lambda v, at: rt.OnlineLoader(at / "d", 99, max_staleness=v, current_version=lambda: 1),
    ),
    "OnlineLoader(current_version)": (
        "function",
        lambda v, at: rt.OnlineLoader(at / "d", 99, max_staleness=1, current_version=v),
    ),
    "OnlineLoader.load_state_dict(state)": (
        "state", lambda v, at: rt.OnlineLoader(at / "d", 99).load_state_dict(v)
    ),
    "common_state(states)": ("states", lambda v, _: rt.common_state(v)),
    **function(
        rt.pad_ragged, PAD, values="tensor", counts="counts", width="optional_integer",
        fill="number", multiple_of="optional_integer", host_counts="counts",
    ),
    **function(rt.pad_buckets, PAD, values="tensor", counts="counts", fill="number"),
    **function(
        rt.pad_chunks, PAD | {"rows": 1}, values="tensor", counts="counts", rows="integer",
        fill="number", multiple_of="optional_integer",
    ),
    **function(rt.width_buckets, {}, counts="counts"),
    **function(rt.support_log_probs, SETS, **tensors(SETS, entropy_over="choice", **SCORING)),
    **function(rt.head_log_probs, HEADS, **tensors(HEADS, host_head_counts="counts", **SCORING)),
    **function(rt.clipped_policy_loss, CLIP, **tensors(CLIP, low="number", high="number")),
    **function(
        rt.score_centering_loss, CENTRE,
        **tensors(
            CENTRE, weights="choice", tail="choice", low="optional_number", high="optional_number"
        ),
    ),
    **function(rt.forward_kl, KL, **tensors(KL, tail="choice")),
    **function(rt.reverse_kl, KL, **tensors(KL, tail="choice")),
}  # fmt: skip


def test_every_public_name_of_the_plugin_is_called():
    called = {name.partition("(")[0].partition("[")[0].partition(".")[0] for name in CALLS}
    assert set(rt.__all__) == called


@pytest.mark.parametrize("name", CALLS)
def test_what_an_argument_of_the_plugin_is_not(tmp_path, name):
    kind, call = CALLS[name]
    for number, value in enumerate(WRONG[kind]):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(rf.RaggedError) as caught:
            call(value, place)
        error = caught.value
        told = [error.expected is not None, error.got is not None, bool(error.remedy)]
        assert all(told), f"{value!r}: {error}"


def test_a_table_is_loaded_like_its_batches():
    table = pa.Table.from_batches([BATCH.slice(0, 1), BATCH.slice(1)])
    batch = rt.RaggedBatch.from_arrow(table)
    assert torch.equal(batch["candidate_ids"], ROWS["candidate_ids"])
    assert rt.RaggedBatch.from_arrow(table.slice(0, 0)).num_rows == 0


def test_indices_of_numpy_and_torch():
    wanted = ROWS["input_ids"][: int(ROWS.lengths("token")[0])]
    for index in (0, np.int64(0), np.uint8(0), tensor(0)):
        assert torch.equal(DATASET[index]["input_ids"], wanted)
    for indices in ([0], np.array([0], np.uint8), tensor([0]), (0,)):
        assert torch.equal(DATASET.__getitems__(indices)["input_ids"], wanted)
    assert DATASET.__getitems__([]).num_rows == 0
