"""What is acknowledged, what is stored once, what is refused."""

import numpy as np
import pyarrow as pa
import pytest
from support.store_kit import ROOM, everything, ids_of, request, samples

import ragged_format as rf
from ragged_format.errors import SchemaMismatchError
from ragged_format.testing import assert_ragged_equal
from ragged_server.store.errors import (
    ClosedStoreError,
    ConflictError,
    CursorError,
    IdempotencyMismatchError,
    QueueFullError,
    QuotaExceededError,
    RepeatedIdError,
    StoreBusyError,
)
from ragged_server.store.prepare import prepare
from ragged_server.store.records import Quota, StoreSettings
from ragged_server.store.store import Store


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "live", StoreSettings()) as opened:
        yield opened


def test_records_come_back_as_they_were_sent(store):
    batch = samples(9)
    answer = store.append(request(batch)).result()
    page = store.read(None, max_bytes=ROOM)
    assert (answer.first_sequence, answer.stored, answer.duplicates) == (0, 9, 0)
    assert_ragged_equal(page.batches[0], batch, check_schema=True)
    assert page.cursor == answer.cursor
    assert page.lag == 0


def test_an_empty_log_gives_an_empty_page(store):
    page = store.read(None, max_bytes=ROOM)
    assert (page.batches, page.records, page.lag) == ((), 0, 0)
    assert store.read(page.cursor, max_bytes=ROOM).cursor == page.cursor


def test_a_request_without_records_is_answered(store):
    empty = samples(4).slice(0, 0)
    answer = store.append(request(empty)).result()
    assert (answer.stored, answer.duplicates) == (0, 0)
    assert store.schema is None


def test_sent_again_it_is_stored_once(store):
    batch = samples(5)
    first = store.append(request(batch)).result()
    again = store.append(request(batch)).result()
    assert (again.stored, again.duplicates) == (0, 5)
    assert again.cursor == first.cursor
    assert ids_of(everything(store)) == batch.column("sample_id").to_pylist()


def test_what_is_new_of_a_request_is_stored(store):
    batch = samples(8)
    store.append(request(batch.slice(2, 3))).result()
    answer = store.append(request(batch)).result()
    assert (answer.stored, answer.duplicates) == (5, 3)
    assert sorted(ids_of(everything(store))) == sorted(batch.column("sample_id").to_pylist())


def test_one_id_with_other_content_refuses_the_request(store):
    batch, other = samples(3), samples(3, seed=1)
    store.append(request(batch)).result()
    mixed = pa.Table.from_batches([samples(2, prefix="new"), other.slice(1, 1)])
    with pytest.raises(ConflictError, match=repr(other.column("sample_id")[1].as_py())) as caught:
        store.append(prepare(batch.schema, mixed.to_batches())).result()
    assert caught.value.where.row == 2
    assert len(ids_of(everything(store))) == 3
    assert store.status().conflicts == 1


def test_an_id_twice_in_one_request_is_refused():
    batch = samples(3)
    with pytest.raises(RepeatedIdError, match="also at row 1"):
        prepare(batch.schema, [batch, batch.slice(1, 1)])


def test_duplicates_and_conflicts_inside_one_group(tmp_path):
    # All wait before the writer starts, so that they are one group.
    batch, other = samples(4), samples(4, seed=3)
    with Store(tmp_path, StoreSettings()) as store:
        with store._changed:
            futures = [
                store.append(request(part)) for part in (batch, batch, other, batch.slice(1, 2))
            ]
        first, again, part = (futures[n].result() for n in (0, 1, 3))
        with pytest.raises(ConflictError):
            futures[2].result()
        assert (first.stored, again.duplicates, part.duplicates) == (4, 4, 2)
        assert store.status().commits == 1
        assert len(ids_of(everything(store))) == 4


def test_the_first_request_fixes_the_columns(store):
    batch = samples(2)
    store.append(request(batch)).result()
    other = samples(2, columns=["group_id"], prefix="x")
    with pytest.raises(SchemaMismatchError) as caught:
        store.append(request(other)).result()
    assert caught.value.code == "RF-S010"
    with pytest.raises(SchemaMismatchError):
        prepare(other.schema, [other], log_schema=store.schema)
    with pytest.raises(SchemaMismatchError):
        prepare(other.schema, [], log_schema=store.schema)


