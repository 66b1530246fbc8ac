"""What tests of sealing and retention share."""

import time

from support.store_kit import request, samples

from ragged_server.store.records import StoreSettings

SMALL = StoreSettings(segment_records=8, grace_s=0.0, batch_rows=5)


def settled(store, condition, timeout_s=30):
    """Wait for the upkeep until something holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, store.status()
        store._upkeep.wake()
        time.sleep(0.005)


def fill(store, groups=6, size=4, start=0, **options):
    for number in range(start, start + groups):
        store.append(request(samples(size, prefix=f"g{number}-", **options))).result()


def sealed(store, shards):
    settled(store, lambda: len(store._log.shards) >= shards)
