"""What the ranks of distributed tests do; importable, so that it reaches spawned processes."""

import json
import os
import signal
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

from ragged_format.testing import rollouts
from ragged_format.torch import head_log_probs, support_log_probs


def head_case(seed, vocabulary=40, width=6, targets=12):
    """A problem with full, narrow and wide sets, heads, and a bias; float64."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 3, 9, vocabulary], targets)
    sets = [np.sort(rng.choice(vocabulary, size, replace=False)) for size in sizes]
    labels = [rng.choice(s) if len(s) else rng.integers(vocabulary) for s in sets]
    heads = [rng.choice(vocabulary, rng.integers(0, 5), replace=False) for _ in range(targets)]
    generator = torch.Generator().manual_seed(seed)
    normal = {"dtype": torch.float64, "generator": generator}
    return {
        "hidden": torch.randn(7, width, **normal),
        "weight": torch.randn(vocabulary, width, **normal),
        "bias": torch.randn(vocabulary, **normal),
        "upstream": torch.randn(2, targets, **normal),
        "pred_index": torch.tensor(rng.integers(0, 7, targets)),
        "target_ids": torch.tensor(np.array(labels)),
        "candidate_ids": torch.tensor(np.concatenate(sets)),
        "candidate_counts": torch.tensor(sizes),
        "head_ids": torch.tensor(np.concatenate(heads)),
        "head_counts": torch.tensor([len(head) for head in heads]),
    }


def head_results(case, weight, bias, over, **options):
    """Log-probs, entropy and heads, then gradients of hidden, weight and bias, as arrays."""
    hidden = case["hidden"].clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    bias = bias.clone().requires_grad_()
    sets = [case[k] for k in ("pred_index", "target_ids", "candidate_ids", "candidate_counts")]
    log_probs, entropy = support_log_probs(
        hidden, weight, *sets, 1.3, over, bias=bias, soft_cap=5.0, **options
    )
    again, heads = head_log_probs(
        hidden, weight, *sets, case["head_ids"], case["head_counts"], bias=bias, **options
    )
    kept = heads > -1000
    loss = (torch.stack([log_probs, entropy]) * case["upstream"]).sum()
    loss = loss + (again * case["upstream"][0]).sum() + heads.where(kept, 0).sum()
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    return [tensor.detach().numpy() for tensor in (log_probs, entropy, heads, *grads)]


def sharded_head(rank, world_size, seeds, over):
    """Every rank holds a range of the vocabulary."""
    out = []
    for seed in seeds:
        case = head_case(seed)
        bounds = np.linspace(0, len(case["weight"]), world_size + 1).astype(int)
        bounds[1:-1] += 3  # not the same size
        low, high = int(bounds[rank]), int(bounds[rank + 1])
        weight, bias = case["weight"][low:high], case["bias"][low:high]
        options = {"vocab_start": low, "group": dist.group.WORLD}
        out += [
            head_results(case, weight, bias, over, chunk_elements=chunk, kernel=kernel, **options)
            for kernel in ("sparse", "gather")
            for chunk in (40, 1 << 20)
        ]
    return out


def packed_rows(count, seed=0, num_samples=4):
    """Rows that differ in size."""
    from ragged_format.packing import pack_row
    from ragged_format.testing import rollouts

    out = []
    for number in range(count):
        samples = rollouts(
            np.random.default_rng([seed, number]), num_samples=num_samples + number,
            prompt_length=6, response_length=9, vocab_size=500, max_candidates=20, top_k=3,
        )  # fmt: skip
        out.append(pack_row(samples, packing="tree"))
    return out


def content(batch):
    """A received batch as plain values."""
    return {
        "num_rows": batch.num_rows,
        "step_targets": batch.step_targets,
        "state": batch.state,
        "ids": batch.strings("member_sample_id"),
        "columns": {
            name: batch[name].numpy().copy() for name in batch if batch[name].dtype != torch.uint8
        },
        "lengths": {axis: batch.counts_host(axis) for axis in batch.plan.axes[1:]},
    }


def scattered(rank, world_size, steps, row_of):
    """Every step's row, and the bytes of every hand-over."""
    from ragged_format.torch.distributed import scatter_rows

    got = []
    for step in range(steps + 1):
        rows = None
        if rank == 0 and step < steps:
            rows = packed_rows(1 + max(row_of or range(world_size)), seed=step)
        pending = scatter_rows(rows, row_of=row_of)
        batch = pending.wait()
        assert pending.wait() is batch
        got.append((
            None if batch is None else content(batch), pending.nbytes_sent, pending.nbytes_received
        ))  # fmt: skip
    return got


def streamed(rank, world_size, steps):
    """Rows of an iterable; batches of the loader's kind, with a state, from the last rank."""
    from ragged_format.torch import RaggedBatch
    from ragged_format.torch.distributed import scatter_stream

    src = world_size - 1

    def source():
        for step in range(steps):
            batches = [RaggedBatch.from_arrow(row) for row in packed_rows(world_size, seed=step)]
            for batch in batches:
                batch.state = {"step": step}
            yield batches

    group = dist.new_group(backend="gloo")
    rows = source() if rank == src else None
    out = []
    for batch in scatter_stream(rows, src=src, group=group):
        total = torch.tensor(len(batch["target_ids"]))  # a training step talks, too
        dist.all_reduce(total)
        assert int(total) == batch.step_targets
        out.append(content(batch))
    return out


