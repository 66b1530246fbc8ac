"""Shared by the tests of the torch plugin: one thread, no thread left behind, small data."""

import threading

import numpy as np
import pytest
import torch

import ragged_format as rf
from ragged_format.testing import rollouts


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_thread_left():
    yield
    left = [thread.name for thread in threading.enumerate() if "ragged-" in thread.name]
    assert not left


@pytest.fixture(scope="session")
def samples():
    """37 small samples with candidate sets and heads."""
    return rollouts(
        np.random.default_rng(3), num_samples=37, prompt_length=6, response_length=9,
        vocab_size=5000, max_candidates=40, top_k=5,
    )  # fmt: skip


@pytest.fixture
def dataset_path(samples, tmp_path):
    """The samples in two shards of several batches each."""
    path = tmp_path / "data"
    for mode, first, last in (("error", 0, 20), ("append", 20, 37)):
        with rf.Writer(path, samples.schema, mode=mode) as writer:
            for start in range(first, last, 6):
                writer.write(samples.slice(start, min(6, last - start)))
    return path
