"""The stored heads that are timed are valid, and both forms hold the same ones."""

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from benchmarks import distill
from benchmarks.harness import Settings


@pytest.mark.parametrize("kind", [pa.float32(), pa.float16()])
def test_heads_are_valid(kind):
    ids, values = distill.heads(50, 2 * distill.LENGTH)
    assert all(len(set(row)) == 50 for row in ids.tolist())
    batch = distill.samples_of(ids, values, kind)
    rf.validate(batch)
    assert batch.num_rows == 2


def test_the_lossy_form_is_near_the_values():
    _, values = distill.heads(50, distill.LENGTH)
    codec, raw = distill.recommended(values)
    assert raw.shape == (distill.LENGTH, codec.value_bytes)
    got = codec.log_probs(raw)
    np.testing.assert_allclose(got[:, :16], values[:, :16], rtol=2**-7)
    assert np.abs(got - values).max() < 1


def test_figures_compare_equal_content():
    figures = distill.run(Settings(rounds=1, slice_s=0.0, quick=True))
    assert len(figures) == 5
    assert figures[0].ratio > 0.5
