"""Every loss against a direct computation in float64, and what its gradient must be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from components.drafts.training.losses import (
    LK_ETA,
    LOSS_NAMES,
    Teacher,
    acceptance,
    row_loss,
    smooth_l1,
    soft_cross_entropy,
    top_k_cross_entropy,
)

NUM_TOKENS, ROWS = 13, 6


def sample(seed: int = 0, mass: float = 1.0) -> tuple[Tensor, Teacher]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, NUM_TOKENS, generator=generator) * 2
    probs = (torch.randn(ROWS, NUM_TOKENS, generator=generator) * 2).softmax(-1)
    return logits, Teacher(probs, probs.argmax(-1), torch.full((ROWS,), mass))


def direct(name: str, logits: list[float], p: list[float], mass: float) -> float:
    """One row in plain Python."""
    total = sum(math.exp(x) for x in logits)
    q = [math.exp(x) / total for x in logits]
    order = sorted(range(len(p)), key=lambda v: -p[v])
    kl = sum(pv * math.log(pv / qv) for pv, qv in zip(p, q, strict=True))
    alpha = sum(min(pv * mass, qv) for pv, qv in zip(p, q, strict=True))
    if name == "soft_ce":
        return -sum(pv * math.log(qv) for pv, qv in zip(p, q, strict=True))
    if name == "kl":
        return kl
    if name == "tv":
        return 1 - alpha
    if name == "lk":
        share = math.exp(-LK_ETA * alpha)
        return share * kl + (1 - share) * (1 - alpha)
    if name == "top_k":
        return -sum(p[v] * math.log(q[v]) for v in order[:10])
    return -math.log(q[order[0]])


def gradient(name: str, logits: Tensor, teacher: Teacher) -> Tensor:
    logits = logits.clone().requires_grad_()
    row_loss(name, logits, teacher).sum().backward()  # type: ignore[arg-type]
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("mass", [1.0, 0.7])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_loss_equals_its_equation(name: str, mass: float) -> None:
    logits, teacher = sample(mass=mass)
    found = row_loss(name, logits, teacher)  # type: ignore[arg-type]
    expected = [direct(name, logits[i].tolist(), teacher.probs[i].tolist(), mass) for i in range(ROWS)]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_half_precision_logits_are_judged_in_float32(name: str) -> None:
    logits, teacher = sample()
    found = row_loss(name, logits.bfloat16(), teacher)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, row_loss(name, logits.bfloat16().float(), teacher))  # type: ignore[arg-type]


def test_distances_vanish_where_both_agree_and_only_there() -> None:
    logits, teacher = sample()
    same = teacher.probs.log()
    for name in ("kl", "tv", "lk"):
        torch.testing.assert_close(row_loss(name, same, teacher), torch.zeros(ROWS), atol=1e-6, rtol=0)
        assert (row_loss(name, logits, teacher) > 1e-3).all()


def test_kl_and_cross_entropy_have_one_gradient_and_differ_by_the_entropy() -> None:
    logits, teacher = sample()
    torch.testing.assert_close(gradient("kl", logits, teacher), gradient("soft_ce", logits, teacher))
    torch.testing.assert_close(gradient("soft_ce", logits, teacher), logits.softmax(-1) - teacher.probs)
    entropy = torch.distributions.Categorical(probs=teacher.probs).entropy()
    gap = row_loss("soft_ce", logits, teacher) - row_loss("kl", logits, teacher)
    torch.testing.assert_close(gap, entropy, atol=1e-5, rtol=1e-5)


def test_one_less_total_variation_is_how_often_rejection_sampling_keeps_a_guess() -> None:
    """Drawn, not computed: 40 000 draws from q kept with probability min(1, p / q); 5 standard errors."""
    logits, teacher = sample()
    generator = torch.Generator().manual_seed(1)
    q = logits.softmax(-1)
    drawn = torch.multinomial(q, 40_000, replacement=True, generator=generator)
    ratio = (teacher.probs / q).gather(1, drawn)
    kept = (torch.rand(drawn.shape, generator=generator) < ratio).float().mean(1)
    torch.testing.assert_close(kept, 1 - row_loss("tv", logits, teacher), atol=5 * 0.5 / 200, rtol=0)


def test_a_pruned_student_cannot_be_accepted_more_often_than_its_tokens_are_said() -> None:
    _, teacher = sample(mass=0.6)
    assert torch.allclose(acceptance(teacher.probs.log(), teacher), torch.full((ROWS,), 0.6))


def test_no_gradient_flows_through_the_weight_of_the_hybrid() -> None:
    """It is the fixed mix of both gradients."""
    logits, teacher = sample()
    share = torch.exp(-LK_ETA * acceptance(logits, teacher))[:, None]
    mixed = share * gradient("kl", logits, teacher) + (1 - share) * gradient("tv", logits, teacher)
    torch.testing.assert_close(gradient("lk", logits, teacher), mixed)


def test_top_k_of_everything_is_cross_entropy_and_of_one_looks_at_the_best_token_only() -> None:
    logits, teacher = sample()
    everything = top_k_cross_entropy(logits, teacher.probs, 99)
    torch.testing.assert_close(everything, row_loss("soft_ce", logits, teacher))
    one = top_k_cross_entropy(logits, teacher.probs, 1)
    torch.testing.assert_close(one, teacher.probs.amax(-1) * row_loss("hard_ce", logits, teacher))


def test_smooth_l1_is_quadratic_near_zero_and_linear_beyond_one() -> None:
    hidden = torch.tensor([[0.0, 0.5, -3.0, 1.0]])
    found = smooth_l1(hidden, torch.zeros(1, 4))
    torch.testing.assert_close(found, torch.tensor([(0.0 + 0.125 + 2.5 + 0.5) / 4]))


def test_under_autocast_the_loss_is_still_taken_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(4, 64, generator=generator)
    probs = torch.randn(4, 64, generator=generator).softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = soft_cross_entropy(logits, probs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, soft_cross_entropy(logits, probs), rtol=0, atol=0)


def test_a_second_derivative_is_refused_and_not_taken_for_zero() -> None:
    logits, teacher = sample()
    loss = row_loss("soft_ce", logits.requires_grad_(), teacher).square().sum()
    (once,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()
