"""Routed experts become a column of fixed shape on the token axis."""

import base64
import io

import numpy as np
import pyarrow as pa
import pytest
from support.vllm_rollouts import choice, record

import ragged_format as rf
from ragged_format.adapters import vllm
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.lists import flat
from ragged_format.validate import validate

LAYERS, K = 3, 2


def encode(array):
    sink = io.BytesIO()
    np.save(sink, array)
    return base64.b64encode(sink.getvalue()).decode()


def experts(rows, dtype=np.uint8, shape=(LAYERS, K)):
    return np.arange(rows * shape[0] * shape[1]).reshape(rows, *shape).astype(dtype)


def with_experts(value, tokens=(3, 4), request_id="r1", **sampling):
    mask = [[t] for t in tokens] or None
    routed = encode(value) if isinstance(value, np.ndarray) else value
    return record(
        choice(list(tokens), mask, routed_experts=routed), request_id=request_id,
        sampling={"temperature": 1.0, **sampling},
    )  # fmt: skip


def error_of(*records, **options):
    with pytest.raises(ConversionError) as caught:
        vllm.to_samples(records, **{"vocab_size": 10, **options})
    return caught.value


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_every_token_but_the_last_has_its_experts(dtype):
    routed = experts(3, dtype)
    batch = vllm.to_samples([with_experts(routed)], vocab_size=10)
    validate(batch)
    column = rf.parse_schema(batch.schema)["routed_experts"]
    assert (column.axis, column.type, column.shape) == ("token", pa.int16(), (LAYERS, K))
    values = flat(batch.column("routed_experts")).numpy().reshape(4, LAYERS, K)
    assert np.array_equal(values[:3], routed)
    assert (values[3] == -1).all()


def test_records_without_experts_among_others_have_none():
    report = ConversionReport()
    bare = with_experts(None, request_id="r2")
    batch = vllm.to_samples([with_experts(experts(3)), bare], vocab_size=10, report=report)
    validate(batch)
    values = flat(batch.column("routed_experts")).numpy()
    assert (values[4:] == -1).all()
    assert report.noted["routed_experts_missing"] == 1


def test_an_omitted_prefix_of_the_prompt_has_none():
    batch = vllm.to_samples(
        [with_experts(experts(2), routed_experts_prompt_start=1)], vocab_size=10
    )
    values = flat(batch.column("routed_experts")).numpy().reshape(4, LAYERS, K)
    assert (values[0] == -1).all()
    assert np.array_equal(values[1:3], experts(2))


def test_an_abort_before_the_first_token_has_experts_of_the_prompt():
    batch = vllm.to_samples([with_experts(experts(1), tokens=())], vocab_size=10)
    validate(batch)
    values = flat(batch.column("routed_experts")).numpy().reshape(2, LAYERS, K)
    assert np.array_equal(values[:1], experts(1))


@pytest.mark.parametrize("shape", [
    (4, LAYERS, K), (2, LAYERS, K), (3, LAYERS * K), (3, 0, K), (1, 3, LAYERS, K),
])  # fmt: skip
def test_other_shapes_are_refused(shape):
    """sgl-project/sglang#20964, #26860, vllm-project/vllm#35744, #37118: tokens are missing."""
    error = error_of(with_experts(np.zeros(shape, np.uint8)))
    assert error.code == "RF-A006"
    assert error.where.column == "choices[0].routed_experts"


@pytest.mark.parametrize("value", [
    "not base64!", base64.b64encode(b"\x93NUMPY").decode(), base64.b64encode(b"").decode(), 7,
    np.zeros((3, LAYERS, K), np.float32), np.full((3, LAYERS, K), 40000, np.uint16),
    np.full((3, LAYERS, K), -1, np.int32), np.array([[[None]]] * 3, object),
])  # fmt: skip
def test_other_contents_are_refused(value):
    assert error_of(with_experts(value)).code == "RF-A002"


def test_models_do_not_mix():
    other = with_experts(experts(3, shape=(LAYERS, K + 1)), request_id="r2")
    error = error_of(with_experts(experts(3)), other)
    assert (error.code, error.where.row) == ("RF-A006", 1)


def test_a_schema_declares_the_shape():
    column = rf.Column("routed_experts", "token", pa.int16(), shape=(LAYERS, K), fill=-1)
    batch = vllm.to_samples([with_experts(None)], vocab_size=10, columns=[column])
    assert (flat(batch.column("routed_experts")).numpy() == -1).all()
    batch = vllm.to_samples([with_experts(experts(3))], schema=batch.schema)
    assert np.array_equal(
        flat(batch.column("routed_experts")).numpy()[:3], experts(3).reshape(3, -1)
    )
    other = rf.Column("routed_experts", "token", pa.int16(), shape=(LAYERS, 9), fill=-1)
    assert error_of(with_experts(experts(3)), columns=[other]).code == "RF-A006"
    flat_one = rf.Column("routed_experts", "token", pa.int16(), shape=(6,), fill=-1)
    assert error_of(with_experts(experts(3)), columns=[flat_one]).code == "RF-A011"


def test_experts_that_are_not_wanted_are_not_decoded():
    report = ConversionReport()
    batch = vllm.to_samples([with_experts("junk")], vocab_size=10, columns=[], report=report)
    assert batch.num_rows == 1
    assert report.unread["choice.routed_experts"] == 1
