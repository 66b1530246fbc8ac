"""Log-probs over candidate sets and heads, from hidden states, with no table of logits."""

from ragged_format.torch.head.log_probs import head_log_probs, support_log_probs

__all__ = ["head_log_probs", "support_log_probs"]
