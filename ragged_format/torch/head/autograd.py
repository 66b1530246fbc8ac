"""The head's statistics and logits as differentiable operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ragged_format.errors import UnsupportedFeatureError
from ragged_format.torch.head.flat import backward_logits, candidate_logits
from ragged_format.torch.head.problem import Gradients, Problem, Stats
from ragged_format.torch.head.stats import backward, empty_gradients, forward

__all__ = ["Scores", "logits_of", "set_scores"]

Scores = tuple[Tensor, Tensor, Tensor, Tensor]
"""Log-prob of the label, entropy, log-sum-exp, hits of the label; each (m,)."""


def set_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem) -> Scores:
    """Return what a problem's sets give for each target; the inputs are those of the problem."""
    apply: Callable[..., Scores] = _Head.apply
    return apply(hidden, weight, bias, problem)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    """Return the logit of every id of a problem, (t,)."""
    apply: Callable[..., Tensor] = _Logits.apply
    return apply(hidden, weight, bias, problem)


class _Head(torch.autograd.Function):
    """Forward keeps statistics only; backward computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with _without_autocast(hidden.device):
            stats = forward(problem)
        ctx.save_for_backward(hidden, weight, bias, *stats)
        ctx.problem = problem
        ctx.versions = _versions_of(*_sets(problem))
        ctx.mark_non_differentiable(stats.hits)
        ctx.set_materialize_grads(False)
        log_probs = torch.where(stats.hits > 0, stats.label_logit - stats.log_sum, -torch.inf)
        return log_probs, stats.log_sum - stats.mean_logit, stats.log_sum, stats.hits

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_prob: Tensor | None,
        grad_entropy: Tensor | None,
        grad_log_sum: Tensor | None,
        _: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        _check_once()
        hidden, weight, bias, *saved = ctx.saved_tensors
        problem: Problem = ctx.problem
        _check_versions(ctx.versions, *_sets(problem))
        stats = Stats(*saved)
        nothing = torch.zeros_like(stats.log_sum)
        # A label outside its set has log-prob -inf: constant, so it passes no gradient on.
        label = nothing if grad_log_prob is None else grad_log_prob.where(stats.hits > 0, nothing)
        log_sum = -label if grad_log_sum is None else grad_log_sum - label
        with _without_autocast(hidden.device):
            out = backward(problem, stats, label, log_sum, grad_entropy, ctx.needs_input_grad[:3])
        return _returned(problem, out, (hidden, weight, bias))


class _Logits(torch.autograd.Function):
    """The logits of ids end to end."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem
    ) -> Tensor:
        with _without_autocast(hidden.device):
            logits = candidate_logits(problem)
        if problem.group is not None:
            dist.all_reduce(logits, group=problem.group)
        ctx.save_for_backward(hidden, weight, bias, logits)
        ctx.problem = problem
        ctx.versions = _versions_of(*_sets(problem))
        return logits

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        _check_once()
        *inputs, logits = ctx.saved_tensors
        problem: Problem = ctx.problem
        _check_versions(ctx.versions, *_sets(problem))
        with _without_autocast(grad.device):
            out = empty_gradients(problem, ctx.needs_input_grad[:3])
            backward_logits(problem, logits, grad, out)
        return _returned(problem, out, inputs)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off, on devices that have it."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _sets(problem: Problem) -> tuple[Tensor, ...]:
    """Return the inputs that autograd does not watch: it saves tensors with a gradient."""
    scale = problem.transform.inverse_temperature
    return problem.ids, problem.counts, problem.labels, problem.pred_index, scale


def _returned(
    problem: Problem, out: Gradients, inputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    """Return gradients in the dtype of their inputs, that of hidden summed over shards."""
    if problem.group is not None and out.hidden is not None:
        dist.all_reduce(out.hidden, group=problem.group)
    hidden, weight, bias = (
        None if grad is None or tensor is None else grad.to(tensor.dtype)
        for grad, tensor in zip(out, inputs, strict=True)
    )
    return hidden, weight, bias, None


def _versions_of(*tensors: Tensor) -> list[int]:
    """Return numbers that change when the tensors are written to."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]  # noqa: SLF001


def _check_versions(known: list[int], *tensors: Tensor) -> None:
    """Raise in a backward pass whose sets are not those of the forward pass any more."""
    if known != _versions_of(*tensors):
        raise UnsupportedFeatureError(
            "ids, counts or positions were changed between forward and backward",
            expected="the values of the forward pass", got="an in-place change",
            remedy="change a clone of the tensor",
        )  # fmt: skip


def _check_once() -> None:
    """Raise in a backward pass that is to be differentiated itself: statistics are constants."""
    if torch.is_grad_enabled():
        raise UnsupportedFeatureError(
            "gradients of a gradient of the head are not supported",
            expected="backward without create_graph", got="create_graph=True",
            remedy="compute this part of the loss from dense logits",
        )  # fmt: skip
