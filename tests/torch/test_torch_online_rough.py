"""Logs, states and callables that an on-line loader cannot use, and ids that come twice."""

import json
import threading
import time

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.packing import pack_row
from ragged_format.testing import rollouts
from ragged_format.torch import OnlineLoader
from ragged_format.torch.tail import Page

SAMPLES = rollouts(
    np.random.default_rng(5), num_samples=40, prompt_length=12, response_length=9, vocab_size=500,
    max_candidates=9, group_size=4,
)  # fmt: skip
BATCHES = [SAMPLES.slice(start, 5) for start in range(0, 40, 5)]
IDS = SAMPLES.column("sample_id").to_pylist()


class Pages:
    """A log that gives one batch at a time, or what a function makes of the cursor."""

    identity = "log://rough"

    def __init__(self, batches=(), page=None):
        self._batches, self._page = list(batches), page

    def read(self, after, *, wait_s):
        if self._page is not None:
            return self._page
        at = int(after or 0)
        return Page(self._batches[at : at + 1], str(at + 1), at + 1 >= len(self._batches))


def loader_of(log, budget=120, **options):
    return OnlineLoader(log, budget, prefetch=0, **options)


def members(rows):
    return [name for row in rows for name in row.strings("member_sample_id")]


PACKED = pack_row(BATCHES[0], null_advantage="keep")
NAMELESS = pa.RecordBatch.from_arrays(
    [pa.array(["a", None, *"cde"], pa.string()), *BATCHES[0].columns[1:]], schema=SAMPLES.schema
)


@pytest.mark.parametrize(
    "page",
    [
        None, 5, ([BATCHES[0]], "1"), Page(None, "1"), Page(BATCHES[0], "1"),
        Page([BATCHES[0]], 1), Page([None], "1"), Page([SAMPLES.to_pylist()], "1"),
        Page([pa.record_batch({"a": [1]})], "1"), Page([PACKED], "1"), Page([NAMELESS], "1"),
        Page([BATCHES[0].replace_schema_metadata(None)], "1", True),
    ],
)  # fmt: skip
def test_what_is_no_page_of_samples(page):
    with pytest.raises(rf.RaggedError) as caught:
        next(iter(loader_of(Pages(page=page or 0))))
    assert caught.value.remedy


@pytest.mark.parametrize("version", [None, "7", 7.5, float("nan")])
def test_a_version_that_is_none(version):
    options = {"max_staleness": 1, "current_version": lambda: version}
    with pytest.raises(rf.LimitExceededError, match="policy version"):
        next(iter(loader_of(Pages(BATCHES), **options)))


def test_the_identity_of_a_log_is_text():
    log = Pages(BATCHES)
    log.identity = 5
    with pytest.raises(rf.LimitExceededError, match="identity"):
        loader_of(log)


def stopped(log, steps, **options):
    """The ids of some steps, and the state after them."""
    loader = loader_of(log, **options)
    batches = iter(loader)
    got = [name for _, rows in zip(range(steps), batches, strict=False) for name in members(rows)]
    state = loader.state_dict()
    loader.close()
    return got, json.loads(json.dumps(state))


@pytest.mark.parametrize("steps", range(8))
def test_ids_that_come_twice_behind_the_cursor_are_delivered_once(steps):
    """What at-least-once producers do: the same samples again, while an early group waits."""
    rest = [SAMPLES.slice(start, 4) for start in range(4, 40, 4)]
    batches = [SAMPLES.slice(0, 3), *rest[:4], *rest[:2], *rest[4:], *rest[:5], SAMPLES.slice(3, 1)]
    got, state = stopped(Pages(batches), steps, group_size=4)
    again = loader_of(Pages(batches), 200, rows=2, group_size=4)
    again.load_state_dict(state)
    got += [name for rows in again for name in members(rows)]
    assert sorted(got) == sorted(IDS)


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": 5}, {"steps": -1}, {"steps": True}, {"steps": 1.0}, {"settled": None},
        {"settled": [1]}, {"log": "log://other"}, {"version": 2},
    ],
)  # fmt: skip
def test_states_that_were_edited(change):
    _, state = stopped(Pages(BATCHES), 2)
    with pytest.raises(rf.StateMismatchError) as caught:
        loader_of(Pages(BATCHES)).load_state_dict(state | change)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["kind", "version", "log", "cursor", "settled", "steps"])
def test_states_that_lack_a_part(name):
    _, state = stopped(Pages(BATCHES), 2)
    del state[name]
    with pytest.raises(rf.StateMismatchError):
        loader_of(Pages(BATCHES)).load_state_dict(state)


@pytest.mark.parametrize("cursor", ["abc", "-5", "", "1.0", "1_0", "999", "\u0663"])
def test_cursors_that_no_source_gave(tmp_path, cursor):
    path = tmp_path / "data"
    with rf.Writer(path, SAMPLES.schema) as writer:
        writer.write(SAMPLES)
    loader = loader_of(path)
    loader.load_state_dict(loader.state_dict() | {"cursor": cursor})
    with pytest.raises(rf.StateMismatchError):
        next(iter(loader))


def test_a_state_is_the_callers_own():
    loader = loader_of(Pages(BATCHES))
    batches = iter(loader)
    rows = next(batches)
    before = loader.state_dict()
    rows[0].state["settled"].clear()
    loader.state_dict()["settled"].append("x")
    assert loader.state_dict() == before
    loader.close()
    given = json.loads(json.dumps(before))
    loader.load_state_dict(given)
    given["settled"].clear()
    assert loader.state_dict() == before


def test_an_older_iterator_says_that_it_is_over():
    loader = loader_of(Pages(BATCHES))
    older = iter(loader)
    first = members(next(older))
    rest = [name for rows in loader for name in members(rows)]
    assert sorted(first + rest) == sorted(IDS)
    with pytest.raises(rf.StateMismatchError, match="one iteration at a time"):
        next(older)


def test_a_loader_that_waits_in_another_thread_can_be_closed():
    asked = threading.Event()

    def waiting(_, *, wait_s):
        asked.set()
        time.sleep(min(wait_s, 0.01))
        return Page([], None, False)

    log = Pages()
    log.read = waiting
    loader = loader_of(log)
    got = []
    thread = threading.Thread(target=lambda: got.extend(loader))
    thread.start()
    assert asked.wait(30)
    loader.close()
    thread.join(30)
    assert (thread.is_alive(), got) == (False, [])
