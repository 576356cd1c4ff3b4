"""The loss of one draft token: seven distances between the student's and the target's distribution.

p = the target's distribution, q = softmax of the student's logits, both at one row; alpha = sum_v min(p(v), q(v)),
which is the probability that rejection sampling keeps a token drawn from q (Leviathan et al. 2023, arXiv:2211.17192).
  soft_ce   -sum_v p(v) log q(v)                     Hinton et al. 2015, arXiv:1503.02531; EAGLE's classification loss
  kl        sum_v p(v) log(p(v) / q(v))              soft_ce less the teacher's entropy: another number, one gradient
  tv        1 - alpha                                total variation: the probability of a rejection itself
  lk        l KL + (1 - l) TV, l = exp(-3 alpha)     Samarin et al. 2026, arXiv:2602.23881, hybrid; l has no gradient
  top_k     -sum_{v in the K largest p} p(v) log q(v)     HASS, Zhang et al. 2025, arXiv:2408.15766, section 3.1
  hard_ce   -log q(v*), v* the target's greedy token      for greedy decoding, and for answers written greedily
and smooth_l1 between hidden states: mean over H of d^2 / 2 where |d| < 1, else |d| - 1/2 (EAGLE, Li et al. 2024,
arXiv:2401.15077, section 3.2; Huber 1964).

A student with a pruned vocabulary of N tokens cannot draft the others. Cross-entropies and KL compare with p
renormalised over the N; alpha is taken with p as it is (its mass inside the N may be below 1), so 1 - tv stays the
acceptance probability.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from components.drafts.settings import LossName

LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
TOP_K = 10  # HASS's K
LK_ETA = 3.0  # the exponent the LK paper found best


class Teacher(NamedTuple):
    """The target's next-token distributions at rows [...], over the N tokens that the student's softmax runs over."""

    probs: Tensor  # [..., N] float32, renormalised over those tokens
    best: Tensor  # [...] int64: index of the FULL vocabulary's argmax among them; -1: it is not one of them
    mass: Tensor  # [...] float32: the total probability of all N; 1 for a student with the full vocabulary

    def at(self, rows: Tensor) -> Teacher:
        """The columns rows, int64 [B, R], of a teacher over [B, T]."""
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        return Teacher(self.probs[sequence, rows], self.best.gather(1, rows), self.mass.gather(1, rows))


def row_loss(name: LossName, logits: Tensor, teacher: Teacher) -> Tensor:
    """The named loss at every row: logits [..., N] and a teacher of the same rows -> float32 [...]."""
    if name == "soft_ce":
        return soft_cross_entropy(logits, teacher.probs)
    if name == "kl":
        return kl_divergence(logits, teacher.probs)
    if name == "tv":
        return 1.0 - acceptance(logits, teacher)
    if name == "lk":
        return lk_hybrid(logits, teacher)
    if name == "top_k":
        return top_k_cross_entropy(logits, teacher.probs, TOP_K)
    assert name == "hard_ce", f"no loss is called {name!r}; there are {', '.join(LOSS_NAMES)}"
    return hard_cross_entropy(logits, teacher.best)


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) at every row: logits and probs [..., N] -> float32 [...]; probs sum to 1."""
    losses: Tensor = _SoftCrossEntropy.apply(logits, probs)
    return losses


class _SoftCrossEntropy(torch.autograd.Function):
    """Computes its gradient, q - p, in the forward pass: one [..., N] is saved for backward instead of four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor) -> Tensor:
        exact = logits.float()
        q = exact.softmax(-1)  # one kernel that keeps a row in the cache, so the log of the sum is taken from its peak
        log_sum = exact.amax(-1) - q.amax(-1).log()
        with torch.autocast(logits.device.type, enabled=False):  # it would round the product to bfloat16
            losses = log_sum - torch.linalg.vecdot(probs, exact)
        ctx.save_for_backward(q.sub_(probs).to(logits.dtype))
        return losses

    @staticmethod
    @once_differentiable  # the saved gradient is a constant to autograd: its second derivative would be zero
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (difference,) = ctx.saved_tensors
        return difference * gradients[0][..., None].to(difference.dtype), None


def kl_divergence(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_v p(v) log(p(v) / q(v)) at every row: [..., N] -> float32 [...], in nats; 0 iff p = q."""
    return soft_cross_entropy(logits, probs) + torch.special.xlogy(probs, probs).sum(-1)


def acceptance(logits: Tensor, teacher: Teacher) -> Tensor:
    """alpha = sum_v min(p(v), q(v)) at every row: [..., N] -> float32 [...], from 0 to the teacher's mass."""
    return torch.minimum(teacher.probs * teacher.mass[..., None], logits.float().softmax(-1)).sum(-1)


def lk_hybrid(logits: Tensor, teacher: Teacher) -> Tensor:
    """l KL(p, q) + (1 - l)(1 - alpha), l = exp(-LK_ETA alpha) held constant: [..., N] -> float32 [...].

    Far from the teacher KL has the gradient that total variation lacks; close to it, acceptance itself is optimised.
    """
    alpha = acceptance(logits, teacher)
    share = torch.exp(-LK_ETA * alpha.detach())
    return share * kl_divergence(logits, teacher.probs) + (1.0 - share) * (1.0 - alpha)


def top_k_cross_entropy(logits: Tensor, probs: Tensor, k: int) -> Tensor:
    """-sum over the k most likely tokens of p of p(v) log q(v): [..., N] -> float32 [...]. k >= N: all of them.

    Like HASS's, it is not renormalised: where p is spread out it weighs less.
    """
    likely, indices = probs.topk(min(k, probs.shape[-1]), dim=-1)
    logits = logits.float()
    return (likely * (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, indices))).sum(-1)


def hard_cross_entropy(logits: Tensor, best: Tensor) -> Tensor:
    """-log q(best) at every row: logits [..., N], best int64 [...] -> float32 [...]; where best is -1, of token 0."""
    logits = logits.float()
    return logits.logsumexp(-1) - logits.gather(-1, best.clamp(min=0)[..., None])[..., 0]


def smooth_l1(hidden: Tensor, target: Tensor) -> Tensor:
    """Mean over H of the Huber function with its corner at 1: hidden and target [..., H] -> float32 [...]."""
    return F.smooth_l1_loss(hidden.float(), target.float(), reduction="none").mean(-1)
