"""Kill a server under load again and again, and compare it with what its clients know."""

import http.client
import random
import sys
import threading
import time
from contextlib import closing

import numpy as np
from support.containers import small_batch, stream_bytes

from ragged_format.digest import record_digests
from ragged_server.client import Client

ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}


class Ledger:
    """What the clients sent, and what the server acknowledged; digests by sample_id."""

    def __init__(self):
        self.sent = {}
        self.acknowledged = set()
        self.unsure = []
        self.refused = []
        self.lock = threading.Lock()

    def check(self, url):
        """Return (acknowledged records that are lost or differ, records that are there twice)."""
        found = {}
        records = 0
        with Client(url) as client:
            for page in client.tail(follow=False, max_bytes=32 << 20):
                for batch in page.batches:
                    names = batch.column("sample_id").to_pylist()
                    found.update(zip(names, digests_of(batch), strict=True))
                    records += batch.num_rows
        assert set(found) <= set(self.sent), "records that nobody sent"
        assert all(self.sent[name] == digest for name, digest in found.items())
        return len(self.acknowledged - set(found)), records - len(found)


def digests_of(batch):
    return [row.tobytes() for row in record_digests(batch)]


class Producers:
    """Threads that post requests until they are told to stop or the server is gone."""

    def __init__(self, port, ledger, trial, *, count=6, seed=0):
        self._port = port
        self._ledger = ledger
        self._stopped = threading.Event()
        self.fed_up = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(f"t{trial}-p{n}", random.Random(seed + n)))
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, name, chance):
        ledger = self._ledger
        number = 0
        # What was never answered is sent again, some of it, as any client would.
        with ledger.lock:
            again, ledger.unsure[:] = ledger.unsure[:3], ledger.unsure[3:]
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            while not self._stopped.is_set():
                if again:
                    batch = again.pop()
                else:
                    rows = chance.randrange(1, 5)
                    lengths = np.random.default_rng(number).integers(1, 60, rows).tolist()
                    batch = small_batch(lengths, seed=number, prefix=f"{name}-{number}-")
                    number += 1
                names = batch.column("sample_id").to_pylist()
                with ledger.lock:
                    ledger.sent.update(zip(names, digests_of(batch), strict=True))
                try:
                    connection.request("POST", "/v1/samples", stream_bytes([batch]), ARROW)
                    answer = connection.getresponse()
                    text = answer.read()
                except (OSError, http.client.HTTPException):
                    connection.close()
                    with ledger.lock:
                        ledger.unsure += [batch, *again]
                    self.fed_up.set()
                    if chance.random() < 0.5:
                        return
                    again = []
                    time.sleep(0.02)
                    continue
                with ledger.lock:
                    if answer.status in (200, 201):
                        ledger.acknowledged.update(names)
                    else:
                        ledger.unsure.append(batch)
                        if answer.status != 503:
                            ledger.refused.append((answer.status, text))


def run_trials(server, trials, *, seed=0, kill=None, least_s=0.05, most_s=1.5):
    """Kill a server under load so many times; return (acknowledged, lost, twice).

    Parameters
    ----------
    server : Served
        Not running; it is afterwards.
    trials : int
    seed : int
        Of all random choices.
    kill : callable, optional
        Takes the server and a random generator, and kills what is to be killed in it; it returns
        whether the server is gone. By default, its process.
    least_s, most_s : float
        Bounds of the time under load.
    """
    chance = random.Random(seed)
    ledger = Ledger()
    server.start()
    lost = twice = 0
    for trial in range(trials):
        before = len(ledger.acknowledged)
        producers = Producers(server.port, ledger, trial, seed=1000 * trial + seed)
        time.sleep(least_s + chance.random() * (most_s - least_s))
        if kill is None or kill(server, chance):
            server.kill()
            server.start()
        producers.stop()
        assert not ledger.refused, ledger.refused[0]
        missing, again = ledger.check(server.url)
        lost, twice = lost + missing, twice + again
        got = len(ledger.acknowledged) - before
        sys.stdout.write(f"trial {trial}: {got} acknowledged, {missing} lost, {again} twice\n")
        sys.stdout.flush()
    return len(ledger.acknowledged), lost, twice
