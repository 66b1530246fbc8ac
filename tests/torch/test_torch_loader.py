"""The loader: what it delivers, epochs, options, errors."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format import (
    ChecksumError,
    InvariantError,
    LimitExceededError,
    MissingShardError,
    RaggedError,
    SchemaMismatchError,
    StateMismatchError,
)
from ragged_format.files import write_file
from ragged_format.testing import in_sequence, packed_batches, sample_batches
from ragged_format.torch import RaggedBatch, RaggedLoader
from ragged_format.torch.arena import Slot
from ragged_format.torch.transfer import Transfer


def ids_of(loader):
    return [batch.strings("sample_id") for batch in loader]


def joined(lists):
    return [item for part in lists for item in part]


def assert_same(batch, expected):
    reference = RaggedBatch.from_arrow(expected, columns=batch.keys())
    for name in batch:
        assert batch[name].numpy().tobytes() == reference[name].numpy().tobytes()
        assert batch.valid(name).tolist() == reference.valid(name).tolist()
        if reference.schema[name].fill is None:
            assert batch.strings(name) == reference.strings(name)
    for axis in batch.plan.axes[1:]:
        assert batch.offsets(axis).tolist() == reference.offsets(axis).tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("verify", [False, True])
def test_batches_of_a_dataset_in_order(samples, dataset_path, prefetch, verify):
    with RaggedLoader(dataset_path, 5, prefetch=prefetch, verify=verify) as loader:
        at = 0
        for batch in loader:
            assert_same(batch, samples.slice(at, 5))
            at += batch.num_rows
        assert at == loader.num_rows == 37
        assert len(loader) == 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_shuffled_batches_hold_the_records_that_their_ids_name(samples, dataset_path, prefetch):
    place = {name: row for row, name in enumerate(samples.column("sample_id").to_pylist())}
    with RaggedLoader(dataset_path, 4, shuffle=True, prefetch=prefetch) as loader:
        seen = []
        for batch in loader:
            names = batch.strings("sample_id")
            assert_same(batch, rf.take(samples, [place[name] for name in names]))
            seen += names
    assert sorted(seen) == sorted(place)
    assert seen != list(place)


@given(record_batch=st.one_of(sample_batches(min_rows=1), packed_batches()), data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_records_shuffled_or_not(record_batch, data):
    rows = record_batch.num_rows
    cut = data.draw(st.integers(0, rows))
    size = data.draw(st.integers(1, 4))
    parts = [record_batch.slice(0, cut), record_batch.slice(cut)]
    for shuffle in (False, True):
        loader = RaggedLoader(parts, size, shuffle=shuffle, prefetch=0)
        order = loader._producer
        at = 0
        for batch in loader:
            picked = [
                int(r)
                for r in order_of(order, shuffle=shuffle)[at : at + batch.num_rows]
            ]  # fmt: skip
            assert_same(batch, rf.take(record_batch, picked))
            at += batch.num_rows
        assert at == rows


def order_of(producer, *, shuffle, epoch=0):
    from ragged_format.torch.order import EpochOrder

    identity = producer.identity
    order = EpochOrder(
        identity.num_rows, shuffle=shuffle, fingerprint=identity.fingerprint,
        seed=identity.seed, epoch=epoch,
    )  # fmt: skip
    return order[0 : identity.num_rows].tolist()


def test_files_and_batches_in_memory_are_sources_too(samples, tmp_path):
    path = tmp_path / "one.arrow"
    write_file(path, [samples.slice(0, 10), samples.slice(10, 0), samples.slice(10)])
    table = pa.Table.from_batches([samples.slice(0, 9), samples.slice(9)])
    sources = [path, str(path), rf.read_file(path), samples, table, [samples]]
    for source in sources:
        assert joined(ids_of(RaggedLoader(source, 7))) == samples.column("sample_id").to_pylist()


def test_a_dataset_object_keeps_its_snapshot(samples, dataset_path):
    dataset = rf.Dataset(dataset_path, columns=["input_ids"])
    more = samples.slice(0, 1).set_column(0, samples.field(0), pa.array(["new"]))
    with rf.Writer(dataset_path, samples.schema, mode="append") as writer:
        writer.write(more)
    old, new = RaggedLoader(dataset), RaggedLoader(dataset_path)
    assert (old.num_rows, new.num_rows) == (37, 38)
    assert list(old.schema.columns) == ["input_ids"]
    assert old.state_dict()["fingerprint"] != new.state_dict()["fingerprint"]


def test_an_empty_source_has_no_batches(samples, tmp_path):
    with rf.Writer(tmp_path / "empty", samples.schema):
        pass
    empty = pa.Table.from_batches([], schema=samples.schema)
    for source in (tmp_path / "empty", empty, samples.slice(0, 0)):
        for tail in ("keep", "drop", "pad"):
            loader = RaggedLoader(source, 4, shuffle=True, tail=tail)
            assert len(loader) == 0
            assert list(loader) == []


def test_only_the_columns_wanted_are_loaded(dataset_path):
    loader = RaggedLoader(dataset_path, 8, ["candidate_ids"])
    assert list(loader.schema.columns) == ["completion_mask", "candidate_counts", "candidate_ids"]
    assert next(iter(loader)).keys() == list(loader.schema.columns)


def test_a_wanted_column_that_is_missing_is_an_error_at_once(dataset_path):
    """NousResearch/atropos#456: a requested teacher column was dropped silently."""
    with pytest.raises(SchemaMismatchError) as caught:
        RaggedLoader(dataset_path, columns=["teacher_topk_ids"])
    assert caught.value.code == "RF-S003"
    assert "topk_ids" in str(caught.value)


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_deliver_the_dataset(samples, dataset_path, world_size, tail):
    """huggingface/datasets#7868: duplicates across ranks."""
    names = samples.column("sample_id").to_pylist()
    counts, seen = [], []
    for rank in range(world_size):
        loader = RaggedLoader(
            dataset_path, 4, shuffle=True, rank=rank, world_size=world_size, tail=tail
        )
        batches = list(loader)
        counts.append(len(batches))
        assert len(loader) == len(batches)
        for batch in batches:
            taken = batch.num_rows - batch.num_repeated
            assert batch.num_repeated >= 0
            seen += batch.strings("sample_id")[:taken]
            if tail != "keep":
                assert batch.num_rows == 4
    assert len(set(seen)) == len(seen)
    if tail == "drop":
        assert len(seen) == 37 // (4 * world_size) * 4 * world_size
    else:
        assert sorted(seen) == sorted(names)
    assert tail == "keep" or len(set(counts)) == 1


