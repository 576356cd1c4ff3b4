"""What follows from the predictions alone: the winner and the verdict, before anything was measured end to end."""

from __future__ import annotations

from collections.abc import Sequence

from components.rows import QualityFlag
from components.speedup.evaluate import Rule
from components.speedup.policy import ALL, Policy, faults_of
from components.speedup.ranking import Entrant, rank


def conclude(policy: Policy, entrants: Sequence[Entrant], rule: Rule) -> None:
    """Enter ranking, winner, verdict and reasons into the policy.

    entrants: every drafter in every setting, over all workloads, at the smallest batch size. The winner is a chain,
    because chains are what is published and served; a tree that is predicted to beat it is said in a flag. Where
    nothing but trees was measured, the best of them wins.
    """
    policy.ranking = rank(entrants, rule.tolerance, rule.confidence)
    # A drafter that only trees were mapped of has no choice of a depth, also where no tree of it is worth drafting.
    chosen_for = {c.draft_key for c in policy.choices if c.workload == ALL}
    able = [e for e in entrants if e.draft_key in chosen_for]
    chains = [e for e in able if e.tree_budget is None] or able
    # A drafter whose numbers are at fault wins only if every one is.
    sound = [e for e in chains if not faults_of(policy, e.draft_key)] or chains
    first = next(c for c in rank(sound, rule.tolerance, rule.confidence) if c.chosen)
    pooled = [c for c in policy.choices if (c.draft_key, c.workload) == (first.draft_key, ALL)]
    best = min(pooled, key=lambda c: c.batch_size)
    faults = faults_of(policy, best.draft_key)
    policy.verdict = "invalid" if faults else best.verdict
    policy.reasons = [f"{f.method} {f.code}: {f.detail}" for f in faults] or list(best.reasons)
    if best.depth_k > 0:  # worth using, or the one to try where too little was measured for a verdict
        policy.winner = {"draft_key": best.draft_key, "method": best.method, "depth_k": best.depth_k}
    top = next(c for c in policy.ranking if c.chosen)
    if top.tree_budget is not None and first.tree_budget is None:
        detail = (
            f"a tree of {top.tree_budget} guesses, depth {top.depth_k}, is predicted to be {top.speedup_pred:.2f}x "
            f"[{top.pred_lo:.2f}, {top.pred_hi:.2f}]; the best chain is depth {best.depth_k}, {best.speedup_pred:.2f}x"
        )
        policy.flags.append(
            QualityFlag(
                policy.selection_id,
                top.draft_key,
                top.method,
                "tree_predicted_faster",
                "info",
                top.speedup_pred,
                detail,
            )
        )