def test_columns_may_be_fixed_beforehand(tmp_path):
    batch = samples(2)
    settings = StoreSettings(schema=rf.sample_schema(vocab_size=99, columns=[]))
    with Store(tmp_path, settings) as store, pytest.raises(SchemaMismatchError):
        store.append(request(batch)).result()


def test_packed_rows_are_no_samples():
    schema = rf.packed_schema(vocab_size=99, columns=[])
    with pytest.raises(SchemaMismatchError, match="samples"):
        prepare(schema, [])


def test_a_key_gives_its_first_answer_again_even_after_a_restart(tmp_path):
    batch = samples(3)
    with Store(tmp_path, StoreSettings()) as store:
        first = store.append(request(batch, idempotency_key="k", account="a")).result()
        again = store.append(request(batch, idempotency_key="k", account="a")).result()
        assert (first.replayed, again.replayed) == (False, True)
        assert (again.stored, again.duplicates, again.cursor) == (3, 0, first.cursor)
        with pytest.raises(IdempotencyMismatchError):
            store.append(request(samples(1, prefix="z"), idempotency_key="k", account="a")).result()
        # Another account's key is another key.
        other = store.append(request(batch, idempotency_key="k", account="b")).result()
        assert (other.replayed, other.duplicates) == (False, 3)
    with Store(tmp_path, StoreSettings()) as store:
        assert store.append(request(batch, idempotency_key="k", account="a")).result() == again
        with pytest.raises(IdempotencyMismatchError):
            store.append(request(samples(1, prefix="z"), idempotency_key="k", account="b")).result()


def test_a_key_twice_in_one_group_is_answered_once(tmp_path):
    batch = samples(3)
    with Store(tmp_path, StoreSettings()) as store:
        with store._changed:
            pair = [store.append(request(batch, idempotency_key="k")) for _ in range(2)]
            wrong = store.append(request(samples(1, prefix="z"), idempotency_key="k"))
        assert [future.result().replayed for future in pair] == [False, True]
        with pytest.raises(IdempotencyMismatchError):
            wrong.result()


@pytest.mark.parametrize(
    ("entries", "window"), [(1, 1e6), (100, 10.0)], ids=["too many", "too old"]
)
def test_keys_are_forgotten(tmp_path, entries, window):
    now = [1000.0]
    settings = StoreSettings(idempotency_entries=entries, idempotency_window_s=window)
    with Store(tmp_path, settings, clock=lambda: now[0]) as store:
        store.append(request(samples(1), idempotency_key="old")).result()
        now[0] += 20
        store.append(request(samples(1, prefix="b"), idempotency_key="new")).result()
        answer = store.append(request(samples(1, prefix="c"), idempotency_key="old")).result()
        assert (answer.replayed, answer.stored) == (False, 1)


def test_a_quota_holds_over_windows_and_restarts(tmp_path):
    now = [1000.0]
    quotas = {"a": Quota(records=5, window_s=100.0), "*": Quota(bytes=1, window_s=100.0)}
    settings = StoreSettings(quotas=quotas)

    def opened():
        return Store(tmp_path, settings, clock=lambda: now[0])

    with opened() as store:
        store.append(request(samples(4), account="a")).result()
        # Duplicates cost nothing, and who has no account has no quota.
        store.append(request(samples(4), account="a")).result()
        store.append(request(samples(4, prefix="free"))).result()
        with pytest.raises(QuotaExceededError, match="records") as caught:
            store.append(request(samples(2, prefix="b"), account="a")).result()
        assert 0 < caught.value.retry_after_s <= 100
        with pytest.raises(QuotaExceededError, match="bytes"):
            store.append(request(samples(1, prefix="c"), account="other")).result()
    with opened() as store:
        with pytest.raises(QuotaExceededError):
            store.append(request(samples(2, prefix="b"), account="a")).result()
        now[0] += 100
        assert store.append(request(samples(2, prefix="b"), account="a")).result().stored == 2


def test_the_quota_counts_the_requests_of_its_own_group(tmp_path):
    settings = StoreSettings(quotas={"a": Quota(records=5)})
    with Store(tmp_path, settings) as store:
        with store._changed:
            futures = [
                store.append(request(samples(3, prefix=name), account="a")) for name in "xyz"
            ]
        assert futures[0].result().stored == 3
        for future in futures[1:]:
            with pytest.raises(QuotaExceededError):
                future.result()