def test_padding_repeats_the_beginning_of_the_epoch(samples):
    few = samples.slice(0, 3)
    names = few.column("sample_id").to_pylist()
    for shuffle in (False, True):
        (batch,) = RaggedLoader(few, 8, shuffle=shuffle, tail="pad")
        got = batch.strings("sample_id")
        assert got == (got[:3] * 3)[:8]
        assert sorted(got[:3]) == sorted(names)
        assert batch.num_repeated == 5
        assert_same(batch, rf.take(few, [names.index(name) for name in got]))


def test_a_short_tail_leaves_some_ranks_one_batch_fewer(samples):
    loaders = [RaggedLoader(samples, 5, rank=rank, world_size=7) for rank in range(7)]
    assert [len(loader) for loader in loaders] == [2, 2, 1, 1, 1, 1, 1]


def test_every_iteration_is_the_next_epoch(dataset_path):
    """huggingface/datasets#6673: the same shuffle in every epoch."""
    loader = RaggedLoader(dataset_path, 4, shuffle=True, seed=5)
    epochs = [joined(ids_of(loader)) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({frozenset(epoch) for epoch in epochs}) == 1
    again = RaggedLoader(dataset_path, 9, shuffle=True, seed=5)
    for wanted in (2, 0, 1):
        again.set_epoch(wanted)
        assert joined(ids_of(again)) == epochs[wanted]
    assert joined(ids_of(again)) == epochs[2]
    other = RaggedLoader(dataset_path, 4, shuffle=True, seed=6)
    assert joined(ids_of(other)) != epochs[0]


def test_an_abandoned_epoch_is_over(dataset_path):
    loader = RaggedLoader(dataset_path, 4, shuffle=True)
    first = next(iter(loader)).strings("sample_id")
    second = joined(ids_of(loader))
    fresh = RaggedLoader(dataset_path, 4, shuffle=True)
    assert ids_of(fresh)[0] == first
    assert joined(ids_of(fresh)) == second


def test_breaking_off_ends_the_thread(dataset_path):
    loader = RaggedLoader(dataset_path, 1)
    for _ in loader:
        break
    gc.collect()
    assert all(thread.name != "ragged-loader" for thread in threading.enumerate())
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert list(iterator) == []
    assert len(list(loader)) == 37


def test_an_older_iterator_says_that_it_is_over(dataset_path):
    for prefetch in (0, 2):
        loader = RaggedLoader(dataset_path, 4, prefetch=prefetch)
        old = iter(loader)
        next(old)
        new = iter(loader)
        with pytest.raises(StateMismatchError, match="later iteration"):
            next(old)
        assert next(new).strings("sample_id") == next(iter(RaggedLoader(
            dataset_path, 4))).strings("sample_id")  # fmt: skip
        loader.close()


def test_a_shard_that_is_gone_is_raised_in_the_consumer(dataset_path):
    loader = RaggedLoader(dataset_path, 4)
    shards = [dataset_path / shard.name for shard in rf.Dataset(dataset_path).shards]
    shards[1].unlink()
    with pytest.raises(MissingShardError):
        list(loader)
    with pytest.raises(MissingShardError):
        list(RaggedLoader(dataset_path, 4, shuffle=True))


def test_a_damaged_shard_is_found_when_verifying(samples, tmp_path):
    path = tmp_path / "one.arrow"
    write_file(path, [samples])
    content = bytearray(path.read_bytes())
    ids = np.array(samples.column("input_ids")[0].as_py(), np.int32).tobytes()
    content[content.index(ids)] ^= 1
    path.write_bytes(content)
    assert len(list(RaggedLoader(path, 4))) == 10
    with pytest.raises(ChecksumError) as caught:
        list(RaggedLoader(path, 4, verify=True))
    assert caught.value.where.file == str(path)


def test_an_error_ends_the_iteration_not_the_loader(samples):
    loader = RaggedLoader(samples, 4)
    original = loader._producer.records.view

    class BrokenError(Exception):
        pass

    def failing(key):
        raise BrokenError

    loader._producer.records.view = failing
    iterator = iter(loader)
    with pytest.raises(BrokenError):
        next(iterator)
    assert list(iterator) == []
    loader._producer.records.view = original
    assert len(list(loader)) == 10


def test_lists_that_disagree_are_found(samples):
    mask = samples.column("completion_mask")
    wrong = pa.LargeListArray.from_arrays(
        pa.array(np.zeros(38, np.int64)), mask.values[:0], type=mask.type
    )
    bad = samples.set_column(
        samples.schema.get_field_index("completion_mask"), samples.field("completion_mask"), wrong
    )
    loader = RaggedLoader(samples, 4)
    loader._producer.records._shards.reader(0)._batch = lambda index: bad
    with pytest.raises(InvariantError) as caught:
        next(iter(loader))
    assert caught.value.code == "RF-I003"


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0}, {"rank": 2, "world_size": 2}, {"rank": -1}, {"world_size": 0},
        {"prefetch": -1}, {"tail": "loose"},
    ],
)  # fmt: skip
def test_options_out_of_range(samples, options):
    with pytest.raises(LimitExceededError) as caught:
        RaggedLoader(samples, **options)
    assert next(iter(options)).split("_")[0] in str(caught.value)
    with pytest.raises(LimitExceededError):
        RaggedLoader(samples).set_epoch(-1)


