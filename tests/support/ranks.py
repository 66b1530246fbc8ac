"""Run a function on several processes joined by gloo, and return what each of them returned."""

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

TIMEOUT_S = 100


def _run(job, rank, world_size, store, connection, args, together):
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # What launchers set, for libraries that look.
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        result = job(rank, world_size, *args)
        if together:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001
        connection.send((False, traceback.format_exc()))
        return
    connection.send((True, result))


def run_ranks(world_size, job, *args, together=True):
    """Return ``[job(rank, world_size, *args) for each rank]``; `job` lies in an importable module.

    A rank that fails or hangs fails the test; no process is left. Unless they end `together`, a
    rank may exit at any time, and its result is None.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_run,
                args=(job, rank, world_size, store, there, args, together),
                daemon=True,
            )
            process.start()
            there.close()
            ranks.append((process, here))
        results, failures = [], []
        try:
            for rank, (_, here) in enumerate(ranks):
                if not here.poll(TIMEOUT_S if not failures else 1):
                    failures.append(f"rank {rank} hangs")
                    continue
                try:
                    done, result = here.recv()
                except EOFError:
                    done, result = not together, None
                results.append(result)
                if not done:
                    failures.append(f"rank {rank}: {result}")
        finally:
            for process, here in ranks:
                if failures:
                    process.kill()
                process.join()
                here.close()
        if failures:
            raise AssertionError("\n".join(failures))
    return results
