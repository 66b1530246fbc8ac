"""The three position conventions: golden cases of three tokens, and inverses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_format.adapters.positions import (
    generated_to_own,
    own_to_generated,
    own_to_predictor,
    predictor_to_own,
)
from ragged_format.errors import ConversionError
from ragged_format.lists import offsets_of

THREE = np.array([0, 3])
PROMPT = np.array([1])


def test_three_tokens_own_to_predictor():
    """vllm-project/vllm#5846: the first token has no entry, the last predicts none."""
    own = np.array([np.nan, -0.5, -0.25])
    predictor = own_to_predictor(own, THREE, fill=np.nan)
    np.testing.assert_array_equal(predictor, [-0.5, -0.25, np.nan])


def test_three_tokens_predictor_to_own():
    own = predictor_to_own(np.array([4, 7, -1]), THREE, fill=-1)
    assert own.tolist() == [-1, 4, 7]


def test_three_tokens_own_to_generated():
    values, offsets = own_to_generated(np.array([0, 3, 1]), THREE, PROMPT, fill=0)
    assert (values.tolist(), offsets.tolist()) == ([3, 1], [0, 2])


def test_three_tokens_generated_to_own():
    values, offsets = generated_to_own(np.array([3, 1]), np.array([0, 2]), PROMPT, fill=0)
    assert (values.tolist(), offsets.tolist()) == ([0, 3, 1], [0, 3])


@st.composite
def columns(draw):
    """Counts by own position of some records: the first of each is 0."""
    rows = draw(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=5))
    rows = [[0, *row[1:]] if row else [] for row in rows]
    values = np.array([count for row in rows for count in row], np.int64)
    return values, offsets_of(np.array([len(row) for row in rows], np.int64)), rows


@given(columns())
def test_own_to_predictor_to_own_is_the_identity(column):
    """modelscope/ms-swift#8196: a shift applied once too often is not the identity."""
    values, offsets, rows = column
    predictor = own_to_predictor(values, offsets, fill=0)
    assert predictor.tolist() == [count for row in rows for count in [*row, 0][1:]]
    assert predictor_to_own(predictor, offsets, fill=0).tolist() == values.tolist()


@given(columns())
def test_own_to_generated_to_own_is_the_identity(column):
    values, offsets, rows = column
    prompts = np.array(
        [next((i for i, c in enumerate(row) if c), len(row)) for row in rows], np.int64
    )
    generated, bounds = own_to_generated(values, offsets, prompts, fill=0)
    assert generated.tolist() == [
        c for row, p in zip(rows, prompts.tolist(), strict=True) for c in row[p:]
    ]
    back, back_offsets = generated_to_own(generated, bounds, prompts, fill=0)
    assert (back.tolist(), back_offsets.tolist()) == (values.tolist(), offsets.tolist())


def test_tables_move_by_rows():
    own = np.array([[-1, -1], [4, 5], [6, -1]])
    predictor = own_to_predictor(own, THREE, fill=-1)
    assert predictor.tolist() == [[4, 5], [6, -1], [-1, -1]]
    assert predictor_to_own(predictor, THREE, fill=-1).tolist() == own.tolist()


@pytest.mark.parametrize(
    ("convert", "values", "place"),
    [
        (lambda v: own_to_predictor(v, THREE, fill=0, column="c"), [2, 1, 0], (0, 0)),
        (lambda v: predictor_to_own(v, THREE, fill=0, column="c"), [2, 1, 3], (0, 2)),
        (lambda v: own_to_generated(v, THREE, np.array([2]), fill=0, column="c"),
         [0, 1, 3], (0, 1)),
        (lambda v: own_to_generated(v, THREE, np.array([4]), fill=0, column="c"),
         [0, 1, 3], (0, None)),
    ],
)  # fmt: skip
def test_what_has_no_place_is_an_error(convert, values, place):
    with pytest.raises(ConversionError) as caught:
        convert(np.array(values))
    where = caught.value.where
    assert (caught.value.code, where.column) == ("RF-A006", "c")
    assert (where.row, where.position) == place
