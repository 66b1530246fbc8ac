"""Log-probs over candidate sets: ours against dense forms of the same head, time and memory.

Three dense forms: the (M, V) logits with a mask, whole; the same in tiles of the reference
trainer's kind (4,096 targets by 32,768 ids, sets as one padded table); and the (M, width, H) gather
of a padded table, which is timed on a tenth of the targets because of its size. Beside them, what
ours could be: tables in power-of-two buckets, and ours without its sparse kernels. Forward and
backward, float32. Peak memory is the most bytes of tensors alive at once during the call beyond
what was alive before, counted as operators allocate and release them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import Figure, Settings, interleave, median_ratio, median_s, raw, time_text
from ragged_format.torch import pad_buckets, pad_ragged, support_log_probs
from ragged_format.torch.head.log_probs import CHUNK_ELEMENTS

__all__ = ["Case", "PeakMemory", "heavy_tail", "masked_logits", "padded_rows", "run", "tiles"]

TARGETS = 20_000
WIDTH = 512
VOCABULARY = 16_384
HIDDEN = 128
SEED = 4
TILE = 4_096, 32_768


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one head; `host_counts` are the counts on the host, where those are elsewhere."""

    hidden: Tensor
    weight: Tensor
    pred_index: Tensor
    target_ids: Tensor
    candidate_ids: Tensor
    candidate_counts: Tensor
    host_counts: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> Case:
        """Return the case on a device, hidden states and weight as leaves of a dtype."""
        hidden, weight = (
            part.detach().to(device, dtype).requires_grad_() for part in (self.hidden, self.weight)
        )
        return Case(
            hidden, weight, self.pred_index.to(device), self.target_ids.to(device),
            self.candidate_ids.to(device), self.candidate_counts.to(device), self._host(),
        )  # fmt: skip

    def without_sets(self) -> Case:
        """Return the same targets over the full vocabulary."""
        return replace(
            self, candidate_ids=self.candidate_ids[:0], host_counts=torch.zeros_like(self._host()),
            candidate_counts=torch.zeros_like(self.candidate_counts),
        )  # fmt: skip

    def _host(self) -> Tensor:
        return self.candidate_counts if self.host_counts is None else self.host_counts

    def loss(self, log_probs: Tensor) -> Tensor:
        """Return a loss whose gradient is not constant over targets."""
        slopes = torch.linspace(
            0.5, 1.5, len(log_probs), dtype=log_probs.dtype, device=log_probs.device
        )
        return (log_probs * slopes).sum()


def heavy_tail(
    targets: int = TARGETS,
    width: int = WIDTH,
    vocabulary: int = VOCABULARY,
    hidden: int = HIDDEN,
    *,
    sizes: np.ndarray[Any, Any] | None = None,
) -> Case:
    """Return sets as top-p sampling gives them: two thirds of one id, the widest of `width`."""
    rng = np.random.default_rng(SEED)
    if sizes is None:
        more = 2 + rng.pareto(1.2, targets)
        sizes = np.where(rng.random(targets) < 0.66, 1, more).astype(np.int64).clip(1, width)
        sizes[: targets // 2000 + 1] = width
    # Distinct ids: an arithmetic walk from a random start, odd steps in a power of two.
    starts = rng.integers(0, vocabulary, targets)
    steps = rng.integers(0, vocabulary // 2, targets) * 2 + 1
    owner = np.repeat(np.arange(targets), sizes)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ids = (starts[owner] + within * steps[owner]) % vocabulary
    ids = ids[np.lexsort((ids, owner))]  # ascending in each set, as they are stored
    generator = torch.Generator().manual_seed(SEED)
    return Case(
        torch.randn(targets, hidden, generator=generator).requires_grad_(),
        (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).requires_grad_(),
        torch.arange(targets), torch.from_numpy(starts), torch.from_numpy(ids.astype(np.int32)),
        torch.from_numpy(sizes.astype(np.int32)),
    )  # fmt: skip


def ours(
    case: Case,
    chunk_elements: int = CHUNK_ELEMENTS,
    kernel: Literal["auto", "gather", "triton"] = "auto",
    on_outside: Literal["error", "flag"] = "error",
) -> Tensor:
    """Return the log-probs by this package's head."""
    return support_log_probs(
        case.hidden, case.weight, case.pred_index, case.target_ids, case.candidate_ids,
        case.candidate_counts, chunk_elements=chunk_elements, kernel=kernel,
        on_outside=on_outside, host_counts=case.host_counts,
    )[0]  # fmt: skip


def masked_logits(case: Case) -> Tensor:
    """Return the log-probs from all logits at once."""
    logits = case.hidden[case.pred_index] @ case.weight.T
    owner = torch.repeat_interleave(case.candidate_counts)
    allowed = torch.zeros(logits.shape, dtype=torch.bool)
    allowed[owner, case.candidate_ids.long()] = True
    log_p = torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), 1)
    return log_p.gather(1, case.target_ids[:, None])[:, 0]


def tiles(case: Case) -> Tensor:
    """Return the log-probs from tiles of logits, one after the other; autograd keeps them."""
    table = pad_ragged(case.candidate_ids, case.candidate_counts).long()
    out = []
    for rows in torch.split(torch.arange(len(case.target_ids)), TILE[0]):
        hidden = case.hidden[case.pred_index[rows]]
        sums, label = [], torch.zeros(len(rows))
        for start in range(0, len(case.weight), TILE[1]):
            part = case.weight[start : start + TILE[1]]
            ids = table[rows] - start
            inside = (ids >= 0) & (ids < len(part))
            allowed = torch.zeros(len(rows), len(part) + 1, dtype=torch.bool)
            allowed.scatter_(1, ids.where(inside, len(part)), value=True)
            logits = (hidden @ part.T).masked_fill(~allowed[:, :-1], -torch.inf)
            sums.append(logits.logsumexp(1))
            own = case.target_ids[rows] - start
            held = (own >= 0) & (own < len(part))
            picked = logits.gather(1, own.clamp(0, len(part) - 1)[:, None])[:, 0]
            label = label + picked.where(held, torch.zeros(()))
        out.append(label - torch.stack(sums).logsumexp(0))
    return torch.cat(out)


