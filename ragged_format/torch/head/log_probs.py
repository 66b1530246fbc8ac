"""Log-prob and entropy of each target over its own candidate set, without a logits table.

Follows Keep Sampling Mask (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): with S the recorded set
of a target and z the trainer's logits over temperature, ``log p(y) = z[y] - logsumexp(z[S])``, the
same S for the old and the new policy, so that importance ratios have one action set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ragged_format.arguments import check_choice, check_integer
from ragged_format.errors import LimitExceededError
from ragged_format.schema import LOG_PROB_FILL
from ragged_format.torch.arguments import check_group, check_scale, counts_array
from ragged_format.torch.head.autograd import Scores, logits_of, set_scores
from ragged_format.torch.head.checks import (
    check_counts,
    check_distinct,
    check_host_counts,
    check_ids,
    check_indices,
    check_inputs,
    check_labels,
    check_positions,
    check_results,
    check_temperatures,
    check_transform,
)
from ragged_format.torch.head.problem import Kernel, Problem, Transform

if TYPE_CHECKING:
    from ragged_format.lists import Int64
    from ragged_format.torch.pad import Counts

__all__ = ["head_log_probs", "support_log_probs"]

P = ParamSpec("P")
R = TypeVar("R")
_KERNELS: dict[str, Kernel] = {"sparse": "sparse", "gather": "gather", "triton": "triton"}
# 16 MiB of float32: a few such temporaries fit any device, and matrix products are large enough.
CHUNK_ELEMENTS = 1 << 22


def _not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function out of compiled graphs, and its type, which torch's decorator loses."""
    kept: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept


