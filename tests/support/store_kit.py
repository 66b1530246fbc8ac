"""What tests of the server's store share: samples, requests, reading everything back."""

import numpy as np

from ragged_format.testing import rollouts
from ragged_server.store.prepare import prepare

ROOM = 64 << 20


def samples(count=4, *, seed=0, prefix="s", length=12, **options):
    rng = np.random.default_rng(seed)
    return rollouts(
        rng, num_samples=count, prompt_length=8, response_length=length, prefix=prefix, **options
    )


def request(batch, **options):
    return prepare(batch.schema, [batch], **options)


def everything(store, **options):
    """Return the batches of all pages, read to the end."""
    batches, cursor = [], None
    while True:
        page = store.read(cursor, max_bytes=ROOM, **options)
        batches += page.batches
        if page.cursor == cursor or not page.lag:
            return batches
        cursor = page.cursor


def ids_of(batches):
    return [name for batch in batches for name in batch.column("sample_id").to_pylist()]


def stored_ids(store, **options):
    return ids_of(everything(store, **options))
