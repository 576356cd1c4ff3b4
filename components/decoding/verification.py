"""Which guesses of a chain are kept, and which token follows them: pure functions on tensors.

One verification pass over [x_n, g_1, ..., g_k] gives k+1 rows of logits; row j is the target's distribution of the
token after g_j (row 0: after x_n). A verdict keeps the first `num_accepted` guesses and adds one token from the target.

Greedy: keep while the guess is the target's argmax; the argmax of the first row that disagrees follows (all kept: the
last row's argmax). The output is what plain greedy decoding says.

Sampled: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192,
Algorithm 1. Their p (target) and q (draft) are ours, their gamma is our k. Every emitted token is distributed as a draw
from p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from components.decoding.sampling import draw, draw_uniform


class Verdict(NamedTuple):
    """What a round emits: the accepted guesses and one token of the target's own."""

    num_accepted: int  # a, 0..k
    emitted: Tensor  # [a+1] int64, on the target's device
    token_ids: list[int]  # the same on the host, for end-of-text and bookkeeping


def verify_greedy(logits: Tensor, guesses: Tensor) -> Verdict:
    """Logits [k+1, V], guesses [k] -> the longest prefix that plain greedy decoding would say, and its next token."""
    picks = logits.argmax(-1)
    # One copy to the host a round: on a GPU every .tolist() waits for the device.
    numbers = torch.cat((guesses, picks)).tolist()
    k = guesses.shape[0]
    accepted = 0
    while accepted < k and numbers[accepted] == numbers[k + accepted]:
        accepted += 1
    return Verdict(accepted, picks[: accepted + 1], numbers[k : k + accepted + 1])


def verify_sampled(probs: Tensor, guesses: Tensor, draft_probs: Tensor | None, rng: torch.Generator) -> Verdict:
    """Rejection sampling of a chain; Algorithm 1 of arXiv:2211.17192.

    probs:       [k+1, V] the target's p at each row, after temperature and cuts.
    guesses:     [k] the drafted tokens, guess j drawn from draft_probs[j].
    draft_probs: [k, V] the draft's q, or None for a deterministic proposal: then q is 1 at the guess.
    rng:         a generator on the CPU.

    Guess x is kept with probability min(1, p(x) / q(x)). The first rejected one is replaced by a draw from
    norm(max(p - q, 0)); when all are kept the extra token is a draw from the last row's p.
    """
    k = guesses.shape[0]
    accepted = _num_kept(probs, guesses, draft_probs, rng)
    left = probs[k : k + 1] if accepted == k else _residual(probs, guesses, draft_probs, accepted)
    last = draw(left, rng)
    emitted = torch.cat((guesses[:accepted], last))
    return Verdict(accepted, emitted, emitted.tolist())


def _num_kept(probs: Tensor, guesses: Tensor, draft_probs: Tensor | None, rng: torch.Generator) -> int:
    """How many guesses pass u < p(x)/q(x) before the first that does not; one uniform number a guess."""
    k = guesses.shape[0]
    if k == 0:
        return 0
    at_guess = guesses.unsqueeze(-1)
    p = probs[:k].gather(-1, at_guess).squeeze(-1)
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(-1, at_guess).squeeze(-1)
    uniform = draw_uniform(k, probs.device, rng)
    # u * q < p instead of u < p / q: no division, and a guess the target cannot say (p = 0) is never kept.
    return int((uniform * q < p).long().cumprod(0).sum())


def _residual(probs: Tensor, guesses: Tensor, draft_probs: Tensor | None, row: int) -> Tensor:
    """norm(max(p - q, 0)) at a rejected row, [1, V]."""
    p = probs[row]
    at_guess = guesses[row : row + 1]
    rest = p.index_fill(0, at_guess, 0.0) if draft_probs is None else (p - draft_probs[row]).clamp_min(0.0)
    mass = rest.sum()
    # p = q up to rounding leaves nothing; a rejection is then rounding itself, and p is the right distribution.
    return torch.where(mass > 0, rest / mass, p).unsqueeze(0)
