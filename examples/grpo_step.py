"""A GRPO-style step on the CPU: a tiny model samples with top-p, then trains on the packed row.

Its own candidate sets are recorded while it samples, so that before the first update every
importance ratio is 1. Over the full vocabulary the ratio would be the probability that top-p kept.

Prints:

2 groups of 4 samples: 48 targets, fewer tokens than unpacked: True
mean ratio over the recorded sets: 1.000
mean ratio over the full vocabulary below 0.9: True
step 1: loss is finite and the weights move: True
after 20 steps the mean reward of new samples is higher: True
"""

import numpy as np
import pyarrow as pa
import torch
from torch import nn

import ragged_format as rf
from ragged_format.packing import PackReport, attention_mask, pack_row
from ragged_format.torch import RaggedBatch, clipped_policy_loss, support_log_probs

VOCABULARY, WIDTH, NEW_TOKENS, SAMPLES = 24, 32, 6, 4
PROMPTS = ([1, 2, 3, 4], [5, 6, 7, 8, 9])
SCHEMA = rf.sample_schema(
    vocab_size=VOCABULARY,
    columns=["group_id", "advantage", "reward", "rollout_log_probs", "candidate_counts",
             "candidate_ids"],
)  # fmt: skip


class Tiny(nn.Module):
    """One attention layer over tokens and positions; returns hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(32, WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, at: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(at)
        q, k, v = self.query_key_value(x)[None].chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)[0]
        return self.norm(x + mixed)


@torch.no_grad()
def sample(model: Tiny, prompt: list[int], name: str, generator: torch.Generator) -> dict:
    """Sample with top-p 0.8; keep the set and the log-prob of every token."""
    ids, sets, log_probs = list(prompt), [], []
    for _ in range(NEW_TOKENS):
        size = len(ids)
        sees = torch.ones(size, size, dtype=torch.bool).tril()
        hidden = model(torch.tensor(ids), torch.arange(size), sees)[-1]
        p = torch.softmax(model.head(hidden), 0)
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        kept = order[before < 0.8].sort().values
        within = p[kept] / p[kept].sum()
        choice = int(torch.multinomial(within, 1, generator=generator))
        ids.append(int(kept[choice]))
        sets.append(kept.tolist())
        log_probs.append(float(within[choice].log()))
    return {
        "sample_id": name, "group_id": str(prompt), "input_ids": ids,
        "completion_mask": [0] * len(prompt) + [1] * NEW_TOKENS,
        "rollout_log_probs": log_probs, "candidate_counts": [len(one) for one in sets],
        "candidate_ids": [token for one in sets for token in one],
        "reward": sum(token % 2 == 0 for token in ids[len(prompt) :]) / NEW_TOKENS,
    }  # fmt: skip


def rollouts(model: Tiny, generator: torch.Generator) -> pa.RecordBatch:
    """Sample every prompt several times; advantages are rewards relative to the group."""
    rows = []
    for number, prompt in enumerate(PROMPTS):
        group = [sample(model, prompt, f"{number}/{i}", generator) for i in range(SAMPLES)]
        rewards = np.array([row["reward"] for row in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        rows += [row | {"advantage": a} for row, a in zip(group, advantages, strict=True)]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    rf.validate(batch)
    return batch


def score(model: Tiny, row: pa.RecordBatch) -> tuple[RaggedBatch, torch.Tensor, torch.Tensor]:
    """Return the batch, its hidden states, and the log-prob of every target over its set."""
    batch = RaggedBatch.from_arrow(row)
    sees = torch.from_numpy(attention_mask(row))
    hidden = model(batch["input_ids"], batch["position_ids"], sees)
    log_probs, _ = support_log_probs(
        hidden, model.head.weight, batch["pred_index"], batch["target_ids"],
        batch["candidate_ids"], batch["candidate_counts"],
    )  # fmt: skip
    return batch, hidden, log_probs


def main() -> None:
    torch.set_num_threads(1)  # the tensors are tiny
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(0)
    first = 0.0
    for step in range(20):
        samples = rollouts(model, generator)
        report = PackReport()
        batch, hidden, log_probs = score(model, pack_row(samples, packing="tree", report=report))
        old = batch["rollout_log_probs"]
        if step == 0:
            first = float(np.mean(samples.column("reward").to_pylist()))
            print(f"2 groups of {SAMPLES} samples: {len(old)} targets, fewer tokens than unpacked:",
                  report.unique_tokens < report.tokens)  # fmt: skip
            print(f"mean ratio over the recorded sets: {(log_probs - old).exp().mean():.3f}")
            full, _ = support_log_probs(
                hidden, model.head.weight, batch["pred_index"], batch["target_ids"],
                batch["candidate_ids"][:0], torch.zeros_like(batch["candidate_counts"]),
            )  # fmt: skip
            print("mean ratio over the full vocabulary below 0.9:",
                  bool((full - old).exp().mean() < 0.9))  # fmt: skip
        advantages = batch["member_advantage"][batch["member_index"]].float()
        loss = clipped_policy_loss(log_probs, old, advantages).mean()
        before = model.head.weight.detach().clone()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            moved = bool((model.head.weight != before).any())
            print("step 1: loss is finite and the weights move:", bool(loss.isfinite()) and moved)
    after = [np.mean(rollouts(model, generator).column("reward").to_pylist()) for _ in range(4)]
    print("after 20 steps the mean reward of new samples is higher:", bool(np.mean(after) > first))


if __name__ == "__main__":
    main()
