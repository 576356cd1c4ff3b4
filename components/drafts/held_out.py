"""Acceptance length on held-out answers: real drafting from every position, each chain fed its own guesses.

The loss falls long after drafting has stopped getting better, and teacher-forced acceptance flatters, so checkpoints
are judged by what decoding would keep. AL = 1 + sum_k P(the first k + 1 guesses are all right), bonus token included;
the probability at depth k is over the positions where a chain of that depth can be judged (M_k of masks.py).
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

GREEDY_SHARE = 0.9  # answers whose tokens are the target's argmax this often were written greedily (bf16 features err)


@dataclass
class Tally:
    """Counts of judged positions and of those kept, for each depth."""

    kept: list[int]
    judged: list[int]

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(kept / judged for kept, judged in zip(self.kept, self.judged, strict=True) if judged)


@dataclass
class HeldOut:
    """Tallies of all answers and of each workload."""

    total: Tally
    by_workload: dict[str, Tally] = field(default_factory=dict)


def greedy_examples(target: AbstractTarget, examples: Sequence[Example]) -> list[Example]:
    """The answers written at temperature 0 (all, if none was): only there the next token is what a draft must hit."""
    chosen = [example for example in examples if _argmax_share(target, example) >= GREEDY_SHARE]
    return chosen or list(examples)


def measure(draft: AbstractDraft, examples: Sequence[Example], depth: int, device: torch.device) -> HeldOut:
    """Draft from every position of every example to `depth` and count what would be kept."""
    held_out = HeldOut(Tally([0] * depth, [0] * depth))
    for example in examples:
        ids = example.ids.to(device)
        guesses = draft.draft_everywhere(ids, example.taps.to(device).float(), example.last.to(device).float(), depth)
        kept, judged = count(guesses, ids, example.mask.to(device))
        for tally in (
            held_out.total,
            held_out.by_workload.setdefault(example.workload, Tally([0] * depth, [0] * depth)),
        ):
            tally.kept = [a + b for a, b in zip(tally.kept, kept, strict=True)]
            tally.judged = [a + b for a, b in zip(tally.judged, judged, strict=True)]
    return held_out


def count(guesses: Tensor, ids: Tensor, mask: Tensor) -> tuple[list[int], list[int]]:
    """Kept and judged positions at each depth: guesses int64 [T-1, K] (row t: x_{t+2}, ...), ids, mask [T]."""
    num_roots, depth = guesses.shape
    judged = reachable(mask[None], depth)[:, 0, :num_roots]  # [K, T-1]
    ahead = torch.arange(num_roots, device=ids.device)[:, None] + 2 + torch.arange(depth, device=ids.device)
    right = (guesses == ids[ahead.clamp(max=ids.numel() - 1)]).T
    kept = right.cummin(0).values & judged
    return kept.sum(1).tolist(), judged.sum(1).tolist()


@torch.no_grad()
def _argmax_share(target: AbstractTarget, example: Example) -> float:
    """Share of the answer tokens that are the target's most likely token."""
    last = example.last.to(target.device, target.dtype)[None]
    best = target.unembed(target.final_norm(last))[0].argmax(-1)
    answers = example.mask[1:].to(best.device)
    agree = (best[:-1] == example.ids[1:].to(best.device)) & answers
    return float(agree.sum() / answers.sum().clamp(min=1))
