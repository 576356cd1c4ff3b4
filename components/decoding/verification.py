"""Verification of a chain: the accepted draft tokens and the token after them; pure functions on tensors.

One verification pass over [x_n, g_1, ..., g_k] gives k+1 rows of logits; row j is the target's distribution of the
token after g_j (row 0: after x_n). The result has the first `num_accepted` draft tokens and one token from the target.

Greedy: accept while the draft token is the target's argmax; the argmax of the first row that differs follows (all
accepted: the last row's argmax). The output equals plain greedy decoding.

Sampled: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192,
Algorithm 1. Their p (target) and q (draft) are ours, their gamma is our k. Every emitted token is distributed as a draw
from p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from components.decoding.sampling import draw, draw_uniform


class VerifyResult(NamedTuple):
    """The tokens emitted by a round: the accepted draft tokens and one token of the target's own."""

    num_accepted: int  # a, 0..k
    emitted: Tensor  # [a+1] int64, on the target's device
    token_ids: list[int]  # the same on the host, for end-of-text and bookkeeping


def verify_greedy(logits: Tensor, draft_tokens: Tensor) -> VerifyResult:
    """Logits [k+1, V], draft_tokens [k] -> the longest prefix equal to plain greedy decoding, and its next token."""
    picks = logits.argmax(-1)
    # One copy to the host a round: on a GPU every .tolist() waits for the device.
    ids_on_host = torch.cat((draft_tokens, picks)).tolist()
    k = draft_tokens.shape[0]
    accepted = 0
    while accepted < k and ids_on_host[accepted] == ids_on_host[k + accepted]:
        accepted += 1
    return VerifyResult(accepted, picks[: accepted + 1], ids_on_host[k : k + accepted + 1])


def verify_sampled(
    probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, rng: torch.Generator
) -> VerifyResult:
    """Rejection sampling of a chain; Algorithm 1 of arXiv:2211.17192.

    probs:       [k+1, V] the target's p at each row, after temperature and cuts.
    draft_tokens: [k], token j drawn from draft_probs[j].
    draft_probs: [k, V] the draft's q, or None for a deterministic proposal: then q is 1 at the draft token.
    rng:         a generator on the CPU.

    Draft token x is accepted with probability min(1, p(x) / q(x)). The first rejected one is replaced by a draw from
    norm(max(p - q, 0)); when all are accepted the extra token is a draw from the last row's p.
    """
    k = draft_tokens.shape[0]
    num_accepted = _count_accepted(probs, draft_tokens, draft_probs, rng)
    distribution = probs[k : k + 1] if num_accepted == k else _residual(probs, draft_tokens, draft_probs, num_accepted)
    last = draw(distribution, rng)
    emitted = torch.cat((draft_tokens[:num_accepted], last))
    return VerifyResult(num_accepted, emitted, emitted.tolist())


def _count_accepted(probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, rng: torch.Generator) -> int:
    """How many draft tokens pass u < p(x)/q(x) before the first that does not; one uniform number per token."""
    k = draft_tokens.shape[0]
    if k == 0:
        return 0
    at_token = draft_tokens.unsqueeze(-1)
    p = probs[:k].gather(-1, at_token).squeeze(-1)
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(-1, at_token).squeeze(-1)
    uniform = draw_uniform(k, probs.device, rng)
    # u * q < p instead of u < p / q: no division, and a draft token of p = 0 is never accepted.
    return int((uniform * q < p).long().cumprod(0).sum())


def _residual(probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, row: int) -> Tensor:
    """norm(max(p - q, 0)) at a rejected row, [1, V]."""
    p = probs[row]
    at_token = draft_tokens[row : row + 1]
    rest = p.index_fill(0, at_token, 0.0) if draft_probs is None else (p - draft_probs[row]).clamp_min(0.0)
    mass = rest.sum()
    # Where p = q up to rounding, the residual is empty and the rejection is a rounding error: p is correct.
    return torch.where(mass > 0, rest / mass, p).unsqueeze(0)