def padded_rows(case: Case) -> Tensor:
    """Return the log-probs from the rows of the weight gathered by one padded table."""
    table = pad_ragged(case.candidate_ids, case.candidate_counts).long()
    held = table >= 0
    hidden = case.hidden[case.pred_index]
    logits = torch.einsum("mh,mwh->mw", hidden, case.weight[table.clamp(min=0)])
    log_sum = logits.masked_fill(~held, -torch.inf).logsumexp(1)
    return (hidden * case.weight[case.target_ids]).sum(1) - log_sum


def buckets(case: Case) -> Tensor:
    """Return the log-probs by tables of power-of-two widths."""
    log_sum = torch.zeros(len(case.target_ids))
    hidden = case.hidden[case.pred_index]
    for rows, table in pad_buckets(case.candidate_ids, case.candidate_counts):
        held = table >= 0
        part = case.weight[table.clamp(min=0).long()]
        logits = torch.einsum("mh,mwh->mw", hidden[rows], part)
        log_sum = log_sum.index_add(0, rows, logits.masked_fill(~held, -torch.inf).logsumexp(1))
    return (hidden * case.weight[case.target_ids]).sum(1) - log_sum


def gathered(case: Case) -> Tensor:
    """Return the log-probs by ours without the sparse kernels, as it runs on accelerators."""
    return ours(case, kernel="gather")


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that operators return, while their storage lives.

    Attributes
    ----------
    peak : int
        Most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: int = 0
        self.peak: int = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._watch(leaf.untyped_storage())
        return out

    def _watch(self, storage: Any) -> None:
        key = storage._cdata  # noqa: SLF001
        if key in self._known or not storage.nbytes():
            return
        self._known.add(key)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.alive -= nbytes


def step(head: Callable[[Case], Tensor], case: Case) -> tuple[Tensor, ...]:
    """Return log-probs and gradients of one forward and backward pass."""
    log_probs = head(case)
    grads = torch.autograd.grad(case.loss(log_probs), (case.hidden, case.weight))
    return log_probs.detach(), *grads


def peak_bytes(head: Callable[[Case], Tensor], case: Case) -> int:
    """Return the most bytes that a step holds beyond its inputs."""
    with PeakMemory() as memory:
        step(head, case)
    return int(memory.peak)


# Peers, with the divisor of the targets that they are timed on.
PEERS: dict[str, tuple[Callable[[Case], Tensor], str, int]] = {
    "dense": (masked_logits, "all logits, masked", 1),
    "tiles": (tiles, "tiles of logits", 1),
    "table": (padded_rows, "one padded table", 10),
    "buckets": (buckets, "tables in buckets", 1),
    "gather": (gathered, "ours, rows gathered", 1),
}


def run(settings: Settings) -> list[Figure]:
    """Time a step of all forms, and count the most bytes that they hold."""
    targets = TARGETS // 20 if settings.quick else TARGETS
    few = Settings(min(settings.rounds, 3), settings.slice_s, settings.quick)
    case = heavy_tail(targets)
    figures = []
    own_peak = peak_bytes(ours, case)
    for name, (head, what, divisor) in PEERS.items():
        part = case if divisor == 1 else heavy_tail(targets // divisor)
        check_same(head, part)
        contenders = {"ours": partial(step, ours, part), "peer": partial(step, head, part)}
        samples = interleave(contenders, few)
        is_dense = name in ("dense", "tiles")
        figures.append(Figure(
            f"step, widest set {WIDTH}: {what}", time_text(median_s(samples["ours"])),
            f"{time_text(median_s(samples['peer']))}, {len(part.target_ids)} targets",
            median_ratio(samples["peer"], samples["ours"]), 1.0 if is_dense else None,
            median_ratio(samples["peer"], samples["ours"], "wall"), details=raw(**samples),
        ))  # fmt: skip
        own = own_peak if divisor == 1 else peak_bytes(ours, part)
        peer = peak_bytes(head, part)
        figures.append(Figure(
            f"peak memory, widest set {WIDTH}: {what}", f"{own / 1e6:.4g} MB",
            f"{peer / 1e6:.4g} MB", own / peer, 0.1 if is_dense else None, at_most=True,
        ))  # fmt: skip
    figures.append(_flatness(targets))
    return figures


def _flatness(targets: int) -> Figure:
    """Return how the peak grows when the same candidates lie in few wide sets."""
    peaks = {}
    for wide in (8, VOCABULARY // 2):
        # As many candidates in all: sets of one id but for the widest ones.
        sizes = np.ones(targets, np.int64)
        sizes[: max(1, VOCABULARY // 2 // wide)] = wide
        peaks[wide] = peak_bytes(ours, heavy_tail(targets, sizes=sizes))
    few, many = peaks.values()
    return Figure(
        f"peak memory, widest set {VOCABULARY // 2} against 8", f"{many / 1e6:.4g} MB",
        f"{few / 1e6:.4g} MB", many / few, 1.1, at_most=True,
    )  # fmt: skip


def check_same(head: Callable[[Case], Tensor], case: Case) -> None:
    """Raise unless a form gives our log-probs and gradients, within float32."""
    for mine, other in zip(step(ours, case), step(head, case), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
