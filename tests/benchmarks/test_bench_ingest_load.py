"""The load of the ingest benchmark and the soak is what they say, and slopes are right."""

import numpy as np
import pytest

import ragged_format as rf
from benchmarks.ingest_load import body_of, http_done, samples
from benchmarks.soak import Measured, slope


def test_samples_are_real_rollouts_with_ids_of_their_own():
    body = body_of(samples(20, "a", first=3))
    (batch,) = rf.read_stream(body, validate="full")
    assert len(body) / 20 == pytest.approx(77_000, rel=0.1)
    (other,) = rf.read_stream(body_of(samples(20, "b")))
    names = batch.column("sample_id").to_pylist() + other.column("sample_id").to_pylist()
    assert len(set(names)) == 40
    assert batch.column("input_ids")[13].equals(other.column("input_ids")[0])


def test_an_answer_is_whole_or_awaited_or_an_error():
    answer = b"HTTP/1.1 201 Created\r\nContent-Length: 3\r\n\r\nabc"
    assert [http_done(bytearray(answer[:end])) for end in (10, len(answer) - 1, len(answer))] == [
        False, False, True,
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="503"):
        http_done(bytearray(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"))


def test_a_slope_has_the_interval_of_a_textbook():
    x = np.arange(10.0)
    noise = np.array([1, -1, 2, -2, 1, -1, 0, 1, -1, 0.0])
    best, half = slope((3 + 0.5 * x + noise).tolist())
    # numpy's own fit; t(8) at 97.5 % is 2.306.
    (wanted, _), covariance = np.polyfit(x, 3 + 0.5 * x + noise, 1, cov=True)
    assert best == pytest.approx(wanted)
    assert half == pytest.approx(2.306 * np.sqrt(covariance[0, 0]))


def test_figures_are_by_minute():
    found = Measured(
        latencies=[(n / 10, 0.001 if n < 600 else 0.002) for n in range(1200)],
        memory=[(float(n), 2**20 * (1 + n // 60)) for n in range(120)],
    )
    figures = found.by_minute(2)
    assert figures["p99"] == pytest.approx([1.0, 2.0])
    assert figures["memory"] == [1.0, 2.0]
