"""Verification of chains and trees: the accepted draft tokens and the token after them; pure functions on tensors.

Chains. One verification pass over [x_n, g_1, ..., g_k] gives k+1 rows of logits; row j is the target's distribution of
the token after g_j (row 0: after x_n). The result has the first `num_accepted` draft tokens and one token from the
target.

Greedy: accept while the draft token is the target's argmax; the argmax of the first row that differs follows (all
accepted: the last row's argmax). The output equals plain greedy decoding.

Sampled: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192,
Algorithm 1. Their p (target) and q (draft) are ours, their gamma is our k. Every emitted token is distributed as a draw
from p.

Block rules: acceptance rules of blockwise parallel decoding (Stern et al. 2018, arXiv:1811.03115). Their loop, predict
k tokens from one state, verify them all in one pass, keep a prefix, is chain.decode: the pass that verifies a block
yields the states from which heads on the target's last layer (mtp-parallel, medusa) predict the next, so one pass
serves both. The rule decides when a draft token is good enough. With p_j the target's distribution after draft token j
- 1 and all earlier ones accepted, draft token x is accepted when
  exact     x = argmax p_j                             their section 3: equals greedy decoding, lossless
  top_k     p_j(x) is among the k largest              their section 5.1; k = 1 is exact
  typical   p_j(x) > min(epsilon, delta exp(-H(p_j)))  a threshold that falls where the target is uncertain
Their section 5.2 has a distance between ordinal values, which words do not have; typical is Medusa's rule for words
(Cai et al. 2024, arXiv:2401.10774, section 2.3.1; H in nats, their delta = sqrt(epsilon)).
The token after the last accepted one is argmax p. All rules but exact change the output, so never use them in a
comparison with plain decoding.

Trees. One pass over the T rows of a tree gives the target's distribution after every row; the result has the rows of
one path from row 0 and one token of the target's own. Greedy: follow the path while a child is the target's argmax.
Sampled: at each row its children are tried one after the other, and a rejected one leaves the target's distribution
changed, so that every emitted token is distributed as a draw from p whatever was drafted. For children drawn without
replacement: accept x with min(1, p(x)/q(x)); rejected: p <- norm(max(p - q, 0)), and x leaves q (multi-round
speculative sampling: Miao et al. 2023, "SpecInfer", arXiv:2305.09781, algorithm 3; without replacement as in Li et al.
2024, "EAGLE", arXiv:2401.15077, appendix). For a deterministic proposal q is 1 at the child being tried: accept with
p(x); rejected: x leaves p. When no child is left the token is drawn from what remains of p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.decoding.session import draw, draw_uniform
from components.decoding.tree import DraftTreeRows


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


@dataclass(frozen=True)
class BlockRule:
    """When a draft token is accepted. epsilon: of typical, in (0, 1); delta is its square root."""

    kind: Literal["exact", "top_k", "typical"] = "exact"
    top_k: int = 1
    epsilon: float = 0.09

    def __post_init__(self) -> None:
        if self.kind == "top_k" and self.top_k < 1:
            raise UserError(f"decoding: top_k is {self.top_k}: keep guesses among at least 1 token")
        if self.kind == "typical" and not 0 < self.epsilon < 1:
            raise UserError(f"decoding: epsilon is {self.epsilon}: take a number between 0 and 1")

    @property
    def lossless(self) -> bool:
        """Whether the output is that of plain greedy decoding."""
        return self.kind == "exact" or (self.kind == "top_k" and self.top_k == 1)


EXACT = BlockRule()


def verify_block(logits: Tensor, draft_tokens: Tensor, rule: BlockRule) -> VerifyResult:
    """Logits [k+1, V], draft_tokens [k] -> the longest prefix of good draft tokens, and the target's next token."""
    num_drafted = draft_tokens.shape[0]
    good = _is_good(logits[:num_drafted].float(), draft_tokens, rule)
    num_accepted = int(good.long().cumprod(0).sum())
    emitted = torch.cat((draft_tokens[:num_accepted], logits[num_accepted : num_accepted + 1].argmax(-1)))
    return VerifyResult(num_accepted, emitted, emitted.tolist())


