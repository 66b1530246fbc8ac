import numpy as np
import pytest
from support.s3_server import S3Server

from ragged_format.testing import rollouts


@pytest.fixture(scope="session")
def s3_process():
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_process):
    """An S3 server with an empty bucket."""
    s3_process.reset()
    return s3_process


@pytest.fixture
def options(s3, tmp_path):
    """Storage options of the server, with a cache and quick retries."""
    return {**s3.options, "cache_dir": str(tmp_path / "cache")}


@pytest.fixture(scope="session")
def samples():
    """37 small samples with candidate sets and heads."""
    return rollouts(
        np.random.default_rng(3), num_samples=37, prompt_length=6, response_length=9,
        vocab_size=5000, max_candidates=40, top_k=5,
    )  # fmt: skip
