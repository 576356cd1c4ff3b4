"""Ranking of drafters: method, draft vocabulary and tree budget are chosen by the same model as depth.

A contender is a drafter in one setting at its chosen depth. All share the prompts, and the processes and plain baseline
where one measurement timed them, and are drawn together: P(best) and regret are paired. The rule is that of depths: the
smallest (fewest draft tokens to verify, then the smallest draft vocabulary) that is as good as the best (regret.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.speedup.bootstrap import Estimate
from components.speedup.candidate import RankedDrafter
from components.speedup.regret import losses, near_best, p_best


class Contender(NamedTuple):
    """One drafter in one setting, to be ranked. speedup: at its chosen depth, 1 at depth 0."""

    draft_key: str
    method: str
    depth_k: int
    tree_budget: int | None
    draft_vocab: int | None
    speedup: Estimate
    verdict: str


def rank(contenders: Sequence[Contender], tolerance: float, confidence: float) -> list[RankedDrafter]:
    """Rank by least expected loss; exactly one is chosen, of those worth using if there are any."""
    draws = np.stack([e.speedup.draws for e in contenders], axis=1)
    wins, regret = p_best(draws), losses(draws).mean(axis=0)
    bounds = [e.speedup.interval() for e in contenders]
    eligible = [i for i, e in enumerate(contenders) if e.verdict == "use"] or list(range(len(contenders)))
    near_best_indices = [eligible[i] for i in near_best(draws[:, eligible], tolerance, confidence)]
    best = min(near_best_indices, key=lambda i: (*_size(contenders[i]), regret[i], contenders[i].draft_key))
    order = sorted(range(len(contenders)), key=lambda i: (regret[i], contenders[i].draft_key))
    return [
        RankedDrafter(
            draft_key=contenders[i].draft_key,
            method=contenders[i].method,
            depth_k=contenders[i].depth_k,
            tree_budget=contenders[i].tree_budget,
            draft_vocab=contenders[i].draft_vocab,
            speedup_pred=contenders[i].speedup.value,
            pred_lo=bounds[i][0],
            pred_hi=bounds[i][1],
            p_best=float(wins[i]),
            regret=float(regret[i]),
            chosen=i == best,
        )
        for i in order
    ]


def _size(contender: Contender) -> tuple[int, float]:
    """(draft tokens to verify, draft vocabulary); an unknown vocabulary counts as the largest."""
    num_drafted = contender.depth_k if contender.tree_budget is None else contender.tree_budget
    return num_drafted, float("inf") if contender.draft_vocab is None else contender.draft_vocab