def _is_good(logits: Tensor, draft_tokens: Tensor, rule: BlockRule) -> Tensor:
    """Whether each draft token is good enough, ignoring the others: [k, V] and [k] -> bool [k]."""
    if rule.lossless:
        return logits.argmax(-1) == draft_tokens
    if rule.kind == "top_k":
        likely = logits.topk(min(rule.top_k, logits.shape[-1]), dim=-1).indices
        return (likely == draft_tokens[:, None]).any(-1)
    log_probs = logits.log_softmax(-1)
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    floor = (math.sqrt(rule.epsilon) * (-entropy).exp()).clamp(max=rule.epsilon)
    return log_probs.exp().gather(-1, draft_tokens[:, None])[:, 0] > floor


class TreeVerifyResult(NamedTuple):
    """The tokens emitted by a round: the draft tokens on the accepted path and one token of the target's own."""

    rows: list[int]  # accepted rows of the pass, row 0 first: accepted + 1
    token_ids: list[int]  # accepted + 1: the accepted draft tokens and the target's token

    @property
    def num_accepted(self) -> int:
        return len(self.rows) - 1


def verify_tree_greedy(logits: Tensor, tree: DraftTreeRows) -> TreeVerifyResult:
    """Logits [T, V] -> the longest path that plain greedy decoding would follow, and its next token."""
    picks = logits.argmax(-1).tolist()
    row_of = {key: row for row, key in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    rows = [0]
    while (child := row_of.get((rows[-1], picks[rows[-1]]))) is not None:
        rows.append(child)
    return TreeVerifyResult(rows, [picks[row] for row in rows])


def verify_tree_sampled(probs: Tensor, tree: DraftTreeRows, rng: torch.Generator) -> TreeVerifyResult:
    """Multi-round rejection sampling down a tree; see the module docstring.

    probs: [T, V] the target's p after each row, after temperature and cuts. rng: a generator on the CPU; one uniform
    number is drawn for every draft token, tried or not.
    """
    children, uniform = tree.children, draw_uniform(len(tree.tokens), torch.device("cpu"), rng).tolist()
    rows = [0]
    while True:
        accepted, residual = _try_children(probs[rows[-1]], tree, rows[-1], children[rows[-1]], uniform)
        if accepted is None:
            last = int(draw(residual[None], rng))
            return TreeVerifyResult(rows, [tree.tokens[row] for row in rows[1:]] + [last])
        rows.append(accepted)


def _try_children(
    p: Tensor, tree: DraftTreeRows, row: int, children: list[int], uniform: list[float]
) -> tuple[int | None, Tensor]:
    """The accepted child or None, and the residual distribution [V] if none is accepted."""
    drawn_from = tree.draft_probs.get(row)
    q = None if drawn_from is None else drawn_from.to(p.device)
    for child in children:
        token = tree.tokens[child]
        at_child = 1.0 if q is None else float(q[token])
        # u * q < p instead of u < p / q: no division, and a draft token of p = 0 is never accepted.
        if uniform[child] * at_child < float(p[token]):
            return child, p
        rest = _without(p, token) if q is None else (p - q).clamp_min_(0.0)
        mass = float(rest.sum())
        # Where p = q up to rounding, the residual is empty and the rejection is a rounding error: p is correct.
        p = rest.div_(mass) if mass > 0 else p
        if q is not None and child != children[-1]:
            q = _without(q, token)
            q.div_(q.sum())
    return None, p


def _without(probs: Tensor, token: int) -> Tensor:
    """A copy that gives `token` nothing; not normalised."""
    probs = probs.clone()
    probs[token] = 0.0
    return probs
