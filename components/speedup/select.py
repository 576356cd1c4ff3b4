"""Ranking of drafters: method, draft vocabulary and tree budget are chosen by the same model as depth.

A contender is a drafter in one setting at its chosen depth. All share the prompts, and the processes and plain baseline
where one measurement timed them, and are drawn together: P(best) and regret are paired. The rule is that of depths: the
smallest (fewest draft tokens to verify, then the smallest draft vocabulary) that is as good as the best (`near_best`).
Winner and verdict are those of the predictions alone, before any end-to-end measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from components.policy import Policy, RankedDrafter, Winner, extended, faults_of
from components.rows import ALL
from components.speedup.bootstrap import Estimate, losses, near_best, p_best
from components.speedup.prediction.flags import QualityIssue
from components.speedup.prediction.predict import Rule


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


def conclude(policy: Policy, contenders: Sequence[Contender], rule: Rule) -> Policy:
    """The policy with its ranking, winner, verdict and reasons.

    contenders: every drafter in every setting, over all workloads, at its smallest batch size. The winner is a chain,
    since chains are published and served; a tree that is predicted to beat it raises a flag. Where only trees were
    measured, the best of them wins.
    """
    ranking = rank(contenders, rule.tolerance, rule.confidence)
    # A drafter with maps of trees alone has no chosen depth, whether or not a tree is worth drafting.
    chosen_for = {c.draft_key for c in policy.choices if c.workload == ALL}
    eligible = [e for e in contenders if e.draft_key in chosen_for]
    chains = [e for e in eligible if e.tree_budget is None] or eligible
    # Drafters with faults are excluded, unless all have faults.
    without_faults = [e for e in chains if not faults_of(policy, e.draft_key)] or chains
    winner = next(c for c in rank(without_faults, rule.tolerance, rule.confidence) if c.chosen)
    winner_choices = [c for c in policy.choices if (c.draft_key, c.workload) == (winner.draft_key, ALL)]
    best = min(winner_choices, key=lambda c: c.batch_size)
    faults = faults_of(policy, best.draft_key)
    policy = replace(
        policy,
        ranking=ranking,
        verdict="invalid" if faults else best.verdict,
        reasons=[f"{f.method} {f.code}: {f.detail}" for f in faults] or list(best.reasons),
        # Above 0 it is worth using; or worth a try, where too little was measured for a verdict.
        winner=Winner(best.draft_key, best.method, best.depth_k) if best.depth_k > 0 else None,
    )
    top = next(c for c in ranking if c.chosen)
    if top.tree_budget is not None and winner.tree_budget is None:
        detail = (
            f"a tree of {top.tree_budget} guesses, depth {top.depth_k}, is predicted to be {top.speedup_pred:.2f}x "
            f"[{top.pred_lo:.2f}, {top.pred_hi:.2f}]; the best chain is depth {best.depth_k}, {best.speedup_pred:.2f}x"
        )
        issue = QualityIssue("tree_predicted_faster", "info", top.speedup_pred, detail)
        policy = extended(policy, flags=[issue.to_flag(policy.selection_id, top.draft_key, top.method)])
    return policy
