"""What else takes samples from producers to a consumer: TransferQueue, and a queue of processes.

Neither writes anything to disk. TransferQueue gets and gives 16 samples a call as a TensorDict of
jagged tensors, from as many threads as suit it, on a Ray of this machine with its default storage;
the queue carries pickled dicts of numpy arrays from one process to another.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.ingest_load import samples
from ragged_format.lists import flat

__all__ = ["process_queue_s", "transfer_queue_s"]

NAMES = ("input_ids", "completion_mask", "rollout_log_probs", "candidate_counts", "candidate_ids")
THREADS = 4
BATCH = 16


def _arrays(count: int, tag: str) -> list[dict[str, Any]]:
    """Return samples as dicts of arrays."""
    batch = samples(count, tag)
    columns = [flat(batch.column(name)) for name in NAMES]
    out = []
    for row, name in enumerate(batch.column("sample_id").to_pylist()):
        arrays = {
            key: column.numpy()[column.offsets[row] : column.offsets[row + 1]]
            for key, column in zip(NAMES, columns, strict=True)
        }
        out.append({"sample_id": name, **arrays})
    return out


def process_queue_s(count: int) -> float:
    """Return seconds for so many samples through a `multiprocessing.Queue`."""
    context = multiprocessing.get_context("spawn")
    queue, back = context.Queue(), context.Queue()
    producer = context.Process(target=_relay, args=(queue, back, count))
    producer.start()
    back.get()
    queue.put(None)
    begin = time.perf_counter()
    for _ in range(count):
        back.get()
    seconds = time.perf_counter() - begin
    producer.join()
    return seconds


def _relay(start: Any, out: Any, count: int) -> None:
    made = _arrays(count, "queue")
    out.put("ready")
    start.get()
    for sample in made:
        out.put(sample)


def transfer_queue_s(batches: int, rounds: int) -> list[float] | None:
    """Return seconds for so many batches, put and got, by round; None if it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("transfer_queue", "ray")):
        return None
    command = [sys.executable, "-m", "benchmarks.ingest_queues", str(batches), str(rounds)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _transfer_queue(batches: int, rounds: int) -> list[float]:
    import torch

    # By name: none of them is among the dependencies.
    ray, tq = importlib.import_module("ray"), importlib.import_module("transfer_queue")
    tensors = importlib.import_module("tensordict").TensorDict
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init()
    rows = _arrays(BATCH, "tq")
    fields = tensors(
        {
            name: torch.nested.nested_tensor(
                [torch.from_numpy(row[name].copy()) for row in rows], layout=torch.jagged
            )
            for name in NAMES
        },
        batch_size=BATCH,
    )
    out = []
    with ThreadPoolExecutor(THREADS) as pool:
        for turn in range(rounds + 1):
            keys = [[f"{turn}-{n}-{row}" for row in range(BATCH)] for n in range(batches)]
            begin = time.perf_counter()
            list(pool.map(lambda own: tq.kv_batch_put(own, "p", fields=fields), keys))
            got = list(pool.map(lambda own: tq.kv_batch_get(own, "p"), keys))
            if turn:  # the first one warms up
                out.append(time.perf_counter() - begin)
            if not torch.equal(got[-1]["candidate_ids"][0], fields["candidate_ids"][0]):
                raise RuntimeError("what was got is not what was put")
            for own in keys:
                tq.kv_clear(own, "p")
    tq.close()
    ray.shutdown()
    return out


if __name__ == "__main__":
    print(json.dumps(_transfer_queue(int(sys.argv[1]), int(sys.argv[2]))))
