"""The commands on files that trainers wrote: in, checked, and out again."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format.adapters import miles, prime_rl, transfer_queue
from ragged_format.adapters.registry import all_adapters, recognize
from ragged_format.cli import app

DATA = Path(__file__).parents[1] / "data"
VOCAB = ["--vocab-size", "49152"]


def ragged(*words, fails=False):
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert (done.exit_code != 0) == fails, done.output
    return done.output


def test_files_of_prime_rl_go_in_and_come_out(tmp_path):
    source = DATA / "prime_rl" / "dummy_training_samples.bin"
    ragged("convert", "--from", "prime_rl", *VOCAB, source, tmp_path / "samples")
    ragged("validate", tmp_path / "samples")
    ragged("pack", tmp_path / "samples", tmp_path / "rows")
    options = ["-o", "world_size=2", "-o", "pad_to_multiple_of=8"]
    ragged("export", "--to", "prime_rl", *options, tmp_path / "rows", tmp_path / "out")
    names = sorted(place.name for place in (tmp_path / "out").iterdir())
    assert names == ["rank_0.bin", "rank_1.bin"]
    items = [m for n in names for m in prime_rl.decode((tmp_path / "out" / n).read_bytes())]
    trained = sum(sum(item.loss_mask) for item in items)
    assert trained == sum(sum(item.mask) for item in prime_rl.decode(source.read_bytes()))


def test_structs_of_prime_rl_are_recognized(tmp_path):
    for name in ("dummy_training_samples.bin", "dummy_rank_0.bin"):
        payload = next(iter(prime_rl.payloads(str(DATA / "prime_rl" / name))))
        assert recognize(payload) == recognize(payload.value) == ["prime_rl"]
    assert recognize(prime_rl.SamplingMask(b"", b"")) == []
    source = DATA / "prime_rl" / "dummy_training_samples.bin"
    ragged("convert", *VOCAB, source, tmp_path / "samples")


@pytest.mark.parametrize("as_text", [False, True], ids=["parsed", "text"])
def test_replies_of_a_teacher_go_in(tmp_path, as_text):
    source = DATA / "trl_adapters" / "distill_teacher_responses.jsonl.gz"
    lines = []
    for line in gzip.decompress(source.read_bytes()).splitlines():
        reply = json.loads(line)
        response = reply["response"]
        lines.append(json.dumps({
            "input_ids": reply["prompt"], "response": json.dumps(response) if as_text else response,
            "completion_mask": [0] * reply["prompt_len"] + [1] * reply["completion_len"],
        }))  # fmt: skip
    (tmp_path / "replies.jsonl").write_text("\n".join(lines))
    command = ("convert", "--from", "trl_distill", *VOCAB, tmp_path / "replies.jsonl")
    ragged(*command, tmp_path / "samples")
    out = rf.Dataset(tmp_path / "samples")
    assert out.num_rows == len(lines)
    assert min(len(heads) for heads in out.take([0])["teacher_topk_ids"].to_pylist()) > 0


def test_a_directory_of_ranks_goes_in(tmp_path):
    for rank in (0, 1):
        place = tmp_path / "step" / f"rank_{rank}.bin"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes((DATA / "prime_rl" / f"dummy_rank_{rank}.bin").read_bytes())
    out = ragged("convert", "--from", "prime_rl", *VOCAB, tmp_path / "step", tmp_path / "samples")
    assert "dummy_batch 1" in out
    ragged("validate", tmp_path / "samples")


def test_sessions_of_miles_go_in_and_come_out(tmp_path):
    source = DATA / "miles" / "samples.safetensors"
    ragged("convert", "--from", "miles", *VOCAB, source, tmp_path / "samples")
    for name in ("miles", "slime", "transfer_queue", "verifiers"):
        ragged("export", "--to", name, tmp_path / "samples", tmp_path / name)
    (part,) = (tmp_path / "miles").iterdir()
    found, expected = (list(miles.payloads(str(place))) for place in (part, source))
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("tokens", "rollout_sampling_mask_ids", "rollout_sampling_mask_offsets"):
            np.testing.assert_array_equal(mine[key], theirs[key])
    for name in ("slime", "transfer_queue", "verifiers"):
        place = tmp_path / name
        if place.is_file():
            suffix = all_adapters()[name].reads.suffixes[0]
            place = place.rename(place.with_suffix(suffix))
        ragged("convert", "--from", name, *VOCAB, place, tmp_path / f"{name}-again")


def test_sets_too_wide_for_skyrl_are_refused_or_counted(tmp_path):
    source = DATA / "miles" / "samples.safetensors"
    ragged("convert", "--from", "miles", *VOCAB, source, tmp_path / "samples")
    words = ["export", "--to", "skyrl", "-o", "top_k=20", tmp_path / "samples", tmp_path / "out"]
    assert "would lose ids" in ragged(*words, fails=True)
    assert not (tmp_path / "out").exists()
    assert "ids left out" in ragged(*words, "--lossy")


def test_another_systems_file_is_an_error(tmp_path):
    place = tmp_path / "x.bin"
    place.write_bytes(b"\x93not messagepack of structs")
    out = ragged("convert", "--from", "prime_rl", *VOCAB, place, tmp_path / "out", fails=True)
    assert "RF-A002" in out


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("miles", {"tokens": [1], "response_length": 0, "rollout_sampling_mask_ids": []}),
        ("slime", {"tokens": [1], "response_length": 0, "rollout_top_p_token_ids": []}),
        ("skyrl", {"response": {"choices": [{"rollout_sample_support": None}]}}),
        ("verifiers", {"nodes": [{"token_ids": [], "mask": [], "parent": None}]}),
    ],
)
def test_records_are_recognized(name, payload):
    assert recognize(payload) == [name]


def test_messages_are_read_one_at_a_time():
    """PrimeIntellect-ai/prime-rl#2608, #2609, #2612: no file is held as Python objects whole."""
    found = prime_rl.payloads(str(DATA / "prime_rl" / "dummy_rank_0.bin"))
    assert next(found).index == 0
    buffers = transfer_queue.payloads(str(DATA / "transfer_queue" / "samples_packed.bin"))
    assert isinstance(next(iter(buffers)), memoryview)