def test_a_full_queue_refuses(tmp_path):
    with Store(tmp_path, StoreSettings(queue_requests=2)) as store:
        with store._changed:
            futures = [store.append(request(samples(1, prefix=name))) for name in "ab"]
            with pytest.raises(QueueFullError) as caught:
                store.append(request(samples(1, prefix="c")))
        assert caught.value.retry_after_s == 1.0
        assert [future.result().stored for future in futures] == [1, 1]


def test_a_closed_store_takes_nothing_and_has_answered_all(tmp_path):
    store = Store(tmp_path, StoreSettings())
    with pytest.raises(ClosedStoreError):
        store.append(request(samples(1)))
    store.open()
    futures = [store.append(request(samples(1, prefix=f"p{n}-"))) for n in range(50)]
    store.close()
    assert [future.result().stored for future in futures] == [1] * 50
    with pytest.raises(ClosedStoreError):
        store.append(request(samples(1)))
    store.close()


def test_two_stores_on_one_directory_are_an_error(tmp_path):
    with Store(tmp_path, StoreSettings()):
        second = Store(tmp_path, StoreSettings())
        with pytest.raises(StoreBusyError, match="another server"):
            second.open()
    with Store(tmp_path, StoreSettings()) as again:
        assert again.status().records == 0


@pytest.mark.parametrize("cursor", ["", "x", "ÄÖ", "AQ", "A" * 29, None], ids=repr)
def test_malformed_cursors_are_refused(store, cursor):
    if cursor is None:
        cursor = store.read(None, max_bytes=1).cursor[:-1] + "!"
    with pytest.raises(CursorError) as caught:
        store.read(cursor, max_bytes=1)
    assert caught.value.code == "RF-H105"


def test_cursors_of_another_log_and_from_the_future_are_refused(store, tmp_path):
    with Store(tmp_path / "other", StoreSettings()) as other:
        other.append(request(samples(2))).result()
        cursor = other.read(None, max_bytes=ROOM).cursor
    with pytest.raises(CursorError, match="another log"):
        store.read(cursor, max_bytes=1)
    with pytest.raises(CursorError, match="beyond the end"):
        store.read(store._cursor(1), max_bytes=1)


def test_waiting_ends_with_a_commit_or_the_time(store):
    start = store.read(None, max_bytes=1).cursor
    assert not store.wait(start, 0.01)
    calls = []
    end = store.subscribe(lambda: calls.append(1))
    future = store.append(request(samples(1)))
    assert store.wait(start, 30)
    future.result()
    end()
    store.append(request(samples(1, prefix="b"))).result()
    assert calls == [1]


def test_compressed_and_foreign_messages_are_encoded_anew(store):
    batch = samples(3)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    compressed = batch.serialize()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={"ragged_format:commit": "{}"})
    stream = sink.getvalue()
    start = len(batch.schema.serialize())
    hostile = prepare(
        batch.schema, [batch], messages=[stream.slice(start, stream.size - start - 8)]
    )
    plain = prepare(batch.schema, [batch], messages=[compressed])
    ours = prepare(batch.schema, [batch])
    assert hostile.messages[0].equals(ours.messages[0])
    assert plain.messages[0].equals(ours.messages[0])
    kept = prepare(batch.schema, [batch], messages=ours.messages)
    assert kept.messages[0].address == ours.messages[0].address
    store.append(hostile).result()
    assert_ragged_equal(everything(store)[0], batch)


def test_one_record_and_many_have_the_same_digests():
    batch = samples(5)
    whole = request(batch)
    parts = [request(batch.slice(row, 1)) for row in range(5)]
    for name in ("id_digests", "record_digests", "share_hashes", "policy_versions"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(joined, getattr(whole, name))
    assert np.array_equal(whole.record_digests, rf.record_digests(batch))


def test_status_counts_what_was_stored(store):
    batch = samples(6)
    store.append(request(batch)).result()
    store.append(request(batch)).result()
    status = store.status()
    masks = batch.column("completion_mask").flatten().to_numpy()
    widths = batch.column("candidate_counts").flatten().to_numpy()
    assert (status.stored, status.duplicates, status.records) == (6, 6, 6)
    assert (status.tokens, status.scored_tokens) == (len(masks), int(masks.sum()))
    assert sum(status.set_widths) == len(widths)
    assert status.set_widths[1] == int((widths == 1).sum())
    assert status.set_widths[2] == int(((widths == 2) | (widths == 3)).sum())
    versions = batch.column("policy_version").drop_null().to_pylist()
    assert sum(status.staleness) == len(versions)
    assert status.policy_version == max(versions)
    assert status.to_dict()["recovery"]["records"] == 0
