"""What the ranks do in tests of hand-overs that go wrong, or end early."""

import datetime as dt
import time

import numpy as np
import torch
import torch.distributed as dist
from support.rank_jobs import head_case, head_results, packed_rows

from ragged_format.errors import RaggedError
from ragged_format.torch import RaggedBatch
from ragged_format.torch.distributed import broadcast_batch, scatter_rows, scatter_stream


def left_early(rank, world_size, phases=3, stop_after=2):
    """Loops that all ranks leave after the same step; whether each batch is the one sent."""
    right = []
    for phase in range(phases):
        sent = [packed_rows(world_size, seed=10 * phase + step) for step in range(5)]
        rows = iter(sent) if rank == 0 else None
        for step, batch in enumerate(scatter_stream(rows), 1):
            want = sent[step - 1][rank].column("target_ids")[0].as_py()
            right.append(batch["target_ids"].tolist() == want)
            if step == stop_after:
                break
    return right


def refused(rank, world_size):
    """Names of the errors that misuse gives, and whether a hand-over still works afterwards."""
    rows = packed_rows(world_size)
    part = dist.new_group([0], backend="gloo")
    stranger = RaggedBatch.from_arrow(rows[0])
    stranger.state = {"a": torch.ones(2)}
    calls = {
        "src beyond": lambda: scatter_rows(rows, src=world_size),
        "src negative": lambda: scatter_rows(rows, src=-1),
        "src text": lambda: scatter_rows(rows, src="x"),
        "src none": lambda: broadcast_batch(rows[0], src=None),
        "no group": lambda: scatter_rows(rows, group="x"),
        "not a member": lambda: scatter_rows(rows[:1] if rank == 0 else None, group=part).wait(),
        "no stream": lambda: list(scatter_stream(5 if rank == 0 else None)),
        "no step": lambda: list(scatter_stream(iter([5]) if rank == 0 else None)),
        "no state": lambda: scatter_rows([stranger] * 2 if rank == 0 else None).wait(),
    }
    out = {}
    for name, call in calls.items():
        try:
            call()
            out[name] = None
        except RaggedError as err:
            out[name] = type(err).__name__, bool(err.remedy)
    out["works"] = scatter_rows(rows if rank == 0 else None).wait().num_rows
    return out


def slow_source(rank, world_size):
    """The source needs longer for a row than the group's timeout."""
    group = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=1))

    def rows():
        yield packed_rows(world_size)
        time.sleep(3)
        yield packed_rows(world_size)

    try:
        return len(list(scatter_stream(rows() if rank == 0 else None, group=group)))
    except RaggedError as err:
        return type(err).__name__


def empty_shard(rank, world_size):
    """Whether the head agrees with the whole one where one rank holds none of the ids."""
    case = head_case(0)
    size = len(case["weight"])
    low, high = (0, size) if rank == 0 else (size, size)
    same = []
    for kernel in ("sparse", "gather"):
        for over in ("support", "vocabulary"):
            want = head_results(case, case["weight"], case["bias"], over, kernel=kernel)
            got = head_results(
                case, case["weight"][low:high], case["bias"][low:high], over, kernel=kernel,
                vocab_start=low, group=dist.group.WORLD,
            )  # fmt: skip
            whole = [*want[:4], want[4][low:high], want[5][low:high]]
            same += [np.allclose(a, b) for a, b in zip(got, whole, strict=True)]
    return same
