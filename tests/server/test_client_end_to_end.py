"""Producers push, a consumer tails, and both the server and the consumer are killed on the way."""

import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from support.containers import small_batch
from support.served import Served

from ragged_server.client import Client, Retries

CONSUMER = """
import sys
from pathlib import Path
from ragged_format.local_files import create
from ragged_server.client import Client
url, ledger, cursor = sys.argv[1:]
cursor = Path(cursor)
after = cursor.read_text() if cursor.exists() else None
with Client(url) as client:
    for page in client.tail(after, wait_s=1.0, max_bytes=4000):
        for number, batch in enumerate(page.batches):
            # One step of a consumer: samples and cursor become durable together.
            ids = batch.column("sample_id").to_pylist()
            name = Path(ledger) / page.cursors[number]
            with create(name) as file:
                file.write("\\n".join(ids).encode())
            with create(cursor) as file:
                file.write(page.cursors[number].encode())
"""
PRODUCERS, BATCHES, RECORDS = 8, 12, 5


@pytest.mark.timeout(300)  # four starts of a server take long on a busy machine
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 30))]
)
def test_every_sample_once_through_restarts(tmp_path, seed):
    chance = random.Random(seed)
    ledger, cursor = tmp_path / "ledger", tmp_path / "cursor"
    ledger.mkdir()
    acknowledged, errors = [], []
    server = Served(tmp_path / "live", "--segment-bytes", "20000", "--segment-age", "0.5s")

    def produce(number):
        client = Client(server.url, retries=Retries(for_s=300, most_s=0.2))
        try:
            with client:
                for turn in range(BATCHES):
                    batch = small_batch([6] * RECORDS, seed=turn, prefix=f"p{number}-{turn}")
                    pushed = client.push(batch, max_records=2, in_flight=2)
                    assert pushed.records == RECORDS
                    acknowledged.extend(batch.column("sample_id").to_pylist())
                    time.sleep(chance.random() * 0.2)
        except Exception as err:  # noqa: BLE001 - the test's own thread reports it
            errors.append(err)

    def consume():
        return subprocess.Popen(
            [sys.executable, "-c", CONSUMER, server.url, str(ledger), str(cursor)]
        )

    def seen():
        return [name for file in ledger.iterdir() if ".tmp-" not in file.name
                for name in file.read_text().splitlines()]  # fmt: skip

    with server, ExitStack() as stack:
        consumer = consume()
        stack.callback(lambda: (consumer.kill(), consumer.wait()))
        threads = [threading.Thread(target=produce, args=(n,)) for n in range(PRODUCERS)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.3 + chance.random() * 0.4)
            server.kill()
            if chance.random() < 0.7:
                consumer.kill()
                consumer.wait()
                consumer = consume()
            server.start()
        for thread in threads:
            thread.join()
        assert not errors, server.log.read_text()[-4000:]
        assert len(acknowledged) == PRODUCERS * BATCHES * RECORDS
        end = time.monotonic() + 60
        while len(seen()) < len(acknowledged) and time.monotonic() < end:
            time.sleep(0.1)
        with Client(server.url) as client:
            stored = [
                name
                for page in client.tail(follow=False)
                for batch in page.batches
                for name in batch.column("sample_id").to_pylist()
            ]
        assert server.stop() == 0
    assert sorted(seen()) == sorted(acknowledged)
    assert sorted(stored) == sorted(acknowledged)
    assert len(set(stored)) == len(stored)
