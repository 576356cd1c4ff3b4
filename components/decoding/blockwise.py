"""Blockwise parallel decoding: acceptance rules for a block of draft tokens (Stern et al. 2018, arXiv:1811.03115).

Their loop, predict k tokens from one state, verify them all in one pass, keep a prefix, is chain.decode: the pass that
verifies a block yields the states from which heads on the target's last layer (mtp-parallel, medusa) predict the next,
so one pass serves both. The rule decides when a draft token is good enough. With p_j the target's distribution after
draft token j - 1 and all earlier ones accepted, draft token x is accepted when
  exact     x = argmax p_j                             their section 3: equals greedy decoding, lossless
  top_k     p_j(x) is among the k largest              their section 5.1; k = 1 is exact
  typical   p_j(x) > min(epsilon, delta exp(-H(p_j)))  a threshold that falls where the target is uncertain
Their section 5.2 has a distance between ordinal values, which words do not have; typical is Medusa's rule for words
(Cai et al. 2024, arXiv:2401.10774, section 2.3.1; H in nats, their delta = sqrt(epsilon)).
The token after the last accepted one is argmax p. All rules but exact change the output, so never use them in a
comparison with plain decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from components.contract import UserError
from components.decoding.verification import VerifyResult


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
