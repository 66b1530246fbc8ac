"""Reports about what heads may be used for."""

import torch

from ragged_format.torch import reverse_kl


def test_kl_over_a_head_is_a_loss_and_no_advantage():
    """radixark/miles#2362, radixark/miles#2410: as an advantage it carries no learning signal.

    A number that is the same for all tokens at a position multiplies the expected score, which is
    zero; as a loss the same number has a gradient.
    """
    logits = torch.randn(1, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    log_p = torch.log_softmax(logits, 1)
    teacher = torch.log_softmax(torch.arange(9.0, dtype=torch.float64), 0)[:4]
    kl = reverse_kl(log_p[0, :4], teacher, torch.tensor([4])).sum()
    expected_score = (log_p[0].detach().exp() * log_p[0]).sum()
    (as_advantage,) = torch.autograd.grad(kl.detach() * expected_score, logits, retain_graph=True)
    assert as_advantage.abs().max() < 1e-12
    (as_loss,) = torch.autograd.grad(kl, logits)
    assert as_loss.abs().max() > 1e-2
