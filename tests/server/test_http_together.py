"""Small requests that wait are validated as one, and each has its own answer all the same."""

import threading

import pytest
from support.http_server import SCHEMA, batch, settings, stream, wait_until
from support.memory_store import MemoryStore

import ragged_format as rf
from ragged_format.errors import InvariantError, RaggedError
from ragged_server.http.decode import Body, Decoded, decode, decode_together
from ragged_server.http.decoders import SMALL_BYTES, Decoders, Job
from ragged_server.http.limits import Budget

OTHER = rf.sample_schema(vocab_size=100, columns=["reward"])


def bodies():
    """Return streams of all kinds: good and bad, of two schemas, empty, several batches."""
    bad_id = batch("c").to_pylist()
    bad_id[0]["input_ids"] = [7, 100, 7]
    rows = [{"sample_id": "o", "input_ids": [1, 2], "completion_mask": [0, 1]}]
    pa_batch = type(batch("x")).from_pylist
    damaged = bytearray(stream(batch("d")))
    damaged[len(damaged) // 2] ^= 1
    return {
        "one": stream(batch("a")),
        "several batches": stream(batch("b1"), batch("b2", "b3")),
        "invalid": stream(pa_batch(bad_id, schema=SCHEMA)),
        "an empty id": stream(batch("")),
        "other schema": stream(pa_batch(rows, schema=OTHER)),
        "the same id": stream(batch("a")),
        "damaged": bytes(damaged),
        "cut": stream(batch("e"))[:-8],
        "no records": stream(schema=SCHEMA),
        "no bytes": b"",
        "large": stream(batch("f", tokens=5000)),
    }


def outcome(found):
    if isinstance(found, BaseException):
        return type(found), str(found)
    return (
        found.schema,
        [b.to_pylist() for b in found.batches],
        [m.to_pybytes() for m in found.messages],
    )


@pytest.mark.parametrize("limits", [{}, {"max_record_tokens": 100}], ids=["free", "limited"])
def test_each_request_has_the_answer_that_it_has_alone(tmp_path, limits):
    options = settings(tmp_path, **limits)
    budget = Budget(1 << 30)
    made = bodies()
    alone, pairs = [], []
    for data in made.values():
        body = Body(bytearray(data), "arrow")
        pairs.append((body, budget.reserve(len(data))))
        try:
            alone.append(decode(body, options, budget.reserve(len(data)), lambda: None))
        except RaggedError as err:
            alone.append(err)
    together, groups = decode_together(pairs, options)
    assert [outcome(found) for found in together] == [outcome(found) for found in alone]
    refused = [name for name, found in zip(made, together, strict=True)
               if isinstance(found, RaggedError)]  # fmt: skip
    expected = ["invalid", "an empty id", "damaged", "cut", "no bytes"]
    assert refused == ([*expected, "large"] if limits else expected)
    names = [name for name, found in zip(made, together, strict=True)
             if isinstance(found, Decoded)]  # fmt: skip
    grouped = {list(made)[number] for group in groups for number in group.members}
    assert grouped | {"no records"} == {*names, "no records"}
    good, (group,) = decode_together([pairs[0], pairs[1]], options)
    assert all(isinstance(found, Decoded) for found in good)
    assert group.members == [0, 1]
    assert group.whole.column("sample_id").to_pylist() == ["a", "b1", "b2", "b3"]


def test_totals_are_those_of_each_request(tmp_path):
    options = settings(tmp_path, max_request_records=3, max_request_tokens=20, max_record_tokens=20)
    budget = Budget(1 << 30)
    made = [
        batch("a", "b"),
        batch("c", "d", "e"),
        batch("f", "g", "h", "i"),
        batch("j", "k", tokens=11),
    ]
    pairs = []
    for one in made:
        data = stream(one)
        pairs.append((Body(bytearray(data), "arrow"), budget.reserve(len(data))))
    _, groups = decode_together(pairs[:2], options)
    assert [group.members for group in groups] == [[0, 1]]
    found, groups = decode_together(pairs, options)
    assert [group.members for group in groups] == [[0, 1]]
    assert [getattr(one, "limits", {}) for one in found[2:]] == [
        {"max_request_records": 3}, {"max_request_tokens": 20},
    ]  # fmt: skip


def test_jobs_that_wait_are_taken_together_and_told_one_by_one(tmp_path, monkeypatch):
    sizes, told, all_told = [], {}, threading.Event()
    entered, go = threading.Event(), threading.Event()

    def counted(pairs, options):
        sizes.append(len(pairs))
        return decode_together(pairs, options)

    def held(*arguments):
        entered.set()
        assert go.wait(30)
        return decode(*arguments)

    monkeypatch.setattr("ragged_server.http.decoders.decode_together", counted)
    monkeypatch.setattr("ragged_server.http.decoders.decode", held)
    decoders = Decoders(settings(tmp_path, decode_threads=1))
    budget, store = Budget(1 << 30), MemoryStore()
    made = {"first": stream(batch("first")), **bodies()}

    def job(name, data):
        def on_stored(appended, error, report):
            told[name] = error if appended is None else appended
            if len(told) == len(made):
                all_told.set()

        body = Body(bytearray(data), "arrow")
        return Job(body, budget.reserve(len(data)), store, None, None, on_stored)

    first, *rest = made.items()
    decoders.submit(job(*first))
    assert entered.wait(30)
    for name, data in rest:
        decoders.submit(job(name, data))
    go.set()
    assert all_told.wait(30)
    decoders.close()
    assert sizes == [11]
    assert told["first"].stored == told["one"].stored == 1
    assert told["several batches"].stored == 3
    assert isinstance(told["invalid"], InvariantError)
    assert (told["the same id"].stored, told["the same id"].duplicates) == (0, 1)


def test_a_fault_while_decoding_together_costs_nobody_an_answer(tmp_path, monkeypatch):
    def faulty(pairs, options):
        raise ZeroDivisionError

    told = {}
    monkeypatch.setattr("ragged_server.http.decoders.decode_together", faulty)
    decoders = Decoders(settings(tmp_path, decode_threads=1))
    decoders.close()
    budget, store = Budget(1 << 30), MemoryStore()

    def job(name):
        data = stream(batch(name))

        def on_stored(appended, error, report):
            told[name] = appended.stored

        body = Body(bytearray(data), "arrow")
        return Job(body, budget.reserve(len(data)), store, None, None, on_stored)

    decoders._work([job("a"), job("b")])
    assert told == {"a": 1, "b": 1}


def test_one_thread_has_the_small_bodies_and_others_the_large_ones(tmp_path, monkeypatch):
    sizes, told = [], {}
    entered, go, all_told = threading.Event(), threading.Event(), threading.Event()

    def held(job):
        if job.on_stored.name == "s0":
            entered.set()
            assert go.wait(30)
        return own(job)

    decoders = Decoders(settings(tmp_path, decode_threads=2))
    own, work = decoders._alone, decoders._work
    monkeypatch.setattr(decoders, "_alone", held)
    monkeypatch.setattr(decoders, "_work", lambda jobs: [sizes.append(len(jobs)), work(jobs)][1])
    budget, store = Budget(1 << 30), MemoryStore()

    class Told:
        def __init__(self, name):
            self.name = name

        def __call__(self, appended, error, report):
            told[self.name] = appended.stored
            if len(told) == 6:
                all_told.set()

    def submit(name, tokens=3):
        data = stream(batch(name, tokens=tokens))
        body = Body(bytearray(data), "arrow")
        decoders.submit(Job(body, budget.reserve(len(data)), store, None, None, Told(name)))
        return len(data)

    submit("s0")
    assert entered.wait(30)
    for number in range(1, 4):
        submit(f"s{number}")
    assert submit("large", tokens=20_000) > SMALL_BYTES
    wait_until(lambda: told == {"large": 1})
    submit("s4")
    go.set()
    assert all_told.wait(30)
    decoders.close()
    assert sizes == [1, 1, 4]
    assert told == dict.fromkeys(["s0", "s1", "s2", "s3", "s4", "large"], 1)
