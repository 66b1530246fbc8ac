"""The head and the loss agree with what other trainers' own code returned on the same inputs."""

from pathlib import Path

import numpy as np
import pytest
import torch

import ragged_format as rf
from ragged_format.torch import support_log_probs
from ragged_format.torch.losses import clipped_policy_loss, forward_kl, reverse_kl

DATA = Path(__file__).parent.parent / "data"
SETTINGS = {
    "plain": {},
    "t0.7": {"temperature": 0.7},
    "t1.3": {"temperature": 1.3},
    "bias": {"with_bias": True},
    "softcap30_t0.9": {"temperature": 0.9, "soft_cap": 30.0},
    "scale0.5": {"logit_scale": 0.5},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_full_vocabulary_is_the_fused_head_of_trl(name):
    stored = np.load(DATA / "head" / "fused_head.npz")
    options = dict(SETTINGS[name])
    labels = torch.from_numpy(stored["shift_labels"])
    index = torch.nonzero(labels != -100)[:, 0]
    hidden, weight, bias = (
        torch.from_numpy(stored[key]).requires_grad_() for key in ("hidden", "weight", "bias")
    )
    leaves = [hidden, weight]
    if options.pop("with_bias", False):
        options["bias"] = bias
        leaves.append(bias)
    log_probs, entropy = support_log_probs(
        hidden, weight, index, labels[index], index[:0], torch.zeros_like(index), **options
    )
    for key, tolerance in (("f32", 2e-5), ("ref64", 2e-5)):
        for mine, other in ((log_probs, "log_probs"), (entropy, "entropy")):
            want = torch.from_numpy(stored[f"{name}.{key}.{other}"]).float()[index]
            torch.testing.assert_close(mine, want, rtol=tolerance, atol=tolerance)
    loss = -log_probs.mean()
    torch.testing.assert_close(loss.detach(), torch.from_numpy(stored[f"{name}.f32.loss"]))
    close = {"rtol": 1e-5, "atol": 1e-6}
    for mine, other in zip(
        torch.autograd.grad(loss, leaves), ("hidden", "weight", "bias"), strict=False
    ):
        want = torch.from_numpy(stored[f"{name}.f32.grad_{other}"])
        torch.testing.assert_close(mine[: len(want)], want, **close)


def support_case():
    stored = np.load(DATA / "head" / "support_scoring.npz")
    case = {key: torch.from_numpy(stored[key]) for key in stored.files}
    offsets = np.concatenate([[0], np.cumsum(stored["counts"])])
    altered = {int(case["label_absent"][0]), int(case["duplicate"][0])}
    kept = [row for row in range(len(case["counts"])) if row not in altered]
    ids = torch.cat([case["ids"][offsets[row] : offsets[row + 1]] for row in kept])
    return case, torch.tensor(kept), ids


@pytest.mark.parametrize("chunk", [64, 1 << 22])
def test_three_trainers_agree_over_recorded_sets(chunk):
    case, kept, ids = support_case()
    hidden = case["hidden"].clone().requires_grad_()
    inputs = (hidden, case["weight"], kept, case["labels"][kept], ids, case["counts"][kept])
    close = {"rtol": 5e-6, "atol": 5e-6}
    with_temperature, _ = support_log_probs(
        *inputs, case["temperature"][kept], chunk_elements=chunk
    )
    for key in ("prime_rl.logprobs", "check64.t.logprobs"):
        torch.testing.assert_close(with_temperature, case[key][kept].float(), **close)
    plain, entropy = support_log_probs(*inputs, chunk_elements=chunk)
    for key in ("skyrl.logprobs", "miles.logprobs", "check64.t1.logprobs"):
        torch.testing.assert_close(plain, case[key][kept].float(), **close)
    for key in ("skyrl.entropy", "check64.t1.entropy"):
        torch.testing.assert_close(entropy, case[key][kept].float(), **close)
    upstream = case["grad_out"][kept]
    for log_probs, key in ((with_temperature, "prime_rl"), (plain, "skyrl")):
        (grad,) = torch.autograd.grad(log_probs, hidden, upstream)
        torch.testing.assert_close(grad[kept], case[f"{key}.grad_hidden"][kept], **close)


def test_what_two_trainers_rescore_in_silence_is_an_error_or_flagged():
    case, _, _ = support_case()
    index = torch.arange(len(case["counts"]))
    inputs = (
        case["hidden"], case["weight"], index, case["labels"], case["ids"], case["counts"]
    )  # fmt: skip
    with pytest.raises(rf.InvariantError) as caught:
        support_log_probs(*inputs)
    absent = int(case["label_absent"][0])
    assert (caught.value.code, caught.value.where.position) == ("RF-I013", absent)
    log_probs, _ = support_log_probs(*inputs, on_outside="flag")
    assert torch.isinf(log_probs).nonzero()[:, 0].tolist() == [absent]
    assert case["miles.logprobs"][absent] == -torch.inf
    assert torch.isfinite(case["skyrl.logprobs"][absent])
    assert torch.isfinite(case["prime_rl.logprobs"][absent])


@pytest.mark.parametrize("old", ["real_old", "near_old"])
def test_clipped_loss_is_the_loss_of_trl(old):
    stored = np.load(DATA / "head" / "grpo_loss.npz")
    rows = np.load(DATA / "trl" / "grpo_token_budget_r2_b1024.npz")
    total = sum(len(rows[f"mb0.row{r}.token_index"]) for r in (0, 1))
    for r in (0, 1):
        name = f"row{r}"
        index = rows[f"mb0.{name}.token_index"]
        log_probs = torch.from_numpy(stored[f"{name}.log_probs"])[index]
        old_log_probs = (
            rows[f"mb0.{name}.old_log_probs"] if old == "real_old"
            else stored[f"{name}.near_old.old_log_probs"][0][: len(index)]
        )  # fmt: skip
        loss = clipped_policy_loss(
            log_probs, torch.from_numpy(old_log_probs),
            torch.from_numpy(rows[f"mb0.{name}.advantages"]),
        )  # fmt: skip
        torch.testing.assert_close(
            loss.sum() / (total / 2), torch.from_numpy(stored[f"{name}.{old}.loss"]), rtol=1e-5,
            atol=1e-7,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "loss", "tail"),
    [
        ("beta0.0_tail1_t1.0", forward_kl, "bucket"),
        ("beta0.0_tail1_t1.5", forward_kl, "bucket"),
        ("beta0.0_tail0_t1.0", forward_kl, "renormalize"),
        ("beta1.0_tail1_t1.0", reverse_kl, "bucket"),
        ("beta1.0_tail1_t1.5", reverse_kl, "bucket"),
    ],
)
def test_kl_is_the_distillation_loss_of_trl(name, loss, tail):
    stored = np.load(DATA / "head" / "distill_loss.npz")
    case = {key: torch.from_numpy(np.array(stored[key])) for key in stored.files}
    temperature = name.rsplit("_", 1)[1]
    counts, ids, teacher = (case[k] for k in ("head_counts", "head_ids", "teacher_log_probs"))
    owner = torch.repeat_interleave(counts)
    if loss is reverse_kl:  # there, its support is the realised token
        own = ids == case["labels"][owner]
        ids, teacher, owner = ids[own], teacher[own], owner[own]
        counts = torch.bincount(owner, minlength=len(counts))
    scale = float(temperature[1:])
    rows = case["weight"][ids].double()
    student = (case["hidden"][owner].double() * rows).sum(1) / scale
    student = (student - case[f"{temperature}.log_sum"][owner]).requires_grad_()
    value = loss(student, teacher.double(), counts, tail=tail).sum() / case["tokens_per_rank"]
    assert value.item() == pytest.approx(stored[f"{name}.loss"].item(), rel=1e-5)
    (grad,) = torch.autograd.grad(value, student)
    terms = grad[:, None] * (rows - case[f"{temperature}.mean_weight"][owner]) / scale
    hidden = torch.zeros(len(counts), 4, dtype=torch.float64).index_add(0, owner, terms)
    torch.testing.assert_close(hidden.float(), case[f"{name}.grad_hidden"], rtol=1e-4, atol=1e-6)
