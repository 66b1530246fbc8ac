"""Packed rows and collator batches of TRL 1.16.0, made of ours."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from support.trl_data import load, queue_samples, with_sets

import ragged_format as rf
from ragged_format.adapters import trl
from ragged_format.errors import ConversionError, PackingError, SchemaMismatchError
from ragged_format.packing import pack_row

PLANNERS = ("token_budget_r2_b1024", "fixed_count_r2_n8", "token_budget_r1_b512")
SAMPLES = trl.to_samples(
    queue_samples("trl/grpo_samples.npz", sets=False), vocab_size=49152
)  # fmt: skip
BATCHES = load("trl_adapters/batches.npz")
WIDE = {"tree_cu_seqlens_q": np.int32, "tree_cu_seqlens_k": np.int32}
FLOATS = {"old_log_probs", "advantages", "global_n_tokens", "global_n_forward_tokens",
          "mean_seq_len"}  # fmt: skip


def batches():
    for planner in PLANNERS:
        rows = load(f"trl/grpo_{planner}.npz")
        numbers = sorted({key.split(".")[0] for key in rows})
        for mb in numbers:
            ranks = sorted({key.split(".")[1] for key in rows if key.startswith(f"{mb}.")})
            members = [rows[f"{mb}.{rank}.samples"] for rank in ranks]
            yield pytest.param(planner, mb, members, id=f"{planner}-{mb}")


@pytest.mark.parametrize(("planner", "mb", "members"), list(batches()))
def test_collator_batches_are_the_reference_batches(planner, mb, members):
    rows = [pack_row(rf.take(SAMPLES, which), fork="transition") for which in members]
    got = trl.to_micro_batch(rows, pad_token_id=2)
    prefix = f"{planner}.{mb}.batch."
    expected = {k.removeprefix(prefix): v for k, v in BATCHES.items() if k.startswith(prefix)}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        dtype = np.float32 if name in FLOATS else WIDE.get(name, np.int64)
        assert got[name].dtype == dtype, name
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def oracle(samples, row):
    """The reference's per-position sets and heads, last writer wins, in pure Python."""
    positions = row["token_index"].tolist()
    sets = [[] for _ in row["input_ids"]]
    heads = [{} for _ in row["input_ids"]]
    drawn = [
        (s["sampling_mask"][p], s["top_k"][p])
        for s in samples
        for p in np.flatnonzero(s["completion_mask"])
    ]
    for position, (ids, head) in zip(positions, drawn, strict=True):
        sets[position], heads[position] = ids, head
    return sets, heads


def with_heads(samples):
    rng = np.random.default_rng(3)
    for one in samples:
        one["top_k"] = [
            dict(zip(ids[:5], sorted(np.log(rng.dirichlet(np.ones(len(ids[:5]) + 1)))[:-1].astype(
                np.float32).tolist(), reverse=True), strict=True))
            for ids in one["sampling_mask"]
        ]  # fmt: skip
    return samples


def test_sets_and_heads_are_at_the_predecessor_position():
    samples = with_heads(with_sets())
    batch = trl.to_samples(samples, vocab_size=49152)
    rf.validate(batch)
    packed = pack_row(batch, fork="transition")
    with pytest.raises(ConversionError, match="share a position") as info:
        trl.to_row(packed)  # these heads are random, and some samples share trained tokens
    assert info.value.where.column in ("candidate_ids", "topk_ids")
    counts = Counter()
    row = trl.to_row(packed, lossy=True, counts=counts)
    sets, heads = oracle(samples, row)
    assert row["sampling_mask_counts"].tolist() == list(map(len, sets))
    assert row["sampling_mask"].tolist() == [i for ids in sets for i in ids]
    assert (row["sampling_mask"].dtype, row["sampling_mask_counts"].dtype) == (np.int64, np.int64)
    for position, head in enumerate(heads):
        ids = row["topk_ids"][position]
        assert ids[ids >= 0].tolist() == list(head)
        values = row["topk_log_probs"][position]
        assert values[: len(head)].tolist() == list(head.values())
        assert np.isneginf(values[len(head) :]).all()
    assert row["topk_ids"].shape == (len(row["input_ids"]), 5)


def test_shared_positions_with_equal_sets_need_no_leave():
    shared = {
        "input_ids": [5, 6, 3, 4], "completion_mask": [0, 0, 1, 1], "old_log_probs": [0, 0, -1, -2],
        "advantage": 1.0, "model_version": 0, "group_id": 0, "sampling_mask": [[], [], [3, 7], [4]],
    }  # fmt: skip
    other = shared | {"input_ids": [5, 6, 3, 8], "sampling_mask": [[], [], [3, 7], [8, 9]]}
    packed = pack_row(trl.to_samples([shared, other], vocab_size=10), fork="transition")
    row = trl.to_row(packed)
    assert row["token_index"].tolist() == [1, 2, 1, 4]
    assert row["sampling_mask_counts"].tolist() == [0, 2, 1, 0, 2, 0]
    assert row["sampling_mask"].tolist() == [3, 7, 4, 8, 9]
    unlike = other | {"sampling_mask": [[], [], [3, 6], [8, 9]]}
    packed = pack_row(trl.to_samples([shared, unlike], vocab_size=10), fork="transition")
    with pytest.raises(ConversionError, match="share a position"):
        trl.to_row(packed)
    counts = Counter()
    last = trl.to_row(packed, lossy=True, counts=counts)
    assert last["sampling_mask"].tolist() == [3, 6, 4, 8, 9]
    assert counts["candidate_ids_of_shared_positions"] == 1


