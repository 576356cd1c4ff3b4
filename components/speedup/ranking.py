"""Drafters against each other: method, draft vocabulary and tree budget chosen by the same model as depth.

A candidate is a drafter in one setting at the depth chosen for it. All were measured on the same prompts, and in the
same processes against one plain baseline where one measurement timed them, and are drawn together: P(best) and regret
are paired. The rule is that of depths: the smallest (fewest guesses to verify, then the smallest draft vocabulary) that
is as good as the best (regret.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.speedup.bootstrap import Estimate
from components.speedup.candidate import Candidate
from components.speedup.regret import losses, near_best, p_best


class Entrant(NamedTuple):
    """One drafter in one setting, before it is compared. speedup: at its chosen depth, 1 where that is 0."""

    draft_key: str
    method: str
    depth_k: int
    tree_budget: int | None
    draft_vocab: int | None
    speedup: Estimate
    verdict: str


def rank(entrants: Sequence[Entrant], tolerance: float, confidence: float) -> list[Candidate]:
    """The candidates, the least expected loss first; exactly one is chosen, of those worth using if there are any."""
    draws = np.stack([e.speedup.draws for e in entrants], axis=1)
    wins, regret = p_best(draws), losses(draws).mean(axis=0)
    bounds = [e.speedup.interval() for e in entrants]
    able = [i for i, e in enumerate(entrants) if e.verdict == "use"] or list(range(len(entrants)))
    near = [able[i] for i in near_best(draws[:, able], tolerance, confidence)]
    chosen = min(near, key=lambda i: (*_size(entrants[i]), regret[i], entrants[i].draft_key))
    order = sorted(range(len(entrants)), key=lambda i: (regret[i], entrants[i].draft_key))
    return [
        Candidate(
            draft_key=entrants[i].draft_key,
            method=entrants[i].method,
            depth_k=entrants[i].depth_k,
            tree_budget=entrants[i].tree_budget,
            draft_vocab=entrants[i].draft_vocab,
            speedup_pred=entrants[i].speedup.value,
            pred_lo=bounds[i][0],
            pred_hi=bounds[i][1],
            p_best=float(wins[i]),
            regret=float(regret[i]),
            chosen=i == chosen,
        )
        for i in order
    ]


def _size(entrant: Entrant) -> tuple[int, float]:
    """Guesses to verify, then draft vocabulary; where nobody told, that counts as the largest."""
    guesses = entrant.depth_k if entrant.tree_budget is None else entrant.tree_budget
    return guesses, float("inf") if entrant.draft_vocab is None else entrant.draft_vocab
