"""Acceptance length on held-out answers: real drafting from every position, each chain fed its own draft tokens.

The loss falls long after drafting stops improving, and teacher-forced acceptance is too optimistic, so checkpoints are
evaluated by what decoding would accept. AL = 1 + sum_k P(the first k + 1 draft tokens are all correct), bonus token
included; the probability at depth k is over the positions that a chain of that depth can reach (M_k of masks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from components.data.features import Example
from components.drafts.draft import AbstractDraft
from components.drafts.masks import reachable
from components.targets.model import AbstractTarget

GREEDY_SHARE = 0.9  # argmax share from which an answer counts as greedy; bf16 features flip a few


@dataclass
class Tally:
    """Counts of evaluated and of accepted positions at each depth."""

    accepted: list[int]
    evaluated: list[int]

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(
            accepted / evaluated for accepted, evaluated in zip(self.accepted, self.evaluated, strict=True) if evaluated
        )


@dataclass
class HeldOut:
    """Tallies over all answers and per workload."""

    total: Tally
    by_workload: dict[str, Tally] = field(default_factory=dict)


def greedy_examples(target: AbstractTarget, examples: Sequence[Example]) -> list[Example]:
    """The answers sampled at temperature 0 (all, if none was): only there is the next token the target's argmax."""
    greedy = [example for example in examples if _argmax_share(target, example) >= GREEDY_SHARE]
    return greedy or list(examples)


def measure(draft: AbstractDraft, examples: Sequence[Example], depth: int, device: torch.device) -> HeldOut:
    """Draft from every position of every example to `depth` and count what would be accepted."""
    held_out = HeldOut(Tally([0] * depth, [0] * depth))
    for example in examples:
        ids = example.ids.to(device)
        draft_tokens = draft.propose_at_every_position(
            ids, example.taps.to(device).float(), example.last.to(device).float(), depth
        )
        accepted, evaluated = count_accepted(draft_tokens, ids, example.mask.to(device))
        for tally in (
            held_out.total,
            held_out.by_workload.setdefault(example.workload, Tally([0] * depth, [0] * depth)),
        ):
            tally.accepted = [a + b for a, b in zip(tally.accepted, accepted, strict=True)]
            tally.evaluated = [a + b for a, b in zip(tally.evaluated, evaluated, strict=True)]
    return held_out


def count_accepted(draft_tokens: Tensor, ids: Tensor, mask: Tensor) -> tuple[list[int], list[int]]:
    """Accepted and evaluated counts per depth: draft_tokens int64 [T-1, K] (row t: x_{t+2}, ...), ids and mask [T]."""
    num_roots, depth = draft_tokens.shape
    evaluated = reachable(mask[None], depth)[:, 0, :num_roots]  # [K, T-1]
    next_columns = torch.arange(num_roots, device=ids.device)[:, None] + 2 + torch.arange(depth, device=ids.device)
    correct = (draft_tokens == ids[next_columns.clamp(max=ids.numel() - 1)]).T
    accepted = correct.cummin(0).values & evaluated
    return accepted.sum(1).tolist(), evaluated.sum(1).tolist()


@torch.no_grad()
def _argmax_share(target: AbstractTarget, example: Example) -> float:
    """Share of the answer tokens that are the target's most likely token."""
    last = example.last.to(target.device, target.dtype)[None]
    best = target.unembed(target.final_norm(last))[0].argmax(-1)
    answers = example.mask[1:].to(best.device)
    matches = (best[:-1] == example.ids[1:].to(best.device)) & answers
    return float(matches.sum() / answers.sum().clamp(min=1))