def one_by_one(rank, world_size, steps):
    """Steps of which each is made only after all ranks have trained on the one before."""
    from ragged_format.torch.distributed import scatter_stream

    trained = [0]

    def source():
        for step in range(steps):
            if trained[0] != step:
                raise RuntimeError(f"asked for step {step} after {trained[0]}")
            yield packed_rows(world_size, seed=step)

    rows = source() if rank == 0 else None
    out = []
    for batch in scatter_stream(rows, ahead=False):
        out.append(content(batch))
        trained[0] += 1
    # One that is left early loses nothing: the next stream begins with its own rows.
    for _ in scatter_stream([packed_rows(world_size)] * 2 if rank == 0 else None, ahead=False):
        break
    rest = scatter_stream([packed_rows(world_size, seed=9)] if rank == 0 else None, ahead=False)
    return out, [content(batch) for batch in rest]


def broadcast(rank, world_size):
    """The same batch on all ranks, then the end."""
    from ragged_format.torch.distributed import broadcast_batch

    first = broadcast_batch(packed_rows(1)[0] if rank == 0 else None).wait()
    return content(first), broadcast_batch().wait()


class GrowingLog:
    """A log of batches that a thread appends to while it is read."""

    identity = "log://growing"

    def __init__(self, batches, pause_s=0.002):
        self._batches = []
        self._closed = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, args=(batches, pause_s), daemon=True)
        self._writer.start()

    def _write(self, batches, pause_s):
        for batch in [*batches, None]:
            with self._changed:
                if batch is None:
                    self._closed = True
                else:
                    self._batches.append(batch)
                self._changed.notify_all()
            time.sleep(pause_s)

    def read(self, after, *, wait_s):
        from ragged_format.torch.tail import Page

        at = int(after or 0)
        with self._changed:
            self._changed.wait_for(lambda: len(self._batches) > at or self._closed, wait_s)
            page = self._batches[at : at + 2]
            end = at + len(page)
            return Page(page, str(end), is_end=self._closed and end == len(self._batches))


def online_samples():
    """65 samples in groups of 4, the last of which is incomplete, in batches of 5."""
    batch = rollouts(
        np.random.default_rng(5), num_samples=65, prompt_length=12, response_length=9,
        vocab_size=500, max_candidates=9, top_k=3, group_size=4,
    )  # fmt: skip
    return [batch.slice(start, 5) for start in range(0, 65, 5)]


def online(rank, world_size, stop_at):
    """Rank 0 tails, plans and scatters; after `stop_at` steps another loader continues.

    Returns what the rank got in each step; in that of a log of one sample; and what it raises when
    a sample does not fit a row.
    """
    from ragged_format.errors import HandOverError, LimitExceededError
    from ragged_format.torch import OnlineLoader
    from ragged_format.torch.distributed import scatter_stream

    def loader(batches, budget=120):
        return OnlineLoader(GrowingLog(batches), budget, rows=world_size, group_size=4)

    def some(source):
        # Every rank stops after the same step, so that no hand-over is under way.
        for number, rows in enumerate(source):
            if number == stop_at:
                return
            yield rows

    def train(source):
        steps = []
        for batch in scatter_stream(source if rank == 0 else None):
            total = torch.tensor(len(batch["target_ids"]))
            dist.all_reduce(total)
            assert int(total) == batch.step_targets
            steps.append({
                "ids": [] if batch.is_filler else batch.strings("member_sample_id"),
                "state": batch.state, "is_filler": batch.is_filler,
                "tokens": int(batch.lengths("token").sum()),
            })  # fmt: skip
        return steps

    samples = online_samples()
    steps = train(some(loader(samples)))
    # A checkpoint of any rank will do.
    states = [None] * world_size
    dist.all_gather_object(states, steps[-1]["state"])
    again = loader(samples, 60)
    again.load_state_dict(json.loads(json.dumps(states[-1])))
    steps += train(again)
    lone = train(loader([samples[0].slice(0, 1)]))
    try:
        train(loader(samples, 9))
    except (LimitExceededError, HandOverError) as err:
        return {"steps": steps, "lone": lone, "error": (type(err).__name__, str(err))}


def failing(rank, world_size):
    """What every rank raises when the source raises, gives too few rows, or packs nonsense."""
    from ragged_format.errors import RaggedError
    from ragged_format.torch.distributed import scatter_rows, scatter_stream

    def source():
        yield packed_rows(world_size)
        raise KeyError("planner")

    out = []
    stream = scatter_stream(source() if rank == 0 else None)
    try:
        out.append(sum(1 for _ in stream))
    except (KeyError, RaggedError) as err:
        out.append((type(err).__name__, str(err)))
    for rows in (packed_rows(1), [object()] * world_size, 5):
        try:
            scatter_rows(rows if rank == 0 else None).wait()
        except RaggedError as err:
            out.append((type(err).__name__, str(err)))
    # The group still works.
    out.append(scatter_rows(packed_rows(world_size) if rank == 0 else None).wait().num_rows)
    return out


def source_dies(rank, world_size):
    """What a rank raises whose source is killed between two rows."""
    from ragged_format.errors import HandOverError
    from ragged_format.torch.distributed import scatter_rows

    rows = packed_rows(world_size) if rank == 0 else None
    assert scatter_rows(rows).wait().num_rows == 1
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        scatter_rows().wait()
    except HandOverError as err:
        return str(err)
    return "nothing"


def overlap(rank, world_size):
    """Whether the source goes on while nobody has received yet."""
    from ragged_format.torch.distributed import scatter_rows

    if rank == 0:
        pending = scatter_rows(packed_rows(world_size))
        dist.barrier()  # reached although the others have not asked yet
        return pending.wait().num_rows
    dist.barrier()
    return scatter_rows().wait().num_rows


def in_turn(rank, world_size, jobs):
    """Several jobs, (name, function, arguments) each, in one start of processes."""
    return {name: job(rank, world_size, *args) for name, job, args in jobs}
