"""Are these tokens draws from the target? A chi-square test of a whole sampled text against exact distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from learnable_target import PROMPT
from torch import Tensor
from without_cache import states

from components.drafts.interface import Branches, Proposal

BINS = 12


@dataclass
class Watched:
    """A proposer and all that it said."""

    inner: Any
    said: list[Proposal] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)  # [N] logits of the first guess of every tree

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, *asked: Any) -> Proposal:
        self.said.append(self.inner.propose(*asked))
        return self.said[-1]

    def begin(self, *asked: Any) -> Branches:
        branches: Branches = self.inner.begin(*asked)
        self.roots.append(branches.root)
        return branches


def p_value(model: Any, tokens: Sequence[int], drafted_from: Tensor) -> float:
    """Chi-square of the tokens against the target's exact distributions, one of which every token must be a draw from.

    drafted_from: [T, V] what the drafter drew the guess at each position from, zeros where it made none. The place of a
    token in its cumulative distribution is uniform whatever the order of the vocabulary; q / p is the order in which
    accepting or replacing guesses by a wrong rule shows most.
    """
    logits, _, _ = states(model, [*PROMPT, *tokens])
    p = logits[len(PROMPT) - 1 : -1].softmax(-1)
    order = torch.where(drafted_from.sum(1, keepdim=True) > 0, drafted_from / p, p)
    said = torch.tensor(tokens)[:, None]
    mine, below = p.gather(1, said), (p * (order > order.gather(1, said))).sum(1, keepdim=True)
    ties = (p * (order == order.gather(1, said))).sum(1, keepdim=True)
    place = below + ties * torch.rand(mine.shape, generator=torch.Generator().manual_seed(5))
    counts, each = torch.histc(place, BINS, 0.0, 1.0), len(tokens) / BINS
    statistic = ((counts - each).square() / each).sum()
    return float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2), statistic / 2))
