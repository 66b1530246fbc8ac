"""Public reports about loaders of ragged data, each as a small case that shows the fault."""

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import ragged_format as rf
from ragged_format.torch import RaggedBatch, RaggedLoader

NESTED = (
    rf.Column("word_counts", "turn", pa.int32(), opens="word"),
    rf.Column("word_values", "word", pa.float64()),
)


def nested(values):
    """Records whose lists of lists of numbers are on axes of their own."""
    schema = rf.sample_schema(vocab_size=9, columns=NESTED, root_axes=["turn"])
    rows = [
        {
            "sample_id": f"{n}", "input_ids": [], "completion_mask": [],
            "word_counts": [len(words) for words in turns],
            "word_values": [value for words in turns for value in words],
        }
        for n, turns in enumerate(values)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def test_lists_of_lists_become_values_and_counts():
    """pola-rs/polars#19092, pytorch/torcharrow#500: list columns had no way to tensors."""
    batch = RaggedBatch.from_arrow(nested([[[0.1]], [], [[], [0.2, 0.3]]]))
    assert batch.lengths("turn").tolist() == [1, 0, 2]
    assert batch["word_counts"].tolist() == [1, 0, 2]
    assert batch["word_values"].tolist() == [0.1, 0.2, 0.3]


def test_types_are_those_of_the_schema(tmp_path):
    """huggingface/datasets#5517: float64 came back as float32, without a word."""
    value = 1 + 2**-40  # not a float32
    exact = rf.Column("exact", "target", pa.float64())
    schema = rf.sample_schema(vocab_size=9, columns=["reward", exact, *NESTED], root_axes=["turn"])
    row = {
        "sample_id": "a", "reward": value, "input_ids": [1, 2], "completion_mask": [0, 1],
        "exact": [value], "word_counts": [1], "word_values": [value],
    }  # fmt: skip
    with rf.Writer(tmp_path / "data", schema) as writer:
        writer.write(pa.RecordBatch.from_pylist([row], schema=schema))
    with RaggedLoader(tmp_path / "data") as loader:
        (batch,) = loader
        assert batch["exact"].dtype == batch["word_values"].dtype == torch.float64
        assert batch["exact"].tolist() == batch["word_values"].tolist() == [value]
        assert batch["reward"].tolist() == [value]
        assert batch["input_ids"].dtype == torch.int32


def calls_while(work):
    """Return how many functions, of Python or C, `work` calls."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_no_work_is_done_per_value():
    """huggingface/datasets#6104, #2498, #5841, #7753: ten long rows took minutes."""
    schema = rf.sample_schema(vocab_size=9, columns=["rollout_log_probs"])

    def of(length):
        row = {
            "input_ids": [1] * length, "completion_mask": [0] + [1] * (length - 1),
            "rollout_log_probs": [-0.5] * (length - 1),
        }  # fmt: skip
        rows = [{"sample_id": f"{n}", **row} for n in range(10)]
        return pa.RecordBatch.from_pylist(rows, schema=schema)

    short, long = of(2), of(20_000)
    RaggedBatch.from_arrow(short)  # what is done once
    tracemalloc.start()
    try:
        batch = RaggedBatch.from_arrow(long)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An object per value takes several times what the arena does.
    assert peak < 1.5 * batch.arena.nbytes
    few, many = (
        calls_while(lambda data=data: RaggedBatch.from_arrow(data)) for data in (short, long)
    )
    assert many <= 1.1 * few


def test_every_tensor_is_a_plain_strided_one(samples):
    """pytorch/pytorch#102167, pytorch/pytorch#137336: nested tensors could not be pinned or moved.

    What is pinned and moved is the arena; its tensors are flat views.
    """
    batch = RaggedBatch.from_arrow(samples)
    for name in batch:
        assert batch[name].layout == torch.strided
        assert not batch[name].is_nested
        assert batch[name].is_contiguous()
    moved = batch.to("meta")
    assert [moved[name].shape for name in moved] == [batch[name].shape for name in batch]


READ = """
import sys
from ragged_format.torch import RaggedLoader
with RaggedLoader(sys.argv[1], 2, shuffle=True) as loader:
    for number, batch in enumerate(loader):
        print(batch.num_rows, flush=True)
        if number == 3 and len(sys.argv) > 2:
            sys.stdin.read()
"""


def shared_names():
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_two_runs_on_a_host_and_a_killed_one_leave_each_other_alone(dataset_path, tmp_path):
    """mosaicml/streaming#781, #884, #767, #717: shared memory of a fixed name.

    A second run on the host, and the next one after a kill, found the name taken.
    """
    before, files = shared_names(), sorted(dataset_path.iterdir())
    command = [sys.executable, "-c", READ, dataset_path]
    first = subprocess.Popen([*command, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for _ in range(4):
        assert first.stdout.readline() == b"2\n"
    beside = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (beside.returncode, beside.stdout.count("2\n")) == (0, 18)
    first.send_signal(signal.SIGKILL)
    first.wait()
    for pipe in (first.stdin, first.stdout):
        pipe.close()
    after = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (after.returncode, after.stdout) == (0, beside.stdout)
    assert not {name for name in shared_names() - before if "ragged" in name or "00000" in name}
    assert sorted(dataset_path.iterdir()) == files


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_beside_a_loader_can_load(samples):
    """pytorch/pytorch#130610: forked while a pinning thread held a lock, a worker hung for ever."""
    with RaggedLoader(samples, 2, prefetch=3) as loader:
        iterator = iter(loader)
        next(iterator)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with RaggedLoader(samples, 5, prefetch=2) as own:
                    code = sum(batch.num_rows for batch in own) != 37
            finally:
                os._exit(code)
        end, status = time.monotonic() + 60, (0, 0)
        while status[0] == 0 and time.monotonic() < end:
            status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert status[0] == child
        assert os.waitstatus_to_exitcode(status[1]) == 0
        assert sum(batch.num_rows for batch in iterator) == 35


def test_rows_that_are_views_of_read_only_memory_are_copied(dataset_path):
    """lance-format/lance#3621: writing to a tensor changed, or crashed on, mapped data."""
    content = {path: path.read_bytes() for path in dataset_path.glob("*.arrow")}
    with RaggedLoader(dataset_path, 4) as loader:
        for batch in loader:
            for name in batch:
                batch[name].fill_(1)
    assert {path: path.read_bytes() for path in content} == content


def test_whole_batches_follow_a_state_of_another_epoch(samples):
    """Lightning-AI/litData#24, #770, Lightning-AI/pytorch-lightning#19335, meta-pytorch/data#1520.

    A state that is asked for again right after it was loaded is that state, in later epochs too.
    """
    with RaggedLoader(samples, 4, shuffle=True, seed=5) as loader:
        for _ in loader:
            pass
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
        rest = [batch["input_ids"].tolist() for batch in iterator]
    for prefetch in (0, 2):
        with RaggedLoader(samples, 4, shuffle=True, seed=5, prefetch=prefetch) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert [batch["input_ids"].tolist() for batch in loader] == rest


def test_lengths_of_ranks_differ_and_nothing_is_there_twice():
    """huggingface/datasets#5360, starVLA/starVLA#470: the same rows on ranks, in each epoch."""
    rows = nested([[[float(n)]] for n in range(23)])
    epochs = []
    loaders = [RaggedLoader(rows, 2, shuffle=True, rank=r, world_size=3) for r in range(3)]
    for _ in range(2):
        shares = [[v for b in loader for v in b["word_values"].tolist()] for loader in loaders]
        assert sorted(v for share in shares for v in share) == np.arange(23.0).tolist()
        epochs.append(shares)
    for loader in loaders:
        loader.close()
    assert epochs[0] != epochs[1]
