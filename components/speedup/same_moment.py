"""What the model predicts for the very prompts that an arm decoded, with costs of the same moment.

A prediction is tested for the model, not for the mood of the machine: where the end-to-end measurement timed the phases
of its arms beside them, its own costs are used, else those that the depth was chosen by. Prompts differ, and end to end
often runs fewer of them; only AL depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.rows import CostCell
from components.speedup.costs import Setting, cost_table, round_cost
from components.speedup.policy import MeasuredArm, Policy


def predictions_of(policy: Policy, cells: Sequence[CostCell]) -> list[float | None]:
    """The prediction for each of policy.arms; None for a tree, for a drafter that is off, and without maps."""
    ratios: dict[tuple[str, int, str], dict[int, float]] = {}
    found: list[float | None] = []
    for arm in policy.arms:
        if arm.tree_budget is not None or arm.depth_k == 0 or arm.al_replayed is None:
            found.append(None)  # a tree was not replayed prompt by prompt, and what is off was not predicted
            continue
        key = (arm.draft_key, arm.batch_size, arm.dtype)
        if key not in ratios:
            ratios[key] = _round_over_plain(cells, *key)
        ratio = ratios[key].get(arm.depth_k)
        found.append(arm.al_replayed / ratio if ratio is not None else _by_first_costs(policy, arm, arm.al_replayed))
    return found


def _round_over_plain(cells: Sequence[CostCell], draft_key: str, batch_size: int, dtype: str) -> dict[int, float]:
    """Depth -> time of a round over a plain step, of the depths that were timed whole; {} where there are none."""
    mine = [
        c
        for c in cells
        if (c.batch_size, c.dtype, c.tree_budget) == (batch_size, dtype, None) and c.draft_key in (draft_key, "")
    ]
    timed = {phase: {c.depth_k for c in mine if c.phase == phase} for phase in ("target_step", "verify")}
    drafted = {c.depth_k for c in mine if c.phase == "draft" and c.draft_key == draft_key}
    if not timed["target_step"] or not (timed["verify"] & drafted) - {0}:
        return {}
    table = cost_table(mine, Setting(draft_key, batch_size))
    plain, cycle = round_cost(table.times, table.host_measured)
    return {depth: float(cycle[i] / plain) for i, depth in enumerate(table.depths) if depth}


def _by_first_costs(policy: Policy, arm: MeasuredArm, length: float) -> float | None:
    for e in policy.evals:
        if (e.draft_key, e.workload, e.depth_k, e.batch_size) == (
            arm.draft_key,
            arm.workload,
            arm.depth_k,
            arm.batch_size,
        ):
            return e.speedup_pred * length / e.al
    return None