def test_sources_that_are_none(tmp_path):
    with pytest.raises(rf.DatasetNotFoundError):
        RaggedLoader(tmp_path / "nothing")
    with pytest.raises(SchemaMismatchError):
        RaggedLoader([])


def test_batches_in_memory_have_one_schema(samples):
    with pytest.raises(SchemaMismatchError) as caught:
        RaggedLoader([samples, samples.drop_columns(["reward"])])
    assert caught.value.where.batch == 1


def test_packed_rows(samples, tmp_path):
    packed = in_sequence(samples, [7, 1, 29])
    with rf.Writer(tmp_path / "packed", packed.schema) as writer:
        writer.write(packed)
    rows = list(RaggedLoader(tmp_path / "packed"))
    assert [row.lengths_host("member").tolist() for row in rows] == [[7], [1], [29]]
    for number, row in enumerate(rows):
        assert_same(row, packed.slice(number, 1))


def test_few_views_are_kept(samples, monkeypatch):
    monkeypatch.setattr("ragged_format.torch.kept_views._MAPPED", 2)
    parts = [samples.slice(row, 1) for row in range(37)]
    loader = RaggedLoader(parts, 3, shuffle=True)
    assert sorted(joined(ids_of(loader))) == sorted(samples.column("sample_id").to_pylist())
    assert len(loader._producer.records.kept.mapped) == 2


