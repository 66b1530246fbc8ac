"""Random mixes of requests: what is prepared together is what each would be by itself."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.http_server import SCHEMA, batch, settings, stream

import ragged_format as rf
from ragged_format.errors import RaggedError
from ragged_server.http.decode import Body, decode
from ragged_server.http.decoders import Decoders, Job
from ragged_server.http.limits import Budget
from ragged_server.store.prepare import prepare
from ragged_server.store.records import StoreSettings
from ragged_server.store.store import Store

BUDGET = Budget(1 << 40)
OPTIONS = settings(Path("unused"), decode_threads=1, max_record_tokens=40, max_request_records=12)
OTHER = rf.sample_schema(vocab_size=100, columns=["reward"])
LABELLED = SCHEMA.with_metadata({**SCHEMA.metadata, b"note": b"of a client"})
PACKED = rf.packed_schema(vocab_size=100, columns=[])
ids = st.sampled_from(["a", "b", "c", "d", "e"])


@pytest.fixture(scope="module")
def decoders():
    found = Decoders(OPTIONS)
    yield found
    found.close()


@st.composite
def rows(draw):
    """A record of few ids, so that some are there again, with the same content or another."""
    width, tokens = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5]))
    return {
        "sample_id": draw(ids),
        "group_id": draw(st.sampled_from([None, "g", "h"])),
        "input_ids": [7] * tokens,
        "completion_mask": [0] + [1] * (tokens - 1),
        "candidate_counts": [width] * (tokens - 1),
        "candidate_ids": [7, 8, 9][:width] * (tokens - 1),
    }


BREAKS = {
    "none": lambda row: None,
    "id": lambda row: row.update(sample_id=""),
    "token": lambda row: row.update(input_ids=[100] * len(row["input_ids"])),
    "mask": lambda row: row.update(completion_mask=[2] * len(row["input_ids"])),
    "length": lambda row: row.update(completion_mask=[0]),
    "order": lambda row: row.update(candidate_ids=row["candidate_ids"][::-1]),
    "too long": lambda row: row.update(
        input_ids=[7] * 60, completion_mask=[0] * 60, candidate_counts=[], candidate_ids=[]
    ),
}


@st.composite
def bodies(draw):
    kind = draw(st.sampled_from([*BREAKS, "none", "none", "none", "other", "labelled", "packed",
                                 "compressed", "damaged", "cut", "empty", "marked"]))  # fmt: skip
    made = draw(st.lists(st.lists(rows(), min_size=1, max_size=3), min_size=1, max_size=2))
    if kind in BREAKS:
        BREAKS[kind](made[-1][-1])
    if kind == "other":
        plain = ("sample_id", "input_ids", "completion_mask")
        made = [[{name: row[name] for name in plain} for row in some] for some in made]
    schema = {"other": OTHER, "labelled": LABELLED}.get(kind, SCHEMA)
    batches = [pa.RecordBatch.from_pylist(some, schema=schema) for some in made]
    if kind == "packed":
        return stream(schema=PACKED)
    if kind == "empty":
        return stream(*draw(st.sampled_from([[], [batches[0].slice(0, 0)]])), schema=schema)
    if kind == "compressed":
        return draw(st.sampled_from([b"\x28\xb5\x2f\xfd", b""])) + stream(*batches)
    data = bytearray(stream(*batches))
    if kind == "marked":
        sink = pa.BufferOutputStream()
        with rf.StreamWriter(sink, schema) as writer:
            writer.write(batches[0], {"note": "a client's own"})
        return sink.getvalue().to_pybytes()
    if kind == "damaged":
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(data[:-8]) if kind == "cut" else bytes(data)


class Taking:
    """A store that keeps the requests it is given."""

    def __init__(self, schema):
        self.schema = schema
        self.taken = []

    def append_all(self, requests, tells):
        self.taken += requests


def plain(request):
    """Return a request as values that can be compared."""
    out = {}
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if isinstance(value, np.ndarray):
            value = (value.dtype, value.shape, value.tobytes())
        out[field.name] = value
    out["messages"] = [message.to_pybytes() for message in request.messages]
    out["batches"] = [one.to_pylist() for one in request.batches]
    out["schema"] = (request.schema, request.schema.metadata)
    found = request.statistics
    out["statistics"] = (found.tokens, found.scored_tokens, found.set_widths.tolist())
    return out


def alone(data, log_schema, account, key):
    body = Body(bytearray(data), "arrow")
    try:
        found = decode(body, OPTIONS, BUDGET.reserve(len(data)), lambda: log_schema)
        return plain(
            prepare(found.schema, found.batches, log_schema=log_schema, account=account,
                    idempotency_key=key, messages=found.messages)
        )  # fmt: skip
    except RaggedError as err:
        return type(err), str(err), err.where


@hypothesis_settings(max_examples=150)
@given(
    made=st.lists(st.tuples(bodies(), st.sampled_from([None, "x"])), min_size=2, max_size=6),
    log_schema=st.sampled_from([None, SCHEMA, OTHER]),
)
def test_requests_that_are_made_together_are_those_of_single_bodies(decoders, made, log_schema):
    expected = [alone(data, log_schema, "one", key) for data, key in made]
    store, told = Taking(log_schema), {}
    jobs = [
        Job(Body(bytearray(data), "arrow"), BUDGET.reserve(len(data)), store, "one", key,
            lambda appended, error, report, n=number: told.update({n: error}))
        for number, (data, key) in enumerate(made)
    ]  # fmt: skip
    for tell in decoders._work(jobs):
        tell()
    taken = iter(store.taken)
    got = [
        (type(told[n]), str(told[n]), told[n].where) if n in told else plain(next(taken))
        for n in range(len(made))
    ]
    assert got == expected
    assert next(taken, None) is None


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    made=st.lists(st.tuples(bodies(), st.sampled_from([None, "x", "y"])), min_size=2, max_size=6)
)
def test_a_store_gives_the_answers_of_one_request_after_the_other(decoders, tmp_path_factory, made):
    def answers(*groups):
        folder = tmp_path_factory.mktemp("log")
        out = {}
        with Store(folder, StoreSettings(schema=SCHEMA)) as store:
            numbers = itertools.count()
            for group in groups:
                jobs = []
                for data, key in group:
                    number = next(numbers)

                    def tell(appended, error, report, number=number):
                        out[number] = appended if error is None else (type(error), str(error))

                    body, room = Body(bytearray(data), "arrow"), BUDGET.reserve(len(data))
                    jobs.append(Job(body, room, store, None, key, tell))
                for refuse in decoders._work(jobs):
                    refuse()
                store.append(prepare(SCHEMA, [batch(f"end {len(out)}")])).result()
            log = store.log_id
        return [out[number] for number in range(len(out))], log

    together, _ = answers(made)
    single, _ = answers(*([one] for one in made))
    assert list(map(facts, together)) == list(map(facts, single))


def facts(answer):
    """Return what of an answer does not depend on the log's name and on who else was stored."""
    if isinstance(answer, tuple):
        return answer
    return answer.stored, answer.duplicates, answer.replayed
