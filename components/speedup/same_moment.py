"""Predictions for the very prompts that an arm decoded, with step costs of the same moment.

They test the model, not the state of the machine: where the end-to-end measurement also timed the phases of its arms,
these costs are used, else those of the choice of depth. End to end often runs fewer prompts; only AL depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.rows import CostCell
from components.speedup.costs import Setting, cost_table, round_cost
from components.speedup.policy import MeasuredArm, Policy


def predictions_of(policy: Policy, cells: Sequence[CostCell]) -> list[float | None]:
    """The predicted speedup of each of policy.arms; None for a tree, at depth 0, and without maps."""
    ratios: dict[tuple[str, int, str], dict[int, float]] = {}
    predictions: list[float | None] = []
    for arm in policy.arms:
        if arm.tree_budget is not None or arm.depth_k == 0 or arm.al_replayed is None:
            predictions.append(None)  # trees are not replayed by prompt, and depth 0 has no prediction
            continue
        key = (arm.draft_key, arm.batch_size, arm.dtype)
        if key not in ratios:
            ratios[key] = _round_over_plain(cells, *key)
        ratio = ratios[key].get(arm.depth_k)
        predictions.append(
            arm.al_replayed / ratio if ratio is not None else _predict_by_first_costs(policy, arm, arm.al_replayed)
        )
    return predictions


def _round_over_plain(cells: Sequence[CostCell], draft_key: str, batch_size: int, dtype: str) -> dict[int, float]:
    """Depth -> time of a round over a plain step, for completely timed depths; {} without any."""
    drafter_cells = [
        c
        for c in cells
        if (c.batch_size, c.dtype, c.tree_budget) == (batch_size, dtype, None) and c.draft_key in (draft_key, "")
    ]
    timed = {phase: {c.depth_k for c in drafter_cells if c.phase == phase} for phase in ("target_step", "verify")}
    drafted = {c.depth_k for c in drafter_cells if c.phase == "draft" and c.draft_key == draft_key}
    if not timed["target_step"] or not (timed["verify"] & drafted) - {0}:
        return {}
    table = cost_table(drafter_cells, Setting(draft_key, batch_size))
    plain, cycle = round_cost(table.times, table.host_measured)
    return {depth: float(cycle[i] / plain) for i, depth in enumerate(table.depths) if depth}


def _predict_by_first_costs(policy: Policy, arm: MeasuredArm, length: float) -> float | None:
    key = (arm.draft_key, arm.workload, arm.depth_k, arm.batch_size)
    row = next((e for e in policy.evals if (e.draft_key, e.workload, e.depth_k, e.batch_size) == key), None)
    return row.speedup_pred * length / row.al if row is not None else None
