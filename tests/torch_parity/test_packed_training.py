"""A small transformer gives the same loss and gradients on samples alone and on packed rows."""

import logging

import numpy as np
import pytest
import torch

from ragged_format.packing import attention_mask, pack_row, tree_leave
from ragged_format.testing import rollouts
from ragged_format.torch import (
    RaggedBatch,
    clipped_policy_loss,
    forward_kl,
    head_log_probs,
    score_centering_loss,
    support_log_probs,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(
    "default", "ignore:flex_attention called without:UserWarning"
)
VOCABULARY = 61
PACKINGS = [("sequence", "token"), ("tree", "token"), ("tree", "transition")]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.logging.set_verbosity(logging.ERROR)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def samples():
    """Two groups that share prompts and first tokens; sets, some full, and heads."""
    return rollouts(
        np.random.default_rng(5), num_samples=8, prompt_length=9, response_length=7,
        vocab_size=VOCABULARY, max_candidates=12, top_k=6,
    )  # fmt: skip


def tiny(dtype=torch.float64, attention="sdpa"):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Qwen2RMSNorm":
                # The model's own rounds to float32, whatever its dtype.
                setattr(module, name, torch.nn.RMSNorm(config.hidden_size, config.rms_norm_eps))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.to(dtype)


def hidden_of(model, row):
    """Last hidden states of a packed row, under its ancestor mask."""
    column = {name: torch.tensor(row.column(name)[0].as_py()) for name in
              ("input_ids", "position_ids")}  # fmt: skip
    return model.model(
        input_ids=column["input_ids"][None], position_ids=column["position_ids"][None],
        attention_mask=torch.from_numpy(attention_mask(row))[None, None], use_cache=False,
    ).last_hidden_state[0]  # fmt: skip


def losses_of(batch, hidden, weight, dtype):
    """Loss terms per target: clipped, score-centred, KL to the head, and entropy."""
    sets = [batch[name] for name in ("pred_index", "target_ids", "candidate_ids",
                                     "candidate_counts")]  # fmt: skip
    log_probs, entropy = support_log_probs(hidden, weight, *sets, 0.8, out_dtype=dtype)
    again, heads = head_log_probs(
        hidden, weight, *sets, batch["topk_ids"], batch["topk_counts"], 0.8, out_dtype=dtype
    )
    old = batch["rollout_log_probs"].to(dtype)
    advantages = torch.sin(torch.arange(len(old), dtype=dtype))
    stored = batch["topk_log_probs"].to(dtype)
    return (
        clipped_policy_loss(log_probs, old, advantages)
        + score_centering_loss(again, old, advantages, heads, stored, batch["topk_counts"], "tis")
        + forward_kl(heads, stored, batch["topk_counts"])
        - 0.01 * entropy
    )


def alone(model, samples, dtype):
    """The same terms with every sample forwarded by itself and its logits whole; plain torch."""
    out = []
    for record in samples.to_pylist():
        ids = torch.tensor(record["input_ids"])
        logits = model(input_ids=ids[None], use_cache=False).logits[0].to(dtype) / 0.8
        scored = [p for p, flag in enumerate(record["completion_mask"]) if flag]
        sets = np.split(record["candidate_ids"], np.cumsum(record["candidate_counts"])[:-1])
        bounds = np.cumsum(record["topk_counts"])[:-1]
        heads = np.split(record["topk_ids"], bounds)
        head_values = np.split(np.array(record["topk_log_probs"]), bounds)
        for j, position in enumerate(scored):
            row = logits[position - 1]
            kept = torch.tensor(sets[j].astype(int)) if len(sets[j]) else torch.arange(VOCABULARY)
            log_p = row - torch.logsumexp(row[kept], 0)
            inside = log_p[kept]
            out.append((
                log_p[ids[position]], -(inside.exp() * inside).sum(),
                record["rollout_log_probs"][j], log_p, torch.tensor(heads[j].astype(int)),
                torch.tensor(head_values[j], dtype=dtype), set(kept.tolist()),
            ))  # fmt: skip
    total = 0.0
    for number, (own, entropy, old, log_p, head, q, kept) in enumerate(out):
        advantage = float(torch.sin(torch.tensor(float(number), dtype=dtype)))
        ratio = (own - old).exp()
        total = total - torch.minimum(
            ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
        ) - 0.01 * entropy  # fmt: skip
        p = torch.stack([
            log_p[v] if int(v) in kept else log_p.new_tensor(-30000.0) for v in head
        ])  # fmt: skip
        total = total + centred(own, old, advantage, p, q) + divergence(p, q)
    return total


def centred(own, old, advantage, p, q):
    """Score centering with weights min(p/q, 2), written out for one target."""
    ratio = (own.detach() - old).exp().clamp(max=2.0)
    rest_q, rest_p = ((1 - x.detach().exp().sum()).clamp(min=1e-6) for x in (q, p))
    rho = rest_q / rest_p
    alpha = rho * torch.clamp(1 / rho, max=2.0)
    factor = q.exp() * (p.detach() - q).exp().clamp(max=2.0) - alpha * p.detach().exp()
    return -advantage * (ratio * own - (factor * p).sum())


def divergence(p, q):
    """KL of the stored head to the trainer's, the rest of the vocabulary one outcome."""
    rest_q, rest_p = ((1 - x.exp().sum()).clamp(min=1e-6) for x in (q, p))
    return (q.exp() * (q - p)).sum() + rest_q * (rest_q.log() - rest_p.log())


def gradients(model, loss):
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


@pytest.fixture(scope="module")
def expected(samples):
    model = tiny()
    loss = alone(model, samples, torch.float64)
    return float(loss.detach()), gradients(model, loss)


@pytest.mark.parametrize(("packing", "fork"), PACKINGS)
def test_loss_and_every_gradient_agree(samples, expected, packing, fork):
    row = pack_row(samples, packing=packing, fork=fork)
    tokens = sum(map(len, samples.column("input_ids").to_pylist()))
    assert (len(row.column("input_ids")[0]) < tokens) == (packing == "tree")
    model = tiny()
    hidden = hidden_of(model, row)
    loss = losses_of(RaggedBatch.from_arrow(row), hidden, model.lm_head.weight, torch.float64).sum()
    value, grads = expected
    assert float(loss.detach()) == pytest.approx(value, rel=1e-9)
    mine = gradients(model, loss)
    assert mine.keys() == grads.keys()
    for name, grad in mine.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grad, grads[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(("packing", "fork"), PACKINGS)
def test_bfloat16_agrees_within_its_precision(samples, packing, fork):
    row = pack_row(samples, packing=packing, fork=fork)
    batch = RaggedBatch.from_arrow(row)
    whole, half = tiny(), tiny(torch.bfloat16)
    with torch.no_grad():
        for target, source in zip(whole.parameters(), half.parameters(), strict=True):
            target.copy_(source)
    results = []
    for model, dtype in ((whole, torch.float64), (half, torch.float32)):
        loss = losses_of(batch, hidden_of(model, row), model.lm_head.weight, dtype).mean()
        results.append((float(loss.detach()), gradients(model, loss)))
    (value, grads), (near, rough) = results
    assert near == pytest.approx(value, rel=0.05, abs=0.05)
    for name, grad in grads.items():
        difference = (rough[name].double() - grad).norm() / grad.norm()
        assert difference < 0.1, name  # eight bits, over two layers


@pytest.mark.parametrize(("packing", "fork"), PACKINGS)
def test_flex_attention_sees_the_same(samples, packing, fork):
    """FlexAttention has no backward pass on CPUs, so that only hidden states are compared."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    row = pack_row(samples, packing=packing, fork=fork)
    leave = torch.from_numpy(tree_leave(row)).long()
    size = len(leave)

    def sees(batch, head, query, key):
        return (key <= query) & (query < leave[key])

    mask = create_block_mask(sees, None, None, size, size, device="cpu")

    def attend(module, query, key, value, attention_mask, **_):
        out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("ragged_flex", attend)
    with torch.no_grad():
        plain = hidden_of(tiny(torch.float32), row)
        flexible = hidden_of(tiny(torch.float32, "ragged_flex"), row)
    torch.testing.assert_close(flexible, plain, rtol=1e-4, atol=1e-4)


def test_replayed_sets_give_ratio_one_and_full_ones_the_kept_mass(samples):
    """huggingface/trl#7269: without the sampler's sets the mean ratio is the mass they keep."""
    batch = RaggedBatch.from_arrow(pack_row(samples, packing="tree"))
    model = tiny()
    with torch.no_grad():
        hidden = hidden_of(model, pack_row(samples, packing="tree"))
        weight = model.lm_head.weight
        index, ids, sets, counts = (
            batch[name]
            for name in ("pred_index", "target_ids", "candidate_ids", "candidate_counts")
        )
        sampler, _ = support_log_probs(hidden, weight, index, ids, sets, counts)
        replayed, _ = support_log_probs(hidden, weight, index, ids, sets, counts)
        assert ((replayed - sampler).exp() == 1.0).all()
        full, _ = support_log_probs(hidden, weight, index, ids, sets[:0], torch.zeros_like(counts))
        p = torch.softmax(hidden[index.long()] @ weight.T, 1)
        kept = [
            float(p[j, part.long()].sum()) if len(part) else 1.0
            for j, part in enumerate(torch.split(sets, counts.tolist()))
        ]
    assert max(kept[j] for j in range(len(kept)) if counts[j]) < 1
    assert float((full - sampler).exp().mean()) == pytest.approx(float(np.mean(kept)), rel=1e-9)
