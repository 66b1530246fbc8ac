"""The PyTorch plugin: batches as tensors over one allocation, loaders, padding.

Needs the extra: ``pip install ragged-format[torch]``.
"""

from ragged_format.errors import MissingDependencyError

try:
    import torch  # noqa: F401
except ImportError as err:
    raise MissingDependencyError(
        "PyTorch is not installed", expected="torch", got=str(err),
        remedy="pip install ragged-format[torch]",
    ) from err  # fmt: skip

from ragged_format.torch.batch import RaggedBatch
from ragged_format.torch.cache import CachedDataset
from ragged_format.torch.dataset import RaggedDataset
from ragged_format.torch.head import head_log_probs, support_log_probs
from ragged_format.torch.iterable import RaggedIterable
from ragged_format.torch.loader import RaggedLoader
from ragged_format.torch.losses import (
    clipped_policy_loss,
    forward_kl,
    reverse_kl,
    score_centering_loss,
)
from ragged_format.torch.mixing import Mixture
from ragged_format.torch.online import OnlineLoader
from ragged_format.torch.pad import pad_buckets, pad_chunks, pad_ragged, width_buckets
from ragged_format.torch.state import common_state

__all__ = [
    "CachedDataset",
    "Mixture",
    "OnlineLoader",
    "RaggedBatch",
    "RaggedDataset",
    "RaggedIterable",
    "RaggedLoader",
    "clipped_policy_loss",
    "common_state",
    "forward_kl",
    "head_log_probs",
    "pad_buckets",
    "pad_chunks",
    "pad_ragged",
    "reverse_kl",
    "score_centering_loss",
    "support_log_probs",
    "width_buckets",
]
