"""What the ranks of distributed tests do; importable, so that it reaches spawned processes."""

import numpy as np
import torch
import torch.distributed as dist

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
            head_results(case, weight, bias, over, chunk_elements=chunk, **options)
            for chunk in (40, 1 << 20)
        ]
    return out
