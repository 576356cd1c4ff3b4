"""Sampling: the distribution of logits (temperature, then top-k, then top-p), and the ancestors of a tree's nodes.

The same cuts must apply to the target and to the draft before their ratio is taken, or rejection sampling would not
keep the target's distribution; so both call this one function.

A tree's mask is made of the ancestors of each row: bit sets on the host, one bool tensor for a forward pass. A round
makes several trees of a few dozen nodes, so the bookkeeping for one row must cost next to nothing: one integer per row,
one "or" to add a row, and a handful of numpy calls to unpack all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from components.drafts.interface import Proposal, Sampling
from components.stop_rule import StopRule

LOGITS_AT_ONCE = 1 << 24
"""Of a head over many positions: 64 MiB in float32, and as much again for their softmax."""


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [..., V] -> float32 probabilities [..., V], zero where top-k or top-p cut. Needs temperature > 0.

    top_k keeps exactly k tokens, of equal ones those with the lower id, whatever the batch's shape (torch.topk keeps
    any of them, and bf16 logits are often equal); top_p keeps the smallest set of most likely tokens whose mass reaches
    top_p: the token that crosses the line stays, so the set is never empty.
    """
    assert sampling.temperature > 0, "temperature 0 is greedy: take the argmax"
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        above, equal = logits > least, logits == least
        num_equal = sampling.top_k - above.sum(-1, keepdim=True)
        logits = logits.masked_fill(~(above | (equal & (equal.cumsum(-1) <= num_equal))), float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, indices = probs.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.scatter(-1, indices, ordered.masked_fill(beyond, 0.0))
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


class DraftSampler:
    """Samples the tokens of B proposals side by side and stores the distributions they were drawn from."""

    def __init__(self, draft_ids: Tensor, vocab_size: int, sampling: Sampling, rngs: Sequence[torch.Generator]) -> None:
        """draft_ids: int64 [N], the target ids that draft logits stand for. rngs: one for each of B sequences."""
        self.draft_ids, self.vocab_size, self.sampling, self.rngs = draft_ids, vocab_size, sampling, rngs
        self.greedy = sampling.temperature <= 0
        self.survival = [1.0] * len(rngs)  # of each chain, where a rule may stop it
        self.num_read = 0 if sampling.stop is None else sampling.stop.num_read
        self.length: int | None = None  # of the chains, once the rule has ended them; one for all (stop_rule.py)
        self.tokens: list[Tensor] = []  # of every step, int64 [B]
        self.probs: list[Tensor] = []  # of every step, [B, V]

    @property
    def reads_confidence(self) -> bool:
        """Whether a decision of the rule hangs on the confidence of the next token."""
        return len(self.tokens) < self.num_read

    @property
    def scaled(self) -> bool:
        """Whether `sample` needs logits as trained; otherwise only their order."""
        return not self.greedy or self.reads_confidence

    @property
    def ended(self) -> bool:
        """Whether the rule has ended the chains: no further pass is needed."""
        return self.length is not None

    def sample(self, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Sample the next draft token of each, int64 [B], from logits [B, N]; see `scaled`.

        confidence: [B], for the stop rule, of a drafter that has a head for it; it must not know the token to be drawn.
        Chains that the rule has ended draw nothing from their generators; the token is a filler, never proposed.
        """
        if self.sampling.stop is not None:
            self._apply(self.sampling.stop, logits, confidence)
        if self.greedy or (self.length is not None and self.length <= len(self.tokens)):
            choice = logits.argmax(-1)
        else:
            probs = probabilities(logits, self.sampling)
            # The generators live on the CPU, so that a seed means the same tokens on every device.
            rows = zip(probs.cpu(), self.rngs, strict=True)
            choice = torch.cat([torch.multinomial(row, 1, generator=rng) for row, rng in rows]).to(logits.device)
            every_token = torch.zeros(len(probs), self.vocab_size, device=probs.device)
            self.probs.append(every_token.index_copy_(1, self.draft_ids, probs))
        token = self.draft_ids.index_select(0, choice)
        self.tokens.append(token)
        return token

    def _apply(self, rule: StopRule, logits: Tensor, confidence: Tensor | None) -> None:
        """End the chains where the rule ends them before or after the draft token of these logits, [B, N]."""
        step = len(self.tokens)
        if self.reads_confidence:
            confidences = (confidence_of(logits) if confidence is None else confidence).tolist()
            pairs = zip(self.survival, confidences, strict=True)
            self.survival = [rule.survival(step, before, of_token) for before, of_token in pairs]
        self.length = rule.end_at(step, sum(self.survival) / len(self.survival))

    def tokens_of_each(self) -> Sequence[Sequence[Tensor]]:
        """The tokens sampled so far, for each sequence a list of int64 [1]."""
        if len(self.rngs) == 1:
            return [self.tokens]
        return list(zip(*(tokens.split(1) for tokens in self.tokens), strict=True)) or [()] * len(self.rngs)

    def proposals(self) -> list[Proposal]:
        """The tokens sampled so far, as B proposals."""
        if not self.tokens:
            none = torch.empty(0, dtype=torch.int64, device=self.draft_ids.device)
            return [Proposal(none, None) for _ in self.rngs]
        chains = torch.cat(self.tokens).view(len(self.tokens), -1)[: self.length].unbind(1)
        if not self.probs:
            return [Proposal(chain, None) for chain in chains]
        return [Proposal(*parts) for parts in zip(chains, torch.stack(self.probs, 1)[:, : self.length], strict=True)]


def most_likely(logits: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row and its confidence: [..., N] -> int64 [...], float32 [...]."""
    return draft_ids[logits.argmax(-1)], confidence_of(logits)


def most_likely_at(head: Callable[[Tensor], Tensor], states: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
    """As `most_likely` of the head's logits at states [..., H], which never exist for all of them at once."""
    rows = states.flatten(0, -2).split(max(1, LOGITS_AT_ONCE // len(draft_ids)))
    tokens, confidence = zip(*(most_likely(head(some), draft_ids) for some in rows), strict=True)
    return torch.cat(tokens).view(states.shape[:-1]), torch.cat(confidence).view(states.shape[:-1])


def confidence_of(logits: Tensor) -> Tensor:
    """The probability of the likeliest token at temperature 1: [..., N] -> float32 [...].

    At one row a drafter is bound by the number of operations: these two take a tenth of logsumexp's time (a CPU, 2048
    tokens).
    """
    return logits.softmax(-1, dtype=torch.float32).amax(-1)


def ancestor_sets(parents: Sequence[int]) -> list[int]:
    """The set of each row and its ancestors, as the bits of an integer. Parents come first; a parent of -1 is none."""
    sets: list[int] = []
    for row, parent in enumerate(parents):
        sets.append(1 << row | (sets[parent] if parent >= 0 else 0))
    return sets


def as_mask(sets: Sequence[int], size: int) -> Tensor:
    """Bit sets over numbers below `size` -> bool [sets, size] on the CPU: true where set i contains number j."""
    width = (size + 7) // 8
    packed = np.frombuffer(b"".join(bits_of_row.to_bytes(width, "little") for bits_of_row in sets), np.uint8)
    bits = np.unpackbits(packed.reshape(len(sets), width), axis=1, count=size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


@final
class Ancestry:
    """The ancestors of every tree node. Nodes are numbered from 0 in the order they are added; -1 is the root."""

    def __init__(self) -> None:
        self.depths: list[int] = []  # of every node, 1: child of the root
        self.sets: list[int] = []  # of every node: itself and its ancestors

    def add(self, parents: Sequence[int]) -> int:
        """Add one node for each parent; all must have the same depth, which is returned."""
        before = len(self.depths)
        depths = {1 if parent < 0 else self.depths[parent] + 1 for parent in parents}
        assert len(depths) == 1 and max(parents) < before, "nodes are added a level at a time, after their parents"
        self.sets += [1 << before + i | (self.sets[parent] if parent >= 0 else 0) for i, parent in enumerate(parents)]
        self.depths += [*depths] * len(parents)
        return self.depths[-1]

    def visible(self, first: int = 0) -> Tensor:
        """Which of all M nodes the nodes `first`.. see (ancestors and themselves): bool [M - first, M], CPU."""
        return as_mask(self.sets[first:], len(self.sets))
