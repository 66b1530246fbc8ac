"""Losses per target: clipped policy gradient, score centering, and KL to a teacher's heads.

Heads stay ragged: entries end to end with counts, as they are stored. Every function returns one
value per target, so that the caller weights and reduces; a target without a head gives 0. All of
them are finite, gradients included, for any finite log-probs, down to the fill of the format. None
waits for an accelerator, on which counts are not checked; counts may lie on the host.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ragged_format.arguments import check_choice, check_number
from ragged_format.errors import InvariantError, LimitExceededError, SchemaMismatchError
from ragged_format.torch.arguments import INTEGERS, check_tensors
from ragged_format.torch.transfer import to_device

__all__ = [
    "TAIL_EPSILON",
    "clipped_policy_loss",
    "forward_kl",
    "reverse_kl",
    "score_centering_loss",
]

# Smallest probability of a tail bucket; keeps its log and the ratio of two tails finite.
TAIL_EPSILON = 1e-6
# Bounds of the importance weights that the methods' own implementations use.
TIS_HIGH = 2.0
MIS_BAND = (0.5, 5.0)


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> Tensor:
    """Return the policy-gradient loss of each target, its ratio clipped as in PPO and GRPO.

    ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(log_probs - old_log_probs)``. Both
    log-probs must be over the same set of ids: with truncated sampling, the candidate set.

    Parameters
    ----------
    log_probs : (m,) float Tensor
        Trainer's log-prob of each target.
    old_log_probs, advantages : (m,) float Tensor
        No gradient. One advantage for all may be a scalar tensor.
    low, high : float
        How far the ratio may go below and above 1, >= 0; `high` may be infinite.

    Returns
    -------
    (m,) Tensor

    Raises
    ------
    SchemaMismatchError
        Shapes, kinds or devices differ (``RF-S004``).
    LimitExceededError
        A bound is none (``RF-L001``).

    Examples
    --------
    >>> log_probs = torch.log(torch.tensor([0.5, 0.5]))
    >>> clipped_policy_loss(log_probs, torch.log(torch.tensor([0.25, 0.5])), torch.ones(2))
    tensor([-1.2000, -1.0000])
    """
    check_tensors(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    _check_targets(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_number("low", low, 0)
    check_number("high", high, 0)
    ratio = (log_probs - old_log_probs.detach()).exp()
    weight = advantages.detach()
    return -torch.minimum(ratio * weight, ratio.clamp(1 - low, 1 + high) * weight)


def score_centering_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    head_log_probs: Tensor,
    head_rollout_log_probs: Tensor,
    head_counts: Tensor,
    weights: Literal["none", "tis", "mis"] = "none",
    *,
    low: float | None = None,
    high: float | None = None,
    tail: Literal["proportional", "none"] = "proportional",
) -> Tensor:
    """Return the off-policy policy-gradient loss, its score centred over the sampler's head.

    With sampler q, trainer p, head H, sampled token y and importance weight f (arXiv 2609.20807):
    ``-A (sg(f(p_y/q_y)) log p_y - sum_H sg(q_v f(p_v/q_v) - alpha p_v) log p_v)``. The rest of the
    vocabulary is modelled as q = rho p, with eps = 1e-6 and
    ``rho = max(1 - sum_H q, eps) / max(1 - sum_H p, eps)``,
    so that its part is ``alpha = rho f(1/rho)``.

    Parameters
    ----------
    log_probs : (m,) float Tensor
        Trainer's log-prob of each target.
    rollout_log_probs, advantages : (m,) float Tensor
        Sampler's log-prob of it, and its advantage. No gradient.
    head_log_probs, head_rollout_log_probs : (k,) float Tensor
        Log-probs of all heads' ids end to end, by trainer and by sampler, over the same set of ids
        (with truncation: the candidate set, which the head must then cover).
    head_counts : (m,) int Tensor
        Entries of each head.
    weights : {"none", "tis", "mis"}
        f: 1; ``min(p/q, high)`` (and at least `low`, if given); p/q inside ``[low, high]``, else 0.
    low, high : float, optional
        Defaults: tis ``high=2``; mis ``low=0.5, high=5``.
    tail : {"proportional", "none"}
        ``"none"`` centres over the head alone (alpha = 0).

    Returns
    -------
    (m,) Tensor

    Raises
    ------
    SchemaMismatchError, LimitExceededError
        As :func:`clipped_policy_loss`.
    InvariantError
        The counts do not describe the heads (``RF-I005``).
    """
    check_tensors(
        log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages,
        head_log_probs=head_log_probs, head_rollout_log_probs=head_rollout_log_probs,
        head_counts=head_counts,
    )  # fmt: skip
    check_choice("weights", weights, ("none", "tis", "mis"))
    check_choice("tail", tail, ("proportional", "none"))
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            check_number(name, bound, 0)
    least, most = _bounds(weights, low, high)
    if least > most:
        raise LimitExceededError(
            "the bounds of the weights leave none", expected=f"low <= {most}", got=least,
            remedy="pass low <= high",
        )  # fmt: skip
    _check_targets(log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages)
    _check_heads(log_probs, head_counts, head_log_probs, head_rollout_log_probs)
    rollout_log_probs = rollout_log_probs.detach()
    owner, head_counts = _owner(head_counts, head_log_probs)
    q = head_rollout_log_probs.detach().exp()
    p = head_log_probs.detach().exp()
    if tail == "proportional":
        rest_q = (1 - _sums(q, owner, head_counts)).clamp(min=TAIL_EPSILON)
        rest_p = (1 - _sums(p, owner, head_counts)).clamp(min=TAIL_EPSILON)
        rho = rest_q / rest_p
        alpha = rho * _weight(1 / rho, weights, low, high)
    else:
        alpha = torch.zeros_like(log_probs)
    # The ratio of a head entry from log-probs: q may underflow to 0.
    ratio = (head_log_probs.detach() - head_rollout_log_probs.detach()).exp()
    factor = torch.where(q > 0, q * _weight(ratio, weights, low, high), 0) - alpha[owner] * p
    centre = _sums(factor * head_log_probs, owner, head_counts)
    own = _weight((log_probs.detach() - rollout_log_probs).exp(), weights, low, high)
    return -advantages.detach() * (own * log_probs - centre)


def forward_kl(
    head_log_probs: Tensor,
    teacher_log_probs: Tensor,
    head_counts: Tensor,
    *,
    tail: Literal["bucket", "renormalize"] = "bucket",
) -> Tensor:
    """Return KL(teacher || student) of each target over the teacher's head.

    Parameters
    ----------
    head_log_probs, teacher_log_probs : (k,) float Tensor
        Student's and teacher's log-probs of the heads' ids, end to end. The student's gets the
        gradient.
    head_counts : (m,) int Tensor
        Entries of each head; 0 gives 0.
    tail : {"bucket", "renormalize"}
        All other ids as one more outcome with the remaining mass of each side (at least 1e-6), or
        both heads renormalised to mass 1.

    Returns
    -------
    (m,) Tensor

    Examples
    --------
    >>> student = torch.log(torch.tensor([0.5, 0.25]))
    >>> teacher = torch.log(torch.tensor([0.25, 0.25]))
    >>> forward_kl(student, teacher, torch.tensor([2, 0]))
    tensor([0.1733, 0.0000])
    """
    _check_kl(head_log_probs, teacher_log_probs, head_counts, tail)
    return _kl(teacher_log_probs.detach(), head_log_probs, head_counts, tail)


def reverse_kl(
    head_log_probs: Tensor,
    teacher_log_probs: Tensor,
    head_counts: Tensor,
    *,
    tail: Literal["bucket", "renormalize"] = "bucket",
) -> Tensor:
    """Return KL(student || teacher) of each target over the teacher's head.

    Parameters and result as :func:`forward_kl`.
    """
    _check_kl(head_log_probs, teacher_log_probs, head_counts, tail)
    return _kl(head_log_probs, teacher_log_probs.detach(), head_counts, tail)


def _check_kl(student: Tensor, teacher: Tensor, counts: Tensor, tail: str) -> None:
    check_tensors(head_log_probs=student, teacher_log_probs=teacher, head_counts=counts)
    check_choice("tail", tail, ("bucket", "renormalize"))
    _check_heads(None, counts, student, teacher)


def _check_targets(**named: Tensor) -> None:
    """Raise unless there is one float for each target: others would broadcast without a word."""
    (first, like), *_ = named.items()
    for name, tensor in named.items():
        scalar = name == "advantages" and not tensor.dim()
        if tensor.dtype.is_complex or (tensor.shape != like.shape and not scalar):
            raise SchemaMismatchError(
                f"{name} and {first} do not fit", expected=f"numbers of shape {tuple(like.shape)}",
                got=(tensor.dtype, tuple(tensor.shape)), remedy="pass one number for each target",
            )  # fmt: skip
        if tensor.device != like.device and tensor.dim():
            raise SchemaMismatchError(
                f"{name} and {first} lie on one device", expected=like.device, got=tensor.device,
                remedy="move it there",
            )  # fmt: skip


def _check_heads(log_probs: Tensor | None, counts: Tensor, *values: Tensor) -> None:
    """Raise unless heads are numbers, and counts integers, one for each target."""
    size = counts.shape if log_probs is None else log_probs.shape
    if counts.dtype not in INTEGERS or counts.shape != size or counts.dim() != 1:
        raise InvariantError(
            "the counts of heads are integers, one for each target", code="RF-I005",
            expected=f"integers of shape {tuple(size)}", got=(counts.dtype, tuple(counts.shape)),
            remedy="pass the counts of the heads of these targets",
        )  # fmt: skip
    if counts.device.type == "cpu" and len(counts) and int(counts.to(torch.int64).min()) < 0:
        raise InvariantError(
            "a count is negative", code="RF-I004", expected=">= 0",
            got=int(counts.to(torch.int64).min()), remedy="pass the counts of these heads",
        )  # fmt: skip
    for value in values:
        if value.dim() != 1 or value.shape != values[0].shape or value.dtype.is_complex:
            raise InvariantError(
                "heads are flat and parallel", code="RF-I005", expected="real numbers, (k,)",
                got=[(value.dtype, tuple(value.shape)) for value in values],
                remedy="pass the heads of these targets, end to end",
            )  # fmt: skip
        if value.device != values[0].device:
            raise SchemaMismatchError(
                "the heads of both sides lie on one device", expected=values[0].device,
                got=value.device, remedy="move them there",
            )  # fmt: skip


def _kl(first: Tensor, second: Tensor, counts: Tensor, tail: str) -> Tensor:
    owner, counts = _owner(counts, first)
    if tail == "renormalize":
        first = first - _log_sums(first, owner, counts)[owner]
        second = second - _log_sums(second, owner, counts)[owner]
    weight = first.exp()
    out = _sums(weight * (first - second), owner, counts)
    if tail == "renormalize":
        return out
    rest_first = (1 - _sums(weight, owner, counts)).clamp(min=TAIL_EPSILON)
    rest_second = (1 - _sums(second.exp(), owner, counts)).clamp(min=TAIL_EPSILON)
    bucket = rest_first * (rest_first.log() - rest_second.log())
    return out + torch.where(counts > 0, bucket, torch.zeros_like(bucket))


def _owner(counts: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return which head each entry belongs to, and the counts as int64, beside the entries."""
    total, device = len(values), values.device
    if counts.device.type == "cpu":
        counts = counts.to(torch.int64)
        if int(counts.sum()) != total:
            raise InvariantError(
                "the counts do not sum to the entries of the heads", code="RF-I005",
                expected=total, got=int(counts.sum()), remedy="pass the counts of these heads",
            )  # fmt: skip
        if device.type != "cpu":
            counts = to_device(counts.numpy(), device)
    counts = counts.to(torch.int64)
    return torch.repeat_interleave(counts, output_size=total), counts


def _sums(values: Tensor, owner: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(len(counts)).index_add(0, owner, values)


def _log_sums(values: Tensor, owner: Tensor, counts: Tensor) -> Tensor:
    top = values.detach().new_full((len(counts),), -torch.inf)
    top = top.scatter_reduce(0, owner, values.detach(), "amax")
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    sums = _sums((values - top[owner]).exp(), owner, counts)
    return top + torch.where(counts > 0, sums, torch.ones_like(sums)).log()


def _bounds(weights: str, low: float | None, high: float | None) -> tuple[float, float]:
    """Return the bounds of importance weights, with their defaults."""
    if weights == "tis":
        return 0.0 if low is None else low, TIS_HIGH if high is None else high
    return MIS_BAND[0] if low is None else low, MIS_BAND[1] if high is None else high


def _weight(ratio: Tensor, weights: str, low: float | None, high: float | None) -> Tensor:
    if weights == "none":
        return torch.ones_like(ratio)
    least, most = _bounds(weights, low, high)
    if weights == "tis":
        return ratio.clamp(min=least, max=most)
    return torch.where((ratio >= least) & (ratio <= most), ratio, torch.zeros_like(ratio))
