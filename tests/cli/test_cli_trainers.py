"""`ragged convert` and `ragged export` on the forms of trainers and stored teachers."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.cli import app


def ragged(*args):
    done = CliRunner().invoke(app, [str(a) for a in args])
    return done.exit_code, done.stdout, done.stderr


ONE = {
    "trl": {
        "input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "old_log_probs": [0, -0.5, -1],
        "advantage": 1.0, "model_version": 1, "group_id": 3, "metrics": {}, "enqueued_at": 1.0,
    },
    "trl_distill": {
        "input_ids": [1, 2], "completion_mask": [0, 1],
        "prompt_logprobs": [None, {"2": {"logprob": -0.5, "rank": 1}}],
    },
    "axolotl": {
        "input_ids": [1, 2], "labels": [-100, 2],
        "logprobs": [[{"token": "token_id:2", "logprob": -0.5}]],
    },
    "tinker": {"tokens": [1, 2], "topk_prompt_logprobs": [None, [[2, -0.5]]]},
    "draws": {"input_ids": [1, 2], "draw_ids": [[], [2, 2]], "draw_counts": [[], [1, 1]]},
    "skycap": {
        "token_ids": [1, 2], "loss_mask": [0, 1],
        "sampling_mask": {"ids": [2, 5], "offsets": [0, 0, 2]},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_json_lines_of_more_than_one_window_are_detected_and_converted(name, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text((json.dumps(ONE[name]) + "\n") * 300)
    code, _, errors = ragged("convert", "--vocab-size", 10, path, tmp_path / "out")
    assert code == 0, errors
    dataset = rf.Dataset(str(tmp_path / "out"))
    assert dataset.num_rows == 300
    code, _, errors = ragged("validate", tmp_path / "out")
    assert code == 0, errors


@pytest.mark.parametrize(
    "record",
    [
        ONE["trl"] | {"sampling_mask": [[], [2, 7], [3]],
                      "top_k": [{}, {"2": -0.5, "7": -2.0}, {"3": 0.0}]},
        ONE["trl"] | {"top_k_ids": [[-1, -1], [2, 7], [3, -1]],
                      "top_k_log_probs": [[0, 0], [-0.5, -2], [0, 0]]},
        {"input_ids": [1, 2], "completion_mask": [0, 1],
         "teacher_topk_ids": [[-1, -1], [2, 3]], "teacher_topk_logprobs": [[0, 0], [-0.5, -2]]},
        {"input_ids": [1, 2], "labels": [-100, 2], "logprobs": [[-0.5, -2.0]],
         "target_token_ids": [[2, 3]]},
        {"inputs": [1, 2], "targets": [[[2, 3], [-0.5, -2.0]], [[2, 3], [-0.5, -2.0]]]},
        {"sample_uuid": "u", "token_ids": [1, 2], "logprobs": [-0.5, -0.25]},
    ],
)  # fmt: skip
def test_nested_lists_of_the_fast_reader_are_taken(record, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(record) + "\n")
    code, _, errors = ragged("convert", "--vocab-size", 10, path, tmp_path / "out")
    assert code == 0, errors
    sets = {"candidate_ids", "topk_ids", "teacher_topk_ids", "teacher_log_probs"}
    assert sets & set(rf.Dataset(str(tmp_path / "out")).schema.names)


def test_rows_and_heads_are_exported(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(ONE["trl"]) + "\n")
    assert ragged("convert", "--from", "trl", "--vocab-size", 10, path, tmp_path / "s")[0] == 0
    code, _, errors = ragged("pack", "--fork", "transition", tmp_path / "s", tmp_path / "p")
    assert code == 0, errors
    code, _, errors = ragged("export", "--to", "trl", tmp_path / "p", tmp_path / "rows")
    assert code == 0, errors
    with np.load(tmp_path / "rows" / "row-000000.npz") as row:
        assert row["token_index"].tolist() == [0, 1]
    path.write_text(json.dumps(ONE["axolotl"]) + "\n")
    assert ragged("convert", "--vocab-size", 10, path, tmp_path / "t")[0] == 0
    for name, options in (
        ("trl_distill", ()), ("distillkit", ("-o", "k=2")), ("axolotl", ()), ("tensors", ()),
    ):  # fmt: skip
        code, _, errors = ragged("export", "--to", name, *options, tmp_path / "t", tmp_path / name)
        assert code == 0, errors
    code, _, errors = ragged(
        "convert", "--from", "distillkit", tmp_path / "distillkit", tmp_path / "again"
    )
    assert code == 0, errors
    mine, other = (rf.Dataset(str(tmp_path / n)).take([0]) for n in ("t", "again"))
    for column in ("input_ids", "teacher_topk_ids", "teacher_topk_log_probs"):
        assert mine.column(column).equals(other.column(column))