@_not_compiled
def support_log_probs(
    hidden: Tensor,
    weight: Tensor,
    pred_index: Tensor,
    target_ids: Tensor,
    candidate_ids: Tensor,
    candidate_counts: Tensor,
    temperature: float | Tensor = 1.0,
    entropy_over: Literal["support", "vocabulary"] = "support",
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    on_outside: Literal["error", "flag"] = "error",
    host_counts: Counts | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    out_dtype: torch.dtype | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    kernel: Literal["auto", "sparse", "gather", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the log-prob and the entropy of each target over its own candidate set.

    Guarantees: exact gradients for `hidden`, `weight` and `bias`; logits exist only in chunks of
    about `chunk_elements` numbers and are computed again in the backward pass, so that memory does
    not depend on the vocabulary or on the widest set. Statistics are float32, or float64 for
    float64 input; autocast changes nothing. On an accelerator, with `host_counts`, the host waits
    once, for the check of ids and labels at the end, and never with ``on_outside="flag"``, forward
    and backward. Gradients of a gradient are not supported.

    Parameters
    ----------
    hidden : (n, h) Tensor
        Last hidden states of the packed row.
    weight : (v, h) Tensor
        Rows of the head, in the dtype of `hidden`.
    pred_index, target_ids : (m,) int Tensor
        Position that predicts each target, and the token that it scores.
    candidate_ids : (t,) int Tensor
        Candidate sets end to end, each with distinct ids.
    candidate_counts : (m,) int Tensor
        Size of each set; 0 is the full vocabulary.
    temperature : float or (m,) Tensor
        Divides the logits. Positive, which is checked of numbers and of tensors on the CPU.
    entropy_over : {"support", "vocabulary"}
        Over which ids the entropy (nats) is taken.
    bias : (v,) Tensor, optional
    logit_scale : float
        Multiplies the logits before soft cap and temperature.
    soft_cap : float, optional
        ``cap * tanh(logit / cap)``, before temperature.
    on_outside : {"error", "flag"}
        A label that its set lacks: raise, or return -inf with a zero gradient. Never rescored.
    host_counts : (m,) int array, optional
        The counts on the host; without them, counts on an accelerator cost one synchronisation.
    vocab_start : int
        Id of the first row of `weight`, where the vocabulary is sharded by id range.
    group : torch.distributed.ProcessGroup, optional
        Ranks that hold the shards; every rank gives the same targets and hidden states, and gets
        the same result and the summed gradient of `hidden`.
    out_dtype : torch.dtype, optional
        Default: the dtype of `hidden`. Give float32 for half-precision models: ratios need it.
    chunk_elements : int
        Bound on the numbers in one temporary.
    kernel : {"auto", "sparse", "gather", "triton"}
        What scores candidate sets. ``"auto"``: sparse kernels on CPUs for float32 and float64, else
        gathered rows. ``"triton"`` needs Triton and CUDA (or its interpreter).

    Returns
    -------
    log_probs, entropy : (m,) Tensor

    Raises
    ------
    InvariantError
        A label is outside its set (``RF-I013``) or twice in it (``RF-I012``; on CPUs, any id that
        is twice in a set); an id is no row of the weight (``RF-I011``; for sharded weights, and
        with "flag" on accelerators, such ids are left out of their sets); counts do not sum to t
        (``RF-I005``).
    SchemaMismatchError
        Shapes or dtypes that do not fit (``RF-S004``).
    LimitExceededError
        A temperature, scale or soft cap is none (``RF-L001``).
    UnsupportedFeatureError
        Temperatures that want a gradient (``RF-V002``).

    Examples
    --------
    >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    >>> index, ids = torch.tensor([0, 1]), torch.tensor([0, 1])
    >>> log_probs, entropy = support_log_probs(
    ...     hidden, weight, torch.tensor([0, 0]), torch.tensor([1, 1]), ids, torch.tensor([2, 0])
    ... )
    >>> log_probs
    tensor([-0.1269, -0.2395])
    """
    check_choice("entropy_over", entropy_over, ("support", "vocabulary"))
    check_results(on_outside, out_dtype)
    scorer = _Scorer(
        hidden, weight, pred_index, target_ids, candidate_ids, candidate_counts, temperature,
        bias, logit_scale, soft_cap, host_counts, vocab_start, group, chunk_elements, kernel,
    )  # fmt: skip
    log_probs, entropy, _, hits = scorer.over_sets()
    scorer.check(hits, on_outside)
    if entropy_over == "vocabulary":
        entropy = scorer.over_vocabulary()[1]
    out = hidden.dtype if out_dtype is None else out_dtype
    return log_probs.to(out), entropy.to(out)


@_not_compiled
def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    pred_index: Tensor,
    target_ids: Tensor,
    candidate_ids: Tensor,
    candidate_counts: Tensor,
    head_ids: Tensor,
    head_counts: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    on_outside: Literal["error", "flag"] = "error",
    host_counts: Counts | None = None,
    host_head_counts: Counts | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    out_dtype: torch.dtype | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    kernel: Literal["auto", "sparse", "gather", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of each target and of every id of its head, over its candidate set.

    One pass for the normalisers serves both. A head id outside the candidate set has probability 0:
    it gets the fill of log-probs (-30000) and no gradient. Guarantees as
    :func:`support_log_probs`, whose parameters are the same but for:

    Parameters
    ----------
    head_ids : (k,) int Tensor
        Ids of all heads end to end.
    head_counts : (m,) int Tensor
        Entries of each head; 0 is no head.
    host_head_counts : (m,) int array, optional
        The same on the host; without them, counts on an accelerator cost one synchronisation.

    Returns
    -------
    log_probs : (m,) Tensor
    head_log_probs : (k,) Tensor

    Raises
    ------
    InvariantError
        As there; or a head's id is no row of the weight (``RF-I014``).
    """
    check_results(on_outside, out_dtype)
    scorer = _Scorer(
        hidden, weight, pred_index, target_ids, candidate_ids, candidate_counts, temperature,
        bias, logit_scale, soft_cap, host_counts, vocab_start, group, chunk_elements, kernel,
    )  # fmt: skip
    check_indices(head_ids=head_ids, head_counts=head_counts)
    counts = head_counts.to(hidden.device, torch.int64)
    host = counts_array(head_counts.cpu() if host_head_counts is None else host_head_counts)
    check_counts(host, len(target_ids), len(head_ids))
    check_host_counts(head_counts, host)
    ids = head_ids.to(hidden.device, torch.int64)
    log_probs, _, log_sum, hits = scorer.over_sets()
    scorer.check(hits, on_outside, ids)
    owner = torch.repeat_interleave(counts, output_size=len(head_ids))
    scores = scorer.logits(ids, counts, host) - log_sum[owner]
    scores = scores.where(scorer.holds(owner, ids), torch.full_like(scores, LOG_PROB_FILL))
    out = hidden.dtype if out_dtype is None else out_dtype
    return log_probs.to(out), scores.to(out)


class _Scorer:
    """The checked inputs of one call, from which problems over different sets are made."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        pred_index: Tensor,
        target_ids: Tensor,
        candidate_ids: Tensor,
        candidate_counts: Tensor,
        temperature: float | Tensor,
        bias: Tensor | None,
        logit_scale: float,
        soft_cap: float | None,
        host_counts: Counts | None,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        chunk_elements: int,
        kernel: str,
    ) -> None:
        check_inputs(hidden, weight, pred_index, target_ids, candidate_ids, candidate_counts, bias)
        check_scale("temperature", temperature)
        check_transform(bias, logit_scale, soft_cap)
        check_group(group)
        check_integer("vocab_start", vocab_start, 0)
        check_integer("chunk_elements", chunk_elements, 1)
        check_choice("kernel", kernel, ("auto", *_KERNELS))
        host = candidate_counts.cpu() if host_counts is None else host_counts
        self.host_counts: Int64 = counts_array(host)
        check_counts(self.host_counts, len(target_ids), len(candidate_ids))
        check_host_counts(candidate_counts, self.host_counts)
        device = hidden.device
        if device.type == pred_index.device.type == "cpu":  # elsewhere this would wait for it
            check_positions(pred_index, len(hidden))
        self._ids = candidate_ids.to(device, torch.int64)
        self._counts = candidate_counts.to(device, torch.int64)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        inverse = _inverse_temperature(temperature, len(target_ids), device, dtype)
        self._inputs = hidden, weight, bias
        self._base = Problem(
            hidden, weight, pred_index.to(device, torch.int64), target_ids.to(device, torch.int64),
            self._ids, self._counts, self.host_counts,
            Transform(bias, inverse, logit_scale, soft_cap), vocab_start, group, chunk_elements,
            _kernel(kernel, hidden),
        )  # fmt: skip

    def over_sets(self) -> Scores:
        """Score the labels over their candidate sets."""
        return set_scores(*self._inputs, self._base)

    def check(self, hits: Tensor, on_outside: str, head_ids: Tensor | None = None) -> None:
        """Raise if a label is not once in its set, or an id is not in the vocabulary, or twice.

        On an accelerator this waits once where nothing is wrong, and with "flag" never.
        """
        if on_outside == "flag" and hits.device.type != "cpu":
            return
        columns = {} if self._base.group is not None else {"candidate_ids": self._ids}
        if columns and head_ids is not None:
            columns["head_ids"] = head_ids
        outside = {name: self._outside(ids) for name, ids in columns.items()}
        wrong = [part.any() for part in outside.values()]
        if on_outside == "error":
            wrong.append((hits != 1).any())
        if not wrong or not bool(torch.stack(wrong).any()):
            if on_outside == "error":
                check_distinct(self._ids, self._counts)
            return
        for name, ids in columns.items():
            check_ids(ids, outside[name], name, self._base.vocab_start, len(self._base.weight))
        check_labels(hits, self.host_counts, self._base.labels, on_outside)

    def _outside(self, ids: Tensor) -> Tensor:
        start = self._base.vocab_start
        return (ids < start) | (ids >= start + len(self._base.weight))

    def over_vocabulary(self) -> Scores:
        """Score the labels over the whole vocabulary."""
        return set_scores(*self._inputs, replace(
            self._base, ids=self._ids[:0], counts=torch.zeros_like(self._counts),
            host_counts=np.zeros_like(self.host_counts),
        ))  # fmt: skip

    def logits(self, ids: Tensor, counts: Tensor, host_counts: Int64) -> Tensor:
        """Return the logit of each id of a head under the hidden row of its target."""
        heads = replace(self._base, ids=ids, counts=counts, host_counts=host_counts)
        return logits_of(*self._inputs, heads)

    def holds(self, owner: Tensor, ids: Tensor) -> Tensor:
        """Return whether each id is in the candidate set of its target; a full set has all."""
        targets = torch.repeat_interleave(self._counts, output_size=len(self._ids))
        if not len(ids) or not len(self._ids):
            return self._counts[owner] == 0
        stride = torch.maximum(ids.max(), self._ids.max()) + 1
        known = (targets * stride + self._ids).sort().values
        wanted = owner * stride + ids
        slot = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
        return (known[slot] == wanted) | (self._counts[owner] == 0)


def _kernel(kernel: str, hidden: Tensor) -> Kernel:
    on_cpu = hidden.device.type == "cpu"
    full = hidden.dtype in (torch.float32, torch.float64)
    if kernel == "auto":
        return "sparse" if on_cpu and full else "gather"
    if kernel == "sparse" and not (on_cpu and full):
        raise LimitExceededError(
            "the sparse kernels are for float32 and float64 on CPUs", expected="one of these there",
            got=f"{hidden.dtype} on {hidden.device}", remedy='use kernel="auto"',
        )  # fmt: skip
    return _KERNELS[kernel]


def _inverse_temperature(
    temperature: float | Tensor, size: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor(float(temperature), dtype=torch.float64)
    check_temperatures(temperature, size)
    if temperature.dim() or temperature.device.type != "cpu":
        return temperature.to(device, dtype).reciprocal().expand(size)
    # A number on the host is filled in there: nothing is copied.
    return torch.full((size,), 1 / float(temperature), dtype=dtype, device=device)