def test_sets_of_rows_are_padded_flat():
    samples = with_heads(with_sets())
    batch = trl.to_samples(samples, vocab_size=49152)
    rows = [pack_row(rf.take(batch, [i]), fork="transition") for i in (0, 2)]
    parts = [trl.to_row(row) for row in rows]
    out = trl.to_micro_batch(rows, pad_token_id=2)
    for number, part in enumerate(parts):
        flat = out["sampling_mask"][number]
        np.testing.assert_array_equal(flat[: len(part["sampling_mask"])], part["sampling_mask"])
        assert (flat[len(part["sampling_mask"]) :] == -1).all()
        kept = out["attention_mask"][number] == 1
        counts = out["sampling_mask_counts"][number]
        assert counts[~kept].sum() == 0
        # The reference's first step on the device: strip the padding again.
        assert counts[kept].sum() == (flat >= 0).sum()
        assert (out["topk_ids"][number][~kept] == -1).all()
        assert np.isneginf(out["topk_log_probs"][number][~kept]).all()


def test_a_missing_set_is_not_exported_as_the_full_vocabulary():
    """PrimeIntellect-ai/prime-rl#2979: rows without a set were scored over the vocabulary."""
    one = {
        "input_ids": [5, 6, 3], "completion_mask": [0, 1, 1], "old_log_probs": [0, -1, -2],
        "advantage": 1.0, "model_version": 0, "group_id": 0, "sampling_mask": [[], [6], []],
    }  # fmt: skip
    batch = trl.to_samples([one], vocab_size=10, on_missing_support="flag")
    packed = pack_row(batch, fork="transition")
    with pytest.raises(ConversionError, match="no place for some columns"):
        trl.to_row(packed)
    with pytest.raises(ConversionError, match="over the full vocabulary"):
        trl.to_row(packed, lossy=True)


def test_label_style_rows_need_one_next_token_per_position():
    shared = {
        "input_ids": [5, 6, 3], "completion_mask": [0, 0, 1], "old_log_probs": [0, 0, -1],
        "advantage": 1.0, "model_version": 0, "group_id": 0,
    }  # fmt: skip
    other = shared | {"input_ids": [5, 6, 4]}
    batch = trl.to_samples([shared, other], vocab_size=10)
    with pytest.raises(PackingError, match="different tokens"):
        trl.to_row(pack_row(batch, fork="token"))
    with pytest.raises(SchemaMismatchError, match="packed rows"):
        trl.to_row(batch)
    with pytest.raises(ConversionError, match="at least one row"):
        trl.to_micro_batch([], pad_token_id=0)


def test_advantages_per_token_replace_the_samples_own():
    schema = rf.sample_schema(vocab_size=10, columns=["rollout_log_probs", "advantages"])
    batch = pa.RecordBatch.from_pylist(
        [{"sample_id": "a", "input_ids": [1, 2, 3], "completion_mask": [0, 1, 1],
          "rollout_log_probs": [-1.0, -2.0], "advantages": [0.5, -0.5]}], schema=schema,
    )  # fmt: skip
    assert trl.to_row(pack_row(batch, fork="transition"))["advantages"].tolist() == [0.5, -0.5]
    bare = pa.RecordBatch.from_pylist(
        [{"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1],
          "rollout_log_probs": [-1.0]}],
        schema=rf.sample_schema(vocab_size=10, columns=["rollout_log_probs"]),
    )  # fmt: skip
    with pytest.raises(ConversionError, match="TRL needs this column"):
        trl.to_row(pack_row(bare, fork="transition"))
    empty = replace(rf.parse_schema(SAMPLES.schema)["advantage"])
    assert empty.nullable
    null = trl.to_samples(
        [{"input_ids": [1, 2], "completion_mask": [0, 1], "old_log_probs": [0, -1],
          "advantage": None, "model_version": 1, "group_id": 1},
         {"input_ids": [1, 3], "completion_mask": [0, 1], "old_log_probs": [0, -1],
          "advantage": 1.0, "model_version": 1, "group_id": 1}], vocab_size=10,
    )  # fmt: skip
    with pytest.raises(ConversionError, match="null advantage"):
        trl.to_row(pack_row(null, fork="transition", null_advantage="keep"))


@pytest.mark.trl
def test_installed_trl_takes_our_queue_samples(monkeypatch):
    """TRL's own tree packing gives our row."""
    # It warns when it is imported, and warnings are errors here.
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo import async_rollout_worker as worker
    from trl.experimental.async_grpo import packing

    samples = trl.to_queue_samples(rf.take(SAMPLES, list(range(8))))
    row = packing.TreeRow()
    for one in samples:
        row.add(one)
    theirs = row.pack()
    mine = trl.to_row(pack_row(rf.take(SAMPLES, list(range(8))), fork="transition"))
    for name, value in theirs.items():
        np.testing.assert_array_equal(mine[name], value.numpy())
    objects = [worker.RolloutSample(**one) for one in samples]
    assert trl.to_samples(objects, vocab_size=49152).equals(
        trl.to_samples(samples, vocab_size=49152)
    )


def test_group_numbers_survive_json():
    batch = trl.to_samples(with_sets(), vocab_size=49152)
    assert json.loads(batch.column("metrics")[0].as_py())["reward"] > 0
    assert batch.column("group_id").to_pylist()[:2] == ["0", "0"]


def test_rows_are_exported_as_files(tmp_path):
    samples = rf.take(SAMPLES, [0, 1, 8])
    rows = [pack_row(rf.take(samples, [i]), fork="transition") for i in range(3)]
    done = trl.write([rf.concat(rows[:2]), rows[2]], str(tmp_path / "out"))
    assert done["rows"] == 3
    for number, row in enumerate(rows):
        with np.load(tmp_path / "out" / f"row-{number:06d}.npz") as stored:
            for name, value in trl.to_row(row).items():
                np.testing.assert_array_equal(stored[name], value)