def test_a_fork_within_an_iteration_is_an_error(samples, monkeypatch):
    loader = RaggedLoader(samples)
    iterator = iter(loader)
    monkeypatch.setattr("ragged_format.torch.loader.os.getpid", lambda: -1)
    with pytest.raises(RaggedError, match="fork"):
        next(iterator)


def test_a_program_that_forgets_to_close_ends(dataset_path):
    code = (
        "from ragged_format.torch import RaggedLoader\n"
        f"iterator = iter(RaggedLoader({str(dataset_path)!r}, 2))\n"
        "print(next(iterator).num_rows)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


class FakeStream:
    def __init__(self):
        self.log = []

    def record_event(self):
        return "copied"

    def wait_event(self, event):
        self.log.append(event)


def test_copies_run_on_a_stream_of_their_own(samples, monkeypatch):
    """The order of calls on an accelerator, without one."""
    side, main = FakeStream(), FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    entered = []

    class Entered:
        def __init__(self, stream):
            entered.append(stream)

        def __enter__(self):
            return None

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(torch.cuda, "stream", Entered)
    transfer = Transfer(torch.device("cuda", 0))
    assert transfer.pins
    batch = RaggedBatch.from_arrow(samples)
    calls = []
    monkeypatch.setattr(
        RaggedBatch, "to", lambda self, device, non_blocking: calls.append(non_blocking) or self
    )
    monkeypatch.setattr(RaggedBatch, "record_stream", lambda self, stream: calls.append(stream))
    moved, copied = transfer.start(batch)
    assert (entered, calls, copied) == ([side], [True], "copied")
    assert transfer.finish(moved, copied) is moved
    assert main.log == ["copied"]
    assert calls == [True, main]


def test_a_copy_to_cuda_holds_the_slot(samples, monkeypatch):
    class Event:
        def record(self, stream):
            self.stream = stream

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    slot = Slot(torch.empty(8, dtype=torch.uint8))
    batch = RaggedBatch.from_arrow(samples)
    batch._slot = slot
    batch.to("meta", non_blocking=True)
    assert [event.stream for event in slot.events] == ["stream"]


def test_the_device_is_where_batches_go(samples):
    batch = next(iter(RaggedLoader(samples, 4, device="meta")))
    assert batch.device.type == "meta"
    assert batch.strings("sample_id") == samples.column("sample_id").to_pylist()[:4]
