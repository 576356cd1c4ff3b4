"""Winner and verdict by the predictions alone, before any end-to-end measurement."""

from __future__ import annotations

from collections.abc import Sequence

from components.rows import ALL
from components.speedup.evaluate import Rule
from components.speedup.flags import QualityIssue
from components.speedup.policy import Policy, Winner, faults_of
from components.speedup.ranking import Contender, rank


def conclude(policy: Policy, contenders: Sequence[Contender], rule: Rule) -> None:
    """Enter ranking, winner, verdict and reasons into the policy.

    contenders: every drafter in every setting, over all workloads, at its smallest batch size. The winner is a chain,
    since chains are published and served; a tree that is predicted to beat it raises a flag. Where only trees were
    measured, the best of them wins.
    """
    policy.ranking = rank(contenders, rule.tolerance, rule.confidence)
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
    policy.verdict = "invalid" if faults else best.verdict
    policy.reasons = [f"{f.method} {f.code}: {f.detail}" for f in faults] or list(best.reasons)
    if best.depth_k > 0:  # worth using; or worth a try, where too little was measured for a verdict
        policy.winner = Winner(best.draft_key, best.method, best.depth_k)
    top = next(c for c in policy.ranking if c.chosen)
    if top.tree_budget is not None and winner.tree_budget is None:
        detail = (
            f"a tree of {top.tree_budget} guesses, depth {top.depth_k}, is predicted to be {top.speedup_pred:.2f}x "
            f"[{top.pred_lo:.2f}, {top.pred_hi:.2f}]; the best chain is depth {best.depth_k}, {best.speedup_pred:.2f}x"
        )
        issue = QualityIssue("tree_predicted_faster", "info", top.speedup_pred, detail)
        policy.flags.append(issue.to_flag(policy.selection_id, top.draft_key, top.method))
